//! Runs attacks by clients that have no credentials, or misuse theirs. Measures what they cost the server and its other clients.
//!
//! The tests assert counts and bounds in bytes. They only print times, which are measured at full size in release mode.

use std::{
    io::Write,
    net::SocketAddr,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    task::{JoinHandle, JoinSet},
};

use crate::{
    Poster, memory, runtime,
    served::{LIMIT, Served, credential},
    sized, ticks,
};

/// Encodes text for Basic with a system command, so that the test does not depend on an encoder of our own.
fn basic(text: &str) -> String {
    let mut child =
        Command::new("base64").arg("-w0").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap()
}

/// Opens a connection from this address of the machine.
pub async fn connect(from: &str, to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(format!("{from}:0").parse().unwrap()).unwrap();
    socket.connect(to).await.unwrap()
}

/// Sends a request. Returns the status of the answer, and how long it took.
async fn timed(from: &str, to: SocketAddr, request: &str) -> (u16, Duration) {
    let began = Instant::now();
    let asked = async {
        let mut socket = connect(from, to).await;
        socket.write_all(request.as_bytes()).await.unwrap();
        let mut head = [0; 12];
        socket.read_exact(&mut head).await.unwrap();
        std::str::from_utf8(&head[9..]).unwrap().parse().unwrap()
    };
    (tokio::time::timeout(LIMIT, asked).await.expect("an answer comes"), began.elapsed())
}

/// Makes a request without a body.
fn request(target: &str, headers: &str) -> String {
    format!("GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n")
}

/// Requests the health of the server again and again, until `stop` becomes true. Returns how long each answer took.
fn watch(at: SocketAddr, stop: &Arc<AtomicBool>) -> JoinHandle<Vec<Duration>> {
    let stop = Arc::clone(stop);
    tokio::spawn(async move {
        let mut times = Vec::new();
        while !stop.load(Ordering::Relaxed) || times.is_empty() {
            let (status, took) = timed("127.0.0.99", at, &request("/_notibus/health/live", "")).await;
            assert_eq!(status, 200);
            times.push(took);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        times
    })
}

/// Returns how many connections of this machine have found the queue of a listener full. Their clients retry after 0.2 s or 1 s.
fn overflows() -> u64 {
    let text = std::fs::read_to_string("/proc/net/netstat").unwrap();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("TcpExt: "));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let mut pairs = names.split(' ').zip(values.split(' '));
    pairs.find(|(name, _)| *name == "ListenOverflows").unwrap().1.parse().unwrap()
}

/// Formats the median, the 99th percentile and the maximum of some times.
fn summary(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    format!("p50 {:?}, p99 {:?}, max {:?} of {}", at(50), at(99), at(100), times.len())
}

/// H1 and H2. Regression: a password check took 19 MB and continued after its client had disconnected, so with 200 guessers a successful
/// log-in took 5.9 s.
#[test]
fn guessers_take_no_memory_and_hold_up_nobody() {
    let (guessers, rounds) = (sized(20_usize, 200), sized(3, 20));
    let (entry, secret) = credential(&["bob"]).unwrap();
    let served = Served::start(&["--store", "memory"], Some(&entry));
    let (at, process) = (served.at, served.id());
    let wrong: Arc<[_]> = ["anna:wrong", "bob:wrong", "carl:wrong"]
        .map(|text| request("/_db_updates?limit=0", &format!("Authorization: Basic {}\r\n", basic(text))))
        .into();
    let right = request("/_db_updates?limit=0", &format!("Authorization: Bearer {secret}\r\n"));
    runtime().block_on(async {
        let stop = Arc::new(AtomicBool::new(false));
        let (before, busy, overflown) = (memory(process), ticks(process), overflows());
        let mut tasks = JoinSet::new();
        for guesser in 0..guessers {
            let (stop, wrong) = (Arc::clone(&stop), Arc::clone(&wrong));
            tasks.spawn(async move {
                let mut tries = 0;
                while !stop.load(Ordering::Relaxed) || tries == 0 {
                    let from = format!("127.2.{}.{}", guesser, 1 + tries % 250);
                    let request = &wrong[(guesser + tries) % wrong.len()];
                    if tries % 2 == 0 {
                        assert_eq!(timed(&from, at, request).await.0, 401);
                    } else {
                        // This client disconnects without reading the answer.
                        connect(&from, at).await.write_all(request.as_bytes()).await.unwrap();
                    }
                    tries += 1;
                }
                tries
            });
        }
        let live = watch(at, &stop);
        let (mut times, mut most) = (Vec::new(), 0);
        for _ in 0..rounds {
            tokio::time::sleep(Duration::from_millis(sized(10, 500))).await;
            let (status, took) = timed("127.0.0.98", at, &right).await;
            assert_eq!(status, 200);
            times.push(took);
            most = most.max(memory(process));
        }
        stop.store(true, Ordering::Relaxed);
        let mut tries = 0;
        while let Some(done) = tasks.join_next().await {
            tries += done.unwrap();
        }
        let held = most.saturating_sub(before) / 1_024;
        println!(
            "H1, H2: right requests beside {guessers} guessers and their {tries} tries: {}; {held} MB, {} ms of processor time, {} found \
             the queue full; live meanwhile: {}",
            summary(times),
            (ticks(process) - busy) * 10,
            overflows() - overflown,
            summary(live.await.unwrap())
        );
        assert!(held < 100, "{held} MB");
    });
}

/// H3. Regression: the server counted the rows of all databases for each answer, so an answer cost more the more databases there were.
#[test]
fn one_row_costs_the_same_however_many_databases_there_are() {
    let (databases, requests) = (sized(2_000_u64, 300_000), sized(50_u32, 2_000));
    let served = Served::start(&["--store", "memory"], None);
    let (at, process) = (served.at, served.id());
    runtime().block_on(async {
        let mut poster = Poster(TcpStream::connect(at).await.unwrap());
        let ask = async |what: &str| {
            let (busy, began) = (ticks(process), Instant::now());
            let mut tasks = JoinSet::new();
            for _ in 0..20 {
                tasks.spawn(async move {
                    for _ in 0..requests / 20 {
                        let (status, _) = timed("127.0.0.1", at, &request("/_db_updates?limit=1", "")).await;
                        assert_eq!(status, 200);
                    }
                });
            }
            while let Some(done) = tasks.join_next().await {
                done.unwrap();
            }
            let spent = (ticks(process) - busy) * 10_000 / u64::from(requests);
            println!(
                "H3: limit=1 {what}: {spent} µs of processor time each, in {:?}",
                began.elapsed() / requests
            );
        };
        let mut recorded = 0;
        for most in [20, databases] {
            while recorded < most {
                let some: Vec<_> = (recorded..most.min(recorded + 5_000))
                    .map(|n| format!("{{\"db\":\"db{n}\",\"type\":\"created\"}}"))
                    .collect();
                recorded += some.len() as u64;
                poster.post(&format!("[{}]", some.join(","))).await;
            }
            while served.metric("notibus_notifications_total") < most {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            let stop = Arc::new(AtomicBool::new(false));
            let live = watch(at, &stop);
            ask(&format!("of {most} databases")).await;
            stop.store(true, Ordering::Relaxed);
            println!("H3: live meanwhile: {}", summary(live.await.unwrap()));
        }
    });
}

/// H4: bodies that never end, and compressed bodies that are empty.
#[test]
fn bodies_hold_bounded_memory() {
    let clients = sized(40_usize, 300);
    let served = Served::start(&["--store", "memory"], None);
    let (at, process) = (served.at, served.id());
    runtime().block_on(async {
        let stop = Arc::new(AtomicBool::new(false));
        let (before, mut most, mut sockets) = (memory(process), 0, Vec::new());
        let live = watch(at, &stop);
        let post = "POST /_notibus/events HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1048576\r\n";
        // As many empty gzip members as fit.
        let member = [31, 139, 8, 0, 0, 0, 0, 0, 0, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let empty = member.repeat(1_048_576 / member.len());
        for client in 0..clients {
            let mut socket = connect(&format!("127.3.0.{}", 1 + client % 250), at).await;
            let is_compressed = client % 2 == 0;
            let encoding = if is_compressed { "Content-Encoding: gzip\r\n" } else { "" };
            let body = if is_compressed { empty.clone() } else { vec![b' '; 1_000_000] };
            let head = format!("{post}{encoding}\r\n");
            let send = async {
                socket.write_all(head.as_bytes()).await.ok();
                socket.write_all(&body).await.ok();
            };
            // The server may answer and close the connection before the client has sent everything.
            drop(tokio::time::timeout(Duration::from_millis(50), send).await);
            sockets.push(socket);
            most = most.max(memory(process));
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        most = most.max(memory(process));
        stop.store(true, Ordering::Relaxed);
        let held = most.saturating_sub(before) / 1_024;
        println!(
            "H4: {clients} bodies that do not end: {held} MB; live meanwhile: {}",
            summary(live.await.unwrap())
        );
        assert!(held < 150, "{held} MB");
    });
}

/// H5. Regression: posts that created or deleted the same name conflicted in the store, so some of them were retried for 15 s.
#[test]
fn posts_of_one_name_are_fair() {
    let (clients, posts) = (48, sized(3, 50));
    let served = Served::start(&["--store", "memory"], None);
    let at = served.at;
    runtime().block_on(async {
        let mut tasks = JoinSet::new();
        for _ in 0..clients {
            tasks.spawn(async move {
                let mut poster = Poster(TcpStream::connect(at).await.unwrap());
                let mut times = Vec::new();
                for _ in 0..posts {
                    let began = Instant::now();
                    poster.post("[{\"db\":\"one\",\"type\":\"created\"}]").await;
                    times.push(began.elapsed());
                }
                times
            });
        }
        let mut times = Vec::new();
        while let Some(done) = tasks.join_next().await {
            times.extend(done.unwrap());
        }
        assert_eq!(times.len(), clients * posts);
        println!("H5: {clients} clients that create one name: {}", summary(times));
    });
}

/// A client sends 77,000 requests on one connection, and reads no answers. The server answers as many as fit into the buffers of the
/// connection, and then reads no more requests.
#[test]
fn unread_answers_to_pipelined_requests_hold_bounded_memory() {
    const REQUESTS: usize = 77_000;
    let served = Served::start(&["--store", "memory"], None);
    let (at, process) = (served.at, served.id());
    runtime().block_on(async {
        let before = memory(process);
        let mut socket = connect("127.0.0.1", at).await;
        let requests = "GET /_up HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(REQUESTS);
        // The requests cannot all be sent, because the server stops reading.
        drop(tokio::time::timeout(Duration::from_secs(3), socket.write_all(requests.as_bytes())).await);
        assert_eq!(timed("127.0.0.99", at, &request("/_notibus/health/live", "")).await.0, 200);
        let held = memory(process).saturating_sub(before) / 1_024;
        let answered = tokio::task::block_in_place(|| served.get("/_notibus/metrics"));
        let answered = answered.lines().find(|line| line.contains("route=\"/_up\"")).unwrap().to_owned();
        println!("{REQUESTS} unread pipelined requests: {held} MB; {answered}");
        let answered: usize = answered.rsplit_once(' ').unwrap().1.parse().unwrap();
        assert!(held < 8 && answered < REQUESTS, "{held} MB, {answered} answers");
        drop(socket);
    });
}

/// Regression: each feed with a glob kept up to 10 MB of states of its matcher.
#[test]
fn feeds_with_globs_take_little_memory() {
    let (databases, feeds) = (2_000, sized(20, 100));
    let served = Served::start(&["--store", "memory"], None);
    let (at, process) = (served.at, served.id());
    runtime().block_on(async {
        let mut poster = Poster(TcpStream::connect(at).await.unwrap());
        let mut random = fastrand::Rng::with_seed(7);
        let events: Vec<_> = (0..databases)
            .map(|_| format!(r#"{{"db":"userdb-{:032x}","type":"created"}}"#, random.u128(..)))
            .collect();
        for some in events.chunks(1_000) {
            poster.post(&format!("[{}]", some.join(","))).await;
        }
        let listed = async || {
            let mut socket = TcpStream::connect(at).await.unwrap();
            socket.write_all(request("/_db_updates", "").as_bytes()).await.unwrap();
            let mut answer = String::new();
            socket.read_to_string(&mut answer).await.unwrap();
            answer.matches("userdb-").count()
        };
        while listed().await < databases {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        let before = memory(process);
        let open = (0..feeds).map(async |n| {
            // No name matches, but each makes the matcher create new states.
            let glob = format!("*%5B0-7%5D{}z", "%3F".repeat(20 + n % 10));
            let target = format!("/_db_updates?feed=continuous&since=0&heartbeat=1000&names={glob}");
            let mut feed = crate::open(at, &target).await;
            // Nothing is sent before the first heartbeat, which comes after the rows.
            feed.read_u8().await.unwrap();
            feed
        });
        let open = futures_util::future::join_all(open).await;
        let each = memory(process).saturating_sub(before) / feeds as u64;
        println!("{each} KiB for each of {feeds} feeds with a glob");
        drop(open);
        assert!(each < 1_000, "{each} KiB for each feed");
    });
}
