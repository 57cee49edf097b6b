//! [`Conflicts`]: which keys and ranges were written lately, and at which version.
//!
//! The resolver asks one question: was anything of this range written after that version? Single keys, by far the most
//! writes, are kept in an ordered map; written ranges (cleared ranges and explicit write conflicts) in a step function
//! over the key space.

use std::{collections::BTreeMap, ops::Bound};

use bytes::Bytes;

use crate::store::KeyRange;

/// The bounds of `range` as an ordered map takes them.
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
    /// The keys that it covers.
    pub fn range(&self) -> KeyRange {
        match self {
            Self::Key(key) => KeyRange::key(key),
            Self::Range(range) => range.clone(),
        }
    }
}

/// The newest write of every key and range since some version.
#[derive(Debug, Default)]
pub(super) struct Conflicts {
    /// Version of the newest write of each single key.
    keys: BTreeMap<Bytes, u64>,
    /// Version of the newest written range over each key: the value holds from its key up to the next one.
    ranges: BTreeMap<Bytes, u64>,
    /// Steps left by the last sweep; the next one comes when there are twice as many.
    steps_swept: usize,
}

/// Fewer steps than this are not worth sweeping.
const STEPS_MIN: usize = 64;

impl Conflicts {
    /// Whether anything of `read` was written after `version`.
    pub fn written_after(&self, read: &ReadConflict, version: u64) -> bool {
        match read {
            ReadConflict::Key(key) => {
                self.keys.get(key).is_some_and(|&written| written > version) || self.step_at(key) > version
            }
            ReadConflict::Range(range) if range.is_empty() => false,
            ReadConflict::Range(range) => {
                self.keys.range::<[u8], _>(bounds(range)).any(|(_, &written)| written > version)
                    || self.step_at(&range.begin) > version
                    || self.ranges.range::<[u8], _>(bounds(range)).any(|(_, &written)| written > version)
            }
        }
    }

    /// The version of the newest written range over `key`; 0 if there is none.
    fn step_at(&self, key: &[u8]) -> u64 {
        let up_to = (Bound::Unbounded, Bound::Included(key));
        self.ranges.range::<[u8], _>(up_to).next_back().map_or(0, |(_, &version)| version)
    }

    /// Notes that `key` was written at `version`.
    pub fn key_written(&mut self, key: Bytes, version: u64) {
        self.keys.insert(key, version);
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

    /// Forgets that `key` was written at `version`, if that is its newest write.
    pub fn forget_key(&mut self, key: &Bytes, version: u64) {
        if self.keys.get(key) == Some(&version) {
            self.keys.remove(key);
        }
    }

    /// Forgets the ranges written at or before `version`, once there are enough to be worth it.
    pub fn forget_ranges(&mut self, version: u64) {
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
        conflicts.key_written("k".into(), 3);
        conflicts.key_written("k".into(), 4);
        conflicts.forget_key(&"k".into(), 3);
        assert!(conflicts.written_after(&ReadConflict::Key("k".into()), 3));
        conflicts.forget_key(&"k".into(), 4);
        assert!(!conflicts.written_after(&ReadConflict::Key("k".into()), 0));

        for n in 0..100_u64 {
            let begin = format!("{n:03}");
            conflicts.range_written(&KeyRange::new(begin.clone(), begin + "x"), n + 1);
        }
        conflicts.forget_ranges(90);
        assert!(!conflicts.written_after(&ReadConflict::Key("089".into()), 0));
        assert!(conflicts.written_after(&ReadConflict::Key("090".into()), 0));
        assert!(conflicts.ranges.len() < 30, "{} steps are left", conflicts.ranges.len());
    }
}
