//! The path of a commit: a process sends it, the world delivers it to the store, and the oracle judges it.
//!
//! A commit in flight belongs to the world, not to its process: whether it happens does not depend on the fate of the process. So a crash
//! between a commit and its answer is nothing special, and a late commit (1031) is just slow.

use std::{
    collections::BTreeMap,
    fmt::Write,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use futures_util::{FutureExt, future::BoxFuture};
use notibus::{
    Error,
    event::Versionstamp,
    store::{
        AtomicOp, Isolation, KeyRange, RangeRead, Store, StoreError, Transaction, TransactionOption,
        testing::{Commit, DeferredCommit, Operation, Stamp},
    },
};
use parking_lot::Mutex;

use super::{Event, Issuer, link::Link};
use crate::{
    findings::Findings,
    keyspace::{Rows, show_key},
    oracle::{Change, ObservedCommit, Oracle, is_fold},
    shared::Shared,
    witness::{Fault, Witness},
};

/// Upper limits for the delay of a late commit, in milliseconds, one of which is drawn; none exceeds the lifetime of a transaction.
const LATE_MAX_MS: [u64; 4] = [10, 100, 1_000, 4_500];

/// A commit on its way to the store.
pub struct Flight {
    engine: Arc<Store>,
    deferred: DeferredCommit,
    mutations: Vec<Operation>,
    issuer: Issuer,
    /// Whether the issuer has already learned that the commit failed.
    is_late: bool,
    /// Whether the commit happens even if its process has crashed.
    is_sure: bool,
    state: Mutex<FlightState>,
}

enum FlightState {
    Under {
        /// Whether the caller still waits for the commit.
        is_awaited: bool,
        /// Wakes the caller, if the commit has not arrived by the end of the caller's delay.
        waker: Option<Waker>,
    },
    Arrived(Option<Stamp>),
}

/// The keys that a transaction touches, with their earlier values.
pub type Touched = BTreeMap<Bytes, Option<Bytes>>;

/// Sends `commit` to the store, and completes with the store's answer.
pub fn send(link: &Arc<Link>, commit: Commit<'_>) -> BoxFuture<'static, Stamp> {
    let mutations: Vec<_> = commit.attempt.mutations().cloned().collect();
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
    let (engine, deferred) = (Arc::clone(&link.engine), commit.defer(is_late));
    let flight = Arc::new(Flight { engine, deferred, mutations, issuer, is_late, is_sure, state });
    if is_late {
        let most = LATE_MAX_MS[shared.draw(0..=3) as usize];
        shared.time.after(Duration::from_millis(shared.draw(1..=most)), Event::Arrival(flight));
        return Box::pin(async move {
            env.sleep(there + back).await;
            Err(StoreError::TRANSACTION_TIMED_OUT.into())
        });
    }
    shared.time.after(there, Event::Arrival(Arc::clone(&flight)));
    let awaited = Awaited(flight);
    Box::pin(async move {
        env.sleep(there + back).await;
        let result = awaited.await;
        match (result, after) {
            (Ok(_), Some(error)) => Err(error.into()),
            (result, _) => result,
        }
    })
}

/// A commit whose caller is waiting.
struct Awaited(Arc<Flight>);

impl Future for Awaited {
    type Output = Stamp;

    /// Completes after the commit has arrived.
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
    /// Whether the commit goes to `engine`.
    pub fn is_for(&self, engine: &Arc<Store>) -> bool {
        Arc::ptr_eq(&self.engine, engine)
    }

    /// Adds to `touched` the keys that the commit completes with its `stamp`.
    pub fn add_stamped(&self, touched: &mut Touched, stamp: Versionstamp) {
        for mutation in &self.mutations {
            if let Operation::Atomic { op: AtomicOp::SetVersionstampedKey, key, .. } = mutation {
                touched.entry(stamped(key, stamp)).or_insert(None);
            }
        }
    }

    /// Lets the commit arrive at the store, which decides it. Returns what is unknown about the commit if the power failed in the meantime.
    pub fn arrive(&self, shared: &Arc<Shared>) -> Option<Doubt> {
        let is_awaited = matches!(*self.state.lock(), FlightState::Under { is_awaited: true, .. });
        let is_orphan = !is_awaited && !self.is_late;
        if is_orphan && !self.is_sure {
            return None;
        }
        // The oracle stays locked, so that no actor reports consequences of this commit before it is judged.
        let mut oracle = shared.oracle();
        // Reads the rows as they were before the commit; no time passes in between.
        let before = self.engine.begin();
        ready(before.read_version()).expect("the engine can always be read");
        let mut touched = BTreeMap::new();
        for mutation in &self.mutations {
            touch(&before, mutation, &mut touched);
        }
        self.deferred.set_option(TransactionOption::ReportConflicts);
        if let Some(size) = shared.plan.fold_size_max.filter(|_| is_fold(&self.mutations)) {
            self.deferred.set_option(TransactionOption::SizeLimit(size));
        }
        let result = ready(self.deferred.commit());
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
                self.judge((&**shared, &mut oracle), (&before, &self.engine.begin()), touched, *stamp);
                shared.may_crash_before_answer(self.issuer);
            }
            Ok(None) => {}
            // The power failed before or during this commit.
            Err(error)
                if error.code() == Some(StoreError::IO_ERROR.code())
                    || error.is_maybe_committed() && !error.is_retryable() =>
            {
                return result.err().map(|answer| Doubt { touched, answer });
            }
            Err(error) => {
                if error.code() == Some(StoreError::NO_ROOM.code()) {
                    shared.witness(Witness::CommitHadNoRoom);
                }
                shared.note(|| format!("the store refuses a transaction of {process}.{generation}: {error}"));
                let conflicts = ready(self.deferred.conflicting_ranges()).unwrap_or_default();
                let keys: Vec<_> = touched.into_keys().collect();
                Oracle::refused(shared, (self.issuer, self.is_late), error.code(), &keys, &conflicts);
            }
        }
        let arrived = FlightState::Arrived(Some(result));
        let before = std::mem::replace(&mut *self.state.lock(), arrived);
        if let FlightState::Under { waker: Some(waker), .. } = before {
            waker.wake();
        }
        None
    }

    /// Has `oracle` judge the commit, which happened at `stamp`, between the reads `before` and `after`.
    pub fn judge(
        &self,
        (findings, oracle): (&Findings, &mut Oracle),
        (before, after): (&Transaction, &Transaction),
        touched: Touched,
        stamp: Versionstamp,
    ) {
        let Issuer { process, generation } = self.issuer;
        let get = |tx: &Transaction, key: &[u8]| {
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
    }
}

/// A commit that failed because the power or the disk did, so that its result is unknown.
pub struct Doubt {
    /// The keys that the commit touches, with their earlier values.
    pub touched: Touched,
    /// The store's answer.
    pub answer: Error,
}

/// Returns the answer of the engine, which never waits because it has no thread.
pub fn ready<T>(answer: impl Future<Output = T>) -> T {
    answer.now_or_never().expect("the engine answers at once")
}

/// Reads all rows in the store.
pub fn rows(engine: &Store) -> Rows {
    rows_of(&engine.begin(), KeyRange::new(&b""[..], &b"\xff"[..]))
}

fn rows_of(tx: &Transaction, mut range: KeyRange) -> Rows {
    let mut rows = Rows::new();
    loop {
        let read = RangeRead::new(range.clone());
        let page = ready(tx.get_range(&read, Isolation::Snapshot)).expect("the engine can be read");
        let Some((last, _)) = page.rows.last() else { return rows };
        range.begin = Bytes::from([&last[..], b"\0"].concat());
        let is_last = !page.more;
        rows.extend(page.rows);
        if is_last {
            return rows;
        }
    }
}

/// Records the keys that `mutation` touches, except for those that get a stamp from the commit.
fn touch(before: &Transaction, mutation: &Operation, touched: &mut Touched) {
    match mutation {
        Operation::Atomic { op: AtomicOp::SetVersionstampedKey, .. } => {}
        Operation::Set { key, .. } | Operation::Clear { key } | Operation::Atomic { key, .. } => {
            let value = || ready(before.get(key, Isolation::Snapshot)).expect("the engine can be read");
            touched.entry(key.clone()).or_insert_with(value);
        }
        Operation::ClearRange { range } => {
            let rows = rows_of(before, range.clone());
            touched.extend(rows.into_iter().map(|(key, value)| (key, Some(value))));
        }
        _ => {}
    }
}

/// Returns the key or value in `operand`, whose last 4 bytes are the place of its stamp, with `stamp` filled in.
fn stamped(operand: &[u8], stamp: Versionstamp) -> Bytes {
    let (key, place) = operand.split_at(operand.len() - 4);
    let place = u32::from_le_bytes(place.try_into().expect("four bytes were split off")) as usize;
    let mut key = key.to_vec();
    key[place..place + stamp.0.len()].copy_from_slice(&stamp.0);
    key.into()
}

/// Formats mutations for readers of the trace.
fn show_all(mutations: &[Operation]) -> String {
    let mut text = String::from("{");
    for mutation in mutations {
        let (what, key) = match mutation {
            Operation::Set { key, .. } => ("set ", key),
            Operation::Clear { key } => ("clear ", key),
            Operation::ClearRange { range } => ("clear from ", &range.begin),
            Operation::Atomic { key, .. } => ("atomic ", key),
            _ => continue,
        };
        write!(text, " {what}{}", show_key(key)).expect("writing to a string cannot fail");
    }
    text + " }"
}
