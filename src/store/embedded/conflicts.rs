//! [`ReadConflict`]: what a transaction read; and [`WrittenRanges`]: the ranges that were written recently.
//!
//! Written ranges (cleared ranges and explicit write conflicts) are kept in a step function over the key space. Single keys, by far the
//! most frequent writes, are in [`Recent`](super::recent::Recent).

use std::{collections::BTreeMap, ops::Bound};

use bytes::Bytes;

use crate::store::KeyRange;

/// Returns the bounds of `range` for an ordered map.
pub(super) fn bounds(range: &KeyRange) -> (Bound<&[u8]>, Bound<&[u8]>) {
    (Bound::Included(&range.begin[..]), Bound::Excluded(&range.end[..]))
}

/// One entry of a read-conflict set.
#[derive(Debug, Clone)]
pub(super) enum ReadConflict {
    Key(Bytes),
    Range(KeyRange),
}

impl ReadConflict {
    pub fn range(&self) -> KeyRange {
        match self {
            Self::Key(key) => KeyRange::key(key),
            Self::Range(range) => range.clone(),
        }
    }

    pub fn contains(&self, key: &[u8]) -> bool {
        match self {
            Self::Key(read) => read == key,
            Self::Range(range) => range.contains(key),
        }
    }
}

/// The newest write of every range since some version.
#[derive(Debug, Default)]
pub(super) struct WrittenRanges {
    /// The version of the newest written range over each key: a value holds from its key up to the next one.
    ranges: BTreeMap<Bytes, u64>,
    /// The number of steps after the last sweep; the next sweep comes when there are twice as many.
    steps_swept: usize,
}

/// Fewer steps than this are not worth sweeping.
const STEPS_MIN: usize = 64;

impl WrittenRanges {
    /// Whether anything in `read` was written after `version`.
    pub fn written_after(&self, read: &ReadConflict, version: u64) -> bool {
        match read {
            ReadConflict::Key(key) => self.step_at(key) > version,
            ReadConflict::Range(range) if range.is_empty() => false,
            ReadConflict::Range(range) => {
                self.step_at(&range.begin) > version
                    || self.ranges.range::<[u8], _>(bounds(range)).any(|(_, &written)| written > version)
            }
        }
    }

    /// Returns the version of the newest written range over `key`; 0 if there is none.
    fn step_at(&self, key: &[u8]) -> u64 {
        let up_to = (Bound::Unbounded, Bound::Included(key));
        self.ranges.range::<[u8], _>(up_to).next_back().map_or(0, |(_, &version)| version)
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

    /// Forgets ranges written at or before `version`, once there are enough of them.
    pub fn forget(&mut self, version: u64) {
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
        let mut written = WrittenRanges::default();
        written.range_written(&KeyRange::new("b", "d"), 5);
        written.range_written(&KeyRange::new("c", "f"), 7);
        for (key, newest) in [("a", 0), ("b", 5), ("bz", 5), ("c", 7), ("ez", 7), ("f", 0)] {
            let key = ReadConflict::Key(key.into());
            assert!(!written.written_after(&key, newest), "{key:?}");
            assert!(newest == 0 || written.written_after(&key, newest - 1), "{key:?}");
        }
        assert!(written.written_after(&range("a", "bb"), 4));
        assert!(!written.written_after(&range("a", "b"), 0));
        assert!(written.written_after(&range("d", "e"), 6), "begins inside a written range");
        assert!(!written.written_after(&range("f", "z"), 0));
    }

    #[test]
    fn forgetting_keeps_what_is_newer() {
        let mut written = WrittenRanges::default();
        for n in 0..100_u64 {
            let begin = format!("{n:03}");
            written.range_written(&KeyRange::new(begin.clone(), begin + "x"), n + 1);
        }
        written.forget(90);
        assert!(!written.written_after(&ReadConflict::Key("089".into()), 0));
        assert!(written.written_after(&ReadConflict::Key("090".into()), 0));
        assert!(written.ranges.len() < 30, "{} steps are left", written.ranges.len());
    }
}
