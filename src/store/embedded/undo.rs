//! [`Undo`]: the keys that commits wrote, and the values that they had before, as bytes.
//!
//! An undo is kept for the lifetime of a transaction, so that earlier versions can be read, and so that a commit can find what was written
//! after the snapshot of its transaction. All bytes are in one block, so a write costs no allocation, and replaced values free their memory
//! immediately. If many values are replaced, the undo shares the tree as it was instead of copying more of them.

use super::{conflicts::ReadConflict, rows::Rows};
use crate::store::KeyRange;

/// The stored lengths that stand for a missing value, and for a value that the write did not change.
const MISSING: u32 = u32::MAX;
const KEPT: u32 = u32::MAX - 1;

/// How many bytes of replaced rows are copied before the tree is shared. Small in tests, so that tests reach it.
const COPIED_LEN_MAX: usize = if cfg!(test) { 4_096 } else { 1 << 20 };

/// A cleared range with at most this many rows is noted row by row.
const CLEARED_NOTED_MAX: usize = 32;

/// The maximum of a commit's reads times the unsorted bytes that they are compared with; above that, the notes are sorted first.
const COMPARED_LEN_MAX: usize = if cfg!(test) { 512 } else { 1 << 17 };

/// Roughly how many bytes can be compared in the time that it takes to sort one byte.
const SORTING_COST: usize = 8;

/// The maximum amount of memory that is kept for the next group, in bytes.
const KEPT_LEN: usize = 65_536;

/// The written keys in the order of the writes, each with the value that it had before.
#[derive(Debug, Default, Clone)]
pub(super) struct Undo {
    bytes: Vec<u8>,
    /// Once rows are shared: the place after which only keys were noted, and the rows at that moment.
    shared: Option<(usize, Rows)>,
    /// Cleared ranges with many rows, each with the rows before the clear.
    cleared: Vec<(KeyRange, Rows)>,
    /// The places of the notes among the first `sorted_len` bytes, in the order of their keys; only the last note for each key.
    sorted: Vec<usize>,
    sorted_len: usize,
    /// How many bytes were compared with reads since the notes were last sorted.
    compared: usize,
}

impl Undo {
    /// Returns how many bytes the notes take.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether so much was replaced that the rows should be shared.
    pub fn is_full(&self) -> bool {
        self.shared.is_none() && self.bytes.len() > COPIED_LEN_MAX
    }

    /// Whether the undo shares the rows as they were at some moment.
    pub fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// Shares `rows`, the current rows, instead of copying what is replaced from now on.
    pub fn share(&mut self, rows: Rows) {
        self.shared = Some((self.bytes.len(), rows));
    }

    /// Notes that `key`, which had the value `before`, is written.
    pub fn push(&mut self, key: &[u8], before: Option<&[u8]>) {
        let before = before.filter(|_| self.shared.is_none());
        self.note(key, before.map_or(MISSING, len_of), before.unwrap_or_default());
    }

    /// Notes that `key` is written and keeps its value.
    pub fn push_kept(&mut self, key: &[u8]) {
        self.note(key, KEPT, &[]);
    }

    fn note(&mut self, key: &[u8], value_len: u32, value: &[u8]) {
        self.bytes.extend_from_slice(&len_of(key).to_ne_bytes());
        self.bytes.extend_from_slice(&value_len.to_ne_bytes());
        self.bytes.extend_from_slice(key);
        self.bytes.extend_from_slice(value);
    }

    /// Notes that `range` of `rows`, the current rows, is cleared.
    pub fn push_cleared(&mut self, range: &KeyRange, rows: &Rows) {
        if rows.range(range, false).nth(CLEARED_NOTED_MAX).is_none() {
            rows.range(range, false).for_each(|(key, value)| self.push(key, Some(value)));
            return;
        }
        if self.shared.is_none() {
            self.share(rows.clone());
        }
        self.cleared.push((range.clone(), rows.clone()));
    }

    /// Returns the keys that were written one by one, in the order of the writes.
    pub fn keys(&self) -> impl Iterator<Item = &[u8]> {
        self.notes(0, self.bytes.len()).filter(|note| note.value_len != KEPT).map(|note| note.key)
    }

    /// Returns the cleared ranges with many rows, each with the rows before the clear.
    pub fn cleared(&self) -> &[(KeyRange, Rows)] {
        &self.cleared
    }

    /// Undoes the writes from the place `begin` on in `rows`, which must be the rows after all writes.
    pub fn revert(&self, begin: usize, rows: &mut Rows) {
        let end = match &self.shared {
            Some((end, before)) => {
                rows.clone_from(before);
                *end
            }
            None => self.bytes.len(),
        };
        let replaced: Vec<_> = self.notes(begin, end).filter(|note| note.value_len != KEPT).collect();
        for note in replaced.into_iter().rev() {
            rows.change(note.key, |_| note.before());
        }
    }

    /// Prepares for a commit that compares `reads` keys and ranges with what was written from the place `begin` on. Sorts the notes only
    /// once comparing has cost as much as sorting: otherwise a large group with many reads would be sorted again for every commit.
    pub fn prepare(&mut self, begin: usize, reads: usize) {
        self.compared = self.compared.saturating_add(self.unsorted(begin).saturating_mul(reads));
        if self.compared > COMPARED_LEN_MAX.max(self.bytes.len() * SORTING_COST) {
            self.sort();
        }
    }

    /// Returns how many bytes of notes from the place `begin` on are not sorted.
    fn unsorted(&self, begin: usize) -> usize {
        self.bytes.len().saturating_sub(self.sorted_len.max(begin))
    }

    /// Whether a commit with `reads` keys and ranges meets so many unsorted notes from the place `begin` on that they must be sorted first.
    pub fn is_to_be_sorted(&self, begin: usize, reads: usize) -> bool {
        self.unsorted(begin).saturating_mul(reads) > COMPARED_LEN_MAX
    }

    /// Sorts the notes that are not sorted yet.
    pub fn sort(&mut self) {
        let mut sorted = std::mem::take(&mut self.sorted);
        sorted.extend(self.notes(self.sorted_len, self.bytes.len()).map(|note| note.at));
        // The sort is stable, so the notes for a key stay in order.
        sorted.sort_by(|&a, &b| self.key(a).cmp(self.key(b)));
        sorted.dedup_by(|later, last| {
            let is_same = self.key(*later) == self.key(*last);
            if is_same {
                *last = *later;
            }
            is_same
        });
        self.sorted = sorted;
        self.sorted_len = self.bytes.len();
        self.compared = 0;
    }

    /// Whether a key of `read` was written from the place `begin` on.
    pub fn has_written(&self, read: &ReadConflict, begin: usize) -> bool {
        self.has_sorted(read, begin)
            || self.notes(self.sorted_len.max(begin), self.bytes.len()).any(|note| read.contains(note.key))
    }

    /// Does the same as [`Undo::has_written`], but only for the sorted notes.
    fn has_sorted(&self, read: &ReadConflict, begin: usize) -> bool {
        if begin >= self.sorted_len {
            return false;
        }
        match read {
            ReadConflict::Key(key) => {
                let found = self.sorted.binary_search_by(|&at| self.key(at).cmp(key));
                found.is_ok_and(|index| self.sorted[index] >= begin)
            }
            ReadConflict::Range(range) => {
                let first = self.sorted.partition_point(|&at| self.key(at) < &range.begin[..]);
                let within = self.sorted[first..].iter().take_while(|&&at| self.key(at) < &range.end[..]);
                within.into_iter().any(|&at| at >= begin)
            }
        }
    }

    /// Adds the notes of `other`, which must not share rows.
    pub fn append(&mut self, other: &Self) {
        self.bytes.extend_from_slice(&other.bytes);
    }

    /// Finishes the notes: frees the memory that they do not need, and sorts them if `sorted` is set.
    pub fn seal(&mut self, sorted: bool) {
        self.cleared = Vec::new();
        self.bytes.shrink_to_fit();
        if sorted {
            self.sort();
            self.sorted.shrink_to_fit();
        }
    }

    /// Forgets everything, but keeps the allocated memory if there is little of it.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.shrink_to(KEPT_LEN);
        self.sorted.clear();
        self.sorted.shrink_to(KEPT_LEN / size_of::<usize>());
        (self.sorted_len, self.compared) = (0, 0);
        self.cleared.clear();
        self.shared = None;
    }

    /// Returns the key of the note at the place `at`.
    fn key(&self, at: usize) -> &[u8] {
        Note::read(&self.bytes, at).key
    }

    /// Returns the notes from the place `begin` up to the place `end`.
    fn notes(&self, begin: usize, end: usize) -> impl Iterator<Item = Note<'_>> {
        let mut at = begin;
        std::iter::from_fn(move || {
            (at < end).then(|| {
                let note = Note::read(&self.bytes, at);
                at = note.end();
                note
            })
        })
    }
}

/// The note for a written key.
struct Note<'a> {
    /// The place of the note in `bytes`.
    at: usize,
    key: &'a [u8],
    value_len: u32,
    bytes: &'a [u8],
}

/// The size of the two lengths before a key, in bytes.
const LENS_LEN: usize = 2 * size_of::<u32>();

impl<'a> Note<'a> {
    fn read(bytes: &'a [u8], at: usize) -> Self {
        let (lens, behind) = bytes[at..].split_at(LENS_LEN);
        let len = |bytes: &[u8]| u32::from_ne_bytes(bytes.try_into().expect("both lengths were written"));
        let (key_len, value_len) = (len(&lens[..4]), len(&lens[4..]));
        Self { at, key: &behind[..key_len as usize], value_len, bytes }
    }

    /// Returns the value before the write.
    fn before(&self) -> Option<&'a [u8]> {
        let begin = self.at + LENS_LEN + self.key.len();
        (self.value_len != MISSING).then(|| &self.bytes[begin..self.end()])
    }

    fn end(&self) -> usize {
        let value_len = if self.value_len >= KEPT { 0 } else { self.value_len as usize };
        self.at + LENS_LEN + self.key.len() + value_len
    }
}

fn len_of(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).expect("keys and values have limits far below")
}
