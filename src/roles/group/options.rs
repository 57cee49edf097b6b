//! What a group begins with, and how its consumers work.

use std::time::Duration;

use crate::{
    base::{
        cursor::Start,
        error::{Error, Result},
    },
    state::{feed::PAGE_ROWS_MAX, membership::BalanceOptions},
    store::RetryPolicy,
};

/// What a group begins with.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GroupOptions {
    /// Where it starts: now, so that the first event after the creation is delivered, whenever the first consumer starts; at
    /// [`Cursor::NOTHING`](crate::Cursor::NOTHING), to get the newest row of each id first; or behind a position, which must not
    /// be below the feed's horizon, nor ahead of the store. Default: [`Start::Now`].
    pub start: Start,
    /// After how long without a living member the janitor deletes it. Only time during which a janitor works counts, so that
    /// it takes a bus with a janitor. Default: never.
    ///
    /// A group that is kept without being worked for keeps tombstones of deleted databases in the feed.
    pub idle_expiry: Option<Duration>,
}

impl GroupOptions {
    /// The options with another start.
    #[must_use]
    pub fn start_from(self, start: impl Into<Start>) -> Self {
        Self { start: start.into(), ..self }
    }

    /// The options with an expiry.
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

/// When a consumer saves how far it has come, by itself. What an observer has saved in its own transaction
/// ([`GroupBatch::checkpoint_in`](super::GroupBatch::checkpoint_in)) is never written again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CheckpointPolicy {
    /// After each batch.
    #[default]
    EveryBatch,
    /// After the batch with which so many rows were worked on since the last time; half a minute after the shard has come to
    /// rest; and when it is given up in an orderly way. After a crash so many more rows come again.
    Rows(u64),
    /// After the first batch that ends so long after the last time; half a minute after the shard has come to rest; and when it
    /// is given up in an orderly way.
    Interval(Duration),
    /// Never: the observer does. What it has not saved comes again after a restart.
    Explicit,
}

/// What becomes of rows that an observer fails on again and again. One that this program cannot decode is given to no observer: it
/// goes to the dead letters at once, or is skipped, and is named by [`Bus::skipped_rows`](crate::Bus::skipped_rows) in any case.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FailurePolicy {
    /// They are tried until it succeeds; rows behind them in the shard wait. After each round of attempts the observer is
    /// closed, and another one is opened.
    #[default]
    KeepRetrying,
    /// They go to the dead letters of the group, and the shard moves on. Of a batch of many rows only those do with which the
    /// observer also fails when it is given them one by one.
    DeadLetter,
    /// Their ids are parked, and the shard moves on: of notifications the databases, of documents the documents. A parked id is tried again
    /// by itself, with pauses ([`ConsumerOptions::parked_retry`]), until the observer succeeds; its later rows wait behind it, the
    /// newest in place of those before, so that each id's rows come in order. Of a batch of many rows only those ids are parked with
    /// which the observer also fails when it is given them one by one. A group has about 1,000 at most: beyond that a shard waits, as with
    /// [`FailurePolicy::KeepRetrying`].
    Park,
}

/// How a consumer works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerOptions {
    /// How it takes its part of the shards.
    pub balance: BalanceOptions,
    /// The most rows of a batch, 1 to 10,000. Default: 1,000.
    pub rows_max: usize,
    /// The batch ends with the row that brings its stored rows to this many bytes. Default: 1 MB.
    pub bytes_max: usize,
    /// When it saves how far it has come. Default: after each batch.
    pub checkpoint: CheckpointPolicy,
    /// How often, and with which pauses, the same rows are tried in one round of attempts. Default: 5 attempts, pauses from
    /// 100 ms up to 30 s.
    pub retry: RetryPolicy,
    /// What becomes of rows for which no attempt of a round has succeeded. Default: they are tried on.
    pub failure: FailurePolicy,
    /// The pauses after which a parked id is tried again; its limits do not matter. Default: from 1 s up to 10 min.
    pub parked_retry: RetryPolicy,
    /// How often a shard is looked at although nothing was informed of it, give or take a quarter: one read of one shard. A shard of
    /// notifications is read so only if the watcher of the process, which looks for rows of all of them each second, has not
    /// looked since; the shards of documents on which a process works share the interval, and come to their turns. Default: 1 min.
    pub poll_interval: Duration,
    /// After how long without getting on, while rows wait, a shard is reported as stuck; and again each time as long after.
    /// Default: 1 min.
    pub stuck_after: Duration,
}

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
    /// Fails if an option is out of its limits.
    pub(super) fn check(&self) -> Result<()> {
        if !(1..=PAGE_ROWS_MAX).contains(&self.rows_max) {
            return Err(Error::invalid("rows", format!("{} is not 1 to {PAGE_ROWS_MAX}", self.rows_max)));
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
