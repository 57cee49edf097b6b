//! [`Worker`]: takes the node's share of a pool, and runs the work on its resources.
//!
//! One task does all of this. It makes a round whenever the members or the pool have changed, and while it waits for a lease. Between
//! rounds it supervises the work, which runs in one task per resource. If the worker's task panics, its work is stopped and started again.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    panic::AssertUnwindSafe,
    sync::Arc,
    time::Duration,
};

use futures_util::FutureExt;
use tokio::{
    sync::watch,
    task::{AbortHandle, JoinError, JoinSet},
};

use super::{
    BalanceOptions, Held, Pool, Stop, Work,
    heartbeat::draw,
    member::Member,
    plan::{RoundPlan, View},
    roles::{Version, Versions, changed, members, version_of},
    shared::{Entered, EnteredWorker, Registration, RoleGuard, Shared, has_left},
};
use crate::{
    base::{
        backoff::{Backoff, FAILURE_PAUSE, Failures},
        env::Env,
        error::{Error, Result, panic_text},
        tasks::in_time,
    },
    state::{
        keys::{Lease, Owner, role_of_pool, slot_of_pool},
        last_seen::LastSeen,
    },
    store::{Isolation, KeyRange, Transaction},
};

/// How many times more often the node polls while it waits for another node's lease.
const HASTE: u32 = 8;

/// The maximum number of leases that are acquired in one transaction; the rest follow at once in the next.
const ACQUISITIONS_MAX: usize = 1_000;

/// How long a stopping worker collects ended jobs before it releases their leases together.
const TOGETHER: Duration = Duration::from_millis(100);

/// The worker of a pool on a node. Dropping it stops it and its work at once; the node's next worker of the pool waits for both to end.
#[derive(Debug)]
pub(crate) struct Worker {
    stop: watch::Sender<bool>,
    task: JoinSet<Result<()>>,
    member: Arc<Member>,
}

impl Worker {
    /// Takes the node's current share of `pool`, and starts the work on it. If that fails, or if the node leaves meanwhile, nothing is left
    /// behind.
    pub async fn start(
        member: &Arc<Member>,
        pool: Pool,
        work: Arc<dyn Work>,
        options: BalanceOptions,
    ) -> Result<Self> {
        options.check()?;
        let shared = member.shared();
        let (stop, stopped) = Stop::new();
        let (role, max) = (role_of_pool(&pool.name), options.leases_max.unwrap_or(u32::MAX));
        let slot = slot_of_pool(&role);
        let entered = EnteredWorker { stop: stopped.clone(), slot, interval: options.interval };
        let entered = Entered { max, idle: pool.idle.clone(), worker: Some(entered) };
        let role = unless_left(shared, shared.enter(role, entered)).await?;
        let registration = shared.registration.subscribe();
        let joined = *registration.borrow();
        let mut worker = WorkerTask {
            member: Arc::clone(shared),
            pool,
            work,
            options,
            joined,
            registration,
            versions: shared.versions.subscribe(),
            slot,
            role: Some(Arc::new(role)),
            tasks: JoinSet::new(),
            held: BTreeMap::new(),
            awaited: LastSeen::default(),
            failures: BTreeMap::new(),
            due: Duration::ZERO,
            settled: None,
        };
        if let Err(error) = unless_left(shared, worker.round()).await {
            worker.abort_all().await;
            if let Err(error) = worker.clean_up().await {
                tracing::warn!(%error, "could not release leases; they become free once the node leaves the role");
            }
            return Err(error);
        }
        let mut task = JoinSet::new();
        task.spawn(worker.run(stopped));
        Ok(Self { stop, task, member: Arc::clone(member) })
    }

    /// Ends the work, and releases all leases. If this was the last handle to the node, the node leaves.
    pub async fn shutdown(mut self) -> Result<()> {
        self.stop.send_replace(true);
        let ended = match self.task.join_next().await {
            Some(Ok(result)) => result,
            Some(Err(error)) => {
                tracing::error!(%error, "a worker panicked");
                Ok(())
            }
            None => Ok(()),
        };
        let left = match Arc::into_inner(self.member) {
            Some(member) if !member.has_left() => member.leave().await,
            _ => Ok(()),
        };
        ended.and(left)
    }
}

#[derive(Debug)]
struct Job {
    lease: Held,
    began: Duration,
    stop: watch::Sender<bool>,
    abort: AbortHandle,
}

/// How the work on a resource ended: the resource, the epoch of its lease, and the result; the inner error is the text of a panic.
type Ended = (u64, u64, Result<Result<()>, String>);

/// The result of a round.
struct RoundOutcome {
    plan: RoundPlan,
    acquired: Vec<Held>,
    /// Whether more leases must be acquired than fit into one transaction.
    more: bool,
    /// The version of the pool when the round began.
    version: Version,
}

struct WorkerTask {
    member: Arc<Shared>,
    pool: Pool,
    work: Arc<dyn Work>,
    options: BalanceOptions,
    /// The membership of the node when the leases were acquired.
    joined: Registration,
    /// The current membership of the node.
    registration: watch::Receiver<Registration>,
    /// The last versions that the node has read.
    versions: watch::Receiver<Arc<Versions>>,
    /// The slot in which the pool's version is stored.
    slot: u16,
    /// Marks the role of the node as taken until the worker and all of its jobs have ended.
    role: Option<Arc<RoleGuard>>,
    tasks: JoinSet<Ended>,
    /// The leases with running work.
    held: BTreeMap<u64, Job>,
    /// The epochs of the leases that other nodes must still release, and the time at which the worker began to wait for each.
    awaited: LastSeen<u64, u64>,
    /// The resources whose work has failed: how many times in a row, and when the pause ends.
    failures: BTreeMap<u64, (Failures, Duration)>,
    /// The latest time at which the next round begins.
    due: Duration,
    /// The version of the pool when the last round began; `None` if another round is needed in any case.
    settled: Option<Version>,
}

impl WorkerTask {
    fn env(&self) -> &Env {
        self.member.store.env()
    }

    /// Supervises the pool, even after panics, until the worker is asked to stop or the pool no longer belongs to its work.
    async fn run(mut self, mut stopped: Stop) -> Result<()> {
        let mut leaving = self.member.stop.subscribe();
        loop {
            // A round or a release can take a long time when the store does not answer. If one is dropped here, it may still be committed.
            // In that case the next round, or the cleanup at the end, finds its leases.
            let served = tokio::select! {
                biased;
                () = stopped.requested() => break,
                _ = leaving.wait_for(|stop| *stop) => break,
                served = AssertUnwindSafe(self.serve()).catch_unwind() => served,
            };
            let Err(panic) = served else { break };
            let what = format!("worker of the pool {}", self.pool.name);
            self.member.stats.health.panicked(self.env(), &what, panic_text(&*panic));
            self.member.stats.work_panics.add(1);
            self.abort_all().await;
            self.due = self.env().now().saturating_add(FAILURE_PAUSE);
        }
        self.stop_all().await;
        self.clean_up().await
    }

    /// Supervises the pool, whether the node is a member or not.
    async fn serve(&mut self) {
        loop {
            let dropped_out = dropped_out(self.registration.clone(), self.joined);
            tokio::select! {
                biased;
                () = dropped_out => self.drop_out().await,
                () = self.supervise() => return,
            }
        }
    }

    /// Supervises the pool while the node is a member, until the pool no longer belongs to the worker.
    async fn supervise(&mut self) {
        let env = self.env().clone();
        loop {
            tokio::select! {
                biased;
                Some(ended) = self.tasks.join_next() => self.tidy(ended),
                () = env.sleep(self.due.saturating_sub(env.now())) => match self.round().await {
                    Ok(()) => {}
                    Err(Error::NoConsumer { .. }) => return self.abort_all().await,
                    Err(error) => {
                        self.member.stats.health.complain(&env, "balancing of leases", &error);
                        self.due_within(FAILURE_PAUSE);
                    }
                },
                Ok(()) = self.versions.changed() => self.poll(),
            }
        }
    }

    /// Compares the node's leases with the assignment, and acts on the difference.
    async fn round(&mut self) -> Result<()> {
        while let Some(outcome) = self.attempt().await? {
            let more = outcome.more;
            self.adopt(outcome);
            if !more {
                break;
            }
        }
        Ok(())
    }

    /// Runs the transaction of a round. Returns `None` if the node's row is gone, or has another token. The heartbeat will notice that.
    async fn attempt(&mut self) -> Result<Option<RoundOutcome>> {
        let now = self.env().now();
        // If anything below fails, there will be another round.
        self.due = now.saturating_add(self.options.interval);
        self.settled = None;
        let Some(joined) = self.joined else { return Ok(None) };
        self.member.store.run(async |tx| self.plan_in(&tx, joined).await).await
    }

    /// Reads members, leases and resources at snapshot isolation, plans the round, and writes it. Rounds of several nodes conflict only if
    /// they overlap: the conflict set has only the leases that are written, and the members of the pool.
    async fn plan_in(&self, tx: &Transaction, joined: [u8; 16]) -> Result<Option<RoundOutcome>> {
        let Shared { id, keys, .. } = &*self.member;
        let (role, version) = (role_of_pool(&self.pool.name), keys.pool_version(self.slot));
        let (row, version, members, leases, resources) = tokio::try_join!(
            self.member.row(tx, Isolation::Snapshot),
            tx.get(&version, Isolation::Snapshot),
            members(tx, keys, &role),
            self.leases(tx),
            self.work.resources(tx),
        )?;
        if row.is_none_or(|row| row.token != joined) {
            return Ok(None);
        }
        let view = View {
            me: *id,
            members,
            resources,
            leases,
            held: self.held.iter().map(|(&resource, job)| (resource, job.lease.stored())).collect(),
            awaited: &self.awaited,
            paused: self.failures.iter().map(|(&resource, &(_, until))| (resource, until)).collect(),
            now: self.env().now(),
            handover: self.options.handover,
        };
        let mut plan = view.plan();
        let more = plan.acquire.len() + plan.renew.len() > ACQUISITIONS_MAX;
        plan.acquire.truncate(ACQUISITIONS_MAX);
        plan.renew.truncate(ACQUISITIONS_MAX - plan.acquire.len());
        let acquired = self.write(tx, &view, &plan);
        Ok(Some(RoundOutcome { plan, acquired, more, version }))
    }

    /// Returns the leases of the pool, from a snapshot read.
    async fn leases(&self, tx: &Transaction) -> Result<BTreeMap<u64, Lease>> {
        let keys = &self.member.keys;
        let rows = tx.all_rows(keys.leases(&self.pool.name), Isolation::Snapshot).await?;
        let leases = rows.iter().map(|(key, value)| {
            let (_, resource, lease) = keys.lease_row(key, value)?;
            Ok((resource, lease))
        });
        leases.collect()
    }

    /// Writes `plan`, and returns the acquired leases.
    fn write(&self, tx: &Transaction, view: &View<'_>, plan: &RoundPlan) -> Vec<Held> {
        let (keys, pool) = (&self.member.keys, &self.pool.name);
        let lease_of = |resource| view.leases.get(&resource).copied().unwrap_or_default();
        // The leases came from snapshot reads, so the transaction must conflict if a lease that it writes has changed since.
        let claim = |resource| {
            let key = keys.lease(pool, resource);
            tx.add_read_conflict(&KeyRange::key(&key));
            key
        };
        if plan.concerns_others() || !plan.renew.is_empty() {
            tx.add_read_conflict(&keys.nodes_with(&role_of_pool(pool)));
        }
        if plan.concerns_others() {
            changed(tx, keys, pool);
        }
        for &resource in &plan.release {
            let lease = Lease { epoch: lease_of(resource).epoch, owner: None };
            tx.set(&claim(resource), &lease.to_bytes());
        }
        for &resource in &plan.gone {
            let Some(Lease { owner, .. }) = view.leases.get(&resource) else { continue };
            if owner.is_none_or(|owner| owner.node == view.me || !view.is_member(owner.node)) {
                tx.clear(&claim(resource));
            }
        }
        // If the result is unknown, the next attempt acquires again: the lease may already belong to this node, but no work runs under it.
        let owner = Owner { node: view.me, token: draw(self.member.store.env()) };
        let acquire = plan.acquire.iter().chain(&plan.renew).map(|&resource| {
            let epoch = lease_of(resource).epoch + 1;
            tx.set(&claim(resource), &Lease { epoch, owner: Some(owner) }.to_bytes());
            self.work.acquired(tx, resource, epoch);
            Held::new(keys, pool, resource, epoch, owner)
        });
        acquire.collect()
    }

    /// Starts and ends jobs as a round decided, and schedules the next round.
    fn adopt(&mut self, outcome: RoundOutcome) {
        let RoundOutcome { plan, acquired, version, .. } = outcome;
        let now = self.env().now();
        for resource in plan.lost.iter().chain(&plan.gone) {
            if let Some(job) = self.held.remove(resource) {
                job.abort.abort();
            }
        }
        for resource in &plan.lost {
            self.note_loss(*resource);
        }
        for job in plan.hand_over.iter().filter_map(|resource| self.held.get(resource)) {
            job.stop.send_replace(true);
        }
        self.member.stats.leases_acquired.add(acquired.len() as u64);
        for lease in acquired {
            self.begin(lease, now);
        }
        self.failures.retain(|resource, _| {
            self.held.contains_key(resource) || plan.paused.binary_search(resource).is_ok()
        });
        let interval = self.options.interval;
        if let Some(role) = &self.role {
            role.set_interval(if plan.awaits.is_empty() { interval } else { interval / HASTE });
        }
        self.awaited.adopt(plan.awaits, now);
        self.work.settled(version_of(&version));
        self.settled = Some(version);
        let handovers = self.awaited.since().map(|since| since.saturating_add(self.options.handover));
        let pauses = plan.paused.iter().map(|resource| self.failures[resource].1);
        self.due = handovers.chain(pauses).min().unwrap_or(Duration::MAX);
        if !plan.lost.is_empty() {
            // A lost lease may be assigned to this node again.
            self.due_within(interval / HASTE);
        }
    }

    /// Starts the work under `lease`.
    fn begin(&mut self, lease: Held, now: Duration) {
        let (stop, stopped) = Stop::new();
        let (role, work) = (self.role.clone(), Arc::clone(&self.work).run(lease.clone(), stopped));
        let (resource, epoch) = (lease.resource, lease.epoch);
        let abort = self.tasks.spawn(AssertUnwindSafe(work).catch_unwind().map(move |ended| {
            // The role is dropped after the work, even if the task is aborted before it begins: only then may a new worker start.
            drop(role);
            (resource, epoch, ended.map_err(|panic| panic_text(&*panic).to_owned()))
        }));
        self.held.insert(resource, Job { lease, began: now, stop, abort });
    }

    /// Reads the new versions, and schedules a round at once if it might have something to do.
    fn poll(&mut self) {
        let versions = Arc::clone(&*self.versions.borrow_and_update());
        // If there is no version for the slot, the node has not read it yet.
        let Some(version) = versions.of_slot.get(&self.slot) else { return };
        if self.settled.as_ref() != Some(version) {
            self.due = self.due.min(self.env().now());
        }
    }

    /// Handles the end of a job. The next round finds its lease without work, and releases the lease or takes it again.
    fn tidy(&mut self, ended: Result<Ended, JoinError>) {
        // An aborted job has nothing to report.
        let Ok((resource, epoch, result)) = ended else { return };
        let Entry::Occupied(known) = self.held.entry(resource) else { return };
        if known.get().lease.epoch != epoch {
            return;
        }
        let job = known.remove();
        let was_asked = *job.stop.borrow();
        let (env, stats) = (self.member.store.env(), &self.member.stats);
        match &result {
            Ok(Ok(())) => {}
            Ok(Err(Error::LeaseLost { .. })) => self.note_loss(resource),
            Ok(Err(error)) => stats.health.complain(env, "work on a lease", error),
            Err(panic) => {
                let what = format!("work on the pool {}", self.pool.name);
                stats.health.panicked(env, &what, &format!("resource {resource}: {panic}"));
                stats.work_panics.add(1);
            }
        }
        match result {
            _ if was_asked => self.due_within(Duration::ZERO),
            Ok(Err(Error::LeaseLost { .. })) => self.due_within(FAILURE_PAUSE),
            // The work may have ended because its resource is gone. The next round checks that.
            Ok(Ok(())) => {
                self.failed(resource, job.began);
                self.due_within(Duration::ZERO);
            }
            _ => {
                stats.leases_without_work.add(1);
                let pause = self.failed(resource, job.began);
                self.due_within(pause);
            }
        }
    }

    /// Counts and reports that the lease of `resource` is lost: another node took it, or its feed or consumer is gone.
    fn note_loss(&self, resource: u64) {
        self.member.stats.leases_lost.add(1);
        let pool = &*self.pool.name;
        let unsaid = self.member.stats.health.remark(self.env(), &format!("lost lease of the pool {pool}"));
        if let Some(unsaid) = unsaid {
            tracing::warn!(pool, resource, unsaid, "lease lost");
        }
    }

    /// Counts a failure of the work that began at `began` on `resource`. Returns the pause before the next attempt.
    fn failed(&mut self, resource: u64, began: Duration) -> Duration {
        let (env, failures) = (self.member.store.env(), self.failures.entry(resource).or_default());
        let now = env.now();
        let pause = failures.0.again(&Backoff::ROLE, now.saturating_sub(began), env);
        failures.1 = now.saturating_add(pause);
        pause
    }

    /// Aborts all jobs, because other nodes may have taken over long ago, and waits until the node is a member again.
    async fn drop_out(&mut self) {
        self.abort_all().await;
        let joined = self.registration.wait_for(Option::is_some).await;
        self.joined = *joined.expect("the sender is in what is shared");
        self.due = Duration::ZERO;
    }

    /// Ends all jobs at once, and stops waiting for leases.
    async fn abort_all(&mut self) {
        self.tasks.shutdown().await;
        self.held.clear();
        self.awaited = LastSeen::default();
        self.settled = None;
    }

    /// Asks all jobs to end, and aborts those that take too long. Leases of jobs that have ended are released while others take their time,
    /// so a slow job keeps only its own lease.
    async fn stop_all(&mut self) {
        for job in self.held.values() {
            job.stop.send_replace(true);
        }
        let (registration, joined) = (self.registration.clone(), self.joined);
        let deadline = self.env().sleep(self.options.handover);
        tokio::select! {
            biased;
            () = self.end_all() => return,
            () = dropped_out(registration, joined) => {}
            () = deadline => {}
        }
        let (pool, jobs) = (&*self.pool.name, self.held.len());
        tracing::warn!(pool, jobs, "work did not end in time and is aborted");
        self.abort_all().await;
    }

    /// Waits until all jobs have ended. The lease of a job that ends earlier than others is released without waiting for them.
    async fn end_all(&mut self) {
        let env = self.env().clone();
        while !self.held.is_empty() {
            let (before, together) = (self.held.len(), env.sleep(TOGETHER));
            tokio::select! {
                biased;
                () = async { while let Some(next) = self.tasks.join_next().await { self.tidy(next) } } => return,
                () = together => {}
            }
            if self.held.len() == before {
                continue;
            }
            // Other nodes take the released leases only after this node has published that it may own none.
            let role = self.role.as_ref().expect("the worker has it until its end");
            let result = match role.give_up().await {
                Ok(()) => self.release_idle().await,
                error => error,
            };
            if let Err(error) = result {
                self.member.stats.health.complain(&env, "release of leases", &error);
            }
        }
    }

    /// Releases the leases of the node, and removes its role. Either step frees the leases.
    async fn clean_up(&mut self) -> Result<()> {
        let member = Arc::clone(&self.member);
        if member.stats.health.ended().is_some() {
            // The leases belonged to a bus that is gone.
            self.role = None;
            return Ok(());
        }
        let end = async {
            let released = self.release_idle().await;
            // Only now may the node start another worker of the pool.
            self.role = None;
            let published = member.publish().await;
            // A node that is not a member has published nothing; if the bus is gone, `publish` fails with that error.
            let is_gone = matches!(published, Err(Error::BusGone { .. }));
            released.and(if member.is_member() || is_gone { published } else { Ok(()) })
        };
        let ended = in_time(member.store.env(), "releasing leases", end).await;
        self.role = None;
        ended
    }

    /// Releases all leases that the node owns without working on them, including any that it does not know of. Their epochs stay.
    async fn release_idle(&self) -> Result<()> {
        let Shared { id, keys, store, .. } = &*self.member;
        let token = *self.registration.borrow();
        let release = async |tx: Transaction| {
            let row = self.member.row(&tx, Isolation::Snapshot).await?;
            if row.is_some_and(|row| Some(row.token) != token) {
                // The leases may belong to another process under the same id.
                return Ok(());
            }
            let mut is_any_mine = false;
            for (resource, lease) in self.leases(&tx).await? {
                let is_mine = lease.owner.is_some_and(|owner| owner.node == *id);
                if is_mine && !self.held.contains_key(&resource) {
                    let key = keys.lease(&self.pool.name, resource);
                    tx.add_read_conflict(&KeyRange::key(&key));
                    tx.set(&key, &Lease { owner: None, ..lease }.to_bytes());
                    is_any_mine = true;
                }
            }
            if is_any_mine {
                changed(&tx, keys, &self.pool.name);
            }
            Ok(())
        };
        store.run(release).await
    }

    /// Makes the next round due within `pause`.
    fn due_within(&mut self, pause: Duration) {
        self.due = self.due.min(self.env().now().saturating_add(pause));
    }
}

/// Returns the result of `work`, or an error once the node is asked to leave, because leaving waits for all workers.
async fn unless_left<T>(member: &Shared, work: impl Future<Output = Result<T>>) -> Result<T> {
    let mut leaving = member.stop.subscribe();
    tokio::select! {
        biased;
        _ = leaving.wait_for(|stop| *stop) => Err(has_left()),
        done = work => done,
    }
}

/// Completes once the node's membership is no longer `joined`.
async fn dropped_out(mut registration: watch::Receiver<Registration>, joined: Registration) {
    // If this fails, the heartbeat has ended, and will send nothing more.
    let _ = registration.wait_for(|registration| *registration != joined).await;
}
