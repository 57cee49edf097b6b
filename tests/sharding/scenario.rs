//! Runs writers, reshards and readers of a changes feed concurrently, and then checks the guarantees.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use notibus::{
    Bus, BusOptions, Cursor, Db, DbInstance, Sequence, StartOptions,
    changes::{Change, Changes, ChangesOptions, DocId, DocSummary, Revision},
    feed::{Feed, SchemeId, ShardEvent, ShardId, ShardReader},
    store::{
        AtomicOp, Isolation, Store, StoreError, Transaction,
        testing::{CommitFault, Faults},
    },
};
use tokio::sync::watch;

/// The size of a scenario.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// The number of transactions of each of the three writers.
    pub writes: u32,
    pub reshards: u32,
    /// The number of readers of each kind.
    pub readers: u32,
    /// The percentage of commits that fail.
    pub faults_percent: u8,
}

/// The number of documents: few, so that writers conflict.
const DOCS: u32 = 12;

/// Shared by all participants.
#[derive(Clone)]
struct ShardingFixture {
    /// The store, some of whose commits fail.
    store: Store,
    bus: Bus,
    changes: Changes,
    db: Db,
    /// The key prefix of the layer's documents.
    prefix: String,
    /// Edits that were committed.
    edits: Arc<AtomicU64>,
}

/// Reads the layer's row of a document: the sequence of its last edit, and the number of edits.
async fn read_doc(tx: &Transaction, key: &[u8]) -> notibus::Result<(Option<Sequence>, u64)> {
    let Some(stored) = tx.get(key, Isolation::Serializable).await? else { return Ok((None, 0)) };
    let edits = u64::from_be_bytes(stored[13..].try_into().unwrap());
    Ok((Some(Sequence::from_bytes(&stored[..13])?), edits))
}

impl ShardingFixture {
    fn feed(&self) -> Feed<Change> {
        self.changes.feed(&self.db)
    }

    /// Edits some documents in one transaction.
    async fn edit(&self, docs: &[u32]) {
        let edit = async |tx: Transaction| {
            let writer = self.changes.writer(&tx, &self.db).await?;
            for doc in docs {
                let key = format!("{}/doc/{doc}", self.prefix).into_bytes();
                let (previous, edits) = read_doc(&tx, &key).await?;
                let revision = Revision { position: edits + 1, hash: [*doc as u8; 16] };
                let id = DocId::new(&format!("partition{}:{doc}", doc % 4))?;
                let summary = DocSummary { id, revision, branches: 1, is_deleted: edits % 5 == 4 };
                let edited = writer.record(&summary, previous)?;
                let value = edited.operand(&[], &(edits + 1).to_be_bytes());
                tx.atomic(AtomicOp::SetVersionstampedValue, &key, &value);
            }
            Ok(())
        };
        self.bus.run_exactly_once(None, edit).await.unwrap();
        self.edits.fetch_add(docs.len() as u64, Ordering::Relaxed);
    }

    async fn write(self, writes: u32, mut random: fastrand::Rng) {
        for _ in 0..writes {
            let mut docs: Vec<_> = (0..random.u32(1..4)).map(|_| random.u32(..DOCS)).collect();
            docs.sort_unstable();
            docs.dedup();
            self.edit(&docs).await;
            pause(&mut random).await;
        }
    }

    /// Reshards repeatedly, sometimes twice at once.
    async fn reshard(self, reshards: u32, mut random: fastrand::Rng) {
        let feed = self.feed();
        for _ in 0..reshards {
            let scheme =
                random.bool().then(|| *random.choice(&[SchemeId::ID, SchemeId::PARTITION_KEY]).unwrap());
            let (one, two) = (random.u32(1..9), random.u32(1..9));
            if random.u8(..4) == 0 {
                let (one, two) = tokio::join!(feed.reshard(one, scheme), feed.reshard(two, scheme));
                assert_ne!(one.unwrap().shards, two.unwrap().shards);
            } else {
                assert_eq!(feed.reshard(one, scheme).await.unwrap().shards.len(), one as usize);
            }
            pause(&mut random).await;
        }
    }
}

async fn pause(random: &mut fastrand::Rng) {
    tokio::time::sleep(Duration::from_micros(random.u64(..3_000))).await;
}

/// Joins at a random moment, at a random earlier position.
async fn join(feed: &Feed<Change>, random: &mut fastrand::Rng) -> Cursor {
    for _ in 0..random.u32(..20) {
        pause(random).await;
    }
    let since = if random.u8(..3) == 0 { Cursor::BEGINNING } else { feed.now().await.unwrap().into() };
    for _ in 0..random.u32(..10) {
        pause(random).await;
    }
    since
}

/// The log of a reader: where it started, and the rows in the order in which they arrived.
struct ReaderLog {
    since: Cursor,
    rows: Vec<Arc<Change>>,
}

/// Reads all shards merged, in pages of any size, until everything has stopped and has been read.
async fn read_merged(
    feed: Feed<Change>,
    stopped: watch::Receiver<bool>,
    mut random: fastrand::Rng,
) -> ReaderLog {
    let since = join(&feed, &mut random).await;
    let mut rows: Vec<Arc<Change>> = Vec::new();
    let mut cursor = since;
    loop {
        let is_last = *stopped.borrow();
        let page = feed.page(cursor, random.usize(1..20)).await.unwrap();
        assert!(page.rows.iter().all(|row| cursor.position() < row.sequence && row.sequence <= page.to));
        cursor = page.next;
        rows.extend(page.rows);
        if !page.more {
            if is_last {
                break;
            }
            pause(&mut random).await;
        }
    }
    assert!(rows.is_sorted_by(|a, b| a.sequence < b.sequence), "one total order");
    ReaderLog { since, rows }
}

/// Reads shard by shard, from topology to topology, until everything has stopped and has been read.
async fn read_shards(
    feed: Feed<Change>,
    stopped: watch::Receiver<bool>,
    mut random: fastrand::Rng,
) -> ReaderLog {
    let since = join(&feed, &mut random).await;
    let mut rows = Vec::new();
    let mut entry = feed.topology_at(since).await.unwrap();
    let mut cursor = since;
    let mut ends: HashMap<ShardId, u32> = HashMap::new();
    loop {
        let reader = |&shard| feed.shard_reader(shard, cursor).with_limit(random.usize(1..20));
        let mut readers: Vec<_> = entry.shards.iter().map(reader).collect();
        let successor = loop {
            let is_last = *stopped.borrow();
            let mut is_idle = true;
            let mut successor = None;
            for reader in &mut readers {
                match reader.try_next().await.unwrap() {
                    None => {}
                    Some(ShardEvent::Rows(page)) => {
                        is_idle = false;
                        assert!(!page.rows.is_empty());
                        rows.extend(page.rows);
                    }
                    Some(ShardEvent::Resharded(resharded)) => {
                        is_idle = false;
                        *ends.entry(reader.shard()).or_default() += 1;
                        assert_eq!(resharded.at, resharded.successor.first);
                        successor = Some(resharded.successor);
                    }
                }
                if reader.is_ended() {
                    assert_eq!(reader.try_next().await.unwrap(), None, "nothing comes after the end");
                }
            }
            if readers.iter().all(ShardReader::is_ended) {
                break successor;
            }
            if is_idle && is_last {
                assert!(
                    readers.iter().all(|reader| !reader.is_ended()),
                    "all or none of an entry are closed"
                );
                return ReaderLog { since, rows };
            }
            if is_idle {
                pause(&mut random).await;
            }
        };
        assert!(entry.shards.iter().all(|shard| ends[shard] == 1), "each closed shard ends once: {ends:?}");
        entry = successor.expect("the last reader has just ended");
        // The successors begin where all readers have ended.
        cursor = random.choice(&readers).unwrap().cursor();
        assert!(cursor.position() < entry.first);
    }
}

impl ReaderLog {
    /// Checks that each document that was edited after the reader's start arrived with its newest revision, that no revision arrived twice,
    /// and that those of one document arrived in order.
    fn check(&self, newest: &BTreeMap<&str, &Arc<Change>>) {
        let mut last: HashMap<&str, u64> = HashMap::new();
        for row in &self.rows {
            assert!(row.sequence > self.since.position());
            let before = last.insert(row.doc.id.as_str(), row.doc.revision.position);
            assert!(before < Some(row.doc.revision.position), "{:?} after revision {before:?}", row.doc);
        }
        for (id, row) in newest {
            if row.sequence > self.since.position() {
                assert_eq!(last.get(id), Some(&row.doc.revision.position), "{id} since {}", self.since);
            }
        }
    }
}

/// Checks that every row is in the shard and between the bounds that the topology gives it: none was written to a closed shard.
async fn check_shards(feed: &Feed<Change>, rows: &[Arc<Change>]) {
    let topology = feed.topology().await.unwrap();
    let ids: Vec<_> = topology.iter().flat_map(|entry| &entry.shards).collect();
    assert_eq!(ids.iter().collect::<HashSet<_>>().len(), ids.len(), "no shard id is used twice");
    let mut found = Vec::new();
    for (place, entry) in topology.iter().enumerate() {
        let end = topology.get(place + 1).map_or(Sequence::MAX, |next| next.first);
        assert_eq!(entry.is_closed, place + 1 < topology.len());
        for &shard in &entry.shards {
            let page = feed.shard_page(shard, Cursor::BEGINNING, 10_000).await.unwrap();
            assert!(page.rows.iter().all(|row| entry.first <= row.sequence && row.sequence < end));
            assert_eq!(page.resharded.is_some(), entry.is_closed);
            found.extend(page.rows);
        }
    }
    found.sort_by_key(|row| row.sequence);
    assert_eq!(found, rows);
}

/// Runs everything at once, and checks the result.
pub async fn check(store: &Store, prefix: &str, seed: u64, size: Size) {
    // Measured on the clock of the test: if time is paused, the limit is only a formality.
    let limit = Duration::from_mins(3);
    tokio::time::timeout(limit, play(store, prefix, seed, size)).await.expect("it comes to an end");
}

/// [`check`] without a time limit.
async fn play(store: &Store, prefix: &str, seed: u64, size: Size) {
    let mut random = fastrand::Rng::with_seed(seed);
    let faults = Faults::new(store);
    let options = BusOptions::default().prefix(format!("{prefix}/bus").into());
    let bus = Bus::open(&faults.store(), options).await.unwrap();
    let db = Db::new("docs".parse().unwrap(), DbInstance(random.u128(..).to_be_bytes()));
    let changes = bus.changes();
    let (store, edits) = (faults.store(), Arc::default());
    let fixture = ShardingFixture { store, bus: bus.clone(), changes, db, prefix: prefix.to_owned(), edits };
    let begin = ChangesOptions::default().shards(random.u32(1..5)).scheme(SchemeId::PARTITION_KEY);
    fixture.store.run(async |tx| fixture.changes.create(&tx, &fixture.db, &begin).await).await.unwrap();

    let mut luck = random.fork();
    faults.plan_commits(move |attempt| {
        let unknown = StoreError::COMMIT_UNKNOWN_RESULT;
        let fails = attempt.writes() && luck.u8(..100) < size.faults_percent;
        fails.then(|| match luck.u8(..3) {
            0 => CommitFault::Before(StoreError::NOT_COMMITTED),
            1 => CommitFault::Before(unknown),
            _ => CommitFault::After(unknown),
        })
    });
    let (stop, stopped) = watch::channel(false);
    let mut readers = Vec::new();
    for _ in 0..size.readers {
        readers.push(tokio::spawn(read_merged(fixture.feed(), stopped.clone(), random.fork())));
        readers.push(tokio::spawn(read_shards(fixture.feed(), stopped.clone(), random.fork())));
    }
    let mut writers = vec![tokio::spawn(fixture.clone().reshard(size.reshards, random.fork()))];
    writers.extend((0..3).map(|_| tokio::spawn(fixture.clone().write(size.writes, random.fork()))));
    for writer in writers {
        writer.await.unwrap();
    }
    faults.heal();
    stop.send(true).unwrap();

    let feed = fixture.feed();
    let rows = feed.page(Cursor::BEGINNING, 10_000).await.unwrap().rows;
    let newest: BTreeMap<_, _> = rows.iter().map(|row| (row.doc.id.as_str(), row)).collect();
    assert_eq!(newest.len(), rows.len(), "each document is in the feed once");
    let edits: u64 = newest.values().map(|row| row.doc.revision.position).sum();
    assert_eq!(edits, fixture.edits.load(Ordering::Relaxed), "each edit happened once");
    for reader in readers {
        reader.await.unwrap().check(&newest);
    }
    check_shards(&feed, &rows).await;
    assert_eq!(feed.last_sequence().await.unwrap(), rows.last().map(|row| row.sequence));
    assert_eq!(feed.pending(Cursor::BEGINNING).await.unwrap(), rows.len() as u64);
    let newest_first = feed.page_before(Sequence::MAX, 10_000).await.unwrap().rows;
    assert!(newest_first.iter().eq(rows.iter().rev()));

    let _running = bus.start(StartOptions::default()).await.unwrap();
    let folded = async || {
        let row = bus.feed().newest(&fixture.db.name).await.unwrap();
        row.is_some_and(|row| row.totals.updated == edits)
    };
    while !folded().await {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
