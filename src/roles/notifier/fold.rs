//! One fold: a transaction that takes counters and writes notifications.
//!
//! A fold commits at most once. The lease and the fold mark are in its read-conflict set, so neither a notifier that has lost the partition
//! nor a second copy of the same fold can commit. After an unknown result the mark shows whether the first copy committed. A commit that
//! timed out may even happen later. If so, the next attempt, or the next call, finds the moved mark.
//!
//! No event can block a fold. A fold measures its transaction, and leaves to the next fold any events that would make it too large. It
//! skips what cannot be decoded: a row of counters, or a name whose present row is damaged. Without a fold mark it does nothing.

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::task::coop;

use super::{
    algorithm,
    drain::{Drain, Waiting},
};
use crate::{
    base::{
        encoding::Counters,
        error::{Error, Result},
        event::DbName,
        notification::Notification,
    },
    state::{
        context::Context,
        feed::{Entries, FeedWriter, RawFeed, StoredRow},
        history::{Claim, History},
        keys::{FoldMark, Lanes, Partition, sequence_operand},
        membership::Held,
        skipped::SkippedAt,
    },
    store::{AtomicOp, Isolation, KeyRange, RetryPolicy, TRANSACTION_LEN_MAX, Transaction},
};

/// The size in bytes at which a fold ends: half of the transaction limit, so that the last name always has room.
pub(super) const SIZE_MAX: usize = TRANSACTION_LEN_MAX / 2;

/// The minimum size at which a fold that was too large is tried again.
pub(super) const SIZE_MIN: usize = 1_000;

/// The minimum number of times that each byte read counts towards the size of the transaction: two operations contain the key of a row, and
/// the store counts each key of an operation three times. Reading more than can be written is useless.
const WRITTEN_MIN: usize = 6;

/// The number of attempts before a fold is tried at half the size.
const TRIES_OF_A_SIZE: u64 = 4;

/// Bytes of folded rows after which a fold measures its transaction. Each measurement costs a turn of the FoundationDB client's thread.
const MEASURED_BYTES: usize = 16_384;

/// The maximum number of rows of counters that [`has_events`] reads.
const LOOKED_AT_MAX: usize = 1_000;

/// The outcome of one fold.
#[derive(Debug, Clone, Default)]
pub(super) struct Done {
    /// The events that were subtracted from the counters.
    pub folded: Counters,
    /// The stale events among `folded`.
    pub stale: Counters,
    /// The number of rows written, and their lanes.
    pub rows: u16,
    pub lanes: Lanes,
    /// The key from which the next fold continues; `None` if all was folded.
    pub next: Option<Bytes>,
    /// Whether the fold wrote anything.
    pub committed: bool,
    /// The version at which the fold was committed; `None` if the result of the commit was unknown.
    pub version: Option<u64>,
    /// Rows that were skipped because they cannot be decoded.
    pub skipped: Vec<(SkippedAt, Error)>,
    /// How many attempts failed before this one.
    pub retries: u64,
}

/// Folds one partition, a bounded part at a time.
#[derive(Clone, Copy)]
pub(super) struct Folder<'a> {
    pub context: &'a Context,
    pub partition: Partition,
    pub lease: &'a Held,
    /// The maximum number of rows of counters that one fold reads.
    pub rows_max: usize,
    /// The size of the transaction, in bytes, at which a fold ends.
    pub size_max: usize,
}

impl Folder<'_> {
    /// Folds events from the key `from` on, as fold number `fold + 1` of the lease's epoch.
    ///
    /// `unsettled` is the outcome of the last attempt at that number, if it failed but may have committed. After a failure, pass
    /// `unsettled` to the next call again.
    #[tracing::instrument(level = "debug", skip_all, fields(partition = self.partition.0, fold = fold))]
    pub async fn fold(&self, fold: u64, from: Option<&Bytes>, unsettled: &mut Done) -> Result<Done> {
        let attempts = Mutex::new((0_u64, std::mem::take(unsettled)));
        let result = self
            .context
            .store
            .run_committed(&RetryPolicy::default(), async |tx| {
                let earlier = attempts.lock().0;
                attempts.lock().0 += 1;
                if self.has_committed(&tx, fold).await? {
                    // The last attempt committed although its result was unknown.
                    let done = attempts.lock().1.clone();
                    return Ok(Done { committed: true, ..done });
                }
                // A fold that keeps taking too long must become smaller at some point.
                let size_max = (self.size_max >> (earlier / TRIES_OF_A_SIZE).min(16)).max(SIZE_MIN);
                let done = Folder { size_max, ..*self }.attempt(&tx, fold, from).await?;
                attempts.lock().1 = done.clone();
                Ok(done)
            })
            .await;
        let (attempts, last) = attempts.into_inner();
        match result {
            Ok((done, committed)) => {
                let version = committed.map(|committed| committed.versionstamp.version());
                Ok(Done { retries: attempts - 1, version, ..done })
            }
            Err(error) => {
                *unsettled = last;
                Err(error)
            }
        }
    }

    /// Whether fold number `fold + 1` has already committed, according to the fold mark. Fails with [`Error::LeaseLost`] if another node
    /// has the partition's lease, and with [`Error::Corrupt`] if no fold of the owner can have written the mark.
    async fn has_committed(&self, tx: &Transaction, fold: u64) -> Result<bool> {
        let key = self.context.keys.fold_mark(self.partition);
        let (lease, mark) = tokio::join!(self.lease.check(tx), tx.get(&key, Isolation::Serializable));
        lease?;
        let corrupt = |reason: String| Error::corrupt("fold mark", reason).at(&key);
        let mark = mark?.ok_or_else(|| corrupt("it is missing".to_owned()))?;
        let mark = FoldMark::from_bytes(&mark).map_err(|error| error.at(&key))?;
        match mark.fold.checked_sub(fold) {
            Some(more @ (0 | 1)) if mark.epoch == self.lease.epoch => Ok(more == 1),
            _ => Err(corrupt(format!(
                "it is at {mark:?}, the owner at fold {fold} of epoch {}",
                self.lease.epoch
            ))),
        }
    }

    async fn attempt(&self, tx: &Transaction, fold: u64, from: Option<&Bytes>) -> Result<Done> {
        let Context { keys, .. } = self.context;
        let feed = RawFeed::notifications(self.context);
        let bytes_max = (self.size_max / WRITTEN_MIN).max(1);
        let history = History::of(self.context);
        let (drain, entries, checked) = tokio::join!(
            Drain::read(tx, keys, self.partition, from, (self.rows_max, bytes_max)),
            Entries::open(tx, feed, Isolation::Serializable),
            history.check(tx, Claim::Rows),
        );
        self.context.note_history(checked)?;
        let (drain, mut entries) = (drain?, entries?);
        let mut done = Done { next: drain.next, ..Done::default() };
        done.skipped.extend(drain.broken.into_iter().map(|(key, error)| (SkippedAt::Key(key), error)));
        let present = present(self.context, tx, &mut entries, &drain.names).await?;

        let mut writer = FeedWriter::new(tx, feed, &entries);
        let (mut unmeasured, mut is_full) = (0, false);
        for ((name, waiting), present) in drain.names.into_iter().zip(present) {
            if is_full {
                done.next = Some(keys.drains_of(self.partition, &name).begin);
                break;
            }
            let present = match present {
                Ok(present) => present,
                Err(skipped) => {
                    done.skipped.push(skipped);
                    continue;
                }
            };
            // The loop never waits for the store, so it yields to other tasks here.
            coop::consume_budget().await;
            self.fold_name(tx, &mut writer, (&name, &waiting), present, &mut done)?;
            done.committed = true;
            unmeasured += waiting.len();
            if unmeasured >= MEASURED_BYTES.min(bytes_max) {
                is_full = tx.approximate_size().await? >= self.size_max;
                unmeasured = 0;
            }
        }
        if !done.committed {
            return Ok(done);
        }
        (done.rows, done.lanes) = writer.finish();
        let mark = FoldMark { epoch: self.lease.epoch, fold: fold + 1 };
        tx.set(&keys.fold_mark(self.partition), &mark.to_bytes());
        Ok(done)
    }

    /// Folds the events of `name` into its `present` row.
    fn fold_name(
        &self,
        tx: &Transaction,
        writer: &mut FeedWriter<'_>,
        (name, waiting): (&DbName, &Waiting),
        present: Option<Notification>,
        done: &mut Done,
    ) -> Result<()> {
        let Context { keys, config, .. } = self.context;
        waiting.subtract(tx);
        done.folded += waiting.total();
        let previous = present.as_ref().map(|row| row.sequence);
        if present.as_ref().is_some_and(Notification::is_deleted) {
            // The janitor may be about to delete the row. Both would subtract it from the shard's row count, so only one may commit.
            let newest = keys.newest(&self.context.feed, name.as_str().as_bytes());
            tx.add_read_conflict(&KeyRange::key(&newest));
        }
        let before = present.as_ref().map(Notification::db);
        let observed = waiting.observed.clone().into_iter().collect();
        let folded = algorithm::fold(name, present, observed, self.context.env().wall_ms());
        done.stale += folded.stale;
        let Some(row) = folded.row else { return Ok(()) };
        let order = writer.replace(name.as_str().as_bytes(), previous, &row.to_bytes())?;
        // The ids of changed design documents are kept only as long as their database exists.
        let gone = before.filter(|before| row.is_deleted() || before.instance != row.instance);
        if let Some(before) = gone {
            tx.clear_range(&keys.ddocs(&before));
        }
        let db = row.db();
        for id in waiting.ddocs_of(&db).filter(|_| !row.is_deleted()) {
            let changed = sequence_operand(config.incarnation, order);
            tx.atomic(AtomicOp::SetVersionstampedValue, &keys.ddoc(&db, id), &changed);
        }
        Ok(())
    }
}

/// The present row of a name, or the place and the error of a row or key that cannot be decoded.
type Present = Result<Option<Notification>, (SkippedAt, Error)>;

/// Reads the present row of each of `names`.
async fn present(
    context: &Context,
    tx: &Transaction,
    entries: &mut Entries,
    names: &[(DbName, Waiting)],
) -> Result<Vec<Present>> {
    let feed = RawFeed::notifications(context);
    let ids: Vec<_> = names.iter().map(|(name, _)| name.as_str().as_bytes()).collect();
    let rows = feed.newest_rows(tx, entries, &ids).await?;
    let decode = |(id, row): (&[u8], Result<Option<StoredRow>>)| {
        let row = row.map_err(|error| (feed.newest_key(id), error))?;
        let decode = |row: StoredRow| {
            Notification::from_bytes(row.sequence, &row.value)
                .map_err(|error| (SkippedAt::Row(feed.id.clone(), row.sequence), error))
        };
        row.map(decode).transpose()
    };
    Ok(ids.into_iter().zip(rows).map(decode).collect())
}

/// Whether a fold would take anything out of `partition`, as far as its first rows show. Rows that a fold skips stay in the store.
pub(super) async fn has_events(context: &Context, tx: &Transaction, partition: Partition) -> Result<bool> {
    let (drain, entries) = tokio::join!(
        Drain::read(tx, &context.keys, partition, None, (LOOKED_AT_MAX, SIZE_MAX)),
        Entries::open(tx, RawFeed::notifications(context), Isolation::Snapshot),
    );
    let (drain, mut entries) = (drain?, entries?);
    Ok(present(context, tx, &mut entries, &drain.names).await?.iter().any(Result::is_ok))
}

/// Returns the row that `name` would have if all its waiting events were folded now; `None` if the bus does not know the name.
///
/// The reads are snapshot reads; a fold in between does not change the result. A caller that uses the row to decide what to record must
/// make sure that no other caller does so at the same time.
#[cfg(feature = "http")]
pub(crate) async fn row_if_folded(
    context: &Context,
    tx: &Transaction,
    name: &DbName,
) -> Result<Option<Notification>> {
    let partition = Partition::of(name.as_str(), context.config.partitions);
    let feed = RawFeed::notifications(context);
    let (mut drain, row) = tokio::try_join!(
        Drain::of_name(tx, &context.keys, partition, name),
        feed.newest_of(tx, name.as_str().as_bytes()),
    )?;
    let present = row.map(|row| Notification::from_bytes(row.sequence, &row.value)).transpose()?;
    let observed = drain.names.pop().map(|(_, waiting)| waiting.observed).unwrap_or_default();
    let folded = algorithm::fold(name, present.clone(), observed.into_iter().collect(), 0);
    Ok(folded.row.or(present))
}
