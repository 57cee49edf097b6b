//! Subscribers that read the feed in several pages, with failures in between.

use std::{
    collections::BTreeSet,
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use futures_util::FutureExt;
use notibus::{
    Cursor, Db, DbInstance, DispatcherOptions, EventKind, Filter,
    dispatcher::Item,
    store::{StoreError, testing::Operation},
};
use tokio_stream::StreamExt;

use crate::{
    common::{db, eager, forgetful, joined, narrow_bus, until, within},
    fixture::{SubscriberFixture, name, next},
};

/// Makes nine databases, the last of which is deleted.
async fn fixture() -> (SubscriberFixture, notibus::store::testing::Faults) {
    let store = notibus::store::Store::memory();
    let faults = notibus::store::testing::Faults::new(&store);
    let bus = narrow_bus(&faults.store()).await;
    let options = DispatcherOptions::default().catch_up_rows_max(2).ring_rows_max(1);
    let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let dispatcher = bus.dispatcher(options).await.unwrap();
    let fixture = SubscriberFixture { store, bus, notifier, dispatcher };
    fixture.events(&["a", "b", "c", "d", "e", "f", "g", "h", "x"], EventKind::Created).await;
    fixture.event(&db("x", 1), EventKind::Deleted).await;
    (fixture, faults)
}

/// Drops the tombstone, which moves the horizon past the first pages.
async fn move_the_horizon(fixture: &SubscriberFixture) {
    let janitor = joined(&fixture.bus).await.janitor(forgetful()).await.unwrap();
    until("the tombstone's end", async || fixture.bus.stats().tombstones_dropped == 1).await;
    janitor.shutdown().await.unwrap();
}

/// Regression: a subscriber that began with nothing lost its first cursor when a read failed between two pages, so the next page returned
/// `Expired`, although the subscriber had missed nothing.
#[tokio::test(start_paused = true)]
async fn a_read_that_fails_between_two_pages_does_not_expire_a_reader_from_nothing() {
    let (fixture, faults) = fixture().await;
    let since = Cursor::BEGINNING;
    let mut subscription = fixture.dispatcher.subscribe(Filter::all()).since(since).stream();
    let mut delivered = BTreeSet::from([name(&next(&mut subscription).await).to_owned()]);
    move_the_horizon(&fixture).await;
    faults.plan_reads(|operation| {
        matches!(operation, Operation::GetRange { .. }).then_some(StoreError::IO_ERROR)
    });
    let mut failures = 0;
    while delivered.len() < 8 {
        match within("what follows", subscription.next()).await.unwrap() {
            Item::Delivery(delivery) => {
                delivered.insert(name(&delivery).to_owned());
            }
            Item::Failed(_) => {
                failures += 1;
                if failures == 2 {
                    faults.heal();
                }
            }
            other => panic!("it has missed nothing: {other:?}"),
        }
    }
    assert_eq!(failures, 2);
}

/// A predicate that panics on a row of a page does not make a reader lose its first cursor either.
#[tokio::test(start_paused = true)]
async fn a_predicate_that_panics_within_a_page_does_not_expire_a_reader_from_nothing() {
    let (fixture, _faults) = fixture().await;
    let panics = Arc::new(AtomicBool::new(false));
    let armed = Arc::clone(&panics);
    let filter =
        Filter::predicate(move |_| !armed.swap(false, Ordering::Relaxed) || panic!("as it was delivered"));
    let since = Cursor::BEGINNING;
    let mut subscription = fixture.dispatcher.subscribe(filter).since(since).stream();
    let mut delivered = BTreeSet::from([name(&next(&mut subscription).await).to_owned()]);
    move_the_horizon(&fixture).await;
    panics.store(true, Ordering::Relaxed);
    // Rows of the page that were chosen before the panic are delivered first.
    while let Ok(item) = AssertUnwindSafe(subscription.next()).catch_unwind().await {
        delivered.insert(name(&item.unwrap().into_delivery().unwrap()).to_owned());
    }
    // All other rows follow, except the one on which the predicate panicked.
    while delivered.len() < 7 {
        let item = within("what follows", subscription.next()).await.unwrap();
        delivered.insert(name(&item.into_delivery().unwrap()).to_owned());
    }
}

/// Bug: a page that was cut short because of long names, unless it was the last one, treated the position of its last row as the end of
/// what could be read, so the cursor of a reader from nothing began too early, and its text contradicted itself.
#[tokio::test(start_paused = true)]
async fn a_page_that_long_names_cut_off_says_what_could_be_read() {
    let page = 40_usize;
    let fixture = SubscriberFixture::with(DispatcherOptions::default().catch_up_rows_max(page)).await;
    for n in 0..2 * page + 10 {
        // The rows of the first page fit into a batch, but those of the second do not.
        let name = format!("{n:0>width$}", width = if n < page { 4 } else { 1_000 });
        fixture.event(&Db::new(name.parse().unwrap(), DbInstance([1; 16])), EventKind::Created).await;
    }
    let now = fixture.bus.feed().now().await.unwrap();
    let mut batches = fixture.dispatcher.subscribe(Filter::all()).since(Cursor::BEGINNING).batches();
    for rows in [page, 33] {
        let batch = within("a batch", batches.next()).await.unwrap().into_delivery().unwrap();
        let (cursor, text) = (batch.cursor(), batch.cursor().to_string());
        assert_eq!(batch.len(), rows);
        assert_eq!((cursor.began(), cursor.readable()), (Some(now), Some(now)), "{text}");
        assert_eq!(text.parse::<Cursor>().unwrap(), cursor);
    }
}
