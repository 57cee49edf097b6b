//! `examples/replay`, which is the main job of the bus: the outcome of a history, whatever the options, and what is refused.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[allow(dead_code, reason = "its `main` prints what `run` returns")]
#[path = "../examples/replay/main.rs"]
mod replay;

use std::{fs, path::Path};

use clap::Parser;
use notibus::{Bus, BusOptions, store::Store};
use replay::Options;
use serde_json::{Value, json};

const SAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/replay/sample.tsv.gz");

fn run(file: &str, options: &[&str]) -> Result<Value, String> {
    let options = Options::parse_from([&["replay", file], options].concat());
    let replayed = tokio::runtime::Runtime::new().unwrap().block_on(replay::run(&options));
    replayed.map_err(|error| error.to_string())
}

/// Runs a replay, whose outcome must match the history. Returns its report.
fn replayed(file: &str, options: &[&str]) -> Value {
    let report = run(file, options).unwrap_or_else(|error| panic!("{options:?}: {error}"));
    assert_eq!(report["differences"], json!([]), "{options:?}");
    report
}

/// Returns the error of a replay that must fail.
fn refused(file: &str, options: &[&str]) -> String {
    run(file, options).unwrap_err()
}

/// Writes this history to a file in `folder`, and returns its path.
fn history(folder: &Path, text: impl AsRef<[u8]>) -> String {
    let path = folder.join("history.tsv");
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn store(folder: &Path) -> String {
    format!("dir:{}", folder.join("store").display())
}

#[test]
fn the_sample_is_replayed_exactly_under_all_options() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let counts = json!({ "created": 72, "deleted": 31, "updated": 3267, "ddoc_updated": 331 });
    for options in [
        &[][..],
        &["--shards", "1"],
        &["--shards", "16"],
        &["--notifiers", "4"],
        &["--slots", "8"],
        &["--fold-interval-max", "0ms"],
        &["--partitions", "1", "--writers", "1"],
        &["--rate", "10000"],
        &["--store", &store, "--writers", "64"],
        // The same folder again: its databases are replaced by those of this run.
        &["--store", &store, "--writers", "64"],
    ] {
        let report = replayed(SAMPLE, options);
        assert_eq!(report["recorded"], counts, "{options:?}");
        assert_eq!(report["folded"], counts, "{options:?}");
        assert_eq!(report["feed"], json!({ "live": 41, "tombstones": 26 }), "{options:?}");
        assert_eq!(report["producer_retries"], 0, "{options:?}");
        assert_eq!(report["transactions"], 1303, "{options:?}");
        assert_eq!((&report["leases_lost"], &report["nodes_dropped_out"]), (&0.into(), &0.into()));
        assert!(report["latency_us"]["p50"].as_u64() <= report["latency_us"]["max"].as_u64());
    }
}

#[test]
fn a_feed_that_is_resharded_meanwhile_comes_out_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    for options in [
        &["--reshard-every", "100"][..],
        &["--reshard-every", "100", "--shards", "64", "--notifiers", "4"],
        &["--reshard-every", "100", "--store", &store, "--writers", "16"],
        // The same folder again: it has a history, and the number of shards that the previous run left.
        &["--reshard-every", "100", "--store", &store, "--fold-interval-max", "0ms"],
    ] {
        let report = replayed(SAMPLE, options);
        assert_eq!(report["reshards"], 37, "{options:?}: 3,701 events");
        assert_eq!(report["feed"], json!({ "live": 41, "tombstones": 26 }), "{options:?}");
    }
    let topology = tokio::runtime::Runtime::new().unwrap().block_on(async {
        let db = Store::open_dir(folder.path().join("store")).unwrap();
        Bus::open_existing(&db, b"notibus").await.unwrap().feed().topology().await.unwrap()
    });
    let counts: Vec<_> = topology.iter().map(|entry| entry.shards.len()).collect();
    assert_eq!(counts.len(), 1 + 2 * 37);
    // The first run has 4, 8, 4, … 8; the second one 16, 8, … 16.
    assert_eq!([counts[0], counts[1], counts[2], counts[37], counts[38], counts[39]], [4, 8, 4, 8, 16, 8]);
}

#[test]
fn fewer_events_than_would_make_a_reshard_make_none() {
    let folder = tempfile::tempdir().unwrap();
    let file = history(folder.path(), "1\t1\tcreate\ta\t\n1\t2\tcreate\tb\t\n");
    assert_eq!(replayed(&file, &["--reshard-every", "3"])["reshards"], 0);
    assert_eq!(replayed(&file, &["--reshard-every", "2"])["reshards"], 1);
    assert_eq!(replayed(&file, &[])["reshards"], 0);
}

#[test]
fn rows_of_one_number_form_a_transaction_while_they_follow_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let rows = "1\t1\tcreate\ta\t\n1\t1\tupdate\ta\tx\n2\t2\tcreate\tb\t\n2\t1\tddoc\ta\td\n";
    let report = replayed(&history(folder.path(), rows), &[]);
    assert_eq!(report["transactions"], 3);
    assert_eq!(report["recorded"], json!({ "created": 2, "deleted": 0, "updated": 1, "ddoc_updated": 1 }));
}

#[test]
fn a_dumped_feed_has_one_row_per_database_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let rows =
        "1\t1\tcreate\ta\t\n1\t1\tupdate\ta\tx\n1\t2\tcreate\tb\t\n1\t3\tddoc\ta\td\n1\t4\tdelete\tb\t\n";
    let dump = folder.path().join("feed.jsonl");
    replayed(&history(folder.path(), rows), &["--dump-feed", dump.to_str().unwrap()]);
    let text = fs::read_to_string(dump).unwrap();
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 2);
    assert!(rows[0]["seq"].as_str() < rows[1]["seq"].as_str());
    let row = |db: &str| rows.iter().find(|row| row["db"] == db).unwrap();
    assert_eq!(row("a")["deleted"], false);
    assert_eq!(row("a")["totals"], json!({ "created": 1, "deleted": 0, "updated": 1, "ddoc_updated": 1 }));
    assert_eq!(row("b")["deleted"], true);
    assert_eq!(row("b")["instance"].as_str().unwrap().len(), 32);
    assert!(row("b")["kinds"].as_array().unwrap().contains(&"deleted".into()));
}

#[test]
fn a_malformed_row_is_refused_before_anything_is_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let name = "x".repeat(1025);
    for (text, reason) in [
        ("1\t1\tcreate\ta\t\nx\n", "line 2: it has 1 columns instead of 5"),
        ("one\t1\tcreate\ta\t\n", "line 1: \"one\" is not a number of seconds"),
        ("1\t-1\tcreate\ta\t\n", "line 1: \"-1\" is not a transaction number"),
        ("1\t1\tdrop\ta\t\n", "line 1: op \"drop\" is none of create, delete, update and ddoc"),
        ("1\t1\tcreate\t\t\n", "line 1: invalid database name: it is empty"),
        (&format!("1\t1\tcreate\t{name}\t\n"), "at most 1024 are allowed"),
        ("1\t1\tcreate\ta\t\n1\t2\tupdate\tb\tx\n", "line 2: \"b\" does not exist, so nothing else"),
        ("1\t1\tcreate\ta\t\n1\t1\tcreate\ta\t\n", "line 2: \"a\" is created although it exists"),
        ("1\t1\tcreate\ta\t\n1\t2\tdelete\ta\t\n1\t3\tdelete\ta\t\n", "line 3: \"a\" does not exist"),
    ] {
        let said = refused(&history(folder.path(), text), &["--store", &store]);
        assert!(said.contains(reason), "{said}");
    }
    let said = refused(&history(folder.path(), b"1\t1\tcreate\ta\t\n1\t1\tupdate\ta\t\xff\n"), &[]);
    assert!(said.contains("line 2: ") && said.contains("UTF-8"), "{said}");
    assert!(!folder.path().join("store").exists(), "no store was made");
}

#[test]
fn bad_options_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = format!("dir:{}", history(folder.path(), ""));
    for (options, reason) in [
        (["--shards", "0"], "invalid shards"),
        (["--partitions", "0"], "invalid partitions"),
        (["--slots", "0"], "invalid slots"),
        (["--dump-feed", "/no such folder/feed"], "No such file"),
        (["--store", "disk:x"], "--store"),
        (["--store", &file], "it is a file"),
    ] {
        let said = refused(SAMPLE, &options);
        assert!(said.contains(reason), "{said}");
    }
    assert!(refused("no such file", &[]).contains("No such file"));
    for bad in [["--notifiers", "0"], ["--reshard-every", "0"], ["--rate", "0"], ["--writers", "0"]] {
        assert!(Options::try_parse_from([&["replay", SAMPLE][..], &bad].concat()).is_err(), "{bad:?}");
    }
}

/// Regression: a database from an earlier run still existed, so the one of this run, created and deleted at once, counted as stale.
#[test]
fn a_folder_of_another_history_can_be_replayed_into() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    replayed(&history(folder.path(), "1\t1\tcreate\tx\t\n1\t2\tcreate\ty\t\n"), &["--store", &store]);
    let again = history(folder.path(), "1\t1\tcreate\tx\t\n1\t1\tdelete\tx\t\n");
    let report = replayed(&again, &["--store", &store]);
    assert_eq!(report["feed"], json!({ "live": 1, "tombstones": 1 }));
    assert_eq!(report["recorded"]["deleted"], 1, "only those of the history are counted");
    let said = refused(SAMPLE, &["--store", &store, "--partitions", "8"]);
    assert!(said.contains("partitions = 64"), "{said}");
}

/// Regression: a replay into a bus in use deleted existing databases whose names occur in the history, created them again, and reported
/// success.
#[test]
fn a_bus_that_no_replay_has_made_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let db = Store::open_dir(folder.path().join("store")).unwrap();
        Bus::open(&db, BusOptions::default()).await.unwrap();
    });
    let said = refused(SAMPLE, &["--store", &store]);
    assert!(said.contains("no replay has made the bus") && said.contains("--prefix"), "{said}");
    replayed(SAMPLE, &["--store", &store, "--prefix", "trial"]);
}

#[test]
fn a_transaction_that_no_store_can_hold_is_named_by_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let rows = (0..60_000).map(|n| format!("1\t2\tcreate\tdb-{n}\t\n"));
    let text: String = ["1\t1\tcreate\tx\t\n".to_owned()].into_iter().chain(rows).collect();
    let said = refused(&history(folder.path(), text), &[]);
    assert!(said.contains("line 2") && said.contains("transaction_too_large"), "{said}");
}
