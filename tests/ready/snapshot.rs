//! The status and the metrics read one snapshot of the bus: what they cost, what is missing, and what consumers look like in them.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime},
};

use futures_util::future::join_all;
use notibus::{
    Bus, BusOptions, Cursor, DispatcherOptions, StartOptions,
    consumer::{ConsumerOptions, ConsumerSettings, FailurePolicy, Work},
    cursor::Start,
    event::Notification,
    http::{Api, ApiOptions},
    store::{
        Store, StoreError,
        testing::{Faults, Operation},
    },
};
use serde_json::Value;

use crate::{
    common::{db, record, until},
    parts::{get, ready},
};

/// How long a read of the store takes.
const READ: Duration = Duration::from_millis(2);

/// The default prefix, followed by the family of consumers.
const CONSUMERS: &[u8] = b"notibus\x15\x19";

/// Returns the reads of a status and of a scrape, in total and in sequence, with consumers that all have a lease in each shard.
async fn cost(consumers: usize, shards: u32) -> [(u64, u128); 2] {
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default().partitions(1).shards(shards)).await.unwrap();
    let notifier = crate::common::joined(&bus).await.notifier(crate::common::unpolled()).await.unwrap();
    for n in 0..200 {
        record(&store, &bus, &db(&format!("db{n:03}"), 1), [1, 0, 0, 0]).await;
    }
    until("all are folded", async || bus.is_drained().await.unwrap()).await;
    for n in 0..consumers {
        let name = format!("c{n:04}");
        // Half of the consumers have not read any row.
        let start = if n % 2 == 0 { Start::Now } else { Start::At(Cursor::BEGINNING) };
        bus.consumer(&name).unwrap().create(&ConsumerSettings::default().start(start)).await.unwrap();
        let lease = |shard: u8| {
            let number: &[u8] = if shard == 0 { b"\x14" } else { &[0x15, shard] };
            [&b"notibus\x15\x0b\x02main\x00\x02consumer/"[..], name.as_bytes(), b"\x00", number].concat()
        };
        let own = async |tx: notibus::store::Transaction| {
            (0..shards).for_each(|shard| tx.set(&lease(u8::try_from(shard).unwrap()), &[1; 40]));
            Ok(())
        };
        store.run(own).await.unwrap();
    }
    notifier.shutdown().await.unwrap();
    let faults = Faults::new(&store);
    let counted =
        Bus::open(&faults.store(), BusOptions::default().partitions(1).shards(shards)).await.unwrap();
    let dispatcher = counted.suspended_dispatcher(DispatcherOptions::default()).await.unwrap();
    let api = Api::start(&counted, &dispatcher, ApiOptions::default()).unwrap();
    faults.delay_reads(READ);
    let measured = async |path: &str| {
        let (before, began) = (faults.counts().reads, tokio::time::Instant::now());
        let (status, body) = get(&api, path).await;
        assert_eq!(status, 200, "{body}");
        let took = began.elapsed();
        assert!(took <= Duration::from_secs(1), "{consumers} consumers, {shards} shards, {path}: {took:?}");
        ((faults.counts().reads - before, took.as_millis() / READ.as_millis()), body)
    };
    let (status_cost, body) = measured("/_notibus/status").await;
    let status: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(status["unanswered"].as_array().unwrap().len(), 0, "{}", status["unanswered"]);
    let is_cut = status["truncated"] == serde_json::json!(["consumers"]);
    assert!(is_cut || status["consumers"].as_array().unwrap().len() == consumers);
    // The status has just read everything, so a scrape now would read nothing.
    tokio::time::sleep(Duration::from_mins(1)).await;
    let (metrics_cost, body) = measured("/_notibus/metrics").await;
    let lags: Vec<_> = body.lines().filter(|line| line.starts_with("notibus_consumer_lag_rows{")).collect();
    assert_eq!(lags.len(), consumers);
    let (behind, done) = (" 200", " 0");
    assert_eq!(lags.iter().filter(|line| line.ends_with(behind)).count(), consumers / 2);
    assert_eq!(lags.iter().filter(|line| line.ends_with(done)).count(), consumers - consumers / 2);
    [status_cost, metrics_cost]
}

/// Bug: the status of each consumer took several transactions, and its lag some more, one after another, so from 100 consumers on all
/// metrics of the bus were missing. Fix: all consumers are read in ranges, and each shard of the feed once for all of them.
#[tokio::test(start_paused = true)]
async fn a_status_of_many_consumers_costs_pages_and_not_consumers() {
    for shards in [4, 64] {
        let mut one = 0;
        for consumers in [1, 100, 1_000] {
            let [status, metrics] = cost(consumers, shards).await;
            println!("{consumers} consumers × {shards} shards: status {status:?}, metrics {metrics:?}");
            if consumers == 1 {
                one = status.0;
            }
            // Pages of checkpoints, leases, consumers and deferred ids, one for each thousand rows or so.
            let rows = consumers as u64 * (2 * u64::from(shards) + 2);
            for (reads, in_sequence) in [status, metrics] {
                assert!(reads <= one + 32 + rows / 250, "{reads} reads");
                assert!(in_sequence <= 20 + u128::from(rows / 500), "{in_sequence} reads in sequence");
            }
        }
    }
}

/// Bug: if the store did not answer for one part, all others were missing too, in the status and in the metrics.
#[tokio::test(start_paused = true)]
async fn what_the_store_does_not_answer_is_missing_and_named_and_the_rest_is_there() {
    let faults = Faults::new(&Store::memory());
    let bus = Bus::open(&faults.store(), BusOptions::default()).await.unwrap();
    let running = bus.start(StartOptions::default()).await.unwrap();
    let api = running.api(ApiOptions::default()).unwrap();
    bus.consumer("c").unwrap().create(&ConsumerSettings::default()).await.unwrap();
    let has = |metrics: &str, name: &str| metrics.lines().any(|line| line.starts_with(name));
    let all = [
        "notibus_nodes{",
        "notibus_backlog_rows{",
        "notibus_tail_lag_seconds ",
        "notibus_leases{pool=\"partition\"",
    ];
    let of_consumers = ["notibus_consumer_lag_rows{", "notibus_consumer_deferred_ids{"];
    let metrics = get(&api, "/_notibus/metrics").await.1;
    assert!(all.iter().chain(&of_consumers).all(|name| has(&metrics, name)), "{metrics}");

    faults.plan_reads(|read| {
        let is_of_consumers =
            matches!(read, Operation::GetRange { range, .. } if range.begin.starts_with(CONSUMERS));
        is_of_consumers.then_some(StoreError::PROCESS_BEHIND)
    });
    tokio::time::sleep(Duration::from_mins(1)).await;
    let began = tokio::time::Instant::now();
    let metrics = get(&api, "/_notibus/metrics").await.1;
    assert!(began.elapsed() <= Duration::from_secs(3), "each part has a limit, and they are read at once");
    assert!(all.iter().all(|name| has(&metrics, name)), "{metrics}");
    assert!(!of_consumers.iter().any(|name| has(&metrics, name)), "{metrics}");
    assert!(has(&metrics, "notibus_unanswered 3"), "{metrics}");
    let status = bus.status().await.unwrap();
    assert!(status.consumers.is_none() && status.nodes.is_some_and(|nodes| nodes.len() == 1));
    assert!(status.feed.is_some() && status.backlog.is_some());
    let named: Vec<_> = status.unanswered.iter().map(|missing| missing.part).collect();
    assert_eq!(named, ["consumers", "deferred ids", "lag of consumers"]);
    assert!(status.unanswered[0].reason.contains("process"), "{:?}", status.unanswered);
    assert_eq!(ready(&api).await["status"], "ok", "it depends on no consumer");
    running.shutdown().await.unwrap();
}

/// Simultaneous probes share the reads of one of them: `ready` is open to everyone.
#[tokio::test(start_paused = true)]
async fn probes_at_once_share_their_reads() {
    let faults = Faults::new(&Store::memory());
    let bus = Bus::open(&faults.store(), BusOptions::default()).await.unwrap();
    let dispatcher = bus.suspended_dispatcher(DispatcherOptions::default()).await.unwrap();
    let api = Api::start(&bus, &dispatcher, ApiOptions::default()).unwrap();
    faults.delay_reads(READ);
    let reads = async |probes: usize| {
        let before = faults.counts().reads;
        join_all((0..probes).map(|_| ready(&api))).await;
        faults.counts().reads - before
    };
    let (one, many) = (reads(1).await, reads(100).await);
    assert!(many <= 2 * one, "{many} reads for 100 probes, {one} for one");
}

/// Regression: a shard that was held up showed only as lag, so nobody could see which row held it up, and why.
#[tokio::test(start_paused = true)]
async fn a_shard_that_holds_names_its_row_and_the_failure_until_it_gets_on() {
    for is_ordered in [false, true] {
        let store = Store::memory();
        let bus = Bus::open(&store, BusOptions::default().partitions(1).shards(1)).await.unwrap();
        let running = bus.start(StartOptions::default()).await.unwrap();
        let api = running.api(ApiOptions::default()).unwrap();
        let mended = Arc::new(AtomicBool::new(false));
        let (of_ids, of_rows) = (Arc::clone(&mended), Arc::clone(&mended));
        let options = ConsumerOptions::default()
            .failure(FailurePolicy::Hold)
            .max_concurrency(if is_ordered { 1 } else { 4 });
        let member = running.consumer("log").unwrap().start_from(Cursor::BEGINNING).options(options);
        let fails = |name: &str, mended: &AtomicBool| {
            let fails = name == "bad" && !mended.load(Ordering::Relaxed);
            std::future::ready(if fails { Err("the disk is full".into()) } else { Ok(()) })
        };
        let consumer = if is_ordered {
            let rows = move |batch: notibus::consumer::Batch<Notification>| {
                let is_bad = batch.rows.iter().any(|row| row.name.as_str() == "bad");
                fails(if is_bad { "bad" } else { "good" }, &of_rows)
            };
            member.run_batches(rows).await.unwrap()
        } else {
            let ids = move |work: Work<Notification>| fails(std::str::from_utf8(work.id()).unwrap(), &of_ids);
            member.run(ids).await.unwrap()
        };
        for name in ["a", "bad", "c"] {
            record(&store, &bus, &db(name, 1), [1, 0, 0, 0]).await;
        }
        tokio::time::sleep(Duration::from_mins(20)).await;

        let handle = bus.consumer("log").unwrap();
        let failing = handle.status().await.unwrap().shards[0].failing.clone().unwrap();
        assert_eq!(
            (failing.id.as_deref(), &failing.error[..]),
            (Some("bad"), "the disk is full"),
            "{is_ordered}"
        );
        assert!(failing.attempts > 5, "{failing:?}");
        let shown: Value = serde_json::from_str(&get(&api, "/_notibus/consumers/log").await.1).unwrap();
        let troubles = shown["troubles"].as_array().unwrap();
        let is_named = |it: &Value| it.as_str().unwrap().contains("waits for \"bad\", which has failed");
        assert!(troubles.iter().any(is_named), "{shown}");
        assert!(shown["lag"][0]["rows"] == 2 && shown["lag"][0]["age_ms"].is_u64(), "{shown}");
        let metric = |metrics: String| {
            let line =
                metrics.lines().find(|line| line.starts_with("notibus_consumer_shards_failing"))?.to_owned();
            Some(line.rsplit_once(' ')?.1.to_owned())
        };
        assert_eq!(metric(get(&api, "/_notibus/metrics").await.1).as_deref(), Some("1"));
        let elsewhere = Bus::open(&store, BusOptions::default().partitions(1).shards(1)).await.unwrap();
        let listed = elsewhere.consumers().await.unwrap();
        assert_eq!(listed[0].shards[0].failing, None, "another process knows the lag only");

        // Nobody has to clear the failure: it is gone once the checkpoint has passed the row.
        mended.store(true, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_mins(20)).await;
        assert_eq!(handle.status().await.unwrap().shards[0].failing, None);
        assert_eq!(metric(get(&api, "/_notibus/metrics").await.1).as_deref(), Some("0"));
        consumer.shutdown().await.unwrap();
        running.shutdown().await.unwrap();
    }
}

/// The age of the oldest row is exact, however many rows follow it; the rows are counted only as far as they are read.
#[tokio::test(start_paused = true)]
async fn a_consumer_that_is_far_behind_has_the_age_of_its_oldest_row() {
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default().partitions(1).shards(64)).await.unwrap();
    let notifier = crate::common::joined(&bus).await.notifier(crate::common::unpolled()).await.unwrap();
    let handle = bus.consumer("late").unwrap();
    handle.create(&ConsumerSettings::default()).await.unwrap();
    let mut folded = 0;
    let mut create = async |count: u64, prefix: &str| {
        let write = async |tx| {
            for n in 0..count {
                bus.producer().created(&tx, &db(&format!("{prefix}{n}"), 1));
            }
            Ok(())
        };
        store.run(write).await.unwrap();
        folded += count;
        until("the fold", async || bus.stats().folded.total() >= folded).await;
    };
    create(64, "old").await;
    tokio::time::sleep(Duration::from_hours(1)).await;
    for n in 0..5 {
        create(10_000, &format!("new{n}/")).await;
    }
    let now_ms = || {
        u64::try_from(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis()).unwrap()
    };
    let before = now_ms();
    let status = bus.status().await.unwrap();
    let after = now_ms();
    let lag = status.consumers.unwrap().remove(0).lag.unwrap();
    assert!(lag.iter().any(|shard| !shard.is_exact), "more wait than are read");
    for shard in &lag {
        let oldest = bus.feed().shard_page(shard.shard, Cursor::BEGINNING, 1).await.unwrap().rows.remove(0);
        let written = shard.age_ms.unwrap() + oldest.written_ms;
        assert!((before..=after).contains(&written), "it is the age of the oldest row: {shard:?}");
    }
    let rows: u64 = lag.iter().map(|shard| shard.rows).sum();
    assert!((39_000..=41_000).contains(&rows), "{rows}");
    notifier.shutdown().await.unwrap();
}
