//! [`Store`]: a handle to a store of any backend.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    Committed, FolderOptions, FolderReport, RetryPolicy, Transaction,
    backend::Backend,
    embedded::{self, Embedded, Engine, Inspection},
    retry::Tries,
    types,
};
use crate::base::{
    env::Env,
    error::{Error, OpenCause, Result, StoreError},
};

/// Reads the content of the folder `path` without changing it.
fn inspected(path: &Path) -> Result<Inspection> {
    embedded::inspect(&*embedded::open_folder(path, false)?, path)
}

/// A handle to a store: a cluster, a folder or memory. Clones are cheap and share the store. A [`Db`](crate::Db) is one of the many
/// databases that a layer keeps in a store.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::store::{AtomicOp, Store, Isolation};
///
/// let store = Store::memory();
/// store.run(async |tx| {
///     tx.atomic(AtomicOp::Add, b"visits", &1_u64.to_le_bytes());
///     Ok(())
/// })
/// .await?;
/// let visits = store.run(async |tx| tx.get(b"visits", Isolation::Serializable).await).await?;
/// assert_eq!(visits.as_deref(), Some(&1_u64.to_le_bytes()[..]));
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Store {
    backend: Arc<dyn Backend>,
    env: Env,
    /// Counts of runs, shared by all clones.
    runs: Arc<Runs>,
}

#[derive(Debug, Default)]
struct Runs {
    /// Committed runs, with or without writes.
    commits: AtomicU64,
    /// Attempts that failed and were repeated.
    retries: AtomicU64,
}

impl Store {
    /// The maximum number of watches that a client can have at once.
    pub const WATCHES_MAX: usize = types::WATCHES_MAX;

    /// Creates a store in memory. The store is lost when its last handle is dropped.
    pub fn memory() -> Self {
        Self::memory_in(Env::system())
    }

    /// Creates a store in memory that takes time and randomness from `env`.
    pub fn memory_in(env: Env) -> Self {
        Self::embedded(Engine::memory(env.clone()), env)
    }

    /// Opens the store in the folder `path`, which is created if it does not exist. Every commit is on disk before it is acknowledged. The
    /// whole content is kept in memory as well. The store is closed when its last handle is dropped.
    ///
    /// Fails with [`Error::Open`](crate::Error::Open) if `path` is a file, or if the folder is not writable, is open in another process, or
    /// is damaged. Opening reads the whole store and blocks the thread.
    pub fn open_dir(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_dir_with(path, &FolderOptions::default())
    }

    /// Does the same as [`Store::open_dir`], with the given options.
    pub fn open_dir_with(path: impl AsRef<Path>, options: &FolderOptions) -> Result<Self> {
        let env = Env::system();
        Ok(Self::embedded(Engine::open(path.as_ref(), env.clone(), options)?, env))
    }

    /// Opens the content of the folder `path` for reading. This changes nothing in the folder: read permission is enough, and another
    /// process may have the folder open. In that case the content is what that process has written so far; the last commit may not have
    /// been acknowledged yet. Commits with writes fail with `database_locked` (1038), which is final.
    ///
    /// Fails with [`Error::Open`](crate::Error::Open) if there is no store in the folder, or if the store is damaged.
    pub fn open_dir_to_read(path: impl AsRef<Path>) -> Result<(Self, FolderReport)> {
        let (path, env) = (path.as_ref(), Env::system());
        let inspection = inspected(path)?;
        let report = inspection.report.clone();
        match &report.damages[..] {
            [] => Ok((Self::embedded(Engine::reading(inspection, env.clone()), env), report)),
            [first, ..] => {
                let reason = format!("damaged: {first}; see `notibus check`, and restore it from a copy");
                Err(Error::Open { path: path.to_owned(), cause: OpenCause::Damaged, reason })
            }
        }
    }

    /// Checks the folder `path` for damage without changing it. Another process may have the folder open.
    pub fn check_dir(path: impl AsRef<Path>) -> Result<FolderReport> {
        Ok(inspected(path.as_ref())?.report)
    }

    /// Copies the folder `from` to the folder `to`, which must be empty or missing. The copy has everything that was committed up to some
    /// moment during the call, even if another process commits meanwhile. To restore from the copy, put it in place of `from`, or open it
    /// where it is.
    ///
    /// Fails with [`Error::Open`](crate::Error::Open) if `from` is damaged or is not a store, or if `to` cannot be written. After a failure
    /// `to` cannot be opened as a store with rows.
    pub fn backup_dir(from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<FolderReport> {
        let from = from.as_ref();
        let inspection = inspected(from)?;
        if let Some(first) = inspection.report.damages.first() {
            let reason = format!("damaged: {first}; a copy would no longer show it");
            return Err(Error::Open { path: from.to_owned(), cause: OpenCause::Damaged, reason });
        }
        let to = to.as_ref();
        embedded::copy_to(&*embedded::open_folder(to, true)?, to, &inspection)?;
        Ok(inspection.report)
    }

    /// Does the same as [`Store::open_dir`], with time and randomness from `env`.
    pub fn open_dir_in(path: impl AsRef<Path>, env: Env) -> Result<Self> {
        Ok(Self::embedded(Engine::open(path.as_ref(), env.clone(), &FolderOptions::default())?, env))
    }

    /// Connects to the cluster of `cluster_file`. The first call in a process boots the client's network thread; call
    /// [`stop_network`](super::stop_network) before the process exits.
    ///
    /// Fails with [`Error::Open`](crate::Error::Open) if there is no such file, or if the cluster does not answer in time, and with
    /// [`Error::Invalid`](crate::Error::Invalid) if the client library does not offer the API version.
    #[cfg(feature = "foundationdb")]
    pub async fn foundationdb(cluster_file: impl AsRef<Path>) -> Result<Self> {
        Self::foundationdb_with(cluster_file, &super::FoundationDbOptions::default()).await
    }

    /// Does the same as [`Store::foundationdb`], with the given options.
    #[cfg(feature = "foundationdb")]
    pub async fn foundationdb_with(
        cluster_file: impl AsRef<Path>,
        options: &super::FoundationDbOptions,
    ) -> Result<Self> {
        let backend = super::fdb::Fdb::open(cluster_file.as_ref(), options).await?;
        Ok(Self::new(Arc::new(backend), Env::system()))
    }

    /// Uses a cluster to which the caller is already connected, for layers that use the client directly. The caller boots and stops the
    /// client's network.
    #[cfg(feature = "foundationdb")]
    pub fn from_foundationdb(client: Arc<::foundationdb::Database>) -> Self {
        Self::new(Arc::new(super::fdb::Fdb::from_client(client)), Env::system())
    }

    /// Returns a handle to `engine`, for a process with this `env`.
    fn embedded(engine: Engine, env: Env) -> Self {
        Self::new(Arc::new(Embedded::new(Arc::new(engine))), env)
    }

    /// Returns a handle to the store behind `backend`, for a process with this `env`.
    pub(super) fn new(backend: Arc<dyn Backend>, env: Env) -> Self {
        Self { backend, env, runs: Arc::default() }
    }

    /// Returns a handle to the store that `wrap` puts around this one, for a process with this `env`. To the store, this looks like another
    /// process.
    #[cfg(feature = "test-util")]
    pub(super) fn wrapped<B: Backend>(&self, env: Env, wrap: impl FnOnce(Arc<dyn Backend>) -> B) -> Self {
        Self { backend: Arc::new(wrap(Arc::clone(&self.backend))), env, runs: Arc::clone(&self.runs) }
    }

    /// Begins a transaction. Most callers want [`Store::run`], which commits and retries.
    pub fn begin(&self) -> Transaction {
        Transaction::new(self.backend.begin(), self.env.random())
    }

    /// Runs `body` in a transaction, commits the transaction, and tries again after every retryable error.
    ///
    /// `body` gets a handle to the transaction, and may run several times, so it should only read and write through the transaction. After
    /// `commit_unknown_result` (1021) it runs again although the first run may have been committed; `body` must be correct in both cases.
    /// [`Transaction::may_have_committed`] is true in such a repetition. [`Bus::run_exactly_once`](crate::Bus::run_exactly_once) is for
    /// effects that must not happen twice.
    ///
    /// # Errors
    ///
    /// Any error of `body` that is not retryable, or [`Error::RetriesExhausted`](crate::Error::RetriesExhausted) at
    /// the limits of [`RetryPolicy::default`].
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the transaction may or may not have been committed.
    pub async fn run<T, F, R>(&self, body: F) -> Result<T>
    where
        F: Fn(Transaction) -> R,
        R: Future<Output = Result<T>>,
    {
        self.run_with(&RetryPolicy::default(), body).await
    }

    /// Does the same as [`Store::run`], within the limits of `policy`.
    pub async fn run_with<T, F, R>(&self, policy: &RetryPolicy, body: F) -> Result<T>
    where
        F: Fn(Transaction) -> R,
        R: Future<Output = Result<T>>,
    {
        Ok(self.run_committed(policy, body).await?.0)
    }

    /// Does the same as [`Store::run_with`], and also returns the commit; `None` if there was nothing to write.
    pub(crate) async fn run_committed<T, F, R>(
        &self,
        policy: &RetryPolicy,
        body: F,
    ) -> Result<(T, Option<Committed>)>
    where
        F: Fn(Transaction) -> R,
        R: Future<Output = Result<T>>,
    {
        let mut tries = Tries::begin(self.begin(), self.env(), policy);
        loop {
            let tx = tries.transaction();
            let error = match body(tx.clone()).await {
                Ok(value) => match tx.commit().await {
                    Ok(committed) => {
                        self.runs.commits.fetch_add(1, Ordering::Relaxed);
                        return Ok((value, committed));
                    }
                    Err(error) => error,
                },
                Err(error) => error,
            };
            tries.recover(error).await?;
            self.runs.retries.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns how many transactions [`Store::run`] has committed through all clones of this handle, and how many attempts it has repeated.
    pub fn runs(&self) -> (u64, u64) {
        (self.runs.commits.load(Ordering::Relaxed), self.runs.retries.load(Ordering::Relaxed))
    }

    /// Whether all users of the store under `name` are dead; see [`Backend::is_unused`].
    pub(crate) fn is_unused(&self, name: &[u8]) -> bool {
        self.backend.is_unused(name)
    }

    /// Records that from now on the store may have users under `name`; see [`Backend::mark_used`].
    pub(crate) fn mark_used(&self, name: &[u8]) {
        self.backend.mark_used(name);
    }

    /// Whether the store may have given out `version`; see [`Backend::may_have_used`].
    pub(crate) fn may_have_used(&self, version: u64) -> bool {
        self.backend.may_have_used(version)
    }

    /// Returns the versions that the store has given out; see [`Backend::openings`].
    pub(crate) fn openings(&self) -> Vec<(u64, u64)> {
        self.backend.openings()
    }

    /// Returns the error of the last commit, if there was no room for the commit on the disk of the folder. Nothing is lost, and commits
    /// succeed again once there is room.
    pub fn shortage(&self) -> Option<Error> {
        self.backend.shortage().map(Error::Store)
    }

    /// Returns the error of a store that takes no more writes because the disk of its folder failed. Reads still work. All acknowledged
    /// commits will be there when the store is opened again, so a program should report the error and exit.
    pub fn failure(&self) -> Option<Error> {
        self.backend.failure().map(Error::Store)
    }

    /// Completes with [`Store::failure`] once there is one. Never completes for a store in memory, or for a cluster, which recovers by
    /// itself. The future holds no handle to the store.
    pub fn failed(&self) -> impl Future<Output = Error> + Send + use<> {
        let failed = self.backend.failed();
        async { Error::Store(failed.await) }
    }

    /// Runs `body`, which only reads, in a transaction at `version`, and tries again after every retryable error. Returns `None` if the
    /// store no longer keeps that version.
    pub(crate) async fn read_at<T, F, R>(&self, version: u64, body: F) -> Result<Option<T>>
    where
        F: Fn(Transaction) -> R,
        R: Future<Output = Result<T>>,
    {
        let policy = RetryPolicy::default();
        let mut tries = Tries::begin(self.begin(), self.env(), &policy);
        loop {
            let tx = tries.transaction();
            tx.set_read_version(version);
            match body(tx).await {
                // There is nothing to commit, and a commit would fail if any read had failed.
                Ok(value) => return Ok(Some(value)),
                Err(Error::Store(error)) if error == StoreError::TRANSACTION_TOO_OLD => return Ok(None),
                Err(error) => tries.recover(error).await?,
            }
        }
    }

    /// Returns the source of time and randomness of this handle.
    pub fn env(&self) -> &Env {
        &self.env
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Store")
    }
}
