//! The seam: the traits of a backend. [`Store`](super::Store) and [`Transaction`](super::Transaction) are the
//! concrete types over them, so that nothing above is generic over the store.

use std::{
    future::pending,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use futures_util::future::BoxFuture;

use super::{Isolation, KeyRange, Mutation, Page, RangeRead, TransactionOption, Watch};
use crate::base::{
    encoding::Versionstamp,
    error::{Error, Result, StoreError},
};

/// A store.
pub(crate) trait Backend: Send + Sync + 'static {
    /// Begins a transaction, which takes its read version at its first read.
    fn begin(&self) -> Box<dyn TransactionBackend>;

    /// Whether all users of the store under `name` are dead: no other process can have the store open, and [`Backend::mark_used`] has not
    /// been called for `name` since it was opened.
    fn is_unused(&self, _name: &[u8]) -> bool {
        false
    }

    /// Records that from now on the store may have users under `name`.
    fn mark_used(&self, _name: &[u8]) {}

    /// Whether the store may have given out `version`. If an embedded store has not, the version came from another one, such as the same
    /// folder before an older copy replaced it. A cluster keeps no such history, so it always may have.
    fn may_have_used(&self, _version: u64) -> bool {
        true
    }

    /// Returns the versions for which [`Backend::may_have_used`] is true, as one interval for each opening, oldest first; none for a store
    /// that keeps no history.
    fn openings(&self) -> Vec<(u64, u64)> {
        Vec::new()
    }

    /// Returns the error of the last commit, if there was no room for the commit on the disk.
    fn shortage(&self) -> Option<StoreError> {
        None
    }

    /// Returns the error that stopped the store from taking writes; `None` if it still takes them.
    fn failure(&self) -> Option<StoreError> {
        None
    }

    /// Completes with [`Backend::failure`] once there is one; never for a store that cannot fail in this way.
    fn failed(&self) -> BoxFuture<'static, StoreError> {
        Box::pin(pending())
    }
}

/// A transaction of a store. Operations after [`TransactionBackend::commit`] fail with `used_during_commit` (2017) until
/// [`TransactionBackend::reset`].
pub(crate) trait TransactionBackend: Send + Sync {
    /// Returns the version at which the transaction reads.
    fn read_version(&self) -> Answer<'_, u64>;
    /// Returns the version that the clock of the store shows. Versions advance only with commits in an embedded store, so its read versions
    /// may be older; on a cluster they are up to date.
    fn clock_version(&self) -> Answer<'_, u64> {
        self.read_version()
    }
    /// Makes the transaction read at `version` instead of the newest version.
    fn set_read_version(&self, version: u64);
    /// Returns the value of `key`, with the transaction's own writes applied.
    fn get(&self, key: &[u8], isolation: Isolation) -> Answer<'_, Option<Bytes>>;
    /// Reads a page of rows, with the transaction's own writes applied.
    fn get_range(&self, read: &RangeRead, isolation: Isolation) -> Answer<'_, Page>;
    /// Adds a write. An invalid write makes all later operations fail.
    fn mutate(&self, mutation: Mutation);
    /// Adds `range` to the read-conflict set, except for keys that the transaction has already written.
    fn add_read_conflict(&self, range: KeyRange);
    /// Makes other transactions that read within `range` conflict with this one.
    fn add_write_conflict(&self, range: KeyRange);
    /// Sets a watch on `key`, which the commit arms.
    fn watch(&self, key: &[u8]) -> Answer<'_, Watch>;
    /// Commits the transaction. Returns `None` if there was nothing to write.
    fn commit(&self) -> Answer<'_, Option<Versionstamp>>;
    /// Returns the total length of keys, values and conflict ranges so far, in bytes.
    fn approximate_size(&self) -> Answer<'_, usize>;
    /// Sets an option. No option limits retries: [`Transaction`](super::Transaction) counts those itself.
    fn set_option(&self, option: TransactionOption);
    /// Returns the ranges on which the last commit conflicted, if the option to report them was set.
    fn conflicting_ranges(&self) -> Answer<'_, Vec<KeyRange>>;
    /// Makes all later operations fail with `transaction_cancelled` (1025).
    fn cancel(&self);
    /// Resets this to a new transaction.
    fn reset(&self);
    /// Whether the same transaction can succeed if it is tried again after `error`.
    fn is_retryable(&self, error: &StoreError) -> bool {
        error.is_retryable()
    }
    /// Waits after `error` until the transaction may be tried again; returns the error if it is final. `backoff` is
    /// the caller's pause, for backends without one of their own. Afterwards this is a new transaction with the
    /// options of the old one, unless it was reset meanwhile.
    fn recover(&self, error: Error, backoff: BoxFuture<'static, ()>) -> BoxFuture<'_, Result<()>>;
}

/// The answer to an operation: available immediately, from memory, or later. A plain boxed future would cost an allocation for each read of
/// the embedded store.
pub(crate) enum Answer<'a, T> {
    /// The answer is already known; the first poll takes it.
    Ready(Option<Result<T>>),
    /// The answer is not known yet.
    Waiting(BoxFuture<'a, Result<T>>),
}

impl<T> From<Result<T>> for Answer<'_, T> {
    fn from(result: Result<T>) -> Self {
        Self::Ready(Some(result))
    }
}

impl<T: Unpin> Future for Answer<'_, T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            Self::Ready(result) => {
                // Without this, operations that never wait would starve the other tasks on their thread, heartbeats among them.
                let turn = ready!(tokio::task::coop::poll_proceed(context));
                turn.made_progress();
                Poll::Ready(result.take().expect("an answer is polled to its end only once"))
            }
            Self::Waiting(future) => future.as_mut().poll(context),
        }
    }
}
