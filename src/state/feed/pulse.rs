//! [`Pulse`]: wakes a reader that has read everything when a feed may have new rows.
//!
//! Three things wake the reader: appends of its own process, a watch for appends of other processes, and a poll for
//! lost hints. It then reads the pulse of the feed, one key that every append moves. The pulse says which shards may
//! have rows, and the reader reads no others. So an idle reader makes one short read per interval, however many shards
//! there are.

use std::{sync::Arc, time::Duration};

use futures_util::future::{BoxFuture, pending};
use tokio::sync::watch;

use super::RawFeed;
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
    },
    state::{
        context::Context,
        keys::{FeedId, Lanes, PulseValue},
        polls::Poll,
    },
    store::{Isolation, Transaction},
};

/// After a watch has fired, the reader sets no new one until its own process has appended nothing for this long. Under steady local
/// load it sets at most one watch per interval.
const QUIET: Duration = Duration::from_millis(10);

/// The default interval of the poll for rows without a hint.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The name of watches in reports of trouble.
const WATCH: &str = "watch of a feed";

/// Waits for new rows of a feed.
pub(crate) struct Pulse {
    context: Arc<Context>,
    id: FeedId,
    /// The interval of the poll for rows without a hint.
    poll_interval: Duration,
    /// The version of the last append of this process.
    appends: watch::Receiver<u64>,
    /// Completes when the watch fires, with false if it has failed; `None` if none is set.
    fired: Option<BoxFuture<'static, bool>>,
    /// Whether the next poll sets a watch.
    sets_watch: bool,
    /// Whether the next poll probably finds rows.
    expects_rows: bool,
    /// The time of the last watch.
    watched: Option<Duration>,
    /// The time of the last append of this process.
    appended: Option<Duration>,
    /// The pulse when everything was read.
    known: Option<PulseValue>,
    /// The version at which everything was read.
    seen: u64,
    /// The poll that has ended the last wait.
    poll: Option<Poll>,
}

/// The state of a [`Pulse`] that a poll needs.
#[derive(Clone, Copy)]
pub(crate) struct Probe<'a> {
    feed: RawFeed<'a>,
    /// Whether the poll sets a watch.
    sets_watch: bool,
    /// Whether the poll probably finds rows.
    pub expects_rows: bool,
    /// The pulse when everything was read.
    known: Option<&'a PulseValue>,
}

/// The result of a poll, in one transaction.
pub(crate) struct PulseRead {
    pulse: PulseValue,
    version: u64,
    /// The last sequence that the transaction can see.
    last: Sequence,
    /// The lanes of the shards to which rows may have been appended since everything was read.
    moved: Lanes,
    /// The watch, if one was set.
    fired: Option<BoxFuture<'static, bool>>,
}

impl PulseRead {
    /// The lanes of the shards to which rows may have been appended since everything was read.
    pub fn moved(&self) -> Lanes {
        self.moved
    }

    /// The last sequence that the transaction can see.
    pub fn last(&self) -> Sequence {
        self.last
    }

    /// The position up to which everything is read now, if nothing was appended since.
    pub fn unchanged(&self) -> Option<Sequence> {
        self.moved.is_empty().then_some(self.last)
    }
}

/// The cause of a poll.
enum Woken {
    Append,
    Watch,
    /// The watch, which has failed.
    Failure,
    /// The poll is due.
    Pause,
}

impl Pulse {
    pub fn new(context: &Arc<Context>, id: &FeedId) -> Self {
        Self {
            appends: context.signals.appends(),
            context: Arc::clone(context),
            id: id.clone(),
            poll_interval: POLL_INTERVAL,
            fired: None,
            sets_watch: true,
            expects_rows: true,
            watched: None,
            appended: None,
            known: None,
            seen: 0,
            poll: None,
        }
    }

    /// Polls this often for rows without a hint, but not more often than every 10 ms.
    pub fn poll_every(&mut self, interval: Duration) {
        self.poll_interval = interval.max(QUIET);
    }

    pub fn probe(&self) -> Probe<'_> {
        Probe {
            feed: RawFeed::new(&self.context, &self.id),
            sets_watch: self.sets_watch && self.fired.is_none(),
            expects_rows: self.expects_rows,
            known: self.known.as_ref(),
        }
    }

    /// The poll that has ended the last wait, for the next read. `None` if there was none, or if the read sets a watch,
    /// which takes a commit.
    pub fn take_poll(&mut self) -> Option<Poll> {
        let sets_watch = self.probe().sets_watch;
        self.poll.take().filter(|_| !sets_watch)
    }

    /// Adopts the result of a poll after its transaction. `is_end` says whether the transaction has read everything.
    pub fn adopt(&mut self, read: PulseRead, is_end: bool) {
        if read.fired.is_some() {
            self.fired = read.fired;
            self.watched = Some(self.context.env().now());
        }
        if is_end {
            (self.known, self.seen) = (Some(read.pulse), read.version);
        }
        self.expects_rows = !is_end;
    }

    /// Forgets the pulse, because the reader goes on elsewhere, where it may have rows to read.
    pub fn forget(&mut self) {
        self.known = None;
    }

    /// Completes when there may be rows, or when the poll is due. Cancel safe.
    pub async fn wait(&mut self) {
        self.poll = None;
        let is_watching = self.fired.is_some();
        // A watch that was just refused would be refused again.
        let was_refused = self.sets_watch && !is_watching;
        let pause = if is_watching || was_refused { self.poll_interval } else { QUIET };
        let Self { fired, appends, context, poll_interval, seen, poll, .. } = self;
        let env = context.env();
        let woken = tokio::select! {
            () = appended_after(appends, *seen) => Woken::Append,
            changed = async { match &mut *fired { Some(fired) => fired.await, None => pending().await } } => {
                *fired = None;
                if changed {
                    Woken::Watch
                } else {
                    // The watch was refused late: the poll sets it again.
                    tokio::select! {
                        () = appended_after(appends, *seen) => {}
                        () = env.sleep(*poll_interval) => {}
                    }
                    Woken::Failure
                }
            }
            due = context.polls.due(pause) => {
                *poll = Some(due);
                Woken::Pause
            }
        };
        let now = env.now();
        let is_quiet = |since: Option<Duration>| since.is_none_or(|at| now.saturating_sub(at) >= QUIET);
        // A watch that fires soon after an append of this process fires for that append.
        (self.sets_watch, self.expects_rows) = match woken {
            Woken::Append => {
                self.appended = Some(now);
                (false, true)
            }
            Woken::Watch => (is_quiet(self.watched) || is_quiet(self.appended), is_quiet(self.appended)),
            Woken::Failure => (false, false),
            Woken::Pause => (true, false),
        };
    }
}

/// Completes once an append of this process after the version `seen` is known. Cancel safe.
async fn appended_after(appends: &mut watch::Receiver<u64>, seen: u64) {
    // The sender cannot be gone: the shared context owns it.
    drop(appends.wait_for(|version| *version > seen).await);
}

impl Probe<'_> {
    /// Reads to which shards anything was appended, in the transaction that then reads the rows.
    pub async fn read(self, tx: &Transaction) -> Result<PulseRead> {
        let RawFeed { context, id } = self.feed;
        let key = context.keys.pulse(id);
        let (pulse, version) = tokio::try_join!(tx.get(&key, Isolation::Snapshot), tx.read_version())?;
        let pulse = PulseValue::new(pulse);
        let moved = self.known.map_or(Lanes::ALL, |known| pulse.moved_since(known));
        let last = Sequence::last_at(context.config.incarnation, version);
        Ok(PulseRead { pulse, version, last, moved, fired: None })
    }

    /// Logs that there is no watch, so that only the poll finds rows.
    fn complain(&self, error: &Error) {
        self.feed.context.stats.health.complain(self.feed.context.env(), WATCH, error);
    }

    /// Sets a watch, if it is time for one, once everything was read in `tx`. Appends after its read version fire it.
    pub async fn watch(self, tx: &Transaction, read: &mut PulseRead) -> Result<()> {
        if !self.sets_watch {
            return Ok(());
        }
        match tx.watch(&self.feed.context.keys.pulse(self.feed.id)).await {
            Ok(watch) => {
                let (stats, env) = (Arc::clone(&self.feed.context.stats), self.feed.context.env().clone());
                read.fired = Some(Box::pin(async move {
                    let fired = watch.await;
                    fired.inspect_err(|error| stats.health.complain(&env, WATCH, error)).is_ok()
                }));
            }
            Err(error) if error.is_retryable() => return Err(error),
            Err(error) => self.complain(&error),
        }
        Ok(())
    }
}
