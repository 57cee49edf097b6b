//! Readiness: whether an event that is recorded now would be delivered, derived from facts.
//!
//! The store answers, the process's nodes are members, each partition has a living owner, the oldest event that waits to be folded is
//! young, and the tail stands where the feed ends. It reads the data that the work of the process depends on. An answer alone proves
//! nothing: a cluster returns read versions while its storage is away, and a store that was wiped answers every read.

use std::{collections::BTreeSet, fmt, time::Duration};

use parking_lot::Mutex;

use super::{
    Bus,
    ownership::{Ownership, ranges},
};
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result, StoreError},
    },
    roles::dispatcher::Dispatcher,
    state::{
        feed::RawFeed,
        keys::{NodeId, NodeRow},
    },
    store::{Isolation, RetryPolicy, Transaction},
};

const READINESS: &str = "readiness";

/// How long the store may take to answer.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// The age from which events that wait to be folded are no longer young. Others need some of it to take over from a dead notifier.
const YOUNG_MAX: Duration = Duration::from_secs(10);

/// How long the tail may be behind.
const TAIL_LAG_MAX: Duration = Duration::from_secs(3);

/// Why an event that is recorded now might not be delivered.
#[derive(Debug, Clone)]
pub(crate) enum Unready {
    /// The store takes no more writes.
    Failed(Error),
    /// The bus does not exist any more, or is another one.
    Gone(String),
    /// The store is locked.
    Locked,
    /// The store does not answer; with its last error, if any.
    Away(Option<StoreError>),
    /// The bus's own data cannot be read.
    Unreadable(Error),
    /// A node of the process has expired and was removed.
    FallenOut,
    /// No living notifier owns these partitions.
    Unowned(BTreeSet<u32>),
    /// Events of these partitions wait to be folded, the oldest for this long; and what fails in this process.
    Waiting(BTreeSet<u32>, Duration, String),
    /// The tail has not reached an end of the feed for this long; and what fails in this process.
    Behind(Duration, String),
}

impl Unready {
    /// The part of the bus that does not work.
    pub fn part(&self) -> &'static str {
        match self {
            Self::Failed(_) | Self::Gone(_) | Self::Locked | Self::Away(_) | Self::Unreadable(_) => "store",
            Self::FallenOut => "node",
            Self::Unowned(_) | Self::Waiting(..) => "notifier",
            Self::Behind(..) => "dispatcher",
        }
    }

    /// A keyword for programs.
    pub fn cause(&self) -> &'static str {
        match self {
            Self::Failed(_) => "failed",
            Self::Gone(_) => "gone",
            Self::Locked => "locked",
            Self::Away(_) => "away",
            Self::Unreadable(_) => "unreadable",
            Self::FallenOut => "fallen_out",
            Self::Unowned(_) => "unowned",
            Self::Waiting(..) => "waiting",
            Self::Behind(..) => "behind",
        }
    }
}

impl fmt::Display for Unready {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(error) => write!(f, "The store takes no more writes: {error}."),
            Self::Gone(reason) => {
                write!(
                    f,
                    "The bus that this process opened does not exist any more: {reason}. Restart the process."
                )
            }
            Self::Locked => f.write_str("The database is locked."),
            Self::Away(None) => f.write_str("The store does not answer."),
            Self::Away(Some(last)) => write!(f, "The store does not answer; its last error was: {last}."),
            Self::Unreadable(error) => write!(f, "The bus's own data cannot be read: {error}."),
            Self::FallenOut => f.write_str(
                "The node has expired and was removed from the bus; it joins again as soon as it can.",
            ),
            Self::Unowned(partitions) => write!(
                f,
                "No living notifier owns {} of the partitions: {}. Start one, or wait until another has taken over.",
                partitions.len(),
                ranges(partitions)
            ),
            Self::Waiting(partitions, age, failing) => write!(
                f,
                "Notifiers do not fold {} of the partitions: {}. Their events were seen to wait for {} s.{failing}",
                partitions.len(),
                ranges(partitions),
                age.as_secs()
            ),
            Self::Behind(lag, failing) => write!(
                f,
                "The tail of the dispatcher has not reached the end of the feed for {} s.{failing}",
                lag.as_secs()
            ),
        }
    }
}

/// What one read of the store shows.
struct Facts {
    ownership: Ownership,
    /// The partitions whose events have waited for too long, and the age of the oldest.
    waiting: (BTreeSet<u32>, Duration),
    /// The end of the feed.
    end: Sequence,
}

impl Bus {
    /// Why this process can never work again, so that only a restart helps; `None` if it can.
    pub(crate) fn permanent_failure(&self) -> Option<Unready> {
        if let Some(error) = self.context.db.failure() {
            return Some(Unready::Failed(error));
        }
        self.context.stats.health.ended().map(|ended| match ended {
            Error::BusGone { reason } => Unready::Gone(reason.clone()),
            ended => Unready::Gone(ended.to_string()),
        })
    }

    /// Whether an event that is recorded now would be folded by living notifiers, and delivered by `dispatcher`, as far as
    /// this process has read. The error is the cause.
    pub(crate) async fn readiness(&self, dispatcher: &Dispatcher) -> Result<(), Unready> {
        let context = &*self.context;
        if let Some(unready) = self.permanent_failure() {
            return Err(unready);
        }
        let Facts { ownership, waiting: (late, oldest), end } = self.facts().await?;
        context.stats.health.works(READINESS, 0);
        // Every call observes all facts, because some of them take two reads.
        let unowned = self.seen.owners.unowned(context.config.partitions, &ownership, context.env().now());
        let lag = dispatcher.lag(end);
        if !unowned.is_empty() {
            return Err(Unready::Unowned(unowned));
        }
        if !late.is_empty() {
            return Err(Unready::Waiting(late, oldest, self.failing()));
        }
        if lag > TAIL_LAG_MAX {
            return Err(Unready::Behind(lag, self.failing()));
        }
        Ok(())
    }

    /// Reads the store, for a bounded time.
    async fn facts(&self) -> Result<Facts, Unready> {
        let context = &*self.context;
        let last = Mutex::new(None);
        let policy = RetryPolicy { elapsed_max: Some(ANSWER_MAX), ..RetryPolicy::default() };
        let read = context.db.run_with(&policy, async |tx| {
            let read = self.facts_in(&tx).await;
            if let Err(Error::Store(error)) = &read {
                *last.lock() = Some(error.clone());
            }
            read
        });
        let read = tokio::select! {
            biased;
            read = read => read,
            () = context.env().sleep(ANSWER_MAX) => Err(Error::Store(StoreError::TRANSACTION_TIMED_OUT)),
        };
        let last = last.into_inner();
        match read {
            Ok(Some(facts)) => Ok(facts),
            Ok(None) => Err(Unready::FallenOut),
            Err(Error::BusGone { reason }) => Err(Unready::Gone(reason)),
            Err(Error::Store(error) | Error::RetriesExhausted { last: error, .. }) => {
                let is_locked = |error: &StoreError| *error == StoreError::DATABASE_LOCKED;
                Err(match last {
                    _ if is_locked(&error) => Unready::Locked,
                    Some(last) if is_locked(&last) => Unready::Locked,
                    last => Unready::Away(last),
                })
            }
            Err(error) => {
                context.stats.health.failed(context.env(), READINESS, 0, &error);
                Err(Unready::Unreadable(error))
            }
        }
    }

    /// Reads the configuration, the rows of the process's nodes, the owners of the partitions, their backlogs, and the feed's topology
    /// and end.
    /// Returns `None` if not all nodes of the process are members.
    async fn facts_in(&self, tx: &Transaction) -> Result<Option<Facts>> {
        let context = &*self.context;
        let keys = &context.keys;
        let stored = tx.get(&keys.config(), Isolation::Snapshot).await?;
        context.config.check_stored(stored.as_deref())?;
        for (node, token) in context.stats.health.nodes() {
            let key = keys.node(NodeId(node));
            let row = tx.get(&key, Isolation::Snapshot).await?;
            let row = row.map(|row| NodeRow::from_bytes(&row)).transpose().map_err(|error| error.at(&key))?;
            if token.is_none() || row.map(|row| row.token) != token {
                return Ok(None);
            }
        }
        let feed = RawFeed::notifications(context);
        let (ownership, mut waiting, end, _) = tokio::try_join!(
            Ownership::read(tx, keys),
            self.seen.waiting.ages(&self.context, tx),
            feed.last_readable(tx),
            feed.topology(tx),
        )?;
        waiting.retain(|_, age| *age > YOUNG_MAX);
        let oldest = waiting.values().max().copied().unwrap_or_default();
        Ok(Some(Facts { ownership, waiting: (waiting.into_keys().collect(), oldest), end }))
    }

    /// What fails in this process and is tried again, as a sentence; empty if nothing does.
    fn failing(&self) -> String {
        let troubles = self.context.stats.health.troubles();
        let named: BTreeSet<_> =
            troubles.iter().map(|trouble| format!("{} ({})", trouble.what, trouble.error)).collect();
        if named.is_empty() {
            return String::new();
        }
        format!(" Failing here: {}.", named.into_iter().collect::<Vec<_>>().join(", "))
    }
}
