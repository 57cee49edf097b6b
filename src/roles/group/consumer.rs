//! [`Consumer`]: a member of a group.

use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use bytes::Bytes;
use futures_util::{FutureExt, future::BoxFuture};
use tokio::{sync::watch, task::JoinSet};

use super::{
    ConsumerOptions, Group, Observer,
    observer::{Alive, PendingCloses},
    shard::Task,
    watcher,
};
use crate::{
    base::error::{Error, Result},
    state::{
        feed::FeedRow,
        keys::ShardId,
        membership::{Held, Member, Pool, Stop, Work, Worker},
        skipped::Place,
    },
    store::{Isolation, Transaction},
};

/// The shards on which a consumer works at the moment.
type Working = Arc<Mutex<Vec<ShardId>>>;

/// A member of a group: works on its part of the shards. Dropping it stops it at once, as a crash would, except that observers
/// are closed; [`Consumer::shutdown`] also saves how far it has come, and releases its leases.
#[must_use = "dropping it stops it: it works on nothing any more"]
pub struct Consumer {
    /// Tells observers that are closed after an abort why. It has to be dropped before the worker.
    alive: Alive,
    /// Takes and gives back shards.
    worker: Worker,
    /// The shards.
    shards: Working,
    /// Observers that are being closed.
    closings: PendingCloses,
    /// Looks for new rows, together with all other consumers of the process.
    _watcher: Arc<JoinSet<()>>,
    /// The node, if it has no other role.
    node: Option<Arc<Member>>,
}

impl Consumer {
    /// Starts it on `member`, and takes its part of the shards as far as it can be had at once.
    ///
    /// Fails with [`Error::NoGroup`] if the group was not created, and with [`Error::Invalid`] if it is of another bus.
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
        if context.keys.prefix() != member.keys.prefix() {
            return Err(Error::invalid("group", "it is of another bus than the node"));
        }
        context
            .db
            .run(async |tx| {
                group.row(&tx).await?.ok_or_else(|| group.missing())?;
                // The janitor reads it before it deletes the group for being idle.
                tx.clear(&context.keys.group_idle(&group.id));
                Ok(())
            })
            .await?;
        let watcher = context.arrivals.watcher(|| watcher::start(context));
        let pool = Pool { name: group.id.pool().into(), role: group.id.role() };
        let (balance, closings, shards) =
            (options.balance.clone(), PendingCloses::default(), Working::default());
        let consuming = Consuming {
            group: group.clone(),
            options,
            factory,
            closings: closings.clone(),
            is_gone: AtomicBool::new(false),
            asked: watch::Sender::new(None),
            shards: Arc::clone(&shards),
        };
        let worker = Worker::start(member, pool, Arc::new(consuming), balance).await?;
        let alive = closings.alive();
        Ok(Self { alive, worker, shards, closings, _watcher: watcher, node: None })
    }

    /// Starts it as a node of its own.
    pub(crate) async fn start_alone<R, F, O>(
        group: &Group<R>,
        member: Arc<Member>,
        factory: F,
        options: ConsumerOptions,
    ) -> Result<Self>
    where
        R: FeedRow,
        F: Fn(ShardId) -> O + Send + Sync + 'static,
        O: Observer<R>,
    {
        let consumer = member.or_leave(Self::start(group, &member, factory, options).await).await?;
        Ok(Self { node: Some(member), ..consumer })
    }

    /// The shards on which it works at the moment, in order. One that is worked through to its end, and waits for others before
    /// its successors are begun, is among them.
    pub fn shards(&self) -> Vec<ShardId> {
        let mut shards = self.shards.lock().unwrap_or_else(PoisonError::into_inner).clone();
        shards.sort_unstable();
        shards.dedup();
        shards
    }

    /// Lets each observer finish its batch, saves how far it has come, closes the observers, and releases the leases; leaves
    /// the bus if it was a node of its own. An observer that takes longer than the handover time is aborted.
    pub async fn shutdown(self) -> Result<()> {
        let ended = self.worker.shutdown().await;
        drop(self.alive);
        self.closings.finish().await;
        let left = match self.node {
            Some(node) => node.leave().await,
            None => Ok(()),
        };
        ended.and(left)
    }
}

impl fmt::Debug for Consumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer").field("shards", &self.shards()).finish_non_exhaustive()
    }
}

/// The work on the shards.
pub(super) struct Consuming<R, F> {
    pub group: Group<R>,
    /// How to work.
    pub options: ConsumerOptions,
    /// Makes an observer for a shard.
    pub factory: F,
    /// Observers that are being closed.
    pub closings: PendingCloses,
    /// Whether the group was gone when it last looked.
    is_gone: AtomicBool,
    /// Moves when somebody has asked that parked ids are tried again.
    pub asked: watch::Sender<Option<Bytes>>,
    /// The shards on which it works.
    shards: Working,
}

impl<R, F, O> Work for Consuming<R, F>
where
    R: FeedRow,
    F: Fn(ShardId) -> O + Send + Sync + 'static,
    O: Observer<R>,
{
    /// The shards with checkpoints. None, if the group was deleted.
    fn resources<'a>(&'a self, tx: &'a Transaction) -> BoxFuture<'a, Result<Vec<u64>>> {
        async move {
            let keys = &self.group.context.keys;
            // Checkpoints are written all the time; a round must not fail for it.
            let rows = tx.all_rows(keys.checkpoints_of(&self.group.id), Isolation::Snapshot).await?;
            let asked = tx.get(&keys.group_asked(&self.group.id), Isolation::Snapshot).await?;
            self.asked.send_if_modified(|known| std::mem::replace(known, asked.clone()) != asked);
            let was_gone = self.is_gone.swap(rows.is_empty(), Ordering::Relaxed);
            if rows.is_empty() && !was_gone {
                tracing::warn!(group = %self.group.id, "the group is deleted: its consumer has nothing to do");
            }
            rows.iter().map(|(key, _)| Ok(keys.checkpoint_shard(key)?.0)).collect()
        }
        .boxed()
    }

    fn skip(&self, key: &Bytes, error: &Error) {
        self.group.context.skip(&Place::Key(key.clone()), error);
    }

    fn acquired(&self, tx: &Transaction, _: u64, _: u64) {
        // The group is at work. The janitor has this in its conflict set when it deletes one that is idle.
        tx.clear(&self.group.context.keys.group_idle(&self.group.id));
    }

    fn run(self: Arc<Self>, lease: Held, stop: Stop) -> BoxFuture<'static, Result<()>> {
        let present = Present::enter(&self.shards, ShardId(lease.resource));
        async move {
            let _present = present;
            Task::new(self, lease, stop).run().await
        }
        .boxed()
    }
}

/// Lists a shard among those that are worked on, until it is dropped.
struct Present {
    shards: Working,
    /// This one.
    shard: ShardId,
}

impl Present {
    /// From now on.
    fn enter(shards: &Working, shard: ShardId) -> Self {
        shards.lock().unwrap_or_else(PoisonError::into_inner).push(shard);
        Self { shards: Arc::clone(shards), shard }
    }
}

impl Drop for Present {
    fn drop(&mut self) {
        let mut shards = self.shards.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = shards.iter().position(|shard| *shard == self.shard) {
            shards.swap_remove(place);
        }
    }
}
