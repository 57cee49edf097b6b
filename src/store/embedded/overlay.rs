//! [`Overlay`]: a transaction's own writes, laid over what it reads.
//!
//! A key is *independent* once its value follows from the transaction alone (set, cleared, or an operation on top of
//! those), and *dependent* while operations wait for the stored value. Reading an independent key cannot conflict. A
//! pending versionstamp makes its keys unreadable until the commit; only a clear makes such a key readable again.
//!
//! [`page`] reads a range: the stored rows merged with the transaction's own writes, in either direction.

use std::{collections::BTreeMap, iter::Peekable, ops::Bound};

use bytes::Bytes;

use super::{
    atomic::{self, Effect},
    conflicts::bounds,
    rows::Rows,
};
use crate::{
    base::{encoding::Versionstamp, error::StoreError},
    store::{AtomicOp, KeyRange, Mutation, Page, RangeRead, Row, key_after},
};

/// The transaction's writes to one key.
#[derive(Debug, Clone)]
pub(super) enum Own {
    /// The key has this value, whatever is stored.
    Independent(Option<Bytes>),
    /// These operations wait for the stored value.
    Dependent(Vec<(AtomicOp, Bytes)>),
    /// The key holds a versionstamp that is not known yet.
    Unreadable,
}

impl Own {
    /// Returns the value of the key on top of `stored`, its value in the store.
    pub fn over(&self, stored: Option<&[u8]>) -> Result<Option<Bytes>, StoreError> {
        match self {
            Self::Independent(value) => Ok(value.clone()),
            Self::Dependent(operations) => {
                let apply = |value: Option<Bytes>, (op, operand): &(AtomicOp, Bytes)| match atomic::apply(
                    *op,
                    value.as_deref(),
                    operand,
                ) {
                    Effect::Keep => value,
                    Effect::Become(value) => value,
                };
                Ok(operations.iter().fold(stored.map(Bytes::copy_from_slice), apply))
            }
            Self::Unreadable => Err(StoreError::ACCESSED_UNREADABLE),
        }
    }
}

/// Disjoint ranges, by their first key.
#[derive(Debug, Default)]
struct Ranges(BTreeMap<Bytes, Bytes>);

impl Ranges {
    fn containing(&self, key: &[u8]) -> Option<KeyRange> {
        let up_to = (Bound::Unbounded, Bound::Included(key));
        let (begin, end) = self.0.range::<[u8], _>(up_to).next_back()?;
        (key < &end[..]).then(|| KeyRange { begin: begin.clone(), end: end.clone() })
    }

    /// Returns the ranges that share a key with `range`, in order.
    fn intersecting(&self, range: &KeyRange) -> impl Iterator<Item = KeyRange> {
        let first = self.containing(&range.begin).map_or_else(|| range.begin.clone(), |found| found.begin);
        // An ordered map panics on inverted bounds; an empty range shares no key anyway.
        let end = if range.is_empty() { first.clone() } else { range.end.clone() };
        self.0.range(first..end).map(|(begin, end)| KeyRange { begin: begin.clone(), end: end.clone() })
    }

    /// Adds `range`, joined with the ranges that it overlaps.
    fn insert(&mut self, range: &KeyRange) {
        if range.is_empty() {
            return;
        }
        let mut joined = range.clone();
        for old in self.intersecting(range).collect::<Vec<_>>() {
            joined.begin = joined.begin.min(old.begin.clone());
            joined.end = joined.end.max(old.end);
            self.0.remove(&old.begin);
        }
        self.0.insert(joined.begin, joined.end);
    }

    /// Removes `range`, cutting the ranges that it overlaps.
    fn remove(&mut self, range: &KeyRange) {
        for old in self.intersecting(range).collect::<Vec<_>>() {
            self.0.remove(&old.begin);
            if old.begin < range.begin {
                self.0.insert(old.begin, range.begin.clone());
            }
            if range.end < old.end {
                self.0.insert(range.end.clone(), old.end);
            }
        }
    }
}

/// A transaction's own writes, by key.
#[derive(Debug, Default)]
pub(super) struct Overlay {
    /// The keys that were written one by one. No key inside a cleared range is dependent.
    keys: BTreeMap<Bytes, Own>,
    /// Cleared ranges. Keys that were written afterwards are in `keys`.
    cleared: Ranges,
    /// Ranges in which the commit will write a versionstamped key.
    unreadable: Ranges,
}

impl Overlay {
    /// Adds the next write. Versionstamped operands must be valid. `version` is the read version of the transaction, or 0 if it has none
    /// yet; a pending stamp will be greater.
    pub fn apply(&mut self, mutation: &Mutation, version: u64) {
        match mutation {
            Mutation::Set(key, value) => self.put(key, Own::Independent(Some(value.clone()))),
            Mutation::Clear(key) => self.clear(&KeyRange::key(key)),
            Mutation::ClearRange(begin, end) => {
                self.clear(&KeyRange { begin: begin.clone(), end: end.clone() });
            }
            Mutation::Atomic(AtomicOp::SetVersionstampedKey, key, _) => {
                // The transaction no longer knows its own writes in this range: the stamped key may replace any of them.
                let range = stamped_key_range(key, version);
                self.forget(&range);
                self.cleared.remove(&range);
                self.unreadable.insert(&range);
            }
            Mutation::Atomic(AtomicOp::SetVersionstampedValue, key, _) => self.put(key, Own::Unreadable),
            Mutation::Atomic(op, key, operand) => self.operate(*op, key, operand),
        }
    }

    /// Replaces the writes to `key`, except for a pending stamp, which stays.
    fn put(&mut self, key: &Bytes, own: Own) {
        let entry = self.keys.entry(key.clone()).or_insert_with(|| own.clone());
        if !matches!(entry, Own::Unreadable) {
            *entry = own;
        }
    }

    /// Adds an operation on top of the writes to `key`.
    fn operate(&mut self, op: AtomicOp, key: &Bytes, operand: &Bytes) {
        let cleared = self.cleared.containing(key).is_some();
        let own = self
            .keys
            .entry(key.clone())
            .or_insert_with(|| if cleared { Own::Independent(None) } else { Own::Dependent(Vec::new()) });
        match own {
            Own::Independent(value) => {
                if let Effect::Become(new) = atomic::apply(op, value.as_deref(), operand) {
                    *value = new;
                }
            }
            Own::Dependent(operations) => operations.push((op, operand.clone())),
            Own::Unreadable => {}
        }
    }

    fn clear(&mut self, range: &KeyRange) {
        if range.is_empty() {
            return;
        }
        self.forget(range);
        self.cleared.insert(range);
        self.unreadable.remove(range);
    }

    /// Forgets the writes to single keys in `range`.
    fn forget(&mut self, range: &KeyRange) {
        let gone: Vec<_> = self.keys.range::<[u8], _>(bounds(range)).map(|(key, _)| key.clone()).collect();
        for key in gone {
            self.keys.remove(&key);
        }
    }

    /// Returns the writes to `key`, if any.
    pub fn own(&self, key: &[u8]) -> Option<Own> {
        if self.unreadable.containing(key).is_some() {
            return Some(Own::Unreadable);
        }
        match self.keys.get(key) {
            Some(own) => Some(own.clone()),
            None => self.cleared.containing(key).map(|_| Own::Independent(None)),
        }
    }

    /// Returns the keys in `range` that were written one by one, in order.
    pub fn keys(&self, range: &KeyRange) -> std::collections::btree_map::Range<'_, Bytes, Own> {
        self.keys.range::<[u8], _>(bounds(range))
    }

    /// Returns the cleared range that contains `key`, if any.
    pub fn cleared(&self, key: &[u8]) -> Option<KeyRange> {
        self.cleared.containing(key)
    }

    /// Whether a read of all of `range` would run into a pending versionstamped key.
    pub fn has_unreadable(&self, range: &KeyRange) -> bool {
        self.unreadable.intersecting(range).next().is_some()
    }

    /// Returns the parts of `range` whose values do not follow from the transaction alone. A read of the range can conflict only there.
    pub fn unwritten(&self, range: &KeyRange) -> Vec<KeyRange> {
        let independent = self
            .keys(range)
            .filter(|(_, own)| !matches!(own, Own::Dependent(_)))
            .map(|(key, _)| KeyRange { begin: key.clone(), end: key_after(key) });
        let mut written: Vec<_> = self.cleared.intersecting(range).chain(independent).collect();
        written.sort_by(|a, b| a.begin.cmp(&b.begin));

        let mut gaps = Vec::new();
        let mut from = range.begin.clone();
        for part in written {
            if from < part.begin {
                gaps.push(KeyRange { begin: from.clone(), end: part.begin });
            }
            from = from.max(part.end);
        }
        if from < range.end {
            gaps.push(KeyRange { begin: from, end: range.end.clone() });
        }
        gaps
    }
}

/// Returns the range in which a versionstamped key can be: from the first stamp of `version` to the greatest stamp.
fn stamped_key_range(key: &[u8], version: u64) -> KeyRange {
    let begin = atomic::stamped(key, Versionstamp::new(version, 0));
    let last = atomic::stamped(key, Versionstamp([0xff; 10]));
    KeyRange { begin, end: key_after(&last) }
}

/// Collects rows up to the limits of a read.
struct Collector<'a> {
    read: &'a RangeRead,
    rows: Vec<Row>,
    /// The keys and values of further rows, packed one after another, so that no row needs an allocation of its own.
    block: Vec<u8>,
    /// The lengths of the keys and values in the block.
    lens: Vec<(usize, usize)>,
    /// The total bytes of all keys and values.
    len: usize,
    /// Whether a limit ended the page.
    more: bool,
}

/// The maximum number of bytes in a block with several rows. A caller that keeps one row of a page keeps that row's whole block.
const BLOCK_LEN: usize = 8_192;

impl Collector<'_> {
    /// Adds a row. Returns false if no further row fits.
    fn push(&mut self, key: &[u8], value: &[u8]) -> bool {
        if self.block.len() + key.len() + value.len() > BLOCK_LEN {
            self.end_block();
        }
        self.block.extend_from_slice(key);
        self.block.extend_from_slice(value);
        self.lens.push((key.len(), value.len()));
        self.len += key.len() + value.len();
        self.more =
            self.rows.len() + self.lens.len() >= self.read.limit || self.len >= self.read.target_bytes;
        !self.more
    }

    /// Turns the block into rows.
    fn end_block(&mut self) {
        let mut block = Bytes::from(std::mem::take(&mut self.block));
        let rows = self.lens.drain(..).map(|(key, value)| (block.split_to(key), block.split_to(value)));
        self.rows.extend(rows);
    }

    fn page(mut self) -> Page {
        self.end_block();
        Page { rows: self.rows, more: self.more }
    }
}

/// Reads the rows of `read` in `root`, with the transaction's own writes on top. `read` must not be empty.
pub(super) fn page(root: &Rows, overlay: Option<&Overlay>, read: &RangeRead) -> Result<Page, StoreError> {
    let mut collector =
        Collector { read, rows: Vec::new(), block: Vec::new(), lens: Vec::new(), len: 0, more: false };
    match overlay {
        None => {
            let _ = root.range(&read.range, read.reverse).all(|(key, value)| collector.push(key, value));
        }
        Some(overlay) => merged(root, overlay, &mut collector)?,
    }
    Ok(collector.page())
}

/// Returns the part of the range that `page` depends on: all of it, or up to the last row if a limit ended the page.
pub(super) fn covered(read: &RangeRead, page: &Page) -> KeyRange {
    let mut range = read.range.clone();
    if let Some((last, _)) = page.rows.last().filter(|_| page.more) {
        if read.reverse {
            // Copy the key, because the range outlives the page.
            range.begin = Bytes::copy_from_slice(last);
        } else {
            range.end = key_after(last);
        }
    }
    range
}

/// The transaction's own keys, in the direction of the read.
type OwnKeys<'a> = Peekable<Box<dyn Iterator<Item = (&'a Bytes, &'a Own)> + 'a>>;

/// Merges the stored rows with the transaction's own keys.
fn merged(root: &Rows, overlay: &Overlay, collector: &mut Collector<'_>) -> Result<(), StoreError> {
    let read = collector.read;
    let stored_within = |range: &KeyRange| root.range(range, read.reverse).peekable();
    let mut stored = stored_within(&read.range);
    let own = overlay.keys(&read.range);
    let own: Box<dyn Iterator<Item = _>> = if read.reverse { Box::new(own.rev()) } else { Box::new(own) };
    let mut own: OwnKeys<'_> = own.peekable();
    // The part that has not been read yet.
    let mut rest = read.range.clone();
    loop {
        let next = match (stored.peek(), own.peek()) {
            (None, None) => break,
            (Some((key, _)), None) => *key,
            (None, Some((key, _))) => &key[..],
            (Some((a, _)), Some((b, _))) if read.reverse => (*a).max(b),
            (Some((a, _)), Some((b, _))) => (*a).min(b),
        };
        let stored_value = stored.next_if(|(key, _)| *key == next).map(|(_, value)| value);
        let own_state = own.next_if(|(key, _)| &key[..] == next).map(|(_, state)| state);
        if own_state.is_none()
            && let Some(cleared) = overlay.cleared(next)
        {
            // Continue after the cleared range instead of going through it row by row.
            let beyond = if read.reverse {
                KeyRange { begin: read.range.begin.clone(), end: cleared.begin }
            } else {
                KeyRange { begin: cleared.end, end: read.range.end.clone() }
            };
            let empty = KeyRange { begin: Bytes::new(), end: Bytes::new() };
            stored = stored_within(if beyond.is_empty() { &empty } else { &beyond });
            continue;
        }
        let passed = pass(&mut rest, next, read.reverse);
        if overlay.has_unreadable(&passed) {
            return Err(StoreError::ACCESSED_UNREADABLE);
        }
        let own_value = own_state.map(|state| Own::over(state, stored_value)).transpose()?;
        let value = own_value.as_ref().map_or(stored_value, Option::as_deref);
        if let Some(value) = value
            && !collector.push(next, value)
        {
            return Ok(());
        }
    }
    if overlay.has_unreadable(&rest) { Err(StoreError::ACCESSED_UNREADABLE) } else { Ok(()) }
}

/// Moves `rest` past `key` and returns the passed range, `key` included.
fn pass(rest: &mut KeyRange, key: &[u8], reverse: bool) -> KeyRange {
    if reverse {
        let key = Bytes::copy_from_slice(key);
        let passed = KeyRange { begin: key.clone(), end: rest.end.clone() };
        rest.end = key;
        passed
    } else {
        let after = key_after(key);
        let passed = KeyRange { begin: rest.begin.clone(), end: after.clone() };
        rest.begin = after;
        passed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(list: &[(&'static str, &'static str)]) -> Vec<KeyRange> {
        list.iter().map(|&(begin, end)| KeyRange::new(begin, end)).collect()
    }

    #[test]
    fn ranges_join_and_are_cut() {
        let mut set = Ranges::default();
        set.insert(&KeyRange::new("b", "d"));
        set.insert(&KeyRange::new("f", "h"));
        set.insert(&KeyRange::new("c", "g"));
        assert_eq!(set.intersecting(&KeyRange::new("a", "z")).collect::<Vec<_>>(), ranges(&[("b", "h")]));
        set.remove(&KeyRange::new("d", "e"));
        assert_eq!(
            set.intersecting(&KeyRange::new("a", "z")).collect::<Vec<_>>(),
            ranges(&[("b", "d"), ("e", "h")])
        );
        assert_eq!(set.intersecting(&KeyRange::new("c", "d")).collect::<Vec<_>>(), ranges(&[("b", "d")]));
        assert_eq!(set.intersecting(&KeyRange::new("d", "e")).count(), 0);
        assert_eq!(set.intersecting(&KeyRange::new("x", "b")).count(), 0);
        assert!(set.containing(b"d").is_none() && set.containing(b"gz").is_some());
    }
}
