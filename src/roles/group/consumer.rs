//! [`Consumer`]: a member of a group.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use futures_util::{FutureExt, future::BoxFuture};
use tokio::{sync::watch, task::JoinSet};

use super::{
    ConsumerOptions, Group, Observer,
    consuming::Consuming,
    lowest::{Lowest, Working},
    observer::{Alive, PendingCloses},
    shard::ShardTask,
};
use crate::{
    base::{
        error::{Error, Result},
        tasks::in_time,
    },
    roles::consumer::watcher,
    state::{
        feed::FeedRow,
        keys::ShardId,
        membership::{Held, Member, Pool, Stop, Work, Worker},
    },
    store::{Isolation, Transaction},
};

/// A member of a group: works on its share of the shards. Dropping it stops it at once, as a crash would, except that observers
/// are closed; [`Consumer::shutdown`] also saves its positions, and releases its leases.
#[must_use = "dropping it stops it: it works on nothing any more"]
pub struct Consumer {
    /// Shows observers that are closed after an abort that the consumer was dropped. It has to be dropped before the worker.
    alive: Alive,
    worker: Worker,
    shards: Working,
    /// Observers that are being closed.
    pending_closes: PendingCloses,
    group: Group<()>,
    /// The facts behind the group's lowest checkpoint.
    lowest: Arc<Lowest>,
    /// Rewrites the lowest checkpoint; aborted when this is dropped.
    _rewriter: JoinSet<()>,
    /// Polls for new rows, together with all other consumers of the process.
    _watcher: Arc<JoinSet<()>>,
}

impl Consumer {
    /// Starts it on `member`, and takes its share of the shards as far as they are free.
    ///
    /// Fails with [`Error::NoGroup`] if the group was not created, and with [`Error::Invalid`] if it belongs to another bus.
    pub(crate) async fn start<R, F, O>(
        group: &Group<R>,
        member: &Arc<Member>,
        factory: F,
        options: ConsumerOptions,
    ) -> Result<Self>
    where
        R: FeedRow,
        F: Fn(ShardId) -> O + Send + Sync + 'static,
        O: Observer<R>,
    {
        options.check()?;
        let context = &group.context;
        if context.keys.prefix() != member.keys().prefix() {
            return Err(Error::invalid(
                "group",
                "it belongs to another bus than the node; open it on the node's bus",
            ));
        }
        context
            .db
            .run(async |tx| {
                group.row(&tx).await?.ok_or_else(|| group.missing())?;
                // The janitor reads this key before it deletes an idle group: it counts again from then on.
                tx.clear(&context.keys.group_idle(&group.id));
                Ok(())
            })
            .await?;
        let watcher = context.wakeups.watcher(|| watcher::start(context));
        let idle = Some(context.keys.group_idle(&group.id).into());
        let pool = Pool { name: group.id.pool().into(), role: group.id.role(), idle };
        let (balance, pending_closes, shards) =
            (options.balance.clone(), PendingCloses::default(), Working::default());
        let lowest = Arc::new(Lowest::new(&shards));
        let consuming = Consuming {
            group: group.clone(),
            lowest: Arc::clone(&lowest),
            options,
            factory,
            pending_closes: pending_closes.clone(),
            is_gone: AtomicBool::new(false),
            asked: watch::Sender::new(None),
            shards: Arc::clone(&shards),
        };
        let worker = Worker::start(member, pool, Arc::new(consuming), balance).await?;
        let alive = pending_closes.alive();
        let rewriter = Arc::clone(&lowest).start(group);
        let group = group.without_type();
        Ok(Self {
            alive,
            worker,
            shards,
            pending_closes,
            group,
            lowest,
            _rewriter: rewriter,
            _watcher: watcher,
        })
    }

    /// The shards on which it works at the moment, in order. They include shards that are drained, but wait for others before
    /// their successors begin.
    pub fn shards(&self) -> Vec<ShardId> {
        let mut shards = self.shards.lock().clone();
        shards.sort_unstable();
        shards.dedup();
        shards
    }

    /// Lets each observer finish its batch, saves the positions, closes the observers, and releases the leases. An observer that takes
    /// longer than the handover time is aborted. If this was the last handle on the node, the node leaves the bus.
    pub async fn shutdown(self) -> Result<()> {
        let is_mine = self.lowest.is_mine();
        let ended = self.worker.shutdown().await;
        drop(self.alive);
        self.pending_closes.finish().await;
        // No consumer may follow, and the janitor waits for the positions that were saved just now.
        if is_mine && ended.is_ok() && self.group.instance().is_none() {
            let (env, rewriting) = (self.group.context.env(), self.group.rewrite_lowest());
            let saved = in_time(env, "saving the lowest checkpoint of a group", rewriting).await;
            saved
                .inspect_err(
                    |error| tracing::warn!(%error, "the lowest checkpoint of a group stays as it was"),
                )
                .ok();
        }
        ended
    }
}

impl fmt::Debug for Consumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer").field("shards", &self.shards()).finish_non_exhaustive()
    }
}

impl<R, F, O> Work for Consuming<R, F>
where
    R: FeedRow,
    F: Fn(ShardId) -> O + Send + Sync + 'static,
    O: Observer<R>,
{
    /// The shards with checkpoints; none if the group was deleted.
    fn resources<'a>(&'a self, tx: &'a Transaction) -> BoxFuture<'a, Result<Vec<u64>>> {
        async move {
            let keys = &self.group.context.keys;
            // Checkpoints change all the time, and must not make a round of balancing fail.
            let rows = tx.all_rows(keys.checkpoints_of(&self.group.id), Isolation::Snapshot).await?;
            let asked = tx.get(&keys.group_asked(&self.group.id), Isolation::Snapshot).await?;
            self.asked.send_if_modified(|known| std::mem::replace(known, asked.clone()) != asked);
            let was_gone = self.is_gone.swap(rows.is_empty(), Ordering::Relaxed);
            if rows.is_empty() && !was_gone {
                tracing::warn!(group = %self.group.id, "the group is deleted: its consumer has nothing to do");
            }
            let shards: Vec<_> =
                rows.iter().map(|(key, _)| Ok(keys.checkpoint_shard(key)?.0)).collect::<Result<_>>()?;
            self.lowest.note_first(shards.first().copied());
            Ok(shards)
        }
        .boxed()
    }

    fn acquired(&self, _: &Transaction, _: u64, _: u64) {}

    fn run(self: Arc<Self>, lease: Held, stop: Stop) -> BoxFuture<'static, Result<()>> {
        let present = Present::enter(&self.shards, ShardId(lease.resource));
        async move {
            let _present = present;
            ShardTask::new(self, lease, stop).run().await
        }
        .boxed()
    }
}

/// Lists a shard among those in work, until it is dropped.
struct Present {
    shards: Working,
    shard: ShardId,
}

impl Present {
    fn enter(shards: &Working, shard: ShardId) -> Self {
        shards.lock().push(shard);
        Self { shards: Arc::clone(shards), shard }
    }
}

impl Drop for Present {
    fn drop(&mut self) {
        let mut shards = self.shards.lock();
        if let Some(index) = shards.iter().position(|shard| *shard == self.shard) {
            shards.swap_remove(index);
        }
    }
}
