//! Readiness: whether an event recorded now would be delivered, derived from facts.
//!
//! The bus is ready if the store answers, the process's nodes are members, each partition has a live owner, the oldest event in the backlog
//! is young, and the tail is at the end of the feed. These facts come from the parts of the [snapshot](super::snapshot) that the process
//! needs. An answer from the store proves nothing by itself: a cluster returns read versions while its storage is unavailable, and a wiped
//! store answers every read.

use std::{collections::BTreeSet, fmt, time::Duration};

use super::Bus;
use crate::{
    base::error::{Error, StoreError},
    roles::dispatcher::Dispatcher,
    state::keys::NodeId,
};

const READINESS: &str = "readiness";

/// The age up to which unfolded events count as young. Taking over from a dead notifier takes some of this time.
const YOUNG_MAX: Duration = Duration::from_secs(10);

/// The maximum time that the tail may lag behind.
const TAIL_LAG_MAX: Duration = Duration::from_secs(3);

/// Why an event recorded now might not be delivered.
#[derive(Debug, Clone)]
pub(crate) enum Unready {
    /// The store takes no more writes.
    Failed(Error),
    /// The bus no longer exists, or is now a different one.
    Gone(String),
    /// The store's versions are behind those in its rows ([`Error::OlderThanRows`]).
    Older(Error),
    /// The disk of the store is full.
    NoRoom(Error),
    /// The store is locked.
    Locked,
    /// The store does not answer. Holds its last error, if there was one.
    Away(Option<StoreError>),
    /// The bus's own data cannot be read.
    Unreadable(Error),
    /// A node of the process has expired and was removed.
    DroppedOut,
    /// These partitions have no live notifier as their owner.
    Unowned(BTreeSet<u32>),
    /// Events in these partitions wait to be folded, the oldest for this long. The text says what fails in this process.
    Waiting(BTreeSet<u32>, Duration, String),
    /// The tail has not reached an end of the feed for this long. The text says what fails in this process.
    Behind(Duration, String),
}

impl Unready {
    /// Returns the part of the bus that does not work.
    pub fn part(&self) -> &'static str {
        match self {
            Self::Failed(_)
            | Self::Gone(_)
            | Self::Older(_)
            | Self::NoRoom(_)
            | Self::Locked
            | Self::Away(_)
            | Self::Unreadable(_) => "store",
            Self::DroppedOut => "node",
            Self::Unowned(_) | Self::Waiting(..) => "notifier",
            Self::Behind(..) => "dispatcher",
        }
    }

    /// Returns a keyword for programs.
    pub fn cause(&self) -> &'static str {
        match self {
            Self::Failed(_) => "failed",
            Self::Gone(_) => "gone",
            Self::Older(_) => "older_than_rows",
            Self::NoRoom(_) => "no_room",
            Self::Locked => "locked",
            Self::Away(_) => "away",
            Self::Unreadable(_) => "unreadable",
            Self::DroppedOut => "dropped_out",
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
                write!(f, "The bus that this process opened no longer exists: {reason}. Restart the process.")
            }
            Self::Older(error) => write!(f, "Nothing is folded: {error}."),
            Self::NoRoom(error) => write!(f, "The disk of the store is full: make room ({error})."),
            Self::Locked => f.write_str("The database is locked."),
            Self::Away(None) => f.write_str("The store does not answer."),
            Self::Away(Some(last)) => write!(f, "The store does not answer; its last error was: {last}."),
            Self::Unreadable(error) => write!(f, "The bus's own data cannot be read: {error}."),
            Self::DroppedOut => f.write_str(
                "The node has expired and was removed from the bus; it joins again as soon as it can.",
            ),
            Self::Unowned(partitions) => write!(
                f,
                "No live notifier owns {} of the partitions: {}. Start one, or wait until another has taken over.",
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

impl Bus {
    /// Returns why this process can never work again, so that only a restart helps; `None` if it can.
    pub(crate) fn permanent_failure(&self) -> Option<Unready> {
        if let Some(error) = self.context.store.failure() {
            return Some(Unready::Failed(error));
        }
        self.context.stats.health.ended().map(|ended| match ended {
            Error::BusGone { reason } => Unready::Gone(reason.clone()),
            ended => Unready::Gone(ended.to_string()),
        })
    }

    /// Returns why nothing is folded although the process works; `None` if it has not read a reason. A restart does not help.
    pub(crate) fn trouble_of_history(&self) -> Option<Unready> {
        let troubles = self.context.stats.health.troubles();
        let mut errors = troubles.into_iter().map(|trouble| trouble.error);
        errors.find(|error| matches!(error, Error::OlderThanRows { .. })).map(Unready::Older)
    }

    /// Whether live notifiers would fold an event recorded now, and `dispatcher` deliver it, as far as is known. The error says why not.
    pub(crate) async fn readiness(&self, dispatcher: &Dispatcher) -> Result<(), Unready> {
        let context = &*self.context;
        if let Some(unready) = self.permanent_failure() {
            return Err(unready);
        }
        if let Some(error) = context.store.shortage() {
            return Err(Unready::NoRoom(error));
        }
        let own = context.stats.health.nodes();
        let now = Duration::ZERO;
        let seen = &self.seen;
        let (members, ages, ends) = tokio::join!(seen.members(now), seen.ages(now), seen.ends(now));
        let members = members.map_err(|error| self.unanswered(error))?;
        let is_member = |(node, token): ([u8; 16], Option<[u8; 16]>)| {
            token.is_some() && members.nodes.get(&NodeId(node)).map(|row| row.token) == token
        };
        if !own.into_iter().all(is_member) {
            return Err(Unready::DroppedOut);
        }
        let ages = ages.map_err(|error| self.unanswered(error))?;
        let ends = ends.map_err(|error| self.unanswered(error))?;
        context.stats.health.works(READINESS, 0);
        // Every call observes all facts, because some of them can be judged only after two reads.
        let unowned = self.handovers.unowned(context.config.partitions, &members, context.env().now());
        let lag = dispatcher.lag(ends.now);
        if !unowned.is_empty() {
            return Err(Unready::Unowned(unowned));
        }
        let late: BTreeSet<_> =
            ages.iter().filter(|(_, age)| **age > YOUNG_MAX).map(|(partition, _)| *partition).collect();
        if !late.is_empty() {
            let oldest = ages.values().max().copied().unwrap_or_default();
            return Err(Unready::Waiting(late, oldest, self.failing()));
        }
        if lag > TAIL_LAG_MAX {
            return Err(Unready::Behind(lag, self.failing()));
        }
        Ok(())
    }

    /// Converts the error for a part that could not be read.
    fn unanswered(&self, error: Error) -> Unready {
        match error {
            Error::BusGone { reason } => Unready::Gone(reason),
            error @ Error::OlderThanRows { .. } => Unready::Older(error),
            Error::GaveUp { .. } => Unready::Away(None),
            Error::Store(error) | Error::RetriesExhausted { last: error, .. } => {
                if error == StoreError::DATABASE_LOCKED {
                    Unready::Locked
                } else {
                    Unready::Away(Some(error))
                }
            }
            error => {
                self.context.stats.health.failed(self.context.env(), READINESS, 0, &error);
                Unready::Unreadable(error)
            }
        }
    }

    /// Returns a sentence about what fails in this process and is tried again; empty if nothing does.
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

/// Formats numbers as ranges, one for each run of consecutive numbers.
fn ranges(numbers: &BTreeSet<u32>) -> String {
    let numbers: Vec<_> = numbers.iter().copied().collect();
    let runs = numbers.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [only] => only.to_string(),
        _ => format!("{}-{}", run[0], run[run.len() - 1]),
    });
    runs.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_are_named_in_runs() {
        assert_eq!(ranges(&BTreeSet::from([0, 1, 2, 7])), "0-2, 7");
    }
}
