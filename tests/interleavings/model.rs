//! The model: FoundationDB's semantics, written as naively as possible.
//!
//! It keeps the whole state of each version, and each transaction as the list of its operations. To answer a question about a key, it walks
//! that list from its start. Ranges are sets of points: between two neighbouring keys that were ever named, nothing can differ, so one
//! point stands for all keys between them.

use std::collections::{BTreeMap, BTreeSet};

use notibus::store::{AtomicOp, Isolation};

use crate::{
    steps::{Op, SLOTS, STAMPED_KEY, STAMPED_VALUE, Step},
    trace::{Event, Row, STAMP_LEN, TOO_OLD_AS_ASKED, Trace, stand_in},
};

/// Keys from the first up to but not including the second.
type Span = (Vec<u8>, Vec<u8>);

/// The expected observations.
pub(crate) fn predict(steps: &[Step]) -> Trace {
    let mut model = Model {
        states: vec![BTreeMap::new()],
        written: vec![Vec::new()],
        slots: vec![Slot::default(); SLOTS],
        read_versions: Vec::new(),
    };
    Trace {
        events: steps.iter().map(|step| model.step(step)).collect(),
        rows: model.newest().clone().into_iter().collect(),
    }
}

struct Model {
    /// All rows after each commit; the first entry is before all commits.
    states: Vec<BTreeMap<Vec<u8>, Vec<u8>>>,
    /// What each commit wrote.
    written: Vec<Vec<Span>>,
    slots: Vec<Slot>,
    read_versions: Vec<usize>,
}

#[derive(Debug, Clone, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a failure of its own")]
struct Slot {
    /// How many commits the transaction sees, once it has read.
    version: Option<usize>,
    /// What the transaction has written so far.
    log: Vec<Write>,
    /// What the transaction has read, each with the length of the log at that time.
    reads: Vec<(Span, usize)>,
    declared: Vec<Span>,
    /// The code of its first bad write.
    bad: Option<i32>,
    /// Whether a read met a pending stamp, which also fails the commit.
    met_pending: bool,
    /// Whether the transaction reads at a version that is older than any transaction may be.
    is_old: bool,
    /// Whether it has written anything.
    has_written: bool,
    /// Whether an operation failed because the transaction is too old, which also fails the commit.
    has_failed: bool,
}

#[derive(Debug, Clone)]
enum Write {
    Set(Vec<u8>, Vec<u8>),
    Clear(Span),
    /// Applies an operation to a key.
    Atomic(AtomicOp, Vec<u8>, Vec<u8>),
    /// Sets a key with a stamp, which will be somewhere in the span.
    StampedKey(Span, Vec<u8>),
    /// Sets a key to a stamp.
    StampedValue(Vec<u8>),
}

/// What a transaction knows about a key.
#[derive(Debug, Clone)]
struct Knowledge {
    value: Option<Vec<u8>>,
    /// Whether the value may be a stamp that is not known yet.
    is_unreadable: bool,
    /// Whether the value follows from the transaction alone.
    is_own: bool,
}

impl Slot {
    /// Returns what the transaction knows about `key` after the first `len` of its writes, if the store has `stored`.
    fn knows(&self, key: &[u8], stored: Option<&Vec<u8>>, len: usize) -> Knowledge {
        let mut known = Knowledge { value: stored.cloned(), is_unreadable: false, is_own: false };
        for write in &self.log[..len] {
            match write {
                Write::Set(at, value) if at == key => {
                    known.value = Some(value.clone());
                    known.is_own = true;
                }
                Write::Clear(span) if holds(span, key) => {
                    known = Knowledge { value: None, is_unreadable: false, is_own: true };
                }
                Write::Atomic(op, at, operand) if at == key => {
                    known.value = apply(*op, known.value, operand);
                }
                Write::StampedKey(span, _) if holds(span, key) => {
                    known.is_unreadable = true;
                    known.is_own = false;
                }
                Write::StampedValue(at) if at == key => {
                    known.is_unreadable = true;
                    known.is_own = true;
                }
                _ => {}
            }
        }
        known
    }

    /// Returns every key at which the effect of this transaction's writes may change.
    fn points(&self) -> BTreeSet<Vec<u8>> {
        let mut points = BTreeSet::new();
        for write in &self.log {
            match write {
                Write::Set(key, _) | Write::Atomic(_, key, _) | Write::StampedValue(key) => {
                    points.extend([key.clone(), behind(key)]);
                }
                Write::Clear((begin, end)) | Write::StampedKey((begin, end), _) => {
                    points.extend([begin.clone(), end.clone()]);
                }
            }
        }
        points
    }

    /// Returns the span between two letters, `None` if it is empty; remembers an error if it is inverted.
    fn check(&mut self, (begin, end): (u8, u8)) -> Option<Span> {
        if begin > end {
            self.bad.get_or_insert(2005);
        }
        (begin < end).then(|| (vec![begin], vec![end]))
    }
}

impl Model {
    /// Returns the expected observation of one step.
    fn step(&mut self, step: &Step) -> Event {
        let slot = step.slot;
        if step.op.reads() && self.slots[slot].is_old && self.slots[slot].has_written {
            return Event::Silent;
        }
        self.slots[slot].has_written |= step.op.writes();
        if step.op.reads() {
            let newest = self.states.len() - 1;
            let reader = &mut self.slots[slot];
            if reader.bad.is_none() && reader.version.is_none() && !reader.is_old {
                reader.version = Some(newest);
                self.read_versions.push(newest);
            }
        }
        match &step.op {
            Op::Get(key, isolation) => Event::Value(self.get(slot, *key, *isolation)),
            Op::Range(begin, end, limit, reverse, isolation) => {
                let span = (vec![*begin], vec![*end]);
                Event::Rows(self.range(slot, &span, *limit, *reverse, *isolation))
            }
            Op::Pages(begin, end, _, reverse, isolation) => {
                let span = (vec![*begin], vec![*end]);
                Event::Rows(self.range(slot, &span, usize::MAX, *reverse, *isolation))
            }
            Op::GetOfClient => Event::Value(Err(self.slots[slot].bad.unwrap_or(2004))),
            Op::Watch(key) => {
                let seen = self.get(slot, *key, Isolation::Snapshot);
                self.watch(slot, *key);
                Event::Value(seen)
            }
            Op::Commit => Event::Commit(self.commit(slot)),
            Op::ResetDuringCommit(key, value) => {
                self.slots[slot] = Slot { has_written: true, ..Slot::default() };
                self.write(slot, &Op::Set(*key, value.clone()));
                Event::Silent
            }
            Op::RunTwice(key) => {
                for _ in 0..2 {
                    let add = Write::Atomic(AtomicOp::Add, vec![*key], vec![1]);
                    self.land(Slot { log: vec![add], ..Slot::default() });
                }
                Event::Silent
            }
            Op::ReadAtOld => {
                let reader = &mut self.slots[slot];
                if reader.version.is_some() || reader.is_old {
                    reader.bad.get_or_insert(2010);
                }
                reader.is_old |= reader.version.is_none();
                Event::Silent
            }
            Op::Reset => {
                self.slots[slot] = Slot::default();
                Event::Silent
            }
            Op::ReadAt(which) => {
                let reader = &mut self.slots[slot];
                match reader.version {
                    _ if self.read_versions.is_empty() => {}
                    None if reader.is_old => _ = reader.bad.get_or_insert(2010),
                    None => reader.version = Some(self.read_versions[which % self.read_versions.len()]),
                    Some(_) => _ = reader.bad.get_or_insert(2010),
                }
                Event::Silent
            }
            write => {
                self.write(slot, write);
                Event::Silent
            }
        }
    }

    /// Notes a write or a conflict range.
    fn write(&mut self, slot: usize, op: &Op) {
        let slot = &mut self.slots[slot];
        match op {
            Op::Set(key, value) => slot.log.push(Write::Set(vec![*key], value.clone())),
            Op::Clear(key) => slot.log.push(Write::Clear((vec![*key], vec![*key, 0]))),
            Op::ClearRange(begin, end) => {
                let span = slot.check((*begin, *end));
                slot.log.extend(span.map(Write::Clear));
            }
            Op::Atomic(op, key, operand) => {
                slot.log.push(Write::Atomic(*op, vec![*key], operand.clone()));
            }
            Op::StampedKey(value) => {
                // No stamp of this transaction can be older than its read version, if it has one by now.
                let first = slot.version.map_or([0; STAMP_LEN], |version| stand_in(version as u64 + 1));
                let begin = [&[STAMPED_KEY], &first[..]].concat();
                let end = [&[STAMPED_KEY], &[0xff; STAMP_LEN][..], &[0]].concat();
                slot.log.push(Write::StampedKey((begin, end), value.clone()));
            }
            Op::StampedValue => slot.log.push(Write::StampedValue(vec![STAMPED_VALUE])),
            Op::ReadConflict(begin, end) => {
                let len = slot.log.len();
                let span = slot.check((*begin, *end));
                slot.reads.extend(span.map(|span| (span, len)));
            }
            Op::WriteConflict(begin, end) => {
                let span = slot.check((*begin, *end));
                slot.declared.extend(span);
            }
            _ => unreachable!("{op:?} is no write"),
        }
    }

    /// Returns the rows that a transaction sees under its own writes.
    fn seen(&self, slot: usize) -> &BTreeMap<Vec<u8>, Vec<u8>> {
        &self.states[self.slots[slot].version.expect("it has read")]
    }

    /// Returns the rows after all commits.
    fn newest(&self) -> &BTreeMap<Vec<u8>, Vec<u8>> {
        self.states.last().expect("there is always a state")
    }

    fn get(&mut self, slot: usize, key: u8, isolation: Isolation) -> Result<Option<Vec<u8>>, i32> {
        self.readable(slot)?;
        let key = vec![key];
        let len = self.slots[slot].log.len();
        let known = self.slots[slot].knows(&key, self.seen(slot).get(&key), len);
        if known.is_unreadable {
            self.slots[slot].met_pending = true;
            return Err(1036);
        }
        if isolation == Isolation::Serializable {
            let end = behind(&key);
            self.slots[slot].reads.push(((key, end), len));
        }
        Ok(known.value)
    }

    /// Fails if a transaction cannot read.
    fn readable(&mut self, slot: usize) -> Result<(), i32> {
        let slot = &mut self.slots[slot];
        slot.has_failed |= slot.is_old;
        slot.bad.or(slot.is_old.then_some(TOO_OLD_AS_ASKED)).map_or(Ok(()), Err)
    }

    /// Watches a key, which reads it. If the read fails, only the watch fails.
    fn watch(&mut self, slot: usize, key: u8) {
        let len = self.slots[slot].log.len();
        self.slots[slot].reads.push(((vec![key], behind(&[key])), len));
    }

    fn range(
        &mut self,
        slot: usize,
        span: &Span,
        limit: usize,
        reverse: bool,
        isolation: Isolation,
    ) -> Result<(Vec<Row>, bool), i32> {
        // Nothing has to be read for an empty range.
        if self.slots[slot].bad.is_some() || span.0 < span.1 {
            self.readable(slot)?;
        }
        if self.slots[slot].is_old {
            return Ok((Vec::new(), false));
        }
        let len = self.slots[slot].log.len();
        let mut points = self.slots[slot].points();
        points.insert(span.0.clone());
        points.extend(self.seen(slot).keys().flat_map(|key| [key.clone(), behind(key)]));
        let mut points: Vec<_> = points.into_iter().filter(|point| holds(span, point)).collect();
        if reverse {
            points.reverse();
        }

        let mut rows: Vec<Row> = Vec::new();
        for point in points {
            let known = self.slots[slot].knows(&point, self.seen(slot).get(&point), len);
            if known.is_unreadable {
                self.slots[slot].met_pending = true;
                return Err(1036);
            }
            rows.extend(known.value.map(|value| (point, value)));
            if rows.len() == limit {
                break;
            }
        }

        let mut read = span.clone();
        if rows.len() == limit {
            let last = rows[limit - 1].0.clone();
            if reverse {
                read.0 = last;
            } else {
                read.1 = behind(&last);
            }
        }
        if isolation == Isolation::Serializable {
            self.slots[slot].reads.push((read, len));
        }
        Ok((rows, false))
    }

    /// Whether a transaction has read any key that was written since its read version, unless it had written that key itself before.
    fn conflicts(&self, slot: &Slot) -> bool {
        let Some(version) = slot.version else {
            return false;
        };
        let written: Vec<_> = self.written[version + 1..].iter().flatten().collect();
        slot.reads.iter().any(|(read, len)| {
            let mut points = slot.points();
            points.insert(read.0.clone());
            points.extend(written.iter().map(|span| span.0.clone()));
            points.iter().any(|point| {
                holds(read, point)
                    && written.iter().any(|span| holds(span, point))
                    && !slot.knows(point, None, *len).is_own
            })
        })
    }

    /// Commits, and starts the transaction again.
    fn commit(&mut self, slot: usize) -> Result<Option<u64>, i32> {
        let slot = std::mem::take(&mut self.slots[slot]);
        if let Some(code) = slot.bad {
            return Err(code);
        }
        if slot.met_pending {
            return Err(1036);
        }
        if slot.has_failed {
            return Err(TOO_OLD_AS_ASKED);
        }
        if slot.log.is_empty() && slot.declared.is_empty() {
            return Ok(None);
        }
        if slot.is_old {
            return Err(TOO_OLD_AS_ASKED);
        }
        if self.conflicts(&slot) {
            return Err(1020);
        }
        Ok(Some(self.land(slot)))
    }

    /// Applies the writes of `slot` to the store. Returns the number of the commit.
    fn land(&mut self, slot: Slot) -> u64 {
        let number = self.states.len() as u64;
        let mut rows = self.newest().clone();
        let mut written = slot.declared;
        for write in slot.log {
            let (key, value) = match write {
                Write::Clear(span) => {
                    rows.retain(|key, _| !holds(&span, key));
                    written.push(span);
                    continue;
                }
                Write::Set(key, value) => (key, Some(value)),
                Write::Atomic(op, key, operand) => {
                    let value = apply(op, rows.get(&key).cloned(), &operand);
                    (key, value)
                }
                Write::StampedKey(_, value) => {
                    ([&[STAMPED_KEY], &stand_in(number)[..]].concat(), Some(value))
                }
                Write::StampedValue(key) => (key, Some(stand_in(number).to_vec())),
            };
            written.push((key.clone(), behind(&key)));
            match value {
                Some(value) => rows.insert(key, value),
                None => rows.remove(&key),
            };
        }
        self.states.push(rows);
        self.written.push(written);
        number
    }
}

/// Whether `key` is in `span`.
fn holds((begin, end): &Span, key: &[u8]) -> bool {
    &begin[..] <= key && key < &end[..]
}

/// Returns the first key after `key`.
fn behind(key: &[u8]) -> Vec<u8> {
    [key, &[0]].concat()
}

/// Returns `bytes`, cut or extended to `len` bytes, as a little-endian number.
fn number(bytes: &[u8], len: usize) -> u64 {
    (0..len).map(|place| u64::from(*bytes.get(place).unwrap_or(&0)) << (8 * place)).sum()
}

/// Returns the result of an operation on a value. Operands have at most 7 bytes.
fn apply(op: AtomicOp, value: Option<Vec<u8>>, operand: &[u8]) -> Option<Vec<u8>> {
    let len = operand.len();
    let as_bytes = |number: u64| Some(number.to_le_bytes()[..len].to_vec());
    let Some(value) = value else {
        return (op != AtomicOp::CompareAndClear).then(|| operand.to_vec());
    };
    let (old, new) = (number(&value, len), number(operand, len));
    match op {
        AtomicOp::Add => as_bytes(old + new),
        AtomicOp::Max => as_bytes(old.max(new)),
        AtomicOp::Min => as_bytes(old.min(new)),
        AtomicOp::ByteMax => Some(value.max(operand.to_vec())),
        AtomicOp::ByteMin => Some(value.min(operand.to_vec())),
        AtomicOp::CompareAndClear => (value != operand).then_some(value),
        _ => unreachable!("{op:?} has steps of its own"),
    }
}
