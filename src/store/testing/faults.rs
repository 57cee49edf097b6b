//! [`Faults`]: a store that fails when the plan of a test tells it to; and [`Gate`], which holds a commit until the test lets it continue.

use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::future::{BoxFuture, pending, ready};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use super::{
    operation::{Attempt, Operation},
    wrapper::{Commit, DeferredCommit, Failed, Interceptor, wrap},
};
use crate::{
    base::{
        encoding::Versionstamp,
        env::Env,
        error::{Result, StoreError},
    },
    store::{Store, Watch},
};

/// A fault to inject into a commit.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum CommitFault {
    /// The commit fails and changes nothing, as with 1020, 1007, or a 1021 whose commit did not happen.
    Before(StoreError),
    /// The commit happens, and then fails, as with a 1021 whose commit did happen.
    After(StoreError),
    /// The commit fails, but happens later, at [`Faults::commit_late`], as with 1031.
    Late(StoreError),
    /// The commit waits at the gate, and then happens.
    Hold(Gate),
}

/// A fault to inject into a watch.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum WatchFault {
    /// The watch is not set, as with 1032.
    Refuse(StoreError),
    /// The watch never fires.
    Drop,
    /// The watch fires at once.
    Spurious,
}

/// Counts of the operations on the store, faults included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperationCounts {
    /// Attempts at transactions that did at least one operation, even if that was only a commit.
    pub transactions: u64,
    /// Reads of keys, ranges and read versions, and watches.
    pub reads: u64,
    /// Writes.
    pub mutations: u64,
    /// Commits, including those without writes.
    pub commits: u64,
    /// Commits with writes.
    pub write_commits: u64,
    /// Bytes of reads: requested keys, bounds of ranges, and returned rows or values.
    pub read_bytes: u64,
    /// Bytes of the keys and values of writes.
    pub written_bytes: u64,
}

impl std::ops::Sub for OperationCounts {
    type Output = Self;

    /// Returns the counts of the operations since `before`.
    fn sub(self, before: Self) -> Self {
        Self {
            transactions: self.transactions - before.transactions,
            reads: self.reads - before.reads,
            mutations: self.mutations - before.mutations,
            commits: self.commits - before.commits,
            write_commits: self.write_commits - before.write_commits,
            read_bytes: self.read_bytes - before.read_bytes,
            written_bytes: self.written_bytes - before.written_bytes,
        }
    }
}

/// A plan, which is called for each operation.
type Plan<O, F> = Box<dyn FnMut(&O) -> Option<F> + Send>;

/// Wraps a store, and makes it fail when the plan of a test says so. Clones share the plan.
///
/// Nothing fails until a plan is set. A scripted fault takes precedence over the plan for commits. Plans are called in the middle of an
/// operation: they must not block, and must not set other plans.
#[derive(Clone)]
pub struct Faults {
    database: Store,
    plans: Arc<Plans>,
}

#[derive(Default)]
struct Plans {
    plan: Mutex<Planned>,
    transactions: AtomicU64,
    reads: AtomicU64,
    mutations: AtomicU64,
    commits: AtomicU64,
    write_commits: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    /// Transactions that will commit late.
    late: Mutex<Vec<DeferredCommit>>,
}

#[derive(Default)]
struct Planned {
    /// Faults for the next commits with writes, one each.
    script: VecDeque<CommitFault>,
    commits: Option<Plan<Attempt, CommitFault>>,
    reads: Option<Plan<Operation, StoreError>>,
    /// How long each read takes, and on which clock.
    delay: Option<(Env, Duration)>,
    watches: Option<Plan<[u8], WatchFault>>,
}

impl Faults {
    /// Wraps `store` in a store that fails as planned.
    pub fn new(store: &Store) -> Self {
        let plans = Arc::default();
        Self { database: wrap(store, &plans), plans }
    }

    /// Returns the store that fails as planned.
    pub fn store(&self) -> Store {
        self.database.clone()
    }

    /// Injects these faults into the next commits with writes, one each, in this order, after the faults that are already scripted.
    pub fn script_commits(&self, faults: impl IntoIterator<Item = CommitFault>) {
        self.plans.plan().script.extend(faults);
    }

    /// Injects faults into commits, as `plan` decides from the operations of each transaction. Replaces the previous plan for commits.
    pub fn plan_commits(&self, plan: impl FnMut(&Attempt) -> Option<CommitFault> + Send + 'static) {
        self.plans.plan().commits = Some(Box::new(plan));
    }

    /// Fails reads as `plan` decides. Replaces the previous plan for reads.
    pub fn plan_reads(&self, plan: impl FnMut(&Operation) -> Option<StoreError> + Send + 'static) {
        self.plans.plan().reads = Some(Box::new(plan));
    }

    /// Makes each read take `time`. Concurrent reads of a transaction are delayed together.
    pub fn delay_reads(&self, time: Duration) {
        self.plans.plan().delay = Some((self.database.env().clone(), time));
    }

    /// Injects faults into watches, as `plan` decides from their keys. Replaces the previous plan for watches.
    pub fn plan_watches(&self, plan: impl FnMut(&[u8]) -> Option<WatchFault> + Send + 'static) {
        self.plans.plan().watches = Some(Box::new(plan));
    }

    /// Forgets all plans and scripts, so that nothing fails from now on.
    pub fn heal(&self) {
        *self.plans.plan() = Planned::default();
    }

    /// Returns how many scripted faults are left.
    pub fn scripted(&self) -> usize {
        self.plans.plan().script.len()
    }

    /// Lets the late commits happen, and returns their results.
    pub async fn commit_late(&self) -> Vec<Result<()>> {
        let late = std::mem::take(&mut *self.plans.late.lock());
        let mut results = Vec::with_capacity(late.len());
        for transaction in late {
            results.push(transaction.commit().await.map(|_| ()));
        }
        results
    }

    /// Returns the counts so far.
    pub fn counts(&self) -> OperationCounts {
        let Plans {
            transactions, reads, mutations, commits, write_commits, read_bytes, written_bytes, ..
        } = &*self.plans;
        OperationCounts {
            transactions: transactions.load(Ordering::Relaxed),
            reads: reads.load(Ordering::Relaxed),
            mutations: mutations.load(Ordering::Relaxed),
            commits: commits.load(Ordering::Relaxed),
            write_commits: write_commits.load(Ordering::Relaxed),
            read_bytes: read_bytes.load(Ordering::Relaxed),
            written_bytes: written_bytes.load(Ordering::Relaxed),
        }
    }
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults").field("counts", &self.counts()).finish_non_exhaustive()
    }
}

impl Plans {
    fn plan(&self) -> MutexGuard<'_, Planned> {
        self.plan.lock()
    }

    /// Returns the fault for the commit of `attempt`, if any.
    fn commit_fault(&self, attempt: &Attempt) -> Option<CommitFault> {
        let mut plan = self.plan();
        if attempt.writes() {
            self.write_commits.fetch_add(1, Ordering::Relaxed);
            if let Some(fault) = plan.script.pop_front() {
                return Some(fault);
            }
        }
        plan.commits.as_mut()?(attempt)
    }
}

impl Interceptor for Plans {
    fn begins(&self) {
        self.transactions.fetch_add(1, Ordering::Relaxed);
    }

    fn sees(&self, _attempt: u64, operation: &Operation) {
        let count = match operation {
            Operation::Commit => &self.commits,
            operation if operation.is_read() => &self.reads,
            operation if operation.is_mutation() => &self.mutations,
            _ => return,
        };
        count.fetch_add(1, Ordering::Relaxed);
        self.written_bytes.fetch_add(operation.written_bytes() as u64, Ordering::Relaxed);
    }

    fn before_read(&self, operation: &Operation, _failed: &Failed) -> Option<BoxFuture<'static, Result<()>>> {
        let mut plan = self.plan();
        if let Some(error) = plan.reads.as_mut().and_then(|reads| reads(operation)) {
            return Some(Box::pin(ready(Err(error.into()))));
        }
        let (env, time) = plan.delay.clone()?;
        Some(Box::pin(async move {
            env.sleep(time).await;
            Ok(())
        }))
    }

    fn has_read(&self, operation: &Operation, _rows: usize, bytes: usize) {
        self.read_bytes.fetch_add((operation.requested_bytes() + bytes) as u64, Ordering::Relaxed);
    }

    fn watch(
        self: &Arc<Self>,
        key: &[u8],
        set: BoxFuture<'static, Result<Watch>>,
    ) -> BoxFuture<'static, Result<Watch>> {
        let fault = self.plan().watches.as_mut().and_then(|plan| plan(key));
        match fault {
            None => set,
            Some(WatchFault::Refuse(error)) => Box::pin(ready(Err(error.into()))),
            Some(WatchFault::Drop) => Box::pin(ready(Ok(Watch::new(pending())))),
            Some(WatchFault::Spurious) => Box::pin(ready(Ok(Watch::new(ready(Ok(())))))),
        }
    }

    fn commit(self: &Arc<Self>, commit: Commit<'_>) -> BoxFuture<'static, Result<Option<Versionstamp>>> {
        match self.commit_fault(commit.attempt) {
            None => commit.happen(),
            Some(CommitFault::Before(error)) => Box::pin(ready(Err(error.into()))),
            Some(CommitFault::After(error)) => {
                let done = commit.happen();
                Box::pin(async move {
                    done.await?;
                    Err(error.into())
                })
            }
            Some(CommitFault::Late(error)) => {
                self.late.lock().push(commit.defer(true));
                Box::pin(ready(Err(error.into())))
            }
            Some(CommitFault::Hold(gate)) => {
                let done = commit.happen();
                Box::pin(async move {
                    gate.pass().await;
                    done.await
                })
            }
        }
    }
}

/// Holds commits, so that a test can script how transactions interleave. Clones are handles to the same gate.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::store::{Store, Isolation, testing::{CommitFault, Faults, Gate}};
///
/// let store = Store::memory();
/// let faults = Faults::new(&store);
/// let gate = Gate::default();
/// faults.script_commits([CommitFault::Hold(gate.clone())]);
///
/// let slow = tokio::spawn(async move {
///     let tx = faults.store().begin();
///     tx.get(b"k", Isolation::Serializable).await?;
///     tx.set(b"k", b"slow");
///     tx.commit().await
/// });
/// gate.reached().await;
/// store.run(async |tx| Ok(tx.set(b"k", b"fast"))).await?;
/// gate.open();
/// assert_eq!(slow.await.unwrap().unwrap_err().code(), Some(1020));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Gate(watch::Sender<GateState>);

#[derive(Debug, Clone, Copy, Default)]
struct GateState {
    reached: usize,
    /// Whether the gate lets commits through.
    is_open: bool,
}

impl Default for Gate {
    fn default() -> Self {
        Self(watch::Sender::new(GateState::default()))
    }
}

impl Gate {
    /// Completes when a commit has reached the gate; immediately if one already has.
    pub async fn reached(&self) {
        self.until(|state| state.reached > 0).await;
    }

    /// Lets all waiting and later commits through.
    pub fn open(&self) {
        self.0.send_modify(|state| state.is_open = true);
    }

    /// Reaches the gate, and waits until it is open.
    async fn pass(&self) {
        self.0.send_modify(|state| state.reached += 1);
        self.until(|state| state.is_open).await;
    }

    /// Completes when `holds` returns true for the state of the gate.
    async fn until(&self, holds: impl Fn(&GateState) -> bool) {
        self.0.subscribe().wait_for(|state| holds(state)).await.expect("the gate itself keeps the sender");
    }
}
