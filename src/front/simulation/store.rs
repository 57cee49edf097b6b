//! The store of a process in a world: the embedded engine behind a network that delays, loses and lies.
//!
//! Reads and commits go over the [`Link`] of the process. What becomes of a commit is in [`commits`](super::commits).

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use parking_lot::{Mutex, MutexGuard};

use super::{
    commits::commit,
    flight::Inner,
    issuer::Issuer,
    keyspace::show_key,
    link::Link,
    shared::Shared,
    witness::{Fault, Witness},
};
use crate::{
    base::{
        encoding::Versionstamp,
        error::{Error, Result, StoreError},
    },
    store::{
        Answer, Backend, Isolation, KeyRange, Mutation, Page, RangeRead, TRANSACTION_IDS_PREFIX,
        TransactionBackend, TransactionOption, Watch,
    },
};

/// The store of one process.
pub(super) struct SimulatedStore {
    engine: Arc<dyn Backend>,
    link: Arc<Link>,
}

impl SimulatedStore {
    /// The store behind `engine`, for `issuer`.
    pub fn new(engine: Arc<dyn Backend>, shared: Arc<Shared>, issuer: Issuer) -> Self {
        Self { engine, link: Arc::new(Link::new(shared, issuer)) }
    }
}

impl Backend for SimulatedStore {
    fn may_have_used(&self, version: u64) -> bool {
        self.engine.may_have_used(version)
    }

    fn begin(&self) -> Box<dyn TransactionBackend> {
        let state = State { inner: Arc::from(self.engine.begin()), attempt: Attempt::default() };
        Box::new(SimulatedTransaction {
            engine: Arc::clone(&self.engine),
            link: Arc::clone(&self.link),
            state: Mutex::new(state),
        })
    }
}

/// A transaction of a process.
struct SimulatedTransaction {
    engine: Arc<dyn Backend>,
    link: Arc<Link>,
    state: Mutex<State>,
}

/// The changing part of a transaction.
struct State {
    inner: Inner,
    attempt: Attempt,
}

/// The operations of one attempt of a transaction.
#[derive(Default)]
struct Attempt {
    /// Its writes.
    mutations: Vec<Mutation>,
    /// Whether it has set a watch.
    has_watch: bool,
    /// The error with which it and all later operations fail.
    failed: Arc<Mutex<Option<StoreError>>>,
}

impl SimulatedTransaction {
    /// The changing part.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn inner(&self) -> Inner {
        Arc::clone(&self.state().inner)
    }

    /// Does `read` after a delay, unless a fault strikes.
    fn reading<T: Send + 'static>(
        &self,
        what: impl FnOnce() -> String,
        read: impl FnOnce(Inner) -> BoxFuture<'static, Result<T>> + Send + 'static,
    ) -> Answer<'_, T> {
        let (fault, pause) = self.link.read_fault();
        self.link.note(|| match &fault {
            None => what(),
            Some(error) => format!("{} -> {error}", what()),
        });
        let (inner, failed) = {
            let state = self.state();
            (Arc::clone(&state.inner), Arc::clone(&state.attempt.failed))
        };
        let env = self.link.env.clone();
        Answer::Waiting(Box::pin(async move {
            if !pause.is_zero() {
                env.sleep(pause).await;
            }
            let error = {
                let mut failed = failed.lock();
                if failed.is_none() {
                    failed.clone_from(&fault);
                }
                failed.clone()
            };
            match error {
                Some(error) => Err(error.into()),
                None => read(inner).await,
            }
        }))
    }
}

impl TransactionBackend for SimulatedTransaction {
    fn read_version(&self) -> Answer<'_, u64> {
        self.reading(
            || "reads the version".to_owned(),
            |inner| Box::pin(async move { inner.read_version().await }),
        )
    }

    fn set_read_version(&self, version: u64) {
        self.inner().set_read_version(version);
    }

    fn get(&self, key: &[u8], isolation: Isolation) -> Answer<'_, Option<Bytes>> {
        let key = Bytes::copy_from_slice(key);
        let (shown, shared) = (key.clone(), Arc::clone(&self.link.shared));
        self.reading(
            || format!("reads {}", show_key(&shown)),
            move |inner| {
                Box::pin(async move {
                    let value = inner.get(&key, isolation).await?;
                    if value.is_some() && key.starts_with(TRANSACTION_IDS_PREFIX) {
                        shared.witness(Witness::CommittedOnceFound);
                    }
                    Ok(value)
                })
            },
        )
    }

    fn get_range(&self, read: &RangeRead, isolation: Isolation) -> Answer<'_, Page> {
        let read = read.clone();
        let begin = read.range.begin.clone();
        self.reading(
            || format!("reads from {}", show_key(&begin)),
            move |inner| Box::pin(async move { inner.get_range(&read, isolation).await }),
        )
    }

    fn mutate(&self, mutation: Mutation) {
        let mut state = self.state();
        state.attempt.mutations.push(mutation.clone());
        state.inner.mutate(mutation);
    }

    fn add_read_conflict(&self, range: KeyRange) {
        self.inner().add_read_conflict(range);
    }

    fn add_write_conflict(&self, range: KeyRange) {
        self.inner().add_write_conflict(range);
    }

    fn watch(&self, key: &[u8]) -> Answer<'_, Watch> {
        self.state().attempt.has_watch = true;
        let (key, link) = (Bytes::copy_from_slice(key), Arc::clone(&self.link));
        let shown = key.clone();
        let is_refused = self.link.shared.strikes(Fault::WatchRefused);
        self.reading(
            || format!("watches {}", show_key(&shown)),
            move |inner| {
                Box::pin(async move {
                    if is_refused {
                        return Err(StoreError::TOO_MANY_WATCHES.into());
                    }
                    let watch = inner.watch(&key).await?;
                    let before = link.shared.fault_count(Fault::WatchDropped);
                    let watch = link.watch(watch);
                    if link.shared.fault_count(Fault::WatchDropped) > before {
                        link.shared.oracle().watch_lost(link.issuer, &key);
                    }
                    Ok(watch)
                })
            },
        )
    }

    fn commit(&self) -> Answer<'_, Option<Versionstamp>> {
        let (inner, attempt) = {
            let mut state = self.state();
            let failed = Arc::clone(&state.attempt.failed);
            let taken = std::mem::take(&mut state.attempt);
            state.attempt.failed = failed;
            (Arc::clone(&state.inner), taken)
        };
        if let Some(error) = attempt.failed.lock().clone() {
            return Err(error.into()).into();
        }
        if attempt.mutations.is_empty() {
            // The client decides this by itself.
            return Answer::Waiting(Box::pin(async move { inner.commit().await }));
        }
        if attempt.has_watch {
            self.link.shared.fail("a watch was set in a transaction that writes".to_owned());
        }
        let takes_over = || self.state().inner = Arc::from(self.engine.begin());
        Answer::Waiting(commit(&self.link, &self.engine, inner, attempt.mutations, takes_over))
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
        let mut state = self.state();
        state.attempt = Attempt::default();
        state.inner.reset();
    }

    fn recover(&self, error: Error, backoff: BoxFuture<'static, ()>) -> BoxFuture<'_, Result<()>> {
        let inner = self.inner();
        Box::pin(async move {
            inner.recover(error, backoff).await?;
            self.state().attempt = Attempt::default();
            Ok(())
        })
    }
}
