//! Tests the cost of `pending`: almost nothing at both ends of a feed, and the rows of one page when pages are read in sequence.
//!
//! The tests are small by default. `NOTIBUS_LOAD=full cargo test --release --test http pending -- --nocapture` measures at full size.

use std::{sync::Arc, time::Instant};

use notibus::{
    Db,
    changes::{DocId, DocSummary, Revision},
    http::ApiOptions,
    store::{Store, testing::Faults},
};

use crate::{
    client::get,
    common::db,
    fixture::HttpFixture,
    layer::{Layer, layered},
};

/// The number of documents that one transaction writes.
const BATCH: usize = 1_000;

/// Starts a node on a store that counts its operations, with a layer that has one database with `documents` documents.
async fn filled(documents: usize) -> (HttpFixture, Faults, Arc<Layer>, Db) {
    let faults = Faults::new(&Store::memory());
    let (fixture, layer) = layered(faults.store(), ApiOptions::default()).await;
    let db = db("d", 1);
    layer.create(&db, 8).await;
    for batch in 0..documents / BATCH {
        let write = async |tx| {
            let writer = layer.changes.writer(&tx, &db).await?;
            for n in 0..BATCH {
                let id = DocId::new(&format!("document {:07}", batch * BATCH + n))?;
                let revision = Revision { position: 1, hash: [1; 16] };
                writer.record(&DocSummary { id, revision, branches: 1, is_deleted: false }, None)?;
            }
            Ok(())
        };
        fixture.store.run(write).await.unwrap();
    }
    (fixture, faults, layer, db)
}

/// Regression: the server read all rows to compute `pending` for one, so this took 0.3 ms at 1,000 documents and 55 ms at 300,000. Reading
/// in pages took quadratic time, if not at once, then after the next edit.
#[tokio::test]
async fn a_page_reads_its_own_rows_wherever_it_is() {
    let is_full = std::env::var("NOTIBUS_LOAD").is_ok_and(|size| size == "full");
    let documents = if is_full { 1_000_000 } else { 20_000 };
    let (fixture, faults, layer, db) = filled(documents).await;
    let ask = async |target: &str| {
        let (before, begun) = (faults.counts(), Instant::now());
        let page = get(fixture.at(), target).await;
        let bytes = (faults.counts() - before).read_bytes;
        let json = page.json();
        let rows = json["results"].as_array().unwrap().len();
        (rows, json["pending"].as_u64().unwrap(), page.last_seq(), bytes, begun.elapsed())
    };

    let (rows, pending, last, all_bytes, all) = ask("/d/_changes").await;
    assert_eq!((rows, pending), (documents, 0));
    println!("all {documents} documents in one page: {all:?}, {all_bytes} bytes read");
    // Each read is the first one after an edit, at either end of the feed.
    for (n, since) in ["0", "0", "0", "0", &last, &last, &last, &last].into_iter().enumerate() {
        layer.write(&db, &format!("new {n}"), 1, 1, false).await;
        let (rows, pending, _, bytes, time) = ask(&format!("/d/_changes?limit=1&since={since}")).await;
        println!("one row behind {since}: {time:?}, {bytes} bytes read");
        let expected = if since == "0" { documents + n + 1 } else { n + 1 };
        assert_eq!((rows, pending), (1, expected as u64 - 1));
        assert!(bytes < all_bytes / 10, "{bytes} bytes of {all_bytes}");
    }

    let (mut since, mut left, mut bytes, begun) = ("0".to_owned(), documents as u64 + 8, 0, Instant::now());
    while left > 0 {
        let (rows, pending, last, read, _) = ask(&format!("/d/_changes?limit=100&since={since}")).await;
        left -= rows as u64;
        assert_eq!(pending, left);
        (since, bytes) = (last, bytes + read);
    }
    println!("all documents in pages of 100: {:?}, {bytes} bytes read", begun.elapsed());
    assert!(bytes < 6 * all_bytes, "{bytes} bytes in pages, {all_bytes} in one");
}
