//! [`Conflicts`]: the keys and ranges that were written lately, with their versions.
//!
//! The resolver asks one question: was anything of this range written after that version? Single keys, by far the
//! most writes, are kept in *generations*: ordered maps that each take a few thousand writes in the order of their
//! versions. A write goes into a map that is small enough to stay in the processor's cache, however many writes there
//! were lately. Old writes are dropped with their whole generation. And a transaction is usually young, so it has to
//! search only the last one or two. Written ranges (cleared ranges and explicit write conflicts) are kept in a step
//! function over the key space.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Bound,
};

use bytes::Bytes;

use super::rows::Rows;
use crate::store::KeyRange;

/// The bounds of `range` for an ordered map.
pub(super) fn bounds(range: &KeyRange) -> (Bound<&[u8]>, Bound<&[u8]>) {
    (Bound::Included(&range.begin[..]), Bound::Excluded(&range.end[..]))
}

/// One entry of a read-conflict set.
#[derive(Debug, Clone)]
pub(super) enum ReadConflict {
    /// A single key.
    Key(Bytes),
    /// A range.
    Range(KeyRange),
}

impl ReadConflict {
    pub fn range(&self) -> KeyRange {
        match self {
            Self::Key(key) => KeyRange::key(key),
            Self::Range(range) => range.clone(),
        }
    }
}

/// Keys that were written one after the other.
#[derive(Debug, Default)]
struct Generation {
    /// The keys, each with the version of its newest write in this generation.
    keys: Rows,
    /// The newest version among them.
    newest: u64,
}

impl Generation {
    /// Whether a key of `read` was written after `version`.
    fn is_written_after(&self, read: &ReadConflict, version: u64) -> bool {
        let is_later = |at: &[u8]| at > &version.to_be_bytes()[..];
        match read {
            ReadConflict::Key(key) => self.keys.get(key).is_some_and(is_later),
            ReadConflict::Range(range) => self.keys.range(range, false).any(|(_, at)| is_later(at)),
        }
    }
}

/// The newest write of every key and range since some version.
#[derive(Debug, Default)]
pub(super) struct Conflicts {
    /// The written single keys, oldest generation first. Versions do not decrease from one to the next.
    generations: VecDeque<Generation>,
    /// The version of the newest written range over each key: a value holds from its key up to the next one.
    ranges: BTreeMap<Bytes, u64>,
    /// The number of steps after the last sweep; the next sweep comes at twice as many.
    steps_swept: usize,
}

/// The most keys of a generation.
const GENERATION_KEYS_MAX: usize = 4_096;

/// Fewer steps than this are not worth sweeping.
const STEPS_MIN: usize = 64;

impl Conflicts {
    /// Whether anything of `read` was written after `version`.
    pub fn written_after(&self, read: &ReadConflict, version: u64) -> bool {
        let is_written = || self.generations_after(version).any(|of| of.is_written_after(read, version));
        match read {
            ReadConflict::Key(key) => is_written() || self.step_at(key) > version,
            ReadConflict::Range(range) if range.is_empty() => false,
            ReadConflict::Range(range) => {
                is_written()
                    || self.step_at(&range.begin) > version
                    || self.ranges.range::<[u8], _>(bounds(range)).any(|(_, &written)| written > version)
            }
        }
    }

    /// The generations with a key that was written after `version`.
    fn generations_after(&self, version: u64) -> impl Iterator<Item = &Generation> {
        self.generations.iter().rev().take_while(move |of| of.newest > version)
    }

    /// The version of the newest written range over `key`; 0 if there is none.
    fn step_at(&self, key: &[u8]) -> u64 {
        let up_to = (Bound::Unbounded, Bound::Included(key));
        self.ranges.range::<[u8], _>(up_to).next_back().map_or(0, |(_, &version)| version)
    }

    /// Notes that `key` was written at `version`, which is not below the version of the previous write.
    pub fn key_written(&mut self, key: &[u8], version: u64) {
        if self.generations.back().is_none_or(|last| last.keys.len() >= GENERATION_KEYS_MAX) {
            self.generations.push_back(Generation::default());
        }
        let last = self.generations.back_mut().expect("there is one by now");
        last.keys.change(key, |_| Some(version.to_be_bytes()));
        last.newest = version;
    }

    /// Notes that all of `range` was written at `version`.
    pub fn range_written(&mut self, range: &KeyRange, version: u64) {
        if range.is_empty() {
            return;
        }
        let behind = self.step_at(&range.end);
        let covered: Vec<_> =
            self.ranges.range::<[u8], _>(bounds(range)).map(|(key, _)| key.clone()).collect();
        for key in covered {
            self.ranges.remove(&key);
        }
        self.ranges.insert(range.begin.clone(), version);
        self.ranges.entry(range.end.clone()).or_insert(behind);
    }

    /// Forgets writes at or before `version`, once there are enough of them.
    pub fn forget(&mut self, version: u64) {
        while self.generations.pop_front_if(|of| of.newest <= version).is_some() {}
        self.forget_ranges(version);
    }

    /// Forgets ranges written at or before `version`, once there are enough of them.
    fn forget_ranges(&mut self, version: u64) {
        if self.ranges.len() < STEPS_MIN.max(2 * self.steps_swept) {
            return;
        }
        let mut before = 0;
        self.ranges.retain(|_, step| {
            if *step <= version {
                *step = 0;
            }
            let changes = *step != before;
            before = *step;
            changes
        });
        self.steps_swept = self.ranges.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(begin: &'static str, end: &'static str) -> ReadConflict {
        ReadConflict::Range(KeyRange::new(begin, end))
    }

    #[test]
    fn a_written_range_covers_its_keys_and_no_others() {
        let mut conflicts = Conflicts::default();
        conflicts.range_written(&KeyRange::new("b", "d"), 5);
        conflicts.range_written(&KeyRange::new("c", "f"), 7);
        for (key, newest) in [("a", 0), ("b", 5), ("bz", 5), ("c", 7), ("ez", 7), ("f", 0)] {
            let key = ReadConflict::Key(key.into());
            assert!(!conflicts.written_after(&key, newest), "{key:?}");
            assert!(newest == 0 || conflicts.written_after(&key, newest - 1), "{key:?}");
        }
        assert!(conflicts.written_after(&range("a", "bb"), 4));
        assert!(!conflicts.written_after(&range("a", "b"), 0));
        assert!(conflicts.written_after(&range("d", "e"), 6), "begins inside a written range");
        assert!(!conflicts.written_after(&range("f", "z"), 0));
    }

    #[test]
    fn forgetting_keeps_what_is_newer() {
        let mut conflicts = Conflicts::default();
        let last = 3 * GENERATION_KEYS_MAX as u64;
        for version in 1..=last {
            conflicts.key_written(format!("{version:06}").as_bytes(), version);
            conflicts.key_written(b"hot", version);
        }
        let key = |version: u64| ReadConflict::Key(format!("{version:06}").into());
        let written = |conflicts: &Conflicts, begin: u64, end: u64, after: u64| {
            let range = KeyRange::new(format!("{begin:06}"), format!("{end:06}"));
            conflicts.written_after(&ReadConflict::Range(range), after)
        };
        for version in [1, 2, last / 2, last] {
            assert!(conflicts.written_after(&key(version), version - 1));
            assert!(!conflicts.written_after(&key(version), version));
            assert!(written(&conflicts, version, version + 1, version - 1));
            assert!(!written(&conflicts, 1, version + 1, version));
        }
        assert!(conflicts.written_after(&ReadConflict::Key("hot".into()), last - 1));
        conflicts.forget(last / 2);
        assert!(conflicts.written_after(&key(last / 2 + 1), last / 2), "what is newer stays");
        assert!(!conflicts.written_after(&key(1), 0), "what is older is gone with its generation");
        conflicts.forget(last);
        assert!(conflicts.generations.is_empty());

        for n in 0..100_u64 {
            let begin = format!("{n:03}");
            conflicts.range_written(&KeyRange::new(begin.clone(), begin + "x"), n + 1);
        }
        conflicts.forget(90);
        assert!(!conflicts.written_after(&ReadConflict::Key("089".into()), 0));
        assert!(conflicts.written_after(&ReadConflict::Key("090".into()), 0));
        assert!(conflicts.ranges.len() < 30, "{} steps are left", conflicts.ranges.len());
    }
}
