//! Receiving batches through a stream or a callback, with paces and with replaced filters.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::FutureExt;
use notibus::{
    Cursor, DispatcherOptions, EventKind, Filter,
    dispatcher::{BatchItem, BatchSubscription, DeliveryBatch, Item, RestartPolicy},
};
use tokio_stream::StreamExt;

use crate::{
    common::{db, until, within},
    fixture::{SubscriberFixture, calls},
};

fn names(batch: &DeliveryBatch) -> Vec<String> {
    batch.iter().map(|delivery| delivery.notification().name.to_string()).collect()
}

/// Returns the next batch; skips the end of the first scan.
async fn next(batches: &mut BatchSubscription) -> DeliveryBatch {
    loop {
        match within("a batch", batches.next()).await.unwrap() {
            Item::Delivery(batch) => return batch,
            Item::CaughtUp { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_batch_says_what_its_deliveries_do() {
    let fixture = SubscriberFixture::new().await;
    fixture.events(&["a", "b", "c"], EventKind::Created).await;
    let mut batches = fixture.dispatcher.subscribe(Filter::all()).since(Cursor::BEGINNING).batches();
    let batch = next(&mut batches).await;
    assert_eq!((batch.len(), names(&batch)), (3, ["a", "b", "c"].map(String::from).to_vec()));
    for (index, delivery) in batch.iter().enumerate() {
        let kept = batch.delivery(index);
        assert_eq!(kept.notification(), delivery.notification());
        assert_eq!(kept.news(), delivery.news());
        assert_eq!(kept.since(), delivery.since());
    }
    let mut deliveries = batch.iter();
    deliveries.next();
    assert_eq!(deliveries.len(), 2, "the iterator knows how many are left");
    assert_eq!(batches.cursor(), batch.cursor());
    assert!(batch.cursor().knew_nothing(), "its first scan is not complete before it is said");
    let first = batch.cursor_after(1);
    assert!(first.knew_nothing() && first.position() == batch.delivery(0).sequence());
    let mut rest = fixture.dispatcher.subscribe(Filter::all()).since(first).batches();
    assert_eq!(names(&next(&mut rest).await), ["b", "c"]);
}

/// Regression: a delivery that was repeated alone after a panic on its batch had the cursor after the whole batch, so a callback that kept
/// that cursor and then ended missed the rest of the batch.
#[tokio::test(start_paused = true)]
async fn a_delivery_that_is_given_again_by_itself_says_where_it_ends() {
    let fixture = SubscriberFixture::new().await;
    fixture.events(&["a", "b", "c"], EventKind::Created).await;
    let given = Arc::new(Mutex::new(Vec::new()));
    let written = Arc::clone(&given);
    let subscribe = fixture.dispatcher.subscribe(Filter::all()).since(Cursor::BEGINNING);
    let panics = calls(move |item: BatchItem| {
        let written = Arc::clone(&written);
        async move {
            let Some(batch) = item.into_delivery() else { return };
            assert!(batch.len() == 1, "as it was delivered");
            written.lock().unwrap().push(batch);
        }
    });
    let _callback = subscribe.batch_callback(RestartPolicy::default(), panics).unwrap();
    until("all of them", async || given.lock().unwrap().len() == 3).await;
    let given = given.lock().unwrap();
    for (one, next) in given.iter().zip(&given[1..]) {
        assert_eq!(one.cursor().position(), one.delivery(0).sequence());
        assert_eq!(one.cursor(), next.cursor_after(0));
    }
}

#[tokio::test(start_paused = true)]
async fn only_what_is_wanted_is_in_a_batch_and_all_may_be_kept() {
    let fixture = SubscriberFixture::new().await;
    let mut batches = fixture.dispatcher.subscribe(Filter::prefix("a")).batches();
    let mut kept = Vec::new();
    for name in ["a1", "b1", "a2", "b2"] {
        fixture.event(&db(name, 1), EventKind::Created).await;
        while let Some(Some(batch)) = batches.next().now_or_never() {
            kept.push(batch.into_delivery().unwrap());
        }
    }
    let names: Vec<_> = kept.iter().flat_map(names).collect();
    assert_eq!(names, ["a1", "a2"]);
}

#[tokio::test(start_paused = true)]
async fn rounds_and_replaced_filters_come_in_batches_too() {
    let fixture = SubscriberFixture::new().await;
    let subscribe = fixture.dispatcher.subscribe(Filter::prefix("a"));
    let mut batches = subscribe.every(Duration::from_mins(1)).unwrap().batches();
    fixture.event(&db("a", 1), EventKind::Created).await;
    assert_eq!(names(&next(&mut batches).await), ["a"]);
    for _ in 0..3 {
        fixture.events(&["a", "aa", "b"], EventKind::Updated).await;
    }
    assert!(batches.next().now_or_never().is_none(), "the next round is not due");
    assert_eq!(names(&next(&mut batches).await), ["a", "aa"]);
    batches = batches.replace(Filter::name("b").unwrap()).batches();
    fixture.events(&["a", "b"], EventKind::Updated).await;
    assert_eq!(names(&next(&mut batches).await), ["b"]);
}

#[tokio::test(start_paused = true)]
async fn a_callback_can_be_given_batches() {
    let fixture = SubscriberFixture::new().await;
    fixture.events(&["a", "b", "c"], EventKind::Created).await;
    let delivered = Arc::new(Mutex::new(Vec::new()));
    let recorded = Arc::clone(&delivered);
    let record = calls(move |item: BatchItem| {
        recorded.lock().unwrap().extend(item.into_delivery().map(|batch| names(&batch)));
        async {}
    });
    let subscribe = fixture.dispatcher.subscribe(Filter::all()).since(Cursor::BEGINNING);
    let handle = subscribe.batch_callback(RestartPolicy::default(), record).unwrap();
    until("the batch", async || !delivered.lock().unwrap().is_empty()).await;
    assert_eq!(*delivered.lock().unwrap(), [["a", "b", "c"]]);
    handle.stop().await;
}

/// A callback that panics on a batch gets the batch again, then row by row, and only the bad row is skipped.
#[tokio::test(start_paused = true)]
async fn only_the_row_on_which_a_callback_panics_is_skipped() {
    let fixture = SubscriberFixture::with(DispatcherOptions::default().catch_up_rows_max(2)).await;
    fixture.events(&["a", "b", "bad", "c", "d"], EventKind::Created).await;
    let delivered = Arc::new(Mutex::new(Vec::new()));
    let recorded = Arc::clone(&delivered);
    let panics = calls(move |item: BatchItem| {
        let names = item.into_delivery().map(|batch| names(&batch)).unwrap_or_default();
        assert!(!names.contains(&"bad".to_owned()), "on purpose");
        recorded.lock().unwrap().extend(names);
        async {}
    });
    let subscribe = fixture.dispatcher.subscribe(Filter::all()).since(Cursor::BEGINNING);
    let policy = RestartPolicy::default().attempts_max(2);
    let handle = subscribe.batch_callback(policy, panics).unwrap();
    until("the last", async || delivered.lock().unwrap().len() == 4).await;
    assert_eq!(*delivered.lock().unwrap(), ["a", "b", "c", "d"]);
    handle.stop().await;
    let stats = fixture.bus.stats();
    assert_eq!((stats.callback_panics, stats.callback_skips), (4, 1), "twice each, in a batch and alone");
}
