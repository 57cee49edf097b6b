//! Mirrors and freshness barriers: a cache that reads its own writes, and recovers after its dispatcher was suspended for too long.

use std::time::Duration;

use notibus::{DispatcherOptions, Error, EventKind, Filter, NotifierOptions, store::Store};

use crate::{
    common::{db, forgetful, joined, narrow_bus, until, within},
    fixture::{SubscriberFixture, commit},
};

/// Returns the names of the databases that a mirror shows.
fn names(mirror: &notibus::dispatcher::Mirror) -> Vec<String> {
    mirror.view().unwrap().keys().map(ToString::to_string).collect()
}

#[tokio::test(start_paused = true)]
async fn a_mirror_has_what_lives_and_reads_its_own_writes() {
    let fixture = SubscriberFixture::new().await;
    fixture.events(&["a", "b", "x"], EventKind::Created).await;
    let mirror =
        fixture.dispatcher.mirror(Filter::any([Filter::prefix("a"), Filter::prefix("b")]).unwrap()).unwrap();
    within("its first scan", mirror.caught_up()).await.unwrap();
    assert_eq!(names(&mirror), ["a", "b"]);
    let before = mirror.view().unwrap();
    for round in 1..=10 {
        let version = commit(&fixture.bus, &db("a", 1), EventKind::Updated).await;
        within("the barrier", mirror.wait_until(version)).await.unwrap();
        assert_eq!(mirror.get(&"a".parse().unwrap()).unwrap().unwrap().totals.updated, round);
    }
    let version = commit(&fixture.bus, &db("a", 1), EventKind::Deleted).await;
    within("the barrier", mirror.wait_until(version)).await.unwrap();
    assert_eq!(names(&mirror), ["b"]);
    assert_eq!(before.len(), 2, "a view does not change");
    // The mirror does not show this event, but the barrier completes.
    let version = commit(&fixture.bus, &db("x", 1), EventKind::Updated).await;
    within("the barrier", mirror.wait_until(version)).await.unwrap();
}

/// The barrier waits for unfolded events, in any partition, and for nothing else.
#[tokio::test(start_paused = true)]
async fn a_barrier_waits_for_what_is_not_folded() {
    let store = Store::memory();
    let bus = narrow_bus(&store).await;
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let mirror = dispatcher.mirror(Filter::all()).unwrap();
    mirror.caught_up().await.unwrap();
    let version = commit(&bus, &db("a", 1), EventKind::Created).await;
    let waits = tokio::time::timeout(Duration::from_mins(5), mirror.wait_until(version)).await;
    assert!(waits.is_err(), "nobody folds");
    let _notifier = joined(&bus).await.notifier(NotifierOptions::default()).await.unwrap();
    within("the barrier", mirror.wait_until(version)).await.unwrap();
    assert_eq!(names(&mirror), ["a"]);
    // A database that keeps changing does not block the barrier.
    let hot = async {
        loop {
            commit(&bus, &db("hot", 1), EventKind::Updated).await;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let barrier = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let version = commit(&bus, &db("b", 1), EventKind::Created).await;
        within("the barrier", mirror.wait_until(version)).await.unwrap();
    };
    tokio::select! {
        () = hot => unreachable!("it goes on forever"),
        () = barrier => {}
    }
    assert!(names(&mirror).contains(&"b".to_owned()));
    let ahead = mirror.wait_until(u64::MAX).await;
    assert!(matches!(ahead, Err(Error::Invalid { what: "version", .. })), "{ahead:?}");
}

/// Events of a replaced instance are in no row, so the barrier does not wait for one.
#[tokio::test(start_paused = true)]
async fn a_barrier_does_not_wait_for_rows_of_instances_that_are_gone() {
    let fixture = SubscriberFixture::new().await;
    fixture.event(&db("a", 1), EventKind::Created).await;
    commit(&fixture.bus, &db("a", 1), EventKind::Deleted).await;
    commit(&fixture.bus, &db("a", 2), EventKind::Created).await;
    let version = commit(&fixture.bus, &db("a", 1), EventKind::Updated).await;
    within("the barrier", fixture.dispatcher.wait_until(version)).await.unwrap();
}

/// A mirror whose dispatcher was suspended for too long keeps its old content until its second scan is complete.
#[tokio::test(start_paused = true)]
async fn a_mirror_that_expires_is_filled_again() {
    let fixture = SubscriberFixture::new().await;
    fixture.events(&["a", "b"], EventKind::Created).await;
    let mirror = fixture.dispatcher.mirror(Filter::all()).unwrap();
    let first = mirror.caught_up().await.unwrap();
    let SubscriberFixture { bus, notifier: _notifier, dispatcher, .. } = fixture;
    let suspended = dispatcher.suspend();
    let sequence = bus.feed().last_sequence().await.unwrap().unwrap();
    assert!(first >= sequence);
    let version = commit(&bus, &db("a", 1), EventKind::Deleted).await;
    until("the fold", async || bus.is_drained().await.unwrap()).await;
    let janitor = joined(&bus).await.janitor(forgetful()).await.unwrap();
    until("the tombstone's end", async || bus.stats().tombstones_dropped == 1).await;
    janitor.shutdown().await.unwrap();
    assert_eq!(names(&mirror), ["a", "b"]);
    let _dispatcher = suspended.resume();
    until("the second scan", async || names(&mirror) == ["b"]).await;
    within("the barrier", mirror.wait_until(version)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_mirror_of_some_kinds_is_refused_and_one_without_a_dispatcher_says_so() {
    let fixture = SubscriberFixture::new().await;
    let some = Filter::all().kinds(EventKind::Created.into()).unwrap();
    assert!(matches!(fixture.dispatcher.mirror(some), Err(Error::Invalid { .. })));
    // After a change to another design document, such a mirror would show an outdated row.
    let some = Filter::all().ddocs(["_design/x".parse().unwrap()]).unwrap();
    assert!(matches!(fixture.dispatcher.mirror(some), Err(Error::Invalid { .. })));
    let mirror = fixture.dispatcher.mirror(Filter::all()).unwrap();
    let version = commit(&fixture.bus, &db("a", 1), EventKind::Created).await;
    fixture.dispatcher.shutdown().await;
    let ended = within("its end", mirror.wait_until(version)).await;
    assert!(matches!(ended, Err(Error::NoSubscriber { .. })), "{ended:?}");
}
