//! [`Database::run_once`]: transactions that are committed exactly once, in spite of unknown results.
//!
//! A commit can fail with an unknown result (1021, 1039). Trying again may then do everything twice. So each attempt
//! of a run writes one more key, the id of the run, and after an unknown result the run first reads whether its id
//! exists.
//!
//! ```text
//!  attempt 1   body ── write id: 1, stamp ── commit ──► unknown; its value is kept
//!  attempt 2   read id ─┬─ there ───► the value of attempt 1, the stamp in the id
//!                       └─ missing ─► body ── write id: 2, stamp ── commit
//! ```
//!
//! # Why nothing happens twice
//!
//! Every attempt has the id in its read-conflict set, at a read version from before its commit, and writes it. So of
//! two attempts only the first to commit can. A late attempt conflicts with its successor. An attempt that commits
//! between its successor's read and commit makes the successor conflict, which then reads again. No key is read
//! besides the id, and the id only in doubt.
//!
//! # How long a run can find its result
//!
//! Ids of crashed processes have to be swept some day. So a missing id proves something only while no sweeper can
//! have removed it: a run that is older than [`Database::UNKNOWN_RESULT_AGE_MAX`] gives up instead.

use std::time::Duration;

use super::{
    AtomicOp, Committed, Database, Isolation, KeyRange, RetryPolicy, Transaction,
    retry::Tries,
    transaction_ids::{self, Clearing, TransactionId, mark, read_mark},
};
use crate::base::error::{Error, Result, StoreError};

/// How many ranges one transaction of [`Database::clear_finished_ids`] clears.
const RANGES_PER_TRANSACTION: usize = 1_000;

/// The result of a transaction that was committed exactly once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommittedOnce<T> {
    /// The body's return value in the attempt that was committed.
    pub value: T,
    /// The commit of that attempt; also known after an unknown result.
    pub committed: Committed,
}

impl Database {
    /// How old a run of [`Database::run_once`] can be and still resolve an unknown result.
    pub const UNKNOWN_RESULT_AGE_MAX: Duration = Duration::from_mins(5);

    /// How many runs of [`Database::run_once`] have to end before another one clears their ids.
    pub const FINISHED_IDS_MAX: u64 = transaction_ids::FINISHED_IDS_MAX;

    /// The prefix of the keys of transaction ids, unless [`Database::with_transaction_ids`] sets another.
    pub const TRANSACTION_IDS_PREFIX: &[u8] = transaction_ids::TRANSACTION_IDS_PREFIX;

    /// Runs `body` in a transaction and commits it exactly once: as [`Database::run`], but never twice after an
    /// unknown result.
    ///
    /// It costs one small write, a read version even if `body` only writes, and one read after an unknown result. For
    /// a `body` that only reads, or that may be committed twice, use [`Database::run`].
    ///
    /// `body` gets a handle on the transaction. It may run several times, so it should only read and write through
    /// the transaction; it must neither commit, cancel nor reset it, nor set its read version. Its return value is
    /// kept until the result is known.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
    /// use notibus::{store::{StoreError, AtomicOp, Database, Isolation, testing::{CommitFault, Faults}}};
    ///
    /// let faults = Faults::new(&Database::memory());
    /// let db = faults.database();
    /// // The commit happens, but nobody knows.
    /// faults.script_commits([CommitFault::After(StoreError::COMMIT_UNKNOWN_RESULT)]);
    /// let done = db
    ///     .run_once(async |tx| {
    ///         tx.atomic(AtomicOp::Add, b"payments", &1_u64.to_le_bytes());
    ///         Ok("paid")
    ///     })
    ///     .await?;
    /// assert_eq!(done.value, "paid");
    /// println!("at {:?}", done.committed.versionstamp);
    ///
    /// let payments = db.run(async |tx| tx.get(b"payments", Isolation::Serializable).await).await?;
    /// assert_eq!(payments.as_deref(), Some(&1_u64.to_le_bytes()[..]));
    /// # Ok(()) }
    /// ```
    ///
    /// # What it leaves in the store
    ///
    /// One key of about 50 bytes per run, under [`Database::TRANSACTION_IDS_PREFIX`] or the
    /// prefix of [`Database::with_transaction_ids`]. Later runs clear them,
    /// [`Database::FINISHED_IDS_MAX`] at a time, [`Database::clear_finished_ids`] does at shutdown,
    /// and a [`TransactionIdSweeper`](super::TransactionIdSweeper) after a crash. A run that never ends keeps the ids
    /// of the runs after it.
    ///
    /// # Errors
    ///
    /// Any error of `body` that is not retryable, and [`Error::RetriesExhausted`] at the limits of
    /// [`RetryPolicy::default`] or when a result is still unknown [`Database::UNKNOWN_RESULT_AGE_MAX`] after the run began. If
    /// [`Error::is_maybe_committed`], the transaction may have been committed, once; any other error means that it
    /// was not, and will not be. So a failure with an unknown result takes precedence over the error that has ended
    /// the run.
    ///
    /// After `transaction_timed_out` (1031), which is not tried again, the commit may still come, as long as
    /// [`Transaction::LIFETIME`](super::Transaction::LIFETIME).
    ///
    /// # Known limit
    ///
    /// Age is measured by the monotonic clock. If it stands still while the machine is suspended, a run that was suspended
    /// in doubt for longer than ids are kept can be committed twice.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the transaction may or may not have been committed, once.
    pub async fn run_once<T, F, R>(&self, body: F) -> Result<CommittedOnce<T>>
    where
        F: Fn(Transaction) -> R,
        R: Future<Output = Result<T>>,
    {
        self.run_once_with(&RetryPolicy::default(), body).await
    }

    /// [`Database::run_once`] with other limits.
    pub async fn run_once_with<T, F, R>(&self, policy: &RetryPolicy, body: F) -> Result<CommittedOnce<T>>
    where
        F: Fn(Transaction) -> R,
        R: Future<Output = Result<T>>,
    {
        // In this order: the run's age counts from before the id was drawn.
        let mut tries = Tries::begin(self.begin(), self.env(), policy);
        let mut run = Run::new(self.ids().begin(self.env()));
        loop {
            let tx = tries.transaction();
            let error = match run.look_up(&tx, &tries).await {
                Ok(Some(found)) => return Ok(found),
                Ok(None) => match body(tx.clone()).await {
                    Ok(value) => match run.commit(self, &tx, tries.number(), value).await {
                        Ok(done) => return Ok(done),
                        Err(error) => error,
                    },
                    Err(error) => error,
                },
                Err(error) => error,
            };
            tries.recover(error).await.map_err(|error| run.last_error(error))?;
        }
    }

    /// Clears the ids of all ended runs of [`Database::run_once`] on this handle and its clones, for shutdown. Runs
    /// under way are not disturbed; later calls clear their ids.
    ///
    /// # Errors
    ///
    /// As [`Database::run`]. The next call, or the [`TransactionIdSweeper`](super::TransactionIdSweeper), clears the
    /// remaining ids.
    pub async fn clear_finished_ids(&self) -> Result<()> {
        let (ranges, end) = self.ids().all_finished();
        for part in ranges.chunks(RANGES_PER_TRANSACTION) {
            self.run(async |tx| {
                for range in part {
                    tx.clear_range(range);
                }
                Ok(())
            })
            .await?;
        }
        self.ids().cleared(end);
        Ok(())
    }
}

/// A run that is to be committed once.
struct Run<T> {
    /// The id by which it recognises its own commit.
    id: TransactionId,
    /// The attempts that may have been committed, each with the body's return value.
    doubts: Vec<(u32, T)>,
    /// A failure with an unknown result.
    unknown: Option<StoreError>,
}

impl<T> Run<T> {
    fn new(id: TransactionId) -> Self {
        Self { id, doubts: Vec::new(), unknown: None }
    }

    /// The result of the run, if an attempt in doubt was committed. Puts the id into the read-conflict set of `tx`.
    async fn look_up(&mut self, tx: &Transaction, tries: &Tries<'_>) -> Result<Option<CommittedOnce<T>>> {
        if self.doubts.is_empty() {
            return Ok(None);
        }
        let Some(mark) = tx.get(self.id.key(), Isolation::Serializable).await? else {
            // Checked only now, because the read itself may have taken long.
            let is_too_old = tries.elapsed() > Database::UNKNOWN_RESULT_AGE_MAX;
            if let Some(last) = self.unknown.clone().filter(|_| is_too_old) {
                return Err(Error::RetriesExhausted { attempts: tries.number(), last });
            }
            self.unknown.take_if(|unknown| is_settled(unknown));
            return Ok(None);
        };
        let (attempt, committed) = read_mark(&mark)?;
        let kept = self.doubts.iter().position(|&(doubted, _)| doubted == attempt);
        let kept = kept.ok_or_else(|| {
            Error::corrupt("transaction id", format!("attempt {attempt} of this run cannot have written it"))
        })?;
        tracing::debug!(attempt, "a transaction with an unknown result was committed");
        let (_, value) = self.doubts.swap_remove(kept);
        Ok(Some(CommittedOnce { value, committed }))
    }

    /// Commits attempt number `attempt`, whose body has returned `value`.
    async fn commit(
        &mut self,
        db: &Database,
        tx: &Transaction,
        attempt: u32,
        value: T,
    ) -> Result<CommittedOnce<T>> {
        // The version must be from before the commit: a late commit with a later version would see no conflict.
        tx.read_version().await?;
        // In this order: a key that the transaction has written is not added to the read-conflict set any more.
        tx.add_read_conflict(&KeyRange::key(self.id.key()));
        tx.atomic(AtomicOp::SetVersionstampedValue, self.id.key(), &mark(attempt));
        let clearing = db.ids().clearing();
        if let Some(clearing) = &clearing {
            tx.clear_range(&clearing.range);
        }
        match tx.commit().await {
            Ok(committed) => {
                clearing.into_iter().for_each(Clearing::done);
                let committed = committed.expect("the id was written");
                Ok(CommittedOnce { value, committed })
            }
            Err(Error::Store(unknown)) if unknown.is_maybe_committed() => {
                self.doubts.push((attempt, value));
                if self.unknown.as_ref().is_none_or(is_settled) {
                    self.unknown = Some(unknown.clone());
                }
                Err(unknown.into())
            }
            Err(error) => Err(error),
        }
    }

    /// The error to return when `error` ends the run.
    fn last_error(&mut self, error: Error) -> Error {
        match (self.unknown.take(), error) {
            (Some(last), Error::RetriesExhausted { attempts, .. }) => {
                Error::RetriesExhausted { attempts, last }
            }
            (Some(unknown), error) if !error.is_maybe_committed() => {
                tracing::debug!(%error, %unknown, "a run ended before its result was known");
                unknown.into()
            }
            (_, error) => error,
        }
    }
}

/// Whether a commit that has failed with `unknown` either has happened by now or never will.
fn is_settled(unknown: &StoreError) -> bool {
    unknown.code() == StoreError::COMMIT_UNKNOWN_RESULT.code()
}
