//! Which events of a row are news to a consumer, given what it knows.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use notibus::{
    Cursor, DbInstance, EventKind, Filter, Notification,
    consumer::{Batch, Work},
    store::{StoreError, testing::Operation},
};

use crate::{
    common::{db, record, row_with, until},
    fixture::{ConsumerFixture, Log, hinted, pass},
};

type News = Arc<Mutex<Vec<(String, Vec<(DbInstance, EventKind)>)>>>;

fn noting_rows(news: &News) -> Log<Batch<Notification>> {
    let news = Arc::clone(news);
    Log::doing(move |batch: Batch<Notification>| {
        let of = |row: &Notification| {
            (row.name.to_string(), row.news_since(batch.since()).iter().collect::<Vec<_>>())
        };
        news.lock().unwrap().extend(batch.rows.iter().map(of));
        async { Ok(()) }
    })
}

fn noting_ids(news: &News) -> Log<Work<Notification>> {
    let news = Arc::clone(news);
    Log::doing(move |work: Work<Notification>| {
        let found = work.news().unwrap().iter().collect::<Vec<_>>();
        news.lock().unwrap().push((work.row().unwrap().name.to_string(), found));
        async { Ok(()) }
    })
}

/// Bug: a reader used a cached page that was older than its previous page, which hid a row that had moved in between, so the reader
/// believed that it had caught up, and never delivered the events that the row had reported before it moved.
#[tokio::test(start_paused = true)]
async fn a_row_that_moves_between_two_pages_loses_no_event() {
    let fixture = ConsumerFixture::new(1).await;
    fixture.create(["z"]).await;
    fixture.create(["a"]).await;
    fixture.create(["b"]).await;
    let follower = fixture.member().await.run_batches(Log::<Batch<_>>::new().handler()).await.unwrap();
    until("it has begun", async || follower.shards().len() == 1).await;
    pass(Duration::from_secs(5)).await;
    fixture.create(["c"]).await;
    pass(Duration::from_secs(5)).await;
    // From now on no hints arrive.
    fixture.faults.plan_reads(|operation| match operation {
        Operation::Get { key, .. } => key.starts_with(b"notibus\x15\x0f").then_some(StoreError::IO_ERROR),
        Operation::GetRange { range, .. } => {
            range.end.starts_with(b"notibus\x15\x0f").then_some(StoreError::IO_ERROR)
        }
        _ => None,
    });
    fixture.update("z", 0).await;
    let news = News::default();
    let log = noting_rows(&news);
    let node = crate::common::joined(&fixture.bus).await;
    let member = node.consumer("second").unwrap().start_from(Cursor::BEGINNING);
    let options = hinted().batch_rows_max(1).poll_interval(Duration::from_secs(20));
    let second = member.options(options).run_batches(log.handler()).await.unwrap();
    until("it comes", async || news.lock().unwrap().iter().any(|(name, _)| name == "z")).await;
    let all = news.lock().unwrap().clone();
    let (_, z) = all.iter().find(|(name, _)| name == "z").unwrap();
    assert!(z.iter().any(|(_, kind)| *kind == EventKind::Created), "{all:?}");
    second.shutdown().await.unwrap();
    follower.shutdown().await.unwrap();
}

/// Regression: news was derived from a position alone, which does not say what a consumer knows, so a consumer that began with nothing was
/// notified of the deletion of an instance that was already gone, and a row that had replaced an older row in the backlog lost the news of
/// the older row.
#[tokio::test(start_paused = true)]
async fn news_are_derived_from_what_a_consumer_knew_when_it_began() {
    for is_ordered in [false, true] {
        let fixture = ConsumerFixture::new(1).await;
        let change = async |instance, lanes, totals| {
            record(&fixture.store, &fixture.other, &db("a", instance), lanes).await;
            row_with(&fixture.other, &db("a", instance), totals).await;
        };
        let (created, deleted) = ([1, 0, 0, 0], [0, 1, 0, 0]);
        change(1, created, created).await;
        change(1, deleted, [1, 1, 0, 0]).await;
        change(2, created, created).await;
        let settings = notibus::consumer::ConsumerSettings::default().start(Cursor::BEGINNING.into());
        assert!(fixture.handle().create(&settings).await.unwrap());
        fixture.create(["b"]).await;
        let news = News::default();
        let (rows, ids) = (noting_rows(&news), noting_ids(&news));
        let member = fixture.member().await;
        let consumer = if is_ordered {
            member.run_batches(rows.handler()).await.unwrap()
        } else {
            member.run(ids.handler()).await.unwrap()
        };
        until("both come", async || news.lock().unwrap().len() == 2).await;
        let [one, two, three] = [1, 2, 3].map(|instance| DbInstance([instance; 16]));
        let taken: Vec<_> = std::mem::take(&mut *news.lock().unwrap()).into_iter().map(|(_, n)| n).collect();
        assert_eq!(
            taken,
            [two, one].map(|instance| vec![(instance, EventKind::Created)]),
            "it never knew a#1"
        );
        consumer.caught_up().await.unwrap();
        change(3, created, created).await;
        until("it comes", async || news.lock().unwrap().len() == 1).await;
        let expected = vec![(two, EventKind::Deleted), (three, EventKind::Created)];
        assert_eq!(news.lock().unwrap()[0].1, expected, "it knew a#2");
        consumer.shutdown().await.unwrap();
    }
}

/// A consumer of some kinds also learns of the ends of databases, even if it does not want that kind, but of no other events.
#[tokio::test(start_paused = true)]
async fn a_filter_of_kinds_lets_ends_pass() {
    let fixture = ConsumerFixture::new(1).await;
    let news = News::default();
    let log = noting_ids(&news);
    let filter = Filter::all().kinds([EventKind::DdocUpdated].into_iter().collect()).unwrap();
    let member = fixture.member().await.start_from(Cursor::BEGINNING).filter(filter);
    let consumer = member.run(log.handler()).await.unwrap();
    fixture.create(["a"]).await;
    fixture.update("a", 0).await;
    consumer.caught_up().await.unwrap();
    assert_eq!(log.calls(), 0);
    record(&fixture.store, &fixture.other, &db("a", 1), [0, 0, 0, 1]).await;
    log.until_calls(1).await;
    record(&fixture.store, &fixture.other, &db("a", 1), [0, 1, 0, 0]).await;
    log.until_calls(2).await;
    consumer.caught_up().await.unwrap();
    consumer.shutdown().await.unwrap();
}

/// Bug: a checkpoint saved in the middle of a reading knew less than its shard, and was not saved again if only unwanted rows followed, so
/// a row that was wanted at first, but not since, kept the consumer from catching up.
#[tokio::test(start_paused = true)]
async fn a_consumer_of_some_kinds_catches_up() {
    let fixture = ConsumerFixture::new(1).await;
    for name in ["a", "b", "c"] {
        fixture.create([name]).await;
    }
    let log = Log::doing(async |_: Batch<Notification>| {
        tokio::time::sleep(Duration::from_secs(3)).await;
        Ok(())
    });
    let filter = Filter::name("a").unwrap().kinds([EventKind::Created].into_iter().collect()).unwrap();
    let member = fixture.member().await.start_from(Cursor::BEGINNING).filter(filter);
    let consumer = member.options(hinted().batch_rows_max(1)).run_batches(log.handler()).await.unwrap();
    log.until_calls(1).await;
    pass(Duration::from_secs(30)).await;
    fixture.update("a", 0).await;
    crate::common::within("it has caught up", consumer.caught_up()).await.unwrap();
    assert_eq!(log.calls(), 1);
    consumer.shutdown().await.unwrap();
}

/// Regression: the member remembered ids with keys by a hash that anyone can compute, so a name with the same hash made it forget a
/// deferred id. It then worked on the next row of that id at once, and did not report again the events whose handling had failed.
#[tokio::test(start_paused = true)]
async fn a_name_that_is_chosen_for_its_hash_makes_nobody_forget_a_deferred_one() {
    const NAMES: [&str; 2] = ["{z9_6srk", "rtwghk3"];
    let [one, other] = NAMES.map(|name| xxhash_rust::xxh3::xxh3_64(name.as_bytes()));
    assert_eq!(one, other);
    let fixture = ConsumerFixture::new(1).await;
    let (store, seen) = (fixture.store.clone(), Arc::new(Mutex::new(Vec::new())));
    let notes = Arc::clone(&seen);
    let log = Log::doing(move |work: Work<Notification>| {
        let (store, notes) = (store.clone(), Arc::clone(&notes));
        async move {
            let is_deferred = work.id() == NAMES[0].as_bytes();
            if is_deferred && work.row().unwrap().totals.updated == 0 {
                return Err("not yet".into());
            }
            let kinds = work.news().unwrap().kinds();
            if !store.run(async |tx| work.commit_in(&tx).await).await?.is_already_committed() && is_deferred {
                notes.lock().unwrap().push(kinds);
            }
            Ok(())
        }
    });
    let pause = Duration::from_mins(5);
    let options = hinted().attempts_max(1).backoff_min(pause).backoff_max(pause);
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run(log.handler()).await.unwrap();
    fixture.create([NAMES[0]]).await;
    until("it is deferred", async || !fixture.is_none_deferred().await).await;
    fixture.create([NAMES[1]]).await;
    pass(Duration::from_mins(1)).await;
    fixture.update(NAMES[0], 0).await;
    pass(pause * 3).await;
    let seen = seen.lock().unwrap().clone();
    assert!(seen.iter().any(|kinds| kinds.contains(EventKind::Created)), "{seen:?}");
    drop(consumer);
}
