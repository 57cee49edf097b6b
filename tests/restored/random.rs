//! Buses with random histories, copied at a random moment and restored into a store with lower or higher versions, with and without raising
//! the incarnation. Readers then resume from arbitrary positions: each must get everything that it has not seen, or be refused.

use std::{collections::BTreeMap, time::Duration};

use fastrand::Rng;
use notibus::{
    Bus, Cursor, Error, NodeOptions, NotifierOptions, Sequence,
    event::{Counters, Incarnation},
    store::{Isolation, Store},
};

use super::{
    PREFIX,
    steps::{db, later_store, open, restore, until},
};

/// The number of histories that are tried.
const LIVES: u64 = 60;

const DATABASES: u32 = 6;

/// The totals of databases.
type Totals = BTreeMap<String, Counters>;

/// A reader that has read everything up to a position.
struct Reader {
    at: Sequence,
    known: Totals,
}

async fn rows(bus: &Bus, since: impl Into<Cursor>) -> notibus::Result<Totals> {
    let page = bus.feed().page(since, 1_000).await?;
    Ok(page.rows.iter().map(|row| (row.name.to_string(), row.totals)).collect())
}

/// Returns the newest totals of each database, which can be read even while readers are refused.
async fn newest(bus: &Bus) -> Totals {
    let mut totals = Totals::new();
    for name in (0..DATABASES).map(|number| format!("db{number}")) {
        let row = bus.feed().newest(&name.parse().unwrap()).await.unwrap();
        totals.extend(row.map(|row| (name, row.totals)));
    }
    totals
}

/// Records events of a few databases while a node folds, and adds readers at random moments.
async fn live(bus: &Bus, random: &mut Rng, recorded: &mut Totals, readers: &mut Vec<Reader>) {
    for _ in 0..random.usize(1..30) {
        let name = format!("db{}", random.u32(0..DATABASES));
        let before = recorded.entry(name.clone()).or_default();
        let is_new = u64::from(*before == Counters::default());
        let events = Counters::from_lanes([is_new, 0, random.u64(1..3), random.u64(0..2)]);
        *before += events;
        let producer = bus.producer();
        let record = async |tx| producer.record_all(&tx, &db(&name), &events).map(drop);
        bus.store().run(record).await.unwrap();
        if random.bool() {
            tokio::time::sleep(Duration::from_millis(random.u64(0..50))).await;
        }
        if random.u32(0..4) == 0 {
            let at = bus.feed().now().await.unwrap();
            readers.push(Reader { at, known: rows(bus, Cursor::BEGINNING).await.unwrap() });
        }
    }
}

/// Folds until the rows have what was `recorded`.
async fn fold(bus: &Bus, recorded: &Totals) {
    let node = bus.node(NodeOptions::default()).await.unwrap();
    let notifier = node.notifier(NotifierOptions::default()).await.unwrap();
    drop(node);
    until("all events", async || rows(bus, Cursor::BEGINNING).await.unwrap() == *recorded).await;
    notifier.shutdown().await.unwrap();
}

/// Returns the last sequence that is known to exist in incarnation 0.
async fn end(store: &Store) -> Sequence {
    let key = [PREFIX, &[0x15, 26, 0x14]].concat();
    let stored = store.begin().get(&key, Isolation::Snapshot).await.unwrap();
    stored.map_or(Sequence::MIN, |stored| Sequence::from_bytes(&stored).unwrap())
}

async fn life(seed: u64) {
    let mut random = Rng::with_seed(seed);
    let old = later_store(1);
    let bus = open(&old, PREFIX).await;
    let options = NotifierOptions::default().fold_interval_max(Duration::ZERO);
    let notifier = bus.node(NodeOptions::default()).await.unwrap().notifier(options).await.unwrap();
    let (mut recorded, mut readers) = (Totals::new(), Vec::new());
    live(&bus, &mut random, &mut recorded, &mut readers).await;
    until("a row", async || !rows(&bus, Cursor::BEGINNING).await.unwrap().is_empty()).await;
    let is_later = random.bool();
    let new = if is_later { later_store(2) } else { Store::memory() };
    restore(&old, &new, PREFIX).await;
    live(&bus, &mut random, &mut recorded.clone(), &mut readers).await;
    notifier.shutdown().await.unwrap();

    let end = end(&new).await;
    let bus = open(&new, PREFIX).await;
    let copied = newest(&bus).await;
    if is_later && random.bool() {
        // Without a raise the rows are still right, and readers are refused rather than given too little.
        fold(&bus, &recorded).await;
        for Reader { at, .. } in &readers {
            let refused = rows(&bus, *at).await;
            assert!(matches!(refused, Err(Error::Expired { .. })), "seed {seed}: {refused:?}");
        }
        return;
    }
    if !is_later {
        let node = bus.node(NodeOptions::default()).await.unwrap();
        let notifier = node.notifier(NotifierOptions::default()).await.unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(newest(&bus).await, copied, "seed {seed}: nothing is folded");
        for at in readers.iter().map(|reader| Cursor::from(reader.at)).chain([Cursor::BEGINNING]) {
            let refused = rows(&bus, at).await;
            assert!(matches!(refused, Err(Error::OlderThanRows { .. })), "seed {seed}: {refused:?}");
        }
        drop((notifier, node));
    }
    Bus::raise_incarnation(&new, PREFIX, Incarnation(0), is_later).await.unwrap();
    let bus = open(&new, PREFIX).await;
    fold(&bus, &recorded).await;
    for Reader { at, known } in &readers {
        match rows(&bus, *at).await {
            Ok(news) => {
                assert!(*at <= end, "seed {seed}: a reader at {at} has seen more than was restored, {end}");
                for (name, totals) in &recorded {
                    let knows = news.get(name).or_else(|| known.get(name));
                    assert_eq!(knows, Some(totals), "seed {seed}: a reader at {at} misses {name}");
                }
            }
            Err(Error::Expired { .. }) => assert!(*at > end, "seed {seed}: nothing after {at} was lost"),
            Err(error) => panic!("seed {seed}: {error}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn readers_of_restored_copies_miss_nothing_silently() {
    let first = std::env::var("NOTIBUS_SEED").ok().map_or(0, |seed| seed.parse().unwrap());
    for seed in first..first + LIVES {
        life(seed).await;
    }
}
