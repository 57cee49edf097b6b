//! The path of a commit: a process sends it, the world lets it arrive, and the oracle judges it.
//!
//! A commit under way belongs to the world, not to its process: the fate of the process does not change whether it
//! happens. So a crash between a commit and its answer is nothing special, and a late commit (1031) is just slow.

use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{FutureExt, future::BoxFuture};
use parking_lot::Mutex;

use super::{
    event::Event,
    findings::Findings,
    flight::{Flight, FlightState, Touched},
    issuer::Issuer,
    keyspace::{Rows, show_all},
    link::Link,
    oracle::{Change, ObservedCommit, Oracle, is_fold},
    shared::Shared,
    witness::{Fault, Witness},
};
use crate::{
    base::{
        encoding::Versionstamp,
        error::{Error, Result, StoreError},
    },
    store::{
        Answer, AtomicOp, Isolation, KeyRange, Mutation, RangeRead, TransactionBackend, TransactionOption,
        testing::{Commit, Operation},
    },
};

/// The longest delays of commits without a waiting caller, in milliseconds; at most the lifetime of a transaction.
const LATE_MAX_MS: [u64; 4] = [10, 100, 1_000, 4_500];

/// Sends `commit` to the store, and completes with its answer.
pub(super) fn send(
    link: &Arc<Link>,
    mut commit: Commit<'_>,
) -> BoxFuture<'static, Result<Option<Versionstamp>>> {
    let mutations: Vec<_> = commit.attempt.operations.iter().filter_map(Operation::mutation).collect();
    let shared = &link.shared;
    shared.may_crash(link.issuer);
    let (mut there, mut back) = (link.latency(), link.latency() + Duration::from_nanos(1));
    if shared.strikes(Fault::SlowCommit) {
        let slow = link.slowness();
        if shared.draw(0..=1) == 0 { there += slow } else { back += slow }
    }
    let before = [
        (Fault::Conflict, StoreError::NOT_COMMITTED),
        (Fault::UnknownLost, StoreError::COMMIT_UNKNOWN_RESULT),
        (Fault::CommitTooOld, StoreError::TRANSACTION_TOO_OLD),
        (Fault::Refused, StoreError::DATABASE_LOCKED),
        (Fault::TimedOut, StoreError::TRANSACTION_TIMED_OUT),
    ];
    let env = link.env.clone();
    if let Some((_, error)) = before.into_iter().find(|(fault, _)| shared.strikes(*fault)) {
        link.note(|| format!("commits {} -> {error}, not committed", show_all(&mutations)));
        return Box::pin(async move {
            env.sleep(there + back).await;
            Err(error.into())
        });
    }
    let is_late = shared.strikes(Fault::LateCommit);
    let after = if is_late {
        Some(StoreError::TRANSACTION_TIMED_OUT)
    } else if shared.strikes(Fault::UnknownCommitted) {
        Some(StoreError::COMMIT_UNKNOWN_RESULT)
    } else if shared.strikes(Fault::VersionChanged) {
        Some(StoreError::CLUSTER_VERSION_CHANGED)
    } else {
        None
    };
    if after.is_some() && !is_late && shared.plan.doubts_last && shared.draw(0..=1) == 0 {
        back += link.slowness();
    }
    link.note(|| format!("commits {}", show_all(&mutations)));
    let state = Mutex::new(FlightState::Under { is_awaited: true, waker: None });
    let (issuer, is_sure) = (link.issuer, is_late || shared.draw(0..=1) == 0);
    if is_late {
        commit.detach();
    }
    let Commit { store, inner, .. } = commit;
    let engine = Arc::clone(store);
    let flight = Arc::new(Flight { engine, inner, mutations, issuer, is_late, is_sure, state });
    if is_late {
        let most = LATE_MAX_MS[shared.draw(0..=3) as usize];
        shared.time.after(Duration::from_millis(shared.draw(1..=most)), Event::Arrival(flight));
        return Box::pin(async move {
            env.sleep(there + back).await;
            Err(StoreError::TRANSACTION_TIMED_OUT.into())
        });
    }
    shared.time.after(there, Event::Arrival(Arc::clone(&flight)));
    let folds = is_fold(&flight.mutations);
    let (awaited, shared) = (Awaited(flight), Arc::clone(shared));
    Box::pin(async move {
        env.sleep(there + back).await;
        let result = awaited.await;
        match (result, after) {
            (Ok(_), Some(error)) => {
                if folds {
                    shared.witness(Witness::FoldRetriedAfterCommit);
                }
                Err(error.into())
            }
            (result, _) => result,
        }
    })
}

/// A commit with a waiting caller.
struct Awaited(Arc<Flight>);

impl Future for Awaited {
    type Output = Result<Option<Versionstamp>>;

    /// The answer comes after the arrival.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self.0.state.lock() {
            FlightState::Arrived(result) => Poll::Ready(result.take().expect("it is taken once")),
            FlightState::Under { waker, .. } => {
                *waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        if let FlightState::Under { is_awaited, .. } = &mut *self.0.state.lock() {
            *is_awaited = false;
        }
    }
}

impl Flight {
    /// Arrives at the store, which decides it. Returns what is in doubt if the store has lost its power meanwhile.
    pub fn arrive(&self, shared: &Arc<Shared>) -> Option<Doubt> {
        let is_awaited = matches!(*self.state.lock(), FlightState::Under { is_awaited: true, .. });
        let is_orphan = !is_awaited && !self.is_late;
        if is_orphan && !self.is_sure {
            return None;
        }
        // Nobody reports what follows from this commit before it is judged.
        let mut oracle = shared.oracle();
        // The rows before the commit; all of this happens at one moment.
        let before = self.engine.begin();
        ready(before.read_version()).expect("the engine can always be read");
        let mut touched = BTreeMap::new();
        for mutation in &self.mutations {
            touch(&*before, mutation, &mut touched);
        }
        self.inner.set_option(TransactionOption::ReportConflicts);
        if let Some(size) = shared.plan.fold_size_max.filter(|_| is_fold(&self.mutations)) {
            self.inner.set_option(TransactionOption::SizeLimit(size));
        }
        let result = ready(self.inner.commit());
        let Issuer { process, generation } = self.issuer;
        let too_large = StoreError::TRANSACTION_TOO_LARGE.code();
        if result.as_ref().is_err_and(|error| error.code() == Some(too_large)) {
            shared.witness(Witness::FoldTooLarge);
        }
        match &result {
            Ok(Some(stamp)) => {
                if is_orphan {
                    shared.witness(Witness::OrphanCommitted);
                }
                self.add_stamped(&mut touched, *stamp);
                let records =
                    self.judge((&**shared, &mut oracle), (&*before, &*self.engine.begin()), touched, *stamp);
                shared.may_crash_before_answer(self.issuer, records);
            }
            Ok(None) => {}
            // The power has failed: before this commit, or during it.
            Err(error)
                if error.code() == Some(StoreError::IO_ERROR.code())
                    || error.is_maybe_committed() && !error.is_retryable() =>
            {
                return result.err().map(|answer| Doubt { touched, answer });
            }
            Err(error) => {
                shared.note(|| format!("the store refuses a transaction of {process}.{generation}: {error}"));
                let conflicts = ready(self.inner.conflicting_ranges()).unwrap_or_default();
                let keys: Vec<_> = touched.into_keys().collect();
                oracle.refused(shared, (self.issuer, self.is_late), error.code(), &keys, &conflicts);
            }
        }
        let arrived = FlightState::Arrived(Some(result));
        let before = std::mem::replace(&mut *self.state.lock(), arrived);
        if let FlightState::Under { waker: Some(waker), .. } = before {
            waker.wake();
        }
        None
    }

    /// Has `oracle` judge it: it was committed at `stamp`, between the reads `before` and `after`. Returns whether
    /// it records events.
    pub fn judge(
        &self,
        (findings, oracle): (&Findings, &mut Oracle),
        (before, after): (&dyn TransactionBackend, &dyn TransactionBackend),
        touched: Touched,
        stamp: Versionstamp,
    ) -> bool {
        let Issuer { process, generation } = self.issuer;
        let get = |tx: &dyn TransactionBackend, key: &[u8]| {
            ready(tx.get(key, Isolation::Snapshot)).expect("the engine can always be read")
        };
        let touched = touched.into_iter().map(|(key, before)| {
            let after = get(after, &key);
            (key, Change { before, after })
        });
        findings.note(|| format!("the store commits a transaction of {process}.{generation} at {stamp:?}"));
        let seen = ObservedCommit {
            issuer: self.issuer,
            stamp,
            is_late: self.is_late,
            touched: touched.collect(),
            before: &|key: &[u8]| get(before, key),
        };
        oracle.committed(findings, &seen);
        seen.records()
    }
}

/// A commit that the power or the disk has failed.
pub(super) struct Doubt {
    /// The keys that it touches.
    pub touched: Touched,
    /// What the store has answered.
    pub answer: Error,
}

/// The answer of the engine, which never waits without a thread.
pub(super) fn ready<T: Unpin>(answer: Answer<'_, T>) -> Result<T> {
    answer.now_or_never().expect("the engine answers at once")
}

pub(super) fn rows(tx: &dyn TransactionBackend) -> Rows {
    let mut rows = Rows::new();
    let mut rest = Some(RangeRead::new(KeyRange::new(&b""[..], &b"\xff"[..])));
    while let Some(read) = rest {
        let page = ready(tx.get_range(&read, Isolation::Snapshot)).expect("the engine can be read");
        rest = read.after(&page);
        rows.extend(page.rows);
    }
    rows
}

/// Records the keys that `mutation` touches, except for those that get a stamp from the commit.
pub(super) fn touch(before: &dyn TransactionBackend, mutation: &Mutation, touched: &mut Touched) {
    match mutation {
        Mutation::Atomic(AtomicOp::SetVersionstampedKey, ..) => {}
        Mutation::Set(key, _) | Mutation::Clear(key) | Mutation::Atomic(_, key, _) => {
            if !touched.contains_key(key) {
                let value = ready(before.get(key, Isolation::Snapshot)).expect("the engine can be read");
                touched.insert(key.clone(), value);
            }
        }
        Mutation::ClearRange(begin, end) => {
            let range = KeyRange { begin: begin.clone(), end: end.clone() };
            let mut rest = Some(RangeRead::new(range));
            while let Some(read) = rest {
                let page =
                    ready(before.get_range(&read, Isolation::Snapshot)).expect("the engine can be read");
                rest = read.after(&page);
                touched.extend(page.rows.into_iter().map(|(key, value)| (key, Some(value))));
            }
        }
    }
}
