//! [`Pulse`]: waits until a feed may have new rows, on behalf of a reader that has read all there were.
//!
//! Three things wake the reader: appends of its own process, watches for those of others, and a poll that makes good what
//! those have missed. Poll and watches look at the pulse of the feed, a few keys that every append moves, and not at its
//! shards: while nothing happens a reader makes one short read per interval, however many shards there are.

use std::{sync::Arc, time::Duration};

use futures_util::future::{BoxFuture, pending, select_all, try_join_all};
use tokio::sync::watch;

use super::RawFeed;
use crate::{
    base::{
        bugs::{Bug, is_on},
        encoding::Sequence,
        error::{Error, Result},
    },
    state::{context::Context, keys::FeedId},
    store::{Isolation, Row, Transaction},
};

/// How long it waits for the notifiers of its own process before it sets watches for those of others. Under steady local load
/// no watch is ever set.
const QUIET: Duration = Duration::from_millis(10);

/// How often it looks for rows that no hint has told of, if nothing else is asked for.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// What is reported of watches.
const WATCH: &str = "watch of a feed";

/// Waits for new rows of a feed.
pub(crate) struct Pulse {
    context: Arc<Context>,
    id: FeedId,
    /// How often to look for rows that no hint has told of.
    pub poll_interval: Duration,
    /// Counts the appends of this process.
    appends: watch::Receiver<u64>,
    /// The watches that are set, if any.
    fired: Option<BoxFuture<'static, bool>>,
    /// Whether no hint has caused the next look.
    is_poll: bool,
    /// The pulse when everything was read.
    known: Option<Vec<Row>>,
}

/// What a look has to know.
#[derive(Clone, Copy)]
pub(crate) struct Probe<'a> {
    feed: RawFeed<'a>,
    /// Whether no hint has caused the look.
    is_poll: bool,
    /// Whether watches are set.
    is_watching: bool,
    /// The pulse when everything was read.
    known: Option<&'a Vec<Row>>,
}

/// What a look has found, in one transaction.
pub(crate) struct PulseRead {
    /// The pulse, unless a hint has caused the look: then it has certainly moved.
    pulse: Option<Vec<Row>>,
    /// The last sequence that the transaction can see, if nothing was appended since everything was read.
    unchanged: Option<Sequence>,
    /// Completes once there may be more, if watches were set; with false if they have failed.
    fired: Option<BoxFuture<'static, bool>>,
}

impl PulseRead {
    /// If nothing was appended since everything was read, up to where everything is read now.
    pub fn unchanged(&self) -> Option<Sequence> {
        self.unchanged
    }
}

impl Pulse {
    /// The pulse of the feed `id`, for a reader that is about to begin.
    pub fn new(context: &Arc<Context>, id: &FeedId) -> Self {
        Self {
            appends: context.signals.appends(),
            context: Arc::clone(context),
            id: id.clone(),
            poll_interval: POLL_INTERVAL,
            fired: None,
            is_poll: true,
            known: None,
        }
    }

    /// Begins a look: what is appended from now on is a new hint.
    pub fn begin(&mut self) {
        self.appends.mark_unchanged();
    }

    /// What the look has to know.
    pub fn probe(&self) -> Probe<'_> {
        let feed = RawFeed::new(&self.context, &self.id);
        let (is_watching, known) = (self.fired.is_some(), self.known.as_ref());
        Probe { feed, is_poll: self.is_poll, is_watching, known }
    }

    /// Takes in what was found, once the transaction is over. `is_end` says whether everything was read in it.
    pub fn adopt(&mut self, look: PulseRead, is_end: bool) {
        self.fired = look.fired.or(self.fired.take());
        if is_end {
            self.known = look.pulse.or(self.known.take());
        } else {
            self.is_poll = false;
        }
    }

    /// The reader goes on elsewhere, where it may have something to read.
    pub fn forget(&mut self) {
        self.known = None;
    }

    /// Completes when there may be rows, or it is time to look. Cancel safe.
    pub async fn wait(&mut self) {
        // Where watches were just refused, asking again at once would not help.
        let is_watching = self.fired.is_some();
        let pause =
            if is_watching || self.is_poll { self.poll_interval } else { QUIET.min(self.poll_interval) };
        let pause = if is_on(Bug::TailWithoutPoll) && is_watching { Duration::MAX } else { pause };
        let Self { fired, appends, context, poll_interval, is_poll, .. } = self;
        let env = context.env();
        *is_poll = tokio::select! {
            // A sender that is gone cannot be: the context that owns it is shared.
            _ = appends.changed() => false,
            changed = async { match &mut *fired { Some(fired) => fired.await, None => pending().await } } => {
                *fired = None;
                if !changed {
                    // Refused as late as this: the poll goes on, and asks again.
                    tokio::select! {
                        _ = appends.changed() => {}
                        () = env.sleep(*poll_interval) => {}
                    }
                }
                false
            }
            () = env.sleep(pause) => true,
        };
    }
}

impl Probe<'_> {
    /// Looks whether anything was appended, in the transaction that then reads it.
    pub async fn look(self, tx: &Transaction) -> Result<PulseRead> {
        let mut look = PulseRead { pulse: None, unchanged: None, fired: None };
        if self.is_poll {
            let pulse = tx.all_rows(self.feed.context.keys.pulses(self.feed.id), Isolation::Snapshot).await?;
            if self.known == Some(&pulse) {
                look.unchanged = Some(self.feed.last_readable(tx).await?);
            }
            look.pulse = Some(pulse);
        }
        Ok(look)
    }

    /// Logs that there is no watch, so that the poll has to do.
    fn complain(&self, error: &Error) {
        self.feed.context.stats.health.complain(self.feed.context.env(), WATCH, error);
    }

    /// Sets watches, unless there are some, once everything was read in `tx`. What comes after its read version fires them.
    pub async fn watch(self, tx: &Transaction, look: &mut PulseRead) -> Result<()> {
        if look.pulse.is_none() || self.is_watching {
            return Ok(());
        }
        let keys: Vec<_> = self.feed.context.keys.pulse_keys(self.feed.id).collect();
        match try_join_all(keys.iter().map(|key| tx.watch(key))).await {
            Ok(watches) => {
                let (stats, env) = (Arc::clone(&self.feed.context.stats), self.feed.context.env().clone());
                look.fired = Some(Box::pin(async move {
                    let (fired, _, _others) = select_all(watches).await;
                    fired.inspect_err(|error| stats.health.complain(&env, WATCH, error)).is_ok()
                }));
            }
            Err(error) if error.is_retryable() => return Err(error),
            Err(error) => self.complain(&error),
        }
        Ok(())
    }
}
