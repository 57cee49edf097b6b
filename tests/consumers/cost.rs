//! The cost of consumers in transactions, reads and writes. While nothing changes, the cost does not grow with partitions, shards or
//! consumers, and a feed is read once for all consumers of a node.

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
    consumer::{Batch, ConsumerOptions, ConsumerSettings, Work},
    node::BalanceOptions,
    store::{
        Store, StoreError,
        testing::{Attempt, Faults, Operation, OperationCounts, Trace},
    },
};

use crate::{
    common::{db, joined, narrow_bus, record, row_with},
    fixture::{ConsumerFixture, Log, pass},
};

/// The period over which operations are counted.
const TIME: Duration = Duration::from_mins(30);

/// The prefix of the keys of all consumers.
const CONSUMERS: &[u8] = b"notibus\x15\x19";

/// The prefix of the keys of low watermarks.
const LOW_WATERMARKS: &[u8] = b"notibus\x15\x19\x15\x03";

/// The prefix of the keys of rows in feeds.
const ROWS: &[u8] = b"notibus\x15\x04";

#[derive(Debug, Clone, Copy)]
struct Size {
    partitions: u32,
    shards: u32,
    /// The number of consumers of notifications.
    consumers: usize,
    of_documents: usize,
}

const SMALL: Size = Size { partitions: 1, shards: 1, consumers: 1, of_documents: 1 };

/// Counts the operations of a node with all roles in [`TIME`] while nothing happens.
async fn idle(size: Size, options: ConsumerOptions) -> OperationCounts {
    let faults = Faults::new(&Store::memory());
    let Size { partitions, shards, .. } = size;
    let bus = Bus::open(&faults.store(), BusOptions::default().partitions(partitions).shards(shards))
        .await
        .unwrap();
    let node = bus.node(NodeOptions::default()).await.unwrap();
    let notifier = node.notifier(NotifierOptions::default()).await.unwrap();
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let _subscription = dispatcher.subscribe(Filter::all()).stream();
    let (changes, docs) = (bus.changes(), db("docs", 1));
    let (producer, layout) = (bus.producer(), ChangesOptions::default());
    let create = async |tx| {
        producer.created(&tx, &docs);
        changes.create(&tx, &docs, &layout).await
    };
    faults.store().run(create).await.unwrap();
    // Let everything settle that could move the pulse after the consumers have started. Regression: the watcher forgot up to where each
    // shard may have rows when it began to follow documents, so each shard was polled separately until the next change.
    pass(Duration::from_secs(1)).await;
    assert!(bus.is_drained().await.unwrap());
    let mut members = Vec::new();
    for number in 0..size.consumers {
        let member = node.consumer(&format!("c{number}")).unwrap().options(options.clone());
        members.push(member.run(async |_: Work<Notification>| Ok(())).await.unwrap());
    }
    for number in 0..size.of_documents {
        let member = node.consumer(&format!("d{number}")).unwrap().options(options.clone());
        let member = member.documents(&changes.feed(&docs));
        members.push(member.run(async |_: Work<Change>| Ok(())).await.unwrap());
    }
    pass(Duration::from_mins(5)).await;
    let before = faults.counts();
    pass(TIME).await;
    let spent = faults.counts() - before;
    let working: usize = members.iter().map(|member| member.shards().len()).sum();
    assert_eq!(working, size.consumers * shards as usize + size.of_documents);
    assert_eq!(notifier.partitions().len(), partitions as usize);
    println!("{size:?}: {spent:?}");
    spent
}

/// A node with all roles begins a transaction each second, in which the notifier, the tail, the watcher and the watch over other nodes poll
/// with two reads at one read version. Every 2 s it writes its heartbeat, which reads nothing. Every minute it checks the end of each shard
/// of documents (`waiting` counts these checks).
#[tokio::test(start_paused = true)]
async fn an_idle_node_costs_the_same_whatever_it_has_to_do_with() {
    let options = ConsumerOptions::default();
    let least = idle(SMALL, options.clone()).await;
    let seconds = TIME.as_secs();
    assert!(least.transactions <= seconds * 8 / 5 && least.reads <= seconds * 16 / 5, "{least:?}");
    assert!(least.read_bytes <= seconds * 1_300 && least.written_bytes <= seconds * 60, "{least:?}");
    for size in [
        Size { partitions: 256, ..SMALL },
        Size { shards: 32, ..SMALL },
        Size { consumers: 16, ..SMALL },
        Size { of_documents: 16, ..SMALL },
        Size { partitions: 256, shards: 16, consumers: 8, of_documents: 8 },
    ] {
        let spent = idle(size, options.clone()).await;
        // The tolerance covers jittered pauses, and keys that are a byte longer because they contain larger numbers.
        let within = |spent: u64, least: u64, percent: u64| spent * 100 <= least * (100 + percent);
        assert!(within(spent.transactions, least.transactions, 3), "{size:?}: {spent:?} after {least:?}");
        assert!(within(spent.write_commits, least.write_commits, 3), "{size:?}: {spent:?} after {least:?}");
        assert!(within(spent.reads, least.reads, 3), "{size:?}: {spent:?} after {least:?}");
        assert!(within(spent.written_bytes, least.written_bytes, 3), "{size:?}: {spent:?} after {least:?}");
        assert!(within(spent.read_bytes, least.read_bytes, 10), "{size:?}: {spent:?} after {least:?}");
    }
}

/// The watcher of the process polls for all shards at once, so the shards have no reason to poll separately.
#[tokio::test(start_paused = true)]
async fn shards_are_not_polled_while_the_watcher_polls() {
    let never = ConsumerOptions::default().poll_interval(Duration::MAX);
    let size = Size { shards: 16, consumers: 2, of_documents: 2, ..SMALL };
    let (without, with) = (idle(size, never).await, idle(size, ConsumerOptions::default()).await);
    assert!(with.transactions <= without.transactions * 101 / 100, "{with:?} after {without:?}");
}

/// Counts the attempts in a trace that write keys that begin with `prefix`.
fn writes_of(attempts: &[Attempt], prefix: &[u8]) -> usize {
    let writes = |attempt: &&Attempt| {
        attempt.mutations().any(|mutation| match mutation {
            Operation::Set { key, .. } | Operation::Clear { key } | Operation::Atomic { key, .. } => {
                key.starts_with(prefix)
            }
            Operation::ClearRange { range } => range.begin.starts_with(prefix),
            _ => false,
        })
    };
    attempts.iter().filter(writes).count()
}

/// Counts the reads of rows, and the writes for consumers, that `consumers` consumers on one node make in half an hour, while a database
/// that `filter` may or may not want is updated every ten seconds.
async fn trickle(consumers: usize, shards: u32, filter: Filter) -> (usize, usize) {
    let store = Store::memory();
    let trace = Trace::new(&store);
    let options = || BusOptions::default().partitions(1).shards(shards);
    let others = Bus::open(&store, options()).await.unwrap();
    let bus = Bus::open(&trace.store(), options()).await.unwrap();
    let notifier = joined(&others).await.notifier(NotifierOptions::default()).await.unwrap();
    let node = joined(&bus).await;
    let mut members = Vec::new();
    for number in 0..consumers {
        let member = node.consumer(&format!("c{number}")).unwrap().filter(filter.clone());
        members.push(member.run(async |_: Work<Notification>| Ok(())).await.unwrap());
    }
    pass(Duration::from_mins(5)).await;
    drop(trace.take());
    for count in 1..=180 {
        record(&store, &others, &db("a", 1), [0, 0, 1, 0]).await;
        row_with(&others, &db("a", 1), [0, 0, count, 0]).await;
        pass(Duration::from_secs(10)).await;
    }
    let attempts = trace.take();
    let operations = attempts.iter().flat_map(|attempt| &attempt.operations);
    let is_read =
        |it: &&Operation| matches!(it, Operation::GetRange { range, .. } if range.begin.starts_with(ROWS));
    let found = (operations.filter(is_read).count(), writes_of(&attempts, CONSUMERS));
    println!("{consumers} consumers of {shards} shards: {found:?} reads of rows and writes of consumers");
    for member in members {
        member.shutdown().await.unwrap();
    }
    notifier.shutdown().await.unwrap();
    found
}

/// Ten consumers on a node read the feed only once.
#[tokio::test(start_paused = true)]
async fn a_node_reads_the_feed_once_for_all_of_its_consumers() {
    let (of_one, _) = trickle(1, 1, Filter::all()).await;
    let (of_ten, _) = trickle(10, 1, Filter::all()).await;
    // The consumers need not read rows for their low watermarks: the tasks of their shards know which rows they have passed.
    assert!(of_one >= 180 && of_ten <= of_one + 20, "{of_ten} reads, and of one {of_one}");
}

/// Unwanted rows cost a consumer one write every half minute, however many shards it has.
#[tokio::test(start_paused = true)]
async fn a_trickle_writes_nothing_per_shard() {
    let wanted = || Filter::name("wanted").unwrap();
    let (_, narrow) = trickle(2, 1, wanted()).await;
    let (_, wide) = trickle(2, 32, wanted()).await;
    let half_minutes = 2 * TIME.as_secs() as usize / 22;
    assert!(narrow > 0 && narrow <= half_minutes, "{narrow} writes");
    assert!(wide <= half_minutes, "{wide} writes with 32 shards, after {narrow} with one");
}

/// Work on a row costs one write of the checkpoint of its shard, and nothing in the other shards.
#[tokio::test(start_paused = true)]
async fn a_row_costs_a_checkpoint_of_its_shard() {
    let (_, narrow) = trickle(1, 1, Filter::all()).await;
    let (_, wide) = trickle(1, 32, Filter::all()).await;
    assert!(
        narrow >= 180 && wide <= narrow * 105 / 100,
        "{wide} writes with 32 shards, after {narrow} with one"
    );
}

/// Nothing is written for consumers while nothing changes, even if they have deferred ids or no members.
#[tokio::test(start_paused = true)]
async fn nothing_is_written_while_nothing_moves() {
    let store = Store::memory();
    let trace = Trace::new(&store);
    let bus = narrow_bus(&trace.store()).await;
    let node = joined(&bus).await;
    let notifier = node.notifier(NotifierOptions::default()).await.unwrap();
    let holds =
        ConsumerOptions::default().attempts_max(1).backoff_max(Duration::MAX).backoff_min(Duration::MAX);
    let fails = async |work: Work<Notification>| {
        if work.id() == b"bad" { Err("it is bad".into()) } else { Ok(()) }
    };
    let deferring = node.consumer("deferring").unwrap().start_from(Cursor::BEGINNING).options(holds);
    let deferring = deferring.run(fails).await.unwrap();
    let batches = node.consumer("batches").unwrap().start_from(Cursor::BEGINNING);
    let batches = batches.run_batches(async |_: Batch<Notification>| Ok(())).await.unwrap();
    bus.consumer("alone").unwrap().create(&ConsumerSettings::default()).await.unwrap();
    for name in ["good", "bad"] {
        record(&store, &bus, &db(name, 1), [1, 0, 0, 0]).await;
        row_with(&bus, &db(name, 1), [1, 0, 0, 0]).await;
    }
    pass(Duration::from_mins(5)).await;
    drop(trace.take());
    pass(Duration::from_hours(2)).await;
    let attempts = trace.take();
    assert_eq!(writes_of(&attempts, CONSUMERS), 0);
    deferring.shutdown().await.unwrap();
    batches.shutdown().await.unwrap();
    notifier.shutdown().await.unwrap();
}

/// While a consumer makes no progress, its checkpoints are read for the low watermark every ten minutes, not every half minute.
#[tokio::test(start_paused = true)]
async fn the_checkpoints_of_a_consumer_that_is_stuck_are_read_less_and_less() {
    let fixture = ConsumerFixture::new(1).await;
    let reads = Arc::new(AtomicUsize::new(0));
    let counts = Arc::clone(&reads);
    fixture.faults.plan_reads(move |operation| {
        let is_read = matches!(operation, Operation::Get { key, .. } if key.starts_with(LOW_WATERMARKS));
        counts.fetch_add(is_read.into(), Ordering::SeqCst);
        None
    });
    let log = Log::doing(async |_: Batch<Notification>| Err("as planned".into()));
    let options = ConsumerOptions::default().failure(notibus::consumer::FailurePolicy::Hold);
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run_batches(log.handler()).await.unwrap();
    fixture.create(["a"]).await;
    pass(Duration::from_hours(2)).await;
    let reads = reads.load(Ordering::SeqCst);
    assert!((10..=60).contains(&reads), "{reads}");
    consumer.shutdown().await.unwrap();
}

/// If the watcher cannot poll, each shard is polled separately, and rows still arrive.
#[tokio::test(start_paused = true)]
async fn shards_are_polled_when_the_watcher_cannot_poll() {
    let fixture = ConsumerFixture::new(3).await;
    let log = Log::<Work<Notification>>::new();
    let member = fixture.member().await.options(ConsumerOptions::default());
    let consumer = member.run(log.handler()).await.unwrap();
    pass(Duration::from_mins(5)).await;
    // Make all reads of the pulse of the feed fail.
    fixture.faults.plan_reads(|operation| match operation {
        Operation::Get { key, .. } => key.starts_with(b"notibus\x15\x0f").then_some(StoreError::IO_ERROR),
        Operation::GetRange { range, .. } => {
            range.end.starts_with(b"notibus\x15\x0f").then_some(StoreError::IO_ERROR)
        }
        _ => None,
    });
    pass(Duration::from_mins(2)).await;
    fixture.create(["a"]).await;
    log.until_names(&["a".to_owned()]).await;
    consumer.shutdown().await.unwrap();
}

/// A settled worker notices changes by its next poll, such as a node that joins, or a consumer that is created again.
#[tokio::test(start_paused = true)]
async fn a_node_that_has_settled_notices_what_changes() {
    let fixture = ConsumerFixture::new(4).await;
    let (log, two) = (Log::<Work<Notification>>::new(), fixture.bus.consumer("two").unwrap());
    let node = fixture.bus.node(NodeOptions::default()).await.unwrap();
    let second = node.consumer("two").unwrap().run(log.handler()).await.unwrap();
    let first = fixture.member().await.run(log.handler()).await.unwrap();
    pass(Duration::from_mins(20)).await;
    assert_eq!((second.shards().len(), first.shards().len()), (4, 4));
    let interval = BalanceOptions::default().interval;

    let joined = fixture.member().await.run(log.handler()).await.unwrap();
    pass(interval * 2).await;
    assert_eq!((joined.shards().len(), first.shards().len()), (2, 2), "a node has joined");
    pass(Duration::from_mins(20)).await;

    two.delete(true).await.unwrap();
    pass(interval + Duration::from_secs(1)).await;
    assert_eq!(second.shards().len(), 0, "the consumer is deleted");
    pass(Duration::from_mins(20)).await;
    two.create(&ConsumerSettings::default()).await.unwrap();
    pass(interval + Duration::from_secs(1)).await;
    assert_eq!(second.shards().len(), 4, "the consumer is created again");

    pass(Duration::from_mins(20)).await;
    // The node dies without notice.
    drop(joined);
    pass(NodeOptions::default().expiry + interval * 2).await;
    assert_eq!(first.shards().len(), 4, "a node has died");
}
