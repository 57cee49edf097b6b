//! Readers between two pages of the tail, where no test from outside can stop it.

use std::{sync::Arc, time::Duration};

use futures_util::{FutureExt, StreamExt};

use crate::{
    base::{
        cursor::{Cursor, Knowledge},
        encoding::{Incarnation, Sequence, Versionstamp},
        event::DbName,
        notification::{Notification, tests::row},
    },
    roles::dispatcher::{DeliveryBatch, DispatcherOptions, Fanout, Filter, Interruption},
    state::{
        context::Context,
        keys::{Config, Keys},
        routing::Schemes,
    },
    store::Database,
};

const PACE: Duration = Duration::from_secs(1);

fn at(version: u64) -> Sequence {
    Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
}

fn database(name: &str, version: u64) -> Arc<Notification> {
    Arc::new(Notification { name: DbName::new(name).unwrap(), replaced: None, ..row(at(version)) })
}

/// A dispatcher without a tail, at 100.
fn fanout(ring_rows_max: usize) -> Fanout {
    let config = Config { partitions: 1, incarnation: Incarnation(0) };
    let context = Context::new(Database::memory(), Keys::new(b"t").unwrap(), config, Schemes::default());
    Fanout::new(context, &DispatcherOptions { ring_rows_max, ..DispatcherOptions::default() }, at(100))
        .unwrap()
}

/// A round of `subscription`, which has to be there.
fn round(
    subscription: &mut (impl StreamExt<Item = Result<DeliveryBatch, Interruption>> + Unpin),
) -> DeliveryBatch {
    subscription.next().now_or_never().expect("a round").unwrap().unwrap()
}

/// A round takes in a reading that is complete at 101, and the first page, up to 102, of the next one. The rest of that comes
/// with the next round. Once, a reader learned from it that it knew everything up to 101, and stood there again: a listener whose
/// filter was replaced with that round in hand, or a stream that was made again from where it stood, was delivered the row at 102 twice.
#[tokio::test(start_paused = true)]
async fn knowing_more_sets_nobody_back() {
    let fanout = fanout(100);
    let mut paced = fanout.subscribe(Filter::prefix("")).every(PACE).unwrap().batches();
    assert!(paced.next().now_or_never().is_none());
    let shared = fanout.shared();
    shared.hand_out(vec![database("a", 101)], at(101), true);
    shared.hand_out(vec![database("b", 102)], at(102), false);
    assert_eq!(round(&mut paced).len(), 2);
    shared.hand_out(vec![database("c", 103)], at(103), false);
    tokio::time::sleep(PACE).await;
    let batch = round(&mut paced);
    assert_eq!(batch.cursor_after(0), Cursor::resumed(Knowledge::UpTo(at(101)), at(102), at(102)));
    assert_eq!(batch.delivery(0).sequence(), at(103));
}

/// The same reader rests after its round, is woken by the rest of the reading, and overrun before it comes: the ring has dropped what
/// it was woken for. It goes on by reading the feed from where it stood: once from 101, with the row at 102 for the second time.
#[tokio::test(start_paused = true)]
async fn who_is_overrun_within_a_reading_is_not_set_back() {
    let fanout = fanout(2);
    let mut paced = fanout.subscribe(Filter::prefix("")).every(PACE).unwrap().batches();
    assert!(paced.next().now_or_never().is_none());
    let shared = fanout.shared();
    shared.hand_out(vec![database("a", 101)], at(101), true);
    shared.hand_out(vec![database("b", 102)], at(102), false);
    assert_eq!(round(&mut paced).len(), 2);
    assert!(paced.next().now_or_never().is_none(), "it rests");
    for version in 103..110 {
        shared.hand_out(vec![database("c", version)], at(version), false);
    }
    tokio::time::sleep(PACE).await;
    assert!(paced.next().now_or_never().is_none(), "it reads the feed");
    assert_eq!(paced.cursor(), Cursor::resumed(Knowledge::UpTo(at(101)), at(102), at(102)));
}
