//! The `notibus` command, as a user calls it: what `replay`, `tail` and `nodes` print, and their exit codes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    io::Write,
    process::{Command, Output, Stdio},
};

use serde_json::Value;

const SAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/replay/sample.tsv.gz");

/// Runs the command with `input` on its standard input.
fn notibus(args: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_notibus"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that refuses its arguments does not read its input.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

/// Runs `replay --json`, which must succeed, and returns what it printed.
fn replay(args: &[&str], input: &str) -> Value {
    let output = notibus(&[&["replay"], args, &["--json"]].concat(), input);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {errors}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Runs a command that must fail, and returns its exit code and its message.
fn failing(args: &[&str], input: &str) -> (Option<i32>, String) {
    let output = notibus(args, input);
    assert!(output.stdout.is_empty(), "{args:?} printed {}", String::from_utf8_lossy(&output.stdout));
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn the_sample_is_replayed_exactly_under_all_options() {
    let dir = tempfile::tempdir().unwrap();
    let store = format!("dir:{}", dir.path().display());
    let counts = serde_json::json!({ "created": 72, "deleted": 31, "updated": 3267, "ddoc_updated": 331 });
    for options in [
        &[][..],
        &["--shards", "1"],
        &["--shards", "16"],
        &["--notifiers", "4"],
        &["--slots", "8"],
        &["--fold-interval-max", "0ms"],
        &["--partitions", "1", "--writers", "1"],
        &["--store", &store, "--writers", "64"],
        // The same folder again: its databases are replaced by those of this run.
        &["--store", &store, "--writers", "64"],
    ] {
        let report = replay(&[&[SAMPLE], options].concat(), "");
        assert_eq!(report["recorded"], counts, "{options:?}");
        assert_eq!(report["folded"], counts, "{options:?}");
        assert_eq!(report["feed"], serde_json::json!({ "live": 41, "tombstones": 26 }), "{options:?}");
        assert_eq!(report["producer_conflicts"], 0, "{options:?}");
        assert_eq!(report["transactions"], 1303, "{options:?}");
        assert_eq!((&report["leases_lost"], &report["nodes_fallen_out"]), (&0.into(), &0.into()));
        let memory = &report["peak_memory_bytes"];
        assert!(memory.as_u64() > Some(1_000_000) || cfg!(not(target_os = "linux")), "{memory}");
    }
}

#[test]
fn a_feed_that_is_resharded_meanwhile_comes_out_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let store = format!("dir:{}", dir.path().display());
    for options in [
        &["--reshard-every", "100"][..],
        &["--reshard-every", "100", "--shards", "64", "--notifiers", "4"],
        &["--reshard-every", "100", "--store", &store, "--writers", "16"],
        // The same folder again: it has a history, and the other number of shards.
        &["--reshard-every", "100", "--store", &store, "--fold-interval-max", "0ms"],
    ] {
        let report = replay(&[&[SAMPLE], options].concat(), "");
        assert_eq!(report["reshards"], 37, "{options:?}: 3,701 events");
        assert_eq!(report["folded"], report["recorded"], "{options:?}");
        assert_eq!(report["feed"], serde_json::json!({ "live": 41, "tombstones": 26 }), "{options:?}");
        assert_eq!(report["producer_conflicts"], 0, "{options:?}");
    }
    let output = notibus(&["topology", "show", "--json", "--store", &store], "");
    let entries = String::from_utf8(output.stdout).unwrap();
    let entries = entries.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let counts: Vec<_> = entries.map(|entry| entry["shards"].as_array().unwrap().len()).collect();
    assert_eq!(counts.len(), 1 + 2 * 37);
    // 4, 8, 4, … 8 of the first run; then 16, 8, … 16.
    assert_eq!([counts[0], counts[1], counts[2], counts[37], counts[38], counts[39]], [4, 8, 4, 8, 16, 8]);
}

#[test]
fn fewer_events_than_would_make_a_reshard_make_none() {
    let report = replay(&["-", "--reshard-every", "3"], "1\t1\tcreate\ta\t\n1\t2\tcreate\tb\t\n");
    assert_eq!(report["reshards"], 0);
    let report = replay(&["-", "--reshard-every", "2"], "1\t1\tcreate\ta\t\n1\t2\tcreate\tb\t\n");
    assert_eq!(report["reshards"], 1);
    let report = replay(&["-"], "1\t1\tcreate\ta\t\n");
    assert_eq!(report["reshards"], 0);
}

#[test]
fn a_dumped_feed_has_one_row_per_database_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("feed.jsonl");
    let history =
        "1\t1\tcreate\ta\t\n1\t1\tupdate\ta\tx\n1\t2\tcreate\tb\t\n1\t3\tddoc\ta\td\n1\t4\tdelete\tb\t\n";
    // What was readable for others is not any more: the file has the names of all databases.
    std::fs::write(&file, "old").unwrap();
    replay(&["-", "--dump-feed", file.to_str().unwrap()], history);
    #[cfg(unix)]
    {
        let mode = std::fs::metadata(&file).unwrap().permissions();
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777, 0o600);
    }
    let text = std::fs::read_to_string(file).unwrap();
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 2);
    assert!(rows[0]["seq"].as_str() < rows[1]["seq"].as_str());
    let row = |db: &str| rows.iter().find(|row| row["db"] == db).unwrap();
    assert_eq!(row("a")["deleted"], false);
    assert_eq!(
        row("a")["totals"],
        serde_json::json!({ "created": 1, "deleted": 0, "updated": 1, "ddoc_updated": 1 })
    );
    assert_eq!(row("b")["deleted"], true);
    assert_eq!(row("b")["instance"].as_str().unwrap().len(), 32);
    assert!(row("b")["kinds"].as_array().unwrap().contains(&"deleted".into()));
}

#[test]
fn a_malformed_row_is_refused_before_anything_is_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let option = format!("dir:{}", store.display());
    let history = "1\t1\tcreate\ta\t\n1\t2\tupdate\tb\tx\n";
    let (code, message) = failing(&["replay", "-", "--store", &option], history);
    assert_eq!(code, Some(2));
    assert!(message.contains("line 2") && message.contains("\"b\" does not exist"), "{message}");
    assert!(!store.exists(), "no store was made");
}

/// Regression: a database that lived from an earlier run made the one of this run, created and deleted at once, count as stale.
#[test]
fn a_folder_of_another_history_can_be_replayed_into() {
    let dir = tempfile::tempdir().unwrap();
    let store = format!("dir:{}", dir.path().display());
    replay(&["-", "--store", &store], "1\t1\tcreate\tx\t\n1\t2\tcreate\ty\t\n");
    let report = replay(&["-", "--store", &store], "1\t1\tcreate\tx\t\n1\t1\tdelete\tx\t\n");
    assert_eq!(report["feed"], serde_json::json!({ "live": 1, "tombstones": 1 }));
    assert_eq!(report["recorded"]["deleted"], 1, "only those of the history are counted");
}

#[test]
fn a_transaction_that_no_store_can_hold_is_named_by_its_line() {
    let rows = (0..60_000).map(|n| format!("1\t2\tcreate\tdb-{n}\t\n"));
    let history: String = ["1\t1\tcreate\tx\t\n".to_owned()].into_iter().chain(rows).collect();
    let (code, message) = failing(&["replay", "-"], &history);
    assert_eq!(code, Some(2));
    assert!(message.contains("line 2") && message.contains("transaction_too_large"), "{message}");
}

#[test]
fn tail_makes_no_store_and_no_bus() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    let (code, message) = failing(&["tail", "--store", &format!("dir:{}", missing.display())], "");
    assert_eq!((code, missing.exists()), (Some(2), false), "{message}");
    let (code, message) = failing(&["tail", "--store", "memory"], "");
    assert_eq!(code, Some(2));
    assert!(message.contains("there is no bus"), "{message}");
}

#[test]
fn bad_arguments_exit_with_2_and_say_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let store = format!("dir:{}", file.display());
    let name = "x".repeat(1025);
    for (args, input, reason) in [
        (&["replay", SAMPLE, "--shards", "0"][..], String::new(), "invalid shards"),
        (&["replay", SAMPLE, "--partitions", "0"], String::new(), "invalid partitions"),
        (&["replay", SAMPLE, "--slots", "0"], String::new(), "invalid slots"),
        (&["replay", SAMPLE, "--notifiers", "0"], String::new(), "--notifiers"),
        (&["replay", SAMPLE, "--reshard-every", "0"], String::new(), "--reshard-every"),
        (&["replay", SAMPLE, "--rate", "0"], String::new(), "--rate"),
        (&["replay", SAMPLE, "--rate", "1e-320"], String::new(), "--rate"),
        (&["replay", SAMPLE, "--dump-feed", "/no such folder/feed"], String::new(), "No such file"),
        (&["replay", SAMPLE, "--store", "disk:x"], String::new(), "--store"),
        (&["replay", SAMPLE, "--store", &store], String::new(), "it is a file"),
        (&["replay", "no such file"], String::new(), "No such file"),
        (&["replay", "-"], "1\t1\tcreate\t\t\n".to_owned(), "line 1: invalid database name: it is empty"),
        (&["replay", "-"], format!("1\t1\tcreate\t{name}\t\n"), "at most 1024 are allowed"),
        (&["tail", "--store", "memory", "--since", "yesterday"], String::new(), "invalid cursor"),
        (&["tail", "--store", &store], String::new(), "it is a file"),
        (&["nodes", "--store", &store], String::new(), "it is a file"),
        (&["nodes", "--store", "memory"], String::new(), "there is no bus"),
        (&["nodes", "--store", "memory", "--watch", "soon"], String::new(), "--watch"),
    ] {
        let (code, message) = failing(args, &input);
        assert_eq!(code, Some(2), "{args:?}: {message}");
        assert!(message.contains(reason), "{args:?}: {message}");
    }
}

#[test]
fn a_store_with_other_partitions_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = format!("dir:{}", dir.path().display());
    replay(&["-", "--store", &store], "1\t1\tcreate\ta\t\n");
    let (code, message) = failing(&["replay", SAMPLE, "--store", &store, "--partitions", "8"], "");
    assert_eq!(code, Some(2));
    assert!(message.contains("partitions = 64"), "{message}");
}

#[test]
fn a_folder_can_be_tailed_after_a_replay_and_from_any_row() {
    let dir = tempfile::tempdir().unwrap();
    let store = format!("dir:{}", dir.path().display());
    replay(&["-", "--store", &store], "1\t1\tcreate\ta\t\n1\t2\tcreate\tb\t\n1\t3\tcreate\tc\t\n");
    let tail = |since: &str| -> Vec<Value> {
        let output = notibus(&["tail", "--json", "--store", &store, "--since", since], "");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    };
    let all = tail("0");
    assert_eq!(all.len(), 3);
    let rest = tail(all[0]["seq"].as_str().unwrap());
    assert_eq!(rest, all[1..]);
    assert!(tail("now").is_empty());
}

/// A killed node leaves its row, until another node finds it dead.
#[test]
fn the_nodes_of_a_folder_are_shown_with_what_they_hold() {
    let dir = tempfile::tempdir().unwrap();
    let store = format!("dir:{}", dir.path().display());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let id = runtime.block_on(async {
        let db = notibus::store::Database::open_dir(dir.path()).unwrap();
        let bus = notibus::Bus::open(&db, notibus::BusOptions::default()).await.unwrap();
        let node = bus.node(notibus::NodeOptions::default()).await.unwrap();
        let _notifier = node.notifier(notibus::NotifierOptions::default()).await.unwrap();
        node.id().to_string()
    });
    drop(runtime);
    let nodes = |more: &[&str]| {
        let output = notibus(&[&["nodes", "--store", &store, "--watch", "50ms"], more].concat(), "");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let text = nodes(&[]);
    let line = text.lines().nth(1).unwrap();
    assert!(text.starts_with("NODE ") && line.starts_with(&id), "{text}");
    assert!(line.contains("  silent for 50ms  notifier  partition 64  2"), "{line}");
    let seen: Value = serde_json::from_str(&nodes(&["--json"])).unwrap();
    assert_eq!((&seen["id"], &seen["lives"]), (&Value::from(id), &Value::from(false)));
    assert_eq!((&seen["roles"][0], &seen["leases"]["partition"]), (&"notifier".into(), &64.into()));

    // A replay waits until the dead one can be replaced, and leaves nothing behind.
    replay(&["-", "--store", &store, "--into-existing"], "1\t1\tcreate\ta\t\n");
    assert_eq!(nodes(&[]), "no node has joined\n");
    assert_eq!(nodes(&["--json"]), "");
}
