//! `serve` and commands whose disk takes no more writes: they end with exit code 3 and say so, and everything that they acknowledged is
//! there when there is room again.
//!
//! The failure is a real one: the system refuses to let a file grow over a limit (`ulimit -f`), whose signal is ignored.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    path::Path,
    process::{Command, Output, Stdio},
    thread,
    time::Duration,
};

use crate::served::{self, Served};
use notibus::{Bus, BusOptions, store::Store};
use serde_json::Value;

/// The beginning of the last line that a process prints if its disk fails while it has the store open.
const LAST_LINE: &str = "notibus: the store takes no more writes: ";

/// Returns the command in a process whose files cannot become larger than `kilobytes`.
fn limited(kilobytes: u32) -> Command {
    // The shell counts blocks of 512 bytes.
    let script = format!("trap '' XFSZ; ulimit -f {}; exec \"$0\" \"$@\"", 2 * kilobytes);
    let mut command = Command::new("sh");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_notibus")]);
    command
}

/// Runs `command` with these arguments and this input; returns its exit code, its standard output and its standard error.
fn run(mut command: Command, args: &[&str], input: &str) -> (Option<i32>, String, String) {
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let Output { status, stdout, stderr } = thread::scope(|scope| {
        // A command that fails does not read all of its input.
        scope.spawn(move || drop(stdin.write_all(input.as_bytes())));
        child.wait_with_output().unwrap()
    });
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// Runs a command without a limit on file sizes, which must succeed; returns what it printed.
fn printed(args: &[&str], input: &str) -> String {
    let (code, printed, said) = run(served::notibus(), args, input);
    assert_eq!(code, Some(0), "{args:?}: {said}");
    printed
}

/// Asserts that the last line besides the log is the only one about the failed store, and says what to do.
fn assert_last_line(said: &str) {
    let lines: Vec<_> = said.lines().filter(|line| line.starts_with("notibus: ")).collect();
    assert_eq!(lines.iter().filter(|line| line.starts_with(LAST_LINE)).count(), 1, "{said}");
    let last = lines.last().unwrap();
    assert!(last.starts_with(LAST_LINE) && last.contains("make room, and start again"), "{said}");
}

/// Makes an empty bus in `folder`. Returns the folder as a store.
fn new_bus(folder: &Path) -> String {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        Bus::open(&Store::open_dir(folder).unwrap(), BusOptions::default()).await.unwrap();
    });
    format!("dir:{}", folder.display())
}

/// Returns the rows of the feed by database, once everything is folded.
fn rows(store: &str) -> BTreeMap<String, Value> {
    let served = Served::start(&["--store", store], None);
    while !served.get("/_notibus/status").contains("\"is_drained\":true") {
        thread::sleep(Duration::from_millis(20));
    }
    assert!(served.stop());
    let lines = printed(&["tail", "--json", "--store", store], "");
    let rows = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    rows.map(|row| (row["db"].as_str().unwrap().to_owned(), row)).collect()
}

/// When the disk fails, the answer to the request that hits the failure races with the exit of the process, which nothing tested.
#[test]
fn a_server_ends_with_3_and_has_what_it_has_acknowledged() {
    let parent = tempfile::tempdir().unwrap();
    let store = format!("dir:{}", parent.path().join("store").display());
    let mut log = tempfile::NamedTempFile::new().unwrap();
    let limit = || limited(200);
    let served = Served::start_by(limit(), &["--store", &store], None, log.reopen().unwrap().into());
    let post = |number: u32| {
        let body =
            format!(r#"[{{"db":"one-{number}","type":"created"}},{{"db":"two-{number}","type":"created"}}]"#);
        served.try_ask(&format!(
            "POST /_notibus/events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        ))
    };
    let (mut acknowledged, mut refused) = (0, None);
    while refused.is_none() {
        match post(acknowledged) {
            Ok(answer) if answer.starts_with("HTTP/1.1 201 ") => acknowledged += 1,
            other => refused = Some(other),
        }
        assert!(acknowledged < 10_000, "nothing limits it");
    }
    // The process may end before it can answer.
    if let Some(Ok(answer)) = refused
        && !answer.is_empty()
    {
        assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("\"store_failed\""), "{answer}");
    }
    assert_eq!(served.wait(), Some(3));
    let mut said = String::new();
    log.read_to_string(&mut said).unwrap();
    assert_last_line(&said);
    assert!(acknowledged > 10, "{acknowledged}: {said}");

    // The service is restarted while the disk is still full. It must not exit with code 2, after which a supervisor would give up.
    // Regression: `serve` reported a failure to open the store as bad input, so its exit code was 2.
    let serve = ["serve", "--listen", "127.0.0.1:0", "--store", &store];
    let (code, _, said) = run(limited(1), &serve, "");
    assert!(code == Some(3) && said.contains("cannot open the store at "), "{code:?}: {said}");
    let (code, _, said) = run(limited(1), &["record", "a", "--store", &store], "");
    assert!(code == Some(3) && said.contains("cannot open the store at "), "{code:?}: {said}");

    // The log of the service may be on the same disk. Regression: a log line that could not be written caused a panic with exit code 101.
    let log = parent.path().join("log");
    fs::write(&log, [b'x'; 2_048]).unwrap();
    let log = fs::OpenOptions::new().append(true).open(log).unwrap();
    let status = limited(1).args(serve).stdout(Stdio::null()).stderr(log).status().unwrap();
    assert_eq!(status.code(), Some(3));

    let rows = rows(&store);
    let is_there = |name: &str, number: u32| rows.contains_key(&format!("{name}-{number}"));
    for number in 0..acknowledged {
        assert!(is_there("one", number) && is_there("two", number), "{number} of {acknowledged}");
    }
    assert_eq!(is_there("one", acknowledged), is_there("two", acknowledged), "all of a post, or nothing");
}

/// Regression: the command treated an unknown commit as an overload, so it printed "cannot be reached or is overloaded. Try again later.",
/// exited with code 1, and did not report what had been recorded before.
#[test]
fn a_recording_says_what_it_has_recorded_and_can_be_repeated() {
    let parent = tempfile::tempdir().unwrap();
    let store = new_bus(&parent.path().join("store"));
    let events: Vec<_> =
        (0..6_000).map(|n| format!("{{\"db\":\"db-{n}\",\"type\":\"updated\"}}\n")).collect();
    let events = events.concat();
    let (code, printed_then, said) = run(limited(400), &["record", "-", "--store", &store], &events);
    assert_eq!((code, &*printed_then), (Some(3), ""), "{said}");
    assert_last_line(&said);
    let (before, _) = said.split_once(" events were recorded before").unwrap();
    let before: usize = before.rsplit(' ').next().unwrap().parse().unwrap();
    assert!(before.is_multiple_of(1_000) && (1_000..6_000).contains(&before), "{said}");
    let key = said.split("--repeats ").nth(1).unwrap().split(' ').next().unwrap();

    let found = rows(&store).len();
    assert!(found == before || found == before + 1_000, "{found} after {before}: a request as a whole");
    let again = printed(&["record", "-", "--store", &store, "--repeats", key], &events);
    assert_eq!(again, "recorded 6000 events\n");
    let rows = rows(&store);
    assert_eq!(rows.len(), 6_000);
    let doubled: Vec<_> = rows.values().filter(|row| row["totals"]["updated"] != 1).collect();
    assert!(doubled.is_empty(), "{doubled:?}");
}

/// A failed import is begun again on the same store. Until it succeeds, other commands find no bus in the store that looks complete.
#[test]
fn an_import_that_failed_is_begun_again() {
    let parent = tempfile::tempdir().unwrap();
    let path = |name: &str| parent.path().join(name).display().to_string();
    let (old, file) = (served::filled(&parent.path().join("old")), path("bus"));
    printed(&["export", &file, "--store", &old], "");
    fs::write(path("bad"), &fs::read(&file).unwrap()[..1_000]).unwrap();

    let new = format!("dir:{}", path("new"));
    let is_no_bus = || {
        let (code, printed, said) = run(served::notibus(), &["tail", "--store", &new], "");
        assert!(code != Some(0) && printed.is_empty(), "{code:?}: {printed}{said}");
    };
    let (code, _, said) = run(limited(4), &["import", &file, "--store", &new], "");
    assert_eq!(code, Some(3), "{said}");
    assert_last_line(&said);
    is_no_bus();
    for bad in ["bad", "none"] {
        let (code, _, said) = run(served::notibus(), &["import", &path(bad), "--store", &new], "");
        assert_eq!(code, Some(2), "{said}");
        is_no_bus();
    }
    printed(&["import", &file, "--store", &new], "");
    assert_eq!(printed(&["tail", "--store", &new], ""), printed(&["tail", "--store", &old], ""));
}
