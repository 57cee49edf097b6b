//! Tenants have fair shares of a trigger, and it starts again after a panic.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use notibus::{
    Db, EventKind,
    jobs::{IndexBuild, TaskResult, Tenants, TriggerJob, index_trigger},
};
use tokio::time::Instant;

use crate::{
    common::{db, until},
    fixture::{TriggerFixture, at_rest, quick},
};

/// How long a build takes.
const BUILD: Duration = Duration::from_secs(10);

/// Builds each database in the same time.
#[derive(Clone, Default)]
struct Slow(Arc<Mutex<HashMap<Db, Instant>>>);

impl TriggerJob<IndexBuild> for Slow {
    async fn run(&self, build: IndexBuild) -> TaskResult {
        tokio::time::sleep(BUILD).await;
        self.0.lock().unwrap().entry(build.db).or_insert_with(Instant::now);
        Ok(())
    }
}

/// Commits an event of `kind` for each of `dbs`.
async fn happened(fixture: &TriggerFixture, dbs: &[Db], kind: EventKind) {
    let before = fixture.bus.stats().folded.total();
    let producer = fixture.bus.producer();
    let lanes = notibus::event::Counters::from_lanes(kind.once().lanes());
    let record = async |tx| {
        for db in dbs {
            producer.record_all(&tx, db, &lanes)?;
        }
        Ok(())
    };
    fixture.store.run(record).await.unwrap();
    fixture.settled(before + dbs.len() as u64 - 1).await;
}

/// Regression: a tenant with many databases filled the plan and took all jobs: a later tenant waited for all of them.
#[tokio::test(start_paused = true)]
async fn a_tenant_with_much_to_do_keeps_nobody_waiting() {
    let fixture = TriggerFixture::new().await;
    let slow = Slow::default();
    let options = quick().jobs_max(2).pending_max(32);
    let trigger = index_trigger(&fixture.dispatcher, options, slow.clone()).await.unwrap();
    let mut many: Vec<_> = (0..200).map(|n| db(&format!("many/{n}"), 1)).collect();
    happened(&fixture, &many, EventKind::Created).await;
    tokio::time::sleep(BUILD * 3).await;
    assert!(trigger.status().waiting <= 4, "what has no place waits in the store: {:?}", trigger.status());
    let (few, begun) = (db("few/1", 1), Instant::now());
    happened(&fixture, std::slice::from_ref(&few), EventKind::Created).await;
    until("the build of the one", async || slow.0.lock().unwrap().contains_key(&few)).await;
    assert!(begun.elapsed() <= BUILD * 3, "{:?}", begun.elapsed());
    assert!(slow.0.lock().unwrap().len() < 20);

    // Work that waits in the store handles deletions, recreations and restarts like all other work.
    let gone: BTreeSet<_> = many.drain(150..).collect();
    happened(&fixture, &gone.iter().cloned().collect::<Vec<_>>(), EventKind::Deleted).await;
    let again: Vec<_> = (150..160).map(|n| db(&format!("many/{n}"), 2)).collect();
    happened(&fixture, &again, EventKind::Created).await;
    many.extend(again);
    trigger.shutdown().await.unwrap();
    let built = slow.0.lock().unwrap().len();
    let options = quick().jobs_max(8).pending_max(32);
    let trigger = index_trigger(&fixture.dispatcher, options, slow.clone()).await.unwrap();
    tokio::time::sleep(BUILD * 60).await;
    let now = slow.0.lock().unwrap().clone();
    let missing: Vec<_> = many.iter().filter(|db| !now.contains_key(db)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    assert!(!gone.iter().any(|db| now.contains_key(db)), "what was deleted is not built any more");
    at_rest(&fixture, &trigger).await;
    assert_eq!(now.len(), many.len() + 1, "{built} were built before");
    trigger.shutdown().await.unwrap();
}

/// Regression: a panic of a trigger itself ended it, and its status said that it ran.
#[tokio::test(start_paused = true)]
async fn a_trigger_that_panics_begins_again() {
    let fixture = TriggerFixture::new().await;
    let slow = Slow::default();
    let has_panicked = Arc::new(AtomicBool::new(false));
    let panicked = Arc::clone(&has_panicked);
    let tenants = Tenants::by(move |name| {
        assert!(name.as_str() != "odd" || panicked.swap(true, Ordering::SeqCst), "whose is this?");
        name.to_string()
    });
    let options = quick().tenants(tenants);
    let trigger = index_trigger(&fixture.dispatcher, options, slow.clone()).await.unwrap();
    let dbs = ["even", "odd", "other"].map(|name| db(name, 1));
    happened(&fixture, &dbs, EventKind::Created).await;
    at_rest(&fixture, &trigger).await;
    until("all builds", async || slow.0.lock().unwrap().len() == 3).await;
    let status = trigger.status();
    assert_eq!((status.restarts, status.is_finished), (1, false));
    assert_eq!(fixture.bus.stats().trigger_restarts, 1);
    trigger.shutdown().await.unwrap();
}
