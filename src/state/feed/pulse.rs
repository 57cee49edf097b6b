//! [`Pulse`]: wakes a reader that has read everything when a feed may have new rows.
//!
//! Three things wake the reader: appends of its own process, watches for appends of other processes, and a poll for
//! lost hints. Poll and watches read the pulse of the feed, a few keys that every append moves, and not its shards.
//! So an idle reader makes one short read per interval, however many shards there are.

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

/// How long it waits for the notifiers of its own process before it sets watches for those of other processes. Under
/// steady local load it never sets a watch.
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
    pub poll_interval: Duration,
    /// Counts the appends of this process.
    appends: watch::Receiver<u64>,
    /// Completes when one of the watches fires; `None` if none is set.
    fired: Option<BoxFuture<'static, bool>>,
    /// Whether the next poll has no hint as its cause.
    is_poll: bool,
    /// The pulse when everything was read.
    known: Option<Vec<Row>>,
}

/// The state of a [`Pulse`] that a poll needs.
#[derive(Clone, Copy)]
pub(crate) struct Probe<'a> {
    feed: RawFeed<'a>,
    /// Whether the poll has no hint as its cause.
    is_poll: bool,
    /// Whether watches are set.
    is_watching: bool,
    /// The pulse when everything was read.
    known: Option<&'a Vec<Row>>,
}

/// The result of a poll, in one transaction.
pub(crate) struct PulseRead {
    /// The pulse; `None` after a hint, because then it has certainly moved.
    pulse: Option<Vec<Row>>,
    /// The last sequence that the transaction can see, if nothing was appended since everything was read.
    unchanged: Option<Sequence>,
    /// Completes when a watch fires, if watches were set; with false if they have failed.
    fired: Option<BoxFuture<'static, bool>>,
}

impl PulseRead {
    /// The position up to which everything is read now, if nothing was appended since.
    pub fn unchanged(&self) -> Option<Sequence> {
        self.unchanged
    }
}

impl Pulse {
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

    /// Begins a poll: later appends are new hints.
    pub fn begin(&mut self) {
        self.appends.mark_unchanged();
    }

    pub fn probe(&self) -> Probe<'_> {
        let feed = RawFeed::new(&self.context, &self.id);
        let (is_watching, known) = (self.fired.is_some(), self.known.as_ref());
        Probe { feed, is_poll: self.is_poll, is_watching, known }
    }

    /// Adopts the result of a poll after its transaction. `is_end` says whether the transaction has read everything.
    pub fn adopt(&mut self, look: PulseRead, is_end: bool) {
        self.fired = look.fired.or(self.fired.take());
        if is_end {
            self.known = look.pulse.or(self.known.take());
        } else {
            self.is_poll = false;
        }
    }

    /// Forgets the pulse, because the reader goes on elsewhere, where it may have rows to read.
    pub fn forget(&mut self) {
        self.known = None;
    }

    /// Completes when there may be rows, or when the poll is due. Cancel safe.
    pub async fn wait(&mut self) {
        // Watches that were just refused would be refused again.
        let is_watching = self.fired.is_some();
        let pause =
            if is_watching || self.is_poll { self.poll_interval } else { QUIET.min(self.poll_interval) };
        let pause = if is_on(Bug::TailWithoutPoll) && is_watching { Duration::MAX } else { pause };
        let Self { fired, appends, context, poll_interval, is_poll, .. } = self;
        let env = context.env();
        *is_poll = tokio::select! {
            // The sender cannot be gone: the shared context owns it.
            _ = appends.changed() => false,
            changed = async { match &mut *fired { Some(fired) => fired.await, None => pending().await } } => {
                *fired = None;
                if !changed {
                    // The watches were refused late: the poll sets them again.
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
    /// Reads whether anything was appended, in the transaction that then reads the rows.
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

    /// Logs that there is no watch, so that only the poll finds rows.
    fn complain(&self, error: &Error) {
        self.feed.context.stats.health.complain(self.feed.context.env(), WATCH, error);
    }

    /// Sets watches, unless some are set, once everything was read in `tx`. Appends after its read version fire them.
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
