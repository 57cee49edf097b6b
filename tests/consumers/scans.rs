//! The recipe for replications: what handlers receive, and that scans miss no change, wherever they are interrupted.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use notibus::{
    Cursor, Error,
    consumer::{ConsumerOptions, Scan, replicate},
};

use crate::{
    common::{NEVER, db, dice, stored},
    fixture::{ConsumerFixture, pass},
    reporting::{SEEN, cancelled},
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
async fn databases_are_scanned_from_the_beginning_and_then_from_the_saved_position() {
    let fixture = ConsumerFixture::new(1).await;
    let (found, created) = (db("a", 1), db("b", 2));
    fixture.create_with_feed(&found).await;
    fixture.document(&found, "x").await;
    let (scans, mut reports) = fixture.scans().await;
    let (mut scan, decide) = reports.next_work().await;
    assert_eq!((scan.db(), scan.since()), (&found, Cursor::BEGINNING), "it is found");
    assert_eq!(ids(&mut scan).await, ["x"]);
    decide.send(Ok(())).unwrap();
    fixture.create_with_feed(&created).await;
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
            assert!(scan.since() > Cursor::BEGINNING || seen.is_empty());
            seen.extend(ids(&mut scan).await);
            decide.send(Ok(())).unwrap();
        }
        assert_eq!(seen, some, "each once");
        // An update that a running scan has already read still causes another scan, which finds nothing.
        while let Ok(Some((mut scan, decide))) =
            tokio::time::timeout(Duration::from_secs(5), reports.works.recv()).await
        {
            assert!(ids(&mut scan).await.is_empty());
            decide.send(Ok(())).unwrap();
        }
    }
    fixture.until_done().await;
    scans.shutdown().await.unwrap();
    // Another process continues the scan; CouchDB would start from zero.
    fixture.document(&created, "g").await;
    let (scans, mut reports) = fixture.scans().await;
    let (mut scan, decide) = reports.next_work().await;
    assert_eq!((scan.db().clone(), ids(&mut scan).await), (created, vec!["g".to_owned()]));
    decide.send(Ok(())).unwrap();
    assert!(reports.is_quiet().await);
    scans.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_update_during_a_scan_causes_another_one_afterwards() {
    let fixture = ConsumerFixture::new(1).await;
    let a = db("a", 1);
    fixture.create_with_feed(&a).await;
    let (scans, mut reports) = fixture.scans().await;
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
    scans.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_scan_that_fails_goes_on_from_the_position_that_it_has_saved() {
    let fixture = ConsumerFixture::new(1).await;
    let a = db("a", 1);
    fixture.create_with_feed(&a).await;
    for id in ["x", "y", "z"] {
        fixture.document(&a, id).await;
    }
    let (scans, mut reports) = fixture.scans().await;
    let (mut scan, decide) = reports.next_work().await;
    let page = scan.page(1).await.unwrap();
    fixture.store.run(async |tx| scan.save_in(&tx, page.next).await).await.unwrap();
    scan.page(1).await.unwrap();
    decide.send(Err("no network".into())).unwrap();
    let (mut scan, decide) = reports.next_work().await;
    assert_eq!((scan.attempt(), scan.since()), (2, page.next));
    assert_eq!(ids(&mut scan).await, ["y", "z"], "what was not saved comes again");
    decide.send(Ok(())).unwrap();
    fixture.until_done().await;
    scans.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_deleted_database_stops_and_a_scan_that_is_over_saves_nothing() {
    let fixture = ConsumerFixture::new(1).await;
    let (old, new) = (db("a", 1), db("a", 2));
    fixture.create_with_feed(&old).await;
    let (scans, mut reports) = fixture.scans().await;
    let (mut first, decide) = reports.next_work().await;
    let to = first.page(10).await.unwrap().next;
    let save = async |scan: &Scan| {
        let saved = fixture.store.run(async |tx| scan.save_in(&tx, to).await).await;
        assert!(matches!(saved, Ok(()) | Err(Error::Cancelled { .. })), "{saved:?}");
        saved.is_ok()
    };
    assert!(save(&first).await);
    decide.send(Err("once more".into())).unwrap();
    let (second, decide) = reports.next_work().await;
    assert!(!save(&first).await, "another scan has begun");
    fixture.delete_with_feed(&old).await;
    cancelled(&decide).await;
    assert_eq!(reports.next_gone().await, old);
    fixture.until_done().await;
    assert!(!save(&second).await, "its database is gone");
    assert!(stored(&fixture.store, SEEN.as_bytes()).await.is_empty());
    fixture.create_with_feed(&new).await;
    let (scan, decide) = reports.next_work().await;
    assert_eq!((scan.db(), scan.since()), (&new, Cursor::BEGINNING));
    assert!(!save(&second).await, "nor is it the new one");
    decide.send(Ok(())).unwrap();
    fixture.until_done().await;
    assert_eq!(stored(&fixture.store, SEEN.as_bytes()).await.len(), 0, "nothing was read");
    scans.shutdown().await.unwrap();
}

/// The position of a database that was replaced is removed; those of its successor and of other names remain.
#[tokio::test(start_paused = true)]
async fn only_the_positions_of_what_has_ended_are_removed() {
    let fixture = ConsumerFixture::new(1).await;
    let [old, new, other] = [db("a", 1), db("a", 2), db("aa", 1)];
    fixture.create_with_feed(&old).await;
    fixture.create_with_feed(&other).await;
    let scan = |mut scan: Scan| async move {
        ids(&mut scan).await;
        Ok(())
    };
    let member = fixture.member_of_all(ConsumerOptions::default().poll_interval(NEVER)).await;
    let scans = member.run(replicate(SEEN, scan)).await.unwrap();
    fixture.until_done().await;
    let keys = async || {
        stored(&fixture.store, SEEN.as_bytes()).await.into_iter().map(|(key, _)| key).collect::<Vec<_>>()
    };
    let before = keys().await;
    assert_eq!(before.len(), 2);
    fixture.delete_with_feed(&old).await;
    fixture.create_with_feed(&new).await;
    fixture.until_done().await;
    let after = keys().await;
    assert!(after.len() == 2 && after[0] != before[0] && after[1] == before[1], "{after:?}");
    assert!(after[0].ends_with(&new.instance.0));
    scans.shutdown().await.unwrap();
}

/// Scans crash at random between updates; in the end they have seen every document.
#[tokio::test(start_paused = true)]
async fn no_change_is_missed_by_scans_that_crash_at_random() {
    let mut random = dice();
    let fixture = ConsumerFixture::new(2).await;
    let dbs = [("a", 1), ("b", 2), ("c", 3)].map(|(name, n)| db(name, n));
    for db in &dbs {
        fixture.create_with_feed(db).await;
    }
    let (mut written, seen) = (BTreeSet::new(), Arc::new(Mutex::new(BTreeSet::new())));
    for round in 0..20 {
        let (seen, mut dice) = (Arc::clone(&seen), random.fork());
        let fails: Vec<_> = (0..64).map(|_| dice.u8(..4) == 0).collect();
        let count = AtomicUsize::new(0);
        let scan = move |mut scan: Scan| {
            let seen = Arc::clone(&seen);
            let fails = fails[count.fetch_add(1, Ordering::Relaxed) % fails.len()] && round < 19;
            async move {
                let name = scan.db().name.to_string();
                loop {
                    let page = scan.page(2).await?;
                    pass(Duration::from_millis(50)).await;
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
        let member = fixture.member_of_all(ConsumerOptions::default().poll_interval(NEVER)).await;
        let scans = member.run(replicate(SEEN, scan)).await.unwrap();
        for n in 0..random.usize(..6) {
            let db = random.choice(&dbs).unwrap();
            let id = format!("{round}-{n}");
            fixture.document(db, &id).await;
            written.insert((db.name.to_string(), id));
        }
        pass(Duration::from_millis(random.u64(..3_000))).await;
        if round == 19 {
            fixture.until_done().await;
        }
        if random.bool() {
            scans.shutdown().await.unwrap();
        }
    }
    assert_eq!(*seen.lock().unwrap(), written);
}
