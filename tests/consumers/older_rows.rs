//! Rows that are read late: they undo nothing, and the events that they reported are not lost.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use notibus::{Cursor, Notification, consumer::Work, event::DbInstance, node::BalanceOptions};

use crate::{
    common::{db, record, row_with},
    fixture::{ConsumerFixture, Log, hinted},
};

type Ids = Log<Work<Notification>>;

/// Regression: the successors of a reshard began as if everything before them had been worked on. A tombstone whose name was used again in
/// the successors had not been read yet, so the end of its database was not reported there.
#[tokio::test(start_paused = true)]
async fn the_end_of_a_database_is_news_also_if_its_name_was_taken_after_a_reshard() {
    let fixture = ConsumerFixture::new(1).await;
    let gone: Arc<Mutex<Vec<Option<DbInstance>>>> = Arc::default();
    let seen = Arc::clone(&gone);
    let log = Ids::doing(move |work| {
        seen.lock().unwrap().push(work.gone());
        async { Ok(()) }
    });
    fixture.create(["a"]).await;
    let consumer = fixture.member().await.start_from(Cursor::BEGINNING).run(log.handler()).await.unwrap();
    log.until_names(&["a".to_owned()]).await;
    consumer.caught_up().await.unwrap();
    consumer.shutdown().await.unwrap();

    record(&fixture.store, &fixture.other, &db("a", 1), [0, 1, 0, 0]).await;
    row_with(&fixture.other, &db("a", 1), [1, 1, 0, 0]).await;
    fixture.other.feed().reshard(2, None).await.unwrap();
    record(&fixture.store, &fixture.other, &db("a", 2), [1, 0, 0, 0]).await;
    row_with(&fixture.other, &db("a", 2), [1, 0, 0, 0]).await;
    let consumer = fixture.member().await.run(log.handler()).await.unwrap();
    while log.calls() < 2 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    consumer.shutdown().await.unwrap();
    assert_eq!(*gone.lock().unwrap(), [None, Some(db("a", 1).instance)]);
}

/// Regression: a member that took over in the same process used the pages of the previous member, so it delivered rows older than those on
/// which that member had worked.
#[tokio::test(start_paused = true)]
async fn who_takes_over_is_given_no_older_row_than_the_one_before() {
    let fixture = ConsumerFixture::new(1).await;
    let updates: Arc<Mutex<Vec<u64>>> = Arc::default();
    let seen = Arc::clone(&updates);
    let log = Ids::doing(move |work| {
        seen.lock().unwrap().push(work.row().unwrap().totals.updated);
        async { Ok(()) }
    });
    fixture.create(["a"]).await;
    let options = hinted().checkpoint_interval(Duration::from_secs(1_000));
    let member = async || fixture.member().await.start_from(Cursor::BEGINNING).options(options.clone());
    let consumer = member().await.run(log.handler()).await.unwrap();
    log.until_names(&["a".to_owned()]).await;
    fixture.update("a", 0).await;
    while log.calls() < 2 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // As in a crash, no checkpoint is saved.
    drop(consumer);
    let consumer = member().await.run(log.handler()).await.unwrap();
    while log.calls() < 3 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    consumer.shutdown().await.unwrap();
    assert_eq!(*updates.lock().unwrap(), [0, 1, 1]);
}

/// Regression: a member without a time limit for handovers waited for a handler that never returned, so its shutdown never ended.
#[tokio::test(start_paused = true)]
async fn a_hung_handler_does_not_keep_a_shutdown_from_ending() {
    let fixture = ConsumerFixture::new(1).await;
    let log = Ids::doing(|_| std::future::pending());
    fixture.create(["a"]).await;
    let options = hinted().balance(BalanceOptions::default().handover(Duration::MAX));
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run(log.handler()).await.unwrap();
    log.until_names(&["a".to_owned()]).await;
    let ended = tokio::time::timeout(Duration::from_hours(1), consumer.shutdown()).await;
    ended.expect("the work stalls").unwrap();
}
