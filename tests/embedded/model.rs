//! The embedded engine against simple models: maps of rows by version, of a transaction's own writes, and of what a folder keeps. Keys
//! share long prefixes or differ by trailing zeros, and ranges often begin at rows, so that the borders of the engine's nodes are hit.

use std::collections::BTreeMap;

use crate::disk::SimulatedDisk;
use fastrand::Rng;
use notibus::{
    event::Versionstamp,
    store::{AtomicOp, Committed, Isolation, KeyRange, RangeRead, Store, Transaction},
};

/// The number of random histories with which each model is compared.
const SEEDS: u64 = 40;

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

fn key(random: &mut Rng, variety: usize) -> Vec<u8> {
    let mut key = match random.u8(0..4) {
        0 => vec![],
        1 => vec![b'p'; 40],
        2 => vec![0; random.usize(0..20)],
        _ => vec![b'q'; 300],
    };
    match random.u8(0..3) {
        0 => {
            for _ in 0..random.usize(0..variety) {
                key.push([0, 0, 1, 0x7f, 0x80, 0xfe][random.usize(0..6)]);
            }
        }
        1 => key.extend_from_slice(&random.u16(0..1_000).to_be_bytes()),
        _ => key.extend_from_slice(&(random.u64(0..400) << random.u32(0..40)).to_le_bytes()),
    }
    if key.first() == Some(&0xff) {
        key[0] = 0xfe;
    }
    key
}

fn value(random: &mut Rng) -> Vec<u8> {
    let len = match random.u8(0..20) {
        0 => 0,
        1 => random.usize(0..4_000),
        2 => 3_000,
        _ => random.usize(0..60),
    };
    (0..len).map(|_| random.u8(0..3)).collect()
}

/// Returns a key of the model, or another random key.
fn chosen(random: &mut Rng, model: &Model, variety: usize) -> Vec<u8> {
    if random.u8(0..3) == 0 && !model.is_empty() {
        return model.keys().nth(random.usize(0..model.len())).unwrap().clone();
    }
    key(random, variety)
}

fn range(random: &mut Rng, model: &Model, variety: usize) -> KeyRange {
    if random.u8(0..60) == 0 {
        return KeyRange::prefix("");
    }
    if random.u8(0..3) > 0 && !model.is_empty() {
        // This range is short, and begins and ends at rows.
        let rows = model.keys().skip(random.usize(0..model.len()));
        let keys: Vec<_> = rows.take(random.usize(1..70)).cloned().collect();
        return KeyRange::new(keys[0].clone(), keys[keys.len() - 1].clone());
    }
    let (a, b) = (chosen(random, model, variety), chosen(random, model, variety));
    let (begin, mut end) = if a <= b { (a, b) } else { (b, a) };
    if random.u8(0..4) == 0 {
        end.push(0);
    }
    KeyRange::new(begin, end)
}

/// Computes the result of an atomic operation as the documentation of FoundationDB describes it.
fn naive(op: AtomicOp, old: Option<&Vec<u8>>, operand: &[u8]) -> Option<Vec<u8>> {
    let fit = |old: &[u8]| {
        let mut old = old.to_vec();
        old.resize(operand.len(), 0);
        old
    };
    let number = |bytes: &[u8]| bytes.iter().rev().copied().collect::<Vec<_>>();
    match op {
        AtomicOp::Add => {
            let (old, mut carry) = (fit(old.map_or(&[], |old| &old[..])), 0);
            let sum = old.iter().zip(operand).map(|(a, b)| {
                let sum = u16::from(*a) + u16::from(*b) + carry;
                carry = sum >> 8;
                sum as u8
            });
            Some(sum.collect())
        }
        AtomicOp::Max => {
            let old = fit(old.map_or(&[], |old| &old[..]));
            Some(if number(&old) > number(operand) { old } else { operand.to_vec() })
        }
        AtomicOp::Min => {
            let old = old.map(|old| fit(old)).filter(|old| number(old) < number(operand));
            Some(old.unwrap_or_else(|| operand.to_vec()))
        }
        AtomicOp::ByteMax => Some(old.filter(|old| &old[..] > operand).map_or(operand.to_vec(), Vec::clone)),
        AtomicOp::ByteMin => Some(old.filter(|old| &old[..] < operand).map_or(operand.to_vec(), Vec::clone)),
        AtomicOp::CompareAndClear => old.filter(|old| &old[..] != operand).cloned(),
        _ => unreachable!("it is not drawn"),
    }
}

const OPS: [AtomicOp; 6] = [
    AtomicOp::Add,
    AtomicOp::Max,
    AtomicOp::Min,
    AtomicOp::ByteMax,
    AtomicOp::ByteMin,
    AtomicOp::CompareAndClear,
];

#[derive(Clone)]
enum Write {
    Set(Vec<u8>, Vec<u8>),
    Clear(Vec<u8>),
    ClearRange(KeyRange),
    Atomic(AtomicOp, Vec<u8>, Vec<u8>),
    /// The key up to the stamp, and the value.
    StampedKey(Vec<u8>, Vec<u8>),
    /// The key, and the value up to the stamp.
    StampedValue(Vec<u8>, Vec<u8>),
}

impl Write {
    fn draw(random: &mut Rng, model: &Model, variety: usize, has_stamps: bool) -> Self {
        match random.u8(0..30) {
            0..=14 => Self::Set(chosen(random, model, variety), value(random)),
            15..=18 => Self::Clear(chosen(random, model, variety)),
            19 => Self::ClearRange(range(random, model, variety)),
            20 if has_stamps => Self::StampedKey(key(random, variety), value(random)),
            21 if has_stamps => Self::StampedValue(chosen(random, model, variety), value(random)),
            _ => Self::Atomic(OPS[random.usize(0..6)], chosen(random, model, variety), value(random)),
        }
    }

    fn write(&self, tx: &Transaction) {
        let stamped =
            |start: &[u8], end: &[u8]| [start, &[0; 10], end, &(start.len() as u32).to_le_bytes()].concat();
        match self {
            Self::Set(key, value) => tx.set(key, value),
            Self::Clear(key) => tx.clear(key),
            Self::ClearRange(range) => tx.clear_range(range),
            Self::Atomic(op, key, operand) => tx.atomic(*op, key, operand),
            Self::StampedKey(key, value) => {
                tx.atomic(AtomicOp::SetVersionstampedKey, &stamped(key, b"z"), value);
            }
            Self::StampedValue(key, value) => {
                tx.atomic(AtomicOp::SetVersionstampedValue, key, &stamped(value, b""));
            }
        }
    }

    /// Applies the write to the model; returns the written range.
    fn apply(&self, model: &mut Model, stamp: Versionstamp) -> KeyRange {
        match self {
            Self::Set(key, value) => {
                model.insert(key.clone(), value.clone());
                KeyRange::key(key)
            }
            Self::Clear(key) => {
                model.remove(key);
                KeyRange::key(key)
            }
            Self::ClearRange(range) => {
                model.retain(|key, _| !range.contains(key));
                range.clone()
            }
            Self::Atomic(op, key, operand) => {
                match naive(*op, model.get(key), operand) {
                    Some(value) => _ = model.insert(key.clone(), value),
                    None => _ = model.remove(key),
                }
                KeyRange::key(key)
            }
            Self::StampedKey(key, value) => {
                let key = [key, &stamp.0[..], b"z"].concat();
                model.insert(key.clone(), value.clone());
                KeyRange::key(&key)
            }
            Self::StampedValue(key, value) => {
                model.insert(key.clone(), [value, &stamp.0[..]].concat());
                KeyRange::key(key)
            }
        }
    }
}

/// Reads the rows of `range` in pages of random sizes, in a random direction.
async fn rows(
    tx: &Transaction,
    random: &mut Rng,
    range: &KeyRange,
    isolation: Isolation,
) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut read = RangeRead::new(range.clone()).limit(random.usize(1..50));
    if random.bool() {
        read = read.target_bytes(random.usize(1..3_000));
    }
    let is_reverse = random.bool();
    if is_reverse {
        read = read.reverse();
    }
    let mut found = Vec::new();
    let mut pages = tx.pages(read, isolation);
    while let Some(page) = pages.next().await.unwrap() {
        found.extend(page.into_iter().map(|(key, value)| (key.to_vec(), value.to_vec())));
    }
    if is_reverse {
        found.reverse();
    }
    found
}

async fn compare(tx: &Transaction, random: &mut Rng, model: &Model, range: &KeyRange, seed: u64) {
    let expected: Vec<_> =
        model.iter().filter(|(key, _)| range.contains(key)).map(|(k, v)| (k.clone(), v.clone())).collect();
    assert_eq!(rows(tx, random, range, Isolation::Snapshot).await, expected, "seed {seed}");
    let found = tx.get(&range.begin, Isolation::Snapshot).await.unwrap();
    assert_eq!(found.as_deref(), model.get(&range.begin[..]).map(|value| &value[..]), "seed {seed}");
}

/// Commits with and without conflicts, while older transactions still read the state at which they began.
#[tokio::test(start_paused = true)]
async fn each_version_is_a_map_of_its_own() {
    for seed in 0..SEEDS {
        let random = &mut Rng::with_seed(seed);
        let variety = random.usize(1..12);
        let store = Store::memory();
        let mut model = Model::new();
        let mut log: Vec<(u64, KeyRange)> = Vec::new();
        let mut held: Vec<(Transaction, Model)> = Vec::new();
        if seed % 10 == 0 {
            let tx = store.begin();
            for n in 0..random.u32(1..6_000) {
                let key = [&[b'p'; 40][..], &n.wrapping_mul(2_654_435_761).to_be_bytes()].concat();
                let set = Write::Set(key, vec![7; random.usize(0..80)]);
                set.write(&tx);
                set.apply(&mut model, Versionstamp::new(0, 0));
            }
            tx.commit().await.unwrap();
        }
        for _ in 0..random.usize(20..220) {
            tokio::time::advance(std::time::Duration::from_micros(random.u64(0..40_000))).await;
            // This is a transaction that began a while ago, or a new one.
            let tx = if random.u8(0..3) == 0 && !held.is_empty() {
                held.swap_remove(random.usize(0..held.len())).0
            } else {
                store.begin()
            };
            let (began, mut is_refused) = (tx.read_version().await.unwrap(), false);
            for _ in 0..random.usize(0..3) {
                let range = range(random, &model, variety);
                tx.add_read_conflict(&range);
                is_refused |= log.iter().any(|(version, written)| {
                    *version > began
                        && range.begin < range.end
                        && written.begin < range.end
                        && range.begin < written.end
                });
            }
            let writes: Vec<_> =
                (0..random.usize(1..25)).map(|_| Write::draw(random, &model, variety, true)).collect();
            for write in &writes {
                write.write(&tx);
            }
            match tx.commit().await {
                Ok(committed) => {
                    assert!(!is_refused, "seed {seed}");
                    let Committed { versionstamp, .. } = committed.unwrap();
                    for write in writes {
                        let written = write.apply(&mut model, versionstamp);
                        log.push((versionstamp.version(), written));
                    }
                }
                Err(error) => assert!(is_refused && error.code() == Some(1020), "seed {seed}: {error}"),
            }
            let range = range(random, &model, variety);
            let now = store.begin();
            compare(&now, random, &model, &range, seed).await;
            if random.u8(0..4) == 0 {
                now.read_version().await.unwrap();
                held.push((now, model.clone()));
            }
            if random.u8(0..3) == 0 && !held.is_empty() {
                let (tx, model) = &held[random.usize(0..held.len())];
                // A transaction lives for 5 s, so an older one may be over.
                if tx.get(b"", Isolation::Snapshot).await.is_ok() {
                    compare(tx, random, model, &range, seed).await;
                }
            }
        }
    }
}

#[tokio::test]
async fn a_transaction_reads_its_own_writes_like_a_map() {
    for seed in 0..SEEDS {
        let random = &mut Rng::with_seed(seed);
        let variety = random.usize(1..12);
        let store = Store::memory();
        let mut model = Model::new();
        for _ in 0..random.usize(1..6) {
            let tx = store.begin();
            for _ in 0..random.usize(0..120) {
                let write = Write::draw(random, &model, variety, false);
                write.write(&tx);
                write.apply(&mut model, Versionstamp::new(0, 0));
                if random.u8(0..4) == 0 {
                    let range = range(random, &model, variety);
                    compare(&tx, random, &model, &range, seed).await;
                }
            }
            tx.commit().await.unwrap();
        }
        compare(&store.begin(), random, &model, &KeyRange::prefix(""), seed).await;
    }
}

/// A folder with short journals, which is closed, and whose process is killed and whose disk loses power, in between commits.
#[tokio::test]
async fn a_folder_keeps_what_a_map_keeps() {
    for seed in 0..SEEDS {
        let random = &mut Rng::with_seed(seed);
        let variety = random.usize(1..12);
        let mut disk = SimulatedDisk::new(512);
        let len_min = random.u64(500..20_000);
        let mut db = disk.open_small(len_min).unwrap();
        let mut model = Model::new();
        for _ in 0..random.usize(1..40) {
            let tx = db.begin();
            let writes: Vec<_> =
                (0..random.usize(0..40)).map(|_| Write::draw(random, &model, variety, true)).collect();
            for write in &writes {
                write.write(&tx);
            }
            let committed = tx.commit().await.unwrap();
            let stamp = committed.map_or(Versionstamp::new(0, 0), |committed| committed.versionstamp);
            for write in writes {
                write.apply(&mut model, stamp);
            }
            drop(tx);
            match random.u8(0..8) {
                0 => {
                    drop(db);
                    db = disk.open_small(len_min).unwrap();
                }
                1 => {
                    disk = disk.copied();
                    db = disk.open_small(len_min).unwrap();
                }
                2 => {
                    disk = disk.after_power_failure(|count| random.usize(0..count)).0;
                    db = disk.open_small(len_min).unwrap();
                }
                _ => {}
            }
            compare(&db.begin(), random, &model, &KeyRange::prefix(""), seed).await;
        }
    }
}
