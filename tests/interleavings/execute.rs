//! Runs an interleaving on a store.

use std::{cell::Cell, pin::pin};

use futures_util::FutureExt;
use notibus::{
    Error,
    store::{AtomicOp, Isolation, KeyRange, RangeRead, Store, StoreError, Transaction, Watch},
};

use crate::{
    moved::moved,
    steps::{LETTERS, Op, SLOTS, STAMPED_KEY, STAMPED_VALUE, Step},
    trace::{Event, Row, STAMP_LEN, TOO_OLD_AS_ASKED, Trace, stand_in},
};

/// Runs `steps` on `store`, below `prefix`, which must be empty, and returns the observations.
pub(crate) async fn execute(store: &Store, prefix: &[u8], steps: &[Step]) -> Trace {
    let mut execution = Execution {
        store,
        prefix,
        slots: (0..SLOTS).map(|_| Slot::new(store)).collect(),
        read_versions: Vec::new(),
        stamps: Vec::new(),
        polls: 0,
    };
    let mut events = Vec::with_capacity(steps.len());
    for step in steps {
        events.push(execution.step(step).await);
    }
    Trace { events, rows: execution.rows().await }
}

struct Slot {
    tx: Transaction,
    /// Whether the transaction has a read version.
    has_version: bool,
    /// Whether that version is older than any transaction may be.
    is_old: bool,
    /// Whether the transaction has written anything.
    has_written: bool,
    watches: Vec<Watch>,
}

impl Slot {
    fn new(store: &Store) -> Self {
        Self { tx: store.begin(), has_version: false, is_old: false, has_written: false, watches: Vec::new() }
    }

    /// Starts the transaction again.
    fn reset(&mut self) {
        self.tx.reset();
        self.watches.clear();
        (self.has_version, self.is_old, self.has_written) = (false, false, false);
    }

    /// Returns the code of `error`. If the transaction is too old because it asked for that, this must not look like a slow store.
    fn code(&self, error: &Error) -> i32 {
        let code = error.code().expect("a store fails with codes");
        if self.is_old && code == StoreError::TRANSACTION_TOO_OLD.code() { TOO_OLD_AS_ASKED } else { code }
    }
}

/// An interleaving that is being run.
struct Execution<'a> {
    store: &'a Store,
    prefix: &'a [u8],
    slots: Vec<Slot>,
    read_versions: Vec<u64>,
    /// The stamps of all commits so far.
    stamps: Vec<[u8; STAMP_LEN]>,
    /// The number of wakers with which the next operation is polled before the one that waits for it.
    polls: u32,
}

impl Execution<'_> {
    async fn step(&mut self, step: &Step) -> Event {
        let reads = step.op.reads();
        self.polls = (self.polls * 7 + 3) % 41;
        let slot = &mut self.slots[step.slot];
        if reads && slot.is_old && slot.has_written {
            return Event::Silent;
        }
        // Stores differ in when a transaction takes its read version, so the test requests it.
        if reads
            && !slot.has_version
            && let Ok(version) = slot.tx.read_version().await
        {
            slot.has_version = true;
            self.read_versions.push(version);
        }
        slot.has_written |= step.op.writes();
        match &step.op {
            Op::Commit => self.commit(step.slot).await,
            Op::Reset => {
                self.slots[step.slot].reset();
                Event::Silent
            }
            Op::ResetDuringCommit(key, value) => {
                self.reset_during_commit(step.slot).await;
                self.slots[step.slot].tx.set(&self.key(*key), value);
                self.slots[step.slot].has_written = true;
                Event::Silent
            }
            Op::RunTwice(key) => {
                self.run_twice(*key).await;
                Event::Silent
            }
            Op::ReadAtOld => {
                slot.tx.set_read_version(1);
                slot.is_old |= !slot.has_version;
                slot.has_version = true;
                Event::Silent
            }
            Op::ReadAt(which) => {
                if !self.read_versions.is_empty() {
                    let version = self.read_versions[which % self.read_versions.len()];
                    self.slots[step.slot].tx.set_read_version(version);
                    self.slots[step.slot].has_version = true;
                }
                Event::Silent
            }
            Op::Get(key, isolation) => self.get(step.slot, *key, *isolation).await,
            Op::GetOfClient => {
                let found = self.slots[step.slot].tx.get(b"\xff\xff/status/json", Isolation::Snapshot).await;
                Event::Value(found.map(|_| None).map_err(|error| self.slots[step.slot].code(&error)))
            }
            Op::Watch(key) => self.watch(step.slot, *key).await,
            Op::Pages(begin, end, target, reverse, isolation) => {
                let mut read = RangeRead::new(self.range(*begin, *end)).target_bytes(*target);
                read.reverse = *reverse;
                self.get_pages(step.slot, &read, *isolation).await
            }
            Op::Range(begin, end, limit, reverse, isolation) => {
                let mut read = RangeRead::new(self.range(*begin, *end)).limit(*limit);
                read.reverse = *reverse;
                self.get_range(step.slot, &read, *isolation).await
            }
            write => {
                self.write(&self.slots[step.slot].tx, write);
                Event::Silent
            }
        }
    }

    /// Adds a write or a conflict range.
    fn write(&self, tx: &Transaction, op: &Op) {
        match op {
            Op::Set(key, value) => tx.set(&self.key(*key), value),
            Op::Clear(key) => tx.clear(&self.key(*key)),
            Op::ClearRange(begin, end) => tx.clear_range(&self.range(*begin, *end)),
            Op::Atomic(op, key, operand) => tx.atomic(*op, &self.key(*key), operand),
            Op::StampedKey(value) => {
                let key = self.key(STAMPED_KEY);
                let place = u32::try_from(key.len()).expect("keys are short");
                let key = [&key[..], &[0; STAMP_LEN], &place.to_le_bytes()].concat();
                tx.atomic(AtomicOp::SetVersionstampedKey, &key, value);
            }
            Op::StampedValue => {
                let key = self.key(STAMPED_VALUE);
                tx.atomic(AtomicOp::SetVersionstampedValue, &key, &[0; STAMP_LEN + 4]);
            }
            Op::ReadConflict(begin, end) => tx.add_read_conflict(&self.range(*begin, *end)),
            Op::WriteConflict(begin, end) => tx.add_write_conflict(&self.range(*begin, *end)),
            _ => unreachable!("{op:?} is no write"),
        }
    }

    /// Commits, and starts the transaction again.
    async fn commit(&mut self, slot: usize) -> Event {
        let outcome = moved(self.slots[slot].tx.commit(), self.polls).await;
        let outcome = outcome.map_err(|error| self.slots[slot].code(&error));
        self.slots[slot].reset();
        Event::Commit(match outcome {
            Ok(None) => Ok(None),
            Ok(Some(committed)) => {
                self.stamps.push(committed.versionstamp.0);
                self.go_on().await;
                Ok(Some(self.stamps.len() as u64))
            }
            Err(code) => Err(code),
        })
    }

    /// Starts the transaction again while its commit is under way. The result of the commit is not observed.
    async fn reset_during_commit(&mut self, slot: usize) {
        self.slots[slot].reset();
        let tx = &self.slots[slot].tx;
        tx.set(&self.key(b'~'), b"");
        let mut commit = pin!(tx.commit());
        // The commit gets as far as it can without waiting.
        let begun = commit.as_mut().now_or_never();
        tx.reset();
        if begun.is_none() {
            // Whether it was committed is not known, and does not matter.
            drop(commit.await);
        }
    }

    /// Adds 1 to a key in a body that commits by itself, fails, and is tried again.
    async fn run_twice(&mut self, key: u8) {
        let (key, commits) = (self.key(key), Cell::new(0_u8));
        let body = async |tx: Transaction| {
            tx.atomic(AtomicOp::Add, &key, &[1]);
            if commits.get() > 0 {
                return Ok(());
            }
            tx.commit().await?;
            commits.set(1);
            Err(StoreError::TRANSACTION_TOO_OLD.into())
        };
        self.store.run(body).await.expect("a blind write succeeds in the end");
        // No key and no value has the stamps of these two commits.
        self.stamps.extend([[0xff; STAMP_LEN]; 2]);
        self.go_on().await;
    }

    /// Reads a key, and watches it until the transaction ends. On a cluster, what a watch reads depends on timing if its read is still
    /// under way when its own transaction writes the key; an earlier read of the same key avoids that.
    async fn watch(&mut self, slot: usize, key: u8) -> Event {
        let seen = self.get(slot, key, Isolation::Snapshot).await;
        // If the read of the watch fails, only the watch reports that.
        let watch = self.slots[slot].tx.watch(&self.key(key)).await.expect("it is open");
        self.slots[slot].watches.push(watch);
        seen
    }

    /// Commits something outside the keys, so that a read version is always greater than the version of a stamp: whether they can be equal
    /// depends on the store.
    async fn go_on(&self) {
        let set = async |tx: Transaction| {
            tx.set(&self.key(b'~'), b"");
            Ok(())
        };
        // A cluster that is slow or recovering may fail this commit; doing it twice does no harm.
        self.store.run(set).await.expect("a blind write succeeds in the end");
    }

    async fn get(&self, slot: usize, key: u8, isolation: Isolation) -> Event {
        let result = moved(self.slots[slot].tx.get(&self.key(key), isolation), self.polls).await;
        Event::Value(match result {
            Ok(value) => Ok(value.map(|value| self.without_stamps(&value))),
            Err(error) => Err(self.slots[slot].code(&error)),
        })
    }

    async fn get_range(&self, slot: usize, read: &RangeRead, isolation: Isolation) -> Event {
        let result = moved(self.slots[slot].tx.get_range(read, isolation), self.polls).await;
        Event::Rows(match result {
            Ok(page) => {
                let more = page.more && page.rows.len() != read.limit;
                Ok((self.to_rows(&page.rows), more))
            }
            Err(error) => Err(self.slots[slot].code(&error)),
        })
    }

    /// Reads all rows in pages. Stores differ in how many rows are in a page.
    async fn get_pages(&self, slot: usize, read: &RangeRead, isolation: Isolation) -> Event {
        let (mut read, mut rows) = (read.clone(), Vec::new());
        loop {
            let page = match self.slots[slot].tx.get_range(&read, isolation).await {
                Ok(page) => page,
                Err(error) => return Event::Rows(Err(self.slots[slot].code(&error))),
            };
            rows.extend(self.to_rows(&page.rows));
            match page.rows.last() {
                Some((key, _)) if page.more && read.reverse => read.range.end = key.clone(),
                Some((key, _)) if page.more => read.range.begin = [key, &[0][..]].concat().into(),
                _ => return Event::Rows(Ok((rows, page.more))),
            }
        }
    }

    async fn rows(&self) -> Vec<Row> {
        let all = KeyRange::new(self.key(LETTERS[0]), self.key(b'~'));
        let read = RangeRead::new(all);
        let page = self.store.run(async |tx| tx.get_range(&read, Isolation::Snapshot).await).await;
        self.to_rows(&page.expect("a new transaction can read").rows)
    }

    /// Converts `rows` to the form of a trace.
    fn to_rows(&self, rows: &[notibus::store::Row]) -> Vec<Row> {
        rows.iter()
            .map(|(key, value)| {
                let key = key.strip_prefix(self.prefix).expect("rows have the prefix");
                (self.without_stamps(key), self.without_stamps(value))
            })
            .collect()
    }

    /// Returns `bytes` with the numbers of commits instead of their stamps.
    fn without_stamps(&self, bytes: &[u8]) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        for place in 0..(bytes.len() + 1).saturating_sub(STAMP_LEN) {
            let part = &mut bytes[place..place + STAMP_LEN];
            if let Some(number) = self.stamps.iter().position(|stamp| stamp == part) {
                part.copy_from_slice(&stand_in(number as u64 + 1));
            }
        }
        bytes
    }

    fn key(&self, letter: u8) -> Vec<u8> {
        [self.prefix, &[letter]].concat()
    }

    /// Returns the keys from one letter up to but not including another.
    fn range(&self, begin: u8, end: u8) -> KeyRange {
        KeyRange::new(self.key(begin), self.key(end))
    }
}
