//! The cost of an idle node, in transactions and bytes: nothing grows with partitions, shards or groups.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use notibus::{
    Bus, BusOptions, Cursor, DispatcherOptions, Filter, NodeOptions, Notification, NotifierOptions,
    changes::{Change, ChangesOptions},
    cursor::Start,
    group::{ConsumerOptions, GroupBatch, GroupOptions},
    node::BalanceOptions,
    store::{
        Database, StoreError,
        testing::{Faults, Operation, OperationCounts},
    },
};

use crate::{
    common::db,
    fixture::{GroupFixture, Log, pass},
};

/// How long operations are counted.
const TIME: Duration = Duration::from_mins(30);

#[derive(Debug, Clone, Copy)]
struct Size {
    partitions: u32,
    shards: u32,
    /// Groups of the feed of notifications.
    groups: usize,
    document_groups: usize,
}

const SMALL: Size = Size { partitions: 1, shards: 1, groups: 1, document_groups: 1 };

/// The operations of a node with all roles in [`TIME`] while nothing happens.
async fn idle(size: Size, options: ConsumerOptions) -> OperationCounts {
    let faults = Faults::new(&Database::memory());
    let Size { partitions, shards, .. } = size;
    let bus = Bus::open(&faults.database(), BusOptions::default().partitions(partitions).shards(shards))
        .await
        .unwrap();
    let node = bus.node(NodeOptions::default()).await.unwrap();
    let notifier = node.notifier(NotifierOptions::default()).await.unwrap();
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let _subscription = dispatcher.subscribe(Filter::all()).stream();
    let (changes, docs) = (bus.changes(), db("docs", 1));
    let (producer, layout) = (bus.producer(), ChangesOptions::default().shards(shards));
    let create = async |tx| {
        producer.created(&tx, &docs);
        changes.create(&tx, &docs, &layout).await
    };
    faults.database().run(create).await.unwrap();
    // Nothing is left that could move the pulse once the consumers have begun: the watcher once forgot up to where shards may have
    // rows when it began to follow documents, and each shard was polled for itself until the next one moved.
    pass(Duration::from_secs(1)).await;
    assert!(bus.is_drained().await.unwrap());
    let mut consumers = Vec::new();
    for number in 0..size.groups {
        let group = bus.group(&format!("g{number}")).unwrap();
        group.create(&GroupOptions::default()).await.unwrap();
        let observe = |_: GroupBatch<Notification>| std::future::ready(Ok(()));
        consumers.push(node.consumer(&group, move |_| observe, options.clone()).await.unwrap());
    }
    for number in 0..size.document_groups {
        let group = changes.feed(&docs).group(&format!("d{number}")).unwrap();
        group.create(&GroupOptions::default()).await.unwrap();
        let observe = |_: GroupBatch<Change>| std::future::ready(Ok(()));
        consumers.push(node.consumer(&group, move |_| observe, options.clone()).await.unwrap());
    }
    pass(Duration::from_mins(5)).await;
    let before = faults.counts();
    pass(TIME).await;
    let spent = faults.counts() - before;
    assert!(consumers.iter().all(|consumer| consumer.shards().len() == shards as usize));
    assert_eq!(notifier.partitions().len(), partitions as usize);
    println!("{size:?}: {spent:?}");
    spent
}

/// A node with all roles begins a transaction each second, in which the notifier, the tail, the watcher and the watch over other nodes
/// poll; each 2 s its heartbeat; each minute one read of a shard of documents.
#[tokio::test(start_paused = true)]
async fn an_idle_node_costs_the_same_whatever_it_has_to_do_with() {
    let options = ConsumerOptions::default();
    let least = idle(SMALL, options.clone()).await;
    let seconds = TIME.as_secs();
    assert!(least.transactions <= seconds * 8 / 5 && least.reads <= seconds * 9, "{least:?}");
    assert!(least.read_bytes <= seconds * 1_300 && least.written_bytes <= seconds * 60, "{least:?}");
    for size in [
        Size { partitions: 256, ..SMALL },
        Size { shards: 32, ..SMALL },
        Size { groups: 16, ..SMALL },
        Size { document_groups: 16, ..SMALL },
        Size { partitions: 256, shards: 16, groups: 8, document_groups: 8 },
    ] {
        let spent = idle(size, options.clone()).await;
        // Pauses are jittered; and keys have a byte more where numbers are greater.
        let within = |spent: u64, least: u64, percent: u64| spent * 100 <= least * (100 + percent);
        assert!(within(spent.transactions, least.transactions, 3), "{size:?}: {spent:?} after {least:?}");
        assert!(within(spent.write_commits, least.write_commits, 3), "{size:?}: {spent:?} after {least:?}");
        assert!(within(spent.reads, least.reads, 3), "{size:?}: {spent:?} after {least:?}");
        assert!(within(spent.written_bytes, least.written_bytes, 3), "{size:?}: {spent:?} after {least:?}");
        assert!(within(spent.read_bytes, least.read_bytes, 10), "{size:?}: {spent:?} after {least:?}");
    }
}

/// The watcher of the process polls for all shards at once, so their own polls have nothing to do; shards of documents share one.
#[tokio::test(start_paused = true)]
async fn shards_are_not_polled_while_the_watcher_polls() {
    let never = ConsumerOptions::default().poll_interval(Duration::from_hours(10_000));
    let size = Size { shards: 16, groups: 2, document_groups: 2, ..SMALL };
    let (without, with) = (idle(size, never).await, idle(size, ConsumerOptions::default()).await);
    let minutes = TIME.as_secs() / 60;
    assert!(
        with.transactions <= without.transactions * 101 / 100 + minutes * 2,
        "{with:?} after {without:?}"
    );
    assert!(
        with.transactions > without.transactions,
        "shards of documents are polled: {with:?} after {without:?}"
    );
}

/// While a group does not get on, its checkpoints are read for the row of the lowest one every ten minutes, not every half a minute.
#[tokio::test(start_paused = true)]
async fn the_checkpoints_of_a_group_that_is_stuck_are_read_less_and_less() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let looks = Arc::new(AtomicUsize::new(0));
    let counts = Arc::clone(&looks);
    fixture.faults.plan_reads(move |operation| {
        let lowest = b"notibus\x15\x0c\x01n\x00\x15\x05";
        let is_poll = matches!(operation, Operation::Get { key, .. } if key.starts_with(lowest));
        counts.fetch_add(is_poll.into(), Ordering::SeqCst);
        None
    });
    let log = Log::doing(|_| std::future::ready(Err("as planned".into())));
    let consumer = log.consume(&fixture.bus, &group, ConsumerOptions::default()).await;
    fixture.create(["a"]).await;
    pass(Duration::from_hours(2)).await;
    let looks = looks.load(Ordering::SeqCst);
    assert!((10..=25).contains(&looks), "{looks}");
    consumer.shutdown().await.unwrap();
}

/// If the watcher cannot poll, each shard is polled for itself, and rows still come.
#[tokio::test(start_paused = true)]
async fn shards_are_polled_when_the_watcher_cannot_poll() {
    let fixture = GroupFixture::new(3).await;
    let group = fixture.group(Start::Now).await;
    let log = Log::new();
    let consumer = log.consume(&fixture.bus, &group, ConsumerOptions::default()).await;
    pass(Duration::from_mins(5)).await;
    // The pulse of the feed cannot be read.
    fixture.faults.plan_reads(|operation| match operation {
        Operation::Get { key, .. } => key.starts_with(b"notibus\x15\x0f").then_some(StoreError::IO_ERROR),
        _ => None,
    });
    pass(Duration::from_mins(2)).await;
    fixture.create(["a"]).await;
    log.until_names(&["a".to_owned()]).await;
    consumer.shutdown().await.unwrap();
    log.check(true);
}

/// A settled worker learns of new work by its next poll: another node that joins, a group that begins again.
#[tokio::test(start_paused = true)]
async fn a_node_that_has_settled_notices_what_changes() {
    let fixture = GroupFixture::new(4).await;
    let (one, two) = (fixture.group(Start::Now).await, fixture.bus.group("two").unwrap());
    two.create(&GroupOptions::default()).await.unwrap();
    let log = Log::new();
    let node = fixture.bus.node(NodeOptions::default()).await.unwrap();
    let observe = |_: GroupBatch<Notification>| std::future::ready(Ok(()));
    let consumer = node.consumer(&two, move |_| observe, ConsumerOptions::default()).await.unwrap();
    let consumers = [log.consume(&fixture.bus, &one, ConsumerOptions::default()).await];
    pass(Duration::from_mins(20)).await;
    assert_eq!((consumer.shards().len(), consumers[0].shards().len()), (4, 4));
    let interval = BalanceOptions::default().interval;

    let joined = log.consume(&fixture.bus, &one, ConsumerOptions::default()).await;
    pass(interval * 2).await;
    assert_eq!((joined.shards().len(), consumers[0].shards().len()), (2, 2), "a node has joined");
    pass(Duration::from_mins(20)).await;

    two.delete(true).await.unwrap();
    pass(interval + Duration::from_secs(1)).await;
    assert_eq!(consumer.shards().len(), 0, "the group is deleted");
    pass(Duration::from_mins(20)).await;
    two.create(&GroupOptions::default()).await.unwrap();
    pass(interval + Duration::from_secs(1)).await;
    assert_eq!(consumer.shards().len(), 4, "the group is created again");

    pass(Duration::from_mins(20)).await;
    // It dies without a hint.
    drop(joined);
    pass(NodeOptions::default().expiry + interval * 2).await;
    assert_eq!(consumers[0].shards().len(), 4, "a node has died");
}
