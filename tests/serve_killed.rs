//! `notibus serve` on a folder, killed under load and started again at once: it loses nothing that it has acknowledged, and it delivers as
//! soon as it says that it is ready.
//!
//! Regression: the next process waited until the node of the killed one had expired, so it delivered nothing for 10 s. The time is printed,
//! not asserted: it depends on the machine. `NOTIBUS_KILLS=20` sets the number of kills.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod served;

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use notibus::{Bus, BusOptions, NodeOptions, NotifierOptions, store::Store};
use served::{LIMIT, Served};

/// The default number of kills.
const KILLS: u32 = 3;

/// The number of databases for which events are posted concurrently, each by its own client.
const CLIENTS: usize = 4;

/// The minimum number of acknowledged events of each client before a kill.
const LOAD: u64 = 25;

/// The posts of a client to its database.
#[derive(Debug, Default)]
struct Posted {
    acknowledged: AtomicU64,
    unanswered: AtomicU64,
}

/// Posts an event of `db`, and returns the answer; `None` if there was none.
fn post(at: SocketAddr, db: &str, kind: &str) -> Option<String> {
    let body = format!(r#"[{{"db":"{db}","type":"{kind}"}}]"#);
    let mut socket = TcpStream::connect(at).ok()?;
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    let length = body.len();
    let head = "POST /_notibus/events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n";
    write!(socket, "{head}Content-Length: {length}\r\n\r\n{body}").ok()?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer).ok()?;
    answer.starts_with("HTTP/1.1 201 Created\r\n").then_some(answer)
}

/// Posts updates one at a time, until `is_over`.
fn load(at: SocketAddr, db: &str, posted: &Posted, is_over: &AtomicBool) {
    while !is_over.load(Ordering::Relaxed) {
        let count = if post(at, db, "updated").is_some() { &posted.acknowledged } else { &posted.unanswered };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Starts the server on `folder`, and waits until it is ready; returns when that was.
fn start(folder: &Path) -> (Served, Instant) {
    let served = Served::start(&["--store", &format!("dir:{}", folder.display())], None);
    let began = Instant::now();
    while !served.get("/_notibus/health/ready").starts_with("HTTP/1.1 200 OK\r\n") {
        assert!(began.elapsed() < LIMIT, "it does not get ready");
        thread::sleep(Duration::from_millis(1));
    }
    (served, Instant::now())
}

/// Posts an event of a new database, and waits until a feed delivers it.
fn first_delivery(at: SocketAddr, db: &str) {
    let mut feed = TcpStream::connect(at).unwrap();
    feed.set_read_timeout(Some(LIMIT)).unwrap();
    feed.write_all(
        b"GET /_db_updates?feed=continuous HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    )
    .unwrap();
    assert!(post(at, db, "created").is_some(), "it takes events");
    let begin = format!("{{\"db_name\":\"{db}\",\"type\":\"created\"");
    let mut lines = BufReader::new(feed).lines();
    assert!(lines.any(|line| line.unwrap().starts_with(&begin)), "the feed has ended");
}

/// Returns the number of stored updates of each client's database.
fn stored(folder: &Path) -> Vec<u64> {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let store = Store::open_dir(folder).unwrap();
        let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
        let notifier = bus
            .node(NodeOptions::default())
            .await
            .unwrap()
            .notifier(NotifierOptions::default())
            .await
            .unwrap();
        while !bus.is_drained().await.unwrap() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        notifier.shutdown().await.unwrap();
        let mut updates = Vec::new();
        for client in 0..CLIENTS {
            let name = format!("load-{client}").parse().unwrap();
            updates.push(bus.feed().newest(&name).await.unwrap().unwrap().totals.updated);
        }
        updates
    })
}

#[test]
fn a_killed_server_has_lost_nothing_and_delivers_once_it_is_ready_again() {
    let kills = std::env::var("NOTIBUS_KILLS").map_or(KILLS, |kills| kills.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let posted: Vec<_> = (0..CLIENTS).map(|_| Posted::default()).collect();
    let (mut served, _) = start(folder.path());
    for client in 0..CLIENTS {
        assert!(post(served.at, &format!("load-{client}"), "created").is_some());
    }
    let mut times = Vec::new();
    for kill in 0..kills {
        let is_over = AtomicBool::new(false);
        let goals: Vec<_> =
            posted.iter().map(|posted| posted.acknowledged.load(Ordering::Relaxed) + LOAD).collect();
        let at = served.at;
        thread::scope(|scope| {
            for (client, posted) in posted.iter().enumerate() {
                let is_over = &is_over;
                scope.spawn(move || load(at, &format!("load-{client}"), posted, is_over));
            }
            let began = Instant::now();
            let is_reached =
                |(posted, goal): (&Posted, &u64)| posted.acknowledged.load(Ordering::Relaxed) >= *goal;
            while !posted.iter().zip(&goals).all(is_reached) {
                assert!(began.elapsed() < LIMIT, "it takes no events: {posted:?}");
                thread::sleep(Duration::from_millis(5));
            }
            // The drop sends SIGKILL.
            drop(served);
            is_over.store(true, Ordering::Relaxed);
        });
        let started = Instant::now();
        let (again, ready) = start(folder.path());
        served = again;
        first_delivery(served.at, &format!("first-{kill}"));
        times.push(ready.elapsed());
        println!(
            "kill {kill}: ready after {:?}, first delivery {:?} later",
            ready - started,
            ready.elapsed()
        );
    }
    println!("the longest time to the first delivery: {:?}", times.iter().max());
    assert!(served.stop(), "it ends well");
    for (posted, stored) in posted.iter().zip(stored(folder.path())) {
        let acknowledged = posted.acknowledged.load(Ordering::Relaxed);
        let most = acknowledged + posted.unanswered.load(Ordering::Relaxed);
        assert!((acknowledged..=most).contains(&stored), "{stored} are stored of {posted:?}");
    }
}
