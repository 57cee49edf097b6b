//! The lowest checkpoint of a group, in one row: the janitor reads it before it drops a tombstone.
//!
//! Checkpoints are as many as groups times shards, and move with every batch, so the janitor must not read all of them. The
//! consumer that has the first of the group's shards rewrites the row now and then: a while after rows have come or the shards of
//! the group have changed, and until the row is past all rows that have come. So the row costs nothing while the feed rests, it may
//! be behind, and is never above a checkpoint: these only grow, and a reset clears the row.
//!
//! Feeds of documents have no tombstones, and their groups no such row.

use std::{sync::Arc, time::Duration};

use parking_lot::{Mutex, MutexGuard};
use tokio::{sync::watch, task::JoinSet};

use super::Group;
use crate::{
    base::{encoding::Sequence, error::Result},
    state::{
        feed_wakeups::FeedHeads,
        keys::{ShardId, checkpoint_position},
    },
    store::{Isolation, Priority, RangeRead, Transaction, TransactionOption},
};

/// How often a consumer checks whether it has to rewrite the row.
const PAUSE: Duration = Duration::from_secs(30);

/// The most such pauses between two reads of the checkpoints of a group that makes no progress.
const PAUSES_MAX: u32 = 20;

/// Its name in reports of trouble.
const LOWEST: &str = "lowest checkpoint of a group";

/// The shards on which a consumer works at the moment.
pub(super) type Working = Arc<Mutex<Vec<ShardId>>>;

/// The shards of a group, as they were when its pool last changed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Shards {
    /// How often they were read.
    count: u64,
    first: Option<ShardId>,
}

/// What a consumer knows of its group, for the task that rewrites the row.
#[derive(Debug)]
pub(super) struct Lowest {
    shards: Mutex<Shards>,
    /// The shards on which the consumer works.
    working: Working,
}

impl Lowest {
    /// For a consumer that works on `working`.
    pub fn new(working: &Working) -> Self {
        Self { shards: Mutex::default(), working: Arc::clone(working) }
    }

    /// Locks what is known of the shards. No holder of the lock can panic.
    fn shards(&self) -> MutexGuard<'_, Shards> {
        self.shards.lock()
    }

    /// The shards of the group were read; this is the first of them.
    pub fn note_first(&self, first: Option<u64>) {
        let mut shards = self.shards();
        *shards = Shards { count: shards.count.wrapping_add(1), first: first.map(ShardId) };
    }

    /// Returns the shards if this consumer works on the first one, and so has to rewrite the row.
    fn if_mine(&self) -> Option<Shards> {
        let shards = *self.shards();
        let working = self.working.lock();
        shards.first.is_some_and(|first| working.contains(&first)).then_some(shards)
    }

    /// Whether this consumer has to rewrite the row.
    pub fn is_mine(&self) -> bool {
        self.if_mine().is_some()
    }

    /// Starts the task that rewrites the row of `group`; none, if it needs none.
    pub fn start<R: Send + Sync + 'static>(self: Arc<Self>, group: &Group<R>) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        if group.instance().is_none() {
            let (context, group) = (&group.context, group.clone());
            let hints = context.wakeups.listen(&group.id.feed);
            let make = move || Arc::clone(&self).run(group.clone(), hints.clone());
            tasks.spawn(context.stats.supervised(context.env(), LOWEST, make));
        }
        tasks
    }

    /// Rewrites the row whenever that is due, until it is dropped.
    async fn run<R>(self: Arc<Self>, group: Group<R>, hints: watch::Receiver<FeedHeads>) {
        let env = group.context.env();
        let (mut seen, mut known) = (None, Sequence::MIN);
        let (mut pauses, mut waited) = (0, 0);
        loop {
            env.sleep(env.spread(PAUSE, 0.75, 1.25)).await;
            let Some(shards) = self.if_mine() else {
                seen = None;
                continue;
            };
            let (now, is_behind) = {
                let hints = hints.borrow();
                (Some((hints.count, shards)), hints.any_may_have_rows(known))
            };
            waited += 1;
            if seen == now && (!is_behind || waited <= pauses) {
                continue;
            }
            let lowest = match group.rewrite_lowest().await {
                Ok(lowest) => lowest.unwrap_or(Sequence::MIN),
                Err(error) => {
                    group.context.stats.health.complain(env, LOWEST, &error);
                    continue;
                }
            };
            let has_moved = seen != now || known != lowest;
            pauses = if has_moved { 0 } else { (pauses * 2 + 1).min(PAUSES_MAX) };
            (seen, known, waited) = (now, lowest, 0);
        }
    }
}

impl<R> Group<R> {
    /// Rewrites the row of the lowest checkpoint, unless it says so already. Returns the lowest checkpoint; `None` if there is none.
    pub(super) async fn rewrite_lowest(&self) -> Result<Option<Sequence>> {
        self.context
            .db
            .run(async |tx| {
                tx.set_option(TransactionOption::Priority(Priority::Batch));
                self.rewrite_lowest_in(&tx).await
            })
            .await
    }

    /// [`Group::rewrite_lowest`] in one transaction.
    async fn rewrite_lowest_in(&self, tx: &Transaction) -> Result<Option<Sequence>> {
        let keys = &self.context.keys;
        // A reset or a deletion makes this fail. Else checkpoints grow, so that what was read is a lower bound for good.
        if self.row(tx).await?.is_none() {
            return Ok(None);
        }
        let mut lowest: Option<Sequence> = None;
        let mut pages = tx.pages(RangeRead::new(keys.checkpoints_of(&self.id)), Isolation::Snapshot);
        while let Some(rows) = pages.next().await? {
            for (_, value) in &rows {
                let position = checkpoint_position(value)?;
                if lowest.is_none_or(|lowest| position < lowest) {
                    lowest = Some(position);
                }
            }
        }
        let key = keys.lowest_checkpoint(&self.id);
        let stored = tx.get(&key, Isolation::Serializable).await?;
        let stored = stored.map(|value| checkpoint_position(&value)).transpose()?;
        if let Some(lowest) = lowest.filter(|lowest| stored.is_none_or(|stored| stored < *lowest)) {
            tx.set(&key, lowest.as_bytes());
        }
        Ok(lowest)
    }
}
