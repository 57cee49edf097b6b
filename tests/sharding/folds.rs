//! The part of a feed's history that folds read.

use notibus::store::{
    AtomicOp, Store,
    testing::{Operation, Trace},
};

use crate::common::{db, eager, joined, record, row_with, set, stored, wide_bus, within};

/// Bug: each fold read every topology entry that ever had a row, so folding slowed down with each reshard. Fix: it reads the open entry,
/// and those with the rows that it replaces. So it does not even notice what became of the others.
#[tokio::test(start_paused = true)]
async fn a_fold_reads_only_the_topology_entries_that_it_needs() {
    const PAST: usize = 200;
    let trace = Trace::new(&Store::memory());
    let store = trace.store();
    let bus = wide_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let name = |number: usize| db(&format!("db{number}"), 1);
    for number in 0..=PAST {
        record(&store, &bus, &name(number), [1, 0, 0, 0]).await;
        row_with(&bus, &name(number), [1, 0, 0, 0]).await;
        if number < PAST {
            bus.feed().reshard(1, None).await.unwrap();
        }
    }
    let is_entry = |key: &[u8]| key.starts_with(b"notibus\x15\x07");
    let entries: Vec<_> = stored(&store, b"notibus\x15\x07").await.into_iter().map(|(key, _)| key).collect();
    assert_eq!(entries.len(), PAST + 1);
    for (_, entry) in entries[..PAST].iter().enumerate().filter(|(number, _)| *number != 7) {
        set(&store, entry, b"damaged").await;
    }
    trace.take();
    for (number, reads) in [(PAST, 1), (7, 2)] {
        record(&store, &bus, &name(number), [0, 0, 1, 0]).await;
        within("the fold", row_with(&bus, &name(number), [1, 0, 1, 0])).await;
        let folds = trace.take().into_iter().filter(|attempt| attempt.applies(AtomicOp::CompareAndClear));
        let of_topology =
            |op: &&Operation| matches!(op, Operation::GetRange { range, .. } if is_entry(&range.begin));
        let counts: Vec<_> = folds.map(|fold| fold.reads().filter(of_topology).count()).collect();
        assert_eq!(counts, [reads], "db{number}");
    }
}
