//! The command `notibus triggers`, as a user calls it: what it prints, what it refuses, and its exit codes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    path::Path,
    process::{Command, Output},
    time::Duration,
};

use notibus::{
    Bus, BusOptions, Db, DbInstance, DispatcherOptions, NodeOptions, NotifierOptions,
    jobs::{IndexBuild, TaskResult, TriggerOptions, index_trigger},
    store::Database,
};
use serde_json::Value;

/// Runs `notibus triggers` on the store in `folder`.
fn triggers(folder: &Path, args: &[&str]) -> Output {
    let store = format!("dir:{}", folder.display());
    let mut command = Command::new(env!("CARGO_BIN_EXE_notibus"));
    command.arg("triggers").args(args).args(["--store", &store]).output().unwrap()
}

/// The objects that it prints, if it succeeds.
fn objects(folder: &Path, args: &[&str]) -> Vec<Value> {
    let output = triggers(folder, &[args, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A store with a trigger that has built one of two databases.
async fn fill(folder: &Path) {
    let store = Database::open_dir(folder).unwrap();
    let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
    let notifier =
        bus.node(NodeOptions::default()).await.unwrap().notifier(NotifierOptions::default()).await.unwrap();
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let build = |build: IndexBuild| async move {
        let is_bad = build.db.name.as_str() == "bad";
        if is_bad { TaskResult::Err("no disk".into()) } else { Ok(()) }
    };
    let options = TriggerOptions::index("views").debounce(Duration::ZERO).attempts_max(1);
    let trigger = index_trigger(&dispatcher, options, build).await.unwrap();
    bus.cursor("no trigger").unwrap();
    for name in ["good", "bad"] {
        let db = Db::new(name.parse().unwrap(), DbInstance([7; 16]));
        store
            .run(async |tx| {
                let _: () = bus.producer().created(&tx, &db);
                Ok(())
            })
            .await
            .unwrap();
    }
    assert!(trigger.wait_for(|status| (status.done, status.parked) == (1, 1)).await);
    trigger.shutdown().await.unwrap();
    dispatcher.shutdown().await;
    notifier.shutdown().await.unwrap();
}

#[tokio::test]
async fn parked_databases_are_listed_asked_for_and_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path()).await;
    let all = objects(folder.path(), &["list"]);
    assert_eq!(all.len(), 1);
    assert_eq!((&all[0]["trigger"], &all[0]["parked"]), (&Value::from("views"), &Value::from(1)));
    let parked = objects(folder.path(), &["list", "views"]);
    assert_eq!(parked.len(), 1);
    let keys = ["db", "attempts", "error", "is_gone", "is_asked"].map(|key| parked[0][key].clone());
    assert_eq!(Value::from(keys.to_vec()), serde_json::json!(["bad", 1, "no disk", false, false]));
    let readable = String::from_utf8(triggers(folder.path(), &["list", "views"]).stdout).unwrap();
    assert!(readable.starts_with("DB   INSTANCE ") && readable.contains("\nbad  07"), "{readable}");
    for (args, reason) in [
        (&["retry", "views", "--db", "good"][..], "has not parked such a database"),
        (&["retry", "other"], "no such trigger"),
        (&["reset", "other", "--yes"], "no such trigger"),
        (&["list", "other"], "no such trigger"),
    ] {
        let refused = triggers(folder.path(), args);
        let error = String::from_utf8(refused.stderr).unwrap();
        assert!(refused.status.code() == Some(2) && error.contains(reason), "{args:?}: {error}");
    }
    assert_eq!(objects(folder.path(), &["retry", "views", "--db", "bad"])[0]["databases"], 1);
    assert_eq!(objects(folder.path(), &["list", "views"])[0]["is_asked"], true);
    objects(folder.path(), &["reset", "views", "--yes"]);
    assert!(objects(folder.path(), &["list"]).is_empty());
}
