//! Durations that callers pass: the longest one means "never", and causes no panic.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use notibus::{
    Bus, BusOptions, DispatcherOptions, EventKind, Filter, JanitorOptions, Node, NodeOptions, Notification,
    NotifierOptions,
    consumer::{Batch, ConsumerOptions},
    dispatcher::RestartPolicy,
    node::BalanceOptions,
    store::Store,
};

use crate::{
    common::{db, narrow_bus, record, until},
    fixture::{SubscriberFixture, calls, kinds, next, ready},
};

const NEVER: Duration = Duration::MAX;

/// Regression: a subscriber with the longest pace panicked at its second delivery.
#[tokio::test(start_paused = true)]
async fn the_longest_pace_is_one_round() {
    let fixture = SubscriberFixture::new().await;
    let mut paced = fixture.dispatcher.subscribe(Filter::all()).every(NEVER).unwrap().stream();
    fixture.event(&db("a", 1), EventKind::Created).await;
    assert_eq!(kinds(&next(&mut paced).await), [EventKind::Created]);
    fixture.event(&db("a", 1), EventKind::Updated).await;
    assert!(ready(&mut paced).is_empty());
    tokio::time::sleep(Duration::from_hours(10)).await;
    assert!(ready(&mut paced).is_empty());
}

/// Regression: the longest durations made roles panic, at once or in a detached task, or silently killed the workers of consumers.
#[tokio::test(start_paused = true)]
async fn roles_bear_the_longest_durations() {
    let store = Store::memory();
    let bus = narrow_bus(&store).await;
    let node = NodeOptions::default().heartbeat(NEVER).expiry(NEVER);
    let node = bus.node(node).await.unwrap();
    let balance = BalanceOptions::default().handover(NEVER);
    let notifier = NotifierOptions::default().balance(balance.clone()).poll_interval(NEVER);
    let _notifier = node.notifier(notifier).await.unwrap();
    let janitor = JanitorOptions::default().interval(NEVER).tombstone_retention(NEVER).balance(balance);
    let _janitor = node.janitor(janitor).await.unwrap();
    let options = DispatcherOptions::default().poll_interval(NEVER);
    let dispatcher = bus.dispatcher(options).await.unwrap();
    let mut updates = dispatcher.subscribe(Filter::all()).stream();
    for count in 1..=20 {
        record(&store, &bus, &db("a", 1), [0, 0, 1, 0]).await;
        assert_eq!(next(&mut updates).await.notification().totals.updated, count);
        tokio::time::sleep(Duration::from_mins(1)).await;
    }
    assert_eq!(bus.stats().tail_panics, 0);
}

/// Regression: workers added the longest `handover` to the time at which an owner should have given up a shard, which they read only once
/// there is a second member, so the workers of both members died silently, and the second one never got a shard.
#[tokio::test(start_paused = true)]
async fn two_members_on_two_nodes_bear_the_longest_durations() {
    let store = Store::memory();
    let options = BusOptions::default().partitions(1).shards(4);
    let bus = Bus::open(&store, options).await.unwrap();
    let node = NodeOptions::default().heartbeat(NEVER).expiry(NEVER);
    let (one, other) = (bus.node(node.clone()).await.unwrap(), bus.node(node).await.unwrap());
    let balance = BalanceOptions::default().handover(NEVER);
    let notifier = NotifierOptions::default().balance(balance.clone()).poll_interval(NEVER);
    let _notifier = one.notifier(notifier).await.unwrap();
    let consumed = Arc::new(AtomicUsize::new(0));
    let consume = async |node: &Node| {
        let options = ConsumerOptions::default()
            .balance(balance.clone())
            .poll_interval(NEVER)
            .checkpoint_interval(NEVER)
            .backoff_min(NEVER)
            .backoff_max(NEVER)
            .stall_limit(NEVER);
        let consumed = Arc::clone(&consumed);
        let handler = move |batch: Batch<Notification>| {
            consumed.fetch_add(batch.rows.len(), Ordering::Relaxed);
            async { Ok(()) }
        };
        node.consumer("c").unwrap().options(options).run_batches(handler).await.unwrap()
    };
    let first = consume(&one).await;
    until("it has all shards", async || first.shards().len() == 4).await;
    let second = consume(&other).await;
    until("they share them", async || (first.shards().len(), second.shards().len()) == (2, 2)).await;
    for count in 1..=40 {
        record(&store, &bus, &db(&format!("db{count}"), 1), [1, 0, 0, 0]).await;
        until("it is consumed", async || consumed.load(Ordering::Relaxed) == count).await;
    }
    second.shutdown().await.unwrap();
    until("the first has all again", async || first.shards().len() == 4).await;
    first.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn callbacks_bear_the_longest_durations() {
    let fixture = SubscriberFixture::new().await;
    let subscribe = fixture.dispatcher.subscribe(Filter::all());
    let policy = RestartPolicy::default().pause_min(NEVER).pause_max(NEVER);
    let callback = subscribe.callback(policy, calls(|_| async { panic!("as planned") })).unwrap();
    fixture.event(&db("a", 1), EventKind::Created).await;
    tokio::time::sleep(Duration::from_hours(1)).await;
    callback.stop().await;
}
