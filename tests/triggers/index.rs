//! The index trigger, and properties of all triggers.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use notibus::{
    DispatcherOptions, Error, EventKind, Filter,
    event::DdocId,
    jobs::{IndexBuild, IndexDdocs, index_trigger},
};

use crate::{
    common::{db, record, until, within},
    fixture::{TriggerFixture, at_rest, job, quick},
};

#[tokio::test]
async fn options_out_of_their_limits_are_typed_errors() {
    let fixture = TriggerFixture::new().await;
    let created = Filter::all().kinds(EventKind::Created.into()).unwrap();
    for bad in [
        quick().name(String::new()),
        quick().jobs_max(0),
        quick().pending_max(0),
        quick().attempts_max(0),
        quick().stall_limit(Duration::ZERO),
        quick().jobs_max(usize::MAX),
        quick().pending_max(usize::MAX),
        quick().checkpoint_interval(Duration::ZERO),
        quick().backoff_min(Duration::from_hours(1)),
        quick().filter(created.clone()),
        quick().filter(Filter::any([created]).unwrap()),
        // Regression: a trigger with another predicate went on, and never ran for what only the new one wanted.
        quick().filter(Filter::predicate(|row| row.name.as_str() == "a")),
    ] {
        let refused = index_trigger(&fixture.dispatcher, bad.clone(), job::<IndexBuild>().0).await;
        assert!(matches!(refused, Err(Error::Invalid { .. })), "{bad:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn builds_are_debounced_deduplicated_and_name_their_design_documents() {
    let fixture = TriggerFixture::new().await;
    let (trigger, mut reports) = fixture.index_trigger(quick()).await;
    let a = db("a", 1);
    fixture.event(&a, EventKind::Created).await;
    for _ in 0..10 {
        fixture.event(&a, EventKind::Updated).await;
    }
    let build = reports.done().await;
    assert_eq!((&build.db, build.is_fresh, build.attempt), (&a, true, 1));
    assert_eq!(build.ddocs, IndexDdocs::All);
    assert!(reports.is_quiet().await, "ten updates, one build");
    fixture.ddoc(&a, Some("_design/x")).await;
    fixture.ddoc(&a, Some("_design/y")).await;
    let build = reports.done().await;
    let ids: BTreeSet<DdocId> = ["_design/x", "_design/y"].map(|id| id.parse().unwrap()).into();
    assert_eq!((build.ddocs, build.is_fresh), (IndexDdocs::Only(ids), false));
    fixture.ddoc(&a, Some("_design/x")).await;
    fixture.event(&a, EventKind::Updated).await;
    assert_eq!(reports.done().await.ddocs, IndexDdocs::All, "documents have changed, too");
    fixture.ddoc(&a, None).await;
    assert_eq!(reports.done().await.ddocs, IndexDdocs::All, "it may be any");
    at_rest(&fixture, &trigger).await;
    assert_eq!((trigger.status().done, trigger.status().failed), (4, 0));
    trigger.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn no_more_builds_run_at_once_than_may_and_one_per_database() {
    let fixture = TriggerFixture::new().await;
    for n in 0..10 {
        fixture.event(&db(&format!("db{n}"), 1), EventKind::Created).await;
    }
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let names = Arc::new(Mutex::new(BTreeMap::new()));
    let (count, peak, known) = (Arc::clone(&running), Arc::clone(&most), Arc::clone(&names));
    let build = move |build: IndexBuild| {
        let (count, peak, known) = (Arc::clone(&count), Arc::clone(&peak), Arc::clone(&known));
        async move {
            let name = build.db.name.clone();
            assert!(known.lock().unwrap().insert(name.clone(), true) != Some(true), "one per database");
            peak.fetch_max(count.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_secs(3)).await;
            count.fetch_sub(1, Ordering::SeqCst);
            known.lock().unwrap().insert(name, false);
            Ok(())
        }
    };
    // Even with room for fewer waiting databases than there are.
    let options = quick().jobs_max(3).pending_max(4);
    let trigger = index_trigger(&fixture.dispatcher, options, build).await.unwrap();
    tokio::time::sleep(Duration::from_secs(4)).await;
    for n in 0..10 {
        fixture.event(&db(&format!("db{n}"), 1), EventKind::Updated).await;
    }
    at_rest(&fixture, &trigger).await;
    assert_eq!(most.load(Ordering::SeqCst), 3);
    assert_eq!(names.lock().unwrap().len(), 10);
    assert_eq!(trigger.status().failed, 0);
}

#[tokio::test(start_paused = true)]
async fn a_build_that_fails_or_panics_is_tried_again_with_pauses() {
    let fixture = TriggerFixture::new().await;
    let times = Arc::new(Mutex::new(Vec::new()));
    let tried = Arc::clone(&times);
    let build = move |build: IndexBuild| {
        tried.lock().unwrap().push(tokio::time::Instant::now());
        async move {
            match build.attempt {
                1 => Err("no disk".into()),
                2 => panic!("it breaks"),
                _ => Ok(()),
            }
        }
    };
    let trigger = index_trigger(&fixture.dispatcher, quick(), build).await.unwrap();
    fixture.event(&db("a", 1), EventKind::Created).await;
    assert!(within("the build", trigger.wait_for(|status| status.done == 1)).await);
    assert_eq!(trigger.status().failed, 2);
    let times = times.lock().unwrap().clone();
    let pauses: Vec<_> = times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
    assert!((0.5..1.1).contains(&pauses[0]) && (1.0..2.1).contains(&pauses[1]), "{pauses:?}");
}

#[tokio::test(start_paused = true)]
async fn a_deleted_database_cancels_and_a_recreated_one_is_built_afresh() {
    let fixture = TriggerFixture::new().await;
    let (trigger, mut reports) = fixture.index_trigger(quick()).await;
    let (old, new) = (db("a", 1), db("a", 2));
    fixture.event(&old, EventKind::Created).await;
    let (_, decide) = reports.next_work().await;
    fixture.event(&old, EventKind::Deleted).await;
    within("the cancelling", async {
        while !decide.is_closed() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(within("the end", reports.gone.recv()).await.unwrap(), old);
    assert!(reports.is_quiet().await, "nothing is built of what is gone");
    assert_eq!((trigger.status().cancelled, trigger.status().done), (1, 1));
    // Recreated while a build runs: the trigger reads only the newest row.
    fixture.event(&new, EventKind::Created).await;
    let (build, decide) = reports.next_work().await;
    assert_eq!((&build.db, build.is_fresh), (&new, true));
    let third = db("a", 3);
    let before = fixture.bus.stats().folded.total();
    record(&fixture.store, &fixture.bus, &new, [0, 1, 0, 0]).await;
    record(&fixture.store, &fixture.bus, &third, [1, 0, 1, 0]).await;
    fixture.settled(before + 2).await;
    within("the cancelling", async {
        while !decide.is_closed() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(within("the end", reports.gone.recv()).await.unwrap(), new, "before the next one is begun");
    let build = reports.done().await;
    assert_eq!((build.db, build.is_fresh, build.ddocs), (third, true, IndexDdocs::All));
    // Deleted during its debounce.
    fixture.event(&db("b", 1), EventKind::Created).await;
    fixture.event(&db("b", 1), EventKind::Deleted).await;
    assert_eq!(within("the end", reports.gone.recv()).await.unwrap(), db("b", 1));
    assert!(reports.is_quiet().await);
}

/// CouchDB 4 waits for a minute before it triggers a build, and loses it if the process ends within.
#[tokio::test(start_paused = true)]
async fn no_build_is_lost_by_a_crash_wherever_it_happens() {
    let fixture = TriggerFixture::new().await;
    let (a, b) = (db("a", 1), db("b", 1));
    let (trigger, mut reports) = fixture.index_trigger(quick()).await;
    fixture.event(&a, EventKind::Created).await;
    reports.done().await;
    at_rest(&fixture, &trigger).await;
    // Within the debounce.
    fixture.event(&a, EventKind::Updated).await;
    drop((trigger, reports));
    let (trigger, mut reports) = fixture.index_trigger(quick()).await;
    assert_eq!(reports.done().await.db, a);
    at_rest(&fixture, &trigger).await;
    // While it runs, after others were done and that was saved.
    fixture.event(&a, EventKind::Updated).await;
    let (_build, _decide) = reports.next_work().await;
    fixture.event(&b, EventKind::Created).await;
    assert_eq!(reports.done().await.db, b);
    tokio::time::sleep(Duration::from_secs(5)).await;
    drop((trigger, reports));
    // And events while there is no trigger.
    fixture.event(&db("c", 1), EventKind::Created).await;
    let (trigger, mut reports) = fixture.index_trigger(quick()).await;
    let mut built = BTreeSet::new();
    while built.len() < 2 || !built.contains("c") {
        built.insert(reports.done().await.db.name.to_string());
    }
    assert!(built.contains("a"), "{built:?}");
    while !reports.is_quiet().await {}
    at_rest(&fixture, &trigger).await;
    // After an orderly end nothing comes again.
    trigger.shutdown().await.unwrap();
    let (_trigger, mut reports) = fixture.index_trigger(quick()).await;
    assert!(reports.is_quiet().await);
}

#[tokio::test(start_paused = true)]
async fn databases_that_are_not_wanted_move_the_cursor_on() {
    let fixture = TriggerFixture::new().await;
    let options = quick().filter(Filter::suffix("/quiet"));
    let trigger = index_trigger(&fixture.dispatcher, options, job::<IndexBuild>().0).await.unwrap();
    fixture.event(&db("loud", 1), EventKind::Created).await;
    at_rest(&fixture, &trigger).await;
    assert_eq!(trigger.status().done, 0);
}

#[tokio::test(start_paused = true)]
async fn a_trigger_that_is_started_elsewhere_takes_over() {
    let fixture = TriggerFixture::new().await;
    let (old, mut first) = fixture.index_trigger(quick()).await;
    fixture.event(&db("a", 1), EventKind::Created).await;
    let (_build, decide) = first.next_work().await;
    let other = fixture.bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let (reporting, mut second) = job::<IndexBuild>();
    let _new = index_trigger(&other, quick(), reporting).await.unwrap();
    assert_eq!(second.done().await.db, db("a", 1), "what was not done");
    fixture.event(&db("b", 1), EventKind::Created).await;
    assert_eq!(second.done().await.db, db("b", 1));
    until("the end of the old one", async || old.status().is_finished).await;
    assert!(decide.is_closed(), "its jobs are stopped");
    assert!(matches!(old.shutdown().await, Err(Error::CursorLost { .. })));
}

/// Regression: if a quiet database changed, the cursor of a trigger of exact names went back to its last change.
#[tokio::test(start_paused = true)]
async fn the_cursor_of_a_trigger_never_goes_back() {
    let fixture = TriggerFixture::new().await;
    let (quiet, busy) = (db("quiet", 1), db("busy", 1));
    fixture.event(&quiet, EventKind::Created).await;
    fixture.event(&busy, EventKind::Created).await;
    let filter = Filter::names([quiet.name.clone(), busy.name.clone()]).unwrap();
    let options = quick().filter(filter);
    let (trigger, mut reports) = fixture.index_trigger(options).await;
    reports.done().await;
    reports.done().await;
    fixture.event(&busy, EventKind::Updated).await;
    reports.done().await;
    at_rest(&fixture, &trigger).await;
    let position = trigger.status().position;
    fixture.event(&quiet, EventKind::Updated).await;
    let (_, _undecided) = reports.next_work().await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(trigger.status().position >= position, "{:?} < {position:?}", trigger.status().position);
    trigger.shutdown().await.unwrap();
}

/// Regression: a trigger at its limit of waiting work never read that the databases in question were gone, and stood still.
#[tokio::test(start_paused = true)]
async fn builds_of_databases_that_are_gone_do_not_stop_a_trigger_that_is_full() {
    let fixture = TriggerFixture::new().await;
    let (gone, other) = (db("gone", 1), db("other", 1));
    let options = quick().pending_max(1);
    let (trigger, mut reports) = fixture.index_trigger(options).await;
    fixture.event(&gone, EventKind::Created).await;
    let (_, decide) = reports.next_work().await;
    fixture.event(&gone, EventKind::Deleted).await;
    fixture.event(&other, EventKind::Created).await;
    decide.send(Err("no such database".into())).unwrap();
    loop {
        let (build, decide) = reports.next_work().await;
        if build.db == other {
            break;
        }
        decide.send(Err("no such database".into())).unwrap();
    }
    trigger.shutdown().await.unwrap();
}

/// Regression: a change of a design document whose id was not recorded was lost among those with an id that were folded with it, and
/// its index was not built.
#[tokio::test(start_paused = true)]
async fn a_design_document_without_an_id_has_all_indexes_built_whatever_it_was_folded_with() {
    let fixture = TriggerFixture::new().await;
    let (trigger, mut reports) = fixture.index_trigger(quick()).await;
    let a = db("a", 1);
    fixture.event(&a, EventKind::Created).await;
    reports.done().await;
    let before = fixture.bus.stats().folded.total();
    let (producer, x) = (fixture.bus.producer(), "_design/x".parse::<DdocId>().unwrap());
    let write = async |tx| {
        producer.ddoc_updated(&tx, &a, Some(&x));
        producer.ddoc_updated(&tx, &a, None);
        Ok(())
    };
    fixture.store.run(write).await.unwrap();
    fixture.settled(before).await;
    assert_eq!(reports.done().await.ddocs, IndexDdocs::All);
    fixture.ddoc(&a, Some("_design/x")).await;
    assert_eq!(reports.done().await.ddocs, IndexDdocs::Only([x].into()), "it was delivered once");
    at_rest(&fixture, &trigger).await;
    trigger.shutdown().await.unwrap();
}

/// A trigger that has lost its cursor ends at its next build of a new database, and does not wait for the next checkpoint.
#[tokio::test(start_paused = true)]
async fn a_trigger_that_was_taken_over_builds_no_new_database() {
    let fixture = TriggerFixture::new().await;
    let options = quick().checkpoint_interval(Duration::from_hours(1));
    let (old, mut first) = fixture.index_trigger(options).await;
    fixture.event(&db("a", 1), EventKind::Created).await;
    first.done().await;
    let options = quick().filter(Filter::name("a").unwrap());
    let (_new, mut second) = fixture.index_trigger(options).await;
    assert_eq!(second.done().await.db, db("a", 1));
    fixture.event(&db("b", 1), EventKind::Created).await;
    until("the end of the old one", async || old.status().is_finished).await;
    assert!(first.works.recv().await.is_none(), "it was given nothing more");
}

/// Regression: databases that the old filter had left out were never built, without any message.
#[tokio::test(start_paused = true)]
async fn a_trigger_that_is_restarted_with_another_filter_builds_what_the_old_one_left_out() {
    let fixture = TriggerFixture::new().await;
    let (wanted, left_out) = (db("a", 1), db("b", 1));
    fixture.event(&wanted, EventKind::Created).await;
    fixture.event(&left_out, EventKind::Created).await;
    let narrow = quick().filter(Filter::name("a").unwrap());
    let (trigger, mut reports) = fixture.index_trigger(narrow).await;
    assert_eq!(reports.done().await.db, wanted);
    at_rest(&fixture, &trigger).await;
    trigger.shutdown().await.unwrap();
    let (trigger, mut reports) = fixture.index_trigger(quick()).await;
    let built = BTreeSet::from([reports.done().await.db, reports.done().await.db]);
    assert!(built.contains(&left_out));
    at_rest(&fixture, &trigger).await;
    trigger.shutdown().await.unwrap();
    // With the same filter nothing comes again.
    let (trigger, mut reports) = fixture.index_trigger(quick()).await;
    assert!(reports.is_quiet().await);
    trigger.shutdown().await.unwrap();
}
