//! [`Member`]: what the tasks of a consumer on one node share.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Deref,
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::{sync::watch, task::JoinSet};

use super::{
    CloseReason, ConsumerOptions,
    handler::{AnyHandler, ConsumedRow, Factory},
    in_hand::Tenants,
    stored::ConsumerHandle,
};
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        error::{Error, Result, panic_text},
        filter::Filter,
    },
    state::{
        feed::{RawFeed, Topology},
        keys::{FeedId, ShardId, TopologyRow},
        membership::Stop,
    },
    store::{Isolation, Transaction},
};

/// What the tasks of a consumer on one node share.
pub(super) struct Member {
    pub consumer: ConsumerHandle,
    pub feed: FeedId,
    pub filter: Filter,
    pub options: ConsumerOptions,
    pub tenants: Option<Tenants>,
    /// Whether the handler works on batches in the order of the shard.
    pub is_ordered: bool,
    /// The newest change that the node knows of: to the consumer, its shards, its leases or its deferred ids.
    pub changes: watch::Sender<Changes>,
    pub closing: PendingCloses,
    /// Whether the handle of the member was dropped.
    is_dropped: AtomicBool,
    known: Mutex<Known>,
    /// Why the member can no longer work.
    ended: watch::Sender<Option<Error>>,
}

/// What the tasks of a consumer must read again: everything if the shards have changed, or else what they read before `version`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Changes {
    /// How many times the shards have changed.
    pub shards: u64,
    /// The version of the last change of any kind.
    pub version: u64,
}

/// The identity and the generation of a consumer, which stay the same until its position is set again.
pub(super) type Identity = ([u8; 16], u64);

/// For each shard, up to where no wanted row follows its checkpoint. Valid until the identity changes, whichever node works on the shard.
pub(super) type Passages = (Identity, BTreeMap<ShardId, Sequence>);

/// The shards of a consumer, as far as a node knows them.
#[derive(Debug, Default)]
struct Known {
    /// The first shard with a checkpoint.
    first: Option<ShardId>,
    /// The shards that take over once those with checkpoints are drained.
    successors: Vec<ShardId>,
    /// The shards on which the node works.
    working: Vec<ShardId>,
    /// The identity of the consumer; `None` if it does not exist.
    identity: Option<Identity>,
    /// How many times the first shard, the successors or the identity have changed.
    changes: u64,
    /// Up to where the tasks of the node have found no wanted rows.
    passed: Passages,
}

impl Deref for Member {
    type Target = ConsumerHandle;

    fn deref(&self) -> &ConsumerHandle {
        &self.consumer
    }
}

impl Member {
    pub fn new(
        consumer: ConsumerHandle,
        (feed, filter): (FeedId, Filter),
        (options, tenants): (ConsumerOptions, Option<Tenants>),
        is_ordered: bool,
    ) -> Self {
        Self {
            consumer,
            feed,
            filter,
            options,
            tenants,
            is_ordered,
            changes: watch::Sender::default(),
            closing: PendingCloses::default(),
            is_dropped: AtomicBool::new(false),
            known: Mutex::default(),
            ended: watch::Sender::default(),
        }
    }

    pub fn feed(&self) -> RawFeed<'_> {
        RawFeed::new(&self.context, &self.feed)
    }

    /// Returns how many times the shards have changed; `None` unless the node works on the first shard.
    pub fn if_first(&self) -> Option<u64> {
        let known = self.known.lock();
        known.first.is_some_and(|first| known.working.contains(&first)).then_some(known.changes)
    }

    /// Notes that the shards were read, and that the consumer last changed at the version `changed`.
    pub fn settled(&self, changed: u64) {
        let now = Changes { shards: self.known.lock().changes, version: changed };
        self.changes.send_if_modified(|changes| std::mem::replace(changes, now) != now);
    }

    /// Returns the shards on which the node works, in order.
    pub fn working(&self) -> Vec<ShardId> {
        let mut shards = self.known.lock().working.clone();
        shards.sort_unstable();
        shards.dedup();
        shards
    }

    /// Notes that `shard` has no wanted row between its stored checkpoint and `to`.
    pub fn note_passed(&self, identity: Identity, shard: ShardId, to: Sequence) {
        let passed = &mut self.known.lock().passed;
        if passed.0 != identity {
            *passed = (identity, BTreeMap::new());
        }
        passed.1.insert(shard, to);
    }

    /// Returns up to where the tasks of the node have found no wanted rows, and the shards on which the node works.
    pub fn passed(&self) -> (Passages, BTreeSet<ShardId>) {
        let known = self.known.lock();
        (known.passed.clone(), known.working.iter().copied().collect())
    }

    /// Whether `shard` is the first one with a checkpoint.
    pub fn is_first(&self, shard: ShardId) -> bool {
        self.known.lock().first == Some(shard)
    }

    /// Whether `shard` will take over from shards that are not drained yet.
    pub fn is_successor(&self, shard: ShardId) -> bool {
        self.known.lock().successors.contains(&shard)
    }

    /// Ends the member because of `error`. If the member has already ended, the first reason is kept.
    pub fn end(&self, error: Error) {
        self.ended.send_if_modified(|ended| {
            let is_first = ended.is_none();
            let is_expected = matches!(error, Error::NoFeed { .. });
            if is_first && !is_expected {
                tracing::warn!(%error, consumer = %self.name(), "a member of a consumer has nothing left to work on");
            }
            if is_first {
                *ended = Some(error);
            }
            is_first
        });
    }

    /// Completes with the reason when the member can no longer work. Cancel safe.
    pub async fn ended(&self) -> Error {
        let mut ended = self.ended.subscribe();
        let ended = ended.wait_for(Option::is_some);
        tokio::select! {
            biased;
            gone = self.context.stats.health.end_of_work() => gone.clone(),
            ended = ended => ended.expect("the sender is here").clone().expect("it was waited for"),
        }
    }

    /// Reads the shards with checkpoints, and those of the next topology entry if theirs is closed. Ends the member if its feed is gone, or
    /// if the consumer was deleted. Fails if the consumer was created again with another feed or filter.
    pub async fn read_shards(&self, tx: &Transaction) -> Result<Vec<u64>> {
        let (checkpoints, row) = tokio::try_join!(self.checkpoints(tx), self.row(tx, Isolation::Snapshot))?;
        let mut shards: Vec<_> = checkpoints.into_iter().map(|(shard, _)| shard).collect();
        if row.as_ref().is_some_and(|row| row.feed != self.feed || row.filter != self.filter.hash()) {
            self.end(self.missing());
            return Err(self.missing());
        }
        // The member that found the feed gone has removed the consumer.
        if row.is_none()
            && let Err(gone @ Error::NoFeed { .. }) =
                Topology::read(tx, self.feed(), Isolation::Snapshot).await
        {
            self.end(gone);
        }
        let identity = row.map(|row| (row.identity, row.generation));
        if identity.is_none() && self.known.lock().identity.is_some() {
            self.end(self.missing());
        }
        let first = shards.first().copied();
        let successors = match first {
            Some(first) => self.successors(tx, first).await?,
            None => Vec::new(),
        };
        shards.extend(&successors);
        {
            let mut known = self.known.lock();
            known.passed.1.retain(|shard, _| shards.binary_search(shard).is_ok());
            if (known.first, known.identity) != (first, identity) || known.successors != successors {
                known.changes += 1;
            }
            (known.first, known.identity, known.successors) = (first, identity, successors);
        }
        Ok(shards.into_iter().map(|shard| shard.0).collect())
    }

    /// Reads the shards of the topology entry after that of `shard`; none if there is no such entry.
    async fn successors(&self, tx: &Transaction, shard: ShardId) -> Result<Vec<ShardId>> {
        let topology = match Topology::of_shard(tx, self.feed(), shard).await {
            // The tasks of the shard will find out that the feed is gone.
            Err(Error::NoFeed { .. }) => return Ok(Vec::new()),
            topology => topology?,
        };
        let (_, successor) = topology.entry_of(shard)?;
        Ok(successor.map(|entry| entry.shards().collect()).unwrap_or_default())
    }
}

/// A member, and the factory that makes a handler for each of its shards.
pub(super) struct Working<R> {
    pub member: Arc<Member>,
    pub factory: Factory<R>,
}

impl<R> Deref for Working<R> {
    type Target = Member;

    fn deref(&self) -> &Member {
        &self.member
    }
}

/// Lists a shard as being worked on until this value is dropped.
pub(super) struct Present {
    member: Arc<Member>,
    shard: ShardId,
}

impl Present {
    pub fn enter(member: &Arc<Member>, shard: ShardId) -> Self {
        member.known.lock().working.push(shard);
        Self { member: Arc::clone(member), shard }
    }
}

impl Drop for Present {
    fn drop(&mut self) {
        let working = &mut self.member.known.lock().working;
        if let Some(index) = working.iter().position(|shard| *shard == self.shard) {
            working.swap_remove(index);
        }
    }
}

/// Calls of `closed` in progress. They outlive the task of the shard.
#[derive(Debug, Clone, Default)]
pub(super) struct PendingCloses(Arc<Mutex<JoinSet<()>>>);

impl PendingCloses {
    pub async fn finish(&self) {
        let mut tasks = std::mem::take(&mut *self.0.lock());
        while tasks.join_next().await.is_some() {}
    }
}

/// Marks the handle of the member as dropped when this value is dropped.
pub(super) struct DroppedFlag(pub Arc<Member>);

impl Drop for DroppedFlag {
    fn drop(&mut self) {
        self.0.is_dropped.store(true, Ordering::Relaxed);
    }
}

/// The handler of a shard. The handler is closed exactly once: on request, or when its session is dropped.
pub(super) struct OpenHandler<R: ConsumedRow> {
    /// `None` once the handler is closed.
    handler: Option<Arc<dyn AnyHandler<R>>>,
    shard: ShardId,
    stop: Stop,
    member: Arc<Member>,
}

impl<R: ConsumedRow> OpenHandler<R> {
    pub fn new(working: &Working<R>, shard: ShardId, stop: Stop) -> Self {
        let member = Arc::clone(&working.member);
        Self { handler: Some((working.factory)(shard)), shard, stop, member }
    }

    pub fn handler(&self) -> &Arc<dyn AnyHandler<R>> {
        self.handler.as_ref().expect("it is open")
    }

    /// Calls `opened` of the handler. If that panics, fails with the text of the panic.
    pub async fn opened(&self) -> std::result::Result<(), String> {
        let (handler, shard) = (Arc::clone(self.handler()), self.shard);
        let opened = AssertUnwindSafe(async move { handler.opened(shard).await }).catch_unwind().await;
        opened.map_err(|panic| format!("panic: {}", panic_text(&*panic)))
    }

    /// Closes the handler.
    pub async fn close(mut self, reason: CloseReason) {
        let handler = self.handler.take().expect("it is open");
        closed(handler, self.shard, reason, self.deadline()).await;
    }

    fn deadline(&self) -> impl Future<Output = ()> + Send + use<R> {
        self.member.env().sleep(self.member.options.balance.handover)
    }
}

impl<R: ConsumedRow> Drop for OpenHandler<R> {
    fn drop(&mut self) {
        let (Some(handler), Ok(runtime)) = (self.handler.take(), tokio::runtime::Handle::try_current())
        else {
            return;
        };
        let is_shutdown = self.stop.was_given() || self.member.is_dropped.load(Ordering::Relaxed);
        let reason = if is_shutdown { CloseReason::Shutdown } else { CloseReason::LeaseLost };
        let owner = self.member.closing.clone();
        let closing = closed(handler, self.shard, reason, self.deadline());
        let closing = async move {
            // Keeps the set of these tasks alive as long as one of them runs.
            let _owner = owner;
            closing.await;
        };
        let mut tasks = self.member.closing.0.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn_on(closing, &runtime);
    }
}

/// Calls `closed` of a handler, and drops the handler if the call has not returned by the deadline.
async fn closed<R>(
    handler: Arc<dyn AnyHandler<R>>,
    shard: ShardId,
    reason: CloseReason,
    deadline: impl Future<Output = ()>,
) {
    let shard_id = shard.0;
    let closed = AssertUnwindSafe(async move { handler.closed(shard, reason).await });
    tokio::select! {
        closed = closed.catch_unwind() => if closed.is_err() {
            tracing::error!(shard = shard_id, ?reason, "a consumer's handler panicked when it was closed");
        },
        () = deadline => {
            tracing::warn!(shard = shard_id, "a consumer's handler did not close in time and was dropped");
        }
    }
}

/// Whether the checkpoint `stored` is the mark of a drained shard.
pub(super) fn is_marked(topology: &Topology, shard: ShardId, stored: Cursor) -> bool {
    successor(topology, shard).is_ok_and(|successor| stored.position() >= successor.first)
}

/// Returns the topology entry after that of `shard`. The entry of `shard` must be closed.
pub(super) fn successor(topology: &Topology, shard: ShardId) -> Result<&TopologyRow> {
    let (_, successor) = topology.entry_of(shard)?;
    successor.ok_or_else(|| Error::corrupt("topology", "a closed entry is open again"))
}

/// Returns the shard of `id` in `entry`.
pub(super) fn shard_in(
    topology: &Topology,
    feed: RawFeed<'_>,
    entry: &TopologyRow,
    id: &[u8],
) -> Result<ShardId> {
    let first = entry.shards().next().expect("an entry has shards");
    topology.shard_beside(feed, first, id)
}
