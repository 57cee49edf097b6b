//! [`Wrapper`]: a backend around another one, which calls an [`Interceptor`] at every operation.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use parking_lot::{Mutex, MutexGuard};

use super::operation::{Attempt, Operation};
use crate::{
    base::{
        encoding::Versionstamp,
        env::Env,
        error::{Error, Result, StoreError},
    },
    store::{
        Isolation, KeyRange, Mutation, Page, RangeRead, Store, TransactionOption, Watch,
        backend::{Answer, Backend, TransactionBackend},
    },
};

/// A wrapped transaction, kept alive by the operations on it.
type Inner = Arc<dyn TransactionBackend>;

/// The error with which an attempt fails for good, if its interceptor sets one.
pub type Failed = Arc<Mutex<Option<StoreError>>>;

/// The result of a commit: the stamp, if there was anything to write.
pub type Stamp = Result<Option<Versionstamp>>;

/// Sits between a transaction and its store. By default, changes nothing.
pub trait Interceptor: Send + Sync + 'static {
    /// Called when an attempt performs its first operation.
    fn begins(&self) {}

    /// Called when attempt number `attempt` performs `operation`.
    fn sees(&self, _attempt: u64, _operation: &Operation) {}

    /// Returns a future that completes when the read `operation` may happen, and whose error makes the read fail.
    fn before_read(
        &self,
        _operation: &Operation,
        _failed: &Failed,
    ) -> Option<BoxFuture<'static, Result<()>>> {
        None
    }

    /// Called when the read `operation` has returned `rows` rows, with `bytes` bytes of keys and values.
    fn has_read(&self, _operation: &Operation, _rows: usize, _bytes: usize) {}

    /// Sets a watch on `key`, by default with `set`.
    fn watch(
        self: &Arc<Self>,
        _key: &[u8],
        set: BoxFuture<'static, Result<Watch>>,
    ) -> BoxFuture<'static, Result<Watch>> {
        set
    }

    /// Decides what happens to a commit. By default, the commit happens.
    fn commit(self: &Arc<Self>, commit: Commit<'_>) -> BoxFuture<'static, Stamp> {
        commit.happen()
    }
}

/// A commit whose fate an interceptor decides.
pub struct Commit<'a> {
    /// The attempt to be committed.
    pub attempt: &'a Attempt,
    inner: Inner,
    /// The wrapped store.
    store: &'a Arc<dyn Backend>,
    /// The transaction that the wrapper continues with.
    next: &'a mut Inner,
}

impl Commit<'_> {
    /// Commits the wrapped transaction.
    pub fn happen(self) -> BoxFuture<'static, Stamp> {
        let inner = self.inner;
        Box::pin(async move { inner.commit().await })
    }

    /// Keeps the wrapped transaction, to commit it later. With `is_detached`, the wrapper continues with another transaction, so that its
    /// caller can begin again before the deferred commit.
    pub fn defer(self, is_detached: bool) -> DeferredCommit {
        if is_detached {
            *self.next = Arc::from(self.store.begin());
        }
        DeferredCommit(self.inner)
    }
}

/// A commit that has not happened yet. If it is dropped, it never happens.
pub struct DeferredCommit(Inner);

impl DeferredCommit {
    /// Sets an option of the transaction.
    pub fn set_option(&self, option: TransactionOption) {
        self.0.set_option(option);
    }

    /// Commits the transaction.
    pub async fn commit(&self) -> Stamp {
        self.0.commit().await
    }

    /// Returns the ranges on which the commit conflicted, if the option to report them was set.
    pub async fn conflicting_ranges(&self) -> Result<Vec<KeyRange>> {
        self.0.conflicting_ranges().await
    }
}

impl fmt::Debug for DeferredCommit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeferredCommit").finish_non_exhaustive()
    }
}

/// A backend around another one.
struct Wrapper<I> {
    inner: Arc<dyn Backend>,
    interceptor: Arc<I>,
    /// The number of the last attempt.
    attempts: Arc<AtomicU64>,
}

/// Wraps `store`, with `interceptor` in between.
pub(super) fn wrap<I: Interceptor>(store: &Store, interceptor: &Arc<I>) -> Store {
    intercepted(store, store.env().clone(), interceptor)
}

/// Wraps `store`, with `interceptor` in between, for a process with this `env`.
pub fn intercepted<I: Interceptor>(store: &Store, env: Env, interceptor: &Arc<I>) -> Store {
    store.wrapped(env, |inner| Wrapper::new(inner, Arc::clone(interceptor)))
}

impl<I> Wrapper<I> {
    /// Wraps the store `inner`, with `interceptor` in between.
    fn new(inner: Arc<dyn Backend>, interceptor: Arc<I>) -> Self {
        Self { inner, interceptor, attempts: Arc::default() }
    }
}

impl<I: Interceptor> Backend for Wrapper<I> {
    fn is_unused(&self, name: &[u8]) -> bool {
        self.inner.is_unused(name)
    }

    fn mark_used(&self, name: &[u8]) {
        self.inner.mark_used(name);
    }

    fn may_have_used(&self, version: u64) -> bool {
        self.inner.may_have_used(version)
    }

    fn openings(&self) -> Vec<(u64, u64)> {
        self.inner.openings()
    }

    fn shortage(&self) -> Option<StoreError> {
        self.inner.shortage()
    }

    fn failure(&self) -> Option<StoreError> {
        self.inner.failure()
    }

    fn failed(&self) -> BoxFuture<'static, StoreError> {
        self.inner.failed()
    }

    fn begin(&self) -> Box<dyn TransactionBackend> {
        let state = State {
            inner: Arc::from(self.inner.begin()),
            attempt: Attempt::default(),
            number: self.attempts.fetch_add(1, Ordering::Relaxed),
            failed: Failed::default(),
        };
        Box::new(WrappedTransaction {
            store: Arc::clone(&self.inner),
            interceptor: Arc::clone(&self.interceptor),
            attempts: Arc::clone(&self.attempts),
            state: Mutex::new(state),
        })
    }
}

/// A transaction around another one.
struct WrappedTransaction<I> {
    /// The wrapped store. Begins another transaction when the wrapped one is detached.
    store: Arc<dyn Backend>,
    interceptor: Arc<I>,
    /// The number of the last attempt.
    attempts: Arc<AtomicU64>,
    state: Mutex<State>,
}

/// The mutable state of a transaction.
struct State {
    inner: Inner,
    attempt: Attempt,
    number: u64,
    failed: Failed,
}

impl<I: Interceptor> WrappedTransaction<I> {
    /// Locks the mutable state.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn inner(&self) -> Inner {
        Arc::clone(&self.state().inner)
    }

    fn begin_attempt(&self) -> MutexGuard<'_, State> {
        let mut state = self.state();
        state.attempt = Attempt::default();
        state.number = self.attempts.fetch_add(1, Ordering::Relaxed);
        state.failed = Failed::default();
        state
    }

    /// Records `operation`, and returns the wrapped transaction on which to do it.
    fn note(&self, operation: Operation) -> Inner {
        let mut state = self.state();
        if state.attempt.operations.is_empty() {
            self.interceptor.begins();
        }
        self.interceptor.sees(state.number, &operation);
        state.attempt.operations.push(operation);
        Arc::clone(&state.inner)
    }

    /// Records a read, and performs it when the interceptor lets it happen.
    fn reading<T: Send + 'static>(
        &self,
        operation: Operation,
        read: impl FnOnce(Inner) -> BoxFuture<'static, Result<T>> + Send + 'static,
        measure: impl FnOnce(&T) -> (usize, usize) + Send + 'static,
    ) -> Answer<'_, T> {
        // The state is not locked here, because a plan that decides about a read may use the transaction.
        let failed = Arc::clone(&self.state().failed);
        let permission = self.interceptor.before_read(&operation, &failed);
        let inner = self.note(operation.clone());
        let interceptor = Arc::clone(&self.interceptor);
        Answer::Waiting(Box::pin(async move {
            if let Some(permission) = permission {
                permission.await?;
            }
            let result = read(inner).await?;
            let (rows, bytes) = measure(&result);
            interceptor.has_read(&operation, rows, bytes);
            Ok(result)
        }))
    }
}

impl<I: Interceptor> TransactionBackend for WrappedTransaction<I> {
    fn read_version(&self) -> Answer<'_, u64> {
        let read =
            |inner: Inner| -> BoxFuture<'static, _> { Box::pin(async move { inner.read_version().await }) };
        self.reading(Operation::ReadVersion, read, |_| (0, 0))
    }

    fn clock_version(&self) -> Answer<'_, u64> {
        let read =
            |inner: Inner| -> BoxFuture<'static, _> { Box::pin(async move { inner.clock_version().await }) };
        self.reading(Operation::ReadVersion, read, |_| (0, 0))
    }

    fn set_read_version(&self, version: u64) {
        self.inner().set_read_version(version);
    }

    fn get(&self, key: &[u8], isolation: Isolation) -> Answer<'_, Option<Bytes>> {
        let key = Bytes::copy_from_slice(key);
        let operation = Operation::Get { key: key.clone(), isolation };
        self.reading(
            operation,
            move |inner| Box::pin(async move { inner.get(&key, isolation).await }),
            |value| value.as_ref().map_or((0, 0), |value| (1, value.len())),
        )
    }

    fn get_range(&self, read: &RangeRead, isolation: Isolation) -> Answer<'_, Page> {
        let read = read.clone();
        let operation = Operation::GetRange { range: read.range.clone(), isolation };
        self.reading(
            operation,
            move |inner| Box::pin(async move { inner.get_range(&read, isolation).await }),
            |page| {
                let bytes = page.rows.iter().map(|(key, value)| key.len() + value.len()).sum();
                (page.rows.len(), bytes)
            },
        )
    }

    fn mutate(&self, mutation: Mutation) {
        self.note(Operation::from(&mutation)).mutate(mutation);
    }

    fn add_read_conflict(&self, range: KeyRange) {
        let operation = Operation::ReadConflict { range: range.clone() };
        self.note(operation).add_read_conflict(range);
    }

    fn add_write_conflict(&self, range: KeyRange) {
        let operation = Operation::WriteConflict { range: range.clone() };
        self.note(operation).add_write_conflict(range);
    }

    fn watch(&self, key: &[u8]) -> Answer<'_, Watch> {
        let key = Bytes::copy_from_slice(key);
        let operation = Operation::Watch { key: key.clone() };
        let interceptor = Arc::clone(&self.interceptor);
        self.reading(
            operation,
            move |inner| {
                let watched = key.clone();
                interceptor.watch(&key, Box::pin(async move { inner.watch(&watched).await }))
            },
            |_| (0, 0),
        )
    }

    fn commit(&self) -> Answer<'_, Option<Versionstamp>> {
        self.note(Operation::Commit);
        let state = &mut *self.state();
        if let Some(error) = state.failed.lock().clone() {
            return Err(error.into()).into();
        }
        let commit = Commit {
            attempt: &state.attempt,
            inner: Arc::clone(&state.inner),
            store: &self.store,
            next: &mut state.inner,
        };
        Answer::Waiting(self.interceptor.commit(commit))
    }

    fn approximate_size(&self) -> Answer<'_, usize> {
        let inner = self.inner();
        Answer::Waiting(Box::pin(async move { inner.approximate_size().await }))
    }

    fn set_option(&self, option: TransactionOption) {
        self.inner().set_option(option);
    }

    fn conflicting_ranges(&self) -> Answer<'_, Vec<KeyRange>> {
        let inner = self.inner();
        Answer::Waiting(Box::pin(async move { inner.conflicting_ranges().await }))
    }

    fn cancel(&self) {
        self.inner().cancel();
    }

    fn reset(&self) {
        self.begin_attempt().inner.reset();
    }

    fn is_retryable(&self, error: &StoreError) -> bool {
        self.inner().is_retryable(error)
    }

    fn recover(&self, error: Error, backoff: BoxFuture<'static, ()>) -> BoxFuture<'_, Result<()>> {
        let inner = self.inner();
        Box::pin(async move {
            inner.recover(error, backoff).await?;
            drop(self.begin_attempt());
            Ok(())
        })
    }
}
