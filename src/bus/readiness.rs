//! Readiness: whether an event that is recorded now would be delivered.
//!
//! It reads the data that the work of the process depends on. An answer alone proves nothing: a cluster returns read versions while
//! its storage is away, and a store that was wiped answers every read.

use std::{collections::BTreeSet, fmt, time::Duration};

use parking_lot::Mutex;

use super::{
    Bus,
    ownership::{Owners, Ownership, ranges},
};
use crate::{
    base::error::{Error, Result, StoreError},
    state::keys::{NodeId, NodeRow, Partition},
    store::{Isolation, RangeRead, RetryPolicy, Transaction},
};

/// How long the store may take to answer.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// How long work may fail before the process counts as not ready: a single failure is tried again at once.
const TROUBLE_MAX: Duration = Duration::from_secs(3);

/// The most runs of partitions that are read.
const RUNS_MAX: usize = 16;

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
    /// A node of the process has expired and was removed.
    FallenOut,
    /// Roles fail: their names, and for how many seconds. One may be the cause of another.
    Behind(Vec<(&'static str, u64)>),
    /// No living notifier owns these partitions.
    Unowned(BTreeSet<u32>),
    /// The bus's own data cannot be read.
    Unreadable,
}

impl Unready {
    /// A keyword for programs.
    pub fn cause(&self) -> &'static str {
        match self {
            Self::Failed(_) => "failed",
            Self::Gone(_) => "gone",
            Self::Locked => "locked",
            Self::Away(_) => "away",
            Self::FallenOut => "fallen_out",
            Self::Behind(..) => "behind",
            Self::Unowned(_) => "unowned",
            Self::Unreadable => "unreadable",
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
            Self::FallenOut => f.write_str(
                "The node has expired and was removed from the bus; it joins again as soon as it can.",
            ),
            Self::Behind(roles) => {
                let roles: Vec<_> = roles
                    .iter()
                    .map(|(what, seconds)| format!("the {what} has failed for {seconds} s"))
                    .collect();
                write!(f, "Behind: {}.", roles.join(", "))
            }
            Self::Unowned(partitions) => write!(
                f,
                "No living notifier owns {} of the partitions: {}. Start one, or wait until another has taken over.",
                partitions.len(),
                ranges(partitions)
            ),
            Self::Unreadable => f.write_str("The bus's own data cannot be read; the log names the keys."),
        }
    }
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

    /// Whether an event that is recorded now would be delivered: this process can work, and living notifiers own all partitions, as
    /// far as `owners` has seen. The error is the cause.
    pub(crate) async fn readiness(&self, owners: &Owners) -> Result<(), Unready> {
        let context = &*self.context;
        let health = &context.stats.health;
        if let Some(unready) = self.permanent_failure() {
            return Err(unready);
        }
        let last = Mutex::new(None);
        let policy = RetryPolicy { elapsed_max: Some(ANSWER_MAX), ..RetryPolicy::default() };
        let read = context.db.run_with(&policy, async |tx| {
            let read = self.read_own(&tx).await;
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
        let ownership = match read {
            Ok(Some(ownership)) => ownership,
            Ok(None) => return Err(Unready::FallenOut),
            Err(Error::BusGone { reason }) => return Err(Unready::Gone(reason)),
            Err(Error::Store(error) | Error::RetriesExhausted { last: error, .. }) => {
                let is_locked = |error: &StoreError| *error == StoreError::DATABASE_LOCKED;
                return Err(match last {
                    _ if is_locked(&error) => Unready::Locked,
                    Some(last) if is_locked(&last) => Unready::Locked,
                    last => Unready::Away(last),
                });
            }
            Err(error) => {
                health.complain(context.env(), "readiness", &error);
                return Err(Unready::Unreadable);
            }
        };
        let now = context.env().now();
        // Every call observes the owners, so that the time without an owner is known.
        let unowned = owners.unowned(context.config.partitions, &ownership, now);
        let troubles = health.troubles().into_iter();
        let mut failing: Vec<_> =
            troubles.map(|trouble| (trouble.what, now.saturating_sub(trouble.since).as_secs())).collect();
        match failing.first() {
            // The oldest failure may be a consequence of another, so the cause names all of them, each role once.
            Some((_, longest)) if *longest >= TROUBLE_MAX.as_secs() => {
                let mut named = BTreeSet::new();
                failing.retain(|(what, _)| named.insert(*what));
                Err(Unready::Behind(failing))
            }
            _ if !unowned.is_empty() => Err(Unready::Unowned(unowned)),
            _ => Ok(()),
        }
    }

    /// Reads the data that this process's work depends on: the configuration, the rows of its nodes, and the counters of its
    /// partitions. Returns who owns the partitions; `None` if not all nodes of the process are members.
    async fn read_own(&self, tx: &Transaction) -> Result<Option<Ownership>> {
        let context = &*self.context;
        let keys = &context.keys;
        let stored = tx.get(&keys.config(), Isolation::Snapshot).await?;
        context.config.check_stored(stored.as_deref())?;
        for (node, token) in context.stats.health.nodes() {
            let row = tx.get(&keys.node(NodeId(node)), Isolation::Snapshot).await?;
            let row = row.and_then(|row| NodeRow::from_bytes(&row).ok());
            if token.is_none() || row.map(|row| row.token) != token {
                return Ok(None);
            }
        }
        let held = context.signals.held();
        let runs = held.chunk_by(|a, b| a.0 + 1 == b.0).take(RUNS_MAX);
        for run in runs {
            let (first, last): (Partition, Partition) = (run[0], run[run.len() - 1]);
            let waiting = RangeRead::new(keys.drains(first, last)).limit(1);
            tx.get_range(&waiting, Isolation::Snapshot).await?;
        }
        Ok(Some(Ownership::read(tx, keys).await?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{bus::running::Roles, state::keys::Role, store::Database};

    /// Regression: the row of one notifier that could not be decoded made `ready` fail on all nodes, although the others owned all
    /// partitions.
    #[tokio::test(start_paused = true)]
    async fn a_damaged_row_of_another_node_keeps_nobody_from_being_ready() {
        let store = Database::memory();
        let bus = Bus::open(&store, super::super::BusOptions::default()).await.unwrap();
        let running = bus.start(Roles::default()).await.unwrap();
        let (keys, other) = (&bus.context.keys, NodeId([7; 16]));
        let damage = async |tx: Transaction| {
            tx.set(&keys.node(other), b"junk");
            keys.role(other, &Role::NOTIFIER).iter().for_each(|key| tx.set(key, &0_u32.to_be_bytes()));
            Ok(())
        };
        store.run(damage).await.unwrap();
        tokio::time::sleep(Duration::from_secs(30)).await;
        bus.readiness(&Owners::default()).await.unwrap();
        running.shutdown().await.unwrap();
    }
}
