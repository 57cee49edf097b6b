//! [`Worker`]: balances the leases of a pool, and runs the work of those that the node holds.
//!
//! One task does it all: a round of balancing at every interval, as long as rounds find something to do, and when something
//! has changed or a node is about to be given up; and in between it looks after the work, which runs in a task per resource.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::watch,
    task::{AbortHandle, Id, JoinError, JoinSet},
};

use super::{
    BalanceOptions, Held, Stop, Work,
    glance::{Glance, changed},
    held::release,
    member::{Member, RoleGuard, Standing, WorkerGuard, draw},
    plan::{Plan, Scene},
    sightings::Sightings,
    status::{nodes, roles},
};
use crate::{
    bugs::{Bug, is_on},
    env::Env,
    error::{Error, Result},
    keys::{Lease, LeaseRow, NodeId, NodeRow, Owner, Request, Role},
    store::{Isolation, Transaction},
};

/// The most leases that are acquired in one transaction; the rest follows at once in the next.
const ACQUISITIONS_MAX: usize = 1_000;

/// How much shorter than the balance interval the pause is while the node waits for owners that it has asked.
const HASTE: u32 = 8;

/// The longest time without a round. Nothing rests on it: what can change is seen by the glances, who dies is a matter of time.
const REST: Duration = Duration::from_hours(1);

/// The longest pause before a resource whose work has failed is taken again.
const FAILURE_PAUSE_MAX: Duration = Duration::from_secs(1);

/// What is divided, and among whom.
#[derive(Debug, Clone)]
pub(crate) struct Pool {
    /// The name of the pool in the keys of its leases.
    pub name: Arc<str>,
    /// The role of the nodes that divide it.
    pub role: Role,
}

/// The worker of a pool on a node. Dropping it stops it, and its work, at once.
#[derive(Debug)]
pub(crate) struct Worker {
    /// Tells it to end.
    stop: watch::Sender<bool>,
    /// Its task.
    task: JoinSet<Result<()>>,
}

impl Worker {
    /// Takes the part of `pool` that the node can have at once, and starts the work on it. If that fails, it leaves
    /// nothing behind.
    pub async fn start(
        member: &Arc<Member>,
        pool: Pool,
        work: Arc<dyn Work>,
        options: BalanceOptions,
    ) -> Result<Self> {
        options.check()?;
        let count = member.add_worker(options.interval);
        let role = member.enter(pool.role.clone()).await?;
        let standing = member.standing();
        let joined = *standing.borrow();
        let mut dealer = Dealer {
            member: Arc::clone(member),
            pool,
            work,
            options,
            standing,
            joined,
            tasks: JoinSet::new(),
            ids: HashMap::new(),
            held: BTreeMap::new(),
            nodes: Sightings::default(),
            requests: Sightings::default(),
            due: Duration::ZERO,
            glances: member.glances(),
            settled: None,
        };
        if let Err(error) = dealer.round().await {
            dealer.abort_all().await;
            drop(role);
            // What this cannot release is free once the row of the node says that it does not have the role.
            if let Err(error) = dealer.clean_up().await {
                tracing::warn!(%error, "leases are left to be found");
            }
            return Err(error);
        }
        let (stop, stopped) = watch::channel(false);
        let mut task = JoinSet::new();
        task.spawn(dealer.run(stopped, role, count));
        Ok(Self { stop, task })
    }

    /// Ends the work, and releases all leases.
    pub async fn shutdown(mut self) -> Result<()> {
        self.stop.send_replace(true);
        match self.task.join_next().await {
            Some(Ok(result)) => result,
            Some(Err(error)) => {
                tracing::error!(%error, "a worker has panicked");
                Ok(())
            }
            None => Ok(()),
        }
    }
}

/// The work on a resource.
#[derive(Debug)]
struct Job {
    /// The right to it.
    lease: Held,
    /// Tells it to end.
    stop: watch::Sender<bool>,
    /// Ends it at once.
    abort: AbortHandle,
}

/// What the worker's task waits for.
enum Event {
    /// The worker is to end.
    Stop,
    /// The node has fallen out.
    FallenOut,
    /// A job has ended.
    Ended(Result<(Id, Result<()>), JoinError>),
    /// A round is due.
    Due,
    /// The node has looked at the others.
    Glance,
}

/// What a round has found and done.
struct Outcome {
    /// What it has done.
    plan: Plan,
    /// What it has acquired.
    acquired: Vec<Held>,
    /// Whether there was more to acquire than fits a round.
    more: bool,
    /// The nodes, as they were seen.
    glance: Glance,
    /// The requests.
    requests: Vec<(u64, Request)>,
}

/// The state of the worker's task.
struct Dealer {
    /// The node.
    member: Arc<Member>,
    /// What it divides.
    pool: Pool,
    /// What is done with a resource.
    work: Arc<dyn Work>,
    /// How the node takes its part.
    options: BalanceOptions,
    /// How the node stands.
    standing: watch::Receiver<Standing>,
    /// How it stood when the leases were acquired.
    joined: Standing,
    /// The jobs.
    tasks: JoinSet<Result<()>>,
    /// What the tasks work on.
    ids: HashMap<Id, u64>,
    /// The leases that it works on.
    held: BTreeMap<u64, Job>,
    /// Since when the row of each node has not changed.
    nodes: Sightings<NodeId, ([u8; 16], u64)>,
    /// Since when each request has stood there.
    requests: Sightings<u64, Request>,
    /// When the next round is due, whatever is seen until then.
    due: Duration,
    /// What the node sees of the others.
    glances: watch::Receiver<Option<Arc<Glance>>>,
    /// What the last round has seen, if it has left nothing to be done: the next one would do nothing before that changes.
    settled: Option<Glance>,
}

impl Dealer {
    /// Time and randomness.
    fn env(&self) -> &Env {
        self.member.db.env()
    }

    /// Looks after the pool until it is told to stop.
    async fn run(
        mut self,
        mut stopped: watch::Receiver<bool>,
        role: RoleGuard,
        _count: WorkerGuard,
    ) -> Result<()> {
        let mut leaving = self.member.stop();
        let env = self.env().clone();
        loop {
            let event = tokio::select! {
                biased;
                _ = stopped.wait_for(|stop| *stop) => Event::Stop,
                _ = leaving.wait_for(|stop| *stop) => Event::Stop,
                () = fallen_out(self.standing.clone(), self.joined) => Event::FallenOut,
                Some(ended) = self.tasks.join_next_with_id() => Event::Ended(ended),
                () = env.sleep(self.due.saturating_sub(env.now())) => Event::Due,
                Ok(()) = self.glances.changed() => Event::Glance,
            };
            let proceed = async {
                match event {
                    Event::Stop => return false,
                    Event::FallenOut => self.fall_out().await,
                    Event::Ended(ended) => self.tidy(ended).await,
                    Event::Due => self.try_round().await,
                    Event::Glance => self.look(),
                }
                true
            };
            // A round or a release can take long when the store does not answer. Dropped, it may have been committed: then
            // the next round finds what this one does not know.
            let goes_on = tokio::select! {
                biased;
                _ = stopped.wait_for(|stop| *stop) => false,
                _ = leaving.wait_for(|stop| *stop) => false,
                goes_on = proceed => goes_on,
            };
            if !goes_on {
                break;
            }
        }
        self.stop_all().await;
        drop(role);
        let ended = self.clean_up().await;
        // Before it is counted as ended: whoever has left may close the store at once.
        drop(self);
        ended
    }

    /// A round; one that fails is repeated soon.
    async fn try_round(&mut self) {
        let (standing, joined) = (self.standing.clone(), self.joined);
        let result = tokio::select! {
            biased;
            () = fallen_out(standing, joined) => return,
            result = self.round() => result,
        };
        if let Err(error) = result {
            tracing::warn!(pool = &*self.pool.name, %error, "balancing failed, trying again");
            self.due_within(self.failure_pause());
        }
    }

    /// Compares the node's part with that of others, and acts.
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

    /// The transaction of a round. Returns `None` if the node has no row: it is about to find out by itself.
    async fn attempt(&mut self) -> Result<Option<Outcome>> {
        let env = self.env().clone();
        // What goes wrong leads to another round in any case.
        self.due = env.now().saturating_add(self.options.interval);
        self.settled = None;
        let (began, token, seed) = (env.now(), draw(&env), env.random());
        let outcome = self.member.db.run(async |tx| self.deal(&tx, began, token, seed).await).await?;
        // Only now, so that nothing looks older than it is.
        let now = env.now();
        if let Some(outcome) = &outcome {
            self.nodes.adopt(outcome.glance.beats(), now);
            self.requests.adopt(outcome.requests.iter().copied(), now);
            if outcome.plan.is_empty() && outcome.requests.is_empty() {
                self.settled = Some(outcome.glance.clone());
            }
            let pause = if self.settled.is_some() {
                REST
            } else if outcome.plan.waits {
                self.options.interval / HASTE
            } else {
                // Spread, so that nodes that were started together do not always meet.
                env.spread(self.options.interval, 0.9, 1.0)
            };
            self.due = now.saturating_add(pause).min(self.next_expiry(now));
        }
        Ok(outcome)
    }

    /// When a node has to be given up, unless its row changes until then.
    fn next_expiry(&self, now: Duration) -> Duration {
        let expiry = self.member.options.expiry;
        let others = self.nodes.times().filter(|(node, _)| **node != self.member.id());
        let next = others.map(|(_, since)| since.saturating_add(expiry)).min();
        next.map_or(Duration::MAX, |next| next.max(now.saturating_add(self.options.interval / (HASTE * 4))))
    }

    /// Takes in what the node sees of the others: a round is due if it might have something to do.
    fn look(&mut self) {
        let now = self.env().now();
        let Some(glance) = self.glances.borrow_and_update().clone() else { return };
        self.nodes.adopt(glance.beats(), now);
        if let Some(settled) = &self.settled {
            self.due = if settled.is_as(&glance) {
                now.saturating_add(REST).min(self.next_expiry(now))
            } else {
                now
            };
        }
    }

    /// Reads nodes and leases, decides, and writes.
    async fn deal(
        &self,
        tx: &Transaction,
        now: Duration,
        token: [u8; 16],
        seed: u64,
    ) -> Result<Option<Outcome>> {
        let Member { keys, .. } = &*self.member;
        let me = self.member.id();
        let (glance, roles, leases, resources) = tokio::join!(
            Glance::read(tx, keys),
            roles(tx, keys),
            tx.all_rows(keys.leases(&self.pool.name), Isolation::Serializable),
            self.work.resources(tx),
        );
        let (glance, roles) = (glance?, roles?);
        let rows = &glance.nodes;
        if self.joined.is_none() || rows.get(&me).map(|row| row.token) != self.joined {
            return Ok(None);
        }
        let expiry = self.member.options.expiry;
        let is_dead =
            |node: &NodeId, beat: &([u8; 16], u64)| *node != me && self.nodes.age(node, beat, now) >= expiry;
        let beats = glance.beats();
        let expired: BTreeSet<_> =
            beats.filter(|(node, beat)| is_dead(node, beat)).map(|(node, _)| node).collect();
        let has_role = |node| roles.get(node).is_some_and(|roles| roles.contains(&self.pool.role));
        let alive = rows.keys().filter(|node| **node == me || (has_role(node) && !expired.contains(node)));
        let mut scene = Scene {
            me,
            nodes: alive.copied().collect(),
            expired,
            resources: resources?,
            leases: BTreeMap::new(),
            requests: BTreeMap::new(),
            held: self.held.iter().map(|(&key, job)| (key, (job.lease.owner, job.lease.epoch))).collect(),
            token,
            options: &self.options,
        };
        for (key, value) in leases? {
            match keys.lease_row(&key, &value)? {
                (_, resource, LeaseRow::Lease(lease)) => {
                    scene.leases.insert(resource, lease);
                }
                (_, resource, LeaseRow::Request(request)) => {
                    let age = self.requests.age(&resource, &request, now);
                    scene.requests.insert(resource, (request, age));
                }
            }
        }
        let mut plan = scene.plan(&mut fastrand::Rng::with_seed(seed));
        let more = plan.acquire.len() > ACQUISITIONS_MAX;
        plan.acquire.truncate(ACQUISITIONS_MAX);
        let acquired = self.write(tx, &scene, &plan);
        for node in &scene.expired {
            self.bury(tx, *node, rows[node]).await?;
        }
        let requests = scene.requests.iter().map(|(&resource, &(request, _))| (resource, request)).collect();
        Ok(Some(Outcome { plan, acquired, more, glance, requests }))
    }

    /// Writes what `plan` says; returns what is acquired by it.
    fn write(&self, tx: &Transaction, scene: &Scene<'_>, plan: &Plan) -> Vec<Held> {
        let Member { keys, .. } = &*self.member;
        let pool = &self.pool.name;
        let epoch = |resource| scene.leases.get(&resource).map_or(0, |lease| lease.epoch);
        let owner = Owner { node: scene.me, token: scene.token };
        if plan.writes() {
            changed(tx, keys);
        }
        for &resource in &plan.forget {
            tx.clear(&keys.lease_request(pool, resource));
        }
        for &resource in &plan.ask {
            let request = Request { node: scene.me, epoch: epoch(resource) };
            tx.set(&keys.lease_request(pool, resource), &request.to_bytes());
        }
        for &resource in &plan.release {
            let lease = Lease { epoch: epoch(resource), owner: None };
            tx.set(&keys.lease(pool, resource), &lease.to_bytes());
        }
        for &resource in &plan.gone {
            tx.clear(&keys.lease(pool, resource));
            tx.clear(&keys.lease_request(pool, resource));
        }
        let acquire = plan.acquire.iter().map(|&resource| {
            let epoch = epoch(resource) + u64::from(!is_on(Bug::EpochNotRaised));
            let lease = Lease { epoch, owner: Some(owner) };
            tx.set(&keys.lease(pool, resource), &lease.to_bytes());
            if scene.requests.contains_key(&resource) {
                tx.clear(&keys.lease_request(pool, resource));
            }
            self.work.acquired(tx, resource, epoch);
            (resource, epoch)
        });
        let acquired: Vec<_> = acquire.chain(plan.acquired.iter().copied()).collect();
        acquired.into_iter().map(|(resource, epoch)| Held::new(keys, pool, resource, epoch, owner)).collect()
    }

    /// Removes the row of a dead node, if it is still as it was seen. From then on the node is fenced off everywhere.
    async fn bury(&self, tx: &Transaction, node: NodeId, seen: NodeRow) -> Result<()> {
        let keys = &self.member.keys;
        let key = keys.node(node);
        let row = tx.get(&key, Isolation::Serializable).await?;
        let row = row.map(|value| NodeRow::from_bytes(&value)).transpose()?;
        if row.is_some_and(|row| row.beat == seen.beat && row.token == seen.token) {
            tx.clear(&key);
            tx.clear(&keys.roles(node));
        }
        Ok(())
    }

    /// Starts and ends jobs as a round has decided.
    fn adopt(&mut self, outcome: Outcome) {
        let Outcome { plan, acquired, .. } = outcome;
        for resource in &plan.lost {
            if let Some(job) = self.held.remove(resource) {
                job.abort.abort();
                self.ids.remove(&job.abort.id());
                self.member.stats.leases_lost.add(1);
                tracing::warn!(pool = &*self.pool.name, resource, "lease lost to another node");
            }
        }
        for resource in &plan.gone {
            if let Some(job) = self.held.remove(resource) {
                job.abort.abort();
                self.ids.remove(&job.abort.id());
            }
        }
        for resource in &plan.hand_over {
            if let Some(job) = self.held.get(resource) {
                job.stop.send_replace(true);
            }
        }
        self.member.stats.leases_acquired.add(acquired.len() as u64);
        for lease in acquired {
            let (stop, stopped) = Stop::new();
            let work = Arc::clone(&self.work);
            let abort = self.tasks.spawn(work.run(lease.clone(), stopped));
            self.ids.insert(abort.id(), lease.resource);
            self.held.insert(lease.resource, Job { lease, stop, abort });
        }
    }

    /// Looks after jobs that have ended: those that were asked to are released, the others are taken again.
    async fn tidy(&mut self, first: Result<(Id, Result<()>), JoinError>) {
        let mut released = Vec::new();
        let mut next = Some(first);
        while let Some(ended) = next {
            released.extend(self.account(ended));
            next = self.tasks.try_join_next_with_id();
        }
        let result = tokio::select! {
            result = release(&self.member.db, &self.member.keys, &released) => result,
            () = fallen_out(self.standing.clone(), self.joined) => return,
        };
        if let Err(error) = result {
            tracing::warn!(pool = &*self.pool.name, %error, "leases are not released yet");
            self.due_within(self.failure_pause());
        }
    }

    /// Forgets a job that has ended, and reports how; returns its lease if it is to be released.
    fn account(&mut self, ended: Result<(Id, Result<()>), JoinError>) -> Option<Held> {
        let (id, result) = match ended {
            Ok((id, result)) => (id, Ok(result)),
            Err(error) => (error.id(), Err(error)),
        };
        let resource = self.ids.remove(&id)?;
        let job = self.held.remove(&resource)?;
        let pool = &*self.pool.name;
        match result {
            Ok(Ok(())) => {}
            Ok(Err(error @ Error::LeaseLost { .. })) => {
                tracing::warn!(pool, resource, %error, "lease lost to another node");
                self.member.stats.leases_lost.add(1);
            }
            Ok(Err(error)) => tracing::error!(pool, resource, %error, "work failed, taking it again"),
            Err(error) => {
                tracing::error!(pool, resource, %error, "work has panicked, taking it again");
                self.member.stats.work_panics.add(1);
            }
        }
        if *job.stop.borrow() {
            return Some(job.lease);
        }
        // The next round finds a lease that the node owns without working on it.
        self.due_within(self.failure_pause());
        None
    }

    /// Gives everything up, because others may have taken over long ago, and waits until the node takes part again.
    async fn fall_out(&mut self) {
        self.abort_all().await;
        if self.standing.wait_for(Option::is_some).await.is_err() {
            tracing::error!(pool = &*self.pool.name, "the heartbeat of the node has ended");
            // Until the worker is told to stop, which drops this.
            std::future::pending::<()>().await;
        }
        self.joined = *self.standing.borrow();
        self.nodes = Sightings::default();
        self.requests = Sightings::default();
        self.settled = None;
        self.due = Duration::ZERO;
    }

    /// Ends all jobs at once.
    async fn abort_all(&mut self) {
        self.tasks.shutdown().await;
        self.ids.clear();
        self.held.clear();
    }

    /// Asks all jobs to end, and ends those that take too long.
    async fn stop_all(&mut self) {
        let env = self.env().clone();
        for job in self.held.values() {
            job.stop.send_replace(true);
        }
        let deadline = env.sleep(self.options.handover);
        tokio::pin!(deadline);
        loop {
            tokio::select! {
                biased;
                ended = self.tasks.join_next_with_id() => match ended {
                    Some(ended) => drop(self.account(ended)),
                    None => return,
                },
                () = fallen_out(self.standing.clone(), self.joined) => break,
                () = &mut deadline => break,
            }
        }
        tracing::warn!(pool = &*self.pool.name, jobs = self.held.len(), "work does not end and is aborted");
        self.abort_all().await;
    }

    /// Takes the role out of the node's row, and releases what the node owns. Either makes the leases free.
    async fn clean_up(&self) -> Result<()> {
        let told = self.member.tell().await;
        let Member { keys, db, .. } = &*self.member;
        let me = self.member.id();
        let token = *self.standing.borrow();
        let released = db.run(async |tx| {
            let rows = nodes(&tx, keys).await?;
            if token.is_none() || rows.get(&me).map(|row| row.token) != token {
                return Ok(());
            }
            let mut is_any_mine = false;
            for (key, value) in tx.all_rows(keys.leases(&self.pool.name), Isolation::Serializable).await? {
                match keys.lease_row(&key, &value)? {
                    (_, _, LeaseRow::Lease(lease)) if lease.owner.is_some_and(|owner| owner.node == me) => {
                        tx.set(&key, &Lease { owner: None, ..lease }.to_bytes());
                    }
                    (_, _, LeaseRow::Request(request)) if request.node == me => tx.clear(&key),
                    _ => continue,
                }
                is_any_mine = true;
            }
            if is_any_mine {
                changed(&tx, keys);
            }
            Ok(())
        });
        released.await.and(told)
    }

    /// Has the next round be due within `pause`: it has something to do, whatever the last one has left.
    fn due_within(&mut self, pause: Duration) {
        self.settled = None;
        self.due = self.due.min(self.env().now().saturating_add(pause));
    }

    /// How soon what has failed is tried again.
    fn failure_pause(&self) -> Duration {
        self.options.interval.min(FAILURE_PAUSE_MAX)
    }
}

/// Completes once the node does not stand as it did when it had `joined`.
async fn fallen_out(mut standing: watch::Receiver<Standing>, joined: Standing) {
    // A heartbeat that has ended beats no more.
    let _ = standing.wait_for(|standing| *standing != joined).await;
}

#[cfg(test)]
mod tests;
