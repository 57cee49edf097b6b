//! `notibus topology`, as a user calls it: what it prints, what it changes, and its exit codes.

use std::{
    path::Path,
    process::{Command, Output},
};

use notibus::{
    Bus, BusOptions, Db, DbInstance, Sequence,
    changes::{ChangesOptions, DocId, DocSummary, Revision},
    feed::SchemeId,
    store::Store,
};
use serde_json::{Value, json};

/// The database whose documents have a changes feed.
const DOCS: DbInstance = DbInstance([7; 16]);

fn topology(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_notibus")).arg("topology").args(args).output().unwrap()
}

/// Runs `topology`, which must succeed, and returns what it printed.
fn printed(args: &[&str]) -> String {
    let output = topology(args);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Runs `topology --json`, which must succeed, and returns the entries.
fn entries(args: &[&str]) -> Vec<Value> {
    let text = printed(&[args, &["--json"]].concat());
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Runs `topology`, which must refuse it as bad input, and returns its message.
fn refused(args: &[&str]) -> String {
    let output = topology(args);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{args:?}: {message}");
    assert!(output.stdout.is_empty(), "{args:?} printed {}", String::from_utf8_lossy(&output.stdout));
    message
}

/// Calls `work` with the bus in `folder`, which is closed afterwards.
fn with_bus<T>(folder: &Path, work: impl AsyncFnOnce(&Store, &Bus) -> T) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let store = Store::open_dir(folder).unwrap();
        let bus = Bus::open(&store, BusOptions::default().shards(3)).await.unwrap();
        work(&store, &bus).await
    })
}

/// Edits `count` new documents of [`DOCS`], whose ids start with `prefix`.
async fn edit(store: &Store, bus: &Bus, prefix: &str, count: u32) {
    let (changes, db) = (bus.changes(), Db::new("docs".parse().unwrap(), DOCS));
    let write = async |tx| {
        let writer = changes.writer(&tx, &db).await?;
        for n in 0..count {
            let id = DocId::new(&format!("{prefix}{n}"))?;
            let revision = Revision { position: 1, hash: [1; 16] };
            writer.record(&DocSummary { id, revision, branches: 1, is_deleted: false }, None)?;
        }
        Ok(())
    };
    store.run(write).await.unwrap();
}

/// Makes a folder with a bus, and a changes feed of two shards with 10 documents. Returns the folder, and its name as a store.
fn prepared() -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    with_bus(folder.path(), async |store, bus| {
        let (changes, db) = (bus.changes(), Db::new("docs".parse().unwrap(), DOCS));
        let options = ChangesOptions::default().shards(2).scheme(SchemeId::PARTITION_KEY);
        store.run(async |tx| changes.create(&tx, &db, &options).await).await.unwrap();
        edit(store, bus, "a", 10).await;
    });
    let store = format!("dir:{}", folder.path().display());
    (folder, store)
}

#[test]
fn a_new_feed_has_one_open_entry() {
    let (_folder, store) = prepared();
    let first = Sequence::MIN.to_string();
    let entry = json!({ "first": first, "open": true, "scheme": 1, "shards": [1, 2, 3] });
    assert_eq!(entries(&["show", "--store", &store]), [entry]);
    let text = printed(&["show", "--store", &store, "--feed", "notifications", "--rows"]);
    assert_eq!(
        text,
        format!(
            "{:26}  STATE  SCHEME  COUNT  SHARDS  ROWS  LEAST  MOST\n{first}  open   id      3      1-3     0     0      0\n",
            "FIRST"
        ),
        "no notifier has run"
    );
}

#[test]
fn a_reshard_adds_an_entry_and_what_is_written_goes_there() {
    let (folder, store) = prepared();
    let feed = DOCS.to_string();
    let feed = ["--store", &store, "--feed", &feed];
    let [entry] = &entries(&[&["reshard"], &feed[..], &["--shards", "1", "--scheme", "id"]].concat())[..]
    else {
        panic!("there is one")
    };
    assert_eq!((&entry["open"], &entry["scheme"], &entry["shards"]), (&true.into(), &1.into(), &json!([3])));
    with_bus(folder.path(), async |store, bus| edit(store, bus, "b", 5).await);
    let text = printed(&[&["reshard"], &feed[..], &["--shards", "8"]].concat());
    assert!(text.ends_with("  open   id      8      4-11\n") && text.lines().count() == 2, "{text}");

    let shown = entries(&[&["show", "--rows"], &feed[..]].concat());
    assert_eq!(shown.len(), 3);
    assert_eq!(shown[1]["first"], entry["first"]);
    let of = |field: &str| shown.iter().map(|entry| entry[field].clone()).collect::<Value>();
    assert_eq!(of("open"), json!([false, false, true]));
    assert_eq!(of("scheme"), json!([2, 1, 1]), "a reshard that names no scheme keeps it");
    assert_eq!(of("shards"), json!([[1, 2], [3], [4, 5, 6, 7, 8, 9, 10, 11]]));
    let rows = |entry: &Value| -> u64 {
        entry["rows"].as_array().unwrap().iter().map(|count| count.as_u64().unwrap()).sum()
    };
    assert_eq!(shown.iter().map(rows).collect::<Vec<_>>(), [10, 5, 0]);
    let text = printed(&[&["show"], &feed[..]].concat());
    let states: Vec<_> = text.lines().skip(1).map(|line| line.split_whitespace().nth(1).unwrap()).collect();
    assert_eq!(states, ["closed", "closed", "open"]);
    assert_eq!(entries(&["show", "--store", &store]).len(), 1, "other feeds are as they were");
}

#[test]
fn what_is_not_there_is_said_and_not_made() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    let option = format!("dir:{}", missing.display());
    for args in [&["show", "--store", &option][..], &["reshard", "--store", &option, "--shards", "2"]] {
        assert!(refused(args).contains("there is no store"));
        assert!(!missing.exists());
    }
    assert!(refused(&["show", "--store", "memory"]).contains("there is no bus"));

    let (_folder, store) = prepared();
    assert!(refused(&["show", "--store", &store, "--prefix", "other"]).contains("there is no bus"));
    let unknown = "0123456789abcdef0123456789abcdef";
    for args in [&["show"][..], &["reshard", "--shards", "2"]] {
        let message = refused(&[args, &["--store", &store, "--feed", unknown]].concat());
        assert!(message.contains(&format!("there is no feed of documents of {unknown}")), "{message}");
    }
}

#[test]
fn bad_arguments_change_nothing() {
    let (_folder, store) = prepared();
    let before = printed(&["show", "--store", &store]);
    for (args, reason) in [
        (&["show", "--feed", "docs"][..], "neither \"notifications\" nor 32 hexadecimal digits"),
        (&["reshard"], "--shards"),
        (&["reshard", "--shards", "0"], "invalid shards: 0 is not 1 to 1000"),
        (&["reshard", "--shards", "1001"], "invalid shards"),
        (&["reshard", "--shards", "2", "--scheme", "name"], "\"partition-key\" and a number"),
        (&["reshard", "--shards", "2", "--scheme", "5000"], "hashing scheme 5000 is unknown"),
    ] {
        let message = refused(&[args, &["--store", &store]].concat());
        assert!(message.contains(reason), "{args:?}: {message}");
    }
    assert_eq!(printed(&["show", "--store", &store]), before);
}
