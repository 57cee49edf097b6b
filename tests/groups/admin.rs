//! Creating, inspecting, resetting and deleting groups; and refused input.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use notibus::{
    Cursor, DbInstance, Error, EventKind, JanitorOptions, NodeOptions, Notification, Sequence,
    changes::ChangesOptions,
    cursor::Start,
    event::{Incarnation, Versionstamp},
    group::{CloseReason, GroupBatch, GroupName, GroupOptions, ShardLag},
    node::Role,
    store::{
        Isolation, KeyRange, RangeRead, RetryPolicy, StoreError,
        testing::{Attempt, CommitFault, Operation},
    },
};

use crate::{
    common::{counts, db, joined, record, row_with, until},
    fixture::{GroupFixture, Log, behind, hinted, names, pass, until_done},
};

/// Number of stored rows of groups, and of leases of their shards.
async fn kept(fixture: &GroupFixture) -> (usize, usize) {
    let count = async |prefix: &'static [u8]| {
        let read = RangeRead::new(KeyRange::prefix(prefix));
        fixture.store.begin().get_range(&read, Isolation::Snapshot).await.unwrap().rows.len()
    };
    (count(b"notibus\x15\x0c").await, count(b"notibus\x15\x0b\x02main\x00\x02group").await)
}

#[tokio::test(start_paused = true)]
async fn bad_input_is_refused_and_changes_nothing() {
    let fixture = GroupFixture::new(2).await;
    for name in [String::new(), "x".repeat(257)] {
        assert!(matches!(fixture.bus.group(&name), Err(Error::Invalid { what: "group name", .. })));
    }
    let group = fixture.bus.group(&"ü".repeat(128)).unwrap();
    let ahead = Sequence::new(Incarnation(0), Versionstamp::new(u64::MAX, 0), 0);
    let moved = Sequence::new(Incarnation(1), Versionstamp::new(0, 0), 0);
    // A folder or a store in memory has never had this position: it belongs to another history.
    let options = GroupOptions::default().start_from(Start::from(ahead));
    assert!(matches!(group.create(&options).await, Err(Error::Expired { .. })));
    let options = GroupOptions::default().start_from(Start::from(moved));
    assert!(matches!(group.create(&options).await, Err(Error::Invalid { what: "start", .. })));
    let options = GroupOptions::default().expire_after(Duration::ZERO);
    assert!(matches!(group.create(&options).await, Err(Error::Invalid { what: "idle expiry", .. })));
    let nowhere = fixture.bus.changes().feed(&db("none", 1)).group("g").unwrap();
    assert!(matches!(nowhere.create(&GroupOptions::default()).await, Err(Error::NoFeed { .. })));
    assert!(matches!(group.status().await, Err(Error::NoGroup { .. })));
    assert!(matches!(group.lag().await, Err(Error::NoGroup { .. })));
    assert!(matches!(group.reset(Start::Now, false).await, Err(Error::NoGroup { .. })));
    assert!(matches!(group.delete(true).await, Err(Error::NoGroup { .. })));
    let observer = || |_: GroupBatch<Notification>| std::future::ready(Ok(()));
    let node = joined(&fixture.bus).await;
    let missing = node.consumer(&group, move |_| observer(), hinted()).await;
    assert!(matches!(missing, Err(Error::NoGroup { .. })));
    assert_eq!(kept(&fixture).await, (0, 0));
    assert!(group.create(&GroupOptions::default()).await.unwrap());
    let bad = [
        hinted().rows_max(0),
        hinted().rows_max(10_001),
        hinted().poll_interval(Duration::ZERO),
        hinted().stuck_after(Duration::ZERO),
        hinted().checkpoint(notibus::group::CheckpointPolicy::Rows(0)),
        hinted().retry(RetryPolicy::default().attempts_max(Some(0))),
        hinted().retry(RetryPolicy::default().attempts_max(None).elapsed_max(None)),
    ];
    for options in bad {
        let refused = node.consumer(&group, move |_| observer(), options).await;
        assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
    }
    node.shutdown().await.unwrap();
    assert_eq!(fixture.bus.nodes().await.unwrap().len(), 1, "the notifier's alone");
    assert!(matches!(group.dead_letters(Sequence::MIN, 0).await, Err(Error::Invalid { .. })));
    let other = notibus::BusOptions::default().prefix(b"other".to_vec());
    let other = notibus::Bus::open(&fixture.store, other).await.unwrap();
    let node = other.node(NodeOptions::default()).await.unwrap();
    let strange = node.consumer(&group, move |_| observer(), hinted()).await;
    assert!(matches!(strange, Err(Error::Invalid { what: "group", .. })));
}

#[tokio::test(start_paused = true)]
async fn a_start_below_the_horizon_is_refused() {
    let fixture = GroupFixture::new(2).await;
    fixture.create(["lives", "gone"]).await;
    let before = fixture.other.feed().page(Cursor::NOTHING, 1).await.unwrap().rows[0].sequence;
    record(&fixture.store, &fixture.other, &db("gone", 1), [0, 1, 0, 0]).await;
    let options =
        JanitorOptions::default().interval(Duration::from_millis(100)).tombstone_retention(Duration::ZERO);
    let _janitor = joined(&fixture.other).await.janitor(options).await.unwrap();
    until("the tombstone is dropped", async || fixture.other.stats().tombstones_dropped == 1).await;
    let horizon = fixture.other.feed().horizon().await.unwrap();
    let group = fixture.bus.group("g").unwrap();
    let expired = GroupOptions::default().start_from(Start::from(before));
    assert!(matches!(group.create(&expired).await, Err(Error::Expired { horizon: at }) if at == horizon));
    assert_eq!(kept(&fixture).await, (0, 0));
    let at_horizon = GroupOptions::default().start_from(Start::from(horizon));
    assert!(group.create(&at_horizon).await.unwrap());
    let reset = group.reset(Start::from(before), false).await;
    assert!(matches!(reset, Err(Error::Expired { .. })));
    let status = group.status().await.unwrap();
    assert_eq!((status.start, status.generation), (horizon.into(), 1), "nothing was changed");

    // A reader from zero ignores the horizon, however many batches it takes.
    group.reset(Cursor::NOTHING, false).await.unwrap();
    fixture.create(names("db", 10)).await;
    let log = Log::new();
    let consumer = log.consume(&fixture.bus, &group, hinted().rows_max(1)).await;
    until_done(&group).await;
    consumer.shutdown().await.unwrap();
    assert_eq!(log.names().len(), 11);
}

#[tokio::test(start_paused = true)]
async fn unknown_results_do_not_confuse_creation_and_deletion() {
    let fixture = GroupFixture::new(2).await;
    let group = fixture.bus.group("g").unwrap();
    let unknown = StoreError::COMMIT_UNKNOWN_RESULT;
    for fault in [CommitFault::After(unknown.clone()), CommitFault::Before(unknown)] {
        fixture.faults.script_commits([fault.clone()]);
        assert!(group.create(&GroupOptions::default()).await.unwrap(), "by this call");
        fixture.faults.script_commits([fault.clone()]);
        group.reset(Cursor::NOTHING, false).await.unwrap();
        assert_eq!(group.status().await.unwrap().generation, 2, "once");
        fixture.faults.script_commits([fault]);
        group.delete(false).await.unwrap();
        assert_eq!(kept(&fixture).await, (0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn a_group_with_living_members_is_reset_and_deleted_only_by_force() {
    let fixture = GroupFixture::new(3).await;
    let group = fixture.group(Start::Now).await;
    fixture.create(names("db", 6)).await;
    let log = Log::new();
    let consumer = log.consume(&fixture.other, &group, hinted()).await;
    until_done(&group).await;
    for refused in [group.reset(Cursor::NOTHING, false).await, group.delete(false).await] {
        assert!(matches!(refused, Err(Error::GroupInUse { members: 1, .. })), "{refused:?}");
    }
    assert_eq!(group.status().await.unwrap().generation, 1);
    group.reset(Cursor::NOTHING, true).await.unwrap();
    until("all come again", async || log.rows().len() == 12).await;
    until_done(&group).await;
    assert!(log.closed().iter().all(|reason| *reason == CloseReason::LeaseLost));
    let status = group.status().await.unwrap();
    assert_eq!((status.generation, status.start, status.members.len()), (2, Cursor::NOTHING, 1));

    group.delete(true).await.unwrap();
    assert_eq!(kept(&fixture).await, (0, 0));
    until("nothing is left to do", async || consumer.shards().is_empty()).await;
    // It continues when the group exists again.
    group.create(&GroupOptions::default()).await.unwrap();
    fixture.create(["new"]).await;
    log.until_names(&["new".to_owned()]).await;
    until_done(&group).await;
    drop(consumer);
    // It has died: without `force`, the check takes a moment.
    let began = tokio::time::Instant::now();
    group.delete(false).await.unwrap();
    // Another node may have noticed first: it has counted since the last heartbeat.
    let NodeOptions { heartbeat, expiry, .. } = NodeOptions::default();
    assert!(began.elapsed() + heartbeat >= expiry, "{:?}", began.elapsed());
    assert_eq!(kept(&fixture).await, (0, 0));
    log.check(true);
}

/// Regression: a position alone says nothing of what a group knows. One that had begun with nothing derived news from it, and got the
/// deletion of an instance that was gone before. And a row that had superseded an older one in its backlog lost the news of that.
#[tokio::test(start_paused = true)]
async fn news_of_a_group_are_derived_from_what_it_knew_when_it_began() {
    let fixture = GroupFixture::new(1).await;
    let change = async |instance, lanes, totals| {
        record(&fixture.store, &fixture.other, &db("a", instance), lanes).await;
        row_with(&fixture.other, &db("a", instance), totals).await;
    };
    let (created, deleted) = ([1, 0, 0, 0], [0, 1, 0, 0]);
    change(1, created, created).await;
    change(1, deleted, [1, 1, 0, 0]).await;
    change(2, created, created).await;
    let group = fixture.group(Cursor::NOTHING).await;
    fixture.create(["b"]).await;
    let news = Arc::new(Mutex::new(Vec::new()));
    let log = Log::doing({
        let news = Arc::clone(&news);
        move |batch: GroupBatch<Notification>| {
            let of = |row: &Arc<Notification>| row.news_since(batch.since()).iter().collect::<Vec<_>>();
            news.lock().unwrap().extend(batch.rows.iter().map(of));
            async { Ok(()) }
        }
    });
    let _consumer = log.consume(&fixture.bus, &group, hinted()).await;
    until("both come", async || news.lock().unwrap().len() == 2).await;
    let [one, two, three] = [1, 2, 3].map(|instance| DbInstance([instance; 16]));
    let taken = std::mem::take(&mut *news.lock().unwrap());
    assert_eq!(taken, [two, one].map(|instance| vec![(instance, EventKind::Created)]), "it never knew a#1");
    change(3, created, created).await;
    until("it comes", async || news.lock().unwrap().len() == 1).await;
    let expected = vec![(two, EventKind::Deleted), (three, EventKind::Created)];
    assert_eq!(news.lock().unwrap()[0], expected, "it knew a#2");
}

#[tokio::test(start_paused = true)]
async fn a_reset_sets_back_over_reshards_and_forward() {
    let fixture = GroupFixture::new(2).await;
    let group = fixture.group(Cursor::NOTHING).await;
    fixture.create(names("db", 8)).await;
    fixture.other.feed().reshard(5, None).await.unwrap();
    let log = Log::new();
    let consumer = log.consume(&fixture.bus, &group, hinted()).await;
    until("it is in the second topology", async || group.status().await.unwrap().shards.len() == 5).await;
    until_done(&group).await;
    consumer.shutdown().await.unwrap();
    assert_eq!(kept(&fixture).await.1, 5);
    group.reset(Cursor::NOTHING, false).await.unwrap();
    assert_eq!(kept(&fixture).await.1, 0, "the leases of the second topology go, although nobody consumes");
    assert_eq!(group.status().await.unwrap().shards.len(), 2, "the first topology again");
    assert_eq!(behind(&group).await, 8);
    let rows = fixture.other.feed().page(Cursor::NOTHING, 100).await.unwrap().rows;
    group.reset(Start::from(rows[4].sequence), false).await.unwrap();
    assert_eq!(behind(&group).await, 3);
    group.reset(Start::Now, false).await.unwrap();
    assert_eq!((behind(&group).await, group.status().await.unwrap().shards.len()), (0, 5));
    let log = Log::new();
    let consumer = log.consume(&fixture.bus, &group, hinted()).await;
    fixture.create(["new"]).await;
    log.until_names(&["new".to_owned()]).await;
    consumer.shutdown().await.unwrap();
    assert_eq!(log.names(), ["new"]);
    assert_eq!(kept(&fixture).await.1, 5, "no leases of other shards are left");
}

#[tokio::test(start_paused = true)]
async fn the_lag_is_exact_per_shard_up_to_a_limit() {
    let fixture = GroupFixture::new(4).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let lag = group.lag().await.unwrap();
    assert_eq!(lag.len(), 4);
    assert!(lag.iter().all(|shard| shard.rows == 0 && shard.is_exact && shard.age_ms.is_none()));
    fixture.create(names("db", 40)).await;
    let feed = fixture.other.feed();
    for shard in group.lag().await.unwrap() {
        let rows = feed.shard_page(shard.shard, Cursor::NOTHING, 1_000).await.unwrap().rows;
        assert_eq!(shard.rows as usize, rows.len(), "a dormant shard shows its true backlog");
        assert_eq!((shard.owner, shard.oldest), (None, rows.first().map(|row| row.sequence)));
        assert!(shard.age_ms.is_some_and(|age| age < 3_600_000));
    }
    // Successors after a reshard count, too.
    feed.reshard(2, None).await.unwrap();
    fixture.create(names("later", 10)).await;
    let lag = group.lag().await.unwrap();
    assert_eq!((lag.len(), lag.iter().map(|shard| shard.rows).sum::<u64>()), (6, 50));
    assert!(lag[..4].iter().all(|shard| shard.checkpoint == Some(Sequence::MIN)));
    assert!(lag[4..].iter().all(|shard| shard.checkpoint.is_none()));

    // More than the limit.
    feed.reshard(1, None).await.unwrap();
    group.reset(Start::Now, false).await.unwrap();
    let many = ShardLag::ROWS_MAX as usize + 1;
    let producer = fixture.other.producer();
    for chunk in names("many", many).chunks(1_000) {
        let body = async |tx| {
            for name in chunk {
                producer.record_all(&tx, &db(name, 1), &counts([1, 0, 0, 0]))?;
            }
            Ok(())
        };
        fixture.store.run(body).await.unwrap();
    }
    until("all are folded", async || fixture.other.is_drained().await.unwrap()).await;
    let [shard] = &group.lag().await.unwrap()[..] else { panic!("there is one") };
    assert_eq!((shard.rows, shard.is_exact), (ShardLag::ROWS_MAX, false));
    let log = Log::new();
    let consumer = log.consume(&fixture.bus, &group, hinted()).await;
    until("all come", async || log.rows().len() == many).await;
    until_done(&group).await;
    let owner = group.lag().await.unwrap()[0].owner;
    assert_eq!(owner, Some(group.status().await.unwrap().members[0]));
    consumer.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_group_goes_along_to_another_store() {
    let fixture = GroupFixture::new(2).await;
    let group = fixture.group(Cursor::NOTHING).await;
    fixture.create(names("db", 4)).await;
    let log = Log::new();
    let consumer = log.consume(&fixture.bus, &group, hinted()).await;
    until_done(&group).await;
    consumer.shutdown().await.unwrap();
    fixture.create(["unread"]).await;
    let (bus, store) = fixture.stopped().await;
    let mut export = Vec::new();
    bus.export(&mut export, notibus::relocation::ExportOptions::default()).await.unwrap();
    drop((bus, store));
    let moved = notibus::store::Database::memory();
    notibus::Bus::import(&moved, b"notibus", &mut &export[..]).await.unwrap();
    let bus = notibus::Bus::open_existing(&moved, b"notibus").await.unwrap();
    let notifier = joined(&bus).await.notifier(notibus::NotifierOptions::default()).await.unwrap();
    record(&moved, &bus, &db("new", 1), [1, 0, 0, 0]).await;
    let (group, log) = (bus.group("g").unwrap(), Log::new());
    let consumer = log.consume(&bus, &group, hinted()).await;
    log.until_names(&["unread".to_owned(), "new".to_owned()]).await;
    until_done(&group).await;
    consumer.shutdown().await.unwrap();
    notifier.shutdown().await.unwrap();
    assert_eq!(log.names().len(), 2, "what was worked on does not come again");
}

#[tokio::test(start_paused = true)]
async fn the_groups_of_all_feeds_are_listed_with_their_members() {
    let fixture = GroupFixture::new(2).await;
    let (changes, docs) = (fixture.bus.changes(), db("docs", 9));
    fixture.store.run(async |tx| changes.create(&tx, &docs, &ChangesOptions::default()).await).await.unwrap();
    let all = names("g", 30);
    for name in &all {
        fixture.bus.group(name).unwrap().create(&GroupOptions::default()).await.unwrap();
    }
    let index = changes.feed(&docs).group("index").unwrap();
    index.create(&GroupOptions::default().expire_after(Duration::from_hours(1))).await.unwrap();
    let (log, group) = (Log::new(), fixture.bus.group("g7").unwrap());
    let consumer = log.consume(&fixture.bus, &group, hinted()).await;
    fixture.create(names("db", 5)).await;
    until_done(&group).await;
    pass(Duration::from_secs(40)).await;
    let groups = fixture.other.groups().await.unwrap();
    let listed: BTreeSet<_> =
        groups.iter().filter(|g| g.instance.is_none()).map(|g| g.name.as_str()).collect();
    assert_eq!((groups.len(), listed), (31, all.iter().map(String::as_str).collect()));
    for status in &groups {
        let is_worked_for = status.name == GroupName::new("g7").unwrap();
        assert_eq!(status.members.len(), usize::from(is_worked_for));
        assert_eq!(status.shards.iter().all(|shard| shard.owner.is_some()), is_worked_for);
        assert_eq!(status.shards.iter().all(|shard| shard.progress_ms.is_some()), is_worked_for);
        assert_eq!(status.idle_expiry_ms, status.instance.map(|_| 3_600_000));
    }
    let untyped = fixture.other.any_group(Some(docs.instance), "index").unwrap();
    assert_eq!(untyped.status().await.unwrap().shards.len(), 1);
    let role = Role::new("group:g7").unwrap();
    assert!(fixture.bus.nodes().await.unwrap().iter().any(|node| node.roles.contains(&role)));
    consumer.shutdown().await.unwrap();
}

/// Whether an attempt deletes a group.
fn deletes(attempt: &Attempt) -> bool {
    let group = b"notibus\x15\x0c\x01n\x00\x14\x02g\x00";
    attempt.mutations().any(
        |mutation| matches!(mutation, Operation::ClearRange { range, .. } if range.begin.starts_with(group)),
    )
}

/// Regression: a deletion with an unknown result was committed. Before it was tried again, another client had created a group of the same
/// name: that was deleted, too.
#[tokio::test(start_paused = true)]
async fn a_deletion_that_is_tried_again_leaves_a_new_group_alone() {
    let fixture = GroupFixture::new(2).await;
    let group = fixture.group(Start::Now).await;
    let is_blocked = Arc::new(AtomicBool::new(false));
    let (blocks, mut is_first) = (Arc::clone(&is_blocked), true);
    fixture.faults.plan_commits(move |attempt| {
        let is_it = deletes(attempt) && std::mem::take(&mut is_first);
        blocks.fetch_or(is_it, Ordering::Relaxed);
        is_it.then(|| CommitFault::After(StoreError::COMMIT_UNKNOWN_RESULT))
    });
    let blocked = Arc::clone(&is_blocked);
    fixture.faults.plan_reads(move |operation| match operation {
        Operation::Get { key, .. } if key.starts_with(b"notibus\x15\x0c") => {
            blocked.load(Ordering::Relaxed).then_some(StoreError::TRANSACTION_TOO_OLD)
        }
        _ => None,
    });
    let deletion = tokio::spawn({
        let group = group.clone();
        async move { group.delete(true).await }
    });
    until("it was committed", async || is_blocked.load(Ordering::Relaxed)).await;
    assert!(fixture.other.group("g").unwrap().create(&GroupOptions::default()).await.unwrap());
    is_blocked.store(false, Ordering::Relaxed);
    deletion.await.unwrap().unwrap();
    assert_eq!(group.status().await.unwrap().generation, 1, "the new one is there");
}

/// Regression: a creation with an unknown result was committed, and its group deleted. Tried again, it created a group with the same identity,
/// which a deletion that was tried again took for the one that it had deleted before.
#[tokio::test(start_paused = true)]
async fn a_creation_that_is_tried_again_makes_another_group() {
    let fixture = GroupFixture::new(2).await;
    let (group, other) = (fixture.bus.group("g").unwrap(), fixture.other.group("g").unwrap());
    let identity = async || {
        let read = RangeRead::new(KeyRange::prefix(&b"notibus\x15\x0c\x01n\x00\x14\x02g\x00"[..]));
        let rows = fixture.store.begin().get_range(&read, Isolation::Snapshot).await.unwrap().rows;
        // Behind the number of the format.
        rows.first().map(|(_, value)| value[1..17].to_vec())
    };
    let is_blocked = Arc::new(AtomicBool::new(false));
    let (blocks, mut is_first) = (Arc::clone(&is_blocked), true);
    fixture.faults.plan_commits(move |attempt| {
        let is_it = attempt.writes() && std::mem::take(&mut is_first);
        blocks.fetch_or(is_it, Ordering::Relaxed);
        is_it.then(|| CommitFault::After(StoreError::COMMIT_UNKNOWN_RESULT))
    });
    let blocked = Arc::clone(&is_blocked);
    fixture
        .faults
        .plan_reads(move |_| blocked.load(Ordering::Relaxed).then_some(StoreError::TRANSACTION_TOO_OLD));
    let creation = tokio::spawn(async move { group.create(&GroupOptions::default()).await });
    until("it was committed", async || is_blocked.load(Ordering::Relaxed)).await;
    let first = identity().await.expect("the group is there");
    other.delete(true).await.unwrap();
    assert_eq!(identity().await, None);
    is_blocked.store(false, Ordering::Relaxed);
    assert!(creation.await.unwrap().unwrap(), "by this call");
    assert_ne!(identity().await, Some(first));
}

/// Regression: members were watched for 10 s, whatever expiry they had: one with a heartbeat each minute was taken for dead.
#[tokio::test(start_paused = true)]
async fn a_member_with_slow_beats_is_no_dead_one() {
    let fixture = GroupFixture::new(2).await;
    let group = fixture.group(Start::Now).await;
    for (heartbeat, expiry) in [(20, 50), (60, 150)] {
        let (heartbeat, expiry) = (Duration::from_secs(heartbeat), Duration::from_secs(expiry));
        let options = NodeOptions::default().heartbeat(heartbeat).expiry(expiry);
        let node = fixture.other.node(options).await.unwrap();
        let observe = |_: GroupBatch<Notification>| std::future::ready(Ok(()));
        let consumer = node.consumer(&group, move |_| observe, hinted()).await.unwrap();
        for refused in [group.reset(Cursor::NOTHING, false).await, group.delete(false).await] {
            assert!(matches!(refused, Err(Error::GroupInUse { members: 1, .. })), "{refused:?}");
        }
        consumer.shutdown().await.unwrap();
        node.shutdown().await.unwrap();
    }
    group.delete(false).await.unwrap();
}

/// An operator who resets a group waits until its dead members are certain to be dead, but for a minute at most.
#[tokio::test(start_paused = true)]
async fn a_dead_member_is_waited_for_up_to_a_minute() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Start::Now).await;
    for (expiry, is_awaited) in [(60, true), (61, false)] {
        let (heartbeat, expiry) = (Duration::from_secs(20), Duration::from_secs(expiry));
        let options = NodeOptions::default().heartbeat(heartbeat).expiry(expiry);
        let node = fixture.other.node(options).await.unwrap();
        let observe = |_: GroupBatch<Notification>| std::future::ready(Ok(()));
        let consumer = node.consumer(&group, move |_| observe, hinted()).await.unwrap();
        drop((consumer, node));
        let reset = group.reset(Start::Now, false).await;
        assert_eq!(reset.is_ok(), is_awaited, "{expiry:?}: {reset:?}");
    }
}
