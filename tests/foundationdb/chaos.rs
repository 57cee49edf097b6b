//! Three servers on one cluster, clients that post to them and clients that follow them, while everything goes wrong that an operator may
//! meet: no acknowledged event is missing or counted twice, and every follower receives it.
//!
//! `NOTIBUS_CHAOS_SECONDS` sets how long this lasts, and `NOTIBUS_SEED` which disorders occur.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    process::Command,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use notibus::{Bus, BusOptions, Error};
use tempfile::TempDir;
use tokio::task::block_in_place;

use crate::{
    cluster::{Cluster, text},
    fixture,
    served::Served,
};

/// The default time for which things go wrong.
const SECONDS: u64 = 20;

const NODES: usize = 3;

/// The number of clients that post, and the number of databases that each posts to.
const POSTERS: (usize, u64) = (4, 5);

/// How long a client waits for an answer before it tries another server.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// The maximum time for everything to settle afterwards.
const REST_MAX: Duration = Duration::from_mins(3);

/// The disorders that the test causes.
#[derive(Debug, Clone, Copy)]
enum Disorder {
    /// A server is killed and started again.
    Killed,
    /// A server is stopped for a while, as when its machine is suspended.
    Paused,
    /// The process that hands out versions and accepts commits is killed, so the cluster recovers.
    Recovery,
    /// The database is locked for a while.
    Locked,
    /// The storage process is killed and started again.
    StorageAway,
}

const DISORDERS: [Disorder; 5] =
    [Disorder::Killed, Disorder::Paused, Disorder::Recovery, Disorder::Locked, Disorder::StorageAway];

/// The cluster and the servers.
struct Stage {
    cluster: Cluster,
    nodes: Vec<Option<Served>>,
    folder: TempDir,
}

/// The state that the clients share.
struct Shared {
    /// The addresses of the servers.
    at: Mutex<Vec<SocketAddr>>,
    /// Whether posting is over.
    is_over: AtomicBool,
    /// Whether the followers have seen everything.
    is_seen: AtomicBool,
    /// The number of posts that were acknowledged.
    posts: AtomicU64,
    /// The number of times that a follower lost its connection.
    breaks: AtomicU64,
}

impl Shared {
    /// Returns the address of the server `number`, modulo the number of servers.
    fn at(&self, number: usize) -> SocketAddr {
        let at = self.at.lock().unwrap();
        at[number % at.len()]
    }
}

impl Stage {
    fn start() -> Self {
        let mut stage =
            Self { cluster: Cluster::start_apart(), nodes: Vec::new(), folder: tempfile::tempdir().unwrap() };
        for number in 0..NODES {
            let node = stage.serve(number);
            stage.nodes.push(Some(node));
        }
        stage
    }

    fn serve(&self, number: usize) -> Served {
        self.cluster.wait_until_available();
        let log = self.folder.path().join(format!("log {number}"));
        let log = File::options().create(true).append(true).open(log).unwrap();
        let store = format!("fdb:{}", text(&self.cluster.file()));
        Served::start_logging(&["--store", &store, "--timeout", "6s"], None, log.into())
    }

    /// Sends `signal` to a server.
    fn signal(&self, number: usize, signal: &str) {
        let id = self.nodes[number].as_ref().unwrap().id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
    }

    /// Causes one disorder, and ends it after `time`.
    fn disturb(&mut self, disorder: Disorder, number: usize, time: Duration, shared: &Shared) {
        match disorder {
            Disorder::Killed => {
                // Dropping the server kills it.
                self.nodes[number] = None;
                thread::sleep(time);
                let node = self.serve(number);
                shared.at.lock().unwrap()[number] = node.at;
                self.nodes[number] = Some(node);
            }
            Disorder::Paused => {
                self.signal(number, "-STOP");
                thread::sleep(time);
                self.signal(number, "-CONT");
            }
            Disorder::Locked => {
                let uid = self.cluster.lock();
                thread::sleep(time);
                self.cluster.unlock(&uid);
            }
            Disorder::Recovery | Disorder::StorageAway => {
                let server = usize::from(matches!(disorder, Disorder::StorageAway));
                self.cluster.kill_server(server);
                thread::sleep(time);
                self.cluster.restart_server(server);
            }
        }
        self.cluster.wait_until_available();
    }
}

/// Posts `body` to the server at `at`. Returns the status of the answer, if one arrives in time.
fn post(at: SocketAddr, key: &str, body: &str) -> Option<u16> {
    let mut socket = TcpStream::connect_timeout(&at, ANSWER_MAX).ok()?;
    socket.set_read_timeout(Some(ANSWER_MAX)).ok()?;
    let length = body.len();
    write!(
        socket,
        "POST /_notibus/events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nIdempotency-Key: {key}\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .ok()?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer).ok()?;
    answer.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()
}

/// Posts events until posting is over, and repeats each until it is acknowledged. Returns the number of updates of each database.
fn run_poster(shared: &Shared, number: usize, run: u64) -> BTreeMap<String, u64> {
    let mut totals = BTreeMap::new();
    for count in 0.. {
        if shared.is_over.load(Ordering::Relaxed) {
            break;
        }
        let name = format!("chaos-{number}-{}", count % POSTERS.1);
        let kind = if count < POSTERS.1 { "created" } else { "updated" };
        let body = format!(r#"[{{"db":"{name}","type":"{kind}"}}]"#);
        let key = format!("{run:016x}-{number}-{count}");
        let began = Instant::now();
        for attempt in number.. {
            let status = post(shared.at(attempt), &key, &body);
            if status == Some(201) {
                break;
            }
            // A request that may have failed is sent again. A permanent refusal would be a defect.
            assert!(status.is_none_or(|status| status >= 500), "{body}: {status:?}");
            assert!(began.elapsed() < REST_MAX, "{body} is not taken: {status:?}");
            thread::sleep(Duration::from_millis(50));
        }
        *totals.entry(name).or_default() += u64::from(kind == "updated");
        shared.posts.fetch_add(1, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(20));
    }
    totals
}

/// Follows the feed until everything is seen, at the next server whenever a connection ends. Keeps the last position that was received for
/// each database.
fn run_follower(shared: &Shared, number: usize, seen: &Mutex<BTreeMap<String, String>>) {
    let mut since = "0".to_owned();
    for attempt in number.. {
        if follow(shared, shared.at(attempt), &mut since, seen).is_none() {
            shared.breaks.fetch_add(1, Ordering::Relaxed);
        }
        if shared.is_seen.load(Ordering::Relaxed) {
            return;
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// Follows the feed at one server from `since` on. Returns `None` if the connection fails.
fn follow(
    shared: &Shared,
    at: SocketAddr,
    since: &mut String,
    seen: &Mutex<BTreeMap<String, String>>,
) -> Option<()> {
    let mut socket = TcpStream::connect_timeout(&at, ANSWER_MAX).ok()?;
    // A stopped server sends no heartbeats.
    socket.set_read_timeout(Some(ANSWER_MAX)).ok()?;
    let target = format!("/_db_updates?feed=continuous&since={since}&heartbeat=1000");
    write!(socket, "GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n").ok()?;
    let mut lines = BufReader::new(socket).lines();
    let status = lines.next()?.ok()?;
    let status: u16 = status.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()?;
    assert!(status == 200 || status >= 500, "since={since}: {status}");
    if status != 200 {
        return None;
    }
    while !shared.is_seen.load(Ordering::Relaxed) {
        let line = lines.next()?.ok()?;
        if !line.starts_with('{') {
            continue;
        }
        // The end of the connection may cut off a line, which then does not count as received.
        let Ok(row) = serde_json::from_str::<serde_json::Value>(&line) else { continue };
        let (name, seq) = (row["db_name"].as_str()?, row["seq"].as_str()?);
        seq.clone_into(since);
        seen.lock().unwrap().insert(name.to_owned(), seq.to_owned());
    }
    Some(())
}

/// Reads a number from the environment.
fn setting(name: &str) -> Option<u64> {
    Some(std::env::var(name).ok()?.parse().unwrap_or_else(|_| panic!("{name} must be a number")))
}

/// Waits until the rows of all databases have the acknowledged totals, and all followers have received these rows.
async fn until_complete(
    stage: &Stage,
    acknowledged: &BTreeMap<String, u64>,
    followers: &[Mutex<BTreeMap<String, String>>],
) {
    let store = fixture::open(stage.cluster.file()).await;
    let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
    let began = Instant::now();
    loop {
        let mut missing = Vec::new();
        for (name, updates) in acknowledged {
            let row = bus.feed().newest(&name.parse().unwrap()).await;
            let row = match row {
                Ok(row) => row,
                Err(error @ (Error::Store(_) | Error::RetriesExhausted { .. })) => {
                    missing.push(format!("{name}: {error}"));
                    continue;
                }
                Err(error) => panic!("{name}: {error}"),
            };
            let Some(row) = row.filter(|row| (row.totals.created, row.totals.updated) == (1, *updates))
            else {
                let found = bus.feed().newest(&name.parse().unwrap()).await;
                missing.push(format!("{name}: {updates} updates: {found:?}"));
                continue;
            };
            let seq = row.sequence.to_string();
            for (number, follower) in followers.iter().enumerate() {
                let last = follower.lock().unwrap().get(name).cloned();
                // A position that contains more than the sequence begins with it.
                if last.as_ref().is_none_or(|last| !last.starts_with(&seq)) {
                    missing.push(format!("{name} at {seq}: follower {number} was sent {last:?}"));
                }
            }
        }
        if missing.is_empty() {
            return;
        }
        assert!(began.elapsed() < REST_MAX, "{missing:#?}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Servers die, sleep and return; the cluster recovers, is locked, and loses its storage for a while.
pub(crate) async fn nothing_acknowledged_is_missing() {
    let seconds = setting("NOTIBUS_CHAOS_SECONDS").unwrap_or(SECONDS);
    let seed = setting("NOTIBUS_SEED").unwrap_or_else(|| fastrand::u64(..));
    println!("{seconds} s of chaos, NOTIBUS_SEED={seed}");
    let mut dice = fastrand::Rng::with_seed(seed);
    let mut stage = block_in_place(Stage::start);
    let shared = Shared {
        at: Mutex::new(stage.nodes.iter().flatten().map(|node| node.at).collect()),
        is_over: AtomicBool::new(false),
        is_seen: AtomicBool::new(false),
        posts: AtomicU64::new(0),
        breaks: AtomicU64::new(0),
    };
    let followers: Vec<_> = (0..NODES).map(|_| Mutex::default()).collect();
    let runtime = tokio::runtime::Handle::current();
    block_in_place(|| {
        thread::scope(|scope| {
            // All other threads must end, however this one ends.
            struct Over<'a>(&'a Shared);
            impl Drop for Over<'_> {
                fn drop(&mut self) {
                    self.0.is_over.store(true, Ordering::Relaxed);
                    self.0.is_seen.store(true, Ordering::Relaxed);
                }
            }
            let over = Over(&shared);
            let posters: Vec<_> = (0..POSTERS.0)
                .map(|number| {
                    let shared = &shared;
                    scope.spawn(move || run_poster(shared, number, seed))
                })
                .collect();
            for (number, seen) in followers.iter().enumerate() {
                let shared = &shared;
                scope.spawn(move || run_follower(shared, number, seen));
            }
            // In a long run, a node may sleep for longer than its expiry.
            let longest = if seconds > 60 { 14_000 } else { 2_000 };
            let began = Instant::now();
            let mut next = Vec::new();
            let mut met = BTreeMap::<String, u64>::new();
            while began.elapsed() < Duration::from_secs(seconds) || met.len() < DISORDERS.len() {
                if next.is_empty() {
                    next = DISORDERS.to_vec();
                    dice.shuffle(&mut next);
                }
                let disorder = next.pop().unwrap();
                let time = Duration::from_millis(dice.u64(200..longest));
                stage.disturb(disorder, dice.usize(..NODES), time, &shared);
                *met.entry(format!("{disorder:?}")).or_default() += 1;
                thread::sleep(Duration::from_millis(dice.u64(200..2_000)));
            }
            shared.is_over.store(true, Ordering::Relaxed);
            let mut acknowledged = BTreeMap::new();
            for poster in posters {
                acknowledged.extend(poster.join().unwrap());
            }
            let updates: u64 = acknowledged.values().sum();
            runtime.block_on(until_complete(&stage, &acknowledged, &followers));
            let (posts, breaks) =
                (shared.posts.load(Ordering::Relaxed), shared.breaks.load(Ordering::Relaxed));
            println!(
                "{met:?}: {posts} posts acknowledged, {updates} of them updates, none missing; followers were cut off {breaks} times"
            );
            assert!(updates > 0, "something was posted");
            drop(over);
        });
    });
}
