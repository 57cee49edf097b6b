//! The rows that a group gets: from its start on, in order, over reshards, divided among nodes.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use notibus::{
    Cursor, Error, NodeOptions, Sequence,
    changes::{Change, ChangesOptions, DocId, DocSummary, Revision},
    cursor::Start,
    group::{CheckpointPolicy, CloseReason, GroupBatch, GroupOptions},
};

use crate::{
    common::{db, joined, until},
    fixture::{GroupFixture, Happened, Log, behind, hinted, names, pass, until_done},
};

/// In other libraries, a group that starts "now" begins where it first reads: then the first event is lost.
#[tokio::test(start_paused = true)]
async fn the_first_event_after_the_creation_is_delivered_however_late_it_is_read() {
    let fixture = GroupFixture::new(4).await;
    let group = fixture.group(Start::Now).await;
    fixture.create(["first"]).await;
    pass(Duration::from_hours(1)).await;
    let log = Log::new();
    let consumer = log.consume(&fixture.bus, &group, hinted()).await;
    log.until_names(&["first".to_owned()]).await;
    until_done(&group).await;
    consumer.shutdown().await.unwrap();
    log.check(true);
    assert_eq!(log.names(), ["first"]);
}

#[tokio::test(start_paused = true)]
async fn a_group_starts_at_now_at_zero_or_behind_a_sequence() {
    let fixture = GroupFixture::new(4).await;
    fixture.create(["a", "b"]).await;
    let after_a = fixture.other.feed().page(Cursor::NOTHING, 1).await.unwrap().rows[0].sequence;
    let mut logs = Vec::new();
    for (name, start) in
        [("now", Start::Now), ("zero", Cursor::NOTHING.into()), ("after", Start::from(after_a))]
    {
        let group = fixture.bus.group(name).unwrap();
        group.create(&GroupOptions::default().start_from(start)).await.unwrap();
        assert!(!group.create(&GroupOptions::default()).await.unwrap(), "it is there");
        let log = Log::new();
        logs.push((log.consume(&fixture.bus, &group, hinted()).await, group, log));
    }
    fixture.create(["c"]).await;
    for (consumer, group, log) in logs {
        until_done(&group).await;
        consumer.shutdown().await.unwrap();
        let got: BTreeSet<_> = log.names().into_iter().collect();
        let expected: &[&str] = match group.name().as_str() {
            "now" => &["c"],
            "zero" => &["a", "b", "c"],
            _ => &["b", "c"],
        };
        assert_eq!(got, expected.iter().map(ToString::to_string).collect(), "{}", group.name());
    }
}

/// New rows reach consumers of another process by watches, and those of the same process directly, without polls.
#[tokio::test(start_paused = true)]
async fn rows_come_without_polling() {
    let fixture = GroupFixture::new(4).await;
    let group = fixture.group(Start::Now).await;
    let log = Log::new();
    let _consumer = log.consume(&fixture.bus, &group, hinted()).await;
    pass(Duration::from_mins(10)).await;
    for n in 0..20 {
        let began = tokio::time::Instant::now();
        fixture.create([format!("db{n}")]).await;
        log.until_names(&[format!("db{n}")]).await;
        assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
        pass(Duration::from_secs(n)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn shards_are_divided_and_each_row_comes_once() {
    let fixture = GroupFixture::new(16).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let log = Log::new();
    let buses = [fixture.another().await, fixture.another().await, fixture.another().await];
    let mut consumers = Vec::new();
    for bus in &buses {
        consumers.push(log.consume(bus, &group, hinted()).await);
    }
    pass(Duration::from_secs(20)).await;
    let mut shares: Vec<_> = consumers.iter().map(|consumer| consumer.shards().len()).collect();
    shares.sort_unstable();
    assert_eq!(shares, [5, 5, 6]);
    let all = names("db", 200);
    fixture.create(&all).await;
    until_done(&group).await;
    let mut got = log.names();
    got.sort_unstable();
    let mut expected = all;
    expected.sort_unstable();
    assert_eq!(got, expected, "each once");
    for consumer in consumers {
        consumer.shutdown().await.unwrap();
    }
    log.check(true);
    let owners: BTreeSet<_> = group.status().await.unwrap().shards.into_iter().map(|s| s.owner).collect();
    assert_eq!(owners, BTreeSet::from([None]), "all leases are released");
}

/// Rows of a database come in order, whatever happens to shards, because successors begin only after all that they replace.
#[tokio::test(start_paused = true)]
async fn the_order_of_each_database_holds_over_reshards() {
    let fixture = GroupFixture::new(2).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let all = names("db", 12);
    fixture.create(&all).await;
    let log = Log::doing(async |batch| {
        // One shard is slow, so that its siblings are drained long before.
        if batch.shard.0 % 3 == 1 {
            tokio::time::sleep(Duration::from_millis(700)).await;
        }
        Ok(())
    });
    let (one, two) = (fixture.another().await, fixture.another().await);
    let options = hinted().rows_max(2);
    let a = log.consume(&one, &group, options.clone()).await;
    let b = log.consume(&two, &group, options).await;
    for (round, shards) in [(0, 5), (1, 1), (2, 3)] {
        for name in &all {
            fixture.update(name, round).await;
        }
        let before = group.status().await.unwrap().shards.len();
        fixture.other.feed().reshard(shards, None).await.unwrap();
        assert_eq!(group.status().await.unwrap().shards.len(), before, "successors wait");
    }
    let last = fixture.other.feed().topology().await.unwrap().pop().unwrap().shards;
    let on_last = async || {
        let status = group.status().await.unwrap();
        status.shards.iter().map(|shard| shard.shard).eq(last.iter().copied())
    };
    until("the group is at the last topology", on_last).await;
    fixture.create(["new"]).await;
    until_done(&group).await;
    a.shutdown().await.unwrap();
    b.shutdown().await.unwrap();
    log.check(true);
    let mut newest: BTreeMap<_, Sequence> = BTreeMap::new();
    for (name, sequence) in log.rows() {
        let before = newest.insert(name.clone(), sequence);
        assert!(before < Some(sequence), "{name}: {sequence} after {before:?}");
    }
    assert_eq!(newest.len(), 13);
    assert!(log.closed().contains(&CloseReason::Resharded));
}

#[tokio::test(start_paused = true)]
async fn an_entry_that_is_dropped_before_a_group_comes_to_it_does_not_confuse_the_group() {
    let fixture = GroupFixture::new(3).await;
    let group = fixture.group(Start::Now).await;
    let feed = fixture.other.feed();
    feed.reshard(5, None).await.unwrap();
    feed.reshard(2, None).await.unwrap();
    let options = notibus::JanitorOptions::default().interval(Duration::from_secs(1));
    let janitor = joined(&fixture.other).await.janitor(options).await.unwrap();
    // The first entry, where the group is, is kept.
    until("the second entry is dropped", async || feed.topology().await.unwrap().len() == 2).await;
    fixture.create(["a"]).await;
    assert_eq!(behind(&group).await, 1);
    let log = Log::new();
    let consumer = log.consume(&fixture.bus, &group, hinted()).await;
    log.until_names(&["a".to_owned()]).await;
    until_done(&group).await;
    assert_eq!(group.status().await.unwrap().shards.len(), 2);
    until("the first entry is dropped, too", async || feed.topology().await.unwrap().len() == 1).await;
    consumer.shutdown().await.unwrap();
    janitor.shutdown().await.unwrap();
    assert!(log.all().iter().filter(|(_, h)| matches!(h, Happened::Opened(..))).count() <= 2);
}

#[tokio::test(start_paused = true)]
async fn batches_have_limits_of_rows_and_bytes() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let all = names("db", 25);
    fixture.create(&all).await;
    for (options, sizes) in [(hinted().rows_max(10), vec![10, 10, 5]), (hinted().bytes_max(1), vec![1; 25])] {
        let log = Log::new();
        let consumer = log.consume(&fixture.bus, &group, options).await;
        log.until_names(&all).await;
        until_done(&group).await;
        consumer.shutdown().await.unwrap();
        let batches = log.all().into_iter().filter_map(|(_, happened)| match happened {
            Happened::Batch(_, rows, _) => Some(rows.len()),
            _ => None,
        });
        assert_eq!(batches.collect::<Vec<_>>(), sizes);
        group.reset(Cursor::NOTHING, false).await.unwrap();
    }
}

/// Unsaved rows come again after a crash, but not after an orderly end.
#[tokio::test(start_paused = true)]
async fn checkpoints_are_written_as_the_policy_says() {
    for (policy, lost, after_shutdown) in [
        (CheckpointPolicy::EveryBatch, 0, 0),
        (CheckpointPolicy::Rows(4), 2, 0),
        (CheckpointPolicy::Interval(Duration::from_hours(1)), 10, 0),
        (CheckpointPolicy::Explicit, 10, 10),
    ] {
        let fixture = GroupFixture::new(1).await;
        let group = fixture.group(Cursor::NOTHING).await;
        let all = names("db", 10);
        fixture.create(&all).await;
        let options = hinted().checkpoint(policy).rows_max(1);
        let log = Log::new();
        let crashed = log.consume(&fixture.bus, &group, options.clone()).await;
        log.until_names(&all).await;
        pass(Duration::from_secs(1)).await;
        drop(crashed);
        pass(Duration::from_secs(30)).await;
        assert_eq!(behind(&group).await, lost, "{policy:?}");
        log.check(true);

        let log = Log::new();
        let ended = log.consume(&fixture.bus, &group, options).await;
        until("the rest comes again", async || log.rows().len() as u64 == lost).await;
        ended.shutdown().await.unwrap();
        assert_eq!(behind(&group).await, after_shutdown, "{policy:?}");
        assert!(log.closed().iter().all(|reason| *reason == CloseReason::Shutdown));
        log.check(true);
    }
}

/// An idle shard does not count as behind.
#[tokio::test(start_paused = true)]
async fn what_was_worked_on_is_saved_when_the_shard_rests() {
    for policy in [CheckpointPolicy::Rows(1_000), CheckpointPolicy::Interval(Duration::from_hours(1))] {
        let fixture = GroupFixture::new(2).await;
        let group = fixture.group(Cursor::NOTHING).await;
        let log = Log::new();
        let options = hinted().checkpoint(policy);
        let _consumer = log.consume(&fixture.bus, &group, options).await;
        pass(Duration::from_mins(5)).await;
        let before = fixture.bus.stats().group_checkpoints;
        fixture.create(names("db", 5)).await;
        log.until_names(&names("db", 5)).await;
        assert_eq!(behind(&group).await, 5, "{policy:?}");
        pass(Duration::from_secs(35)).await;
        assert_eq!(behind(&group).await, 0, "{policy:?}");
        pass(Duration::from_hours(2)).await;
        let written = fixture.bus.stats().group_checkpoints - before;
        assert!(written <= 4, "then nothing more is written: {written}");
    }
}

/// An observer that gathers rows saves them later; the group does not leave a shard before that.
#[tokio::test(start_paused = true)]
async fn an_explicit_checkpoint_can_come_later_and_a_reshard_waits_for_it() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    fixture.create(names("db", 6)).await;
    let kept: Arc<std::sync::Mutex<Option<notibus::group::Checkpointer>>> = Arc::default();
    let keeps = Arc::clone(&kept);
    let log = Log::doing(move |batch| {
        *keeps.lock().unwrap() = Some(batch.checkpointer());
        std::future::ready(Ok(()))
    });
    let checkpoint = CheckpointPolicy::Explicit;
    let options = hinted().checkpoint(checkpoint).rows_max(2);
    let consumer = log.consume(&fixture.bus, &group, options).await;
    log.until_names(&names("db", 6)).await;
    assert_eq!(behind(&group).await, 6);
    fixture.other.feed().reshard(3, None).await.unwrap();
    until("it is closed without a checkpoint, and begins again", async || {
        log.closed().contains(&CloseReason::Resharded) && log.rows().len() >= 12
    })
    .await;
    assert_eq!(group.status().await.unwrap().shards.len(), 1, "its successors wait");
    let checkpointer = kept.lock().unwrap().take().unwrap();
    checkpointer.checkpoint().await.unwrap();
    assert_eq!(behind(&group).await, 0);
    fixture.create(["new"]).await;
    until("its successors are begun", async || log.names().contains(&"new".to_owned())).await;
    consumer.shutdown().await.unwrap();
    log.check(true);
}

/// Notifications of their database announce documents. Nothing polls.
#[tokio::test(start_paused = true)]
async fn a_group_follows_the_documents_of_a_database() {
    let fixture = GroupFixture::new(2).await;
    let (changes, docs) = (fixture.bus.changes(), db("docs", 9));
    let options = ChangesOptions::default().shards(3);
    fixture.store.run(async |tx| changes.create(&tx, &docs, &options).await).await.unwrap();
    let group = changes.feed(&docs).group("index").unwrap();
    group.create(&GroupOptions::default()).await.unwrap();
    let node = fixture.bus.node(NodeOptions::default()).await.unwrap();
    let seen: Arc<std::sync::Mutex<Vec<String>>> = Arc::default();
    let list = Arc::clone(&seen);
    let observe = move |batch: GroupBatch<Change>| {
        list.lock().unwrap().extend(batch.rows.iter().map(|row| row.doc.id.to_string()));
        std::future::ready(Ok(()))
    };
    let consumer = node.consumer(&group, move |_| observe.clone(), hinted()).await.unwrap();
    let other = fixture.other.changes();
    for n in 0..20_u8 {
        pass(Duration::from_secs(n.into())).await;
        let edit = async |tx| {
            let revision = Revision { position: 1, hash: [n; 16] };
            let id = DocId::new(&format!("doc{n}"))?;
            let doc = DocSummary { id, revision, branches: 1, is_deleted: false };
            other.writer(&tx, &docs).await?.record(&doc, None)?;
            Ok(())
        };
        fixture.store.run(edit).await.unwrap();
        until("it is seen", async || seen.lock().unwrap().contains(&format!("doc{n}"))).await;
        if n == 10 {
            other.feed(&docs).reshard(2, None).await.unwrap();
        }
    }
    assert_eq!(seen.lock().unwrap().len(), 20);
    let lag = group.lag().await.unwrap();
    assert!(lag.iter().all(|shard| shard.rows == 0 && shard.age_ms.is_none()));
    let [status] = &fixture.bus.groups().await.unwrap()[..] else { panic!("there is one") };
    assert_eq!((status.instance, status.name.as_str()), (Some(docs.instance), "index"));

    // The database is deleted, and its groups with it. The event informs their consumers.
    let producer = fixture.bus.producer();
    let remove = async |tx| {
        changes.remove(&tx, &docs);
        producer.deleted(&tx, &docs);
        Ok(())
    };
    fixture.store.run(remove).await.unwrap();
    assert!(fixture.bus.groups().await.unwrap().is_empty());
    assert!(matches!(group.lag().await, Err(Error::NoGroup { .. })));
    until("the consumer has nothing to do", async || consumer.shards().is_empty()).await;
    consumer.shutdown().await.unwrap();
}

/// Regression: if a database was created again in the same fold, the consumers of its documents were informed of the new instance only,
/// and continued with the old one until their next poll: 39 s.
#[tokio::test(start_paused = true)]
async fn a_group_on_documents_of_a_replaced_database_ends_at_once() {
    let fixture = GroupFixture::new(2).await;
    let (changes, producer) = (fixture.bus.changes(), fixture.bus.producer());
    let (old, new) = (db("docs", 9), db("docs", 10));
    let create = async |tx: notibus::store::Transaction| {
        changes.create(&tx, &old, &ChangesOptions::default()).await?;
        producer.created(&tx, &old);
        Ok(())
    };
    fixture.store.run(create).await.unwrap();
    let group = changes.feed(&old).group("index").unwrap();
    group.create(&GroupOptions::default()).await.unwrap();
    let node = fixture.bus.node(NodeOptions::default()).await.unwrap();
    let observe = |_: GroupBatch<Change>| std::future::ready(Ok(()));
    let consumer = node.consumer(&group, move |_| observe, hinted()).await.unwrap();
    until("the consumer works", async || !consumer.shards().is_empty()).await;
    pass(Duration::from_secs(5)).await;
    let replace = async |tx: notibus::store::Transaction| {
        changes.remove(&tx, &old);
        producer.deleted(&tx, &old);
        changes.create(&tx, &new, &ChangesOptions::default()).await?;
        producer.created(&tx, &new);
        Ok(())
    };
    fixture.store.run(replace).await.unwrap();
    let replaced_at = tokio::time::Instant::now();
    until("the consumer has nothing to do", async || consumer.shards().is_empty()).await;
    assert!(replaced_at.elapsed() < Duration::from_secs(3), "{:?}", replaced_at.elapsed());
    consumer.shutdown().await.unwrap();
}
