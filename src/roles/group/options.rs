//! Options of a group and of its consumers.

use std::time::Duration;

use crate::{
    base::{
        cursor::Start,
        error::{Error, Result},
    },
    state::{feed::PAGE_ROWS_MAX, membership::BalanceOptions},
    store::RetryPolicy,
};

/// Options for creating a group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupOptions {
    /// The start. [`Start::Now`] delivers the first event after the creation, whenever the first consumer starts;
    /// [`Cursor::NOTHING`](crate::Cursor::NOTHING) delivers the newest row of each id first. A position must not
    /// be below the feed's horizon, nor ahead of the store. Default: [`Start::Now`].
    pub start: Start,
    /// The time without a living member after which the janitor deletes the group. Only time during which a janitor works counts, so
    /// the bus needs a janitor. Default: never.
    ///
    /// A group without consumers keeps tombstones of deleted databases in the feed.
    pub idle_expiry: Option<Duration>,
}

impl GroupOptions {
    /// Sets the start.
    #[must_use]
    pub fn start_from(self, start: impl Into<Start>) -> Self {
        Self { start: start.into(), ..self }
    }

    /// Sets the expiry.
    #[must_use]
    pub fn expire_after(self, idle: Duration) -> Self {
        Self { idle_expiry: Some(idle), ..self }
    }

    /// The expiry in milliseconds, 0 for none. Fails if it is out of its limits.
    pub(super) fn expiry_ms(&self) -> Result<u64> {
        let Some(expiry) = self.idle_expiry else { return Ok(0) };
        match u64::try_from(expiry.as_millis()) {
            Ok(ms) if ms > 0 => Ok(ms),
            _ => Err(Error::invalid("idle expiry", format!("{expiry:?} is not 1 ms to 500 million years"))),
        }
    }
}

/// When a consumer saves its position by itself. A checkpoint that an observer writes in its own transaction
/// ([`GroupBatch::checkpoint_in`](super::GroupBatch::checkpoint_in)) is not written again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CheckpointPolicy {
    /// After each batch.
    #[default]
    EveryBatch,
    /// After so many rows; half a minute after the last row of an idle shard; and when the shard is given up in an orderly way.
    /// After a crash about so many rows come again.
    Rows(u64),
    /// After the first batch that ends this long after the last save; half a minute after the last row of an idle shard; and when the
    /// shard is given up in an orderly way.
    Interval(Duration),
    /// Never: the observer saves. What it has not saved comes again after a restart.
    Explicit,
}

/// What happens to rows for which an observer fails again and again. A row that this program cannot decode is passed to no observer:
/// it goes to the dead letters at once, or is skipped; [`Bus::skipped_rows`](crate::Bus::skipped_rows) lists it in any case.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FailurePolicy {
    /// They are tried until they succeed; later rows of the shard wait. After each round of attempts the observer is
    /// closed, and another one is opened.
    #[default]
    KeepRetrying,
    /// They go to the dead letters of the group, and the shard goes on. If a batch of several rows fails, its rows are tried one by one,
    /// and only those that fail again become dead letters. A row becomes a dead letter with the checkpoint that passes it. With
    /// [`CheckpointPolicy::Explicit`] that is a checkpoint of the observer, while rows before it are not saved. A shard with 100 such
    /// rows waits, as with [`FailurePolicy::KeepRetrying`].
    DeadLetter,
    /// Their ids are parked, and the shard goes on: the databases of notifications, or the documents of a changes feed. A parked id is
    /// tried again, with pauses ([`ConsumerOptions::parked_retry`]), until the observer succeeds. Its later rows wait behind it, the
    /// newest replacing the ones before, so that each id's rows come in order. If a batch of several rows fails, its rows are tried one
    /// by one, and only those that fail again are parked. An id is parked with the checkpoint that passes its row; with
    /// [`CheckpointPolicy::Explicit`] that is a checkpoint of the observer, while rows before it are not saved. A group can have
    /// about [`FailurePolicy::PARKED_MAX`] parked ids; beyond that a shard waits, as with [`FailurePolicy::KeepRetrying`].
    Park,
}

impl FailurePolicy {
    /// The most parked ids of a group; a few more if several shards park at once.
    pub const PARKED_MAX: usize = 1_000;
}

/// How a consumer works.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConsumerOptions {
    /// How nodes share the shards.
    pub balance: BalanceOptions,
    /// The most rows of a batch, 1 to 10,000. Default: 1,000.
    pub rows_max: usize,
    /// The batch ends with the row that brings its stored rows to this many bytes. Default: 1 MB.
    pub bytes_max: usize,
    /// When it saves its position. Default: after each batch.
    pub checkpoint: CheckpointPolicy,
    /// Number and pauses of the attempts in one round. Default: 5 attempts, pauses from
    /// 100 ms up to 30 s.
    pub retry: RetryPolicy,
    /// What happens to rows for which a whole round has failed. Default: the next round begins.
    pub failure: FailurePolicy,
    /// The pauses before a parked id is tried again; its limits have no effect. Default: from 1 s up to 10 min.
    pub parked_retry: RetryPolicy,
    /// How often a shard is polled without a hint, give or take a quarter: one read of one shard. A shard of notifications is polled
    /// so only if the watcher of the process, which polls for all of them each second, has not polled since. The document shards of a
    /// process share one interval, and take turns. Default: 1 min.
    pub poll_interval: Duration,
    /// After this time without progress, while rows wait, a shard is reported as stuck; and again after each further such time.
    /// Default: 1 min.
    pub stuck_after: Duration,
}

crate::base::macros::setters!(ConsumerOptions {
    balance: BalanceOptions,
    rows_max: usize,
    bytes_max: usize,
    checkpoint: CheckpointPolicy,
    retry: RetryPolicy,
    failure: FailurePolicy,
    parked_retry: RetryPolicy,
    poll_interval: Duration,
    stuck_after: Duration
});

impl Default for ConsumerOptions {
    fn default() -> Self {
        Self {
            balance: BalanceOptions::default(),
            rows_max: 1_000,
            bytes_max: 1_000_000,
            checkpoint: CheckpointPolicy::default(),
            retry: RetryPolicy {
                attempts_max: Some(5),
                elapsed_max: None,
                backoff_min: Duration::from_millis(100),
                backoff_max: Duration::from_secs(30),
            },
            failure: FailurePolicy::default(),
            parked_retry: RetryPolicy {
                attempts_max: None,
                elapsed_max: None,
                backoff_min: Duration::from_secs(1),
                backoff_max: Duration::from_mins(10),
            },
            poll_interval: Duration::from_mins(1),
            stuck_after: Duration::from_mins(1),
        }
    }
}

impl ConsumerOptions {
    /// The most that [`ConsumerOptions::rows_max`](field@Self::rows_max) may be.
    pub const ROWS_MAX: usize = PAGE_ROWS_MAX;

    pub(super) fn check(&self) -> Result<()> {
        if !(1..=Self::ROWS_MAX).contains(&self.rows_max) {
            return Err(Error::invalid("rows", format!("{} is not 1 to {}", self.rows_max, Self::ROWS_MAX)));
        }
        let zero = [
            ("poll interval", self.poll_interval.is_zero()),
            ("stuck after", self.stuck_after.is_zero()),
            ("attempts", self.retry.attempts_max == Some(0)),
            ("rows of a checkpoint", self.checkpoint == CheckpointPolicy::Rows(0)),
        ];
        if let Some((what, _)) = zero.into_iter().find(|(_, is_zero)| *is_zero) {
            return Err(Error::invalid(what, "it is zero"));
        }
        if self.retry.attempts_max.is_none() && self.retry.elapsed_max.is_none() {
            return Err(Error::invalid("attempts", "a round of attempts needs a limit"));
        }
        self.balance.check()
    }
}
