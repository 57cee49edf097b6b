//! Tombstones that the janitor keeps for groups, and groups that it deletes.

use std::time::Duration;

use notibus::{
    Cursor, Error, Janitor, JanitorOptions,
    changes::ChangesOptions,
    cursor::Start,
    group::GroupOptions,
    node::BalanceOptions,
    store::{
        AtomicOp, StoreError,
        testing::{Attempt, CommitFault, Gate, Operation},
    },
};

use crate::{
    common::{db, joined, record, row, until, within},
    fixture::{GroupFixture, Log, hinted, pass, until_done},
};

/// A janitor that deletes tombstones at once.
async fn eager(fixture: &GroupFixture) -> Janitor {
    let options =
        JanitorOptions::default().interval(Duration::from_secs(1)).tombstone_retention(Duration::ZERO);
    joined(&fixture.other).await.janitor(options).await.unwrap()
}

async fn delete(fixture: &GroupFixture, name: &str) {
    record(&fixture.store, &fixture.other, &db(name, 1), [0, 1, 0, 0]).await;
    let is_deleted =
        async || row(&fixture.other, &db(name, 1)).await.is_some_and(|row| row.totals.deleted == 1);
    until("it is deleted", is_deleted).await;
}

#[tokio::test(start_paused = true)]
async fn a_tombstone_stays_until_every_group_has_passed_it() {
    let fixture = GroupFixture::new(4).await;
    let group = fixture.group(Start::Now).await;
    let second = fixture.bus.group("second").unwrap();
    second.create(&GroupOptions::default()).await.unwrap();
    fixture.create(["a", "b"]).await;
    delete(&fixture, "a").await;
    let _janitor = eager(&fixture).await;
    let is_there = async || row(&fixture.other, &db("a", 1)).await.is_some();
    pass(Duration::from_mins(10)).await;
    assert!(is_there().await, "nobody has read it");
    let (log, other) = (Log::new(), Log::new());
    let consumer = log.consume(&fixture.bus, &group, hinted()).await;
    until_done(&group).await;
    pass(Duration::from_mins(10)).await;
    assert!(is_there().await, "the second group has not read it");
    assert!(log.names().contains(&"a".to_owned()));
    let twin = other.consume(&fixture.another().await, &second, hinted()).await;
    // A shard without rows has to save its position once.
    until("it is dropped", async || !is_there().await).await;
    consumer.shutdown().await.unwrap();
    twin.shutdown().await.unwrap();

    // A group that is gone keeps no tombstone, and a group that is reset to zero keeps none that was deleted before.
    fixture.create(["c"]).await;
    delete(&fixture, "c").await;
    pass(Duration::from_mins(1)).await;
    assert!(row(&fixture.other, &db("c", 1)).await.is_some());
    second.delete(false).await.unwrap();
    group.delete(false).await.unwrap();
    until("it is dropped", async || row(&fixture.other, &db("c", 1)).await.is_none()).await;
    log.check(true);
}

/// The janitor reads the rows of groups serializably: if a group begins while it deletes, it has to read again.
#[tokio::test(start_paused = true)]
async fn no_group_begins_under_the_janitors_hand() {
    let fixture = GroupFixture::new(1).await;
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
    let group = fixture.other.group("g").unwrap();
    group.create(&GroupOptions::default().start_from(Cursor::NOTHING)).await.unwrap();
    fixture.faults.heal();
    gate.open();
    pass(Duration::from_secs(20)).await;
    assert!(row(&fixture.other, &db("a", 1)).await.is_some(), "the group has to read it");
    let log = Log::new();
    let consumer = log.consume(&fixture.other, &group, hinted()).await;
    until_done(&group).await;
    assert_eq!(log.names().len(), 2);
    consumer.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_group_expires_when_nobody_has_worked_for_it_for_long_enough() {
    let fixture = GroupFixture::new(2).await;
    let expiring = fixture.bus.group("expiring").unwrap();
    let options = GroupOptions::default().expire_after(Duration::from_hours(1));
    expiring.create(&options).await.unwrap();
    let durable = fixture.group(Start::Now).await;
    let slow = || JanitorOptions::default().interval(Duration::from_mins(1));
    let janitor = joined(&fixture.other).await.janitor(slow()).await.unwrap();
    let log = Log::new();
    let consumer = log.consume(&fixture.bus, &expiring, hinted()).await;
    pass(Duration::from_hours(3)).await;
    assert_eq!(expiring.status().await.unwrap().idle_ms, 0, "somebody works for it");
    drop(consumer);
    pass(Duration::from_mins(40)).await;
    let idle_ms = expiring.status().await.unwrap().idle_ms;
    assert!((38 * 60_000..=40 * 60_000).contains(&idle_ms), "{idle_ms}");
    // Time in which no janitor works does not count; another janitor continues the count.
    janitor.shutdown().await.unwrap();
    pass(Duration::from_hours(5)).await;
    let janitor = joined(&fixture.other).await.janitor(slow()).await.unwrap();
    pass(Duration::from_mins(10)).await;
    assert!(expiring.status().await.is_ok());
    // A consumer joins, and the count starts over.
    let consumer = log.consume(&fixture.bus, &expiring, hinted()).await;
    pass(Duration::from_mins(5)).await;
    consumer.shutdown().await.unwrap();
    pass(Duration::from_mins(50)).await;
    assert!(expiring.status().await.is_ok());
    pass(Duration::from_mins(20)).await;
    assert!(matches!(expiring.status().await, Err(Error::NoGroup { .. })));
    assert_eq!(fixture.other.stats().groups_expired, 1);
    assert!(durable.status().await.is_ok(), "it is kept until it is deleted");
    janitor.shutdown().await.unwrap();
}

/// Regression: a pass added the time since the one before to the idle time, although a consumer had worked for most of it: a
/// group that was to be kept for ten minutes was deleted 20 s after its last consumer had left.
#[tokio::test(start_paused = true)]
async fn a_group_is_kept_from_its_last_member_on_not_from_the_last_pass() {
    let fixture = GroupFixture::new(2).await;
    let group = fixture.bus.group("expiring").unwrap();
    group.create(&GroupOptions::default().expire_after(Duration::from_mins(10))).await.unwrap();
    let slow = JanitorOptions::default().interval(Duration::from_mins(10));
    let janitor = joined(&fixture.other).await.janitor(slow).await.unwrap();
    let log = Log::new();
    // The group has no consumer during the first pass.
    pass(Duration::from_mins(1)).await;
    let consumer = log.consume(&fixture.bus, &group, hinted()).await;
    pass(Duration::from_secs(8 * 60 + 50)).await;
    consumer.shutdown().await.unwrap();
    pass(Duration::from_mins(9)).await;
    assert!(group.status().await.is_ok(), "it is to be kept for ten minutes");
    pass(Duration::from_mins(30)).await;
    assert!(matches!(group.status().await, Err(Error::NoGroup { .. })));
    janitor.shutdown().await.unwrap();
}

/// Regression: a pass that could not finish counted the same time again and again.
#[tokio::test(start_paused = true)]
async fn a_pass_that_fails_counts_no_time_twice() {
    let fixture = GroupFixture::new(2).await;
    let group = fixture.bus.group("expiring").unwrap();
    group.create(&GroupOptions::default().expire_after(Duration::from_hours(2))).await.unwrap();
    let other = fixture.bus.group("other").unwrap();
    other.create(&GroupOptions::default().expire_after(Duration::from_hours(2))).await.unwrap();
    let often = JanitorOptions::default().interval(Duration::from_mins(5));
    let janitor = joined(&fixture.bus).await.janitor(often).await.unwrap();
    pass(Duration::from_mins(11)).await;
    // The second of the two groups cannot be saved.
    fixture.faults.plan_commits(|attempt: &Attempt| {
        let idle = b"notibus\x15\x0c\x01n\x00\x15\x03\x02other\x00\x14";
        let is_it = attempt
            .mutations()
            .any(|mutation| matches!(mutation, Operation::Set { key, .. } if key[..] == idle[..]));
        is_it.then_some(CommitFault::Before(StoreError::IO_ERROR))
    });
    pass(Duration::from_mins(100)).await;
    assert!(group.status().await.is_ok(), "two hours have not passed");
    fixture.faults.heal();
    pass(Duration::from_mins(30)).await;
    assert!(matches!(group.status().await, Err(Error::NoGroup { .. })));
    janitor.shutdown().await.unwrap();
}

/// Regression: the first group, or the first closed entry, that could not be written ended the pass, so those behind it never expired, and
/// never went.
#[tokio::test(start_paused = true)]
async fn what_cannot_be_written_keeps_nothing_behind_it() {
    let fixture = GroupFixture::new(1).await;
    let options = GroupOptions::default().expire_after(Duration::from_mins(10));
    for name in ["a", "b"] {
        fixture.bus.group(name).unwrap().create(&options).await.unwrap();
    }
    let changes = fixture.bus.changes();
    let dbs = [db("first", 1), db("second", 2)];
    for db in &dbs {
        let create = async |tx| changes.create(&tx, db, &ChangesOptions::default()).await;
        fixture.store.run(create).await.unwrap();
        changes.feed(db).reshard(2, None).await.unwrap();
    }
    let first = dbs[0].instance.0;
    fixture.faults.plan_commits(move |attempt: &Attempt| {
        let idle = b"notibus\x15\x0c\x01n\x00\x15\x03\x02a\x00\x14";
        let is_it = attempt.mutations().any(|mutation| match mutation {
            Operation::Set { key, .. } => key[..] == idle[..],
            Operation::Clear { key } => key.windows(first.len()).any(|part| part == first),
            _ => false,
        });
        is_it.then_some(CommitFault::Before(StoreError::IO_ERROR))
    });
    let often = JanitorOptions::default().interval(Duration::from_mins(1));
    let janitor = joined(&fixture.bus).await.janitor(often).await.unwrap();
    pass(Duration::from_mins(30)).await;
    assert!(matches!(fixture.bus.group("b").unwrap().status().await, Err(Error::NoGroup { .. })));
    assert!(fixture.bus.group("a").unwrap().status().await.is_ok(), "it cannot be written");
    let entries = async |db| changes.feed(db).topology().await.unwrap().len();
    assert_eq!((entries(&dbs[0]).await, entries(&dbs[1]).await), (2, 1));
    fixture.faults.heal();
    pass(Duration::from_mins(30)).await;
    assert!(matches!(fixture.bus.group("a").unwrap().status().await, Err(Error::NoGroup { .. })));
    assert_eq!(entries(&dbs[0]).await, 1);
    assert_eq!((fixture.bus.stats().groups_expired, fixture.bus.stats().topologies_dropped), (2, 2));
    janitor.shutdown().await.unwrap();
}

/// Regression: a consumer removed the note that its group had nobody before it was a member, and then only together with a lease. In
/// between, the janitor wrote the note again. A consumer that got no lease left it there, and the group expired as if it had never come.
#[tokio::test(start_paused = true)]
async fn a_consumer_without_a_lease_has_been_there_too() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.bus.group("expiring").unwrap();
    group.create(&GroupOptions::default().expire_after(Duration::from_mins(19))).await.unwrap();
    let often = JanitorOptions::default().interval(Duration::from_mins(10));
    let _janitor = joined(&fixture.other).await.janitor(often).await.unwrap();
    pass(Duration::from_secs(9 * 60 + 59)).await;
    let (gate, role) = (Gate::default(), b"group:expiring");
    let held = gate.clone();
    fixture.faults.plan_commits(move |attempt| {
        let is_it = attempt.mutations().any(|mutation| {
            matches!(mutation, Operation::Set { key, .. } if key.windows(role.len()).any(|part| part == role))
        });
        is_it.then(|| CommitFault::Hold(held.clone()))
    });
    let balance = BalanceOptions::default().leases_max(Some(0));
    let options = hinted().balance(balance);
    let (log, bus, joins) = (Log::new(), fixture.bus.clone(), group.clone());
    let joining = tokio::spawn(async move { log.consume(&bus, &joins, options).await });
    within("it is about to be a member", gate.reached()).await;
    pass(Duration::from_secs(2)).await;
    fixture.faults.heal();
    gate.open();
    let consumer = joining.await.unwrap();
    pass(Duration::from_secs(9 * 60 + 45)).await;
    consumer.shutdown().await.unwrap();
    pass(Duration::from_mins(11)).await;
    assert!(group.status().await.is_ok(), "it has had a consumer 11 minutes ago, and is to be kept for 19");
    pass(Duration::from_mins(30)).await;
    assert!(matches!(group.status().await, Err(Error::NoGroup { .. })));
}
