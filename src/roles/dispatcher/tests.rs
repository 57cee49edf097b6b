//! Tests of readers between two pages of the tail, a point at which a test from outside cannot stop the tail.

use std::{sync::Arc, time::Duration};

use futures_util::{FutureExt, StreamExt};

use crate::{
    base::{
        cursor::{Cursor, Knowledge},
        encoding::{Incarnation, Sequence, Versionstamp},
        event::DbName,
        notification::{Notification, tests::row},
    },
    roles::dispatcher::{BatchItem, DeliveryBatch, Dispatcher, DispatcherOptions, Filter},
    state::{
        context::Context,
        keys::{Config, Keys},
        routing::Schemes,
    },
    store::Store,
};

const PACE: Duration = Duration::from_secs(1);

fn at(version: u64) -> Sequence {
    Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
}

fn database(name: &str, version: u64) -> Arc<Notification> {
    Arc::new(Notification { name: DbName::new(name).unwrap(), replaced: None, ..row(at(version)) })
}

fn suspended(ring_rows_max: usize) -> Dispatcher {
    let config = Config { partitions: 1, incarnation: Incarnation(0) };
    let context = Context::new(Store::memory(), Keys::new(b"t").unwrap(), config, Schemes::default());
    Dispatcher::suspended(
        context,
        DispatcherOptions { ring_rows_max, ..DispatcherOptions::default() },
        at(100),
    )
    .unwrap()
}

/// Returns the next round of `subscription`, which must already be waiting.
fn round(subscription: &mut (impl StreamExt<Item = BatchItem> + Unpin)) -> DeliveryBatch {
    subscription.next().now_or_never().expect("a round").unwrap().into_delivery().unwrap()
}

/// Regression: a round has a reading that is complete at 101, and the first page of the next reading, up to 102. The rest of that reading
/// comes with the next round. From the rest the reader learned that it knew everything up to 101, and moved back there. So a callback whose
/// filter was replaced with that round in hand, or a stream that was recreated from its cursor, got the row at 102 twice.
#[tokio::test(start_paused = true)]
async fn more_knowledge_moves_no_reader_back() {
    let dispatcher = suspended(100);
    let mut paced = dispatcher.subscribe(Filter::prefix("")).every(PACE).unwrap().batches();
    assert!(paced.next().now_or_never().is_none());
    let shared = dispatcher.shared();
    shared.publish(vec![database("a", 101)], at(101), at(101));
    shared.publish(vec![database("b", 102)], at(102), at(104));
    assert_eq!(round(&mut paced).len(), 2);
    shared.publish(vec![database("c", 103)], at(103), at(104));
    tokio::time::sleep(PACE).await;
    let batch = round(&mut paced);
    assert_eq!(batch.cursor_after(0), Cursor::resumed(Knowledge::UpTo(at(101)), at(101), at(102), at(104)));
    assert_eq!(batch.delivery(0).sequence(), at(103));
}

/// Regression: the same reader becomes idle after its round. The rest of the reading wakes it, but the ring drops that batch before the
/// reader polls. It must read the feed from its cursor. Instead it began at 101, and delivered the row at 102 a second time.
#[tokio::test(start_paused = true)]
async fn an_overrun_reader_does_not_go_back_within_a_reading() {
    let dispatcher = suspended(2);
    let mut paced = dispatcher.subscribe(Filter::prefix("")).every(PACE).unwrap().batches();
    assert!(paced.next().now_or_never().is_none());
    let shared = dispatcher.shared();
    shared.publish(vec![database("a", 101)], at(101), at(101));
    shared.publish(vec![database("b", 102)], at(102), at(104));
    assert_eq!(round(&mut paced).len(), 2);
    assert!(paced.next().now_or_never().is_none(), "it rests");
    for version in 103..110 {
        shared.publish(vec![database("c", version)], at(version), at(200));
    }
    tokio::time::sleep(PACE).await;
    assert!(paced.next().now_or_never().is_none(), "it reads the feed");
    assert_eq!(paced.cursor(), Cursor::resumed(Knowledge::UpTo(at(101)), at(101), at(102), at(104)));
}

/// Regression: a reader with a pace had a batch in hand and was on the waiting list for the next one. The next batch pushed the first out
/// of the ring before the reader checked for newer rows. The reader then took everything before the next batch as known, and lost the row.
#[tokio::test(start_paused = true)]
async fn a_batch_that_leaves_the_ring_while_it_is_taken_is_not_passed() {
    let dispatcher = suspended(1);
    let mut paced = dispatcher.subscribe(Filter::prefix("")).every(PACE).unwrap().batches();
    assert!(paced.next().now_or_never().is_none());
    let shared = dispatcher.shared();
    shared.publish(vec![database("a", 101)], at(101), at(101));
    let newest = {
        let mut patterns = shared.patterns.lock();
        let pattern = Arc::clone(patterns.all().last().unwrap());
        patterns.newest(&pattern)
    };
    let state = Arc::clone(&paced.source.reader.state);
    let not_listed = Arc::strong_count(&state);
    let runtime = tokio::runtime::Handle::current();
    let looks = newest.lock();
    let reader = std::thread::spawn(move || {
        let _runtime = runtime.enter();
        assert!(paced.next().now_or_never().is_none(), "it reads the feed");
        paced.cursor()
    });
    while Arc::strong_count(&state) == not_listed {
        std::thread::yield_now();
    }
    shared.publish(vec![database("b", 102)], at(102), at(102));
    drop(looks);
    assert_eq!(reader.join().unwrap(), Cursor::from(at(100)));
}

/// Regression: during the pause between two rounds, a reader checked twice: whether a row waits, and then which row to take. A row that
/// arrived in between was taken at once, although the pace was an hour.
#[tokio::test]
async fn what_comes_while_a_paced_reader_looks_waits_for_its_round() {
    let dispatcher = suspended(100);
    let shared = Arc::clone(dispatcher.shared());
    let (ask, asked) = std::sync::mpsc::channel();
    let publisher = std::thread::spawn(move || {
        for version in asked {
            shared.publish(vec![database("b", version)], at(version), at(version));
        }
    });
    for trial in 0..5_000 {
        tokio::task::yield_now().await;
        let subscribe = dispatcher.subscribe(Filter::prefix("")).every(Duration::from_hours(1)).unwrap();
        let mut paced = subscribe.batches();
        let mut poll = || tokio::task::unconstrained(paced.next()).now_or_never();
        let version = 101 + 2 * trial;
        dispatcher.shared().publish(vec![database("a", version)], at(version), at(version));
        assert!(poll().is_some(), "the first round comes at once");
        ask.send(version + 1).unwrap();
        while dispatcher.position() == at(version) {
            assert!(poll().is_none(), "the next round came in the pause of the first");
        }
    }
    drop(ask);
    publisher.join().unwrap();
}
