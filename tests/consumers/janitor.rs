//! Tombstones that the janitor keeps for consumers, and consumers that it deletes.

use std::time::Duration;

use notibus::{
    Cursor, Error, JanitorOptions, Notification,
    consumer::{ConsumerHandle, ConsumerSettings, Work},
    cursor::Start,
    node::BalanceOptions,
    store::{
        AtomicOp, StoreError,
        testing::{Attempt, CommitFault, Gate, Operation},
    },
};

use crate::{
    common::{db, joined, record, row, until, within},
    fixture::{ConsumerFixture, Log, hinted, pass},
};

type Ids = Log<Work<Notification>>;

async fn delete(fixture: &ConsumerFixture, name: &str) {
    record(&fixture.store, &fixture.other, &db(name, 1), [0, 1, 0, 0]).await;
    let is_deleted =
        async || row(&fixture.other, &db(name, 1)).await.is_some_and(|row| row.totals.deleted == 1);
    until("it is deleted", is_deleted).await;
}

/// Creates the consumer `name` with `expiry`.
async fn created(fixture: &ConsumerFixture, name: &str, expiry: Option<Duration>) -> ConsumerHandle {
    let handle = fixture.bus.consumer(name).unwrap();
    assert!(handle.create(&ConsumerSettings::default().expiry(expiry)).await.unwrap());
    handle
}

#[tokio::test(start_paused = true)]
async fn a_tombstone_stays_until_every_consumer_has_passed_it() {
    let fixture = ConsumerFixture::new(4).await;
    created(&fixture, "c", None).await;
    let second = created(&fixture, "second", None).await;
    fixture.create(["a", "b"]).await;
    delete(&fixture, "a").await;
    let _janitor = fixture.eager_janitor().await;
    let is_there = async || row(&fixture.other, &db("a", 1)).await.is_some();
    pass(Duration::from_mins(10)).await;
    assert!(is_there().await, "nobody has read it");
    let (log, other) = (Ids::new(), Ids::new());
    let consumer = fixture.member().await.run(log.handler()).await.unwrap();
    consumer.caught_up().await.unwrap();
    pass(Duration::from_mins(10)).await;
    assert!(is_there().await, "the second consumer has not read it");
    assert!(log.names().contains(&"a".to_owned()));
    let node = joined(&fixture.another().await).await;
    let twin = node.consumer("second").unwrap().options(hinted()).run(other.handler()).await.unwrap();
    until("it is dropped", async || !is_there().await).await;
    consumer.shutdown().await.unwrap();
    twin.shutdown().await.unwrap();

    // A deleted consumer keeps no tombstones.
    fixture.create(["c"]).await;
    delete(&fixture, "c").await;
    pass(Duration::from_mins(1)).await;
    assert!(row(&fixture.other, &db("c", 1)).await.is_some());
    second.delete(false).await.unwrap();
    fixture.handle().delete(false).await.unwrap();
    until("it is dropped", async || row(&fixture.other, &db("c", 1)).await.is_none()).await;
}

/// A consumer is deleted and created again at once, while its member continues. Regression: the member treated the low watermark of the new
/// consumer as written because that of the old one was, so the consumer kept tombstones until the next event.
#[tokio::test(start_paused = true)]
async fn a_consumer_that_is_created_again_at_once_keeps_no_tombstone_that_it_has_passed() {
    let fixture = ConsumerFixture::new(4).await;
    let log = Ids::new();
    let consumer = fixture.member().await.start_from(Cursor::BEGINNING).run(log.handler()).await.unwrap();
    fixture.create(["a", "b"]).await;
    delete(&fixture, "a").await;
    fixture.until_done().await;
    pass(Duration::from_mins(30)).await;
    let calls = log.calls();
    fixture.handle().delete(true).await.unwrap();
    let settings = ConsumerSettings::default().start(Start::At(Cursor::BEGINNING));
    assert!(fixture.handle().create(&settings).await.unwrap());
    log.until_calls(calls + 2).await;
    fixture.until_done().await;
    let _janitor = fixture.eager_janitor().await;
    pass(Duration::from_mins(30)).await;
    assert!(row(&fixture.other, &db("a", 1)).await.is_none(), "it has passed the tombstone");
    consumer.shutdown().await.unwrap();
}

/// The janitor reads the horizon and then the consumers: if a consumer begins while the janitor deletes, the janitor must read the
/// consumers again.
#[tokio::test(start_paused = true)]
async fn no_consumer_begins_under_the_janitors_hand() {
    let fixture = ConsumerFixture::new(1).await;
    fixture.create(["a", "b"]).await;
    delete(&fixture, "a").await;
    let gate = Gate::default();
    let (held, janitors) = (gate.clone(), fixture.another().await);
    fixture.faults.plan_commits(move |attempt| {
        let drops = attempt.mutations().any(|mutation| {
            matches!(mutation, Operation::Clear { key }
                if key.starts_with(b"notibus\x15\x05"))
        });
        let is_drop = drops && !attempt.applies(AtomicOp::SetVersionstampedValue);
        is_drop.then(|| CommitFault::Hold(held.clone()))
    });
    let options = JanitorOptions::default().tombstone_retention(Duration::ZERO);
    let _janitor = joined(&janitors).await.janitor(options).await.unwrap();
    within("the janitor is about to drop", gate.reached()).await;
    let settings = ConsumerSettings::default().start(Cursor::BEGINNING.into());
    fixture.handle().create(&settings).await.unwrap();
    fixture.faults.heal();
    gate.open();
    pass(Duration::from_secs(20)).await;
    assert!(row(&fixture.other, &db("a", 1)).await.is_some(), "the consumer has to read it");
    let log = Ids::new();
    let consumer = fixture.other_member().await.run(log.handler()).await.unwrap();
    log.until_calls(2).await;
    consumer.shutdown().await.unwrap();
}

/// A consumer is created in an old topology entry while the janitor drops that entry: the janitor must read the consumers again and keep
/// the entry. A consumer that is created afterwards begins in the next entry.
#[tokio::test(start_paused = true)]
async fn no_entry_is_dropped_under_a_consumer_that_begins_there() {
    for is_created_before in [true, false] {
        let fixture = ConsumerFixture::new(2).await;
        fixture.other.feed().reshard(1, None).await.unwrap();
        fixture.create(["a"]).await;
        let gate = Gate::default();
        let (held, janitors) = (gate.clone(), fixture.another().await);
        fixture.faults.plan_commits(move |attempt| {
            let drops = attempt.mutations().any(|mutation| {
                matches!(mutation, Operation::Clear { key } if key.starts_with(b"notibus\x15\x07"))
            });
            drops.then(|| CommitFault::Hold(held.clone()))
        });
        let options = JanitorOptions::default().interval(Duration::from_millis(100));
        let _janitor = joined(&janitors).await.janitor(options).await.unwrap();
        within("the janitor is about to drop", gate.reached()).await;
        let entries = async || fixture.other.feed().topology().await.unwrap().len();
        let settings = ConsumerSettings::default().start(Cursor::BEGINNING.into());
        if is_created_before {
            fixture.handle().create(&settings).await.unwrap();
        }
        fixture.faults.heal();
        gate.open();
        pass(Duration::from_secs(20)).await;
        if !is_created_before {
            assert_eq!(entries().await, 1);
            fixture.handle().create(&settings).await.unwrap();
        }
        let first = fixture.handle().status().await.unwrap().shards[0].shard;
        assert_eq!((entries().await, first.0), if is_created_before { (2, 1) } else { (1, 3) });
        let log = Ids::new();
        let consumer = fixture.other_member().await.run(log.handler()).await.unwrap();
        log.until_calls(1).await;
        until("nothing needs the first entry", async || entries().await == 1).await;
        consumer.shutdown().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_consumer_expires_when_nobody_has_worked_for_it_for_long_enough() {
    let fixture = ConsumerFixture::new(2).await;
    let expiring = created(&fixture, "c", Some(Duration::from_hours(1))).await;
    let durable = created(&fixture, "durable", None).await;
    let slow = || JanitorOptions::default().interval(Duration::from_mins(1));
    let janitor = joined(&fixture.other).await.janitor(slow()).await.unwrap();
    let log = Ids::new();
    let consumer = fixture.member().await.run(log.handler()).await.unwrap();
    pass(Duration::from_hours(3)).await;
    assert_eq!(expiring.status().await.unwrap().memberless_ms, 0, "somebody works for it");
    drop(consumer);
    pass(Duration::from_mins(40)).await;
    let memberless_ms = expiring.status().await.unwrap().memberless_ms;
    assert!((38 * 60_000..=40 * 60_000).contains(&memberless_ms), "{memberless_ms}");
    // Time in which no janitor works does not count; another janitor continues the count.
    janitor.shutdown().await.unwrap();
    pass(Duration::from_hours(5)).await;
    let janitor = joined(&fixture.other).await.janitor(slow()).await.unwrap();
    pass(Duration::from_mins(10)).await;
    assert!(expiring.status().await.is_ok());
    // When a member joins, the count starts over.
    let consumer = fixture.member().await.run(log.handler()).await.unwrap();
    pass(Duration::from_mins(5)).await;
    consumer.shutdown().await.unwrap();
    pass(Duration::from_mins(50)).await;
    assert!(expiring.status().await.is_ok());
    pass(Duration::from_mins(20)).await;
    assert!(matches!(expiring.status().await, Err(Error::NoConsumer { .. })));
    assert!(durable.status().await.is_ok(), "it is kept until it is deleted");
    janitor.shutdown().await.unwrap();
}

/// Regression: a pass counted all time since the previous pass as idle although a member had worked for most of it, so a consumer with an
/// expiry of ten minutes was deleted 20 s after its last member had left.
#[tokio::test(start_paused = true)]
async fn a_consumer_is_kept_from_its_last_member_on_not_from_the_last_pass() {
    let fixture = ConsumerFixture::new(2).await;
    let handle = created(&fixture, "c", Some(Duration::from_mins(10))).await;
    let slow = JanitorOptions::default().interval(Duration::from_mins(10));
    let janitor = joined(&fixture.other).await.janitor(slow).await.unwrap();
    // The consumer has no member during the first pass.
    pass(Duration::from_mins(1)).await;
    let consumer = fixture.member().await.run(Ids::new().handler()).await.unwrap();
    pass(Duration::from_secs(8 * 60 + 50)).await;
    consumer.shutdown().await.unwrap();
    pass(Duration::from_mins(9)).await;
    assert!(handle.status().await.is_ok(), "it is to be kept for ten minutes");
    pass(Duration::from_mins(30)).await;
    assert!(matches!(handle.status().await, Err(Error::NoConsumer { .. })));
    janitor.shutdown().await.unwrap();
}

/// Returns the key that stores how long the consumer `name` has been without members.
fn idle_key(name: &str) -> Vec<u8> {
    [b"notibus\x15\x19\x15\x04\x02", name.as_bytes(), b"\0"].concat()
}

/// Regression: the pass ended at the first consumer that could not be written, so the consumers after it never expired, and passes that
/// could not finish counted the same time repeatedly.
#[tokio::test(start_paused = true)]
async fn a_consumer_that_cannot_be_written_keeps_nothing_behind_it() {
    let fixture = ConsumerFixture::new(1).await;
    let [a, b] = [
        created(&fixture, "a", Some(Duration::from_mins(10))).await,
        created(&fixture, "b", Some(Duration::from_hours(2))).await,
    ];
    fixture.faults.plan_commits(move |attempt: &Attempt| {
        let idle = idle_key("a");
        let is_it = attempt
            .mutations()
            .any(|mutation| matches!(mutation, Operation::Set { key, .. } if key[..] == idle[..]));
        is_it.then_some(CommitFault::Before(StoreError::IO_ERROR))
    });
    let often = JanitorOptions::default().interval(Duration::from_mins(1));
    let janitor = joined(&fixture.bus).await.janitor(often).await.unwrap();
    pass(Duration::from_mins(110)).await;
    assert!(b.status().await.is_ok(), "two hours have not passed");
    pass(Duration::from_mins(30)).await;
    assert!(matches!(b.status().await, Err(Error::NoConsumer { .. })));
    assert!(a.status().await.is_ok(), "it cannot be written");
    fixture.faults.heal();
    pass(Duration::from_mins(30)).await;
    assert!(matches!(a.status().await, Err(Error::NoConsumer { .. })));
    janitor.shutdown().await.unwrap();
}

/// Regression: a joining member removed the consumer's record of having no members before it was a member itself, and again only when it
/// took a lease. The janitor wrote the record again in between, so the consumer of a member without a lease expired.
#[tokio::test(start_paused = true)]
async fn a_member_without_a_lease_has_been_there_too() {
    let fixture = ConsumerFixture::new(1).await;
    let handle = created(&fixture, "c", Some(Duration::from_mins(19))).await;
    let often = JanitorOptions::default().interval(Duration::from_mins(10));
    let _janitor = joined(&fixture.other).await.janitor(often).await.unwrap();
    pass(Duration::from_secs(9 * 60 + 59)).await;
    let (gate, role) = (Gate::default(), b"consumer:c");
    let held = gate.clone();
    fixture.faults.plan_commits(move |attempt| {
        let is_it = attempt.mutations().any(|mutation| {
            matches!(mutation, Operation::Set { key, .. } if key.windows(role.len()).any(|part| part == role))
        });
        is_it.then(|| CommitFault::Hold(held.clone()))
    });
    let balance = BalanceOptions::default().leases_max(Some(0));
    let member = fixture.member().await.options(hinted().balance(balance));
    let joining = tokio::spawn(async move { member.run(Ids::new().handler()).await.unwrap() });
    within("it is about to be a member", gate.reached()).await;
    pass(Duration::from_secs(2)).await;
    fixture.faults.heal();
    gate.open();
    let consumer = joining.await.unwrap();
    pass(Duration::from_secs(9 * 60 + 45)).await;
    consumer.shutdown().await.unwrap();
    pass(Duration::from_mins(11)).await;
    assert!(handle.status().await.is_ok(), "it has had a member 11 minutes ago, and is to be kept for 19");
    pass(Duration::from_mins(30)).await;
    assert!(matches!(handle.status().await, Err(Error::NoConsumer { .. })));
}
