//! [`Consumer`]: the handle of a member on this node; and the work of a member, shard by shard.

use std::{fmt, sync::Arc};

use futures_util::{FutureExt, future::BoxFuture};
use tokio::task::JoinSet;

use super::{
    ConsumerHandle,
    handler::ConsumedRow,
    member::{DroppedFlag, Member, Present, Working},
    shard::ShardTask,
};
use crate::{
    base::{
        error::{Error, Result},
        tasks::in_time,
    },
    state::{
        feed_watcher::Listener,
        keys::ShardId,
        membership::{Held, Stop, Work, Worker},
    },
    store::Transaction,
};

impl<R: ConsumedRow> Work for Working<R> {
    fn resources<'a>(&'a self, tx: &'a Transaction) -> BoxFuture<'a, Result<Vec<u64>>> {
        self.read_shards(tx).boxed()
    }

    fn settled(&self, changed: u64) {
        self.member.settled(changed);
    }

    fn run(self: Arc<Self>, lease: Held, stop: Stop) -> BoxFuture<'static, Result<()>> {
        let present = Present::enter(&self.member, ShardId(lease.resource));
        async move {
            let _present = present;
            ShardTask::new(self, lease, stop).run().await
        }
        .boxed()
    }
}

/// A member of a consumer on this node. Dropping this handle stops the member at once, as a crash would, except that handlers are closed.
/// [`Consumer::shutdown`] lets runs end, saves the checkpoints, and releases the leases.
#[must_use = "dropping the handle stops the member"]
pub struct Consumer {
    /// Marks the member as dropped, for handlers that are closed after an abort. Must be dropped before the worker.
    dropped: DroppedFlag,
    worker: Worker,
    member: Arc<Member>,
    /// The task that writes the low watermark. It is aborted on drop.
    writer: JoinSet<()>,
    /// Makes the process poll for new rows. All consumers of the process share the poll.
    hints: Arc<Listener>,
}

impl Consumer {
    pub(super) fn new(worker: Worker, member: Arc<Member>, hints: Arc<Listener>) -> Self {
        let (dropped, writer) = (DroppedFlag(Arc::clone(&member)), member.start_low_watermark(&hints));
        Self { dropped, worker, member, writer, hints }
    }

    /// Returns the handle of the consumer as a whole, on all nodes.
    pub fn handle(&self) -> &ConsumerHandle {
        &self.member.consumer
    }

    /// Returns the shards on which this node works at the moment, in order.
    pub fn shards(&self) -> Vec<ShardId> {
        self.member.working()
    }

    /// Completes when this member can no longer work: with [`Error::NoFeed`] if the feed of the consumer is gone, with
    /// [`Error::NoConsumer`] if the consumer was deleted or has expired, for example while this process was paused, and with
    /// [`Error::BusGone`] if the incarnation of the bus was raised. Shut this member down then, and start another. Cancel safe.
    pub async fn ended(&self) -> Error {
        self.member.ended().await
    }

    /// Waits until the consumer, on all nodes, has finished or deferred everything that is in its feed now. If another process has
    /// resharded an idle feed of documents, this takes up to a minute.
    pub async fn caught_up(&self) -> Result<()> {
        self.member.caught_up().await
    }

    /// Waits until the consumer, on all nodes, has finished or deferred everything that was committed up to `version`. Fails with
    /// [`Error::Invalid`] if the version is ahead of the store.
    pub async fn wait_until(&self, version: u64) -> Result<()> {
        self.member.wait_until(version).await
    }

    /// Waits for runs to end, for at most half of the handover time, saves the checkpoints, closes the handlers, and releases the leases.
    /// If this was the last handle on the node, the node leaves the bus.
    pub async fn shutdown(self) -> Result<()> {
        let Self { dropped, worker, member, mut writer, hints } = self;
        let is_first = member.if_first().is_some();
        let ended = worker.shutdown().await;
        writer.shutdown().await;
        drop(dropped);
        member.closing.finish().await;
        // This may be the last member, and the janitor learns only from the low watermark which checkpoints were just saved.
        if is_first && ended.is_ok() {
            let (env, what) = (member.env(), "writing the low watermark of a consumer");
            if let Err(error) = in_time(env, what, member.write_low_watermark(&hints, false)).await {
                tracing::warn!(%error, "could not write the low watermark of a consumer; it stays as it was");
            }
        }
        // The caller may close the store right after this.
        if let Some(hints) = Arc::into_inner(hints) {
            hints.close().await;
        }
        ended
    }
}

impl fmt::Debug for Consumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, shards) = (self.member.name(), self.shards());
        f.debug_struct("Consumer").field("name", name).field("shards", &shards).finish_non_exhaustive()
    }
}
