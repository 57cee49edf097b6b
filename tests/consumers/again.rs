//! Requests to repeat work, for consumers with batches: the rows of an id keep their order.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use notibus::{
    Cursor, NodeOptions, Notification,
    consumer::Batch,
    store::testing::{Operation, WatchFault},
};
use tokio::sync::{Notify, watch};

use crate::{
    common::within,
    fixture::{ConsumerFixture, Log, hinted, pass},
};

/// The batches of a consumer: for each row, its name and how many times the database was updated.
type Updates = Arc<Mutex<Vec<(String, u64)>>>;

/// Makes a handler of batches that records how many times each database was updated, and then waits while `is_held` is true.
fn noting(updates: &Updates, is_held: &watch::Sender<bool>) -> Log<Batch<Notification>> {
    let (updates, is_held) = (Arc::clone(updates), is_held.subscribe());
    Log::doing(move |batch: Batch<Notification>| {
        let of_row = |row: &Notification| (row.name.as_str().to_owned(), row.totals.updated);
        updates.lock().unwrap().extend(batch.rows.iter().map(of_row));
        let mut is_held = is_held.clone();
        async move {
            is_held.wait_for(|is_held| !is_held).await?;
            Ok(())
        }
    })
}

fn assert_ordered(updates: &Updates, name: &str) {
    let updates = updates.lock().unwrap();
    let of_name: Vec<_> = updates.iter().filter(|(of, _)| of == name).map(|(_, count)| *count).collect();
    assert!(of_name.is_sorted() && of_name.len() >= 2, "{of_name:?}");
}

/// A row is waiting for its batch when work on its id is requested again, and the id gets a newer row. Regression: the member worked on the
/// newer row out of turn, so the older row came after it.
#[tokio::test(start_paused = true)]
async fn the_row_of_an_id_that_is_asked_for_again_has_its_batch_first() {
    let fixture = ConsumerFixture::new(1).await;
    fixture.create(["a", "b"]).await;
    let (updates, is_held) = (Updates::default(), watch::Sender::new(true));
    let log = noting(&updates, &is_held);
    let options = hinted().batch_bytes_max(1);
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run_batches(log.handler()).await.unwrap();
    log.until_calls(1).await;
    assert_eq!(log.names(), ["a"], "b waits");
    assert_eq!(fixture.handle().again("b", false).await.unwrap(), 1);
    fixture.update("b", 0).await;
    pass(Duration::from_secs(10)).await;
    is_held.send_replace(false);
    fixture.until_done().await;
    assert_ordered(&updates, "b");
    consumer.shutdown().await.unwrap();
}

/// Work on an id is requested again. The pass over the keys finds the request before the member learns of it, and the next page has a newer
/// row of the id. Regression: the member worked on that row in its batch, so the older row came after it.
#[tokio::test(start_paused = true)]
async fn a_key_that_a_pass_has_found_covers_the_newer_rows_of_its_id() {
    let fixture = ConsumerFixture::new(1).await;
    fixture.create(["a", "b", "c"]).await;
    let (updates, is_held) = (Updates::default(), watch::Sender::new(false));
    let log = noting(&updates, &is_held);
    let beats = NodeOptions::default().heartbeat(Duration::from_mins(10)).expiry(Duration::from_hours(1));
    let node = fixture.bus.node(beats).await.unwrap();
    let member = node.consumer("c").unwrap().options(hinted()).start_from(Cursor::BEGINNING);
    let consumer = member.run_batches(log.handler()).await.unwrap();
    fixture.until_done().await;
    is_held.send_replace(true);
    let calls = log.calls();
    // The watch fires for this request, but not for the next one: the member finds the next one only by a poll a second later.
    fixture.faults.plan_watches(|key| (!key.starts_with(b"notibus\x15\x0f")).then_some(WatchFault::Drop));
    assert_eq!(fixture.handle().again("a", false).await.unwrap(), 1);
    log.until_calls(calls + 1).await;
    assert_eq!(fixture.handle().again("b", false).await.unwrap(), 1);
    fixture.update("c", 0).await;
    pass(Duration::from_millis(100)).await;
    let looks = Arc::new(Notify::new());
    let looked = Arc::clone(&looks);
    fixture.faults.plan_reads(move |read| {
        if matches!(read, Operation::Get { key, .. } if key.starts_with(b"notibus\x15\x05") && key.ends_with(b"\x01b\x00")) {
            looked.notify_one();
        }
        None
    });
    fixture.faults.delay_reads(Duration::from_millis(50));
    is_held.send_replace(false);
    within("the pass comes to b", looks.notified()).await;
    fixture.update("b", 0).await;
    fixture.faults.heal();
    fixture.until_done().await;
    assert_ordered(&updates, "b");
    consumer.shutdown().await.unwrap();
}
