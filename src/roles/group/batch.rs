//! [`GroupBatch`]: rows for an observer, and [`Checkpointer`]: saves that it has worked on them.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::sync::watch;

use super::{CheckpointPolicy, FencingToken};
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        error::{Error, Result},
    },
    state::{
        context::Context,
        feed::FeedRow,
        keys::{DeadLetterRow, GroupId, GroupParkedRow, ShardId, checkpoint_position},
        membership::Held,
    },
    store::{AfterCommit, Isolation, Transaction},
};

/// The state of a checkpoint in a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "if it is `Done`, the transaction must not repeat its work"]
pub enum CheckpointState {
    /// It is written when the transaction commits.
    Pending,
    /// An earlier transaction, perhaps with an unknown result, has written it already. Do nothing more in this one.
    Done,
}

impl CheckpointState {
    /// Whether it was written already.
    pub fn is_done(self) -> bool {
        self == Self::Done
    }
}

/// The stored position of a consumer in a shard, as far as the process knows.
#[derive(Debug)]
pub(super) struct Stored {
    position: watch::Sender<Sequence>,
    /// Whether a commit with an unknown result may have moved it.
    is_doubted: AtomicBool,
}

impl Stored {
    pub fn new(position: Sequence) -> Self {
        Self { position: watch::Sender::new(position), is_doubted: AtomicBool::new(false) }
    }

    pub fn get(&self) -> Sequence {
        *self.position.borrow()
    }

    /// Changes with the position, or if that may have moved.
    pub fn changes(&self) -> watch::Receiver<Sequence> {
        self.position.subscribe()
    }

    /// Sets the position that the store has.
    pub fn set(&self, position: Sequence) {
        self.position.send_replace(position);
    }

    /// Sets the position, if it is greater.
    pub fn raise(&self, position: Sequence) {
        self.position.send_if_modified(|stored| std::mem::replace(stored, position.max(*stored)) < position);
    }

    /// Notes that the position may have moved. Only the store knows whether it has.
    pub fn doubt(&self) {
        self.is_doubted.store(true, Ordering::Release);
        self.position.send_modify(|_| {});
    }

    /// Whether it is to be read again. Returns true once for each doubt.
    pub fn take_doubt(&self) -> bool {
        self.is_doubted.swap(false, Ordering::AcqRel)
    }
}

/// Shared by the batches of a shard.
#[derive(Debug)]
pub(super) struct BatchContext {
    pub context: Arc<Context>,
    pub group: GroupId,
    pub shard: ShardId,
    pub lease: Held,
    /// The stored position.
    pub stored: Stored,
}

impl BatchContext {
    /// Reads the stored position. Fails with [`Error::LeaseLost`] if the lease is lost. `tx` fails
    /// if the lease is lost, or the checkpoint is written, before the commit. `None` if the group does not read the shard.
    pub async fn position(&self, tx: &Transaction) -> Result<Option<Sequence>> {
        let key = self.context.keys.checkpoint(&self.group, self.shard);
        let (checked, stored) = tokio::join!(self.lease.check(tx), tx.get(&key, Isolation::Serializable));
        checked?;
        stored?.map(|value| checkpoint_position(&value)).transpose()
    }

    /// Writes in `tx` that everything up to `to` was worked on or is parked, unless the store shows otherwise: the group has moved to
    /// other shards, or an earlier transaction has committed after all. A late write is left out, because it would move
    /// the group back, or to a shard that it has left.
    pub async fn advance(&self, tx: &Transaction, to: Sequence, parks: &Parks) -> Result<()> {
        if let Some(stored) = self.position(tx).await?.filter(|stored| *stored < to) {
            self.write(tx, (stored, to), parks).await?;
        }
        Ok(())
    }

    /// Writes in `tx`, which has read the position `stored`, that everything up to `to` was worked on or is parked.
    async fn write(&self, tx: &Transaction, (stored, to): (Sequence, Sequence), parks: &Parks) -> Result<()> {
        // If the position is past the row that was delivered, an earlier transaction has saved it, and may have parked it for good.
        for (id, _) in parks.overtaken.iter().filter(|(_, delivered)| stored < **delivered) {
            tx.clear(&self.context.keys.group_parked(&self.group, id));
        }
        for (id, row) in &parks.pending {
            // A row up to `stored` was parked when that position was saved.
            if row.sequence <= stored || row.sequence > to {
                continue;
            }
            let key = self.context.keys.group_parked(&self.group, id);
            let parked = tx.get(&key, Isolation::Serializable).await?;
            // A parked row that cannot be decoded is replaced: this row is newer.
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
        // Rows up to the stored position were worked on in spite of their failure.
        for (sequence, letter) in parks.letters.iter().filter(|(at, _)| stored < **at && **at <= to) {
            tx.set(&self.context.keys.dead_letter(&self.group, *sequence), &letter.to_bytes());
        }
        self.write_position(tx, to);
        Ok(())
    }

    /// Writes the position `to` in `tx`, which has read the present one.
    pub fn write_position(&self, tx: &Transaction, to: Sequence) {
        let keys = &self.context.keys;
        tx.set(&keys.checkpoint(&self.group, self.shard), to.as_bytes());
        let now_ms = self.context.env().wall_ms();
        tx.set(&keys.progress(&self.group, self.shard), &now_ms.to_be_bytes());
    }

    /// Writes in `tx` that the parked row of `id` at `sequence` is done; a later row of the id stays parked.
    /// It is done already if nothing of the id is parked, or only a later row.
    pub async fn unpark(&self, tx: &Transaction, id: &[u8], sequence: Sequence) -> Result<CheckpointState> {
        if self.position(tx).await?.is_none() {
            // The group has moved to other shards, whose consumers have the row now.
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

/// Parked rows and dead letters that a checkpoint has to write, so that each row is in exactly one place: in the shard, parked, or
/// among the dead letters.
#[derive(Debug, Clone, Default)]
pub(super) struct Parks {
    /// Rows by id that are parked once the checkpoint is past them.
    pub pending: BTreeMap<Bytes, GroupParkedRow>,
    /// Ids that an earlier transaction with an unknown result may have parked, each with the newest of its rows that were delivered
    /// since.
    pub overtaken: BTreeMap<Bytes, Sequence>,
    /// The rows that go to the dead letters once the checkpoint is past them.
    pub letters: BTreeMap<Sequence, DeadLetterRow>,
}

/// Saves that a batch, and all before it, was worked on. Clones do the same. It may be kept longer than the batch.
#[derive(Clone)]
pub struct Checkpointer(Arc<Ticket>);

/// The checkpoint of one batch.
struct Ticket {
    shard_context: Arc<BatchContext>,
    scope: Scope,
}

/// The rows that a checkpoint covers.
enum Scope {
    Rows {
        /// Position before the batch.
        after: Sequence,
        last: Sequence,
        /// Everything up to here was worked on or is parked then.
        to: Sequence,
        parks: Arc<Parks>,
    },
    Parked {
        id: Bytes,
        /// The position of the row in the feed.
        sequence: Sequence,
    },
}

impl AfterCommit for Ticket {
    fn committed(&self, _: u32, is_certain: bool) {
        match self.scope {
            // The consumer must not save rows that the observer may not have saved, and must not take them for parked.
            Scope::Rows { .. } if !is_certain => self.shard_context.stored.doubt(),
            Scope::Rows { to, .. } => self.shard_context.stored.raise(to),
            Scope::Parked { .. } => {}
        }
    }
}

impl Checkpointer {
    /// The checkpoint of the rows after `after` and up to `last`; `parks` has all others up to `to`.
    pub(super) fn of_rows(
        shard_context: &Arc<BatchContext>,
        (after, last): (Sequence, Sequence),
        to: Sequence,
        parks: &Arc<Parks>,
    ) -> Self {
        let scope = Scope::Rows { after, last, to, parks: Arc::clone(parks) };
        Self(Arc::new(Ticket { shard_context: Arc::clone(shard_context), scope }))
    }

    pub(super) fn of_parked(shard_context: &Arc<BatchContext>, id: Bytes, sequence: Sequence) -> Self {
        Self(Arc::new(Ticket {
            shard_context: Arc::clone(shard_context),
            scope: Scope::Parked { id, sequence },
        }))
    }

    /// Writes the checkpoint in the caller's transaction: it takes effect if and only if the rest of the transaction does. That makes
    /// effects in the same store exactly-once, in spite of crashes, unknown results and lost leases.
    ///
    /// If it returns [`Done`](CheckpointState::Done), this transaction is a retry of one that has committed after all: return
    /// without repeating the work.
    ///
    /// The lease of the shard is in the read-conflict set of `tx`, so `tx` cannot commit once another node has taken over.
    /// It costs two concurrent reads and two small writes.
    ///
    /// Fails with [`Error::LeaseLost`] if the lease is lost, and with [`Error::PartlyDone`] if a transaction that was
    /// thought to have failed has saved a part of the batch. Return either error from the observer.
    pub async fn checkpoint_in(&self, tx: &Transaction) -> Result<CheckpointState> {
        let shard_context = &self.0.shard_context;
        let (after, last, to, parks) = match &self.0.scope {
            Scope::Rows { after, last, to, parks } => (after, last, to, parks),
            Scope::Parked { id, sequence } => return shard_context.unpark(tx, id, *sequence).await,
        };
        let Some(stored) = shard_context.position(tx).await? else {
            // While the lease is held, only a shard that was read to its end has no checkpoint.
            return Ok(CheckpointState::Done);
        };
        // An earlier attempt may have had the same rows, but read less far beyond them.
        if stored >= *last {
            shard_context.stored.raise(stored);
            return Ok(CheckpointState::Done);
        }
        if stored > *after {
            // A commit that came late (1031) has saved an earlier batch, which had fewer rows.
            return Err(Error::PartlyDone { stored });
        }
        shard_context.write(tx, (stored, *to), parks).await?;
        let listener: Arc<dyn AfterCommit> = Arc::clone(&self.0) as _;
        tx.after_commit(&listener, 0);
        Ok(CheckpointState::Pending)
    }

    /// Writes the checkpoint in its own transaction.
    ///
    /// Fails with [`Error::LeaseLost`] if the lease is lost.
    pub async fn checkpoint(&self) -> Result<()> {
        self.0.shard_context.context.db.run(async |tx| self.checkpoint_in(&tx).await.map(drop)).await
    }

    /// Saves that everything up to `to`, at most the position of the batch, was worked on. It can be called for one position of the batch
    /// after the other.
    pub(super) async fn raise(&self, to: Sequence) -> Result<()> {
        let shard_context = &self.0.shard_context;
        let Scope::Rows { parks, .. } = &self.0.scope else { return self.checkpoint().await };
        shard_context.context.db.run(async |tx| shard_context.advance(&tx, to, parks).await).await?;
        shard_context.stored.raise(to);
        shard_context.context.stats.group_checkpoints.add(1);
        Ok(())
    }

    /// The time by the clock of the consumer.
    pub(super) fn now(&self) -> Duration {
        self.0.shard_context.context.env().now()
    }

    fn up_to(&self, last: Sequence) -> Self {
        let Ticket { shard_context, scope } = &*self.0;
        match scope {
            Scope::Rows { after, parks, .. } => Self::of_rows(shard_context, (*after, last), last, parks),
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

/// What a consumer has yet to save when a batch begins.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unsaved {
    pub policy: CheckpointPolicy,
    /// Rows that were worked on since the last checkpoint.
    pub rows: u64,
    /// When the time until the next checkpoint began.
    pub since: Duration,
}

/// Rows of one shard, for an observer.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::{Bus, BusOptions, group::{ConsumerOptions, GroupBatch, GroupOptions}, Db, DbInstance, Notification, Roles, store::{AtomicOp, Database, Isolation}};
///
/// let store = Database::memory();
/// let bus = Bus::open(&store, BusOptions::default()).await?;
/// let running = bus.start(Roles::default()).await?;
/// let group = bus.group("counter")?;
/// group.create(&GroupOptions::default()).await?;
/// let count = {
///     let store = store.clone();
///     move |batch: GroupBatch<Notification>| {
///         let store = store.clone();
///         async move {
///             store
///                 .run(async |tx| {
///                     // An earlier attempt with an unknown result may have counted the rows.
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
/// let consumer = running.node().consumer(&group, move |_| count.clone(), ConsumerOptions::default()).await?;
///
/// let db = Db::new("orders".parse()?, DbInstance::new());
/// store.run(async |tx| Ok(bus.producer().created(&tx, &db))).await?;
/// while store.begin().get(b"rows", Isolation::Snapshot).await?.is_none() {
///     tokio::time::sleep(std::time::Duration::from_millis(5)).await;
/// }
/// consumer.shutdown().await?;
/// running.shutdown().await
/// # }
/// ```
pub struct GroupBatch<R> {
    /// The shard.
    pub shard: ShardId,
    /// The rows, in order; at least one.
    pub rows: Vec<Arc<R>>,
    /// The position before the batch: all its rows come after it. It does not say what the group knows ([`GroupBatch::since`]).
    pub after: Sequence,
    /// What the group knew when it began.
    pub(super) start: Cursor,
    /// The position of its checkpoint: every row of the shard up to here is in this batch or an earlier one.
    pub to: Sequence,
    /// 1, or more if these rows, or a batch that contained them, have failed before.
    pub attempt: u32,
    /// Orders the consumers of the shard: a newer one has a greater token. For effects outside of the store.
    pub fencing_token: FencingToken,
    /// Saves that the batch was worked on.
    pub(super) checkpointer: Checkpointer,
    /// For observers that save within the batch.
    pub(super) unsaved: Unsaved,
}

impl<R> GroupBatch<R> {
    /// What the group knew when it was created or last reset, for [`Notification::news_since`](crate::Notification::news_since).
    ///
    /// A group that began with nothing gets no deletion of a database that was gone before. No news is left out; but a group stores how far
    /// it has come, and not what it was delivered of each database, so kinds of before come again with each later row.
    pub fn since(&self) -> Cursor {
        self.start
    }

    /// [`Checkpointer::checkpoint_in`] of this batch.
    pub async fn checkpoint_in(&self, tx: &Transaction) -> Result<CheckpointState> {
        self.checkpointer.checkpoint_in(tx).await
    }

    /// [`Checkpointer::checkpoint`] of this batch.
    pub async fn checkpoint(&self) -> Result<()> {
        self.checkpointer.checkpoint().await
    }

    /// A handle that can save later that this batch and all before it were worked on.
    pub fn checkpointer(&self) -> Checkpointer {
        self.checkpointer.clone()
    }
}

impl<R: FeedRow> GroupBatch<R> {
    /// Saves that the rows up to the one at `index`, counted from 0, and all before the batch were worked on.
    ///
    /// Fails with [`Error::LeaseLost`] if the lease is lost.
    pub async fn checkpoint_up_to(&self, index: usize) -> Result<()> {
        match self.rows.get(index) {
            Some(row) => self.checkpointer.up_to(row.sequence()).checkpoint().await,
            None => Err(Error::invalid("index", format!("the batch has {} rows", self.rows.len()))),
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
