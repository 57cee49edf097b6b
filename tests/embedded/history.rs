//! Histories of a store: readers whose folder is replaced by an older copy, or whose store starts from nothing.

use std::{fs, path::Path, time::Duration};

use crate::common::{db, eager, joined, record, row_with, wide_bus, within};
use crate::disk::SimulatedDisk;
use notibus::{
    Bus, BusOptions, Cursor, DispatcherOptions, Error, Filter, Notification, Sequence,
    consumer::ConsumerSettings,
    cursor::Start,
    dispatcher::Item,
    event::{Incarnation, Versionstamp},
    feed::FeedPage,
    relocation::ExportOptions,
    store::{Store, Transaction},
};
use tokio_stream::StreamExt;

/// Records the update of `a` with number `count`, and waits until it is folded.
async fn update(store: &Store, bus: &Bus, count: u64) {
    record(store, bus, &db("a", 1), [0, 0, 1, 0]).await;
    row_with(bus, &db("a", 1), [1, 0, count, 0]).await;
}

/// Returns the position of a reader that has read everything.
async fn now(bus: &Bus) -> Sequence {
    bus.feed().now().await.unwrap()
}

/// Whether a reader at `since` is refused because its position belongs to another history.
async fn is_expired(bus: &Bus, since: impl Into<Cursor>) -> bool {
    match bus.feed().page(since, 10).await {
        Ok(_) => false,
        Err(Error::Expired { .. }) => true,
        Err(error) => panic!("{error}"),
    }
}

/// Runs a bus in `folder` and copies it to `copy`. Returns a position from before the copy, and one from after it.
async fn live_and_copy(folder: &Path, copy: &Path) -> (Sequence, Sequence) {
    let store = Store::open_dir(folder).unwrap();
    let bus = wide_bus(&store).await;
    let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    record(&store, &bus, &db("a", 1), [1, 0, 0, 0]).await;
    update(&store, &bus, 1).await;
    let kept = now(&bus).await;
    let report = Store::backup_dir(folder, copy).unwrap();
    assert!(report.is_open && report.rows > 3 && report.damages.is_empty(), "{report:?}");
    update(&store, &bus, 2).await;
    let lost = now(&bus).await;
    notifier.shutdown().await.unwrap();
    (kept, lost)
}

/// Regression: a reader at a position that a restored copy did not have was refused only at first, so a few seconds later it got the next
/// rows, and missed what had happened since the copy.
#[tokio::test]
async fn a_reader_of_a_history_that_was_lost_has_expired() {
    let parent = tempfile::tempdir().unwrap();
    let (folder, copy) = (parent.path().join("store"), parent.path().join("copy"));
    let (kept, lost) = live_and_copy(&folder, &copy).await;
    fs::remove_dir_all(&folder).unwrap();
    fs::rename(&copy, &folder).unwrap();

    // This version is long after the copy, so the folder of the copy, opened at once, is behind it, as on a machine whose clock was set
    // back.
    let ahead = Versionstamp::new(lost.versionstamp().version() + 3_600_000_000, 0);
    let ahead = Sequence::new(lost.incarnation(), ahead, 0);
    let mut positions = vec![kept];
    for round in 0..3 {
        let store = Store::open_dir(&folder).unwrap();
        let bus = wide_bus(&store).await;
        let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
        for count in [2 * round + 2, 2 * round + 3] {
            assert!(is_expired(&bus, lost).await, "{round}");
            assert!(is_expired(&bus, ahead).await, "{round}");
            assert!(!is_expired(&bus, Cursor::BEGINNING).await, "{round}");
            for &position in &positions {
                assert!(!is_expired(&bus, position).await, "{round}");
            }
            update(&store, &bus, count).await;
            assert_eq!(bus.feed().page(kept, 10).await.unwrap().rows.len(), 1);
            positions.push(now(&bus).await);
        }
        // A subscriber gets `Expired`, and starts with nothing.
        let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
        let mut rows = dispatcher.subscribe(Filter::all()).since(Start::from(lost)).stream();
        let first = within("an interruption", rows.next()).await.unwrap();
        assert!(matches!(first, Item::Expired { .. }), "{first:?}");
        assert!(within("a row", rows.next()).await.unwrap().into_delivery().is_some());
        // A consumer cannot start at the lost position either.
        let settings = ConsumerSettings::default().start(Start::from(lost));
        let refused = bus.consumer("mailer").unwrap().create(&settings).await;
        assert!(matches!(refused, Err(Error::Expired { .. })), "{refused:?}");
        drop(rows);
        dispatcher.shutdown().await;
        notifier.shutdown().await.unwrap();
    }

    // Bug: after a move to another store, only the end of the previous incarnation was known, and that is after the lost position. Fix: the
    // export contains the versions that the folder has given out.
    let (mut export, store) = (Vec::new(), Store::memory());
    let bus = wide_bus(&Store::open_dir(&folder).unwrap()).await;
    bus.export(&mut export, ExportOptions::default()).await.unwrap();
    Bus::import(&store, &BusOptions::default().prefix, &mut &export[..]).await.unwrap();
    let bus = wide_bus(&store).await;
    assert!(is_expired(&bus, lost).await);
    assert!(is_expired(&bus, ahead).await);
    for position in positions {
        assert!(!is_expired(&bus, position).await);
    }
}

/// Bug: raising the incarnation ended the previous one at its last row, and refused readers beyond that row which had read to the end of
/// the copy, so a job that kept its cursor in the store expired for good. Fix: a folder knows which versions it has given out.
///
/// Bug: if the copy was opened before, such as by a raise without `force`, the previous incarnation was ended there, after the positions
/// that were lost.
#[tokio::test]
async fn what_was_kept_in_a_copy_stays_valid_after_a_raise() {
    let parent = tempfile::tempdir().unwrap();
    let (folder, copy) = (parent.path().join("store"), parent.path().join("copy"));
    let store = Store::open_dir(&folder).unwrap();
    let bus = wide_bus(&store).await;
    let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    record(&store, &bus, &db("a", 1), [1, 0, 0, 0]).await;
    update(&store, &bus, 1).await;
    // This commit is after the last row, and an idle reader has passed it.
    let write = async |tx: Transaction| {
        tx.set(b"layer", b"1");
        Ok(())
    };
    store.run(write).await.unwrap();
    let kept = bus.feed().page(Cursor::BEGINNING, 10).await.unwrap().next;
    Store::backup_dir(&folder, &copy).unwrap();
    update(&store, &bus, 2).await;
    let lost = bus.feed().page(kept, 10).await.unwrap().next;
    notifier.shutdown().await.unwrap();
    drop((bus, store));

    let raise = async |force| {
        let store = Store::open_dir(&copy).unwrap();
        Bus::raise_incarnation(&store, &BusOptions::default().prefix, Incarnation(0), force).await
    };
    let refused = raise(false).await;
    assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
    raise(true).await.unwrap();
    let bus = wide_bus(&Store::open_dir(&copy).unwrap()).await;
    assert!(is_expired(&bus, lost).await);
    assert_eq!(bus.feed().page(kept, 10).await.unwrap().rows.len(), 0, "{kept}");
}

/// A reader gets a page after the copy was made, and the page lacks a row that has moved. Bug: in the copy the row is still at its old
/// position, where the reader never read again, so it missed the row. Fix: its cursor says up to where its last page could read.
#[tokio::test]
async fn who_has_passed_a_row_that_moved_after_the_copy_has_expired() {
    let parent = tempfile::tempdir().unwrap();
    let (folder, copy) = (parent.path().join("store"), parent.path().join("copy"));
    let store = Store::open_dir(&folder).unwrap();
    let bus = wide_bus(&store).await;
    let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    for (number, name) in ["a", "b", "c", "d", "e"].into_iter().enumerate() {
        record(&store, &bus, &db(name, number as u8), [1, 0, 0, 0]).await;
        row_with(&bus, &db(name, number as u8), [1, 0, 0, 0]).await;
    }
    let begun = [Cursor::BEGINNING, now(&bus).await.into()];
    let next = async |cursor: Cursor| bus.feed().page(cursor, 1).await.unwrap();
    let names = |page: &FeedPage<Notification>| {
        page.rows.iter().map(|row| row.name.to_string()).collect::<Vec<_>>().concat()
    };
    let first = next(Cursor::BEGINNING).await;
    assert_eq!(names(&first), "a");
    Store::backup_dir(&folder, &copy).unwrap();
    record(&store, &bus, &db("b", 1), [0, 0, 1, 0]).await;
    row_with(&bus, &db("b", 1), [1, 0, 1, 0]).await;
    let second = next(first.next).await;
    assert_eq!(names(&second), "c", "b has moved");
    notifier.shutdown().await.unwrap();
    drop((bus, store));

    let raised = parent.path().join("raised");
    Store::backup_dir(&copy, &raised).unwrap();
    Bus::raise_incarnation(
        &Store::open_dir(&raised).unwrap(),
        &BusOptions::default().prefix,
        Incarnation(0),
        true,
    )
    .await
    .unwrap();
    for folder in [copy, raised] {
        let bus = wide_bus(&Store::open_dir(&folder).unwrap()).await;
        assert!(is_expired(&bus, second.next).await, "{folder:?}");
        for cursor in begun.into_iter().chain([first.next]) {
            assert!(!is_expired(&bus, cursor).await, "{folder:?}");
        }
        assert_eq!(names(&bus.feed().page(first.next, 1).await.unwrap()), "b", "{folder:?}");
    }
}

/// A new store in memory knows nothing about the stores before it.
#[tokio::test]
async fn a_reader_of_a_store_in_memory_that_is_gone_has_expired() {
    let mut before: Option<Sequence> = None;
    for _ in 0..2 {
        let store = Store::memory();
        let bus = wide_bus(&store).await;
        let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
        record(&store, &bus, &db("a", 1), [1, 0, 0, 0]).await;
        update(&store, &bus, 1).await;
        if let Some(before) = before {
            assert!(is_expired(&bus, before).await);
        }
        before = Some(now(&bus).await);
        assert!(!is_expired(&bus, now(&bus).await).await);
        notifier.shutdown().await.unwrap();
        // Versions are in microseconds, but of a clock that is read in milliseconds.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A reader continues after every end of the store that loses nothing: a close, a kill, and a power failure.
#[tokio::test]
async fn a_reader_of_what_was_kept_goes_on() {
    let mut disk = SimulatedDisk::new(512);
    let mut positions = Vec::new();
    for round in 0..6 {
        let store = disk.open_small(2_000).unwrap();
        let bus = wide_bus(&store).await;
        let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
        if round == 0 {
            record(&store, &bus, &db("a", 1), [1, 0, 0, 0]).await;
        }
        for &position in &positions {
            assert!(!is_expired(&bus, position).await, "{round}");
        }
        positions.push(now(&bus).await);
        update(&store, &bus, round + 1).await;
        positions.push(now(&bus).await);
        let next = match round % 3 {
            0 => disk.clone(),
            1 => disk.copied(),
            _ => disk.after_power_failure(|_| 0).0,
        };
        notifier.shutdown().await.unwrap();
        drop(bus);
        drop(store);
        disk = next;
    }
}
