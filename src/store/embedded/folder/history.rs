//! [`History`]: the versions that a folder has used.
//!
//! The versions of each opening form an interval that begins at the wall clock, or after the earlier versions. A position outside all
//! intervals was given out by another store: this folder before an older copy took its place, or a store in memory that is gone.

use crate::base::{encoding::Reader, error::Result};

/// How many openings are remembered. Positions from earlier ones count as those of another store.
const OPENINGS_MAX: usize = 4_096;

/// The versions that a folder has used, as one interval for each opening, oldest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct History(Vec<(u64, u64)>);

impl History {
    /// Begins an opening whose versions continue from `version`.
    pub fn opened(&mut self, version: u64) {
        self.0.push((version, version));
        if self.0.len() > OPENINGS_MAX {
            self.0.remove(0);
        }
    }

    /// Extends the current opening to `version`.
    pub fn reached(&mut self, version: u64) {
        if let Some((_, last)) = self.0.last_mut() {
            *last = version;
        }
    }

    /// Whether the folder has used `version`.
    pub fn contains(&self, version: u64) -> bool {
        self.end_of(version).is_some()
    }

    /// Returns the first and the last version of each opening, oldest first.
    pub fn openings(&self) -> &[(u64, u64)] {
        &self.0
    }

    /// Returns the last version of the opening that used `version`.
    pub fn end_of(&self, version: u64) -> Option<u64> {
        let later = self.0.partition_point(|(first, _)| *first <= version);
        let (_, last) = self.0[..later].last()?;
        (version <= *last).then_some(*last)
    }

    /// Appends the stored form to `out`.
    pub fn append_to(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&(self.0.len() as u64).to_be_bytes());
        for (first, last) in &self.0 {
            out.extend_from_slice(&first.to_be_bytes());
            out.extend_from_slice(&last.to_be_bytes());
        }
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("history", bytes);
        let count = reader.u64()?;
        let mut intervals = Vec::new();
        for _ in 0..count {
            intervals.push((reader.u64()?, reader.u64()?));
        }
        if !intervals.iter().all(|(first, last)| first <= last)
            || !intervals.is_sorted_by(|(_, last), (next, _)| last < next)
        {
            return Err(reader.corrupt("its intervals are not in order"));
        }
        reader.finish()?;
        Ok(Self(intervals))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_of_a_history_if_an_opening_has_used_it() {
        let mut history = History::default();
        assert!(!history.contains(0));
        for first in [10, 100, 1_000] {
            history.opened(first);
            history.reached(first + 5);
        }
        for (version, is_of_it) in
            [(9, false), (10, true), (15, true), (16, false), (99, false), (105, true), (1_006, false)]
        {
            assert_eq!(history.contains(version), is_of_it, "{version}");
        }
        let mut bytes = Vec::new();
        history.append_to(&mut bytes);
        assert_eq!(History::from_bytes(&bytes).unwrap(), history);
        bytes[15] = 200;
        assert!(History::from_bytes(&bytes).is_err());
    }

    #[test]
    fn only_so_many_openings_are_remembered() {
        let mut history = History::default();
        (1..=OPENINGS_MAX as u64 + 1).for_each(|n| history.opened(n * 10));
        assert!(!history.contains(10) && history.contains(20));
    }
}
