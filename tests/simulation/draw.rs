//! [`WorldPlan`]: what is drawn from a seed: sizes, options, and the mix of faults.
//!
//! Most kinds of faults are absent from any one world, so that the others can strike often without hiding each other.

mod consumers;
mod sizes;

use std::time::Duration;

use fastrand::Rng;

pub(super) use self::{consumers::ConsumerPlan, sizes::SizePlan};
use notibus::{
    JanitorOptions, NotifierOptions,
    changes::ChangesOptions,
    dispatcher::DispatcherOptions,
    event::DbName,
    feed::SchemeId,
    node::{BalanceOptions, NodeOptions},
    producer::ProducerOptions,
};

use crate::witness::Fault;

/// The plan of a world, drawn from its seed.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each is drawn by itself")]
pub(super) struct WorldPlan {
    /// The number of partitions of the bus.
    pub partitions: u32,
    /// The number of shards that the feed begins with.
    pub shards: u32,
    /// The names that databases can have.
    pub names: Vec<DbName>,
    /// The processes, in the order of their numbers.
    pub processes: Vec<ProcessPlan>,
    /// Whether the store is a folder on a machine that runs all processes, and that can lose power.
    pub is_durable: bool,
    /// How long faults strike.
    pub chaos: Duration,
    /// How the store is replaced with a copy, if it is.
    pub restore: Option<RestorePlan>,
    /// The probability of each kind of fault, wherever it can strike.
    rates: Vec<(Fault, f64)>,
    /// The longest delay of a network step, in microseconds.
    pub latency_us: u64,
    /// The longest delay of a slow network step, in milliseconds.
    pub slow_ms: u64,
    /// Whether the answers to some commits with an unknown result arrive as late as those to slow commits.
    pub doubts_last: bool,
    /// The longest pause of a process, in milliseconds.
    pub pause_max_ms: u64,
    /// The maximum drift of clocks, in parts per million.
    pub drift_ppm: u64,
    /// The longest time between two transactions of a producer, in milliseconds.
    pub think_max_ms: u64,
    /// The longest time between two actions of an operator, in milliseconds.
    pub operate_max_ms: u64,
    /// Whether the operator only deletes and creates consumers, while a janitor is always at work.
    pub churns_consumers: bool,
    pub producer: ProducerOptions,
    /// Whether producers sometimes record events of deleted instances, without checking.
    pub has_late_events: bool,
    /// Whether producers do little but delete and recreate a few names, and subscribers read small pages.
    pub churns_names: bool,
    /// The size limit of a fold's transaction in bytes, if it is lower than usual.
    pub fold_size_max: Option<usize>,
    /// Which sizes are unusual.
    pub sizes: SizePlan,
    /// How subscribers behave.
    pub subscribers: SubscriberPlan,
    /// The documents of databases, if they have any.
    pub documents: Option<DocumentPlan>,
    pub consumers: Vec<ConsumerPlan>,
    /// The clients over HTTP, if there are any.
    pub web: Option<WebPlan>,
    pub node: NodeOptions,
    pub notifier: NotifierOptions,
    pub dispatcher: DispatcherOptions,
    pub janitor: JanitorOptions,
}

/// How the subscribers of a world behave.
#[derive(Debug, Clone, Copy, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is drawn by itself")]
pub(super) struct SubscriberPlan {
    /// Whether filters are replaced now and then.
    pub replaces: bool,
    /// Whether subscribers stop and resume now and then, without a crash.
    pub restarts: bool,
    /// Whether some subscribers are callbacks, which panic now and then; there may also be a mirror.
    pub has_callbacks: bool,
    /// Whether subscribers spend time on deliveries, and have long rounds.
    pub is_slow: bool,
    /// Whether most subscribers want only deletions, of a few names, and begin with nothing.
    pub wants_deletions: bool,
}

/// The documents of databases, and their readers.
#[derive(Debug, Clone)]
pub(super) struct DocumentPlan {
    /// The maximum number of documents in a database.
    pub ids: u64,
    /// How the feed of each database begins.
    pub options: ChangesOptions,
    /// Whether layers sometimes name a wrong previous edit: none, or an older one.
    pub misuses: bool,
}

/// How the store is replaced with a copy.
#[derive(Debug, Clone, Copy)]
pub(super) struct RestorePlan {
    pub copied_after: Duration,
    /// How long the store continues after the copy.
    pub lost: Duration,
    /// How far the versions of the store are ahead of true time after the restore.
    pub ahead_ms: i64,
    /// Whether the copy of a folder was opened once before, as by a command that was refused.
    pub opened_before: bool,
    /// How long after the restore the incarnation is raised; `None` for never.
    pub raised_after: Option<Duration>,
}

/// The clients over HTTP, and how they behave.
#[derive(Debug, Clone, Copy)]
pub(super) struct WebPlan {
    /// The number of clients of `_db_updates` at each dispatcher.
    pub clients: u32,
    /// Whether the clients spend time on rows.
    pub is_slow: bool,
    /// Whether the clients cut their connections now and then.
    pub cuts: bool,
}

/// The roles and actors of a process.
#[derive(Debug, Clone, Copy, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a role, and they are independent of each other")]
pub(super) struct ProcessPlan {
    /// Whether the process has a notifier.
    pub notifier: bool,
    /// Whether the process has a dispatcher, with subscribers.
    pub dispatcher: bool,
    /// Whether the process has a janitor.
    pub janitor: bool,
    /// Whether the process has members of the consumers.
    pub works: bool,
    pub producers: u32,
    /// Whether the process has an operator, which changes the topology and manages the consumers.
    pub operator: bool,
    /// Whether the process has a follower, which reads the feed shard by shard.
    pub follower: bool,
    /// The heartbeat and the expiry of the node are multiplied by 1 plus this.
    pub slowness: u32,
    /// The maximum number of leases that the notifier, and each of the consumers, may hold.
    pub leases_max: Option<u32>,
}

impl ProcessPlan {
    /// Whether the process has a node.
    pub fn is_node(self) -> bool {
        self.notifier || self.dispatcher || self.janitor
    }
}

impl WorldPlan {
    /// Draws the plan of `seed`.
    pub fn draw(seed: u64) -> Self {
        let random = &mut Rng::with_seed(seed);
        let ms = |random: &mut Rng, from: u64, to: u64| Duration::from_millis(random.u64(from..=to));
        let heartbeat = ms(random, 200, 700);
        let node = NodeOptions::default().heartbeat(heartbeat).expiry(heartbeat * random.u32(2..=4));
        let balance = |random: &mut Rng| {
            BalanceOptions::default()
                .interval(ms(random, 200, 1_500))
                .handover(ms(random, 100, 3_000))
                .leases_max(None)
        };
        let has_janitor = random.bool();
        let nodes = random.usize(2..=4);
        let plan = Self {
            partitions: 1 << random.u32(0..=3),
            shards: random.u32(1..=4),
            names: names(random),
            processes: processes(random, nodes, has_janitor),
            is_durable: random.u32(0..12) == 0,
            chaos: ms(random, 4_000, 15_000),
            restore: None,
            rates: rates(random, |fault| !fault.is_of_handlers()),
            latency_us: [0, 500, 3_000, 20_000][random.usize(0..4)],
            slow_ms: [50, 500, 4_000][random.usize(0..3)],
            doubts_last: false,
            pause_max_ms: [500, 3_000, 8_000][random.usize(0..3)],
            drift_ppm: [0, 100, 50_000][random.usize(0..3)],
            think_max_ms: [20, 200, 1_000][random.usize(0..3)],
            operate_max_ms: [100, 1_000, 5_000][random.usize(0..3)],
            churns_consumers: false,
            producer: ProducerOptions::default().slots(random.u16(1..=3)).record_versionstamps(random.bool()),
            has_late_events: !has_janitor && random.bool(),
            churns_names: false,
            fold_size_max: None,
            sizes: SizePlan::default(),
            subscribers: SubscriberPlan::default(),
            documents: None,
            consumers: Vec::new(),
            web: None,
            node,
            notifier: NotifierOptions::default()
                .balance(balance(random))
                .fold_interval_max(ms(random, 5, 300))
                .fold_percent(random.u8(1..=100))
                .poll_interval(ms(random, 100, 1_500))
                .fold_rows_max(if random.bool() { 10 } else { 1_000 }),
            dispatcher: DispatcherOptions::default()
                .ring_rows_max([1, 3, 1_000][random.usize(0..3)])
                .page_rows_max(random.usize(1..=20))
                .poll_interval(ms(random, 100, 1_500))
                .catch_ups_max(random.usize(1..=3))
                .catch_up_rows_max(random.usize(1..=20)),
            janitor: JanitorOptions::default()
                .interval(if random.bool() { ms(random, 20, 200) } else { ms(random, 200, 2_000) })
                .tombstone_retention(if random.bool() { ms(random, 1, 300) } else { ms(random, 300, 4_000) })
                .balance(balance(random)),
        };
        plan.with_subscribers(random).with_guests(seed)
    }

    /// Adds documents, consumers and clients over HTTP, each in some worlds. Each draw has its own random numbers, so that for a given
    /// seed, worlds without these actors stay the same.
    fn with_guests(self, seed: u64) -> Self {
        let random = |part: u64| Rng::with_seed(seed ^ part);
        self.with_unequal_nodes(&mut random(0x6e6f_6465))
            .with_documents(&mut random(0x646f_6375_6d65_6e74))
            .with_sizes(&mut random(0x7369_7a65))
            .with_consumers(&mut random(0x6a6f_6273))
            .with_doubts(&mut random(0x646f_7562_7473))
            .with_web(&mut random(0x6874_7470))
            .with_restore(&mut random(0x636f_7079))
    }

    /// Replaces the store with a copy, in some worlds. The versions of a store in memory then go back by more than the time that passed.
    fn with_restore(mut self, random: &mut Rng) -> Self {
        if random.u32(0..6) > 0 {
            return self;
        }
        let mut ms = |from, to| Duration::from_millis(random.u64(from..=to));
        let (copied_after, lost, late) = (ms(1_000, 4_000), ms(100, 4_000), ms(500, 5_000));
        let choice = random.u32(0..6);
        let opened_before = choice % 2 == 1;
        let (ahead_ms, raised_after) = match (self.is_durable, choice) {
            (true, choice) => (1_000, (choice < 3).then_some(Duration::ZERO)),
            (false, 0..3) => (-3_600_000, Some(late)),
            (false, _) => (-3_600_000, Some(Duration::ZERO)),
        };
        self.chaos += copied_after + lost + raised_after.unwrap_or_default();
        self.restore = Some(RestorePlan { copied_after, lost, ahead_ms, opened_before, raised_after });
        self
    }

    /// Gives nodes different heartbeat intervals and few leases, in some worlds. The first process may own all leases, so that nothing is
    /// left without an owner.
    fn with_unequal_nodes(mut self, random: &mut Rng) -> Self {
        if random.u32(0..3) > 0 {
            return self;
        }
        for process in &mut self.processes[1..] {
            process.slowness = random.u32(0..=3);
            process.leases_max = random.bool().then(|| random.u32(0..=2));
        }
        self
    }

    /// Whether the store answers without delay, on the caller's thread.
    pub fn may_read_at_once(&self) -> bool {
        self.latency_us == 0
    }

    /// Whether some process has a janitor.
    pub fn has_janitor(&self) -> bool {
        self.processes.iter().any(|process| process.janitor)
    }

    /// Returns the options of the node of `process`.
    pub fn node_of(&self, process: ProcessPlan) -> NodeOptions {
        let slower = 1 + process.slowness;
        let (heartbeat, expiry) = (self.node.heartbeat * slower, self.node.expiry * slower);
        self.node.clone().heartbeat(heartbeat).expiry(expiry)
    }

    /// Returns the longest expiry of any node.
    pub fn expiry_max(&self) -> Duration {
        let expiries = self.processes.iter().map(|process| self.node_of(*process).expiry);
        expiries.max().unwrap_or(self.node.expiry)
    }

    /// Adds clients over HTTP, in some worlds.
    fn with_web(mut self, random: &mut Rng) -> Self {
        if random.u32(0..4) > 0 {
            return self;
        }
        self.processes[0].dispatcher = true;
        self.web = Some(WebPlan { clients: random.u32(1..=3), is_slow: random.bool(), cuts: random.bool() });
        self
    }

    /// Adds documents, in some worlds.
    fn with_documents(mut self, random: &mut Rng) -> Self {
        if self.churns_names || random.u32(0..3) > 0 {
            return self;
        }
        let scheme = if random.u32(0..3) == 0 { SchemeId::PARTITION_KEY } else { SchemeId::ID };
        let options = ChangesOptions::default().shards(random.u32(1..=4)).scheme(scheme);
        self.documents =
            Some(DocumentPlan { ids: random.u64(1..=6), options, misuses: random.u32(0..4) == 0 });
        self
    }

    /// Adds the behaviour of subscribers. Some worlds also get everything that exposes subscribers to names that come and go: few names,
    /// short retention, small pages and short rings.
    fn with_subscribers(mut self, random: &mut Rng) -> Self {
        self.subscribers = SubscriberPlan {
            replaces: random.u32(0..3) == 0,
            restarts: random.u32(0..3) == 0,
            has_callbacks: random.u32(0..3) == 0,
            is_slow: random.u32(0..3) == 0,
            wants_deletions: random.u32(0..4) == 0,
        };
        self.churns_names = random.u32(0..4) == 0;
        if self.churns_names {
            self.names.truncate(random.usize(1..=5));
            self.think_max_ms = [5, 50, 300][random.usize(0..3)];
            self.processes[0].dispatcher = true;
            self.dispatcher.ring_rows_max = [1, 2, 1_000][random.usize(0..3)];
            self.dispatcher.catch_up_rows_max = random.usize(1..=2);
            self.dispatcher.page_rows_max = random.usize(1..=5);
            self.janitor.interval = Duration::from_millis(random.u64(20..=150));
            self.janitor.tombstone_retention = Duration::from_millis(random.u64(1..=200));
            self.subscribers.is_slow |= random.bool();
        }
        self.fold_size_max = (random.u32(0..4) == 0).then(|| random.usize(6_000..9_000));
        self
    }

    /// Returns the probability of `fault`, wherever it can strike.
    pub fn rate(&self, fault: Fault) -> f64 {
        self.rates.iter().find(|(of, _)| *of == fault).map_or(0.0, |(_, rate)| *rate)
    }
}

/// Draws the names of databases: some share a prefix, some a suffix.
fn names(random: &mut Rng) -> Vec<DbName> {
    let all = ["a", "b", "shop/a", "shop/b", "shop/_replicator", "x/_replicator", "c", "d", "e", "f"];
    let some = &all[..random.usize(1..=all.len())];
    some.iter().map(|name| DbName::new(name).expect("it is short")).collect()
}

/// Draws the processes: nodes with some of the roles, a separate producer, and an operator.
fn processes(random: &mut Rng, nodes: usize, has_janitor: bool) -> Vec<ProcessPlan> {
    let mut processes: Vec<_> = (0..nodes)
        .map(|_| ProcessPlan {
            notifier: random.u32(0..4) > 0,
            dispatcher: random.bool(),
            janitor: has_janitor && random.bool(),
            producers: random.u32(0..=1),
            operator: false,
            follower: random.u32(0..4) == 0,
            ..ProcessPlan::default()
        })
        .collect();
    // The first process has every role that at least one process must have.
    processes[0].notifier = true;
    processes[0].janitor = has_janitor;
    processes.push(ProcessPlan { producers: random.u32(1..=2), ..ProcessPlan::default() });
    if random.u32(0..3) > 0 {
        processes.push(ProcessPlan { operator: true, ..ProcessPlan::default() });
    }
    processes
}

/// Draws the rates of the faults that `is_meant` selects: most never strike, others rarely to often, and those of watches sometimes always.
fn rates(random: &mut Rng, is_meant: fn(Fault) -> bool) -> Vec<(Fault, f64)> {
    let mut rates = Vec::new();
    for fault in Fault::ALL.iter().copied().filter(|fault| is_meant(*fault)) {
        // The lowest and the highest rate of a fault that strikes in this world.
        let (least, most): (f64, f64) = match fault {
            Fault::Crash => (0.000_1, 0.003),
            Fault::CrashBeforeAnswer => (0.000_5, 0.01),
            Fault::PowerLoss | Fault::DiskFails | Fault::NoRoom => (0.001, 0.02),
            Fault::Pause | Fault::ClockJump => (0.02, 0.5),
            Fault::ReadTimedOut => (0.000_1, 0.005),
            Fault::WatchDropped | Fault::WatchLate | Fault::WatchSpurious => (0.05, 3.0),
            Fault::WatchRefused | Fault::WatchFailed => (0.02, 2.0),
            Fault::HandlerError | Fault::HandlerPanic => (0.005, 0.2),
            Fault::HandlerHangs | Fault::HandlerLeavesTask => (0.005, 0.1),
            _ => (0.001, 0.1),
        };
        let rate = (least * (most / least).powf(random.f64())).min(1.0);
        if random.u32(0..5) < 2 {
            rates.push((fault, rate));
        }
    }
    rates
}
