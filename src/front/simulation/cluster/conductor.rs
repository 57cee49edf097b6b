//! The conductor of a world on a cluster: starts, kills and stops its processes, and has what they do judged.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    num::NonZeroUsize,
    process::{Child, ExitStatus},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use bytes::Bytes;

use super::{Cluster, Member, member, merge::Merge, signal::signal};
use crate::{
    base::error::{Error, Result},
    front::simulation::{
        Outcome,
        findings::{Done, Findings},
        guarantee::Guarantee,
        issuer::Issuer,
        log,
        oracle::Oracle,
        outcome,
        shared::{Phase, Shared},
        time::Time,
        witness::Fault,
    },
    store::{Backend, Database, Isolation, KeyRange, RangeRead, TRANSACTION_LIFETIME},
};

/// How often it checks its processes.
const TICK: Duration = Duration::from_millis(50);

/// How often, at most, what has happened is judged.
const JUDGED_EVERY: Duration = Duration::from_millis(500);

/// The probability that a process is killed or stopped at a tick.
const TROUBLE: f64 = 0.04;

/// The longest time that a process is stopped or away.
const AWAY_MAX: Duration = Duration::from_secs(3);

/// The longest time until everything is at rest, and until everything has ended.
const REST_MAX: Duration = Duration::from_mins(2);

/// The least time of rest: by then commits of dead processes have happened, and dead nodes were removed.
const REST_MIN: Duration = TRANSACTION_LIFETIME;

/// A process, with its lives one after the other.
struct Slot {
    member: Member,
    child: Option<Child>,
    /// When it goes on, if it is stopped, or is started again.
    away_until: Option<Instant>,
    is_stopped: bool,
    is_done: bool,
    /// Whether its last life has ended without a report to the oracle.
    is_mourned: bool,
}

impl Slot {
    fn issuer(&self) -> Issuer {
        Issuer { process: self.member.process, generation: self.member.generation }
    }
}

/// A world on a cluster.
struct Conductor<'a> {
    cluster: &'a Cluster<'a>,
    /// Its plan and its findings.
    shared: Arc<Shared>,
    slots: Vec<Slot>,
    merge: Merge,
    random: fastrand::Rng,
    since: Instant,
    judged: Instant,
}

/// Runs the world of `first`, the first life of its first process, on a cluster, in processes of the operating system, and clears the
/// cluster unless something was broken. It counts in `done`. It blocks the thread, and must not be called within a runtime.
///
/// Fails with [`Error::Invalid`] if the cluster has any rows, and as reads do.
pub fn torture_cluster(first: &Member, cluster: &Cluster<'_>, done: &Arc<Done>) -> Result<Outcome> {
    if !cluster.runtime.block_on(rows_of(cluster.db.backend()))?.is_empty() {
        return Err(Error::invalid("cluster", "it is not empty, and worlds use all its keys".to_owned()));
    }
    let plan = member::plan(first);
    let threads = plan.threads.map_or(1, NonZeroUsize::get);
    let count = plan.processes.len();
    let mut random = fastrand::Rng::with_seed(first.seed);
    let shared = Shared::new(plan, random.fork(), Findings::new(Time::real(), done, false));
    let mut oracle = std::mem::replace(&mut *shared.oracle(), Oracle::new(1, Vec::new(), false, None));
    oracle.distrust_clocks();
    oracle.keep_history(first.seed);
    let merge = Merge::new(oracle, &first.folder, &shared.time);
    let slot = |process| Slot {
        member: Member { process, threads, generation: 0, ..first.clone() },
        child: None,
        away_until: Some(Instant::now()),
        is_stopped: false,
        is_done: false,
        is_mourned: true,
    };
    let slots = (0..count).map(slot).collect();
    let (since, judged) = (Instant::now(), Instant::now());
    let mut conductor = Conductor { cluster, shared, slots, merge, random, since, judged };
    conductor.run();
    Ok(conductor.outcome(first.seed))
}

impl Conductor<'_> {
    /// Runs the world to its end.
    fn run(&mut self) {
        while !self.shared.has_failed() && !(self.slots.iter().all(|slot| slot.is_done)) {
            for number in 0..self.slots.len() {
                self.attend(number);
            }
            self.conduct();
            thread::sleep(TICK);
        }
        for slot in &mut self.slots {
            if let Some(mut child) = slot.child.take() {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
        if !self.shared.has_failed() {
            self.finish();
        }
    }

    /// Checks a process, which may have died, or may be due to start or to continue.
    fn attend(&mut self, number: usize) {
        let slot = &mut self.slots[number];
        if slot.is_done {
            return;
        }
        if let Some(child) = &mut slot.child
            && let Ok(Some(status)) = child.try_wait()
        {
            let mut said = String::new();
            let _ = child.stdout.take().map(|mut output| output.read_to_string(&mut said));
            slot.child = None;
            self.ended(number, status, &said);
            return;
        }
        if !slot.is_mourned {
            let version = self
                .cluster
                .runtime
                .block_on(async { self.cluster.db.backend().begin().read_version().await });
            let Ok(version) = version else { return };
            let issuer = slot.issuer();
            slot.is_mourned = true;
            slot.member.generation += 1;
            let mourned = self.merge.crashed(issuer, version);
            self.check(mourned);
            return;
        }
        if slot.away_until.is_some_and(|until| until > Instant::now()) {
            return;
        }
        slot.away_until = None;
        if slot.is_stopped {
            slot.is_stopped = false;
            slot.child.iter().for_each(|child| signal("-CONT", child.id()));
        } else if slot.child.is_none() {
            match (self.cluster.start)(&slot.member) {
                Ok(child) => {
                    slot.child = Some(child);
                    let issuer = slot.issuer();
                    self.merge.begins(issuer);
                    self.send_phase(number);
                }
                Err(error) => self.shared.fail(format!("process {number} cannot be started: {error}")),
            }
        }
    }

    fn ended(&mut self, number: usize, status: ExitStatus, said: &str) {
        let slot = &mut self.slots[number];
        if status.success() && self.shared.phase() == Phase::End {
            slot.is_done = true;
        } else if let Some(code) = status.code() {
            let name = said.split(':').next().unwrap_or_default();
            let found = Guarantee::ALL.iter().find(|guarantee| guarantee.to_string() == name);
            let guarantee = found.copied().unwrap_or(Guarantee::Live);
            self.shared.fail(guarantee.broken(format!("process {number} has ended with {code}: {said}")));
        } else {
            self.shared.count(Fault::Crash);
            slot.is_mourned = false;
            slot.is_stopped = false;
            slot.away_until = Some(Instant::now() + AWAY_MAX.mul_f64(self.random.f64()));
        }
    }

    /// Sends a process the phase of the world.
    fn send_phase(&mut self, number: usize) {
        let word = match self.shared.phase() {
            Phase::Chaos => return,
            Phase::Rest => "rest",
            Phase::End => "end",
        };
        if let Some(input) = self.slots[number].child.as_mut().and_then(|child| child.stdin.as_mut()) {
            // A dead one is found by its status.
            let _ = writeln!(input, "{word}");
        }
    }

    /// Enters the next phase, and sends it to all processes.
    fn enter(&mut self, phase: Phase) {
        self.shared.enter(phase);
        self.since = Instant::now();
        for number in 0..self.slots.len() {
            self.send_phase(number);
        }
    }

    /// Makes trouble, or waits for the end.
    fn conduct(&mut self) {
        if self.judged.elapsed() >= JUDGED_EVERY {
            let (merge, findings) = (&mut self.merge, &*self.shared);
            let advanced = merge.advance(findings, self.cluster);
            self.judged = Instant::now();
            match advanced {
                // The cluster may be down, or recover.
                Err(Error::Store(_)) if self.since.elapsed() < self.shared.plan.chaos + REST_MAX => return,
                advanced => self.check(advanced),
            }
        }
        match self.shared.phase() {
            Phase::Chaos if self.since.elapsed() > self.shared.plan.chaos => {
                for slot in &mut self.slots {
                    slot.away_until = slot.away_until.map(|_| Instant::now());
                }
                self.enter(Phase::Rest);
            }
            Phase::Chaos if self.random.f64() < TROUBLE => self.trouble(),
            Phase::Rest => self.rest(),
            Phase::End if self.since.elapsed() > REST_MAX => {
                let broken = format!("after {REST_MAX:?} not all processes have shut down");
                self.shared.fail(Guarantee::Live.broken(broken));
            }
            Phase::Chaos | Phase::End => {}
        }
    }

    /// Kills or stops a process.
    fn trouble(&mut self) {
        let number = self.random.usize(0..self.slots.len());
        let slot = &mut self.slots[number];
        let Some(child) = slot.child.as_ref().filter(|_| !slot.is_stopped) else { return };
        if self.random.bool() {
            signal("-KILL", child.id());
        } else {
            signal("-STOP", child.id());
            self.shared.count(Fault::Pause);
            slot.is_stopped = true;
            slot.away_until = Some(Instant::now() + AWAY_MAX.mul_f64(self.random.f64()));
        }
    }

    /// Ends the world if everything has come to rest.
    fn rest(&mut self) {
        let is_judged = self.judged.elapsed() < TICK;
        if self.since.elapsed() < REST_MIN || !is_judged {
            return;
        }
        match self.merge.oracle.unrest() {
            None => {
                self.merge.oracle.rested();
                self.enter(Phase::End);
            }
            Some(unrest) if self.since.elapsed() > REST_MAX => {
                let guarantee = self.merge.oracle.unrest_breaks();
                self.shared.fail(guarantee.broken(format!("after {REST_MAX:?} without faults: {unrest}")));
            }
            Some(_) => {}
        }
    }

    /// Judges what is in the cluster at the end.
    fn finish(&mut self) {
        let (merge, findings) = (&mut self.merge, &*self.shared);
        let advanced = merge.advance(findings, self.cluster);
        self.check(advanced);
        let left = self.cluster.runtime.block_on(rows_of(self.cluster.db.backend()));
        let expected = self.cluster.runtime.block_on(rows_of(self.merge.values()));
        match (left, expected) {
            (Ok(left), Ok(expected)) => {
                let oracle = &mut self.merge.oracle;
                oracle.ended();
                if let Err(broken) = oracle.judge_history().and_then(|()| oracle.judge_store(&left)) {
                    self.shared.fail(broken);
                }
                if left != expected {
                    self.shared
                        .fail(Guarantee::Durable.broken("the cluster has other rows than its commits"));
                }
            }
            (Err(error), _) | (_, Err(error)) => self.check(Err(error)),
        }
        if !self.shared.has_failed() {
            let cleared = self.cluster.runtime.block_on(clear(&self.cluster.db));
            self.check(cleared);
        }
    }

    /// Fails if a step that cannot be left out has failed.
    fn check(&self, result: Result<()>) {
        if let Err(error) = result {
            self.shared.fail(format!("the world cannot be judged: {error}"));
        }
    }

    fn outcome(mut self, seed: u64) -> Outcome {
        let history = self.merge.oracle.take_history();
        Outcome { history, ..outcome(&self.shared, seed) }
    }
}

/// Removes everything from a cluster.
async fn clear(db: &Database) -> Result<()> {
    db.run(async |tx| {
        tx.clear_range(&KeyRange::new(&b""[..], &b"\xff"[..]));
        Ok(())
    })
    .await
}

/// All rows of a store but the log.
async fn rows_of(store: &Arc<dyn Backend>) -> Result<BTreeMap<Bytes, Bytes>> {
    let (tx, mut rows) = (store.begin(), BTreeMap::new());
    let log = KeyRange::prefix(log::PREFIX);
    for range in [KeyRange::new(&b""[..], log.begin), KeyRange::new(log.end, &b"\xff"[..])] {
        let mut rest = Some(RangeRead::new(range));
        while let Some(read) = rest {
            let page = tx.get_range(&read, Isolation::Snapshot).await?;
            rest = read.after(&page);
            rows.extend(page.rows);
        }
    }
    Ok(rows)
}
