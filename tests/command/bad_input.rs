//! Bad input causes a typed error or an exit code, and changes nothing.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    path::Path,
    process::{Command, Output, Stdio},
    time::Duration,
};

use notibus::{
    Bus, BusOptions, DispatcherOptions, Error, JanitorOptions, NodeOptions, NotifierOptions, StartOptions,
    changes::DocId,
    http::{ApiOptions, ServerOptions},
    node::Role,
    relocation::ExportOptions,
    store::{Isolation, KeyRange, RangeRead, Store},
};
use tokio::{net::TcpListener, runtime::Runtime};

use crate::common::{db, record};

/// Returns all rows of the store.
async fn rows(store: &Store) -> Vec<(Vec<u8>, Vec<u8>)> {
    let all = RangeRead::new(KeyRange::new(Vec::new(), vec![0xff]));
    let page = store.run(async |tx| tx.get_range(&all, Isolation::Snapshot).await).await.unwrap();
    assert!(!page.more);
    page.rows.into_iter().map(|(key, value)| (key.to_vec(), value.to_vec())).collect()
}

fn notibus(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_notibus"));
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Bug: a node checked the options of its dispatcher only after it had joined and taken leases. Fix: it checks all options first.
#[tokio::test]
async fn a_start_that_is_refused_changes_nothing() {
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
    let before = rows(&store).await;
    let options = StartOptions::default;
    for refused in [
        options().node(NodeOptions::default().heartbeat(Duration::from_micros(999))),
        options().dispatcher(DispatcherOptions::default().ring_rows_max(0)),
        options().notifier(Some(NotifierOptions::default().fold_percent(0))),
        options().janitor(Some(JanitorOptions::default().interval(Duration::ZERO))),
    ] {
        assert!(matches!(refused.check(), Err(Error::Invalid { .. })), "{refused:?}");
        assert!(matches!(bus.start(refused).await, Err(Error::Invalid { .. })));
        assert_eq!(rows(&store).await, before);
    }
}

/// Bug: a node could announce a role that shares work without working, so its share of the work was never done. Fix: such roles can only be
/// started.
#[tokio::test]
async fn a_role_that_shares_work_cannot_be_announced() {
    let bus = Bus::open(&Store::memory(), BusOptions::default()).await.unwrap();
    let node = bus.node(NodeOptions::default()).await.unwrap();
    let of_consumer = Role::new("consumer:mailer").unwrap();
    for role in [Role::NOTIFIER, Role::JANITOR, of_consumer] {
        assert!(matches!(node.announce(role.clone()).await, Err(Error::Invalid { .. })), "{role}");
    }
    drop(node.announce(Role::new("consumers").unwrap()).await.unwrap());
}

/// Bug: the limit on ids did not count that each zero byte takes two bytes in keys, so an id of the allowed length made keys of consumers
/// too long for the store.
#[test]
fn zero_bytes_of_a_document_id_count_twice() {
    let half = "\0".repeat(DocId::LEN_MAX / 2);
    DocId::new(&half).unwrap();
    assert!(matches!(DocId::new(&format!("{half}x")), Err(Error::Invalid { .. })));
    DocId::new(&"x".repeat(DocId::LEN_MAX)).unwrap();
}

#[tokio::test]
async fn an_export_with_something_behind_its_end_is_refused() {
    let bus = Bus::open(&Store::memory(), BusOptions::default()).await.unwrap();
    let mut file = Vec::new();
    bus.export(&mut file, ExportOptions::default().while_running(true)).await.unwrap();
    Bus::import(&Store::memory(), b"notibus", &mut &file[..]).await.unwrap();
    file.push(b'\n');
    let store = Store::memory();
    let imported = Bus::import(&store, b"notibus", &mut &file[..]).await;
    assert!(matches!(imported, Err(Error::Invalid { .. })), "{imported:?}");
    assert_eq!(rows(&store).await, []);
}

#[test]
fn an_origin_that_no_browser_sends_is_refused() {
    let address = "127.0.0.1:1".parse().unwrap();
    let check = |origin: &str| ServerOptions::default().cors_origins(vec![origin.to_owned()]).check(address);
    check("https://app.example").unwrap();
    for origin in
        ["https://ex\u{e4}mple.org", "https://app.example\n", "https://app .example", "https://", "x"]
    {
        assert!(check(origin).is_err(), "{origin:?}");
    }
}

/// Bug: `serve` checked the options of the API and the ring, and the prefix, only after it had made the store and joined it, so a refused
/// node held its leases until it expired. Fix: `serve` checks all options first.
#[test]
fn a_serve_that_is_refused_makes_no_store() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("new");
    let store = format!("dir:{}", folder.display());
    let long = "p".repeat(BusOptions::PREFIX_LEN_MAX + 1);
    let bad = [
        ["--heartbeat-max", "0s"],
        ["--rows-kept-max", "0"],
        ["--feeds-per-name-max", "0"],
        ["--prefix", &long],
        ["--host", "http://x"],
    ];
    for args in bad {
        let output =
            notibus(&["serve", "--listen", "127.0.0.1:0", "--store", &store]).args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", said(&output));
        assert!(!folder.exists(), "{args:?}");
    }
}

#[test]
fn an_import_of_what_is_no_export_makes_no_store() {
    let dir = tempfile::tempdir().unwrap();
    let (file, folder) = (dir.path().join("file"), dir.path().join("new"));
    let store = format!("dir:{}", folder.display());
    for bytes in [&b""[..], b"notibus", b"no export at all, but long enough for a header"] {
        fs::write(&file, bytes).unwrap();
        let output = notibus(&["import", file.to_str().unwrap(), "--store", &store]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert!(!folder.exists());
    }
}

/// Starts a node that serves. Returns the node and its URL.
async fn serving(options: ApiOptions) -> (notibus::NodeHandle, String) {
    let bus = Bus::open(&Store::memory(), BusOptions::default()).await.unwrap();
    let running = bus.start(StartOptions::default()).await.unwrap();
    let api = running.api(options).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = running.serve(listener, api.routes(), ServerOptions::default()).await.unwrap();
    (running, format!("http://{at}"))
}

/// Bug: a node with a `timeout_max` below 5 s refused the time for which `tail --follow` asks to wait, so it could not be followed. Fix:
/// the command waits for as long as the node allows.
#[test]
fn a_node_with_a_short_timeout_can_be_followed() {
    let runtime = Runtime::new().unwrap();
    let (running, url) =
        runtime.block_on(serving(ApiOptions::default().timeout_max(Duration::from_millis(100))));
    let mut child = notibus(&["tail", "--follow", "--url", &url]).spawn().unwrap();
    runtime.block_on(async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        record(running.bus().store(), running.bus(), &db("shop", 1), [1, 0, 0, 0]).await;
    });
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().starts_with("SEQ"));
    assert!(lines.next().unwrap().unwrap().contains("shop"));
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Bug: a node answered "overloaded, try again later" to events whose transaction was too large. Fix: it answers 413, with advice.
#[test]
fn too_many_events_for_a_transaction_are_refused_with_advice() {
    let runtime = Runtime::new().unwrap();
    let (_running, url) = runtime.block_on(serving(ApiOptions::default().body_len_max(8 << 20)));
    let event = |n: usize| format!("{{\"db\":\"{n:04}{}\",\"type\":\"created\"}}", "x".repeat(1_020));
    let body = format!("[{}]", (0..1_000).map(event).collect::<Vec<_>>().join(","));
    let answers: Vec<_> = (0..2).map(|_| post(&url, &body)).collect();
    // Events of databases that already exist take more room.
    assert!(answers[1].starts_with("HTTP/1.1 413"), "{answers:?}");
    assert!(answers[1].contains("several requests"), "{answers:?}");
}

/// Posts events, and returns the answer.
fn post(url: &str, body: &str) -> String {
    let at = url.strip_prefix("http://").unwrap();
    let mut stream = std::net::TcpStream::connect(at).unwrap();
    let head = format!(
        "POST /_notibus/events HTTP/1.1\r\nHost: {at}\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Runs `notibus record -` on `lines`.
fn record_lines(dir: &Path, lines: &str) -> Output {
    let mut child = notibus(&["record", "-", "--store", &format!("dir:{}", dir.display())]).spawn().unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

/// Bug: the command split requests only by the number of events, so requests with long names exceeded the limit on bodies. Fix: it also
/// splits by bytes.
#[test]
fn a_thousand_events_of_long_names_can_be_recorded() {
    let dir = tempfile::tempdir().unwrap();
    Runtime::new().unwrap().block_on(async {
        Bus::open(&Store::open_dir(dir.path()).unwrap(), BusOptions::default()).await.unwrap();
    });
    let event = |n: usize| format!("{{\"db\":\"{}{n:04}\",\"type\":\"created\"}}\n", "x".repeat(1_020));
    let lines: String = (0..1_000).map(event).collect();
    for _ in 0..2 {
        let output = record_lines(dir.path(), &lines);
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
        assert!(String::from_utf8_lossy(&output.stdout).contains("recorded 1000 events"));
    }
}

/// Bug: the command printed credentials with `println!`, so it panicked if its output could not be written.
#[cfg(target_os = "linux")]
#[test]
fn a_credential_that_cannot_be_printed_is_a_failure() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = notibus(&["credential", "joe"]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
}
