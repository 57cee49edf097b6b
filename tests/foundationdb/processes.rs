//! Roles in several processes; one of them is killed.

use std::time::{Duration, Instant};

use notibus::Bus;

use crate::{
    child::Child,
    common::{dice, eager, joined, until, within},
    fixture,
    load::{Load, Totals, until_folded},
};

/// A notifier that is killed under load is replaced by another one: nothing is lost or counted twice, and the dispatcher of a third process
/// delivers everything.
pub(crate) async fn a_killed_notifier_loses_nothing() {
    let file = fixture::shared();
    let prefix = fixture::prefix("processes");
    let store = fixture::open(&file).await;
    let bus = fixture::bus(&store, &prefix).await;
    let mut dispatcher = Child::start("dispatcher", &file, &prefix);
    assert_eq!(dispatcher.line().await, "ready");
    let load = Load::start(&store, &bus, &fixture::prefix("markers"));
    for _ in 0..3 {
        let mut notifier = Child::start("notifier", &file, &prefix);
        assert_eq!(notifier.line().await, "ready");
        // This delivery shows that the notifier folds.
        dispatcher.line().await;
        load.advance(100).await;
        notifier.kill();
        load.advance(20).await;
    }
    let mut last = Child::start("notifier", &file, &prefix);
    assert_eq!(last.line().await, "ready");
    let totals = load.stop().await;
    until_folded(&bus, &totals).await;
    let mut delivered = Totals::new();
    while delivered != totals {
        let line = dispatcher.line().await;
        let (name, count) = line.split_once(' ').expect("a name and a count");
        let count = count.parse().expect("a count");
        let before = delivered.insert(name.to_owned(), count);
        assert!(before < Some(count), "{name} went from {before:?} to {count}");
    }
    assert_eq!(bus.stats().folds, 0, "this process has folded nothing");
    last.end();
    dispatcher.end();
}

/// A process that ends in the middle of its work exits cleanly once its network is stopped.
pub(crate) async fn a_process_exits_cleanly() {
    let file = fixture::shared();
    for _ in 0..5 {
        let mut child = Child::start("client", &file, b"");
        assert_eq!(child.line().await, "ready");
        child.end();
    }
}

/// A history that is replayed on a cluster is folded and delivered exactly, and another process can read the feed.
#[cfg(feature = "cli")]
pub(crate) async fn a_history_is_replayed_on_a_cluster() {
    use std::{collections::BTreeMap, process::Command};

    use clap::Parser;

    let store = format!("fdb:{}", crate::cluster::text(&fixture::shared()));
    let notibus = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_notibus")).args(arguments).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), errors)
    };
    let sample = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/replay/sample.tsv.gz");
    let options = ["replay", sample, "--notifiers", "2", "--writers", "32", "--store", &store];
    let options = crate::replay::Options::parse_from(options);
    let counts = serde_json::json!({ "created": 72, "deleted": 31, "updated": 3267, "ddoc_updated": 331 });
    for _ in 0..2 {
        let report = Box::pin(crate::replay::run(&options)).await.unwrap();
        assert_eq!(report["differences"], serde_json::json!([]));
        assert_eq!((&report["recorded"], &report["folded"]), (&counts, &counts));
    }
    let (code, printed, errors) = notibus(&["tail", "--json", "--store", &store]);
    assert_eq!(code, Some(0), "{errors}");
    let mut rows = BTreeMap::new();
    for line in printed.lines() {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        rows.insert(row["db"].to_string(), row["deleted_at"].is_null());
    }
    assert_eq!((rows.len(), printed.lines().count()), (67, 67));
    assert_eq!(rows.values().filter(|lives| **lives).count(), 41);
    let (code, _, errors) = notibus(&["tail", "--store", "fdb:/no/such/file"]);
    assert_eq!(code, Some(2), "{errors}");
}

/// Regression: the example recorded an update of an instance that it had just drawn, which was stale from the second run on, so it worked
/// only once on a cluster, and then waited forever.
///
/// Then the example runs in processes that are killed at random moments: each leaves behind a node with its leases, and perhaps a commit
/// that it does not know about. The next processes continue from there, and the database is created only once.
pub(crate) async fn a_foreign_layer_runs_any_number_of_times_and_survives_kills() {
    let file = fixture::shared();
    let store = fixture::open(&file).await;
    let path = crate::cluster::text(&file).to_owned();
    let first = within("the first run", Box::pin(crate::layer::run(&path))).await.unwrap();
    assert!(first.contains("orders created"), "{first}");
    let mut longest = Duration::ZERO;
    for _ in 0..2 {
        let began = Instant::now();
        let again = within("another run", Box::pin(crate::layer::run(&path))).await.unwrap();
        assert!(again.contains("orders updated") && !again.contains("created"), "{again}");
        longest = began.elapsed();
    }
    let mut dice = dice();
    for _ in 0..8 {
        let child = Child::start("layer", &file, b"");
        let moment = longest.mul_f64(2.0 * dice.f64());
        tokio::time::sleep(moment).await;
        child.kill();
    }
    let mut last = Child::start("layer", &file, b"");
    let delivered = last.line().await;
    assert!(delivered.contains("orders updated") && !delivered.contains("created"), "{delivered}");
    last.end();
    let bus = Bus::open_existing(&store, b"layer-example/").await.unwrap();
    // The last delivery may be for an event of a killed process. In that case the event of the last process waits for the next notifier.
    let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    until("all to be folded", async || bus.is_drained().await.unwrap()).await;
    notifier.shutdown().await.unwrap();
    let row = bus.feed().newest(&"orders".parse().unwrap()).await.unwrap().unwrap();
    let [created, deleted, updated, _] = row.totals.lanes();
    println!("{updated} updates");
    assert_eq!((created, deleted), (1, 0));
    assert!(updated >= 4, "those that were delivered, and perhaps those of runs that were killed: {updated}");
}
