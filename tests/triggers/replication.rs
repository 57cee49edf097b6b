//! The replication trigger.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use notibus::{
    Cursor, DispatcherOptions,
    jobs::{Scan, ScanReporter, TriggerOptions, replication_trigger},
};

use crate::{
    common::{self, db, forgetful, joined, until, within},
    fixture::{JobReports, TriggerFixture, at_rest, job},
};

async fn ids(scan: &mut Scan) -> Vec<String> {
    let mut ids = Vec::new();
    loop {
        let page = scan.page(2).await.unwrap();
        ids.extend(page.rows.iter().map(|change| change.doc.id.to_string()));
        if !page.more {
            return ids;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn databases_are_scanned_from_the_beginning_and_then_from_the_last_seen_sequence() {
    let fixture = TriggerFixture::new().await;
    let found = db("_replicator", 1);
    fixture.create(&found).await;
    fixture.document(&found, "x").await;
    let (reporting, mut reports) = job::<Scan>();
    let trigger =
        replication_trigger(&fixture.dispatcher, TriggerOptions::replication("r"), reporting).await.unwrap();
    let (mut scan, decide) = reports.next_work().await;
    assert_eq!((scan.db(), scan.since()), (&found, Cursor::NOTHING), "it is found");
    assert_eq!(ids(&mut scan).await, ["x"]);
    decide.send(Ok(())).unwrap();
    let created = db("shop/_replicator", 2);
    for (n, stranger) in ["shop/_replicator2", "replicator", "shop/_users"].into_iter().enumerate() {
        fixture.create(&db(stranger, 10 + n as u8)).await;
    }
    fixture.create(&created).await;
    let (mut scan, decide) = reports.next_work().await;
    assert_eq!((scan.db().clone(), ids(&mut scan).await.len()), (created.clone(), 0), "and no other");
    decide.send(Ok(())).unwrap();
    for some in [["a", "b", "c"], ["d", "e", "f"]] {
        for id in some {
            fixture.document(&created, id).await;
        }
        let mut seen = Vec::new();
        while seen.len() < 3 {
            let (mut scan, decide) = reports.next_work().await;
            assert!(scan.since() > Cursor::NOTHING || seen.is_empty());
            seen.extend(ids(&mut scan).await);
            decide.send(Ok(())).unwrap();
        }
        assert_eq!(seen, some, "each once");
        // An update that came during a scan that had read it already causes another one.
        while let Ok(Some((mut scan, decide))) =
            tokio::time::timeout(Duration::from_secs(5), reports.works.recv()).await
        {
            assert!(ids(&mut scan).await.is_empty());
            decide.send(Ok(())).unwrap();
        }
    }
    at_rest(&fixture, &trigger).await;
    trigger.shutdown().await.unwrap();
    // Another process continues, unlike CouchDB, which begins from zero.
    fixture.document(&created, "g").await;
    let (reporting, mut reports) = job::<Scan>();
    let trigger =
        replication_trigger(&fixture.dispatcher, TriggerOptions::replication("r"), reporting).await.unwrap();
    let (mut scan, decide) = reports.next_work().await;
    assert_eq!((scan.db().clone(), ids(&mut scan).await), (created, vec!["g".to_owned()]));
    decide.send(Ok(())).unwrap();
    assert!(reports.is_quiet().await);
    trigger.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_update_during_a_scan_causes_another_one_afterwards() {
    let fixture = TriggerFixture::new().await;
    let a = db("_replicator", 1);
    fixture.create(&a).await;
    let (reporting, mut reports) = job::<Scan>();
    let _trigger =
        replication_trigger(&fixture.dispatcher, TriggerOptions::replication("r"), reporting).await.unwrap();
    let (mut scan, decide) = reports.next_work().await;
    assert!(ids(&mut scan).await.is_empty());
    for id in ["x", "y"] {
        fixture.document(&a, id).await;
    }
    assert!(reports.is_quiet().await, "one scan at a time");
    decide.send(Ok(())).unwrap();
    let (mut scan, decide) = reports.next_work().await;
    assert_eq!(ids(&mut scan).await, ["x", "y"]);
    decide.send(Ok(())).unwrap();
    assert!(reports.is_quiet().await, "one for both updates");
}

#[tokio::test(start_paused = true)]
async fn a_scan_that_fails_goes_on_from_its_last_report() {
    let fixture = TriggerFixture::new().await;
    let a = db("_replicator", 1);
    fixture.create(&a).await;
    for id in ["x", "y", "z"] {
        fixture.document(&a, id).await;
    }
    let (reporting, mut reports) = job::<Scan>();
    let _trigger =
        replication_trigger(&fixture.dispatcher, TriggerOptions::replication("r"), reporting).await.unwrap();
    let (mut scan, decide) = reports.next_work().await;
    let page = scan.page(1).await.unwrap();
    assert!(scan.reporter().report(page.to).await.unwrap());
    scan.page(1).await.unwrap();
    decide.send(Err("no network".into())).unwrap();
    let (mut scan, decide) = reports.next_work().await;
    assert_eq!((scan.attempt(), scan.since()), (2, page.to.into()));
    assert_eq!(ids(&mut scan).await, ["y", "z"], "what was not reported comes again");
    decide.send(Ok(())).unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_deleted_database_stops_and_stale_reports_are_ignored() {
    let fixture = TriggerFixture::new().await;
    let (old, new) = (db("_replicator", 1), db("_replicator", 2));
    fixture.create(&old).await;
    let (reporting, mut reports) = job::<Scan>();
    let trigger =
        replication_trigger(&fixture.dispatcher, TriggerOptions::replication("r"), reporting).await.unwrap();
    let (mut scan, decide) = reports.next_work().await;
    fixture.document(&old, "x").await;
    let page = scan.page(10).await.unwrap();
    let first: ScanReporter = scan.reporter();
    assert!(first.report(page.to).await.unwrap());
    decide.send(Ok(())).unwrap();
    let (scan, decide) = reports.next_work().await;
    assert!(!first.report(page.to).await.unwrap(), "another scan has begun");
    let second = scan.reporter();
    fixture.delete(&old).await;
    within("the cancelling", async {
        while !decide.is_closed() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(within("the end", reports.gone.recv()).await.unwrap(), old);
    until("rest", async || trigger.status().running == 0).await;
    assert!(!second.report(page.to).await.unwrap(), "its database is gone");
    assert_eq!(trigger.status().cancelled, 1);
    fixture.create(&new).await;
    let (scan, decide) = reports.next_work().await;
    assert_eq!((scan.db(), scan.since()), (&new, Cursor::NOTHING));
    assert!(!second.report(page.to).await.unwrap(), "nor is it the new one");
    decide.send(Ok(())).unwrap();
    trigger.shutdown().await.unwrap();
}

/// A database was deleted while the trigger was away for longer than tombstones are kept: no row shows it any more.
#[tokio::test(start_paused = true)]
async fn a_trigger_that_has_expired_finds_out_what_is_gone() {
    let mut fixture = TriggerFixture::new().await;
    let (gone, again, stays) = (db("a/_replicator", 1), db("b/_replicator", 2), db("c/_replicator", 3));
    for db in [&gone, &again, &stays] {
        fixture.create(db).await;
    }
    let start = async |fixture: &TriggerFixture| {
        let (reporting, reports) = job::<Scan>();
        let options = TriggerOptions::replication("r");
        (replication_trigger(&fixture.dispatcher, options, reporting).await.unwrap(), reports)
    };
    let (trigger, mut reports) = start(&fixture).await;
    for _ in 0..3 {
        reports.done().await;
    }
    at_rest(&fixture, &trigger).await;
    trigger.shutdown().await.unwrap();
    fixture.delete(&gone).await;
    fixture.delete(&again).await;
    let _janitor = joined(&fixture.bus).await.janitor(forgetful()).await.unwrap();
    until("the tombstones' end", async || fixture.bus.stats().tombstones_dropped == 2).await;
    let back = db("b/_replicator", 4);
    fixture.create(&back).await;
    // Another process: the ring of the old one may still hold the tombstones.
    fixture.dispatcher = fixture.bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let (trigger, mut reports) = start(&fixture).await;
    let mut scanned = BTreeSet::new();
    let mut ended = BTreeSet::new();
    while scanned.len() < 2 || ended.len() < 2 {
        tokio::select! {
            scan = reports.works.recv() => {
                let (scan, decide) = scan.unwrap();
                scanned.insert(scan.db().clone());
                decide.send(Ok(())).unwrap();
            }
            db = reports.gone.recv() => {
                ended.insert(db.unwrap());
            }
        }
    }
    assert_eq!(scanned, [back, stays].into());
    assert_eq!(ended, [gone, again].into());
    trigger.shutdown().await.unwrap();
}

/// Regression: a trigger that crashed after it had learnt that it had expired forgot to search for gone databases.
#[tokio::test(start_paused = true)]
async fn a_trigger_that_crashes_after_it_has_expired_still_finds_out_what_is_gone() {
    for is_done in [false, true] {
        let mut fixture = TriggerFixture::new().await;
        let (gone, stays) = (db("a/_replicator", 1), db("c/_replicator", 3));
        fixture.create(&gone).await;
        fixture.create(&stays).await;
        let start = async |fixture: &TriggerFixture, reporting| {
            let options = TriggerOptions::replication("r").backoff_min(Duration::from_mins(5));
            replication_trigger(&fixture.dispatcher, options, reporting).await.unwrap()
        };
        let (reporting, mut reports) = job::<Scan>();
        let trigger = start(&fixture, reporting).await;
        reports.done().await;
        reports.done().await;
        at_rest(&fixture, &trigger).await;
        trigger.shutdown().await.unwrap();
        fixture.delete(&gone).await;
        let _janitor = joined(&fixture.bus).await.janitor(forgetful()).await.unwrap();
        until("the tombstone's end", async || fixture.bus.stats().tombstones_dropped == 1).await;
        fixture.dispatcher = fixture.bus.dispatcher(DispatcherOptions::default()).await.unwrap();
        // It learns of the expiry, cannot act on it, and saves its cursor.
        let (reporting, JobReports { mut works, gone: deaf }) = job::<Scan>();
        drop(deaf);
        let trigger = start(&fixture, reporting).await;
        let (_, decide) = within("a scan", works.recv()).await.unwrap();
        let mut decide = Some(decide);
        if is_done {
            decide.take().unwrap().send(Ok(())).unwrap();
        }
        tokio::time::sleep(Duration::from_secs(30)).await;
        drop(trigger);
        let (reporting, mut reports) = job::<Scan>();
        let trigger = start(&fixture, reporting).await;
        assert_eq!(within("that it is gone", reports.gone.recv()).await.unwrap(), gone);
        trigger.shutdown().await.unwrap();
    }
}

/// Regression: if a database was created again twice while the trigger was away, its first instance was never reported as gone,
/// and what the job had started for it ran on.
#[tokio::test(start_paused = true)]
async fn an_instance_is_reported_as_gone_however_many_have_come_since() {
    for lives in [true, false] {
        let mut fixture = TriggerFixture::new().await;
        let start = async |fixture: &TriggerFixture, reporting| {
            replication_trigger(&fixture.dispatcher, TriggerOptions::replication("r"), reporting)
                .await
                .unwrap()
        };
        let [first, second, third] = [1, 2, 3].map(|instance| db("a/_replicator", instance));
        fixture.create(&first).await;
        let (reporting, mut reports) = job::<Scan>();
        let trigger = start(&fixture, reporting).await;
        reports.done().await;
        at_rest(&fixture, &trigger).await;
        trigger.shutdown().await.unwrap();
        fixture.delete(&first).await;
        fixture.create(&second).await;
        fixture.delete(&second).await;
        fixture.create(&third).await;
        if !lives {
            fixture.delete(&third).await;
        }
        // Another process: the ring of the old one holds every row.
        fixture.dispatcher = fixture.bus.dispatcher(DispatcherOptions::default()).await.unwrap();
        let (reporting, mut reports) = job::<Scan>();
        let trigger = start(&fixture, reporting).await;
        let mut gone = BTreeSet::new();
        while !gone.contains(&first) {
            gone.insert(within("that it is gone", reports.gone.recv()).await.unwrap());
        }
        if lives {
            assert_eq!(reports.done().await.db(), &third);
            assert!(!gone.contains(&third));
        }
        at_rest(&fixture, &trigger).await;
        trigger.shutdown().await.unwrap();
    }
}

/// Crashes at random between updates: at the end every document was seen.
#[tokio::test(start_paused = true)]
async fn no_change_is_missed_by_scans_that_crash_at_random() {
    let mut random = common::dice();
    let fixture = TriggerFixture::new().await;
    let dbs = [("_replicator", 1), ("a/_replicator", 2), ("b/_replicator", 3)].map(|(name, n)| db(name, n));
    for db in &dbs {
        fixture.create(db).await;
    }
    let (mut written, seen) = (BTreeSet::new(), Arc::new(Mutex::new(BTreeSet::new())));
    for round in 0..20 {
        let (seen, mut dice) = (Arc::clone(&seen), random.fork());
        let fails: Vec<_> = (0..64).map(|_| dice.u8(..4) == 0).collect();
        let scans = AtomicUsize::new(0);
        let scan = move |mut scan: Scan| {
            let seen = Arc::clone(&seen);
            let fails = fails[scans.fetch_add(1, Ordering::Relaxed) % fails.len()] && round < 19;
            async move {
                let name = scan.db().name.to_string();
                loop {
                    let page = scan.page(2).await?;
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    if fails {
                        return Err("it fails".into());
                    }
                    let found = page.rows.iter().map(|change| (name.clone(), change.doc.id.to_string()));
                    seen.lock().unwrap().extend(found);
                    if !page.more {
                        return Ok(());
                    }
                }
            }
        };
        let options = TriggerOptions::replication("r");
        let trigger = replication_trigger(&fixture.dispatcher, options, scan).await.unwrap();
        for n in 0..random.usize(..6) {
            let db = random.choice(&dbs).unwrap();
            let id = format!("{round}-{n}");
            fixture.document(db, &id).await;
            written.insert((db.name.to_string(), id));
        }
        tokio::time::sleep(Duration::from_millis(random.u64(..3_000))).await;
        if round == 19 {
            at_rest(&fixture, &trigger).await;
        }
        if random.bool() {
            trigger.shutdown().await.unwrap();
        }
    }
    assert_eq!(*seen.lock().unwrap(), written);
}
