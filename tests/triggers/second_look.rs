//! What a second look at triggers has found: moments in which what is kept in memory and what is stored could differ.

use notibus::{
    EventKind,
    jobs::{IndexBuild, TriggerOptions, index_trigger},
    store::testing::{Attempt, CommitFault, Gate, Operation},
};

use crate::{
    common::{db, until, within},
    fixture::{TriggerFixture, at_rest, job, quick},
    marks::faulty,
};

/// What the key of a name that is owed something begins with, by the trigger `views`.
const OWED: &[u8] = b"notibus\x15\x10\x01\x00\x02views\x00\x15\x04";

/// A parked database waited for its turn in memory. Meanwhile it was deleted, and its clean-up done. Then its turn came, and it was
/// built: its index stayed for ever, since nobody was to be informed again that it is gone.
#[tokio::test(start_paused = true)]
async fn a_parked_database_that_is_deleted_before_its_turn_is_not_built() {
    let world = TriggerFixture::new().await;
    let (told, mut reports) = job::<IndexBuild>();
    let options = TriggerOptions { attempts_max: 1, jobs_max: 2, ..quick() };
    let trigger = index_trigger(&world.dispatcher, options, told).await.unwrap();
    let (first, second) = (db("a", 1), db("b", 1));
    for db in [&first, &second] {
        world.event(db, EventKind::Created).await;
        let (_, decide) = reports.next_work().await;
        decide.send(Err("no disk".into())).unwrap();
    }
    until("both to be parked", async || trigger.status().parked == 2).await;
    world.bus.trigger("views").unwrap().retry(None).await.unwrap();
    let (build, decide) = reports.next_work().await;
    assert_eq!(build.db, first, "of two places one is for parked databases");
    world.event(&second, EventKind::Deleted).await;
    assert_eq!(within("the news", reports.gone.recv()).await.unwrap(), second);
    decide.send(Ok(())).unwrap();
    assert!(reports.is_quiet().await, "a database is built that is gone");
    assert!(world.bus.trigger("views").unwrap().parked(None, 9).await.unwrap().is_empty());
    trigger.shutdown().await.unwrap();
}

/// A trigger was asked to end while it saved: the save was dropped, but what it was to note as owed counted as noted. So the last save
/// moved the cursor past it, and it was never done.
#[tokio::test(start_paused = true)]
async fn a_save_that_is_dropped_by_the_end_of_a_trigger_has_noted_nothing() {
    let (world, faults) = faulty().await;
    let (told, mut reports) = job::<IndexBuild>();
    let trigger = index_trigger(&world.dispatcher, quick(), told).await.unwrap();
    let slow = db("slow", 1);
    world.event(&slow, EventKind::Created).await;
    let (_, _undecided) = reports.next_work().await;
    let gate = Gate::default();
    let mut held = Some(CommitFault::Hold(gate.clone()));
    let is_owed = |op: &Operation| matches!(op, Operation::Set { key, .. } if key.starts_with(OWED));
    faults.plan_commits(
        move |attempt: &Attempt| {
            if attempt.mutations().any(is_owed) { held.take() } else { None }
        },
    );
    within("the save", gate.reached()).await;
    world.event(&db("other", 1), EventKind::Created).await;
    trigger.shutdown().await.unwrap();
    drop(reports);

    let (told, mut reports) = job::<IndexBuild>();
    let trigger = index_trigger(&world.dispatcher, quick(), told).await.unwrap();
    let built = [reports.done().await.db, reports.done().await.db];
    assert!(built.contains(&slow), "{built:?}");
    at_rest(&world, &trigger).await;
    trigger.shutdown().await.unwrap();
}
