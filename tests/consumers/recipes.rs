//! The recipe for indexes: what handlers receive, and that no build, no change and no end of a database is lost.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use notibus::{
    Bus, Cursor, Db, Error, EventKind,
    changes::Change,
    consumer::{
        ConsumerOptions, DbHandler, DeletedDb, HandlerResult, IndexBuild, IndexDdocs, ParallelBatch,
        ParallelJob, index,
    },
    store::{
        Store, StoreError, Transaction,
        testing::{CommitFault, Operation},
    },
};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use crate::{
    common::{NEVER, db, forgetful, joined, stored, until, within},
    fixture::{ConsumerFixture, pass},
    reporting::{cancelled, ddoc, quick},
};

#[tokio::test(start_paused = true)]
async fn builds_are_debounced_deduplicated_and_name_their_design_documents() {
    let fixture = ConsumerFixture::new(1).await;
    let (views, mut reports) = fixture.views(quick()).await;
    let a = db("a", 1);
    fixture.event(&a, EventKind::Created).await;
    for _ in 0..10 {
        fixture.event(&a, EventKind::Updated).await;
    }
    let build = reports.done().await;
    assert_eq!((&build.db, build.is_fresh, build.attempt()), (&a, true, 1));
    assert_eq!(build.ddocs, IndexDdocs::All);
    assert!(reports.is_quiet().await, "ten updates, one build");
    fixture.ddoc(&a, Some("_design/x")).await;
    fixture.ddoc(&a, Some("_design/y")).await;
    let build = reports.done().await;
    let ids = [ddoc("_design/x"), ddoc("_design/y")].into();
    assert_eq!((build.ddocs, build.is_fresh), (IndexDdocs::Only(ids), false));
    fixture.ddoc(&a, Some("_design/x")).await;
    fixture.event(&a, EventKind::Updated).await;
    assert_eq!(reports.done().await.ddocs, IndexDdocs::All, "documents have changed, too");
    fixture.ddoc(&a, None).await;
    assert_eq!(reports.done().await.ddocs, IndexDdocs::All, "it may be any");
    fixture.until_done().await;
    assert_eq!(fixture.handle().again("a", false).await.unwrap(), 1);
    assert_eq!(reports.done().await.ddocs, IndexDdocs::All, "somebody has asked");
    fixture.until_done().await;
    assert!(reports.is_quiet().await);
    views.shutdown().await.unwrap();
}

/// Bug: the recipe overlooked a change to a design document without an id if changes with an id were in the same fold, so its index was not
/// built. Fix: the row of changes without an id is read with the others.
#[tokio::test(start_paused = true)]
async fn a_design_document_without_an_id_has_all_indexes_built_whatever_it_was_folded_with() {
    let fixture = ConsumerFixture::new(1).await;
    let (views, mut reports) = fixture.views(quick()).await;
    let a = db("a", 1);
    fixture.event(&a, EventKind::Created).await;
    reports.done().await;
    let (producer, x) = (fixture.other.producer(), ddoc("_design/x"));
    fixture
        .committed(2, async |tx| {
            producer.ddoc_updated(tx, &a, Some(&x));
            producer.ddoc_updated(tx, &a, None);
            Ok(())
        })
        .await;
    assert_eq!(reports.done().await.ddocs, IndexDdocs::All);
    fixture.ddoc(&a, Some("_design/x")).await;
    assert_eq!(reports.done().await.ddocs, IndexDdocs::Only([x].into()), "the other one is built");
    views.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn no_more_builds_run_at_once_than_may_and_one_per_database() {
    let fixture = ConsumerFixture::new(1).await;
    let all: Vec<_> = (0..10).map(|n| db(&format!("db{n}"), 1)).collect();
    fixture.events(&all, EventKind::Created).await;
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let names = Arc::new(Mutex::new(BTreeMap::new()));
    let (count, peak, known) = (Arc::clone(&running), Arc::clone(&most), Arc::clone(&names));
    let build = move |build: IndexBuild| {
        let (count, peak, known) = (Arc::clone(&count), Arc::clone(&peak), Arc::clone(&known));
        async move {
            let name = build.db.name.clone();
            assert!(known.lock().unwrap().insert(name.clone(), true) != Some(true), "one per database");
            peak.fetch_max(count.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            pass(Duration::from_secs(3)).await;
            count.fetch_sub(1, Ordering::SeqCst);
            known.lock().unwrap().insert(name, false);
            Ok(())
        }
    };
    // The same holds with room for fewer databases than there are.
    let options = quick().max_concurrency(3).in_hand_max(4);
    let views = fixture.member_of_all(options).await.run(index(build)).await.unwrap();
    pass(Duration::from_secs(4)).await;
    fixture.events(&all, EventKind::Updated).await;
    fixture.until_done().await;
    assert_eq!(most.load(Ordering::SeqCst), 3);
    assert_eq!(names.lock().unwrap().len(), 10);
    assert_eq!(fixture.bus.stats().consumer_failures, 0);
    views.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_build_that_fails_or_panics_is_tried_again_with_pauses() {
    let fixture = ConsumerFixture::new(1).await;
    let times = Arc::new(Mutex::new(Vec::new()));
    let tried = Arc::clone(&times);
    let build = move |build: IndexBuild| {
        tried.lock().unwrap().push(tokio::time::Instant::now());
        async move {
            match build.attempt() {
                1 => Err("no disk".into()),
                2 => panic!("it breaks"),
                _ => Ok(()),
            }
        }
    };
    let options = quick().backoff_min(Duration::from_secs(1)).checkpoint_interval(Duration::from_secs(10));
    let views = fixture.member_of_all(options).await.run(index(build)).await.unwrap();
    fixture.event(&db("a", 1), EventKind::Created).await;
    fixture.until_done().await;
    assert_eq!(fixture.bus.stats().consumer_failures, 2);
    let times = times.lock().unwrap().clone();
    let pauses: Vec<_> = times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
    assert!((0.5..1.1).contains(&pauses[0]) && (1.0..2.1).contains(&pauses[1]), "{pauses:?}");
    views.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_deleted_database_cancels_and_a_recreated_one_is_built_afresh() {
    let fixture = ConsumerFixture::new(1).await;
    let (views, mut reports) = fixture.views(quick()).await;
    let [old, new, third] = [1, 2, 3].map(|instance| db("a", instance));
    fixture.event(&old, EventKind::Created).await;
    let (_, decide) = reports.next_work().await;
    fixture.event(&old, EventKind::Deleted).await;
    cancelled(&decide).await;
    assert_eq!(reports.next_gone().await, old);
    assert!(reports.is_quiet().await, "nothing is built of what is gone");
    // The database is recreated while a build runs: the consumer reads only the newest row.
    fixture.event(&new, EventKind::Created).await;
    let (build, decide) = reports.next_work().await;
    assert_eq!((&build.db, build.is_fresh), (&new, true));
    let producer = fixture.other.producer();
    fixture
        .committed(3, async |tx| {
            producer.deleted(tx, &new);
            producer.created(tx, &third);
            producer.updated(tx, &third);
            Ok(())
        })
        .await;
    cancelled(&decide).await;
    let deleted = within("an end", reports.gone.recv()).await.unwrap();
    assert_eq!((deleted.db, deleted.successor), (new, Some(third.instance)), "before the next one is begun");
    let build = reports.done().await;
    assert_eq!((build.db, build.is_fresh, build.ddocs), (third, true, IndexDdocs::All));
    // The database is deleted during its debounce.
    fixture.event(&db("b", 1), EventKind::Created).await;
    fixture.event(&db("b", 1), EventKind::Deleted).await;
    assert_eq!(reports.next_gone().await, db("b", 1));
    assert!(reports.is_quiet().await);
    fixture.until_done().await;
    views.shutdown().await.unwrap();
}

/// CouchDB 4 waits a minute before it triggers a build, and loses the build if the process ends within that minute.
#[tokio::test(start_paused = true)]
async fn no_build_is_lost_by_a_crash_wherever_it_happens() {
    let fixture = ConsumerFixture::new(1).await;
    let (a, b, c) = (db("a", 1), db("b", 1), db("c", 1));
    let (views, mut reports) = fixture.views(quick()).await;
    fixture.event(&a, EventKind::Created).await;
    reports.done().await;
    fixture.until_done().await;
    // A crash during the debounce.
    fixture.event(&a, EventKind::Updated).await;
    drop((views, reports));
    let (views, mut reports) = fixture.views(quick()).await;
    assert_eq!(reports.done().await.db, a);
    fixture.until_done().await;
    // A crash while the build runs, after other builds were done and saved.
    fixture.event(&a, EventKind::Updated).await;
    let (_build, _decide) = reports.next_work().await;
    fixture.event(&b, EventKind::Created).await;
    assert_eq!(reports.done().await.db, b);
    pass(Duration::from_secs(5)).await;
    drop((views, reports));
    // An event happens while there is no member.
    fixture.event(&c, EventKind::Created).await;
    let (views, mut reports) = fixture.views(quick()).await;
    let built = BTreeSet::from([reports.done().await.db, reports.done().await.db]);
    assert_eq!(built, [a, c].into(), "a long build does not have others repeated");
    fixture.until_done().await;
    // After an orderly shutdown nothing is repeated.
    views.shutdown().await.unwrap();
    let (views, mut reports) = fixture.views(quick()).await;
    assert!(reports.is_quiet().await);
    views.shutdown().await.unwrap();
}

/// Bug: the janitor dropped tombstones while the consumer had no member for longer than tombstones are kept, so the deleted databases were
/// never reported as gone, and their indexes stayed forever. Fix: the janitor keeps the tombstones that a consumer has not passed.
#[tokio::test(start_paused = true)]
async fn the_end_of_a_database_is_reported_however_long_nobody_has_worked() {
    let fixture = ConsumerFixture::new(2).await;
    let (gone, again, stays) = (db("gone", 1), db("again", 2), db("stays", 3));
    fixture.events(&[gone.clone(), again.clone(), stays.clone()], EventKind::Created).await;
    let (views, mut reports) = fixture.views(quick()).await;
    for _ in 0..3 {
        assert!(reports.done().await.is_fresh);
    }
    fixture.until_done().await;
    views.shutdown().await.unwrap();
    fixture.events(&[gone.clone(), again.clone()], EventKind::Deleted).await;
    let _janitor = joined(&fixture.other).await.janitor(forgetful()).await.unwrap();
    pass(Duration::from_mins(10)).await;
    let back = db("again", 5);
    fixture.event(&back, EventKind::Created).await;
    let (views, mut reports) = fixture.views(quick()).await;
    let build = reports.done().await;
    assert_eq!((build.db, build.is_fresh), (back, true));
    assert!(reports.is_quiet().await);
    assert_eq!(BTreeSet::from([reports.next_gone().await, reports.next_gone().await]), [again, gone].into());
    assert!(reports.gone.try_recv().is_err());
    fixture.until_done().await;
    views.shutdown().await.unwrap();
    // The end was reported, and is not reported again.
    let (views, mut reports) = fixture.views(quick()).await;
    assert!(reports.is_quiet().await && reports.gone.try_recv().is_err());
    views.shutdown().await.unwrap();
    until("the tombstone's end", async || fixture.other.stats().tombstones_dropped > 0).await;
}

/// A row names only one replaced instance. If several have come and gone since the last build, the handler learns which instance is alive.
#[tokio::test(start_paused = true)]
async fn all_instances_but_the_living_one_are_reported_as_gone_however_many_have_come_since() {
    for lives in [true, false] {
        let fixture = ConsumerFixture::new(1).await;
        let [first, second, third] = [1, 2, 3].map(|instance| db("a", instance));
        fixture.event(&first, EventKind::Created).await;
        let (views, mut reports) = fixture.views(quick()).await;
        assert!(reports.done().await.is_fresh);
        fixture.until_done().await;
        views.shutdown().await.unwrap();
        fixture.event(&first, EventKind::Deleted).await;
        fixture.event(&second, EventKind::Created).await;
        fixture.event(&second, EventKind::Deleted).await;
        fixture.event(&third, EventKind::Created).await;
        if !lives {
            fixture.event(&third, EventKind::Deleted).await;
        }
        // The member crashes before it saves a checkpoint, and gets the news again.
        for _ in 0..2 {
            let options = quick().checkpoint_interval(NEVER);
            let (views, mut reports) = fixture.views(options).await;
            let deleted = within("an end", reports.gone.recv()).await.unwrap();
            assert_eq!(deleted.successor, lives.then_some(third.instance));
            assert_eq!(deleted.db, if lives { second.clone() } else { third.clone() });
            if lives {
                let build = reports.done().await;
                assert_eq!((&build.db, build.is_fresh), (&third, true));
            }
            assert!(reports.is_quiet().await);
            drop(views);
        }
    }
}

/// Builds all databases, except that those named `bad…` fail, and those named `hung…` hang, until `is_mended` is set.
#[derive(Clone, Default)]
struct Fussy {
    built: Arc<Mutex<BTreeSet<Db>>>,
    gone: Arc<Mutex<BTreeSet<Db>>>,
    tries: Arc<AtomicUsize>,
    is_mended: Arc<AtomicBool>,
}

impl Fussy {
    fn has_built(&self, db: &Db) -> bool {
        self.built.lock().unwrap().contains(db)
    }

    fn is_mended(&self) -> bool {
        self.is_mended.load(Ordering::SeqCst)
    }
}

impl DbHandler<IndexBuild> for Fussy {
    async fn handle(&self, build: IndexBuild) -> HandlerResult {
        self.tries.fetch_add(1, Ordering::SeqCst);
        let name = build.db.name.as_str();
        if name.starts_with("hung") && !self.is_mended() {
            std::future::pending::<()>().await;
        }
        if name.starts_with("bad") && !self.is_mended() {
            return Err("no disk".into());
        }
        self.built.lock().unwrap().insert(build.db);
        Ok(())
    }

    async fn deleted(&self, deleted: DeletedDb) -> HandlerResult {
        if deleted.db.name.as_str().starts_with("stubborn") && !self.is_mended() {
            return Err("no access".into());
        }
        self.gone.lock().unwrap().insert(deleted.db);
        Ok(())
    }
}

/// Bug: databases that always fail filled the room for waiting work, so a healthy one was not built within a day. Fix: they have keys.
#[tokio::test(start_paused = true)]
async fn databases_that_fail_forever_keep_no_others_from_being_built() {
    let fixture = ConsumerFixture::new(1).await;
    let fussy = Fussy::default();
    let bad: Vec<_> = (0..10).map(|n| db(&format!("bad{n}"), 1)).collect();
    fixture.events(&bad, EventKind::Created).await;
    let options = quick().in_hand_max(10);
    let views = fixture.member_of_all(options.clone()).await.run(index(fussy.clone())).await.unwrap();
    let deferred = async || fixture.handle().deferred(None, 100).await.unwrap();
    until("the failures", async || deferred().await.len() == 10).await;
    let good = db("good", 1);
    fixture.event(&good, EventKind::Created).await;
    fixture.event(&bad[0], EventKind::Deleted).await;
    pass(Duration::from_secs(10)).await;
    assert!(fussy.has_built(&good));
    assert_eq!(*fussy.gone.lock().unwrap(), [bad[0].clone()].into());
    until("nothing is left of what is gone", async || deferred().await.len() == 9).await;
    // The failing databases do not hold the checkpoint back either.
    views.shutdown().await.unwrap();
    fussy.built.lock().unwrap().clear();
    let views = fixture.member_of_all(options).await.run(index(fussy.clone())).await.unwrap();
    fussy.is_mended.store(true, Ordering::SeqCst);
    fixture.until_done().await;
    assert_eq!(*fussy.built.lock().unwrap(), bad[1..].iter().cloned().collect());
    views.shutdown().await.unwrap();
}

/// Bug: builds that hung were never abandoned, so four of them silently blocked all others. Fix: builds without progress are cancelled and
/// deferred.
#[tokio::test(start_paused = true)]
async fn builds_that_hang_are_cancelled_and_leave_half_of_the_places_to_others() {
    let fixture = ConsumerFixture::new(1).await;
    let fussy = Fussy::default();
    let views = fixture.member_of_all(quick()).await.run(index(fussy.clone())).await.unwrap();
    let hung: Vec<_> = (0..4).map(|n| db(&format!("hung{n}"), 1)).collect();
    fixture.events(&hung, EventKind::Created).await;
    pass(Duration::from_secs(5)).await;
    let good = db("good", 1);
    fixture.event(&good, EventKind::Created).await;
    pass(Duration::from_mins(11)).await;
    assert!(fussy.has_built(&good));
    for round in 0..10 {
        pass(Duration::from_mins(5)).await;
        let good = db(&format!("good{round}"), 1);
        fixture.event(&good, EventKind::Created).await;
        pass(Duration::from_secs(2)).await;
        assert!(fussy.has_built(&good), "round {round}");
    }
    let deferred = fixture.handle().deferred(None, 10).await.unwrap();
    assert!(deferred.len() == 4 && deferred[0].error.contains("no progress"), "{deferred:?}");
    views.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_build_that_shows_progress_may_take_as_long_as_it_takes() {
    let fixture = ConsumerFixture::new(1).await;
    let build = |build: IndexBuild| async move {
        for _ in 0..20 {
            pass(Duration::from_mins(9)).await;
            build.work.progress();
        }
        Ok(())
    };
    let views = fixture.member_of_all(quick()).await.run(index(build)).await.unwrap();
    fixture.event(&db("a", 1), EventKind::Created).await;
    pass(Duration::from_hours(4)).await;
    let stats = fixture.bus.stats();
    assert_eq!((stats.consumer_rows, stats.consumer_failures), (1, 0));
    views.shutdown().await.unwrap();
}

/// A clean-up that fails is deferred and repeated before any work for the successor begins.
#[tokio::test(start_paused = true)]
async fn a_clean_up_that_fails_is_made_good_before_the_successor_is_built() {
    for is_back in [false, true] {
        let fixture = ConsumerFixture::new(1).await;
        let fussy = Fussy::default();
        let options = quick().attempts_max(2).backoff_max(Duration::from_secs(1));
        let views = fixture.member_of_all(options).await.run(index(fussy.clone())).await.unwrap();
        let (old, new) = (db("stubborn", 1), db("stubborn", 2));
        fixture.event(&old, EventKind::Created).await;
        until("the build", async || fussy.has_built(&old)).await;
        fixture.until_done().await;
        fixture.event(&old, EventKind::Deleted).await;
        if is_back {
            fixture.event(&new, EventKind::Created).await;
        }
        let deferred = async || fixture.handle().deferred(None, 1).await.unwrap();
        until("the failures", async || deferred().await.iter().any(|id| id.error == "no access")).await;
        pass(Duration::from_mins(1)).await;
        assert!(!fussy.has_built(&new));
        fussy.is_mended.store(true, Ordering::SeqCst);
        fixture.until_done().await;
        assert!(fussy.gone.lock().unwrap().contains(&old));
        assert_eq!(fussy.has_built(&new), is_back);
        views.shutdown().await.unwrap();
    }
}

/// Bug: a deferred database that was waiting in memory for its turn stayed there when it was deleted and cleaned up, so it was built
/// afterwards. Fix: a tombstone that passes a deferred id removes the id from memory.
#[tokio::test(start_paused = true)]
async fn a_deferred_database_that_is_deleted_before_its_turn_is_not_built() {
    let fixture = ConsumerFixture::new(1).await;
    let options = quick().attempts_max(1).max_concurrency(2).backoff_min(Duration::from_mins(1));
    let (views, mut reports) = fixture.views(options).await;
    let (first, second) = (db("a", 1), db("b", 1));
    for db in [&first, &second] {
        fixture.event(db, EventKind::Created).await;
        reports.fails().await;
    }
    let deferred = async || fixture.handle().deferred(None, 9).await.unwrap();
    until("both to be deferred", async || deferred().await.len() == 2).await;
    assert_eq!(fixture.handle().again("*", true).await.unwrap(), 2);
    let (build, decide) = reports.next_work().await;
    assert_eq!(build.db, first, "of two places one is for deferred databases");
    fixture.event(&second, EventKind::Deleted).await;
    decide.send(Ok(())).unwrap();
    assert_eq!(reports.next_gone().await, second);
    assert!(reports.is_quiet().await, "a database is built that is gone");
    fixture.until_done().await;
    views.shutdown().await.unwrap();
}

/// Builds an index of one key.
struct OneKey(Store);

impl DbHandler<IndexBuild> for OneKey {
    async fn handle(&self, build: IndexBuild) -> HandlerResult {
        let write = async |tx: Transaction| {
            build.verify(&tx).await?;
            tx.set(b"index/a", b"");
            Ok(())
        };
        Ok(self.0.run(write).await?)
    }

    async fn deleted(&self, deleted: DeletedDb) -> HandlerResult {
        let clear = async |tx: Transaction| {
            deleted.verify(&tx).await?;
            tx.clear(b"index/a");
            Ok(())
        };
        Ok(self.0.run(clear).await?)
    }
}

/// A commit can outlive the task that began it. Bug: nothing stopped the commit of a failed build from arriving after `deleted` had cleared
/// the index, so its writes stayed forever. Fix: the end of the run writes what [`Run::verify`](notibus::consumer::Run::verify) reads.
#[tokio::test(start_paused = true)]
async fn a_commit_that_is_on_its_way_when_its_build_has_failed_does_not_happen() {
    let fixture = ConsumerFixture::new(1).await;
    let handler = OneKey(fixture.faults.store());
    let options = quick().backoff_min(Duration::from_mins(1));
    let views = fixture.member_of_all(options).await.run(index(handler)).await.unwrap();
    let mut is_first = true;
    fixture.faults.plan_commits(move |attempt| {
        let is_index = |operation: &Operation| {
            matches!(operation, Operation::Set { key, .. } if key.starts_with(b"index/"))
        };
        let is_late = attempt.operations.iter().any(is_index) && std::mem::take(&mut is_first);
        is_late.then_some(CommitFault::Late(StoreError::IO_ERROR))
    });
    let a = db("a", 1);
    fixture.event(&a, EventKind::Created).await;
    until("the build", async || fixture.bus.stats().consumer_failures == 1).await;
    fixture.event(&a, EventKind::Deleted).await;
    fixture.until_done().await;
    let results = fixture.faults.commit_late().await;
    assert!(results.len() == 1 && results[0].is_err(), "it conflicts with the end of the build");
    assert!(stored(&fixture.store, b"index/").await.is_empty(), "the index of a deleted database");
    views.shutdown().await.unwrap();
}

/// The transactions of a build that has ended are refused, too.
#[tokio::test(start_paused = true)]
async fn a_build_that_was_done_again_or_whose_database_is_gone_can_write_nothing() {
    let fixture = ConsumerFixture::new(1).await;
    let (views, mut reports) = fixture.views(quick()).await;
    let a = db("a", 1);
    let verified = async |build: &IndexBuild| {
        let verified = fixture.store.run(async |tx| build.verify(&tx).await).await;
        assert!(matches!(verified, Ok(()) | Err(Error::Cancelled { .. })), "{verified:?}");
        verified.is_ok()
    };
    fixture.event(&a, EventKind::Created).await;
    let (first, decide) = reports.next_work().await;
    assert!(verified(&first).await);
    decide.send(Err("once more".into())).unwrap();
    let (second, _undecided) = reports.next_work().await;
    assert!(!verified(&first).await && verified(&second).await);
    fixture.event(&a, EventKind::Deleted).await;
    assert_eq!(reports.next_gone().await, a);
    assert!(!verified(&second).await);
    views.shutdown().await.unwrap();
}

/// How long a slow build takes.
const BUILD: Duration = Duration::from_secs(10);

/// Bug: a tenant with many databases took all places, so a later tenant waited for all of these databases. Fix: tenants take turns.
#[tokio::test(start_paused = true)]
async fn a_tenant_with_much_to_do_keeps_nobody_waiting() {
    let fixture = ConsumerFixture::new(1).await;
    let ended = Arc::new(Mutex::new(BTreeSet::new()));
    let done = Arc::clone(&ended);
    let build = move |build: IndexBuild| {
        let done = Arc::clone(&done);
        async move {
            pass(BUILD).await;
            done.lock().unwrap().insert(build.db);
            Ok(())
        }
    };
    let tenant = |id: &[u8]| id.split(|byte| *byte == b'/').next().unwrap_or_default().to_vec().into();
    let member = fixture.member_of_all(quick().max_concurrency(2)).await.tenants(2, tenant);
    let views = member.run(index(build)).await.unwrap();
    let mut many: Vec<_> = (0..200).map(|n| db(&format!("many/{n}"), 1)).collect();
    fixture.events(&many, EventKind::Created).await;
    pass(BUILD * 3).await;
    let (few, began) = (db("few/1", 1), tokio::time::Instant::now());
    fixture.event(&few, EventKind::Created).await;
    until("the build of the one", async || ended.lock().unwrap().contains(&few)).await;
    assert!(began.elapsed() <= BUILD * 3, "{:?}", began.elapsed());
    assert!(ended.lock().unwrap().len() < 20);
    // Some waiting databases are deleted, and some of these are created again.
    let gone: Vec<_> = many.drain(150..).collect();
    fixture.events(&gone, EventKind::Deleted).await;
    let again: Vec<_> = (150..160).map(|n| db(&format!("many/{n}"), 2)).collect();
    fixture.events(&again, EventKind::Created).await;
    many.extend(again);
    pass(BUILD * 120).await;
    let ended = ended.lock().unwrap().clone();
    assert_eq!(ended, many.into_iter().chain([few]).collect());
    views.shutdown().await.unwrap();
}

/// Counts how many values of this type are alive.
struct Alive(Arc<AtomicUsize>);

impl Alive {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(count))
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Builds indexes with a parallel job, whose tasks keep their threads busy and never end.
#[derive(Clone)]
struct Busy {
    bus: Bus,
    /// The number of builds, and of tasks in their jobs, that are alive.
    alive: Arc<AtomicUsize>,
    /// Receives the value of `alive` when a database is reported as deleted.
    at_ends: UnboundedSender<usize>,
}

impl DbHandler<IndexBuild> for Busy {
    async fn handle(&self, build: IndexBuild) -> HandlerResult {
        let (_alive, tasks) = (Alive::new(&self.alive), Arc::clone(&self.alive));
        let job = ParallelJob::new(self.bus.changes().feed(&build.db), Cursor::BEGINNING).with_work(&build);
        let work = move |batch: ParallelBatch<Change>| {
            let alive = Alive::new(&tasks);
            async move {
                let (_alive, _batch) = (alive, batch);
                loop {
                    // A task is in the middle of a poll most of the time.
                    std::thread::sleep(Duration::from_millis(3));
                    tokio::task::yield_now().await;
                }
            }
        };
        job.run(work).await?;
        Ok(())
    }

    async fn deleted(&self, _: DeletedDb) -> HandlerResult {
        Ok(self.at_ends.send(self.alive.load(Ordering::SeqCst))?)
    }
}

/// On real threads, a database is deleted while the tasks of its build are being polled. All tasks must have ended before the handler
/// learns of the deletion, although only the work that was passed to the handler waits for them.
#[tokio::test(flavor = "multi_thread", worker_threads = 6)]
async fn all_tasks_of_a_build_have_ended_before_the_end_is_reported() {
    let fixture = ConsumerFixture::new(1).await;
    let (alive, (at_ends, mut ends)) = (Arc::default(), unbounded_channel());
    let busy = Busy { bus: fixture.bus.clone(), alive: Arc::clone(&alive), at_ends };
    let options = ConsumerOptions::index().debounce(Duration::ZERO);
    let views = fixture.member_of_all(options).await.run(index(busy)).await.unwrap();
    for instance in 1..=10 {
        let a = db("a", instance);
        fixture.create_with_docs(&a, 4, 40).await;
        until("the tasks", async || alive.load(Ordering::SeqCst) == 5).await;
        fixture.delete_with_feed(&a).await;
        assert_eq!(within("the end", ends.recv()).await, Some(0), "instance {instance}");
    }
    views.shutdown().await.unwrap();
}
