//! [`GroupBatch`]: rows for an observer, and [`Checkpointer`]: saves that they were worked on.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;

use super::FencingToken;
use crate::{
    base::{
        bugs::{Bug, is_on},
        encoding::Sequence,
        error::{Error, Result},
    },
    state::{
        context::Context,
        feed::FeedRow,
        keys::{GroupId, GroupParkedRow, ShardId, checkpoint_position},
        membership::Held,
    },
    store::{AfterCommit, Isolation, Transaction},
};

/// What a checkpoint in a transaction is going to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "if it is there already, the transaction must not do its work again"]
pub enum CheckpointState {
    /// It is written with the commit of the transaction.
    Pending,
    /// It is there already, so an earlier transaction with this checkpoint was committed: as after an unknown result. Do
    /// nothing more in this one.
    Done,
}

impl CheckpointState {
    /// Whether it is there already.
    pub fn is_done(self) -> bool {
        self == Self::Done
    }
}

/// How far a consumer has come in a shard in the store, as far as its process knows.
#[derive(Debug)]
pub(super) struct Stored(Mutex<Sequence>);

impl Stored {
    /// It stands at `position`.
    pub fn new(position: Sequence) -> Self {
        Self(Mutex::new(position))
    }

    /// Where it stands.
    pub fn get(&self) -> Sequence {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It stands at `position`, as the store says.
    pub fn set(&self, position: Sequence) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = position;
    }

    /// It stands at `position` or further.
    pub fn raise(&self, position: Sequence) {
        let mut stored = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *stored = position.max(*stored);
    }
}

/// What the batches of a shard have in common.
#[derive(Debug)]
pub(super) struct BatchContext {
    pub context: Arc<Context>,
    pub group: GroupId,
    pub shard: ShardId,
    /// The right to work on it.
    pub lease: Held,
    /// How far it has come in the store.
    pub stored: Stored,
}

impl BatchContext {
    /// The position in the store. Fails with [`Error::LeaseLost`] if the lease is lost, and makes `tx`
    /// fail if it is lost, or the checkpoint is written, before the commit. `None` if the group has nothing to read in the shard.
    pub async fn position(&self, tx: &Transaction) -> Result<Option<Sequence>> {
        let key = self.context.keys.checkpoint(&self.group, self.shard);
        let (checked, stored) = tokio::join!(self.lease.check(tx), tx.get(&key, Isolation::Serializable));
        if !is_on(Bug::CheckpointWithoutLease) {
            checked?;
        }
        stored?.map(|value| checkpoint_position(&value)).transpose()
    }

    /// Writes in `tx` that everything up to `to` was worked on or is parked, unless the store knows better: the group has gone over to
    /// other shards, or an earlier transaction was committed after all. A commit that comes late is refused, because it would set
    /// the group back, or to a shard that it has left.
    pub async fn advance(&self, tx: &Transaction, to: Sequence, parks: &Parks) -> Result<()> {
        if is_on(Bug::LateCheckpointSetsBack) {
            self.lease.check(tx).await?;
            self.write_position(tx, to);
        } else if let Some(stored) = self.position(tx).await?.filter(|stored| *stored < to) {
            self.write(tx, (stored, to), parks).await?;
        }
        Ok(())
    }

    /// Writes in `tx`, which has read that the position is `stored`, that everything up to `to` was worked on or is parked.
    async fn write(&self, tx: &Transaction, (stored, to): (Sequence, Sequence), parks: &Parks) -> Result<()> {
        for id in &parks.overtaken {
            tx.clear(&self.context.keys.group_parked(&self.group, id));
        }
        for (id, row) in &parks.pending {
            // Anyone who has saved what stands before has parked it.
            if row.sequence <= stored || row.sequence > to {
                continue;
            }
            let key = self.context.keys.group_parked(&self.group, id);
            let parked = tx.get(&key, Isolation::Serializable).await?;
            // One that cannot be decoded is as good as none: this row is newer.
            let parked = match parked.map(|value| GroupParkedRow::from_bytes(&value)) {
                Some(Ok(before)) if before.sequence >= row.sequence => continue,
                Some(Ok(before)) => GroupParkedRow {
                    sequence: row.sequence,
                    shard: row.shard,
                    row: row.row.clone(),
                    ..before
                },
                Some(Err(_)) | None => row.clone(),
            };
            tx.set(&key, &parked.to_bytes());
        }
        self.write_position(tx, to);
        Ok(())
    }

    /// Writes the position `to` in `tx`, which has read the one before.
    pub fn write_position(&self, tx: &Transaction, to: Sequence) {
        let keys = &self.context.keys;
        tx.set(&keys.checkpoint(&self.group, self.shard), to.as_bytes());
        let now_ms = self.context.env().wall_ms();
        tx.set(&keys.progress(&self.group, self.shard), &now_ms.to_be_bytes());
    }

    /// Writes in `tx` that the row of `id` at `sequence`, which was parked, is done; what has come behind it meanwhile stays parked.
    /// It is done already if nothing is parked, or only what came after it.
    pub async fn unpark(&self, tx: &Transaction, id: &[u8], sequence: Sequence) -> Result<CheckpointState> {
        if self.position(tx).await?.is_none() {
            // The group has gone over to other shards, whose consumers have it now.
            return Ok(CheckpointState::Done);
        }
        let key = self.context.keys.group_parked(&self.group, id);
        let parked = tx.get(&key, Isolation::Serializable).await?;
        match parked.map(|value| GroupParkedRow::from_bytes(&value)).transpose()? {
            Some(parked) if parked.sequence == sequence => tx.clear(&key),
            Some(parked) if parked.after < sequence => {
                let parked = GroupParkedRow { after: sequence, attempts: 0, ..parked };
                tx.set(&key, &parked.to_bytes());
            }
            _ => return Ok(CheckpointState::Done),
        }
        Ok(CheckpointState::Pending)
    }
}

/// What goes with a checkpoint, so that no row is lost between the shard and what is parked, and none is in both.
#[derive(Debug, Clone, Default)]
pub(super) struct Parks {
    /// The rows that are parked once the checkpoint is past them, by id.
    pub pending: BTreeMap<Bytes, GroupParkedRow>,
    /// Ids that an earlier transaction, of which nobody knows what came, may have parked, and of which newer rows were delivered.
    pub overtaken: BTreeSet<Bytes>,
}

/// Saves that a batch, and all before it, was worked on. Clones do the same; it can be kept longer than the batch.
#[derive(Clone)]
pub struct Checkpointer(Arc<Ticket>);

/// The checkpoint of one batch.
struct Ticket {
    /// What the batches of the shard have in common.
    right: Arc<BatchContext>,
    /// Of what it is the checkpoint.
    scope: Scope,
}

/// What a checkpoint is about.
enum Scope {
    /// Rows of the shard.
    Rows {
        /// Where the batch begins.
        after: Sequence,
        /// Its last row.
        last: Sequence,
        /// Everything up to here was worked on, or is parked, then.
        to: Sequence,
        /// What goes with it.
        parks: Arc<Parks>,
    },
    /// The row of a parked id.
    Parked {
        /// The id.
        id: Bytes,
        /// Where the row stood.
        sequence: Sequence,
    },
}

impl AfterCommit for Ticket {
    fn committed(&self, _: u64) {
        if let Scope::Rows { to, .. } = self.scope {
            self.right.stored.raise(to);
        }
    }
}

impl Checkpointer {
    /// The checkpoint of the rows after `after` and up to `last`; all others up to `to` are in `parks`.
    pub(super) fn of_rows(
        right: &Arc<BatchContext>,
        (after, last): (Sequence, Sequence),
        to: Sequence,
        parks: &Arc<Parks>,
    ) -> Self {
        let scope = Scope::Rows { after, last, to, parks: Arc::clone(parks) };
        Self(Arc::new(Ticket { right: Arc::clone(right), scope }))
    }

    /// The checkpoint of the parked row of `id` at `sequence`.
    pub(super) fn of_parked(right: &Arc<BatchContext>, id: Bytes, sequence: Sequence) -> Self {
        Self(Arc::new(Ticket { right: Arc::clone(right), scope: Scope::Parked { id, sequence } }))
    }

    /// Writes the checkpoint in the caller's transaction: it is there if and only if the rest of the transaction is. That makes
    /// effects in the same store exactly-once, in spite of crashes, unknown results and lost leases.
    ///
    /// If it is [`Done`](CheckpointState::Done) already, this is a retry of a transaction that has committed after all: return
    /// without doing anything again.
    ///
    /// The lease of the shard is in the read-conflict set of `tx`, so that it cannot commit once another node has taken over.
    /// It costs two reads, made at once, and two small writes.
    ///
    /// Fails with [`Error::LeaseLost`] if the lease is lost, and with [`Error::PartlyDone`] if a part of the batch was saved
    /// by a transaction that had been thought to have failed. Return either from the observer.
    pub async fn checkpoint_in(&self, tx: &Transaction) -> Result<CheckpointState> {
        let right = &self.0.right;
        let (after, last, to, parks) = match &self.0.scope {
            Scope::Rows { after, last, to, parks } => (after, last, to, parks),
            Scope::Parked { id, sequence } => return right.unpark(tx, id, *sequence).await,
        };
        let Some(stored) = right.position(tx).await? else {
            // Only a shard that was read to its end is without a checkpoint while its lease is held.
            return Ok(CheckpointState::Done);
        };
        // An earlier attempt may have had the same rows without having read so far.
        if stored >= *last && !is_on(Bug::CheckpointNotCompared) {
            right.stored.raise(stored);
            return Ok(CheckpointState::Done);
        }
        if stored > *after && !is_on(Bug::CheckpointNotCompared) {
            // A commit that came late (1031) has saved an earlier batch, which had fewer rows.
            return Err(Error::PartlyDone { stored });
        }
        right.write(tx, (stored, *to), parks).await?;
        let listener: Arc<dyn AfterCommit> = Arc::clone(&self.0) as _;
        tx.after_commit(&listener, 0);
        Ok(CheckpointState::Pending)
    }

    /// Writes the checkpoint in a transaction of its own.
    ///
    /// Fails with [`Error::LeaseLost`] if the lease is lost.
    pub async fn checkpoint(&self) -> Result<()> {
        self.0.right.context.db.run(async |tx| self.checkpoint_in(&tx).await.map(drop)).await
    }

    /// The checkpoint of the rows of the same batch up to `last`.
    fn up_to(&self, last: Sequence) -> Self {
        let Ticket { right, scope } = &*self.0;
        match scope {
            Scope::Rows { after, parks, .. } => Self::of_rows(right, (*after, last), last, parks),
            Scope::Parked { .. } => self.clone(),
        }
    }
}

impl fmt::Debug for Checkpointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let to = match &self.0.scope {
            Scope::Rows { to, .. } => to,
            Scope::Parked { sequence, .. } => sequence,
        };
        f.debug_struct("Checkpointer").field("to", to).finish_non_exhaustive()
    }
}

/// Rows of one shard, for an observer.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::{Bus, BusOptions, group::{ConsumerOptions, GroupBatch, GroupOptions}, Db, DbInstance, Notification, NotifierOptions, store::{AtomicOp, Database, Isolation}};
///
/// let store = Database::memory();
/// let bus = Bus::open(&store, BusOptions::default()).await?;
/// let notifier = bus.notifier(NotifierOptions::default()).await?;
/// let group = bus.group("counter")?;
/// group.create(&GroupOptions::default()).await?;
/// let count = {
///     let store = store.clone();
///     move |batch: GroupBatch<Notification>| {
///         let store = store.clone();
///         async move {
///             store
///                 .run(async |tx| {
///                     // Counted by an earlier attempt, of which nobody knew whether it was committed?
///                     if batch.checkpoint_in(&tx).await?.is_done() {
///                         return Ok(());
///                     }
///                     let rows = batch.rows.len() as u64;
///                     tx.atomic(AtomicOp::Add, b"rows", &rows.to_le_bytes());
///                     Ok(())
///                 })
///                 .await?;
///             Ok(())
///         }
///     }
/// };
/// let consumer = bus.consumer(&group, move |_| count.clone(), ConsumerOptions::default()).await?;
///
/// let db = Db::new("orders".parse()?, DbInstance::random(store.env()));
/// store.run(async |tx| Ok(bus.producer().created(&tx, &db))).await?;
/// while store.begin().get(b"rows", Isolation::Snapshot).await?.is_none() {
///     tokio::time::sleep(std::time::Duration::from_millis(5)).await;
/// }
/// consumer.shutdown().await?;
/// notifier.shutdown().await
/// # }
/// ```
pub struct GroupBatch<R> {
    /// The shard.
    pub shard: ShardId,
    /// The rows, in order; at least one.
    pub rows: Vec<Arc<R>>,
    /// Where the batch begins: all its rows stand after this.
    pub after: Sequence,
    /// Where its checkpoint is: everything in the shard up to here is in this batch, or was in one before.
    pub to: Sequence,
    /// 1, or more if these rows, or a batch with them, have failed before.
    pub attempt: u32,
    /// Tells the consumers of the shard apart, the newest one by the greatest token: for effects outside of the store.
    pub fencing_token: FencingToken,
    /// Saves that it was worked on.
    pub(super) checkpointer: Checkpointer,
}

impl<R> GroupBatch<R> {
    /// [`Checkpointer::checkpoint_in`] of this batch.
    pub async fn checkpoint_in(&self, tx: &Transaction) -> Result<CheckpointState> {
        self.checkpointer.checkpoint_in(tx).await
    }

    /// [`Checkpointer::checkpoint`] of this batch.
    pub async fn checkpoint(&self) -> Result<()> {
        self.checkpointer.checkpoint().await
    }

    /// Saves, now or later, that this batch and all before it were worked on.
    pub fn checkpointer(&self) -> Checkpointer {
        self.checkpointer.clone()
    }
}

impl<R: FeedRow> GroupBatch<R> {
    /// Saves that the rows up to number `place` were worked on, counted from 0, and all before the batch.
    ///
    /// Fails with [`Error::LeaseLost`] if the lease is lost.
    pub async fn checkpoint_up_to(&self, place: usize) -> Result<()> {
        match self.rows.get(place) {
            Some(row) => self.checkpointer.up_to(row.sequence()).checkpoint().await,
            None => Err(Error::invalid("place", format!("the batch has {} rows", self.rows.len()))),
        }
    }
}

impl<R> fmt::Debug for GroupBatch<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { shard, rows, after, to, attempt, .. } = self;
        f.debug_struct("GroupBatch")
            .field("shard", shard)
            .field("rows", &rows.len())
            .field("after", after)
            .field("to", to)
            .field("attempt", attempt)
            .finish_non_exhaustive()
    }
}
