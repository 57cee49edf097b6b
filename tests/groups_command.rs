//! The command `notibus groups`, as a user calls it: what it prints, what it refuses, and its exit codes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod served;

use std::{
    path::Path,
    process::{Command, Output},
};

use notibus::{
    Bus, BusOptions, Cursor, Db, DbInstance, NodeOptions, Notification, NotifierOptions,
    changes::{Change, ChangesOptions, DocId, DocSummary, Revision},
    group::{ConsumerOptions, FailurePolicy, GroupBatch, GroupOptions},
    store::Database,
};
use serde_json::Value;

/// Runs `notibus groups` on the store in `folder`.
fn groups(folder: &Path, args: &[&str]) -> Output {
    let store = format!("dir:{}", folder.display());
    Command::new(env!("CARGO_BIN_EXE_notibus"))
        .arg("groups")
        .args(args)
        .args(["--store", &store])
        .output()
        .unwrap()
}

/// What it prints, if it succeeds.
fn printed(folder: &Path, args: &[&str]) -> String {
    let output = groups(folder, args);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn objects(folder: &Path, args: &[&str]) -> Vec<Value> {
    let text = printed(folder, &[args, &["--json"]].concat());
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The exit code and the message with which it fails.
fn refused(folder: &Path, args: &[&str]) -> (Option<i32>, String) {
    let output = groups(folder, args);
    assert!(output.stdout.is_empty());
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

/// The instance of the database with documents.
const INSTANCE: DbInstance = DbInstance([9; 16]);

/// Writes two documents into a store of [`fill`], and has their group work on them.
async fn work_on_documents(folder: &Path) {
    let store = Database::open_dir(folder).unwrap();
    let bus = Bus::open_existing(&store, b"notibus").await.unwrap();
    let (changes, docs) = (bus.changes(), Db::new("docs".parse().unwrap(), INSTANCE));
    let index = changes.feed(&docs).group("index").unwrap();
    let edit = async |tx| {
        let writer = changes.writer(&tx, &docs).await?;
        for id in ["a", "b"] {
            let revision = Revision { position: 1, hash: [1; 16] };
            let doc = DocSummary { id: DocId::new(id)?, revision, branches: 1, is_deleted: false };
            writer.record(&doc, None)?;
        }
        Ok(())
    };
    store.run(edit).await.unwrap();
    let observe = |_: GroupBatch<Change>| std::future::ready(Ok(()));
    // With the consumer goes the node, which would keep the folder open.
    let node = bus.node(NodeOptions::default()).await.unwrap();
    let consumer = node.consumer(&index, move |_| observe, ConsumerOptions::default()).await.unwrap();
    drop(node);
    while index.lag().await.unwrap().iter().any(|shard| shard.rows > 0) {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    consumer.shutdown().await.unwrap();
    drop((index, changes, bus, store));
    // Tasks of the bus end soon after its last handle, and one of them may hold the folder until then.
    while Database::open_dir(folder).is_err() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

/// A store with a group that has worked on all rows but a dead letter, one that has not begun, and one on documents.
async fn fill(folder: &Path) {
    let store = Database::open_dir(folder).unwrap();
    let bus = Bus::open(&store, BusOptions::default().shards(2)).await.unwrap();
    let notifier =
        bus.node(NodeOptions::default()).await.unwrap().notifier(NotifierOptions::default()).await.unwrap();
    let (mailer, idle) = (bus.group("mailer").unwrap(), bus.group("idle").unwrap());
    let zero = GroupOptions::default().start_from(Cursor::NOTHING);
    mailer.create(&zero).await.unwrap();
    idle.create(&zero.expire_after(std::time::Duration::from_hours(1))).await.unwrap();
    let docs = Db::new("docs".parse().unwrap(), INSTANCE);
    let changes = bus.changes();
    store.run(async |tx| changes.create(&tx, &docs, &ChangesOptions::default()).await).await.unwrap();
    changes.feed(&docs).group("index").unwrap().create(&GroupOptions::default()).await.unwrap();
    let producer = bus.producer();
    for (n, name) in ["a", "b", "bad"].into_iter().enumerate() {
        let db = Db::new(name.parse().unwrap(), DbInstance([n as u8; 16]));
        let create = async |tx| {
            producer.created(&tx, &db);
            Ok(())
        };
        store.run(create).await.unwrap();
    }
    let mut options = ConsumerOptions::default().failure(FailurePolicy::DeadLetter);
    options.retry.attempts_max = Some(1);
    let send = |batch: GroupBatch<Notification>| async move {
        if batch.rows.iter().any(|row| row.name.as_str() == "bad") {
            Err("no mailbox".into())
        } else {
            Ok(())
        }
    };
    let consumer = bus
        .node(NodeOptions::default())
        .await
        .unwrap()
        .consumer(&mailer, move |_| send, options)
        .await
        .unwrap();
    while bus.stats().group_rows < 2 || bus.stats().group_dead_letters < 1 {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    consumer.shutdown().await.unwrap();
    notifier.shutdown().await.unwrap();
}

#[tokio::test]
async fn groups_are_shown_and_managed() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    fill(folder).await;

    let listed = objects(folder, &["list"]);
    let names: Vec<_> = listed.iter().map(|group| group["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["index", "idle", "mailer"]);
    assert_eq!(listed[0]["instance"], INSTANCE.to_string());
    assert_eq!(listed[1]["idle_expiry_ms"], 3_600_000);
    assert_eq!((&listed[2]["has_dead_letters"], &listed[2]["generation"]), (&true.into(), &1.into()));
    let trouble = listed[2]["shards"].as_array().unwrap().iter().find(|shard| !shard["trouble"].is_null());
    assert_eq!(trouble.unwrap()["trouble"]["error"], "no mailbox");
    let text = printed(folder, &["list"]);
    for part in [
        "GROUP ",
        "\nmailer  notifications ",
        "  1h  ",
        "  dead letters\n",
        "  over   1  ",
        "  no mailbox\n",
        &format!("\nindex   documents of {INSTANCE}  0 "),
    ] {
        assert!(text.contains(part), "{part:?} in {text}");
    }

    let behind = |group: &str| -> u64 {
        objects(folder, &["lag", group]).iter().map(|shard| shard["rows"].as_u64().unwrap()).sum()
    };
    assert_eq!((behind("idle"), behind("mailer")), (3, 0));
    assert!(printed(folder, &["lag", "idle"]).starts_with("SHARD  OWNER  CHECKPOINT "));
    let of_docs = printed(folder, &["lag", "index", "--feed", &INSTANCE.to_string()]);
    assert!(of_docs.lines().nth(1).unwrap().starts_with("1      -      0"), "{of_docs}");

    let [letter] = &objects(folder, &["dead-letters", "list", "mailer"])[..] else { panic!("there is one") };
    assert_eq!((&letter["error"], &letter["attempts"]), (&"no mailbox".into(), &1.into()));
    let sequence = letter["seq"].as_str().unwrap();
    assert!(
        printed(folder, &["dead-letters", "list", "mailer"]).lines().nth(1).unwrap().starts_with(sequence)
    );
    printed(folder, &["dead-letters", "delete", "mailer", "--yes", "--seq", sequence]);
    assert!(objects(folder, &["dead-letters", "list", "mailer"]).is_empty());
    let (code, message) = refused(folder, &["dead-letters", "delete", "mailer", "--yes", "--seq", sequence]);
    assert!(code == Some(2) && message.contains("no dead letter"), "{message}");
    printed(folder, &["dead-letters", "delete", "mailer", "--yes", "--all"]);

    printed(folder, &["reset", "mailer", "--yes", "--to", "0"]);
    assert_eq!((behind("mailer"), &objects(folder, &["list"])[2]["generation"]), (3, &2.into()));
    printed(folder, &["reset", "mailer", "--yes", "--to", sequence, "--force"]);
    assert!(behind("mailer") < 3);
    printed(folder, &["reset", "idle", "--yes", "--to", "now"]);
    assert_eq!(behind("idle"), 0);
    let (code, message) = refused(folder, &["delete", "idle"]);
    assert!(code == Some(2) && message.contains("--yes"), "nobody is there to be asked: {message}");
    printed(folder, &["delete", "idle", "--yes"]);
    assert_eq!(objects(folder, &["list"]).len(), 2);
}

/// With and without a filter, on a folder and on a running node. There are no consumers, so what is replayed stays parked.
#[tokio::test]
async fn what_was_worked_on_is_replayed() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    fill(folder).await;
    work_on_documents(folder).await;
    assert_eq!(
        printed(folder, &["replay", "mailer", "--filter", "{a,x*}"]),
        "1 rows wait for another delivery\n"
    );
    let waiting = || -> Vec<_> {
        let parked = objects(folder, &["parked", "list", "mailer"]);
        parked.iter().map(|parked| parked["id"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(waiting(), ["a"]);
    let feed = &INSTANCE.to_string();
    let of_docs = |args: &[&str]| printed(folder, &[&["replay", "index", "--feed", feed], args].concat());
    assert_eq!(of_docs(&["--filter", "b*"]), "1 rows wait for another delivery\n", "of documents as well");
    assert_eq!(of_docs(&["--filter", "b"]), "0 rows wait for another delivery\n", "it waits already");

    let store = format!("dir:{}", folder.display());
    let served = served::Served::start(&["--store", &store], None);
    let url = format!("http://{}", served.at);
    let on_node = |args: &[&str]| {
        let output = served::notibus().args(["groups", "replay"]).args(args).args(["--url", &url]).output();
        let output = output.unwrap();
        (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    let none = (Some(0), "0 rows wait for another delivery\n".to_owned());
    assert_eq!(on_node(&["mailer", "--filter", "a"]), none, "it waits already");
    assert_eq!(on_node(&["mailer", "--json"]), (Some(0), "{\"ok\":true,\"rows\":2}\n".to_owned()));
    assert_eq!(on_node(&["idle"]), none, "it has worked on nothing");
    let one = (Some(0), "1 rows wait for another delivery\n".to_owned());
    assert_eq!(on_node(&["index", "--feed", feed]), one, "the other document");
    for (args, part) in [(&["nobody"][..], "no group nobody"), (&["mailer", "--filter", "a["], "glob")] {
        let (code, reason) = on_node(args);
        assert!(code == Some(2) && reason.contains(part), "{reason}");
    }
    assert!(served.stop());
    assert_eq!(waiting(), ["a", "b", "bad"]);
}

#[tokio::test]
async fn bad_input_is_refused_with_exit_code_2() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    fill(folder).await;
    let ahead = "f".repeat(26);
    for (args, part) in [
        (&["lag", "nobody"][..], "no group nobody"),
        (&["reset", "nobody", "--yes", "--to", "now"], "no group nobody"),
        (&["delete", "nobody", "--yes"], "no group nobody"),
        (&["dead-letters", "list", "nobody"], "no group nobody"),
        (&["delete", ""], "the name is empty"),
        (&["reset", "mailer", "--to", "then"], "then"),
        (&["reset", "mailer", "--yes", "--to", &ahead], "ahead of the store"),
        (&["reset", "mailer"], "--to"),
        (&["lag", "mailer", "--feed", "12"], "32 hexadecimal digits"),
        (&["dead-letters", "delete", "mailer"], "--seq"),
    ] {
        let (code, message) = refused(folder, args);
        assert!(code == Some(2) && message.contains(part), "{args:?}: {code:?} {message}");
    }
    let missing = groups(&folder.join("missing"), &["list"]);
    assert_eq!(missing.status.code(), Some(2));
    assert_eq!(objects(folder, &["list"]).len(), 3, "nothing was changed");
}
