//! The engine beside simple models: maps of rows by version, of own writes, and of what a folder keeps.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use fastrand::Rng;

use super::{
    atomic,
    conflicts::ReadConflict,
    core::{Core, Request},
    rows::Rows,
};
use crate::{
    base::encoding::Versionstamp,
    store::{
        AtomicOp, Database, Extension, Isolation, KeyRange, RangeRead, Transaction, mutation::Mutation,
        testing::SimulatedDisk,
    },
};

/// How many worlds of random writes each model is compared with.
const SEEDS: u64 = 40;

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

/// Keys that differ by trailing zeros, by length, behind long common prefixes, and the empty one.
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

fn naive(op: AtomicOp, old: Option<&Vec<u8>>, operand: &[u8]) -> Option<Vec<u8>> {
    let n = operand.len();
    let fit = |old: &[u8]| {
        let mut old = old.to_vec();
        old.resize(n, 0);
        old
    };
    let number = |bytes: &[u8]| bytes.iter().rev().copied().collect::<Vec<_>>();
    match op {
        AtomicOp::Add => {
            let old = fit(old.map_or(&[], |old| &old[..]));
            let mut carry = 0;
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
        AtomicOp::Min => Some(match old {
            None => operand.to_vec(),
            Some(old) => {
                let old = fit(old);
                if number(&old) < number(operand) { old } else { operand.to_vec() }
            }
        }),
        AtomicOp::ByteMax => Some(old.filter(|old| &old[..] > operand).map_or(operand.to_vec(), Vec::clone)),
        AtomicOp::ByteMin => Some(old.filter(|old| &old[..] < operand).map_or(operand.to_vec(), Vec::clone)),
        AtomicOp::CompareAndClear => old.filter(|old| &old[..] != operand).cloned(),
        _ => unreachable!(),
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

fn range(random: &mut Rng, model: &Model, variety: usize) -> KeyRange {
    // Often exactly at rows, so that borders of nodes are hit.
    let end_of = |random: &mut Rng| {
        if random.bool() && !model.is_empty() {
            let n = random.usize(0..model.len());
            let mut key = model.keys().nth(n).unwrap().clone();
            if random.u8(0..4) == 0 {
                key.push(0);
            }
            key
        } else {
            key(random, variety)
        }
    };
    let (a, b) = (end_of(random), end_of(random));
    let (mut begin, mut end) = if a <= b { (a, b) } else { (b, a) };
    if random.u8(0..3) > 0 && !model.is_empty() {
        // A short one.
        let n = random.usize(0..model.len());
        let keys: Vec<_> = model.keys().skip(n).take(random.usize(1..70)).cloned().collect();
        (begin, end) = (keys[0].clone(), keys[keys.len() - 1].clone());
    }
    if random.u8(0..60) == 0 {
        (begin, end) = (vec![], vec![0xff]);
    }
    KeyRange::new(begin, end)
}

fn mutation(random: &mut Rng, model: &Model, variety: usize, has_stamps: bool) -> Mutation {
    let chosen = |random: &mut Rng| {
        if random.u8(0..3) == 0 && !model.is_empty() {
            Bytes::from(model.keys().nth(random.usize(0..model.len())).unwrap().clone())
        } else {
            Bytes::from(key(random, variety))
        }
    };
    match random.u8(0..30) {
        0..=14 => Mutation::Set(chosen(random), value(random).into()),
        15..=18 => Mutation::Clear(chosen(random)),
        19 => {
            let range = range(random, model, variety);
            Mutation::ClearRange(range.begin, range.end)
        }
        20 if has_stamps => {
            let mut stamped = key(random, variety);
            let at = stamped.len() as u32;
            stamped.extend_from_slice(&[0; 10]);
            stamped.extend_from_slice(b"z");
            stamped.extend_from_slice(&at.to_le_bytes());
            Mutation::Atomic(AtomicOp::SetVersionstampedKey, stamped.into(), value(random).into())
        }
        21 if has_stamps => {
            let mut operand = value(random);
            let at = operand.len() as u32;
            operand.extend_from_slice(&[0; 10]);
            operand.extend_from_slice(&at.to_le_bytes());
            Mutation::Atomic(AtomicOp::SetVersionstampedValue, chosen(random), operand.into())
        }
        _ => Mutation::Atomic(OPS[random.usize(0..6)], chosen(random), value(random).into()),
    }
}

/// Applies to the model; returns the written range.
fn apply(model: &mut Model, mutation: &Mutation, stamp: Versionstamp) -> KeyRange {
    match mutation {
        Mutation::Set(key, value) => {
            model.insert(key.to_vec(), value.to_vec());
            KeyRange::key(key)
        }
        Mutation::Clear(key) => {
            model.remove(&key[..]);
            KeyRange::key(key)
        }
        Mutation::ClearRange(begin, end) => {
            let range = KeyRange::new(begin.clone(), end.clone());
            model.retain(|key, _| !range.contains(key));
            range
        }
        Mutation::Atomic(AtomicOp::SetVersionstampedKey, key, value) => {
            let key = atomic::stamped(key, stamp);
            model.insert(key.to_vec(), value.to_vec());
            KeyRange::key(&key)
        }
        Mutation::Atomic(AtomicOp::SetVersionstampedValue, key, value) => {
            model.insert(key.to_vec(), atomic::stamped(value, stamp).to_vec());
            KeyRange::key(key)
        }
        Mutation::Atomic(op, key, operand) => {
            match naive(*op, model.get(&key[..]), operand) {
                Some(value) => _ = model.insert(key.to_vec(), value),
                None => _ = model.remove(&key[..]),
            }
            KeyRange::key(key)
        }
    }
}

fn compare(rows: &Rows, model: &Model, range: &KeyRange, seed: u64) {
    assert_eq!(rows.iter().count(), model.len(), "seed {seed}");
    assert!(rows.iter().eq(model.iter().map(|(k, v)| (&k[..], &v[..]))), "seed {seed}");
    let expected: Vec<_> =
        model.iter().filter(|(key, _)| range.contains(key)).map(|(k, v)| (&k[..], &v[..])).collect();
    assert_eq!(rows.range(range, false).collect::<Vec<_>>(), expected, "seed {seed}");
    let mut reversed: Vec<_> = rows.range(range, true).collect();
    reversed.reverse();
    assert_eq!(reversed, expected, "seed {seed}");
}

/// Groups of random commits: rows, snapshots that are held, versions that are read again, and conflicts.
#[expect(clippy::too_many_lines, reason = "it reads best beside its model")]
#[test]
fn the_core_does_what_a_map_of_versions_does() {
    for seed in 0..SEEDS {
        let random = &mut Rng::with_seed(seed);
        let variety = random.usize(1..12);
        let mut core = Core::new(Rows::default(), 1);
        let mut model = Model::new();
        // Every version with its rows and the time when it was published.
        let mut past: Vec<(u64, Model)> = vec![(1, model.clone())];
        let mut held: Vec<(Rows, Model)> = Vec::new();
        let mut log: Vec<(u64, KeyRange)> = Vec::new();
        let mut now = Duration::from_secs(1);
        let clears = random.u8(0..3) == 0;
        if seed % 10 == 0 {
            let count = random.u32(1..6_000);
            let rows = (0..count).map(|n| {
                Mutation::Set(
                    [&[b'p'; 40][..], &n.wrapping_mul(2_654_435_761).to_be_bytes()].concat().into(),
                    vec![7; random.usize(0..80)].into(),
                )
            });
            let rows: Vec<_> = rows.collect();
            let version = 1 + now.as_micros() as u64;
            for row in &rows {
                log.push((version, apply(&mut model, row, Versionstamp::new(version, 0))));
            }
            commit(&mut core, rows, now);
            past.push((version, model.clone()));
        }
        for _ in 0..random.usize(20..220) {
            now += Duration::from_micros(random.u64(0..40_000));
            let is_shared = random.bool();
            let mut group = Vec::new();
            let mut next = model.clone();
            let mut expected = Vec::new();
            let elapsed = now.as_micros() as u64;
            let version = (core.version() + 1).max(1 + elapsed);
            for order in 0..random.u16(1..4) {
                let mut request = Request::default();
                for _ in 0..random.usize(1..25) {
                    let mutation = mutation(random, &next, variety, true);
                    if matches!(mutation, Mutation::ClearRange(..)) && !clears && random.u8(0..4) > 0 {
                        continue;
                    }
                    if let Mutation::ClearRange(begin, end) = &mutation
                        && begin >= end
                    {
                        continue;
                    }
                    request.mutations.push(mutation);
                }
                let mut is_refused = false;
                if random.bool() && !request.mutations.is_empty() {
                    let at = past[past.len() - 1 - random.usize(0..past.len().min(20))].0;
                    request.snapshot = Some((at, now));
                    for _ in 0..random.usize(0..3) {
                        let range = range(random, &next, variety);
                        let read = if random.bool() {
                            ReadConflict::Key(range.begin.clone())
                        } else {
                            ReadConflict::Range(range)
                        };
                        let asked = read.range();
                        is_refused |= log.iter().any(|(written, range)| {
                            *written > at
                                && asked.begin < asked.end
                                && range.begin < asked.end
                                && asked.begin < range.end
                        });
                        request.reads.push(read);
                    }
                }
                if !is_refused {
                    for mutation in &request.mutations {
                        log.push((version, apply(&mut next, mutation, Versionstamp::new(version, order))));
                    }
                }
                expected.push(if is_refused { None } else { Some(!request.mutations.is_empty()) });
                group.push(request);
            }
            let root = if is_shared { core.share_root() } else { core.take_root() };
            let staged = core.stage(root, group, now);
            assert_eq!(staged.version, version);
            let outcomes = core.publish(staged, now);
            for (outcome, expected) in outcomes.iter().zip(&expected) {
                match expected {
                    None => assert!(outcome.is_err(), "seed {seed}"),
                    Some(wrote) => assert_eq!(outcome.as_ref().unwrap().is_some(), *wrote, "seed {seed}"),
                }
            }
            if expected.contains(&Some(true)) {
                past.push((version, next.clone()));
            }
            model = next;
            let range = range(random, &model, variety);
            if random.u8(0..4) == 0 {
                compare(&core.share_root(), &model, &range, seed);
                held.push((core.share_root(), model.clone()));
            }
            if random.u8(0..6) == 0 && !held.is_empty() {
                let (rows, model) = held.swap_remove(random.usize(0..held.len()));
                compare(&rows, &model, &range, seed);
            }
            if random.u8(0..4) == 0 {
                let n = random.usize(past.len().saturating_sub(30)..past.len());
                let (version, model) = &past[n];
                if let Ok(past) = core.past(*version) {
                    compare(&past.snapshot().root, model, &range, seed);
                }
            }
        }
        for (rows, model) in held {
            compare(&rows, &model, &KeyRange::new(&b""[..], &b"\xff"[..]), seed);
        }
    }
}

fn write(tx: &Transaction, mutation: &Mutation) {
    match mutation {
        Mutation::Set(key, value) => tx.set(key, value),
        Mutation::Clear(key) => tx.clear(key),
        Mutation::ClearRange(begin, end) => tx.clear_range(&KeyRange::new(begin.clone(), end.clone())),
        Mutation::Atomic(op, key, operand) => tx.atomic(*op, key, operand),
    }
}

/// Reads of a transaction's own writes, in both directions and by pages, and its commit.
#[tokio::test]
async fn a_transaction_reads_its_own_writes_like_a_map() {
    for seed in 0..SEEDS {
        let random = &mut Rng::with_seed(seed);
        let variety = random.usize(1..12);
        let db = Database::memory();
        let mut model = Model::new();
        for _ in 0..random.usize(1..6) {
            let tx = db.begin();
            let mut next = model.clone();
            for _ in 0..random.usize(0..120) {
                let mutation = mutation(random, &next, variety, false);
                write(&tx, &mutation);
                apply(&mut next, &mutation, Versionstamp::new(0, 0));
                if random.u8(0..4) == 0 {
                    let range = range(random, &next, variety);
                    let found = tx.get(&range.begin, Isolation::Snapshot).await.unwrap();
                    assert_eq!(found.as_deref(), next.get(&range.begin[..]).map(|v| &v[..]), "seed {seed}");
                    let mut read = RangeRead::new(range.clone()).limit(random.usize(1..50));
                    if random.bool() {
                        read = read.target_bytes(random.usize(1..3_000));
                    }
                    let is_reverse = random.bool();
                    if is_reverse {
                        read = read.reverse();
                    }
                    let mut found = Vec::new();
                    let mut pages = tx.pages(read, Isolation::Serializable);
                    while let Some(page) = pages.next().await.unwrap() {
                        found.extend(page);
                    }
                    if is_reverse {
                        found.reverse();
                    }
                    let expected: Vec<_> = next
                        .iter()
                        .filter(|(key, _)| range.contains(key))
                        .map(|(k, v)| (Bytes::from(k.clone()), Bytes::from(v.clone())))
                        .collect();
                    assert_eq!(found, expected, "seed {seed}");
                }
            }
            tx.commit().await.unwrap();
            model = next;
        }
        let tx = db.begin();
        let mut found = Model::new();
        let mut pages = tx.pages(RangeRead::new(KeyRange::prefix("")).limit(7), Isolation::Snapshot);
        while let Some(page) = pages.next().await.unwrap() {
            found.extend(page.into_iter().map(|(k, v)| (k.to_vec(), v.to_vec())));
        }
        assert_eq!(found, model, "seed {seed}");
    }
}

fn commit(core: &mut Core, mutations: Vec<Mutation>, now: Duration) {
    let root = core.take_root();
    let staged = core.stage(root, vec![Request { mutations, ..Request::default() }], now);
    core.publish(staged, now).remove(0).unwrap();
}

/// A folder with short journals, which is killed, closed and loses its power in between.
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
            let mut mutations = Vec::new();
            for _ in 0..random.usize(0..40) {
                let mutation = mutation(random, &model, variety, true);
                write(&tx, &mutation);
                mutations.push(mutation);
            }
            let stamp = tx.commit().await.unwrap().map(|committed| committed.versionstamp);
            for mutation in &mutations {
                apply(&mut model, mutation, stamp.unwrap_or(Versionstamp::new(0, 0)));
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
            let tx = db.begin();
            let mut found = Model::new();
            let mut pages = tx.pages(RangeRead::new(KeyRange::prefix("")), Isolation::Snapshot);
            while let Some(page) = pages.next().await.unwrap() {
                found.extend(page.into_iter().map(|(k, v)| (k.to_vec(), v.to_vec())));
            }
            assert_eq!(found, model, "seed {seed}");
        }
    }
}

/// Numbers to add to keys at the commit.
#[derive(Default)]
struct Sums(BTreeMap<Vec<u8>, u64>);

impl Extension for Sums {
    fn size(&self) -> usize {
        0
    }

    fn into_writes(self, write: &mut dyn FnMut(Mutation)) {
        for (key, sum) in self.0 {
            let operand = [&sum.to_le_bytes()[..], &[0; 32]].concat();
            write(Mutation::Atomic(AtomicOp::Add, key.into(), operand.into()));
        }
    }
}

/// What an extension holds back comes after the other writes, once, and is forgotten with the transaction.
#[tokio::test]
async fn what_is_held_back_comes_last_and_is_forgotten_with_its_transaction() {
    use crate::base::error::StoreError;
    for seed in 0..60 {
        let random = &mut Rng::with_seed(seed);
        let db = Database::memory();
        let mut model = Model::new();
        for _ in 0..8 {
            let tx = db.begin();
            let keys = random.u16(1..300);
            let mut next = model.clone();
            let mut added = BTreeMap::<Vec<u8>, u64>::new();
            for _ in 0..random.usize(0..600) {
                let key = random.u16(0..keys).to_be_bytes().to_vec();
                match random.u8(0..12) {
                    0 => {
                        tx.set(&key, &[9; 40]);
                        next.insert(key, vec![9; 40]);
                    }
                    1 => {
                        tx.clear(&key);
                        next.remove(&key);
                    }
                    2 => {
                        let mut one = [0; 40];
                        one[0] = 1;
                        tx.atomic(AtomicOp::Add, &key, &one);
                        let sum = naive(AtomicOp::Add, next.get(&key), &one).unwrap();
                        next.insert(key, sum);
                    }
                    3 => {
                        let found = tx.get(&key, Isolation::Snapshot).await.unwrap();
                        assert_eq!(found.as_deref(), next.get(&key).map(|v| &v[..]));
                    }
                    4 if random.u8(0..20) == 0 => {
                        tx.reset();
                        (next, added) = (model.clone(), BTreeMap::new());
                    }
                    5 if random.u8(0..20) == 0 => {
                        let pause = Box::pin(std::future::ready(()));
                        tx.recover(StoreError::NOT_COMMITTED.into(), pause).await.unwrap();
                        (next, added) = (model.clone(), BTreeMap::new());
                    }
                    _ => {
                        let n = random.u64(1..1 << 32);
                        tx.extension(|sums: &mut Sums| *sums.0.entry(key.clone()).or_default() += n);
                        *added.entry(key).or_default() += n;
                    }
                }
            }
            if random.u8(0..5) == 0 {
                tx.cancel();
                assert!(tx.commit().await.is_err());
                continue;
            }
            tx.commit().await.unwrap();
            for (key, n) in added {
                let mut operand = [0; 40];
                operand[..8].copy_from_slice(&n.to_le_bytes());
                let sum = naive(AtomicOp::Add, next.get(&key), &operand).unwrap();
                next.insert(key, sum);
            }
            model = next;
            let tx = db.begin();
            let rows = tx.all_rows(KeyRange::prefix(""), Isolation::Snapshot).await.unwrap();
            let rows: Model = rows.into_iter().map(|(k, v)| (k.to_vec(), v.to_vec())).collect();
            assert_eq!(rows, model, "seed {seed}");
        }
    }
}
