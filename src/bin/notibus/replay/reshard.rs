//! `--reshard-every`: reshards the feed while a history is replayed into it, and checks its topology.

use notibus::feed::{NotificationFeed, TopologyEntry};
use tokio::{sync::watch, task::JoinSet};

use crate::{deadline::Moves, failure::Failure};

/// The most shards of the feed.
const SHARDS_MAX: usize = 64;

/// Reshards the feed after each such number of events, in its own task.
pub struct Resharder {
    feed: NotificationFeed,
    /// The entry that was open when the replay began.
    began: TopologyEntry,
    planned: u64,
    /// The only task; it ends with its owner.
    task: JoinSet<notibus::Result<u64>>,
}

impl Resharder {
    /// Reshards `feed` after each `every` of the planned `events`; `recorded` has the number of recorded events.
    pub async fn start(
        feed: NotificationFeed,
        every: u64,
        events: u64,
        recorded: watch::Receiver<u64>,
        moves: Moves,
    ) -> Result<Self, Failure> {
        let began = current(&feed).await?;
        let planned = events / every;
        let mut task = JoinSet::new();
        let schedule = ReshardSchedule { shards: began.shards.len(), every, planned };
        task.spawn(reshard(feed.clone(), schedule, recorded, moves));
        Ok(Self { feed, began, planned, task })
    }

    /// Waits until all reshards are done, once everything was recorded. Returns how many there were.
    pub async fn finish(&mut self) -> Result<u64, Failure> {
        match self.task.join_next().await {
            Some(Ok(done)) => Ok(done?),
            Some(Err(error)) => Err(Failure::Failed(format!("the resharding task has panicked: {error}"))),
            None => Ok(0),
        }
    }

    /// The faults of the topology after `done` reshards; empty if there are none.
    pub async fn check(&self, done: u64) -> Result<Vec<String>, Failure> {
        let mut differences = Vec::new();
        if done != self.planned {
            differences.push(format!("{done} reshards were done, not {}", self.planned));
        }
        let topology = self.feed.topology().await?;
        let added = topology.iter().filter(|entry| entry.first > self.began.first).count() as u64;
        if added != done {
            differences.push(format!("{done} reshards have added {added} entries to the topology"));
        }
        let open: Vec<_> = topology.iter().filter(|entry| !entry.is_closed).collect();
        let should =
            if done.is_multiple_of(2) { self.began.shards.len() } else { other(self.began.shards.len()) };
        if open.len() != 1 || open[0].shards.len() != should {
            differences.push(format!("the feed should have {should} shards, and one open entry: {open:?}"));
        }
        Ok(differences)
    }
}

async fn current(feed: &NotificationFeed) -> Result<TopologyEntry, Failure> {
    let last = feed.topology().await?.pop();
    last.ok_or_else(|| Failure::Failed("the feed has no topology".to_owned()))
}

/// The other number of shards: the double, or the half where that would be too many.
fn other(shards: usize) -> usize {
    if shards < SHARDS_MAX { (2 * shards).min(SHARDS_MAX) } else { shards / 2 }
}

struct ReshardSchedule {
    /// Number of shards when it begins.
    shards: usize,
    /// After how many events.
    every: u64,
    planned: u64,
}

/// Reshards `feed` a number of times, to the other number of shards and back.
async fn reshard(
    feed: NotificationFeed,
    ReshardSchedule { shards, every, planned }: ReshardSchedule,
    mut recorded: watch::Receiver<u64>,
    moves: Moves,
) -> notibus::Result<u64> {
    let counts =
        [other(shards), shards].map(|count| u32::try_from(count).expect("a feed has at most 10,000"));
    for (done, &count) in (0..planned).zip(counts.iter().cycle()) {
        if recorded.wait_for(|&recorded| recorded >= (done + 1) * every).await.is_err() {
            // The writers have given up.
            return Ok(done);
        }
        feed.reshard(count, None).await?;
        moves.step();
    }
    Ok(planned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_go_up_and_back() {
        assert_eq!([1, 4, 40, 64, 100].map(other), [2, 8, 64, 32, 50]);
    }
}
