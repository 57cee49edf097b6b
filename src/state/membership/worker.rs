//! [`Worker`]: takes the node's part of a pool, and runs the work on its resources.
//!
//! One task does it all. It makes a round whenever members or the pool have changed, and while it waits for a lease.
//! In between it supervises the work, which runs in a task per resource. If the worker's task panics, its work ends
//! and begins again.

use std::{collections::BTreeMap, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures_util::FutureExt;
use tokio::{
    sync::watch,
    task::{AbortHandle, JoinError, JoinSet},
};

use super::{
    BalanceOptions, Held, Pool, Stop, Work,
    entered::{Entered, EnteredWorker},
    heartbeat::Registration,
    leases::release,
    member::{Member, RoleGuard, Shared, has_left},
    plan::OwnState,
    roles::{Version, Versions, changed},
    round::{Round, RoundOutcome},
};
use crate::{
    base::{
        backoff::{Backoff, FAILURE_PAUSE, Failures},
        env::Env,
        error::{Error, Result, panic_text},
        tasks::in_time,
    },
    state::keys::{Lease, NodeRow, role_of_pool, slot_of_pool},
    store::{Isolation, KeyRange, Transaction},
};

/// How much more often the node polls while it waits for a lease of another node.
const HASTE: u32 = 8;

/// The longest time without a round. It is not needed for correctness.
const REST: Duration = Duration::from_hours(1);

/// How long an ending worker waits for other jobs to end, before it releases the leases of those that have ended.
const TOGETHER: Duration = Duration::from_millis(100);

/// The worker of a pool on a node. Dropping it stops it and its work at once; the next one of the node waits for their end.
#[derive(Debug)]
pub(crate) struct Worker {
    stop: watch::Sender<bool>,
    task: JoinSet<Result<()>>,
    member: Arc<Member>,
}

impl Worker {
    /// Takes the node's present share of `pool`, and starts the work on it. If that fails, or the node leaves meanwhile, it leaves
    /// nothing behind.
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
            awaited: BTreeMap::new(),
            failures: BTreeMap::new(),
            due: Duration::ZERO,
            settled: None,
        };
        if let Err(error) = unless_left(shared, worker.round()).await {
            worker.abort_all().await;
            if let Err(error) = worker.clean_up().await {
                tracing::warn!(%error, "leases could not be released; they are free once the node has left the role");
            }
            return Err(error);
        }
        let mut task = JoinSet::new();
        task.spawn(worker.run(stopped));
        Ok(Self { stop, task, member: Arc::clone(member) })
    }

    /// Ends the work, and releases all leases. If this was the last handle on the node, the node leaves.
    pub async fn shutdown(mut self) -> Result<()> {
        self.stop.send_replace(true);
        let ended = match self.task.join_next().await {
            Some(Ok(result)) => result,
            Some(Err(error)) => {
                tracing::error!(%error, "a worker has panicked");
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

/// The end of the work on a resource, under the epoch of its lease; the inner error is the text of a panic.
type Ended = (u64, u64, Result<Result<()>, String>);

struct WorkerTask {
    member: Arc<Shared>,
    pool: Pool,
    work: Arc<dyn Work>,
    options: BalanceOptions,
    /// The membership of the node when the leases were acquired.
    joined: Registration,
    /// The present membership of the node.
    registration: watch::Receiver<Registration>,
    /// The last versions that the node has read.
    versions: watch::Receiver<Arc<Versions>>,
    /// The slot of the pool's version.
    slot: u16,
    /// The role of the node, until the worker and all of its jobs have ended.
    role: Option<Arc<RoleGuard>>,
    tasks: JoinSet<Ended>,
    /// The leases with running work.
    held: BTreeMap<u64, Job>,
    /// The leases that others have not released, each with its epoch and since when the worker waits for it.
    awaited: BTreeMap<u64, (u64, Duration)>,
    /// The resources whose work has failed: how often in a row, and the end of the pause.
    failures: BTreeMap<u64, (Failures, Duration)>,
    /// When the next round is due at the latest.
    due: Duration,
    /// The version of the pool before the last round; `None` if another round is needed in any case.
    settled: Option<Version>,
}

impl WorkerTask {
    fn env(&self) -> &Env {
        self.member.db.env()
    }

    /// Supervises the pool until it is asked to stop or the pool is no longer the work's, also after panics.
    async fn run(mut self, mut stopped: Stop) -> Result<()> {
        let mut leaving = self.member.stop.subscribe();
        loop {
            // A round or a release can take long when the store does not answer. A dropped one may have been committed:
            // then the next round, or the end, finds its leases.
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
            let fallen_out = fallen_out(self.registration.clone(), self.joined);
            tokio::select! {
                biased;
                () = fallen_out => self.fall_out().await,
                () = self.supervise() => return,
            }
        }
    }

    /// Supervises the pool of a member, until it is no longer the work's.
    async fn supervise(&mut self) {
        let env = self.env().clone();
        loop {
            tokio::select! {
                biased;
                Some(ended) = self.tasks.join_next() => self.tidy(ended).await,
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

    /// Compares the node's leases with the assignment, and acts.
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

    /// The transaction of a round. Returns `None` if the node has no row, which its heartbeat will find.
    async fn attempt(&mut self) -> Result<Option<RoundOutcome>> {
        let now = self.env().now();
        // Every failure leads to another round.
        self.due = now.saturating_add(self.options.interval);
        self.settled = None;
        let Some(joined) = self.joined else { return Ok(None) };
        let round = Round {
            member: &self.member,
            joined,
            pool: &self.pool,
            slot: self.slot,
            work: &*self.work,
            own: OwnState {
                held: self.held.iter().map(|(&resource, job)| (resource, job.lease.stored())).collect(),
                awaited: &self.awaited,
                paused: self.failures.iter().map(|(&resource, &(_, until))| (resource, until)).collect(),
                now,
                handover: self.options.handover,
            },
        };
        self.member.db.run(async |tx| round.run(&tx).await).await
    }

    /// Starts and ends jobs as a round has decided, and schedules the next round.
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
        let before = std::mem::take(&mut self.awaited);
        let since = |resource, epoch| match before.get(&resource) {
            Some(known) if known.0 == epoch => *known,
            _ => (epoch, now),
        };
        self.awaited =
            plan.awaits.iter().map(|&(resource, epoch)| (resource, since(resource, epoch))).collect();
        let interval = self.options.interval;
        if let Some(role) = &self.role {
            role.set_interval(if self.awaited.is_empty() { interval } else { interval / HASTE });
        }
        self.settled = Some(version);
        let handovers = self.awaited.values().map(|(_, since)| since.saturating_add(self.options.handover));
        let pauses = plan.paused.iter().map(|resource| self.failures[resource].1);
        self.due = handovers.chain(pauses).min().unwrap_or(Duration::MAX).min(now.saturating_add(REST));
        if !plan.lost.is_empty() {
            // A lost lease may be this node's to take again.
            self.due_within(interval / HASTE);
        }
    }

    /// Begins the work under `lease`.
    fn begin(&mut self, lease: Held, now: Duration) {
        let (stop, stopped) = Stop::new();
        let (role, work) = (self.role.clone(), Arc::clone(&self.work).run(lease.clone(), stopped));
        let (resource, epoch) = (lease.resource, lease.epoch);
        let abort = self.tasks.spawn(AssertUnwindSafe(work).catch_unwind().map(move |ended| {
            // The role goes after the work, also if the task is aborted before it has begun: then a new worker may start.
            drop(role);
            (resource, epoch, ended.map_err(|panic| panic_text(&*panic).to_owned()))
        }));
        self.held.insert(resource, Job { lease, began: now, stop, abort });
    }

    /// Reads the new versions, and makes a round due if it might have something to do.
    fn poll(&mut self) {
        let versions = Arc::clone(&*self.versions.borrow_and_update());
        // A pool that is not among them was not read yet.
        let Some(version) = versions.of_slot.get(&self.slot) else { return };
        if self.settled.as_ref() != Some(version) {
            self.due = self.due.min(self.env().now());
        }
    }

    /// Handles ended jobs: releases the leases of jobs that were asked to end, and takes the others again.
    async fn tidy(&mut self, first: Result<Ended, JoinError>) {
        let mut released = Vec::new();
        let mut next = Some(first);
        while let Some(ended) = next {
            released.extend(self.account(ended));
            next = self.tasks.try_join_next();
        }
        if let Err(error) = release(&self.member.db, &self.member.keys, &released).await {
            self.member.stats.health.complain(self.env(), "release of leases", &error);
            self.due_within(FAILURE_PAUSE);
        }
    }

    /// Removes an ended job, and reports how it ended. Returns its lease if it should be released.
    fn account(&mut self, ended: Result<Ended, JoinError>) -> Option<Held> {
        // An aborted job has no more to tell.
        let (resource, epoch, result) = ended.ok()?;
        self.held.get(&resource).filter(|job| job.lease.epoch == epoch)?;
        let job = self.held.remove(&resource)?;
        let was_asked = *job.stop.borrow();
        let stats = &self.member.stats;
        match &result {
            Ok(Ok(())) => {}
            Ok(Err(Error::LeaseLost { .. })) => self.note_loss(resource),
            Ok(Err(error)) => stats.health.complain(self.env(), "work on a lease", error),
            Err(panic) => {
                let what = format!("work on the pool {}", self.pool.name);
                stats.health.panicked(self.env(), &what, &format!("resource {resource}: {panic}"));
                stats.work_panics.add(1);
            }
        }
        if was_asked {
            return Some(job.lease);
        }
        // The next round finds that the node owns the lease without work on it, or that the resource is gone.
        match result {
            Ok(Err(Error::LeaseLost { .. })) => self.due_within(FAILURE_PAUSE),
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
        None
    }

    /// Counts and reports that another node has taken the lease of `resource`.
    fn note_loss(&self, resource: u64) {
        self.member.stats.leases_lost.add(1);
        let pool = &*self.pool.name;
        let unsaid = self.member.stats.health.remark(self.env(), &format!("lost lease of the pool {pool}"));
        if let Some(unsaid) = unsaid {
            tracing::warn!(pool, resource, unsaid, "lease lost to another node");
        }
    }

    /// Counts a failure of the work on `resource`, which began at `began`. Returns the pause.
    fn failed(&mut self, resource: u64, began: Duration) -> Duration {
        let (env, failures) = (self.member.db.env(), self.failures.entry(resource).or_default());
        let now = env.now();
        let pause = failures.0.again(&Backoff::ROLE, now.saturating_sub(began), env);
        failures.1 = now.saturating_add(pause);
        pause
    }

    /// Gives everything up, because others may have taken over long ago, and waits until the node is a member again.
    async fn fall_out(&mut self) {
        self.abort_all().await;
        let joined = self.registration.wait_for(Option::is_some).await;
        self.joined = *joined.expect("the sender is in what is shared");
        self.due = Duration::ZERO;
    }

    /// Ends all jobs at once, and waits for no lease any more.
    async fn abort_all(&mut self) {
        self.tasks.shutdown().await;
        self.held.clear();
        self.awaited.clear();
        self.settled = None;
    }

    /// Asks all jobs to end, and aborts those that take too long. Leases of ended jobs are released meanwhile: a slow
    /// job keeps its own lease only.
    async fn stop_all(&mut self) {
        for job in self.held.values() {
            job.stop.send_replace(true);
        }
        let (registration, joined) = (self.registration.clone(), self.joined);
        let deadline = self.env().sleep(self.options.handover);
        tokio::select! {
            biased;
            () = self.end_all() => return,
            () = fallen_out(registration, joined) => {}
            () = deadline => {}
        }
        let (pool, jobs) = (&*self.pool.name, self.held.len());
        tracing::warn!(pool, jobs, "work does not end and is aborted");
        self.abort_all().await;
    }

    /// Waits until all jobs have ended. Releases leases of ended jobs while others go on; [`WorkerTask::clean_up`]
    /// releases the rest together.
    async fn end_all(&mut self) {
        let env = self.env().clone();
        loop {
            let mut ended = Vec::new();
            let all = async {
                while let Some(next) = self.tasks.join_next().await {
                    ended.extend(self.account(next));
                }
            };
            tokio::select! {
                biased;
                () = all => return,
                () = env.sleep(TOGETHER) => {}
            }
            if ended.is_empty() {
                continue;
            }
            // Others take the released leases only once the node may own nothing.
            let role = self.role.as_ref().expect("the worker has it until its end");
            let result = match role.give_up().await {
                Ok(()) => release(&self.member.db, &self.member.keys, &ended).await,
                error => error,
            };
            if let Err(error) = result {
                self.member.stats.health.complain(&env, "release of leases", &error);
            }
        }
    }

    /// Releases the leases of the node, and removes its role. Either makes the leases free.
    async fn clean_up(&mut self) -> Result<()> {
        let member = Arc::clone(&self.member);
        if member.stats.health.ended().is_some() {
            // The leases belonged to a bus that is gone.
            self.role = None;
            return Ok(());
        }
        let end = async {
            let released = self.release_all().await;
            // Only now may another worker of the node begin.
            self.role = None;
            let published = member.publish().await;
            // A node that has fallen out has nothing published; one whose bus is gone says so.
            let is_gone = matches!(published, Err(Error::BusGone { .. }));
            released.and(if member.is_member() || is_gone { published } else { Ok(()) })
        };
        let ended = in_time(member.db.env(), "releasing leases", end).await;
        self.role = None;
        ended
    }

    /// Releases all leases that the node owns, also those that it does not know of.
    async fn release_all(&self) -> Result<()> {
        let Shared { id, keys, db, .. } = &*self.member;
        let token = *self.registration.borrow();
        let release = async |tx: Transaction| {
            let row = tx.get(&keys.node(*id), Isolation::Snapshot).await?;
            let row = row.map(|value| NodeRow::from_bytes(&value)).transpose()?;
            if token.is_none() || row.map(|row| row.token) != token {
                return Ok(());
            }
            let mut is_any_mine = false;
            for (key, value) in tx.all_rows(keys.leases(&self.pool.name), Isolation::Snapshot).await? {
                let (_, _, lease) = keys.lease_row(&key, &value)?;
                if lease.owner.is_some_and(|owner| owner.node == *id) {
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
        db.run(release).await
    }

    /// Makes the next round due within `pause`.
    fn due_within(&mut self, pause: Duration) {
        self.due = self.due.min(self.env().now().saturating_add(pause));
    }
}

/// The result of `work`, or an error once the node is asked to leave: leaving waits for all workers.
async fn unless_left<T>(member: &Shared, work: impl Future<Output = Result<T>>) -> Result<T> {
    let mut leaving = member.stop.subscribe();
    tokio::select! {
        biased;
        _ = leaving.wait_for(|stop| *stop) => Err(has_left()),
        done = work => done,
    }
}

/// Completes once the node's membership is no longer `joined`.
async fn fallen_out(mut registration: watch::Receiver<Registration>, joined: Registration) {
    // A heartbeat that has ended sends no more.
    let _ = registration.wait_for(|registration| *registration != joined).await;
}

#[cfg(test)]
mod tests;
