//! Recorders in other languages, in their own FoundationDB transactions.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use notibus::{DispatcherOptions, Filter, store::Isolation};
use tokio_stream::StreamExt;

use crate::{
    common::{db, eager, joined, row_with, rows, within},
    fixture,
};

/// Finds a Python that has FoundationDB's own package.
fn python() -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it lies in the target folder");
    let found = [target.join("clients/python/bin/python"), "python3".into()].into_iter().find(|python| {
        let mut command = Command::new(python);
        let imported = command.args(["-c", "import fdb"]).stderr(Stdio::null()).status();
        imported.is_ok_and(|status| status.success())
    });
    if found.is_none() {
        println!(
            "SKIPPED, not passed: the recorder in Python needs FoundationDB's package; run tests/clients/install"
        );
    }
    found
}

/// A layer in Python writes a document and its event in one transaction. The event is delivered here, but not the event of a transaction
/// that was never committed.
pub(crate) async fn a_layer_in_python_records_in_its_own_transactions() {
    let Some(python) = python() else { return };
    let file = fixture::shared();
    let (store, prefix) = (fixture::open(&file).await, fixture::prefix("python"));
    let bus = fixture::bus(&store, &prefix).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let mut stream = dispatcher.subscribe(Filter::all()).stream();
    let document = fixture::prefix("documents");

    let mut command = Command::new(python);
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/foundationdb/recorder.py")).arg(&file);
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    command.args([&prefix, &document].map(|key| std::str::from_utf8(key).unwrap()));
    let output = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let delivery = within("a delivery", stream.next()).await.unwrap().into_delivery().unwrap();
    assert_eq!(delivery.notification().name.as_str(), "orders");
    row_with(&bus, &db("orders", 1), [1, 0, 2, 1]).await;
    assert_eq!(rows(&bus).await.len(), 1);
    let written = store.begin().get(&document, Isolation::Snapshot).await.unwrap();
    assert_eq!(written.as_deref(), Some(&b"2"[..]));
}
