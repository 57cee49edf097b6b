//! The command `notibus consumers`, as a user calls it: what it prints, what it refuses, and its exit codes.

use std::{
    path::Path,
    process::{Command, Output},
};

use notibus::{
    Bus, BusOptions, Cursor, Db, DbInstance, NodeOptions, Notification, NotifierOptions,
    changes::ChangesOptions,
    consumer::{ConsumerOptions, Work},
    store::Store,
};
use serde_json::Value;

/// Runs `notibus consumers` on the store in `folder`.
fn consumers(folder: &Path, args: &[&str]) -> Output {
    let store = format!("dir:{}", folder.display());
    Command::new(env!("CARGO_BIN_EXE_notibus"))
        .arg("consumers")
        .args(args)
        .args(["--store", &store])
        .output()
        .unwrap()
}

/// Runs the command, which must succeed, and returns what it printed.
fn printed(folder: &Path, args: &[&str]) -> String {
    let output = consumers(folder, args);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Runs the command, which must fail, and returns its exit code and its message.
fn refused(folder: &Path, args: &[&str]) -> (Option<i32>, String) {
    let output = consumers(folder, args);
    assert!(output.stdout.is_empty(), "{args:?}");
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

/// Makes a bus in `folder`, whose consumer `mailer` has worked on ten databases and deferred one of them.
async fn fill(folder: &Path) {
    let store = Store::open_dir(folder).unwrap();
    let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
    let node = bus.node(NodeOptions::default()).await.unwrap();
    let notifier = node.notifier(NotifierOptions::default()).await.unwrap();
    let mail = |work: Work<Notification>| async move {
        if work.id() == b"db3" { Err("no such address".into()) } else { Ok(()) }
    };
    let options = ConsumerOptions::default().attempts_max(1);
    let member = node.consumer("mailer").unwrap().start_from(Cursor::BEGINNING).options(options);
    let mailer = member.run(mail).await.unwrap();
    let producer = bus.producer();
    let create = async |tx| {
        for n in 0..10 {
            producer.created(&tx, &Db::new(format!("db{n}").parse()?, DbInstance([n; 16])));
        }
        Ok(())
    };
    store.run(create).await.unwrap();
    while !bus.is_drained().await.unwrap() {
        tokio::task::yield_now().await;
    }
    mailer.caught_up().await.unwrap();
    mailer.shutdown().await.unwrap();
    notifier.shutdown().await.unwrap();
    node.shutdown().await.unwrap();
}

#[tokio::test]
async fn a_consumer_is_shown_repaired_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    fill(at).await;
    let list = printed(at, &["list"]);
    assert!(list.contains("mailer") && list.contains("no member, ids deferred"), "{list}");
    let shown = printed(at, &["show", "mailer"]);
    assert!(shown.contains("no node works for it") && shown.contains("ids are deferred"), "{shown}");
    let json: Value = serde_json::from_str(&printed(at, &["show", "mailer", "--json"])).unwrap();
    assert_eq!(json["consumer"]["name"], "mailer");
    let deferred = printed(at, &["deferred", "list", "mailer"]);
    assert!(deferred.contains("db3") && deferred.contains("no such address"), "{deferred}");
    assert!(printed(at, &["lag", "mailer"]).contains('0'));

    assert_eq!(printed(at, &["again", "mailer", "--filter", "db[0-4]"]), "5 ids are worked on again\n");
    assert!(printed(at, &["deferred", "list", "mailer"]).contains("asked for again"));
    assert_eq!(refused(at, &["again", "mailer"]).0, Some(2), "all ids have to be meant");
    assert_eq!(printed(at, &["again", "mailer", "--deferred"]), "5 ids are worked on again\n");
    let discard = ["deferred", "discard", "mailer", "--id", "db3"];
    assert_eq!(refused(at, &discard).0, Some(2), "it has to be confirmed");
    printed(at, &[&discard[..], &["--yes"]].concat());
    assert!(
        refused(at, &["deferred", "discard", "mailer", "--id", "none", "--yes"]).1.contains("not deferred")
    );

    printed(at, &["pause", "mailer"]);
    assert!(printed(at, &["show", "mailer"]).contains("it is paused"));
    printed(at, &["resume", "mailer"]);
    printed(at, &["reset", "mailer", "--to", "now", "--yes"]);
    assert_eq!(printed(at, &["deferred", "list", "mailer"]).trim(), "nothing is deferred");
    printed(at, &["delete", "mailer", "--yes"]);
    assert_eq!(printed(at, &["list"]).trim(), "no consumer");
    let (code, said) = refused(at, &["show", "mailer"]);
    assert!(code == Some(2) && said.contains("there is no consumer mailer"), "{said}");
}

#[tokio::test]
async fn what_is_created_twice_or_otherwise_is_refused_or_left_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    fill(at).await;
    let create = |args: &[&'static str]| [&["create", "audit"][..], args].concat();
    assert_eq!(printed(at, &create(&["--names", "eu/*"])), "audit is created\n");
    assert_eq!(printed(at, &create(&["--names", "eu/*"])), "audit exists already\n");
    let (code, said) = refused(at, &create(&[]));
    assert!(code == Some(2) && said.contains("delete it first, or take another name"), "{said}");
    for bad in [&["create", ""][..], &["create", "x", "--start", "never"], &["create", "x", "--names", "a["]]
    {
        assert_eq!(refused(at, bad).0, Some(2), "{bad:?}");
    }
    let (code, said) = refused(at, &["reset", "mailer", "--to", "nowhere", "--yes"]);
    assert_eq!(code, Some(2));
    assert!(said.contains("say \"now\", \"0\" for all, or a sequence of 26 hexadecimal digits"), "{said}");
}

/// A consumer of documents is created with its feed and an expiry, and moved, with and without force.
#[tokio::test]
async fn a_consumer_of_documents_is_created_moved_and_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let docs = Db::new("docs".parse().unwrap(), DbInstance([7; 16]));
    {
        let store = Store::open_dir(at).unwrap();
        let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
        let (changes, options) = (bus.changes(), ChangesOptions::default());
        store.run(async |tx| changes.create(&tx, &docs, &options).await).await.unwrap();
    }
    let feed = docs.instance.to_string();
    let create = ["create", "docs", "--feed", &feed, "--start", "0", "--expiry", "1h"];
    assert_eq!(printed(at, &create), "docs is created\n");
    assert_eq!(printed(at, &create), "docs exists already\n");
    let (code, said) = refused(at, &["create", "docs"]);
    assert!(code == Some(2) && said.contains("delete it first, or take another name"), "{said}");
    let none = DbInstance([8; 16]).to_string();
    for bad in [["--feed", &none], ["--feed", "docs"], ["--expiry", "never"]] {
        assert_eq!(refused(at, &[&["create", "c"][..], &bad].concat()).0, Some(2), "{bad:?}");
    }
    let shown = printed(at, &["show", "docs"]);
    assert!(shown.contains(&feed) && shown.contains("expires after  1h"), "{shown}");
    for to in ["now", "0"] {
        printed(at, &["reset", "docs", "--to", to, "--yes"]);
    }
    let show = || serde_json::from_str::<Value>(&printed(at, &["show", "docs", "--json"])).unwrap();
    let checkpoint = show()["consumer"]["shards"][0]["checkpoint"].as_str().unwrap().to_owned();
    printed(at, &["reset", "docs", "--to", &checkpoint, "--force", "--yes"]);
    assert_eq!(show()["consumer"]["generation"], 4);
    printed(at, &["delete", "docs", "--force", "--yes"]);
    assert_eq!(printed(at, &["list"]).trim(), "no consumer");
}
