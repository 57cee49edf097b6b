//! Tests layers with slow documents: only the clients that request documents have to wait for them.

use std::{sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use notibus::{
    Db, DbName, EventKind, Result,
    changes::{DocSource, DocSummary, Leaf},
    http::{ApiOptions, Databases, ServerOptions},
    store::Transaction,
};
use tokio::{sync::Semaphore, time::timeout};

use crate::{
    client::{Connection, LIMIT, get},
    common::db,
    fixture::HttpFixture,
    layer::Layer,
};

/// A layer that returns one document per permit.
struct Gated {
    layer: Arc<Layer>,
    /// Has a permit for each document that the layer may return.
    gate: Semaphore,
}

impl Databases for Gated {
    fn find<'a>(&'a self, tx: &'a Transaction, name: &'a DbName) -> BoxFuture<'a, Result<Option<Db>>> {
        self.layer.find(tx, name)
    }
}

impl DocSource for Gated {
    fn leaves<'a>(
        &'a self,
        tx: &'a Transaction,
        db: &'a Db,
        doc: &'a DocSummary,
    ) -> BoxFuture<'a, Result<Vec<Leaf>>> {
        self.layer.leaves(tx, db, doc)
    }

    fn body<'a>(
        &'a self,
        tx: &'a Transaction,
        db: &'a Db,
        doc: &'a DocSummary,
    ) -> BoxFuture<'a, Result<Option<bytes::Bytes>>> {
        Box::pin(async move {
            self.gate.acquire().await.unwrap().forget();
            self.layer.body(tx, db, doc).await
        })
    }
}

/// Starts a node with a gated layer that has one database with a document.
async fn fixture(options: ApiOptions) -> (HttpFixture, Arc<Gated>) {
    let mut gated = None;
    let fixture = HttpFixture::with(options, ServerOptions::default(), |api, _, bus| {
        let layer = Layer::new(bus);
        let made = Arc::new(Gated { layer: Arc::clone(&layer), gate: Semaphore::new(0) });
        gated = Some(Arc::clone(&made));
        api.changes(&layer.changes, made as _).merge(api.db_updates())
    })
    .await;
    let (gated, db) = (gated.unwrap(), db("a", 1));
    gated.layer.create(&db, 1).await;
    gated.layer.write(&db, "x", 1, 1, false).await;
    fixture.event(&db, EventKind::Created).await;
    (fixture, gated)
}

/// Regression: readers of slow documents held the permits of all feeds, so with 32 such readers the headers of `_db_updates` arrived after
/// 7.7 s, and those of `_changes` only with its first page.
#[tokio::test]
async fn slow_documents_delay_no_other_feed_and_not_their_own_headers() {
    let (fixture, gated) = fixture(ApiOptions::default()).await;
    let mut readers = Vec::new();
    for _ in 0..32 {
        let mut reader = Connection::get(fixture.at(), "/a/_changes?include_docs=true").await;
        let head = timeout(LIMIT, reader.head()).await.expect("headers come before documents");
        assert_eq!(head.status, 200);
        readers.push(reader);
    }
    let updates =
        timeout(LIMIT, get(fixture.at(), "/_db_updates?limit=1")).await.expect("nobody holds it up");
    assert_eq!(updates.head.status, 200);
    let plain = timeout(LIMIT, get(fixture.at(), "/a/_changes")).await.expect("nor those without documents");
    assert_eq!(plain.json()["results"].as_array().unwrap().len(), 1);
    gated.gate.add_permits(1_000);
    for mut reader in readers {
        let body: serde_json::Value = serde_json::from_str(&reader.rest().await).unwrap();
        assert_eq!(body["results"][0]["doc"]["_id"], "x");
    }
    // The status can still report mistakes of the client.
    for (target, status) in [
        ("/none/_changes?include_docs=true", 404),
        ("/a/_changes/99?include_docs=true", 404),
        ("/a/_changes?include_docs=true&since=01ffffffffffffffffffff0000", 400),
    ] {
        assert_eq!(get(fixture.at(), target).await.head.status, status, "{target}");
    }
}

#[tokio::test]
async fn a_feed_whose_documents_never_come_is_cut_off() {
    let options = ApiOptions::default().doc_reads_limit(Duration::from_millis(200));
    let (fixture, _gated) = fixture(options).await;
    let mut reader = Connection::get(fixture.at(), "/a/_changes?include_docs=true").await;
    assert_eq!(reader.head().await.status, 200);
    let mut chunks = String::new();
    // The feed is cut off: not even the last chunk arrives.
    while let Some(Some(chunk)) = timeout(LIMIT, reader.try_chunk()).await.unwrap() {
        chunks.push_str(&chunk);
    }
    assert!(!chunks.contains("last_seq"), "{chunks}");
}
