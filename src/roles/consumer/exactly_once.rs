//! [`Run`]: one call of a handler, and what its transactions must read so that they commit only while the run is allowed to, and only once.
//!
//! | transaction | reads | writes |
//! |---|---|---|
//! | [`Run::verify`] | lease, key of the id; for a batch the checkpoint | |
//! | [`Run::commit_in`] for an id | lease, key of the id | `done` in the key |
//! | [`Run::commit_in`] for a batch | lease, checkpoint | checkpoint |
//! | end of a run that did not succeed | lease, the same keys | the same keys |
//! | end of a shard | lease, checkpoint, all keys | checkpoint, and a conflict on the lease |
//!
//! A run that is over is first marked in memory. Then the keys that its transactions read are written; for a run that succeeded, only once
//! the checkpoint has passed it. A transaction that read these keys earlier conflicts; one that reads them later finds the mark. Other
//! processes need no mark, because they work under another lease.

use std::{
    fmt,
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use parking_lot::Mutex;

use super::stored::ConsumerHandle;
use crate::{
    base::{
        cursor::Cursor,
        encoding::{Incarnation, Sequence},
        error::{Error, Result},
        event::DbInstance,
    },
    state::{
        keys::{DeferredRow, Due, ShardId},
        membership::Held,
    },
    store::{Isolation, KeyRange, Transaction},
};

/// Whether the transaction that finishes a run still has to do its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "if it is `AlreadyCommitted`, the transaction must not repeat its work"]
pub enum CommitState {
    /// The work is recorded as finished when the transaction commits.
    Pending,
    /// An earlier transaction, whose result was unknown, committed the work. Do nothing more in this one.
    AlreadyCommitted,
}

impl CommitState {
    /// Whether an earlier transaction has committed the work.
    pub fn is_already_committed(self) -> bool {
        self == Self::AlreadyCommitted
    }
}

/// Orders the members that work on a shard, for effects outside the store: of two runs with rows of the same id, the later one never has
/// the smaller token, unless the consumer was deleted and created again in between, or a copy of the store was restored and a node ran
/// before its incarnation was raised. The text of a token has a fixed length, and sorts like the token.
///
/// Effects in the same store need no token: [`Run::commit_in`] makes them happen exactly once. In another database, store the token and the
/// sequence beside the data that a row changes, and update all three together, and only forwards:
///
/// ```sql
/// UPDATE mirror SET value = :value, token = :token, seq = :seq
///  WHERE db = :name AND (token < :token OR token = :token AND seq < :seq)
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken {
    pub(super) incarnation: Incarnation,
    /// How many times the position of the consumer was set.
    pub(super) generation: u64,
    /// The shard. Its successors have greater ids.
    pub(super) shard: ShardId,
    /// How many times the lease was acquired.
    pub(super) epoch: u64,
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { incarnation, generation, shard, epoch } = self;
        write!(f, "{:02x}{generation:016x}{:016x}{epoch:016x}", incarnation.0, shard.0)
    }
}

/// A shard of a consumer, held by this process under one lease.
#[derive(Debug, Clone)]
pub(super) struct HeldShard {
    pub consumer: ConsumerHandle,
    pub shard: ShardId,
    pub lease: Held,
    pub token: FencingToken,
}

impl Deref for HeldShard {
    type Target = ConsumerHandle;

    fn deref(&self) -> &ConsumerHandle {
        &self.consumer
    }
}

impl HeldShard {
    pub fn key(&self, id: &[u8]) -> Vec<u8> {
        self.context.keys.deferred(&self.name, self.shard, id)
    }

    /// Reads the value of the key of `id`, with serializable isolation.
    pub async fn deferred(&self, tx: &Transaction, id: &[u8]) -> Result<Option<DeferredRow>> {
        self.deferred_at(tx, &self.key(id), Isolation::Serializable).await
    }

    /// Reads the checkpoint; `None` if the consumer does not read the shard, or does not read it yet.
    pub async fn checkpoint(&self, tx: &Transaction, isolation: Isolation) -> Result<Option<Cursor>> {
        self.checkpoint_of(tx, self.shard, isolation).await
    }

    /// Converts a pause from now into a due time.
    pub async fn due_after(&self, tx: &Transaction, pause: Duration) -> Result<Due> {
        if pause.is_zero() {
            return Ok(Due::NOW);
        }
        let micros = u64::try_from(pause.as_micros()).unwrap_or(u64::MAX);
        let at = tx.clock_version().await?.saturating_add(micros);
        Ok(Due::At(self.context.config.incarnation, at))
    }

    /// Whether the work of a run is finished. `stored` is the value of the id's key.
    pub async fn is_done(
        &self,
        tx: &Transaction,
        id: &IdScope,
        stored: Option<&DeferredRow>,
    ) -> Result<bool> {
        let Some(stored) = stored else {
            if id.is_covered {
                // The work was finished, and the checkpoint has passed it; or the id was discarded.
                return Ok(true);
            }
            let checkpoint = self.checkpoint(tx, Isolation::Snapshot).await?;
            return Ok(checkpoint.is_none_or(|checkpoint| Some(checkpoint.position()) >= id.sequence));
        };
        Ok(is_finished(stored, id))
    }

    pub fn set_checkpoint(&self, tx: &Transaction, to: Cursor) {
        tx.set(&self.context.keys.consumer_checkpoint(&self.name, self.shard), &to.to_bytes());
    }
}

/// What the transactions of a run depend on.
#[derive(Debug)]
pub(super) enum Scope {
    /// The rows of a shard after `after` and up to `last`. Once they are finished, everything up to `to` is finished.
    Rows { after: Sequence, last: Sequence, to: Cursor },
    /// The newest row of an id.
    Id(IdScope),
}

/// The work on one id.
#[derive(Debug, Clone)]
pub(super) struct IdScope {
    pub id: Bytes,
    /// The position of the row; `None` if the id no longer has one.
    pub sequence: Option<Sequence>,
    /// The database that still exists once the work is done; `None` if there is none.
    pub instance: Option<DbInstance>,
    /// The database whose end the work handles, if it handles nothing else.
    pub end: Option<DbInstance>,
    /// Whether a key covered the id when the run began. If that key is missing later, the work is finished, whatever the checkpoint says.
    pub is_covered: bool,
    /// The request to work again that the run answers.
    pub again: Option<[u8; 16]>,
}

/// One call of a handler: what [`Work`](super::Work) and [`Batch`](super::Batch) have in common. Their clones share one run.
#[derive(Debug)]
pub struct Run {
    pub(super) held: Arc<HeldShard>,
    pub(super) scope: Scope,
    since: Cursor,
    attempt: u32,
    is_over: AtomicBool,
    /// Whether a transaction has called [`Run::commit_in`].
    has_committed: AtomicBool,
    /// When the run last made progress.
    progress: Mutex<Duration>,
}

impl Run {
    /// Makes a run that works on what is new since `since`, after `failed` failed attempts.
    pub(super) fn new(held: &Arc<HeldShard>, scope: Scope, since: Cursor, failed: u32) -> Arc<Self> {
        let progress = Mutex::new(held.context.env().now());
        let (is_over, has_committed) = (AtomicBool::new(false), AtomicBool::new(false));
        let (held, attempt) = (Arc::clone(held), failed.saturating_add(1));
        Arc::new(Self { held, scope, since, attempt, is_over, has_committed, progress })
    }

    /// Returns what the consumer has finished, for [`Notification::news_since`](crate::Notification::news_since). Until the consumer has
    /// caught up with the shard, each row of a name shows its kinds of events as news again, even the deletion of an earlier database. To
    /// act on an event only once, store the sequence of the last row with each name, in the same transaction, and use the news since then.
    pub fn since(&self) -> Cursor {
        self.since
    }

    /// Returns the number of this attempt: 1, or more if the work on the id, or on rows of the batch, failed before.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Whether the run is about a deferred id, which is worked on outside the order of its shard.
    pub fn is_deferred(&self) -> bool {
        matches!(&self.scope, Scope::Id(id) if id.is_covered)
    }

    /// Whether the work was requested again ([`ConsumerHandle::again`](super::ConsumerHandle::again)).
    pub fn is_again(&self) -> bool {
        matches!(&self.scope, Scope::Id(id) if id.again.is_some())
    }

    /// The shard of the run.
    pub fn shard(&self) -> ShardId {
        self.held.shard
    }

    /// Returns the token that orders the members that work on the shard, for effects outside the store.
    pub fn fencing_token(&self) -> FencingToken {
        self.held.token
    }

    /// Returns the id that the run is about; `None` if it is about rows of a batch.
    pub(super) fn id(&self) -> Option<&Bytes> {
        match &self.scope {
            Scope::Id(id) => Some(&id.id),
            Scope::Rows { .. } => None,
        }
    }

    /// Notes that the run made progress ([`ConsumerOptions::stall_limit`](super::ConsumerOptions::stall_limit)).
    pub fn progress(&self) {
        *self.progress.lock() = self.held.context.env().now();
    }

    /// When the run last made progress.
    pub(super) fn progressed_at(&self) -> Duration {
        *self.progress.lock()
    }

    /// Whether the run may have written `done`, or the checkpoint.
    pub(super) fn has_committed(&self) -> bool {
        self.has_committed.load(Ordering::SeqCst)
    }

    fn cancelled(&self) -> Error {
        let HeldShard { consumer, shard, .. } = &*self.held;
        Error::Cancelled { what: format!("shard {shard} of consumer {}", consumer.name) }
    }

    fn check_going_on(&self) -> Result<()> {
        if self.is_over.load(Ordering::SeqCst) { Err(self.cancelled()) } else { Ok(()) }
    }

    /// Makes `tx` fail if the work is finished or cancelled, or the shard is lost, before the commit. If the work takes several
    /// transactions, call this in each of them. Counts as progress. Fails as [`Run::commit_in`] does.
    pub async fn verify(&self, tx: &Transaction) -> Result<()> {
        self.held.lease.check(tx).await?;
        match &self.scope {
            Scope::Rows { after, .. } => {
                let stored = self.held.checkpoint(tx, Isolation::Serializable).await?;
                if stored.is_none_or(|stored| stored.position() > *after) {
                    return Err(self.cancelled());
                }
            }
            Scope::Id(id) => {
                if self.held.is_done(tx, id, self.held.deferred(tx, &id.id).await?.as_ref()).await? {
                    return Err(self.cancelled());
                }
            }
        }
        self.check_going_on()?;
        self.progress();
        Ok(())
    }

    /// Makes `tx` the transaction that finishes the work: it commits only once, and only if the work was not cancelled and the shard is
    /// still held. Costs two reads and a small write, whatever the number of rows.
    ///
    /// Fails with [`Error::LeaseLost`] and [`Error::Cancelled`], and with [`Error::PartlyDone`] if an earlier attempt with an unknown
    /// result finished part of the batch; return any of these errors from the handler.
    pub async fn commit_in(&self, tx: &Transaction) -> Result<CommitState> {
        self.held.lease.check(tx).await?;
        let state = match &self.scope {
            Scope::Rows { after, last, to } => self.commit_rows(tx, (*after, *last), *to).await?,
            Scope::Id(id) => self.commit_id(tx, id).await?,
        };
        // Set before the check below. A run that ends sets `is_over` first, and then reads this flag, so one side sees the other.
        self.has_committed.store(true, Ordering::SeqCst);
        self.check_going_on()?;
        self.progress();
        Ok(state)
    }

    async fn commit_rows(
        &self,
        tx: &Transaction,
        (after, last): (Sequence, Sequence),
        to: Cursor,
    ) -> Result<CommitState> {
        match self.held.checkpoint(tx, Isolation::Serializable).await? {
            Some(stored) if stored.position() <= after => {
                self.held.set_checkpoint(tx, to);
                Ok(CommitState::Pending)
            }
            // An earlier attempt committed the same rows, but had not read as far beyond them.
            Some(stored) if stored.position() >= last => Ok(CommitState::AlreadyCommitted),
            Some(stored) => Err(Error::PartlyDone { stored: stored.position() }),
            // While the lease is held, only a shard that was read to its end has no checkpoint.
            None => Ok(CommitState::AlreadyCommitted),
        }
    }

    async fn commit_id(&self, tx: &Transaction, id: &IdScope) -> Result<CommitState> {
        let stored = self.held.deferred(tx, &id.id).await?;
        if self.held.is_done(tx, id, stored.as_ref()).await? {
            return Ok(CommitState::AlreadyCommitted);
        }
        let is_pending = stored.as_ref().is_some_and(|stored| stored.due != Due::Never);
        let done = finished(id, stored);
        // Rows may have been skipped because of a pending key. Whether any of them need work is checked when the run has ended.
        let due = if is_pending { Due::NOW } else { done.due };
        tx.set(&self.held.key(&id.id), &DeferredRow { due, ..done }.to_bytes());
        Ok(CommitState::Pending)
    }

    /// Ends the run of a batch, so that its transactions can no longer commit. Returns the checkpoint.
    pub(super) async fn revoke_rows(&self) -> Result<Option<Cursor>> {
        self.close();
        let (keys, store) = (&self.held.context.keys, &self.held.context.store);
        let key = KeyRange::key(&keys.consumer_checkpoint(&self.held.name, self.held.shard));
        let revoke = async |tx: Transaction| {
            self.held.lease.check(&tx).await?;
            let stored = self.held.checkpoint(&tx, Isolation::Serializable).await?;
            tx.add_write_conflict(&key);
            Ok(stored)
        };
        store.run(revoke).await
    }

    /// Marks the run as ended: no transaction that begins from now on can commit under it.
    pub(super) fn close(&self) {
        self.is_over.store(true, Ordering::SeqCst);
    }
}

/// Whether the key `stored` says that the work of a run is finished.
pub(super) fn is_finished(stored: &DeferredRow, id: &IdScope) -> bool {
    let has_passed = match (id.sequence, id.end) {
        (Some(sequence), _) => stored.done.position() >= sequence,
        (None, Some(_)) => stored.ended != id.end && stored.instance != id.end,
        (None, None) => true,
    };
    // The request that the run answers stays in the key until the run has committed.
    has_passed && (id.again.is_none() || stored.again != id.again)
}

/// Returns the value for the key of an id. The transaction that writes the key also finishes the work on the id.
pub(super) fn finished(id: &IdScope, stored: Option<DeferredRow>) -> DeferredRow {
    let again = stored.as_ref().and_then(|stored| stored.again).filter(|again| Some(*again) != id.again);
    let (mut ended, mut is_left) = (None, again.is_some());
    let (done, instance) = match (stored, id.sequence) {
        // The id was discarded during the run.
        (Some(stored), Some(sequence)) if stored.done.position() > sequence => (stored.done, stored.instance),
        (_, Some(sequence)) => (sequence.into(), id.instance),
        (Some(stored), None) => {
            ended = stored.ended.filter(|ended| Some(*ended) != id.end);
            let instance = stored.instance.filter(|instance| Some(*instance) != id.end);
            is_left |= ended.is_some() || instance.is_some();
            (stored.done, instance)
        }
        (None, None) => (Cursor::BEGINNING, None),
    };
    let due = if is_left { Due::NOW } else { Due::Never };
    DeferredRow { instance, ended, due, again, ..DeferredRow::new(done) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::base::encoding::Versionstamp;

    fn token((incarnation, generation, shard, epoch): (u8, u64, u64, u64)) -> FencingToken {
        FencingToken { incarnation: Incarnation(incarnation), generation, shard: ShardId(shard), epoch }
    }

    /// Users store the text in other databases, so its form must never change.
    #[test]
    fn the_text_of_a_token_has_a_fixed_form() {
        let texts = [(1, 2, 258, 10), (255, u64::MAX, u64::MAX, u64::MAX)].map(|of| token(of).to_string());
        assert_eq!(texts[0], "0100000000000000020000000000000102000000000000000a");
        assert_eq!(texts[1], "f".repeat(50));
    }

    proptest! {
        /// The SQL condition in the docs of [`FencingToken`], applied to texts, gives the same result as comparing tokens and sequences.
        #[test]
        fn texts_of_tokens_and_sequences_compare_as_they_do(
            tokens: [(u8, u64, u64, u64); 2],
            few in [(0_u8..2, 0_u64..20, 0_u64..20, 0_u64..20), (0_u8..2, 0_u64..20, 0_u64..20, 0_u64..20)],
            versions: [u64; 2],
        ) {
            let seq = versions.map(|version| Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0));
            for [stored, new] in [tokens, few, [tokens[0]; 2]].map(|pair| pair.map(token)) {
                let [stored_token, new_token] = [stored, new].map(|token| token.to_string());
                let [stored_seq, new_seq] = seq.map(|seq| seq.to_string());
                let updates = stored_token < new_token || stored_token == new_token && stored_seq < new_seq;
                prop_assert_eq!(updates, (stored, seq[0]) < (new, seq[1]));
                prop_assert_eq!(stored_token.as_bytes() < new_token.as_bytes(), stored < new);
            }
        }
    }

    /// Regression: when work on an older row finished after work on the newest row, it set the key back, so the newest row was worked on
    /// again.
    #[test]
    fn an_older_row_takes_nothing_back() {
        let at = |version| Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0);
        let scope = |version| IdScope {
            id: Bytes::from_static(b"a"),
            sequence: Some(at(version)),
            instance: None,
            end: None,
            is_covered: true,
            again: None,
        };
        let newest = finished(&scope(2), None);
        assert_eq!(finished(&scope(1), Some(newest.clone())).done, newest.done);
        assert_eq!(finished(&scope(3), Some(newest)).done, Cursor::from(at(3)));
    }
}
