//! Consumers on a cluster: exactly once, while nodes of several clients join and die, and shards change.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use notibus::{
    Bus, Consumer, Cursor, Error, NodeOptions, Notification, NotifierOptions,
    consumer::{Batch, ConsumerHandle, ConsumerOptions, ConsumerSettings},
    cursor::Start,
    store::{AtomicOp, Isolation, KeyRange, RangeRead, Store},
};

use crate::{
    common::{NEVER, db, joined, record, until, within},
    fixture,
};

/// Starts a member on a node with a short expiry. The member reads a shard only when a watch wakes it.
async fn start(file: &std::path::Path, prefix: &[u8]) -> Consumer {
    let store = fixture::open(file).await;
    let bus = fixture::bus(&store, prefix).await;
    let times = NodeOptions::default().heartbeat(Duration::from_millis(300)).expiry(Duration::from_secs(1));
    let node = bus.node(times).await.unwrap();
    let mut options = ConsumerOptions::default().batch_rows_max(20).poll_interval(NEVER);
    options.balance.interval = Duration::from_millis(300);
    let effects: Arc<[u8]> = [prefix, b"effects/"].concat().into();
    let count = move |batch: Batch<Notification>| {
        let (store, effects) = (store.clone(), Arc::clone(&effects));
        async move {
            let body = async |tx| {
                if batch.commit_in(&tx).await?.is_already_committed() {
                    return Ok(());
                }
                for row in &batch.rows {
                    let key = [&effects[..], row.sequence.as_bytes()].concat();
                    tx.atomic(AtomicOp::Add, &key, &1_u64.to_le_bytes());
                }
                Ok(())
            };
            store.run(body).await?;
            Ok(())
        }
    };
    node.consumer("counter").unwrap().options(options).run_batches(count).await.unwrap()
}

/// Waits until the consumer has worked on everything.
async fn until_done(bus: &Bus, counter: &ConsumerHandle) {
    let is_done = async || {
        bus.is_drained().await.unwrap() && counter.lag().await.unwrap().iter().all(|shard| shard.rows == 0)
    };
    until("the consumer has done everything", is_done).await;
}

/// Returns how many times each row was counted.
async fn counted(store: &Store, prefix: &[u8]) -> Vec<(Vec<u8>, u64)> {
    let effects = [prefix, b"effects/"].concat();
    let read = RangeRead::new(KeyRange::prefix(effects.clone())).target_bytes(usize::MAX);
    let rows = store.begin().get_range(&read, Isolation::Snapshot).await.unwrap().rows;
    rows.iter()
        .map(|(key, value)| {
            (key[effects.len()..].to_vec(), u64::from_le_bytes(value[..].try_into().unwrap()))
        })
        .collect()
}

pub async fn each_row_is_counted_exactly_once_while_nodes_die_and_shards_change() {
    let (file, prefix) = (fixture::shared(), fixture::prefix("consumers"));
    let store = fixture::open(&file).await;
    let bus = fixture::bus(&store, &prefix).await;
    let notifier = joined(&bus).await.notifier(NotifierOptions::default()).await.unwrap();
    let counter = bus.consumer("counter").unwrap();
    counter.create(&ConsumerSettings::default()).await.unwrap();
    let mut nodes = vec![start(&file, &prefix).await, start(&file, &prefix).await];
    for round in 0..6_u32 {
        for n in 0..60 {
            record(&store, &bus, &db(&format!("db{n}"), 1), [0, 0, 1, 0]).await;
        }
        match round {
            1 | 4 => drop(nodes.swap_remove(0)),
            2 => nodes.push(start(&file, &prefix).await),
            3 => nodes.swap_remove(0).shutdown().await.unwrap(),
            _ => drop(bus.feed().reshard(round + 1, None).await.unwrap()),
        }
        if nodes.is_empty() {
            nodes.push(start(&file, &prefix).await);
        }
    }
    until_done(&bus, &counter).await;
    let effects = counted(&store, &prefix).await;
    assert!(effects.iter().all(|(_, count)| *count == 1), "{effects:?}");
    let rows = bus.feed().page(Cursor::BEGINNING, 1_000).await.unwrap().rows;
    assert_eq!(rows.len(), 60);
    for row in rows {
        assert!(effects.iter().any(|(key, _)| key[..] == row.sequence.as_bytes()[..]), "{}", row.sequence);
    }

    // While all members are idle, only a watch can announce a new row.
    tokio::time::sleep(Duration::from_secs(2)).await;
    record(&store, &bus, &db("last", 1), [1, 0, 0, 0]).await;
    until_done(&bus, &counter).await;
    for node in nodes {
        node.shutdown().await.unwrap();
    }
    notifier.shutdown().await.unwrap();
    counter.delete(false).await.unwrap();
    assert!(bus.consumers().await.unwrap().is_empty());
}

/// A transaction that saves progress under a lease conflicts if the lease is lost before its commit.
pub async fn a_zombie_cannot_commit_its_effect() {
    let (file, prefix) = (fixture::shared(), fixture::prefix("consumers"));
    let store = fixture::open(&file).await;
    let bus = fixture::bus(&store, &prefix).await;
    let notifier = joined(&bus).await.notifier(NotifierOptions::default()).await.unwrap();
    record(&store, &bus, &db("a", 1), [1, 0, 0, 0]).await;
    let (outcomes, other) = (Arc::new(Mutex::new(Vec::new())), fixture::open(&file).await);
    let (report, reset) = (Arc::clone(&outcomes), bus.consumer("c").unwrap());
    let effect: Arc<[u8]> = [&prefix[..], b"effect"].concat().into();
    let zombie = {
        let effect = Arc::clone(&effect);
        move |batch: Batch<Notification>| {
            let (report, reset, tx, other) =
                (Arc::clone(&report), reset.clone(), other.begin(), other.clone());
            let effect = Arc::clone(&effect);
            // This task continues although its handler is dropped.
            let work = tokio::spawn(async move {
                let state = batch.commit_in(&tx).await.unwrap();
                assert!(!state.is_already_committed());
                tx.set(&effect, b"of the zombie");
                reset.reset(Start::Now, true).await.unwrap();
                let late = batch.verify(&other.begin()).await;
                let committed = tx.commit().await.map(drop);
                report.lock().unwrap().push((committed, late));
            });
            async move {
                work.await?;
                Ok(())
            }
        }
    };
    let node = joined(&bus).await;
    let consumer =
        node.consumer("c").unwrap().start_from(Cursor::BEGINNING).run_batches(zombie).await.unwrap();
    until("it has tried", async || !outcomes.lock().unwrap().is_empty()).await;
    let (committed, late) = outcomes.lock().unwrap().remove(0);
    assert_eq!(committed.unwrap_err().code(), Some(1020));
    assert!(matches!(late, Err(Error::LeaseLost { .. })), "{late:?}");
    assert_eq!(store.begin().get(&effect, Isolation::Snapshot).await.unwrap(), None);
    within("it ends", consumer.shutdown()).await.unwrap();
    notifier.shutdown().await.unwrap();
}
