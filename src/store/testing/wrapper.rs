//! [`Wrapper`]: a backend around another one, which calls an [`Interceptor`] at every operation.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use bytes::Bytes;
use futures_util::future::{BoxFuture, pending};
use parking_lot::{Mutex, MutexGuard};

use super::{
    fault::{CommitFault, WatchFault},
    operation::{Attempt, Operation},
};
use crate::{
    base::{
        encoding::Versionstamp,
        error::{Error, Result, StoreError},
    },
    store::{
        Database, Isolation, KeyRange, Page, RangeRead, TransactionOption, Watch,
        backend::{Answer, Backend, TransactionBackend},
        mutation::Mutation,
    },
};

/// A wrapped transaction, kept alive by the operations on it.
pub(super) type Inner = Arc<dyn TransactionBackend>;

/// Decides about each operation. By default it changes nothing.
pub(super) trait Interceptor: Send + Sync + 'static {
    /// An attempt does its first operation.
    fn begins(&self) {}

    /// Attempt number `attempt` does `operation`.
    fn sees(&self, _attempt: u64, _operation: &Operation) {}

    /// A read has returned `bytes` bytes of keys and values.
    fn has_read(&self, _bytes: usize) {}

    /// Whether a read fails.
    fn read(&self, _operation: &Operation) -> Option<StoreError> {
        None
    }

    /// The fault of a watch, if any.
    fn watch(&self, _key: &[u8]) -> Option<WatchFault> {
        None
    }

    /// The fault of the commit of `attempt`, if any.
    fn commit(&self, _attempt: &Attempt) -> Option<CommitFault> {
        None
    }

    /// Keeps a transaction whose commit happens late.
    fn keep_late(&self, _transaction: Inner) {}
}

/// A backend around another one.
pub(super) struct Wrapper<I> {
    inner: Arc<dyn Backend>,
    /// Shared with the handle of the test.
    interceptor: Arc<I>,
    /// The number of the last attempt.
    attempts: Arc<AtomicU64>,
}

/// The store of `db` behind `interceptor`.
pub(super) fn wrap<I: Interceptor>(db: &Database, interceptor: &Arc<I>) -> Database {
    db.wrapped(|inner| Wrapper { inner, interceptor: Arc::clone(interceptor), attempts: Arc::default() })
}

impl<I: Interceptor> Backend for Wrapper<I> {
    fn may_have_used(&self, version: u64) -> bool {
        self.inner.may_have_used(version)
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
    /// Begins another transaction when the wrapped one is kept for a late commit.
    store: Arc<dyn Backend>,
    interceptor: Arc<I>,
    /// The number of the last attempt.
    attempts: Arc<AtomicU64>,
    state: Mutex<State>,
}

/// The changing part of a transaction.
struct State {
    inner: Inner,
    /// Its operations.
    attempt: Attempt,
    /// The number of the attempt.
    number: u64,
}

impl<I: Interceptor> WrappedTransaction<I> {
    /// The changing part.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn inner(&self) -> Inner {
        Arc::clone(&self.state().inner)
    }

    /// Begins another attempt.
    fn begin_attempt(&self) -> MutexGuard<'_, State> {
        let mut state = self.state();
        state.attempt = Attempt::default();
        state.number = self.attempts.fetch_add(1, Ordering::Relaxed);
        state
    }

    /// Records `operation`; returns the wrapped transaction to do it on.
    fn note(&self, operation: Operation) -> Inner {
        let mut state = self.state();
        if state.attempt.operations.is_empty() {
            self.interceptor.begins();
        }
        self.interceptor.sees(state.number, &operation);
        state.attempt.operations.push(operation);
        Arc::clone(&state.inner)
    }

    /// Records a read and does it, unless it should fail.
    fn reading<T>(
        &self,
        operation: Operation,
        read: impl FnOnce(Inner) -> BoxFuture<'static, Result<T>>,
    ) -> Answer<'_, T> {
        let fault = self.interceptor.read(&operation);
        let inner = self.note(operation);
        match fault {
            Some(error) => Err(Error::Store(error)).into(),
            None => Answer::Waiting(read(inner)),
        }
    }
}

impl<I: Interceptor> TransactionBackend for WrappedTransaction<I> {
    fn read_version(&self) -> Answer<'_, u64> {
        self.reading(Operation::ReadVersion, |inner| Box::pin(async move { inner.read_version().await }))
    }

    fn set_read_version(&self, version: u64) {
        self.inner().set_read_version(version);
    }

    fn get(&self, key: &[u8], isolation: Isolation) -> Answer<'_, Option<Bytes>> {
        let key = Bytes::copy_from_slice(key);
        let operation = Operation::Get { key: key.clone(), isolation };
        let interceptor = Arc::clone(&self.interceptor);
        self.reading(operation, move |inner| {
            Box::pin(async move {
                let value = inner.get(&key, isolation).await?;
                interceptor.has_read(key.len() + value.as_ref().map_or(0, Bytes::len));
                Ok(value)
            })
        })
    }

    fn get_range(&self, read: &RangeRead, isolation: Isolation) -> Answer<'_, Page> {
        let read = read.clone();
        let operation = Operation::GetRange { range: read.range.clone(), isolation };
        let interceptor = Arc::clone(&self.interceptor);
        self.reading(operation, move |inner| {
            Box::pin(async move {
                let page = inner.get_range(&read, isolation).await?;
                let range = read.range.begin.len() + read.range.end.len();
                interceptor.has_read(
                    page.rows.iter().fold(range, |sum, (key, value)| sum + key.len() + value.len()),
                );
                Ok(page)
            })
        })
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
        let fault = self.interceptor.watch(&key);
        let operation = Operation::Watch { key: key.clone() };
        self.reading(operation, move |inner| {
            Box::pin(async move {
                match fault {
                    None => inner.watch(&key).await,
                    Some(WatchFault::Refuse(error)) => Err(error.into()),
                    Some(WatchFault::Drop) => Ok(Watch::new(pending())),
                    Some(WatchFault::Spurious) => Ok(Watch::new(async { Ok(()) })),
                }
            })
        })
    }

    fn commit(&self) -> Answer<'_, Option<Versionstamp>> {
        let inner = self.note(Operation::Commit);
        let fault = self.interceptor.commit(&self.state().attempt);
        Answer::Waiting(match fault {
            None => Box::pin(async move { inner.commit().await }),
            Some(CommitFault::Before(error)) => Box::pin(async { Err(error.into()) }),
            Some(CommitFault::After(error)) => Box::pin(async move {
                inner.commit().await?;
                Err(error.into())
            }),
            Some(CommitFault::Late(error)) => {
                self.state().inner = Arc::from(self.store.begin());
                self.interceptor.keep_late(inner);
                Box::pin(async { Err(error.into()) })
            }
            Some(CommitFault::Hold(gate)) => Box::pin(async move {
                gate.pass().await;
                inner.commit().await
            }),
        })
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
