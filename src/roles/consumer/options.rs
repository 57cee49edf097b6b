//! The options of a consumer's members.

use std::time::Duration;

use crate::{
    base::{
        backoff::Backoff,
        error::{Error, Result},
    },
    state::{feed::PAGE_ROWS_MAX, membership::BalanceOptions},
};

/// What happens to an id whose work keeps failing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FailurePolicy {
    /// The id is deferred: it gets a key of its own in the store, and is tried again with its newest row after pauses of up to
    /// [`ConsumerOptions::backoff_max`]. It holds nothing else up.
    #[default]
    Defer,
    /// The id is tried until it succeeds. Later rows wait: all rows of the shard if the handler works on batches, otherwise only those of
    /// the id. In either case the checkpoint stays before the id.
    Hold,
}

/// How a member of a consumer works. Values outside these limits are refused; [`Duration::MAX`] means never:
///
/// | option | minimum | maximum |
/// |---|---|---|
/// | `max_concurrency` | 1 | 10,000 |
/// | `debounce`, `backoff_min`, `backoff_max` | none | 1 year |
/// | `attempts_max` | 1 | |
/// | `stall_limit`, `checkpoint_interval`, `poll_interval` | 1 ms | 1 year |
/// | `batch_rows_max` | 1 | 10,000 |
/// | `batch_bytes_max` | 1 | |
/// | `in_hand_max` | 1 | 10,000,000 |
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConsumerOptions {
    /// How many ids of a shard may run at once. Batches run one at a time. Default: 16.
    pub max_concurrency: usize,
    /// How long an id waits for more rows. However often the id changes, it is worked on only once in this time, and no later than this
    /// long after the first change. Batches do not wait: a member that works on batches is refused if this is set. Default: none.
    pub debounce: Duration,
    /// How many times a row is tried before its id is deferred. Where ids are worked on side by side, an id is deferred sooner if its
    /// pauses last longer than a checkpoint interval. Default: 5.
    pub attempts_max: u32,
    /// The pause after the first failure. Each further pause is twice as long as the previous one. Default: 100 ms.
    pub backoff_min: Duration,
    /// The longest pause. Default: 5 min.
    pub backoff_max: Duration,
    /// How long work may go without progress before it is cancelled and deferred. Each transaction that the work verifies counts as
    /// progress, and so does each call of [`Run::progress`](super::Run::progress). Default: 10 min.
    pub stall_limit: Duration,
    /// What happens to rows that fail. Default: they are deferred.
    pub failure: FailurePolicy,
    /// The maximum number of rows in a batch. Default: 1,000.
    pub batch_rows_max: usize,
    /// A batch ends with the row that brings its stored rows to this many bytes. Default: 1 MB.
    pub batch_bytes_max: usize,
    /// How often the checkpoint of a shard is saved while rows are worked on. After a crash at most the work of one interval is repeated,
    /// besides work that was waiting. Work that runs longer is deferred while it runs, so that it does not hold the checkpoint back.
    /// Default: 1 s.
    pub checkpoint_interval: Duration,
    /// The maximum number of ids of a shard in memory. The others wait in the feed. Default: 10,000.
    pub in_hand_max: usize,
    /// How often a shard is read while the shared poll of its process fails, give or take a quarter. Default: 1 min.
    pub poll_interval: Duration,
    /// How nodes share the shards.
    pub balance: BalanceOptions,
}

crate::base::macros::setters!(ConsumerOptions {
    max_concurrency: usize,
    debounce: Duration,
    attempts_max: u32,
    backoff_min: Duration,
    backoff_max: Duration,
    stall_limit: Duration,
    failure: FailurePolicy,
    batch_rows_max: usize,
    batch_bytes_max: usize,
    checkpoint_interval: Duration,
    in_hand_max: usize,
    poll_interval: Duration,
    balance: BalanceOptions
});

impl Default for ConsumerOptions {
    fn default() -> Self {
        Self {
            max_concurrency: 16,
            debounce: Duration::ZERO,
            attempts_max: 5,
            backoff_min: Duration::from_millis(100),
            backoff_max: Duration::from_mins(5),
            stall_limit: Duration::from_mins(10),
            failure: FailurePolicy::default(),
            batch_rows_max: 1_000,
            batch_bytes_max: 1_000_000,
            checkpoint_interval: Duration::from_secs(1),
            in_hand_max: 10_000,
            poll_interval: Duration::from_mins(1),
            balance: BalanceOptions::default(),
        }
    }
}

const YEAR: Duration = Duration::from_hours(366 * 24);

impl ConsumerOptions {
    /// The maximum of [`ConsumerOptions::max_concurrency`].
    pub const MAX_CONCURRENCY: usize = 10_000;
    /// The maximum of [`ConsumerOptions::in_hand_max`].
    pub const IN_HAND_MAX: usize = 10_000_000;

    pub(super) fn check(&self) -> Result<()> {
        let counts = [
            ("max concurrency", self.max_concurrency, Self::MAX_CONCURRENCY),
            ("attempts", self.attempts_max as usize, usize::MAX),
            ("rows of a batch", self.batch_rows_max, PAGE_ROWS_MAX),
            ("bytes of a batch", self.batch_bytes_max, usize::MAX),
            ("ids in hand", self.in_hand_max, Self::IN_HAND_MAX),
        ];
        let is_out = |(_, count, max): &(&str, usize, usize)| !(1..=*max).contains(count);
        if let Some((what, count, max)) = counts.into_iter().find(is_out) {
            return Err(Error::invalid(what, format!("{count} is not 1 to {max}")));
        }
        let (none, millisecond) = (Duration::ZERO, Duration::from_millis(1));
        let times = [
            ("debounce", self.debounce, none),
            ("back-off", self.backoff_max, none),
            ("stall limit", self.stall_limit, millisecond),
            ("checkpoint interval", self.checkpoint_interval, millisecond),
            ("poll interval", self.poll_interval, millisecond),
        ];
        let is_out = |(_, time, min): &(_, Duration, Duration)| {
            *time != Duration::MAX && !(*min..=YEAR).contains(time)
        };
        if let Some((what, time, min)) = times.into_iter().find(is_out) {
            return Err(Error::invalid(what, format!("{time:?} is not {min:?} to {YEAR:?}")));
        }
        if self.backoff_min > self.backoff_max {
            let (min, max) = (self.backoff_min, self.backoff_max);
            return Err(Error::invalid("back-off", format!("minimum {min:?} is above the maximum {max:?}")));
        }
        self.balance.check()
    }

    /// Returns the pauses after failures.
    pub(super) fn backoff(&self) -> Backoff {
        Backoff { min: self.backoff_min, max: self.backoff_max }
    }
}
