//! [`exactly_once`]: transactions that are committed exactly once, despite unknown results and repeated calls.
//!
//! A commit can fail with an unknown result (1021, 1039), and a caller may not get an answer at all. Another attempt could then do
//! everything twice. So the transaction of a run writes one more key, with the result of the run, and every further attempt first checks
//! whether that key exists.
//!
//! ```text
//!  attempt 1   body ── write key: result 1 ── commit ──► unknown
//!  attempt 2   read key ─┬─ exists ──► result 1
//!                        └─ missing ─► body ── write key: result 2 ── commit
//! ```
//!
//! # Why nothing happens twice
//!
//! Every attempt has the key in its read-conflict set, at a read version from before its commit, and writes the key. So of two attempts,
//! whether they belong to one run or to two runs with the same key, only the first to commit succeeds. The other one conflicts, tries
//! again, and finds the key.
//!
//! # How long a key is kept
//!
//! The janitor clears results that are older than [`RETENTION`], by their versionstamps, and stores the version before which none are left.
//! If the first attempt of a run had a lower read version, a missing key proves nothing to that run: it fails, with an unknown result, and
//! does not call its body again. No clock is read, so none can be wrong.

use serde::{Serialize, de::DeserializeOwned};

use crate::{
    base::{
        encoding::Reader,
        env::Env,
        error::{Error, Result, StoreError},
    },
    state::keys::{Keys, RunResult},
    store::{AtomicOp, Committed, Isolation, KeyRange, RetryPolicy, Store, Transaction, Tries},
};

/// The minimum time for which results are kept: five minutes, in versions of the store (a million per second).
pub(crate) const RETENTION: u64 = 300_000_000;

/// The maximum length of a key, in bytes.
const KEY_LEN_MAX: usize = 255;

/// The result of a transaction that was committed exactly once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CommittedOnce<T> {
    /// The body's return value in the attempt that was committed.
    pub value: T,
    /// The commit of that attempt; known even after an unknown result.
    pub committed: Committed,
    /// Whether another run with the same key committed the transaction.
    pub is_repeat: bool,
}

/// Runs `body` in a transaction and commits it exactly once. See [`Bus::run_exactly_once`](crate::Bus::run_exactly_once).
pub(crate) async fn exactly_once<T, F, R>(
    store: &Store,
    keys: &Keys,
    key: Option<&[u8]>,
    body: F,
) -> Result<CommittedOnce<T>>
where
    T: Serialize + DeserializeOwned,
    F: Fn(Transaction) -> R,
    R: Future<Output = Result<T>>,
{
    let mut run = Run::new(store.env(), keys, key)?;
    let policy = RetryPolicy::default();
    let mut tries = Tries::begin(store.begin(), store.env(), &policy);
    loop {
        let tx = tries.transaction();
        let error = match run.look_up(&tx, tries.number()).await {
            Ok(Some(found)) => return Ok(found),
            Ok(None) => match body(tx.clone()).await {
                Ok(value) => match run.commit(&tx, value).await {
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

/// A run that must be committed only once.
struct Run {
    /// The key under which the result of the run is stored.
    key: Vec<u8>,
    /// The key that stores the version before which results were cleared.
    swept: Vec<u8>,
    /// Identifies the run among all runs with its key.
    id: [u8; 16],
    /// Whether a result can exist. Nobody else knows a random key, so before the first attempt no result exists under it.
    may_exist: bool,
    /// The read version of the first attempt.
    first: Option<u64>,
    /// An error that leaves open whether an earlier attempt was, or will be, committed.
    unknown: Option<StoreError>,
}

impl Run {
    fn new(env: &Env, keys: &Keys, key: Option<&[u8]>) -> Result<Self> {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&env.random().to_be_bytes());
        id[8..].copy_from_slice(&env.random().to_be_bytes());
        let (may_exist, key) = (key.is_some(), key.unwrap_or(&id));
        if !(1..=KEY_LEN_MAX).contains(&key.len()) {
            return Err(Error::invalid("key", format!("it has {} bytes, not 1 to {KEY_LEN_MAX}", key.len())));
        }
        let (key, swept) = (keys.run_result(key), keys.runs_swept());
        Ok(Self { key, swept, id, may_exist, first: None, unknown: None })
    }

    /// Returns the result that is stored under the key, if there is one. Puts the key into the read-conflict set of `tx`.
    async fn look_up<T: DeserializeOwned>(
        &mut self,
        tx: &Transaction,
        attempts: u32,
    ) -> Result<Option<CommittedOnce<T>>> {
        // Fix the read version now: if only the commit chose it, a late commit would get a later version, and see no conflict.
        let version = tx.read_version().await?;
        let first = *self.first.get_or_insert(version);
        if !std::mem::replace(&mut self.may_exist, true) {
            tx.add_read_conflict(&KeyRange::key(&self.key));
            return Ok(None);
        }
        let (found, swept) = tokio::try_join!(
            tx.get(&self.key, Isolation::Serializable),
            tx.get(&self.swept, Isolation::Snapshot)
        )?;
        let Some(found) = found else {
            if swept_version(swept.as_deref()).map_err(|error| error.at(&self.swept))? > first {
                let last = self.unknown.clone().unwrap_or(StoreError::COMMIT_UNKNOWN_RESULT);
                return Err(Error::RetriesExhausted { attempts, last });
            }
            self.unknown.take_if(|unknown| is_settled(unknown));
            return Ok(None);
        };
        let RunResult { versionstamp, run, value } =
            RunResult::from_bytes(&found).map_err(|error| error.at(&self.key))?;
        let value = serde_json::from_slice(&value)
            .map_err(|error| Error::invalid("key", format!("its result has another type: {error}")))?;
        Ok(Some(CommittedOnce { value, committed: Committed { versionstamp }, is_repeat: run != self.id }))
    }

    /// Commits the current attempt, whose body returned `value`.
    async fn commit<T: Serialize>(&mut self, tx: &Transaction, value: T) -> Result<CommittedOnce<T>> {
        let json = serde_json::to_vec(&value).map_err(|error| Error::invalid("result", error.to_string()))?;
        tx.atomic(AtomicOp::SetVersionstampedValue, &self.key, &RunResult::operand(&self.id, &json));
        match tx.commit().await {
            Ok(committed) => {
                let committed = committed.expect("the key was written");
                Ok(CommittedOnce { value, committed, is_repeat: false })
            }
            Err(Error::Store(unknown)) if unknown.is_maybe_committed() => {
                if self.unknown.as_ref().is_none_or(is_settled) {
                    self.unknown = Some(unknown.clone());
                }
                Err(unknown.into())
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the error for a run that ends with `error`. If an attempt has an unknown result, that error takes precedence.
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

/// Whether a commit that failed with `unknown` has either happened by now or never will.
fn is_settled(unknown: &StoreError) -> bool {
    unknown.code() == StoreError::COMMIT_UNKNOWN_RESULT.code()
}

/// Decodes the `stored` version before which results were cleared.
pub(crate) fn swept_version(stored: Option<&[u8]>) -> Result<u64> {
    let Some(stored) = stored else { return Ok(0) };
    let mut reader = Reader::new("sweep of idempotency keys", stored);
    let version = reader.u64()?;
    reader.finish()?;
    Ok(version)
}
