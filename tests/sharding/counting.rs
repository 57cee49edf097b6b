//! The rows of each shard are counted as they are written, whatever is written.

use std::collections::HashMap;

use notibus::{
    Bus, Cursor, Db, Error, Sequence,
    changes::{ChangesOptions, DocId, DocSummary, Revision},
    store::{Store, Transaction},
};

use crate::common::{db, dice, wide_bus};

/// Makes revision number `position` of document number `id`.
fn doc(id: u8, position: u64) -> DocSummary {
    let revision = Revision { position, hash: [1; 16] };
    DocSummary { id: DocId::new(&format!("doc{id}")).unwrap(), revision, branches: 1, is_deleted: false }
}

/// Fails unless the row counts after each of `positions`, and in each shard, match what a reader finds.
async fn check(bus: &Bus, db: &Db, positions: impl IntoIterator<Item = Cursor>) {
    let feed = bus.changes().feed(db);
    for position in positions {
        let page = feed.page(position, 10_000).await.unwrap();
        assert_eq!(feed.pending(position).await.unwrap(), page.rows.len() as u64, "behind {position}");
    }
    for shard in feed.shards().await.unwrap() {
        let rows = feed.shard_page(shard, Cursor::BEGINNING, 10_000).await.unwrap().rows;
        assert_eq!(feed.shard_rows(shard).await.unwrap(), rows.len() as u64, "shard {shard}");
    }
}

/// Edits several documents at once, and one document several times, across reshards and removals.
#[tokio::test]
async fn rows_are_counted_whatever_is_written() {
    let mut dice = dice();
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let (changes, db) = (bus.changes(), db("docs", 1));
    let create = async |tx: &Transaction, shards| {
        changes.create(tx, &db, &ChangesOptions::default().shards(shards)).await
    };
    store.run(async |tx| create(&tx, 3).await).await.unwrap();
    let mut edits: HashMap<u8, Sequence> = HashMap::new();
    for step in 1..=400_u64 {
        if dice.u8(..) < 8 {
            changes.feed(&db).reshard(dice.u32(1..6), None).await.unwrap();
        }
        let ids: Vec<u8> = (0..dice.usize(1..6)).map(|_| dice.u8(0..60)).collect();
        let (again, is_removed) = (dice.bool(), dice.u8(..) < 4);
        let edit = async |tx| {
            let mut pending = Vec::new();
            for id in ids.iter().chain(ids.iter().filter(|_| again)) {
                let writer = changes.writer(&tx, &db).await?;
                pending.push((*id, writer.record(&doc(*id, step), edits.get(id).copied())?));
            }
            if is_removed {
                changes.remove(&tx, &db);
                create(&tx, 2).await?;
                pending = vec![(7, changes.writer(&tx, &db).await?.record(&doc(7, step), None)?)];
            }
            Ok(pending)
        };
        let done = bus.run_exactly_once(None, edit).await.unwrap();
        if is_removed {
            edits.clear();
        }
        edits.extend(done.value.into_iter().map(|(id, edited)| (id, edited.of(done.committed))));
        if step % 10 == 0 {
            let some = edits.values().copied().map(Cursor::from);
            check(&bus, &db, some.chain([Cursor::BEGINNING])).await;
        }
    }
    let removed = async |tx| {
        changes.remove(&tx, &db);
        Ok(())
    };
    store.run(removed).await.unwrap();
    assert!(matches!(changes.feed(&db).pending(Cursor::BEGINNING).await, Err(Error::NoFeed { .. })));
}

/// Regression: if a layer named one previous edit twice after a reshard, one row too many was subtracted from the count of the earlier
/// shard, so each `_changes` feed that asked for `pending` was cut off.
#[tokio::test]
async fn a_count_that_a_layer_has_made_negative_stops_no_reader() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let (changes, db) = (bus.changes(), db("docs", 1));
    let options = ChangesOptions::default().shards(1);
    store.run(async |tx| changes.create(&tx, &db, &options).await).await.unwrap();
    let edit = async |position, previous| {
        let write = async |tx| changes.writer(&tx, &db).await?.record(&doc(1, position), previous);
        let done = bus.run_exactly_once(None, write).await.unwrap();
        done.value.of(done.committed)
    };
    let first = edit(1, None).await;
    changes.feed(&db).reshard(1, None).await.unwrap();
    edit(2, Some(first)).await;
    edit(3, Some(first)).await;
    let feed = changes.feed(&db);
    assert_eq!(feed.pending(Cursor::BEGINNING).await.unwrap(), 2);
    let shard = feed.shards().await.unwrap()[0];
    assert_eq!(feed.shard_rows(shard).await.unwrap(), 0);
}

/// An export includes the counts.
#[tokio::test]
async fn the_counts_move_with_the_rows() {
    let (old, new) = (Store::memory(), Store::memory());
    let bus = wide_bus(&old).await;
    let (changes, db) = (bus.changes(), db("docs", 1));
    old.run(async |tx| changes.create(&tx, &db, &ChangesOptions::default()).await).await.unwrap();
    for id in 0..20 {
        let write = async |tx| changes.writer(&tx, &db).await?.record(&doc(id, 1), None).map(|_| ());
        old.run(write).await.unwrap();
    }
    let mut export = Vec::new();
    bus.export(&mut export, notibus::relocation::ExportOptions::default()).await.unwrap();
    Bus::import(&new, b"notibus", &mut &export[..]).await.unwrap();
    let moved = wide_bus(&new).await;
    assert_eq!(moved.changes().feed(&db).pending(Cursor::BEGINNING).await.unwrap(), 20);
    check(&moved, &db, [Cursor::BEGINNING]).await;
}

/// A transaction may write to the same feed of two buses. Regression: the second bus took its documents for already written, and did not
/// count their rows.
#[tokio::test]
async fn the_rows_of_two_buses_in_one_transaction_are_counted_apart() {
    let (store, db) = (Store::memory(), db("docs", 1));
    let bus = async |prefix: &[u8]| {
        let options = notibus::BusOptions::default().prefix(prefix.to_vec());
        Bus::open(&store, options).await.unwrap()
    };
    let buses = [bus(b"old").await, bus(b"new").await];
    let write = async |tx: Transaction| {
        for bus in &buses {
            let changes = bus.changes();
            changes.create(&tx, &db, &ChangesOptions::default()).await?;
            let writer = changes.writer(&tx, &db).await?;
            for id in 0..3 {
                writer.record(&doc(id, 1), None)?;
            }
        }
        Ok(())
    };
    store.run(write).await.unwrap();
    for bus in &buses {
        check(bus, &db, [Cursor::BEGINNING]).await;
    }
    // Nor does the removal in one bus end writers of the other.
    let moved = async |tx: Transaction| {
        let changes = buses[1].changes();
        let writer = changes.writer(&tx, &db).await?;
        buses[0].changes().remove(&tx, &db);
        writer.record(&doc(9, 1), None)?;
        Ok(())
    };
    store.run(moved).await.unwrap();
}
