//! [`Recent`]: the groups that were committed within the lifetime of a transaction.
//!
//! The resolver asks one question: was this key or range written after that version? Readers of an earlier version ask what the later
//! groups replaced. The writes of the groups are in *blocks* of a few thousand writes, in the order of the versions. The last block is
//! open: a commit adds its writes at the end. Most transactions are young, and are compared with only the last few writes, one by one. A
//! full block is sorted once, for older transactions: immediately if any transaction was compared with it while it was open, otherwise for
//! the first transaction with many reads. A block is dropped as a whole.
//!
//! Cleared ranges and explicit write conflicts are in [`WrittenRanges`](super::conflicts::WrittenRanges).

use std::{collections::VecDeque, sync::Arc, time::Duration};

use super::{conflicts::ReadConflict, rows::Rows, undo::Undo};
use crate::store::TRANSACTION_LIFETIME;

/// The maximum number of bytes of writes in a block of several groups. Small in tests, so that blocks fill up.
const BLOCK_LEN_MAX: usize = if cfg!(test) { 2_048 } else { 1 << 17 };

#[derive(Debug)]
struct Group {
    version: u64,
    /// When the group was published.
    at: Duration,
    /// When the previous version was last given out.
    given_out_before: Duration,
    /// Where the writes of the group begin in their block.
    begin: usize,
}

/// The writes of consecutive groups.
#[derive(Debug, Default, Clone)]
struct Block {
    undo: Undo,
    /// The versions of the first and the last group.
    oldest: u64,
    newest: u64,
}

/// The groups of the last [`TRANSACTION_LIFETIME`].
#[derive(Debug, Default)]
pub(super) struct Recent {
    /// The groups, oldest first.
    groups: VecDeque<Group>,
    /// Full blocks, oldest first.
    full: VecDeque<Arc<Block>>,
    open: Block,
    /// Whether a commit was compared with any writes since the open block began.
    is_compared: bool,
}

/// The values that were replaced since some version.
pub(super) struct Since {
    /// The blocks, newest first, each with the place where the writes after that version begin.
    blocks: Vec<(Arc<Block>, usize)>,
    /// When that version was last given out, if there are later versions.
    pub given_out: Option<Duration>,
}

impl Since {
    /// Turns the newest `rows` into the rows at that version.
    pub fn revert(&self, rows: &mut Rows) {
        for (block, begin) in &self.blocks {
            block.undo.revert(*begin, rows);
        }
    }
}

impl Recent {
    /// Adds the newest group, whose writes are in `undo`, and leaves `undo` empty.
    pub fn push(&mut self, version: u64, (at, given_out_before): (Duration, Duration), undo: &mut Undo) {
        let has_own_block = undo.is_shared() || undo.len() > BLOCK_LEN_MAX;
        if has_own_block || self.open.undo.len() + undo.len() > BLOCK_LEN_MAX {
            self.end_block();
        }
        let begin = self.open.undo.len();
        self.groups.push_back(Group { version, at, given_out_before, begin });
        if begin == 0 {
            self.open.oldest = version;
        }
        self.open.newest = version;
        if has_own_block {
            std::mem::swap(&mut self.open.undo, undo);
            self.end_block();
        } else {
            self.open.undo.append(undo);
        }
        undo.clear();
    }

    /// Ends the open block, and begins another one.
    fn end_block(&mut self) {
        let mut block = std::mem::take(&mut self.open);
        let is_compared = std::mem::take(&mut self.is_compared);
        if block.newest > 0 {
            block.undo.seal(is_compared);
            self.full.push_back(Arc::new(block));
        }
    }

    /// Returns the first group after `version`.
    fn first_after(groups: &VecDeque<Group>, version: u64) -> Option<&Group> {
        groups.get(groups.partition_point(|group| group.version <= version))
    }

    /// Returns where in `block` the writes after `version` begin. `first` is the first group after `version`.
    fn begin_in(block: &Block, version: u64, first: &Group) -> usize {
        if block.oldest > version { 0 } else { first.begin }
    }

    /// Prepares for a commit that compares `reads` keys and ranges with what was written after `version`.
    pub fn prepare(&mut self, version: u64, reads: usize) {
        self.is_compared |= reads > 0;
        let Some(first) = Self::first_after(&self.groups, version) else { return };
        if self.open.newest > version {
            let begin = Self::begin_in(&self.open, version, first);
            self.open.undo.prepare(begin, reads);
        }
        // Blocks that no transaction was compared with while they were open are not sorted yet.
        for block in self.full.iter_mut().rev().take_while(|block| block.newest > version) {
            let begin = Self::begin_in(block, version, first);
            if block.undo.is_to_be_sorted(begin, reads) {
                Arc::make_mut(block).undo.sort();
            }
        }
    }

    /// Whether a key of `read` was written after `version`.
    pub fn written_after(&self, read: &ReadConflict, version: u64) -> bool {
        Self::first_after(&self.groups, version).is_some_and(|first| {
            let full = self.full.iter().rev().map(|block| &**block);
            let open = (self.open.newest > version).then_some(&self.open);
            let mut blocks = open.into_iter().chain(full.take_while(|block| block.newest > version));
            blocks.any(|block| block.undo.has_written(read, Self::begin_in(block, version, first)))
        })
    }

    /// Returns what was replaced after `version`.
    pub fn since(&self, version: u64) -> Since {
        let Some(first) = Self::first_after(&self.groups, version) else {
            return Since { blocks: Vec::new(), given_out: None };
        };
        // Commits continue to write to the open block, so this is a copy of it.
        let open = (self.open.newest > version).then(|| Arc::new(self.open.clone()));
        let full = self.full.iter().rev().take_while(|block| block.newest > version);
        let blocks = open.into_iter().chain(full.cloned());
        let blocks = blocks.map(|block| {
            let begin = Self::begin_in(&block, version, first);
            (block, begin)
        });
        Since { blocks: blocks.collect(), given_out: Some(first.given_out_before) }
    }

    /// Drops the groups that, at the time `now`, are too old for any transaction to conflict with them, or to read a version before them.
    /// Returns the version of the newest group that was dropped.
    pub fn forget(&mut self, now: Duration) -> Option<u64> {
        let mut forgotten = None;
        while let Some(group) =
            self.groups.pop_front_if(|group| now.saturating_sub(group.at) > TRANSACTION_LIFETIME)
        {
            forgotten = Some(group.version);
        }
        if let Some(version) = forgotten {
            while self.full.pop_front_if(|block| block.newest <= version).is_some() {}
            if self.open.newest <= version {
                self.open.undo.clear();
                self.open.newest = 0;
            }
        }
        forgotten
    }

    /// Returns how many bytes the writes take.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.full.iter().map(|block| block.undo.len()).sum::<usize>() + self.open.undo.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::KeyRange;

    #[test]
    fn what_was_written_after_a_version_is_found_until_it_is_forgotten() {
        let (mut recent, mut undo) = (Recent::default(), Undo::default());
        let last = 1_000;
        for version in 1..=last {
            undo.push(format!("{version:06}").as_bytes(), None);
            undo.push(b"hot", Some(b"before"));
            recent.push(version, (Duration::from_millis(version), Duration::ZERO), &mut undo);
            assert_eq!(undo.len(), 0);
            // Some blocks are sorted.
            recent.prepare(version, usize::from(version > last / 2));
        }
        assert!(recent.full.len() > 10, "{} blocks", recent.full.len());
        let key = |version: u64| ReadConflict::Key(format!("{version:06}").into());
        let range = |begin: u64, end: u64| {
            ReadConflict::Range(KeyRange::new(format!("{begin:06}"), format!("{end:06}")))
        };
        let check = |recent: &Recent| {
            for version in [1, 2, last / 2, last] {
                assert!(recent.written_after(&key(version), version - 1));
                assert!(!recent.written_after(&key(version), version));
                assert!(recent.written_after(&range(version, version + 1), version - 1));
                assert!(!recent.written_after(&range(1, version + 1), version));
            }
            assert!(recent.written_after(&ReadConflict::Key("hot".into()), last - 1));
            assert!(!recent.written_after(&ReadConflict::Key("hotter".into()), 0));
        };
        check(&recent);
        recent.prepare(0, 1_000);
        check(&recent);

        let ms = |version: u64| TRANSACTION_LIFETIME + Duration::from_millis(version);
        assert_eq!(recent.forget(ms(0)), None);
        assert_eq!(recent.forget(ms(last / 2 + 1)), Some(last / 2));
        assert!(recent.written_after(&key(last / 2 + 1), last / 2), "what is newer stays");
        assert!(!recent.written_after(&key(1), last / 2), "what is older is gone with its block");
        assert_eq!(recent.forget(ms(last + 1)), Some(last));
        assert!(recent.full.is_empty() && recent.groups.is_empty() && recent.len() == 0);
    }

    /// Regression: full blocks that no transaction had been compared with were never sorted. So an old transaction with many reads, after
    /// many blind writes, went through all writes once for each read, and every commit waited for it.
    #[test]
    fn a_commit_with_many_reads_finds_its_way_through_what_nobody_was_compared_with() {
        let (mut recent, mut undo) = (Recent::default(), Undo::default());
        let writes = 40_000_u64;
        for version in 1..=writes {
            undo.push(format!("{version:06}").as_bytes(), None);
            recent.push(version, (Duration::from_millis(1), Duration::ZERO), &mut undo);
        }
        let reads: Vec<_> = (0..400).map(|n| ReadConflict::Key(format!("{n:06}x").into())).collect();
        recent.prepare(0, reads.len());
        assert!(reads.iter().all(|read| !recent.written_after(read, 0)));
        let is_unsorted = |block: &Arc<Block>| block.undo.is_to_be_sorted(0, reads.len());
        assert!(!recent.full.iter().any(is_unsorted), "each read would go through all writes");
    }
}
