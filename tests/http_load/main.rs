//! Opens many feeds at once on a served node: no row is lost, memory stays flat, and the server frees feeds that clients abort or
//! do not read.
//!
//! The tests are small by default. `NOTIBUS_LOAD=full cargo test --release --test http_load -- --nocapture --test-threads 1`
//! measures the numbers in the README.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod attacks;
#[path = "../served/mod.rs"]
mod served;

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use served::{LIMIT, Served};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    runtime::Runtime,
    task::JoinSet,
};

/// The number of databases that are updated all the time.
const DATABASES: usize = 10;

/// How often a new database is created, to measure how long its event takes.
const PROBE_INTERVAL: Duration = Duration::from_millis(100);

/// By how many KiB the memory of the server may grow under full load, once everything that is bounded is full.
const GROWTH_MAX: u64 = 4_096;

/// How many KiB of the server's memory a client that does not read may hold.
const KIB_PER_CLIENT_MAX: u64 = 240;

const FEED: &str = "/_db_updates?feed=continuous&since=0&heartbeat=10000";

/// Returns the small number, or the full one if the variable asks for it.
fn sized<T>(small: T, full: T) -> T {
    if std::env::var("NOTIBUS_LOAD").is_ok_and(|size| size == "full") { full } else { small }
}

fn runtime() -> Runtime {
    rlimit::increase_nofile_limit(u64::MAX).unwrap();
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Returns the memory of a process in KiB.
fn memory(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Returns the processor time of a process, in ticks of 10 ms.
fn ticks(process: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// Opens a feed, and receives its head.
async fn open(at: SocketAddr, target: &str) -> TcpStream {
    open_over(TcpStream::connect(at).await.unwrap(), target).await
}

async fn open_over(mut socket: TcpStream, target: &str) -> TcpStream {
    socket.write_all(format!("GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(tokio::time::timeout(LIMIT, socket.read_u8()).await.unwrap().unwrap());
    }
    assert!(head.starts_with(b"HTTP/1.1 200 OK"), "{}", String::from_utf8_lossy(&head));
    socket
}

/// Posts events on one connection.
struct Poster(TcpStream);

impl Poster {
    async fn post(&mut self, body: &str) {
        let length = body.len();
        let request = format!(
            "POST /_notibus/events HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        self.0.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"}\n") {
            assert!(self.0.read_buf(&mut answer).await.unwrap() > 0);
        }
        assert!(answer.starts_with(b"HTTP/1.1 201"), "{}", String::from_utf8_lossy(&answer));
    }
}

/// What all feeds together have received.
#[derive(Default)]
struct LoadCounts {
    /// When each probe was recorded.
    probes: Vec<OnceLock<Instant>>,
    rows: AtomicU64,
}

/// Reads a feed until the row of the database `end`. Returns how long each probe took, and the last position of each database.
async fn follow(mut socket: TcpStream, seen: Arc<LoadCounts>) -> (Vec<Duration>, HashMap<String, String>) {
    let (mut times, mut last) = (Vec::new(), HashMap::new());
    let (mut bytes, mut rows) = (Vec::with_capacity(16 << 10), 0);
    loop {
        let read = tokio::time::timeout(LIMIT, socket.read_buf(&mut bytes)).await;
        assert!(read.expect("rows come").unwrap() > 0, "the feed is not cut off");
        let Some(end) = bytes.iter().rposition(|&byte| byte == b'\n') else { continue };
        for line in bytes[..end].split(|&byte| byte == b'\n').filter(|line| line.starts_with(b"{\"db_name\""))
        {
            let line = std::str::from_utf8(line).unwrap();
            let mut fields = line.split('"').skip(3).step_by(4);
            let (name, _kind, seq) = (fields.next().unwrap(), fields.next().unwrap(), fields.next().unwrap());
            rows += 1;
            if let Some(probe) = name.strip_prefix("probe") {
                let probe: usize = probe.parse().unwrap();
                times.push(seen.probes[probe].get().unwrap().elapsed());
            }
            let before = last.insert(name.to_owned(), seq.to_owned());
            assert!(before.is_none_or(|before| before.as_str() < seq), "positions grow");
            if name == "end" {
                seen.rows.fetch_add(rows, Ordering::Relaxed);
                return (times, last);
            }
        }
        bytes.drain(..=end);
    }
}

/// Records `rate` events per second for `time`, and the probes of `seen`.
async fn load(poster: &mut Poster, rate: usize, time: Duration, seen: &LoadCounts) {
    let began = Instant::now();
    let (mut recorded, mut probe) = (0, 0);
    while began.elapsed() < time {
        // Send all events that are due by now, so that a slow answer does not lower the rate.
        let due = (began.elapsed().as_millis() as usize * rate / 1_000).saturating_sub(recorded);
        let event = |n| format!("{{\"db\":\"db{}\",\"type\":\"updated\"}}", n % DATABASES);
        let mut body: Vec<_> = (recorded..recorded + due).map(event).collect();
        recorded += due;
        if began.elapsed() >= PROBE_INTERVAL * u32::try_from(probe).unwrap() && probe < seen.probes.len() {
            body.push(format!("{{\"db\":\"probe{probe}\",\"type\":\"created\"}}"));
            // The time is taken before the commit, so that no probe looks faster than it is.
            seen.probes[probe].set(Instant::now()).unwrap();
            probe += 1;
        }
        poster.post(&format!("[{}]", body.join(","))).await;
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    println!("recorded {recorded} events in {:?}", began.elapsed());
}

#[test]
fn all_rows_reach_all_feeds_under_load() {
    let (feeds, rate, time) =
        (sized(50, 2_000), sized(500, 5_000), sized(Duration::from_secs(2), Duration::from_secs(30)));
    // The server keeps a limited number of past rows in memory. The test fills that memory before it measures.
    let rows_kept = sized(256, 16_384);
    let served = Served::start(&["--store", "memory", "--rows-kept-max", &rows_kept.to_string()], None);
    let (at, process) = (served.at, served.id());
    let probes = (time.as_millis() / PROBE_INTERVAL.as_millis()) as usize;
    let seen = Arc::new(LoadCounts {
        probes: (0..probes).map(|_| OnceLock::new()).collect(),
        ..LoadCounts::default()
    });
    let (mut times, mut ends, memories) = runtime().block_on(async {
        let mut readers = JoinSet::new();
        for _ in 0..feeds {
            let socket = open(at, "/_db_updates?feed=continuous&since=now&heartbeat=10000").await;
            readers.spawn(follow(socket, Arc::clone(&seen)));
        }
        let mut poster = Poster(TcpStream::connect(at).await.unwrap());
        println!("{} KiB with {feeds} feeds", memory(process));
        while served.metric("notibus_notifications_total") < rows_kept + rows_kept / 8 {
            load(&mut poster, rate, time / 10, &LoadCounts::default()).await;
        }
        println!("{} KiB after {} rows", memory(process), served.metric("notibus_notifications_total"));
        let watcher = tokio::spawn(async move {
            let mut memories = vec![memory(process)];
            for _ in 0..6 {
                tokio::time::sleep(time / 6).await;
                memories.push(memory(process));
            }
            memories
        });
        load(&mut poster, rate, time, &seen).await;
        // All earlier events are folded before `end`, so their rows come before its row.
        tokio::time::sleep(Duration::from_millis(500)).await;
        poster.post("[{\"db\":\"end\",\"type\":\"created\"}]").await;
        let (mut times, mut ends) = (Vec::new(), Vec::new());
        while let Some(read) = readers.join_next().await {
            let (some, end) = read.unwrap();
            assert_eq!(
                some.len(),
                seen.probes.iter().filter(|probe| probe.get().is_some()).count(),
                "each feed saw each probe"
            );
            times.extend(some);
            ends.push(end);
        }
        (times, ends, watcher.await.unwrap())
    });
    let first = ends.pop().unwrap();
    assert!(ends.iter().all(|end| *end == first), "all feeds know the same of each database");
    times.sort_unstable();
    let percentile = |percent: usize| times[(times.len() - 1) * percent / 100];
    println!(
        "{feeds} feeds, {} rows; from before the commit to the client: p50 {:?}, p99 {:?}, max {:?}",
        seen.rows.load(Ordering::Relaxed),
        percentile(50),
        percentile(99),
        percentile(100)
    );
    println!("memory in KiB, from then on, at each sixth of {time:?}: {memories:?}");
    // The 12,000 rows of the full load would need about 10 MB if the server held them, and two thirds of that at the fourth sample. Memory
    // fluctuates by about 4 MB, so one sample says little: memory that is held would be in all of the last three.
    let (filled, held) = (memories[0], *memories[4..].iter().min().unwrap());
    let growth_max = sized(20_000, GROWTH_MAX);
    assert!(held < filled + growth_max, "{filled} KiB grew to {held} KiB");
}

#[test]
fn what_is_aborted_is_freed_and_what_is_idle_costs_memory_only() {
    let (idle, aborts) = (sized(100, 10_000), sized(300_usize, 10_000));
    let served = Served::start(&["--store", "memory"], None);
    let (at, process) = (served.at, served.id());
    let tasks = served.settled("notibus_tasks");
    runtime().block_on(async {
        let target = "/_db_updates?feed=continuous&since=now&heartbeat=60000";
        drop(open(at, target).await);
        served.until_metric("notibus_http_feeds", 0);
        let before = memory(process);
        let mut sockets = Vec::new();
        for feed in 0..idle {
            // One address may have 8,192 connections. Regression: this test opened all feeds from one, so the full load ended with 503.
            let socket = attacks::connect(&format!("127.0.0.{}", 1 + feed % 4), at).await;
            sockets.push(open_over(socket, target).await);
        }
        assert_eq!(served.metric("notibus_http_feeds"), idle);
        let during = memory(process);
        println!("{idle} idle feeds: {} bytes each", during.saturating_sub(before) * 1_024 / idle);
        let (busy, reads) = (ticks(process), Duration::from_secs(sized(1, 10)));
        tokio::time::sleep(reads).await;
        let spent = ticks(process) - busy;
        println!("{spent} ticks of processor time in {reads:?}");
        // A node without feeds needs one or two ticks a second. If each feed polled every 10 s, there would be a thousand polls a
        // second.
        assert!(spent < 10 * reads.as_secs(), "they do not poll");
        assert_eq!(served.metric("notibus_tasks"), tasks + idle, "one for each connection, and none besides");
        drop(sockets);
    });
    served.until_metric("notibus_http_feeds", 0);
    served.until_metric("notibus_tasks", tasks);
    let before = memory(process);
    runtime().block_on(async {
        for round in 0..aborts {
            let feed = ["continuous", "longpoll", "eventsource"][round % 3];
            drop(open(at, &format!("/_db_updates?feed={feed}&since=now&heartbeat=60000")).await);
        }
    });
    served.until_metric("notibus_http_feeds", 0);
    // No task is left.
    served.until_metric("notibus_tasks", tasks);
    let after = memory(process);
    println!(
        "{aborts} opens and aborts: {before} KiB and {tasks} tasks before, {after} KiB and as many tasks after"
    );
    assert!(after < before + before / 4 + 10_000, "{before} KiB grew to {after} KiB");
}

#[test]
fn who_does_not_read_holds_little_and_is_dropped() {
    stall(FEED, "short names", "some/database", sized(3_000, 20_000));
}

/// Regression: the server built the whole list of databases in memory for each client.
#[test]
fn who_does_not_read_the_list_of_databases_holds_little() {
    stall("/_all_dbs", "the list of databases", "some/database", sized(30_000, 300_000));
}

/// Regression: pages were limited only by row count, so the server held 580 KB for a client that did not read long names.
#[test]
fn who_does_not_read_long_names_holds_little() {
    stall(FEED, "long names", &"x".repeat(1_000), sized(1_000, 5_000));
}

/// Each of these characters takes six bytes in JSON. Regression: the server held 3.1 MB for a client that did not read such names.
#[test]
fn who_does_not_read_escaped_names_holds_little() {
    stall(FEED, "names of control characters", &"\\u0001".repeat(1_000), sized(1_000, 5_000));
}

/// Creates databases whose names begin with `name` in JSON. Many clients then request `target`, and read nothing but the status.
fn stall(target: &str, what: &str, name: &str, databases: u64) {
    let feeds = sized(400_u64, 1_000);
    let served = Served::start(&["--store", "memory", "--write-timeout", "3s"], None);
    let (at, process) = (served.at, served.id());
    runtime().block_on(async {
        let mut poster = Poster(TcpStream::connect(at).await.unwrap());
        for chunk in (0..databases).collect::<Vec<_>>().chunks(100) {
            let event = |n| format!("{{\"db\":\"{name}{n}\",\"type\":\"created\"}}");
            let body: Vec<_> = chunk.iter().map(event).collect();
            poster.post(&format!("[{}]", body.join(","))).await;
        }
        drop(poster);
        while served.metric("notibus_notifications_total") < databases {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let tasks = served.settled("notibus_tasks");
        let before = memory(process);
        let mut sockets = Vec::new();
        for _ in 0..feeds {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.set_recv_buffer_size(4 << 10).unwrap();
            let mut socket = socket.connect(at).await.unwrap();
            socket
                .write_all(format!("GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes())
                .await
                .unwrap();
            sockets.push(socket);
        }
        let began = Instant::now();
        let mut most = before;
        for socket in &mut sockets {
            let mut status = [0; 12];
            socket.read_exact(&mut status).await.unwrap();
            assert_eq!(&status, b"HTTP/1.1 200");
        }
        while served.metric("notibus_tasks") > tasks {
            assert!(began.elapsed() < LIMIT, "they are dropped");
            most = most.max(memory(process));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let held = most.saturating_sub(before);
        println!(
            "{feeds} clients that do not read {what}: {} KiB each, gone after {:?}",
            held / feeds,
            began.elapsed()
        );
        // A client holds a page of 64 KiB of rows, which take 80 KiB in an allocator, and two chunks of 40 KiB: one that is being
        // written and the next one. Its connection and its feed take another 25 KiB. So 400 clients hold less than 100 MB.
        assert!(held < feeds * KIB_PER_CLIENT_MAX, "{held} KiB");
        served.until_metric("notibus_tasks", tasks);
    });
}
