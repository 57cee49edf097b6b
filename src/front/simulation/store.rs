//! The store of a process in a world: the embedded engine behind a network that delays, loses and lies.
//!
//! A commit under way belongs to the world, not to its process: the fate of the process does not change whether it
//! happens. So a crash between a commit and its answer is nothing special, and a late commit (1031) is just slow.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use bytes::Bytes;
use futures_util::{FutureExt, future::BoxFuture};

use super::{
    oracle::{Change, ObservedCommit, is_fold},
    shared::{Issuer, Shared, show_all, show_key},
    time::{Clock, Time},
    witness::{Fault, Witness},
    world::Event,
};
use crate::{
    base::{
        encoding::Versionstamp,
        env::Env,
        error::{Error, Result, StoreError},
    },
    store::{
        Answer, AtomicOp, Backend, Isolation, KeyRange, Mutation, Page, RangeRead, TRANSACTION_IDS_PREFIX,
        TransactionBackend, TransactionOption, Watch,
    },
};

/// The longest delays of commits without a waiting caller, in milliseconds; at most the lifetime of a transaction.
const LATE_MAX_MS: [u64; 4] = [10, 100, 1_000, 4_500];

/// A transaction of the engine, kept alive by the operations on it.
type Inner = Arc<dyn TransactionBackend>;

/// The store of one process.
pub(super) struct SimulatedStore {
    engine: Arc<dyn Backend>,
    link: Arc<Link>,
}

/// The connection of a process to the store.
struct Link {
    shared: Arc<Shared>,
    /// The process.
    issuer: Issuer,
    /// True time.
    env: Env,
}

impl SimulatedStore {
    /// The store behind `engine`, for `issuer`.
    pub fn new(engine: Arc<dyn Backend>, shared: Arc<Shared>, issuer: Issuer) -> Self {
        let env = Env::new(Arc::new(Clock::exact(&shared.time, issuer.process)));
        Self { engine, link: Arc::new(Link { shared, issuer, env }) }
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

impl Link {
    /// How long a step of the network takes.
    fn latency(&self) -> Duration {
        let longest = self.shared.plan.latency_us;
        if longest == 0 { Duration::ZERO } else { Duration::from_micros(self.shared.draw(1..=longest)) }
    }

    /// How long a slow operation takes.
    fn slowness(&self) -> Duration {
        Duration::from_millis(self.shared.draw(1..=self.shared.plan.slow_ms))
    }

    /// The fault of a read, if one strikes, and the delay of the read.
    fn read_fault(&self) -> (Option<StoreError>, Duration) {
        let shared = &self.shared;
        shared.may_crash(self.issuer);
        let mut pause = self.latency();
        if shared.strikes(Fault::SlowRead) {
            pause += self.slowness();
        }
        let error = if shared.strikes(Fault::ReadTooOld) {
            Some(StoreError::TRANSACTION_TOO_OLD)
        } else if shared.strikes(Fault::ReadBehind) {
            let codes = [StoreError::FUTURE_VERSION, StoreError::PROCESS_BEHIND, StoreError::DATABASE_LOCKED];
            Some(codes[shared.draw(0..=2) as usize].clone())
        } else if shared.strikes(Fault::ReadTimedOut) {
            Some(StoreError::TRANSACTION_TIMED_OUT)
        } else {
            None
        };
        (error, pause)
    }

    /// Adds a line to the trace.
    fn note(&self, line: impl FnOnce() -> String) {
        let Issuer { process, generation } = self.issuer;
        self.shared.note(|| format!("process {process}.{generation} {}", line()));
    }

    /// A watch, perhaps with a fault.
    fn watch(self: &Arc<Self>, watch: Watch) -> Watch {
        let shared = &self.shared;
        if shared.strikes(Fault::WatchDropped) {
            return Watch::new(std::future::pending());
        }
        let early = if shared.strikes(Fault::WatchSpurious) {
            Some(Ok(()))
        } else if shared.strikes(Fault::WatchFailed) {
            Some(Err(StoreError::TOO_MANY_WATCHES))
        } else {
            None
        };
        if let Some(result) = early {
            let (pause, env) = (self.slowness(), self.env.clone());
            return Watch::new(async move {
                env.sleep(pause).await;
                Ok(result?)
            });
        }
        let delay = if shared.strikes(Fault::WatchLate) { self.slowness() } else { self.latency() };
        let link = Arc::clone(self);
        Watch::new(async move {
            let fired = Crossing { watch, time: link.shared.time.clone(), process: link.issuer.process };
            fired.await?;
            link.env.sleep(delay).await;
            Ok(())
        })
    }
}

/// A watch of the engine, whose firing makes its process run.
struct Crossing {
    watch: Watch,
    time: Time,
    /// The process with the watch.
    process: usize,
}

/// Wakes a task of another process, and makes that process run.
struct CrossingWaker {
    task: Waker,
    time: Time,
    /// The process of the task.
    process: usize,
}

impl Wake for CrossingWaker {
    fn wake(self: Arc<Self>) {
        self.time.make_runnable(self.process);
        self.task.wake_by_ref();
    }
}

impl Future for Crossing {
    type Output = Result<()>;

    fn poll(mut self: std::pin::Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let waker =
            CrossingWaker { task: context.waker().clone(), time: self.time.clone(), process: self.process };
        let waker = Waker::from(Arc::new(waker));
        self.watch.poll_unpin(&mut Context::from_waker(&waker))
    }
}

impl SimulatedTransaction {
    /// The changing part. No panic leaves it half changed.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
                let mut failed = lock(&failed);
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

/// Locks `mutex`. No panic leaves the state half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
        if let Some(error) = lock(&attempt.failed).clone() {
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

/// A commit under way to the store.
pub(super) struct Flight {
    engine: Arc<dyn Backend>,
    inner: Inner,
    /// Its writes.
    mutations: Vec<Mutation>,
    /// Its process.
    issuer: Issuer,
    /// Whether its process has already learned that it failed.
    is_late: bool,
    /// Whether it happens even if its process is gone.
    is_sure: bool,
    state: Mutex<FlightState>,
}

/// The state of a commit.
enum FlightState {
    /// It is under way.
    Under {
        /// Whether its caller still waits for it.
        is_awaited: bool,
    },
    /// It has arrived.
    Arrived(Option<Result<Option<Versionstamp>>>),
}

/// Sends the commit of `inner` to the store, and completes with its answer. `takes_over` gives the process another
/// transaction if this one goes on without it.
fn commit(
    link: &Arc<Link>,
    engine: &Arc<dyn Backend>,
    inner: Inner,
    mutations: Vec<Mutation>,
    takes_over: impl FnOnce(),
) -> BoxFuture<'static, Result<Option<Versionstamp>>> {
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
    link.note(|| format!("commits {}", show_all(&mutations)));
    let state = Mutex::new(FlightState::Under { is_awaited: true });
    let (issuer, is_sure) = (link.issuer, is_late || shared.draw(0..=1) == 0);
    let flight = Flight { engine: Arc::clone(engine), inner, mutations, issuer, is_late, is_sure, state };
    let flight = Arc::new(flight);
    if is_late {
        takes_over();
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
        let result = awaited.take();
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

impl Awaited {
    /// Its result. The answer comes after the arrival.
    fn take(&self) -> Result<Option<Versionstamp>> {
        match &mut *lock(&self.0.state) {
            FlightState::Arrived(result) => result.take().expect("it is taken once"),
            FlightState::Under { .. } => unreachable!("an answer comes after the arrival"),
        }
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        if let FlightState::Under { is_awaited } = &mut *lock(&self.0.state) {
            *is_awaited = false;
        }
    }
}

/// The keys that a transaction touches, with their values before.
pub(super) type Touched = BTreeMap<Bytes, Option<Bytes>>;

impl Flight {
    /// Whether it goes to `engine`.
    pub fn is_for(&self, engine: &Arc<dyn Backend>) -> bool {
        Arc::ptr_eq(&self.engine, engine)
    }

    /// Arrives at the store, which decides it. Returns the touched keys if the store has lost its power meanwhile.
    pub fn arrive(&self, shared: &Arc<Shared>) -> Option<Touched> {
        let is_awaited = matches!(*lock(&self.state), FlightState::Under { is_awaited: true });
        let is_orphan = !is_awaited && !self.is_late;
        if is_orphan && !self.is_sure {
            return None;
        }
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
                let records = self.judge(shared, (&*before, &*self.engine.begin()), touched, *stamp);
                shared.may_crash_before_answer(self.issuer, records);
            }
            Ok(None) => {}
            // The power has failed: before this commit, or during it.
            Err(error) if error.code() == Some(StoreError::IO_ERROR.code()) => return Some(touched),
            Err(error) if error.is_maybe_committed() && !error.is_retryable() => return Some(touched),
            Err(error) => {
                shared.note(|| format!("the store refuses a transaction of {process}.{generation}: {error}"));
                let conflicts = ready(self.inner.conflicting_ranges()).unwrap_or_default();
                let keys: Vec<_> = touched.into_keys().collect();
                shared.oracle().refused(shared, (self.issuer, self.is_late), error.code(), &keys, &conflicts);
            }
        }
        *lock(&self.state) = FlightState::Arrived(Some(result));
        None
    }

    /// Adds the keys that get their stamp from its commit at `stamp` to the touched keys.
    pub fn add_stamped(&self, touched: &mut Touched, stamp: Versionstamp) {
        for mutation in &self.mutations {
            if let Mutation::Atomic(AtomicOp::SetVersionstampedKey, key, _) = mutation {
                touched.entry(stamped(key, stamp)).or_insert(None);
            }
        }
    }

    /// Has the oracle judge it: it was committed at `stamp`, between the reads `before` and `after`. Returns whether
    /// it records events.
    pub fn judge(
        &self,
        shared: &Arc<Shared>,
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
        shared.note(|| format!("the store commits a transaction of {process}.{generation} at {stamp:?}"));
        let seen = ObservedCommit {
            issuer: self.issuer,
            stamp,
            is_late: self.is_late,
            touched: touched.collect(),
            before: &|key: &[u8]| get(before, key),
        };
        shared.oracle().committed(shared, &seen);
        seen.records()
    }
}

/// The answer of the engine, which never waits without a thread.
pub(super) fn ready<T: Unpin>(answer: Answer<'_, T>) -> Result<T> {
    answer.now_or_never().expect("the engine answers at once")
}

/// Records the keys that `mutation` touches, except for those that get a stamp from the commit.
fn touch(before: &dyn TransactionBackend, mutation: &Mutation, touched: &mut Touched) {
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

/// The key `operand` with `stamp` filled in.
fn stamped(operand: &[u8], stamp: Versionstamp) -> Bytes {
    let (key, place) = operand.split_at(operand.len() - 4);
    let place = u32::from_le_bytes(place.try_into().expect("four bytes were split off")) as usize;
    let mut key = key.to_vec();
    key[place..place + stamp.0.len()].copy_from_slice(&stamp.0);
    key.into()
}
