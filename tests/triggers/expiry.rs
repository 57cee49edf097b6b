//! The index trigger after it was away for longer than tombstones are kept.

use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use notibus::{
    Db, DispatcherOptions, EventKind, Janitor,
    jobs::{IndexBuild, Tenants},
    store::{StoreError, testing::Operation},
};

use crate::{
    common::{db, forgetful, joined, record, until, within},
    fixture::{JobReports, TriggerFixture, at_rest, quick},
    marks::faulty,
};

/// Collects reports until nothing comes any more: the databases that were built, each with whether that
/// was a fresh build, and those that are gone.
async fn collect_all(reports: &mut JobReports<IndexBuild>) -> (BTreeSet<(Db, bool)>, Vec<Db>) {
    let (mut built, mut gone) = (BTreeSet::new(), Vec::new());
    let quiet = Duration::from_secs(30);
    loop {
        tokio::select! {
            work = reports.works.recv() => {
                let (work, decide) = work.unwrap();
                built.insert((work.db, work.is_fresh));
                decide.send(Ok(())).unwrap();
            }
            db = reports.gone.recv() => gone.push(db.unwrap()),
            () = tokio::time::sleep(quiet) => {
                gone.sort();
                return (built, gone);
            }
        }
    }
}

/// Regression: the index trigger kept no marks of its builds: databases that were deleted while it was away for longer than
/// tombstones are kept were never reported as gone, and their indexes stayed forever.
#[tokio::test(start_paused = true)]
async fn databases_that_went_unseen_are_reported_as_gone() {
    let mut fixture = TriggerFixture::new().await;
    let (gone, again, stays) = (db("gone", 1), db("again", 2), db("stays", 3));
    for db in [&gone, &again, &stays] {
        fixture.event(db, EventKind::Created).await;
    }
    let (trigger, mut reports) = fixture.index_trigger(quick()).await;
    collect_all(&mut reports).await;
    at_rest(&fixture, &trigger).await;
    trigger.shutdown().await.unwrap();
    // A database that it never knew is created and deleted, too.
    let unknown = db("unknown", 4);
    fixture.event(&unknown, EventKind::Created).await;
    for db in [&gone, &again, &unknown] {
        fixture.event(db, EventKind::Deleted).await;
    }
    let _janitor = joined(&fixture.bus).await.janitor(forgetful()).await.unwrap();
    until("the tombstones' end", async || fixture.bus.stats().tombstones_dropped == 3).await;
    let back = db("again", 5);
    fixture.event(&back, EventKind::Created).await;
    // Another process: the ring of the old one may still hold the tombstones.
    fixture.dispatcher = fixture.bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let (trigger, mut reports) = fixture.index_trigger(quick()).await;
    let (built, ended) = collect_all(&mut reports).await;
    assert_eq!(built, [(back, true), (stays, true)].into());
    assert_eq!(ended, [again, gone], "each once, and no other");
    at_rest(&fixture, &trigger).await;
    trigger.shutdown().await.unwrap();
    // It has been reported, and is not reported again.
    let (trigger, mut reports) = fixture.index_trigger(quick()).await;
    assert_eq!(collect_all(&mut reports).await, (BTreeSet::new(), Vec::new()));
    trigger.shutdown().await.unwrap();
}

/// Lets the trigger build two databases, and deletes one of them while it is away for longer than tombstones are kept. Returns that one,
/// and the janitor that has removed its tombstone.
async fn forgotten_after_a_build(fixture: &mut TriggerFixture) -> (Db, Janitor) {
    let (gone, stays) = (db("gone", 1), db("stays", 2));
    for db in [&gone, &stays] {
        fixture.event(db, EventKind::Created).await;
    }
    let (trigger, mut reports) = fixture.index_trigger(quick()).await;
    collect_all(&mut reports).await;
    at_rest(fixture, &trigger).await;
    trigger.shutdown().await.unwrap();
    fixture.event(&gone, EventKind::Deleted).await;
    let janitor = joined(&fixture.bus).await.janitor(forgetful()).await.unwrap();
    until("the tombstone's end", async || fixture.bus.stats().tombstones_dropped == 1).await;
    // Another process: the ring of the old one may still hold the tombstone.
    fixture.dispatcher = fixture.bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    (gone, janitor)
}

/// The same, if the trigger crashes after it has learnt of a gone database and before its job is informed.
#[tokio::test(start_paused = true)]
async fn an_index_trigger_that_crashes_after_it_has_expired_still_reports_gone_databases() {
    let mut fixture = TriggerFixture::new().await;
    let (gone, _janitor) = forgotten_after_a_build(&mut fixture).await;
    let (trigger, JobReports { mut works, gone: deaf }) = fixture.index_trigger(quick()).await;
    drop(deaf);
    within("a build", works.recv()).await.unwrap().1.send(Ok(())).unwrap();
    tokio::time::sleep(Duration::from_secs(30)).await;
    drop(trigger);
    let (trigger, mut reports) = fixture.index_trigger(quick()).await;
    assert_eq!(collect_all(&mut reports).await.1, [gone]);
    trigger.shutdown().await.unwrap();
}

/// A row names one replaced instance. Regression: of several replaced instances only the last one was reported as gone.
#[tokio::test(start_paused = true)]
async fn every_built_instance_is_reported_as_gone_however_many_have_come_since() {
    for lives in [true, false] {
        let mut fixture = TriggerFixture::new().await;
        let [first, second, third] = [1, 2, 3].map(|instance| db("a", instance));
        fixture.event(&first, EventKind::Created).await;
        let (trigger, mut reports) = fixture.index_trigger(quick()).await;
        assert!(reports.done().await.is_fresh);
        at_rest(&fixture, &trigger).await;
        trigger.shutdown().await.unwrap();
        fixture.event(&first, EventKind::Deleted).await;
        fixture.event(&second, EventKind::Created).await;
        fixture.event(&second, EventKind::Deleted).await;
        fixture.event(&third, EventKind::Created).await;
        if !lives {
            fixture.event(&third, EventKind::Deleted).await;
        }
        // Another process: the ring of the old one holds every row.
        fixture.dispatcher = fixture.bus.dispatcher(DispatcherOptions::default()).await.unwrap();
        let (trigger, mut reports) = fixture.index_trigger(quick()).await;
        let (built, gone) = collect_all(&mut reports).await;
        let expected = if lives { [(third.clone(), true)].into() } else { BTreeSet::new() };
        assert_eq!(built, expected);
        assert_eq!(gone.iter().filter(|db| **db == first).count(), 1, "{gone:?}");
        assert_eq!(gone.contains(&third), !lives);
        trigger.shutdown().await.unwrap();
    }
}

/// While it cannot find out which databases are gone, it saves no position: a trigger that starts again has to find out.
#[tokio::test(start_paused = true)]
async fn a_trigger_that_crashes_before_it_could_look_for_what_is_gone_looks_again() {
    let (mut fixture, faults) = faulty().await;
    let (gone, _janitor) = forgotten_after_a_build(&mut fixture).await;
    let (trigger, reports) = fixture.index_trigger(quick()).await;
    // From now on the marks, of family 16, cannot be read.
    faults.plan_reads(|operation| {
        let is_marks = matches!(operation, Operation::GetRange { range, .. }
            if range.begin.starts_with(b"notibus\x15\x10"));
        is_marks.then_some(StoreError::IO_ERROR)
    });
    tokio::time::sleep(Duration::from_secs(30)).await;
    drop((trigger, reports));
    faults.heal();
    let (trigger, mut reports) = fixture.index_trigger(quick()).await;
    assert_eq!(collect_all(&mut reports).await.1, [gone]);
    trigger.shutdown().await.unwrap();
}

/// A trigger whose cursor was new, and had no marks when it was opened, expired while it ran, and panicked before it could look for what
/// was gone. When it began again it took the cursor for one that still had no marks: it looked for nothing, and its job was never informed.
#[tokio::test(start_paused = true)]
async fn a_trigger_that_panics_after_it_has_expired_still_finds_out_what_is_gone() {
    let (mut fixture, faults) = faulty().await;
    let has_panicked = AtomicBool::new(false);
    let tenants = Tenants::by(move |name| {
        assert!(name.as_str() != "odd" || has_panicked.swap(true, Ordering::SeqCst), "whose is this?");
        name.to_string()
    });
    let options = quick().tenants(tenants);
    let (trigger, mut reports) = fixture.index_trigger(options).await;
    let gone = db("gone", 1);
    fixture.event(&gone, EventKind::Created).await;
    collect_all(&mut reports).await;
    at_rest(&fixture, &trigger).await;
    fixture.dispatcher = fixture.dispatcher.suspend();
    record(&fixture.store, &fixture.bus, &gone, EventKind::Deleted.once().lanes()).await;
    let _janitor = joined(&fixture.bus).await.janitor(forgetful()).await.unwrap();
    until("the tombstone's end", async || fixture.bus.stats().tombstones_dropped == 1).await;
    // From now on the marks, of family 16, cannot be read.
    faults.plan_reads(|operation| {
        let is_marks = matches!(operation, Operation::GetRange { range, .. }
            if range.begin.starts_with(b"notibus\x15\x10"));
        is_marks.then_some(StoreError::IO_ERROR)
    });
    fixture.dispatcher = fixture.dispatcher.resume();
    tokio::time::sleep(Duration::from_secs(30)).await;
    fixture.event(&db("odd", 1), EventKind::Created).await;
    until("the panic", async || trigger.status().restarts == 1).await;
    // Before it begins again.
    faults.heal();
    assert_eq!(collect_all(&mut reports).await.1, [gone]);
    trigger.shutdown().await.unwrap();
}

/// After a crash, the replacement of an instance is delivered again. By then its successor is marked, but that one lives.
#[tokio::test(start_paused = true)]
async fn a_living_database_is_not_reported_as_gone_when_its_predecessor_is_reported_again() {
    let fixture = TriggerFixture::new().await;
    let (old, new) = (db("a", 1), db("a", 2));
    fixture.event(&old, EventKind::Created).await;
    let (trigger, mut reports) = fixture.index_trigger(quick()).await;
    collect_all(&mut reports).await;
    at_rest(&fixture, &trigger).await;
    trigger.shutdown().await.unwrap();
    fixture.event(&old, EventKind::Deleted).await;
    fixture.event(&new, EventKind::Created).await;
    for crash in 0..2 {
        let options = quick().checkpoint_interval(Duration::from_hours(1));
        let (trigger, mut reports) = fixture.index_trigger(options).await;
        let (built, gone) = collect_all(&mut reports).await;
        assert_eq!((built, gone), ([(new.clone(), true)].into(), vec![old.clone()]), "after {crash}");
        drop(trigger);
    }
}
