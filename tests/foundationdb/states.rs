//! The states of a cluster and of a bus, and what a node reports in each: `docs/foundationdb.md` has the same table.
//!
//! Each cluster has two processes: the second one stores the data, the first one does everything else. A state begins with a new node that
//! works, and ends with a node that works again. States spend most of their time waiting, so several clusters are in use at once.

use std::{
    future::Future,
    thread,
    time::{Duration, Instant},
};

use notibus::{
    Bus, BusOptions, Db, DbInstance, NodeOptions, NotifierOptions,
    store::{
        Store, StoreError,
        testing::{Attempt, CommitFault, Faults, Operation},
    },
};
use tokio::{runtime::Handle, task::block_in_place};

use crate::{
    cluster::Cluster,
    stage::{ALL_COMMANDS, COMMANDS, Follower, NO_ANSWER, Stage, answer_to, status_of},
};

/// The prefix of the keys of leases, including the default prefix of the bus.
const LEASES: &[u8] = b"notibus\x15\x0b";

/// The key of a topology entry of the notification feed that is newer than all others.
const TOPOLOGY: &str = r"notibus\x15\x07\x01n\x00\x14\x33\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff";

/// Rows of names of this length fill every buffer between a node and a client.
const LONG_NAME: usize = 1_000;

const LONG_NAMES: usize = 8_000;

/// The number of clusters that are in use at once.
const LANES: usize = 4;

/// Ends a state. If the bus of the node is gone, this also replaces the node.
type End = Box<dyn FnOnce(&mut Stage)>;

/// A line of the table.
struct State {
    name: &'static str,
    /// Puts the stage into the state, and returns a function that ends the state.
    begin: fn(&mut Stage) -> End,
    /// The status of `ready`, and a text in its body.
    ready: (&'static str, &'static str),
    posts: &'static str,
    feeds: Feeds,
    /// The exit code of commands, and texts, one of which each command prints.
    commands: (i32, &'static [&'static str]),
    /// The commands to which `commands` applies.
    of: &'static [&'static [&'static str]],
    /// A part of a line of the log. If it is empty, the log may contain anything or nothing; with `None`, no warnings and no errors.
    log: Option<&'static str>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Feeds {
    /// Open feeds get heartbeats, whatever they read, and new ones are refused.
    Wait,
    /// Feeds that wait for new rows get heartbeats; other feeds need the damaged data, and are refused or cut off.
    GoOnOnly,
    /// Feeds get heartbeats and the rows of some databases, and new ones begin.
    GoOnInPart,
    /// Open feeds end, and new ones are refused.
    End,
}

const STATES: [State; 7] = [
    State {
        name: "the database is locked",
        begin: |stage| {
            let uid = stage.cluster.lock();
            Box::new(move |stage| stage.cluster.unlock(&uid))
        },
        ready: ("503", "\"cause\":\"locked\""),
        posts: "503",
        feeds: Feeds::Wait,
        commands: (1, &["locked"]),
        of: &COMMANDS,
        log: Some("trying again"),
    },
    State {
        name: "storage is down",
        begin: |stage| without(stage, &[1]),
        ready: ("503", "\"cause\":\"away\""),
        posts: "503",
        feeds: Feeds::Wait,
        commands: (1, NO_ANSWER),
        of: &ALL_COMMANDS,
        // The heartbeats of the node read nothing, so it remains a member; only its reads wait.
        log: Some(""),
    },
    State {
        name: "all but storage is down",
        begin: |stage| without(stage, &[0]),
        ready: ("503", "\"cause\":\"away\""),
        posts: "503",
        feeds: Feeds::Wait,
        commands: (1, NO_ANSWER),
        of: &ALL_COMMANDS,
        log: Some("dropped out"),
    },
    State {
        name: "everything is down",
        begin: |stage| without(stage, &[0, 1]),
        ready: ("503", "\"cause\":\"away\""),
        posts: "503",
        feeds: Feeds::Wait,
        commands: (1, NO_ANSWER),
        of: &ALL_COMMANDS,
        log: Some("dropped out"),
    },
    State {
        name: "no live notifier owns some partitions",
        begin: |stage| {
            let idle = block_on(notifier_without_leases(stage));
            Box::new(move |_| block_on(idle.end()))
        },
        ready: ("503", "\"cause\":\"unowned\""),
        posts: "201",
        feeds: Feeds::GoOnInPart,
        commands: (0, &[""]),
        of: &COMMANDS,
        log: None,
    },
    // The newest entry, which all roles need, cannot be decoded.
    State {
        name: "the topology is damaged",
        begin: |stage| {
            stage.cluster.cli(&format!("writemode on; set {TOPOLOGY} x"));
            Box::new(|stage| _ = stage.cluster.cli(&format!("writemode on; clear {TOPOLOGY}")))
        },
        ready: ("503", "\"cause\":\"unreadable\""),
        posts: "500",
        feeds: Feeds::GoOnOnly,
        commands: (0, &[""]),
        of: &[&["nodes"]],
        log: Some("corrupt topology"),
    },
    State {
        name: "the bus was wiped",
        begin: |stage| {
            stage.cluster.cli("writemode on; clearrange \"\" \\xff");
            Box::new(|stage| {
                let left = || stage.cluster.cli("getrange \"\" \\xff 1000");
                let before = left();
                thread::sleep(Duration::from_secs(10));
                assert_eq!(left(), before, "nothing is written any more into what is no bus");
                stage.restart_node();
            })
        },
        ready: ("503", "\"cause\":\"gone\""),
        posts: "503",
        feeds: Feeds::End,
        commands: (2, &["there is no bus"]),
        of: &COMMANDS,
        log: Some("start it again"),
    },
];

/// Regressions: `ready` only asked for a read version, so it returned 200 while the storage servers were down and nothing worked, and did
/// not show that a database was locked. Commands waited forever. Posts during an outage got no answer before its end. A node whose bus was
/// wiped said that it was ready, answered that there were no databases, and logged 65 lines a second.
pub(crate) async fn a_node_says_what_the_table_says() {
    let runtime = Handle::current();
    block_in_place(|| {
        thread::scope(|scope| {
            for lane in 0..LANES {
                let runtime = runtime.clone();
                scope.spawn(move || {
                    let _entered = runtime.enter();
                    show(STATES.iter().skip(lane).step_by(LANES));
                });
            }
        });
    });
}

/// Puts a cluster of two processes into each of these states in turn, and checks what the node reports.
fn show<'a>(states: impl Iterator<Item = &'a State>) {
    let mut stage = Stage::start(Cluster::start_apart());
    block_on(record_long_names(&stage));
    for state in states {
        let began = Instant::now();
        stage.restart_node();
        let mut follower = stage.follow();
        stage.works(&mut follower);
        assert_eq!(stage.log.troubles(), [""; 0], "all is well");
        // This feed has begun, and its rows wait until the client reads further.
        let mut loading = Follower::start(&stage, "since=0");
        assert_eq!(status_of(&loading.line()), "200");
        let end = (state.begin)(&mut stage);
        let follower = state.is_shown_by(&stage, follower, loading);
        end(&mut stage);
        let ended = Instant::now();
        let mut follower = follower.unwrap_or_else(|| stage.follow());
        stage.until_ready("200", "\"status\":\"ok\"");
        println!("{}: {:?}, then ready after {:?}", state.name, ended - began, ended.elapsed());
        if state.feeds == Feeds::GoOnInPart {
            follower.until_all_rows();
        }
        stage.works(&mut follower);
    }
    assert!(stage.served.stop(), "it ends in order");
}

impl State {
    /// Asserts that the node behaves as this line of the table says. Returns the follower if its feed is still open.
    fn is_shown_by(&self, stage: &Stage, mut follower: Follower, loading: Follower) -> Option<Follower> {
        println!("{}", self.name);
        let name = self.name;
        follower.seen.clear();
        thread::scope(|scope| {
            let loading = scope.spawn(|| self.is_shown_by_old_rows(loading));
            stage.until_ready(self.ready.0, self.ready.1);
            // A restart helps only if the bus is gone, which the node notices at its next heartbeat.
            stage.until_live(if self.feeds == Feeds::End { "503" } else { "200" });
            let posted = stage.begin_to_post();
            let new = scope.spawn(|| stage.list());
            stage.commands_say(self.of, self.commands.0, self.commands.1);
            let left = if self.feeds == Feeds::End {
                follower.until_end();
                None
            } else {
                follower.until_heartbeat();
                Some(follower)
            };
            assert_eq!(status_of(&answer_to(posted)), self.posts, "{name}");
            let status = match self.feeds {
                Feeds::GoOnInPart => "200",
                Feeds::GoOnOnly => "500",
                Feeds::Wait | Feeds::End => "503",
            };
            assert_eq!(new.join().unwrap(), status, "{name}");
            loading.join().unwrap();
            let left = left.map(|mut follower| {
                follower.until_heartbeat();
                if self.feeds == Feeds::GoOnInPart {
                    while follower.seen.is_empty() {
                        follower.line();
                    }
                }
                follower
            });
            stage.until_ready(self.ready.0, self.ready.1);
            let troubles = stage.log.troubles();
            match self.log {
                Some(text) => {
                    let is_said = text.is_empty() || troubles.iter().any(|line| line.contains(text));
                    assert!(is_said, "{name}: {troubles:#?}");
                }
                None => assert_eq!(troubles, [""; 0], "{name}"),
            }
            assert!(troubles.len() < 10, "{name}: they are few: {troubles:#?}");
            let gone = troubles.iter().filter(|line| line.contains("start it again")).count();
            assert_eq!(gone, usize::from(self.feeds == Feeds::End), "{name}: it is said once: {troubles:#?}");
            left
        })
    }

    /// Asserts what happens to a feed that was still reading older rows, which filled all buffers, when the state began.
    fn is_shown_by_old_rows(&self, mut loading: Follower) {
        match self.feeds {
            Feeds::GoOnOnly => assert!(!loading.until_end(), "{}: it is cut off", self.name),
            // The feed is cut off, or has reached the place where the dispatcher ended.
            Feeds::End => _ = loading.until_end(),
            Feeds::Wait | Feeds::GoOnInPart => loading.until_heartbeat(),
        }
    }
}

/// Kills `servers`. The function that it returns restarts them.
fn without(stage: &mut Stage, servers: &'static [usize]) -> End {
    for server in servers {
        stage.cluster.kill_server(*server);
    }
    Box::new(move |stage| {
        for server in servers {
            stage.cluster.restart_server(*server);
        }
    })
}

/// A notifier that is alive, but gets no leases for its share of the partitions.
struct Idle {
    notifier: notibus::Notifier,
    faults: Faults,
}

impl Idle {
    /// Lets the notifier get its leases, and shuts it down.
    async fn end(self) {
        self.faults.heal();
        self.notifier.shutdown().await.unwrap();
    }
}

async fn notifier_without_leases(stage: &Stage) -> Idle {
    let store = Store::foundationdb(stage.cluster.file()).await.unwrap();
    let faults = Faults::new(&store);
    faults.plan_commits(|attempt: &Attempt| {
        let claims = attempt
            .mutations()
            .any(|done| matches!(done, Operation::Set { key, .. } if key.starts_with(LEASES)));
        claims.then_some(CommitFault::Before(StoreError::TRANSACTION_TIMED_OUT))
    });
    let bus = Bus::open(&faults.store(), BusOptions::default()).await.unwrap();
    let notifier =
        bus.node(NodeOptions::default()).await.unwrap().notifier(NotifierOptions::default()).await.unwrap();
    Idle { notifier, faults }
}

/// Records databases with long names, and waits until they are in the feed.
async fn record_long_names(stage: &Stage) {
    let store = Store::foundationdb(stage.cluster.file()).await.unwrap();
    let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
    let producer = bus.producer();
    let db = |number| {
        let name = format!("{number:04}{}", "x".repeat(LONG_NAME - 4));
        Db::new(name.parse().unwrap(), DbInstance([1; 16]))
    };
    let dbs: Vec<Db> = (0..LONG_NAMES).map(db).collect();
    for some in dbs.chunks(400) {
        let create = async |tx| {
            for db in some {
                producer.created(&tx, db);
            }
            Ok(())
        };
        store.run(create).await.unwrap();
    }
    crate::common::until("all to be folded", async || bus.is_drained().await.unwrap()).await;
}

/// Waits for `future` on a thread that may block.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    Handle::current().block_on(future)
}
