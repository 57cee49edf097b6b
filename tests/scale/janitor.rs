//! What a pass of the janitor reads: something for each consumer, nothing for each of its shards, and little for each feed of documents.
//!
//! Thousands of feeds by default. `NOTIBUS_LOAD=full cargo test --release --test scale janitor -- --nocapture` uses 100,000.

use std::time::{Duration, Instant};

use notibus::{
    Db, DbInstance, JanitorOptions,
    changes::{ChangesOptions, DocId, DocSummary},
    consumer::ConsumerSettings,
    store::{Transaction, testing::OperationCounts},
};

use crate::{
    ScaleFixture,
    common::{db, joined, record, row_with, unpolled},
};

/// Returns the operations of ten passes if there is a tombstone that `consumers` consumers have not read yet, in `shards` shards.
async fn passes(consumers: usize, shards: u32) -> OperationCounts {
    let fixture = ScaleFixture::new(1, shards).await;
    for number in 0..consumers {
        // All names have the same length, and so have the keys.
        let consumer = fixture.others.consumer(&format!("consumer{number:04}")).unwrap();
        consumer.create(&ConsumerSettings::default()).await.unwrap();
    }
    let notifier = joined(&fixture.others).await.notifier(unpolled()).await.unwrap();
    let gone = db("gone", 1);
    record(&fixture.store, &fixture.others, &gone, [1, 1, 0, 0]).await;
    row_with(&fixture.others, &gone, [1, 1, 0, 0]).await;
    notifier.shutdown().await.unwrap();
    let options =
        JanitorOptions::default().interval(Duration::from_secs(10)).tombstone_retention(Duration::ZERO);
    let janitor = joined(&fixture.counted).await.janitor(options).await.unwrap();
    tokio::time::sleep(Duration::from_secs(15)).await;
    let spent = fixture.during(tokio::time::sleep(Duration::from_secs(100))).await;
    assert_eq!(fixture.counted.stats().tombstones_dropped, 0, "the consumers have to read it");
    janitor.shutdown().await.unwrap();
    spent
}

/// Regression: a page of tombstones read the checkpoints of all consumers in one transaction: 10,000 rows for 100 consumers of 100 shards.
#[tokio::test(start_paused = true)]
async fn the_janitor_reads_nothing_that_grows_with_consumers_times_shards() {
    let (few, many) = (passes(8, 2).await, passes(64, 2).await);
    let (few_wide, many_wide) = (passes(8, 64).await, passes(64, 64).await);
    println!(
        "8 and 64 consumers of 2 shards: {few:?}\n{many:?}\n8 and 64 consumers of 64 shards: {few_wide:?}\n{many_wide:?}"
    );
    let (narrow, wide) = (many.read_bytes - few.read_bytes, many_wide.read_bytes - few_wide.read_bytes);
    assert!(
        narrow > 0 && wide * 100 <= narrow * 105,
        "56 consumers more: {narrow} bytes, of 64 shards {wide}"
    );
    assert!(many_wide.reads - few_wide.reads <= (many.reads - few.reads) + 10);
}

/// The kind of document feeds that a bus has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Feeds {
    /// As they were created.
    New,
    /// Each with a document from before its last reshard.
    Resharded,
    Consumed,
}

/// Returns the operations of ten passes over `count` such feeds, and how long a pass works.
async fn passes_over(count: u32, feeds: Feeds) -> (OperationCounts, Duration) {
    let fixture = ScaleFixture::new(1, 1).await;
    let changes = fixture.others.changes();
    let dbs: Vec<_> = (0..count)
        .map(|n| Db::new(format!("db{n:06}").parse().unwrap(), DbInstance(u128::from(n).to_be_bytes())))
        .collect();
    for some in dbs.chunks(100) {
        let create = async |tx: Transaction| {
            for db in some {
                changes.create(&tx, db, &ChangesOptions::default()).await?;
            }
            Ok(())
        };
        fixture.store.run(create).await.unwrap();
    }
    for db in &dbs {
        match feeds {
            Feeds::New => {}
            Feeds::Resharded => {
                let revision = format!("1-{:032x}", 1).parse().unwrap();
                let id = DocId::new("doc").unwrap();
                let doc = DocSummary { id, revision, branches: 1, is_deleted: false };
                let edit = async |tx: Transaction| {
                    changes.writer(&tx, db).await?.record(&doc, None)?;
                    Ok(())
                };
                fixture.store.run(edit).await.unwrap();
                changes.feed(db).reshard(2, None).await.unwrap();
            }
            Feeds::Consumed => {
                let consumer = fixture.others.consumer(&format!("of {}", db.name)).unwrap();
                let settings = ConsumerSettings::default().documents(Some(db.instance));
                assert!(consumer.create(&settings).await.unwrap());
            }
        }
    }
    let options = JanitorOptions::default().interval(Duration::from_secs(10));
    let janitor = joined(&fixture.counted).await.janitor(options).await.unwrap();
    tokio::time::sleep(Duration::from_secs(15)).await;
    let began = Instant::now();
    let spent = fixture.during(tokio::time::sleep(Duration::from_secs(100))).await;
    let works = began.elapsed() / 10;
    janitor.shutdown().await.unwrap();
    println!("{count} feeds, {feeds:?}: ten passes {spent:?}, each works {works:?}");
    (spent, works)
}

/// Regression: each closed topology entry took a transaction of its own, one after another, so 100,000 feeds that had been resharded made a
/// pass wait for 100,000 answers. So did 100,000 feeds with a consumer; for each of these, the pass read 100 rows where one was needed, 934
/// MB in total.
#[tokio::test(start_paused = true)]
async fn a_pass_over_many_feeds_of_documents_takes_few_transactions() {
    let count = if crate::is_full() { 100_000 } else { 2_000 };
    let (none, _) = passes_over(0, Feeds::New).await;
    let of_a_pass = async |feeds| {
        let (spent, _) = passes_over(count, feeds).await;
        // Other counts may differ by a heartbeat in either direction.
        let more = |spent: u64, none: u64| spent.saturating_sub(none) / 10;
        (more(spent.transactions, none.transactions), more(spent.read_bytes, none.read_bytes))
    };
    let per_feed = |bytes: u64| bytes / u64::from(count);
    let (transactions, bytes) = of_a_pass(Feeds::New).await;
    assert!(transactions <= u64::from(count / 1_000) + 2, "{transactions} transactions for {count} feeds");
    assert!(per_feed(bytes) <= 150, "{bytes} bytes for {count} feeds");
    let (transactions, bytes) = of_a_pass(Feeds::Resharded).await;
    assert!(
        transactions <= u64::from(count / 50) + 5,
        "{transactions} transactions for {count} resharded feeds"
    );
    assert!(per_feed(bytes) <= 600, "{bytes} bytes for {count} resharded feeds");
    let (transactions, bytes) = of_a_pass(Feeds::Consumed).await;
    assert!(transactions <= u64::from(count / 10) + 5, "{transactions} transactions for {count} consumers");
    assert!(per_feed(bytes) <= 1_000, "{bytes} bytes for {count} consumers");
}
