//! [`Packed`]: a few rows in one block of memory, sorted by key.
//!
//! The rows of a tree node are looked up, changed and copied together. In one block they take only a few cache lines, and copying them
//! copies bytes without touching reference counts. A search compares the common prefix of all keys once, and then numbers that lie side by
//! side; it reads the bytes of only a few keys.

use std::{cmp::Ordering, ops::Range};

/// The place of a row in the block: its key, followed by its value.
#[derive(Debug, Clone, Copy)]
struct Slot {
    /// The first bytes of the key after the prefix that all keys share.
    head: u64,
    at: u32,
    key_len: u32,
    value_len: u32,
}

/// Rows, sorted by key.
#[derive(Debug, Default)]
pub(super) struct Packed {
    /// The places of the rows, in the order of the keys.
    slots: Vec<Slot>,
    /// The keys and values, in any order. Some bytes in between may no longer be in use.
    bytes: Vec<u8>,
    /// How many of the bytes are in use.
    used: usize,
    /// The length of a prefix that all keys share. Once rows have been removed, the keys may share a longer one.
    common: usize,
}

/// The minimum room that is added for further rows: a number of rows, and a number of bytes.
const SLOTS_MORE: usize = 8;
const BYTES_MORE: usize = 256;

/// Leaves out the unused bytes if there are many of them.
impl Clone for Packed {
    fn clone(&self) -> Self {
        if self.bytes.len() > self.used + self.used / 4 {
            return self.part(0..self.len());
        }
        Self { slots: self.slots.clone(), bytes: self.bytes.clone(), ..*self }
    }
}

impl Packed {
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Returns the total length of all keys and values, in bytes.
    pub fn bytes_len(&self) -> usize {
        self.used
    }

    pub fn key(&self, index: usize) -> &[u8] {
        self.key_of(self.slots[index])
    }

    pub fn value(&self, index: usize) -> &[u8] {
        let Slot { at, value_len, key_len, .. } = self.slots[index];
        &self.bytes[at as usize + key_len as usize..][..value_len as usize]
    }

    fn key_of(&self, Slot { at, key_len, .. }: Slot) -> &[u8] {
        &self.bytes[at as usize..][..key_len as usize]
    }

    /// Returns the length of the prefix that all keys are known to share.
    pub fn common_len(&self) -> usize {
        self.common
    }

    /// Returns the index of `key`, or the index at which to insert it.
    pub fn find(&self, key: &[u8]) -> Result<usize, usize> {
        let Some(&first) = self.slots.first() else { return Err(0) };
        let (begin, rest) = key.split_at(self.common.min(key.len()));
        match begin.cmp(&self.key_of(first)[..self.common]) {
            Ordering::Less => return Err(0),
            Ordering::Greater => return Err(self.len()),
            Ordering::Equal => {}
        }
        let head = leading(rest);
        let first = self.slots.partition_point(|slot| slot.head < head);
        let equal = self.slots[first..].iter().take_while(|slot| slot.head == head).count();
        let among = self.slots[first..first + equal]
            .binary_search_by(|&slot| self.key_of(slot)[self.common..].cmp(rest));
        among.map(|index| first + index).map_err(|index| first + index)
    }

    /// Returns how many keys are less than `key`.
    pub fn rank(&self, key: &[u8]) -> usize {
        self.find(key).unwrap_or_else(|index| index)
    }

    pub fn insert(&mut self, index: usize, key: &[u8], value: &[u8]) {
        if self.slots.is_empty() {
            self.common = key.len();
        } else if index == 0 || index == self.len() {
            self.begin_alike(common_len(key, self.key(0)).min(self.common));
        }
        self.make_room(1, key.len() + value.len());
        let slot = self.append(key, value);
        self.slots.insert(index, slot);
    }

    /// Replaces the value of the row at `index`.
    pub fn replace(&mut self, index: usize, value: &[u8]) {
        let Slot { at, value_len, key_len, .. } = self.slots[index];
        let (key_begin, key_end) = (at as usize, at as usize + key_len as usize);
        if value.len() <= value_len as usize {
            self.bytes[key_end..key_end + value.len()].copy_from_slice(value);
        } else {
            self.make_room(0, key_len as usize + value.len());
            self.slots[index].at = offset(self.bytes.len());
            self.bytes.extend_from_within(key_begin..key_end);
            self.bytes.extend_from_slice(value);
        }
        self.slots[index].value_len = offset(value.len());
        self.used = self.used - value_len as usize + value.len();
        self.compact();
    }

    pub fn remove(&mut self, index: usize) {
        self.remove_all(index..index + 1);
    }

    /// Removes the rows at `indices`.
    pub fn remove_all(&mut self, indices: Range<usize>) {
        let len: usize = self.slots.drain(indices).map(|slot| slot.len()).sum();
        self.used -= len;
        self.compact();
    }

    /// Gives memory back if rows use less than half of it.
    fn compact(&mut self) {
        if self.bytes.len() > 2 * self.used + BYTES_MORE {
            *self = self.part(0..self.len());
        }
    }

    /// Removes the rows from `index` on, and returns them.
    pub fn split_off(&mut self, index: usize) -> Self {
        let right = self.part(index..self.len());
        *self = self.part(0..index);
        right
    }

    /// Copies the rows at `indices`, without unused bytes.
    fn part(&self, indices: Range<usize>) -> Self {
        let mut part = Self::default();
        part.extend(self, indices);
        part
    }

    /// Adds all rows of `other`, whose keys must be greater.
    pub fn append_all(&mut self, other: &Self) {
        self.extend(other, 0..other.len());
    }

    /// Adds the rows of `other` at `indices`, whose keys must be greater.
    fn extend(&mut self, other: &Self, indices: Range<usize>) {
        if indices.is_empty() {
            return;
        }
        let first = if self.slots.is_empty() { other.key(indices.start) } else { self.key(0) };
        self.begin_alike(common_len(first, other.key(indices.end - 1)));
        self.make_room(indices.len(), other.slots[indices.clone()].iter().map(Slot::len).sum());
        for index in indices {
            let slot = self.append(other.key(index), other.value(index));
            self.slots.push(slot);
        }
    }

    /// Sets the length of the prefix that all keys share to `common`.
    fn begin_alike(&mut self, common: usize) {
        if self.common == common {
            return;
        }
        self.common = common;
        for index in 0..self.len() {
            self.slots[index].head = leading(&self.key(index)[common..]);
        }
    }

    /// Appends a row to the block.
    fn append(&mut self, key: &[u8], value: &[u8]) -> Slot {
        let at = offset(self.bytes.len());
        self.bytes.extend_from_slice(key);
        self.bytes.extend_from_slice(value);
        self.used += key.len() + value.len();
        let head = leading(&key[self.common..]);
        Slot { head, at, key_len: offset(key.len()), value_len: offset(value.len()) }
    }

    /// Makes room for further rows, but little more than they need, because most nodes never grow again.
    fn make_room(&mut self, rows: usize, bytes: usize) {
        if self.slots.capacity() - self.slots.len() < rows {
            self.slots.reserve_exact(rows.max(SLOTS_MORE));
        }
        if self.bytes.capacity() - self.bytes.len() < bytes {
            self.bytes.reserve_exact(bytes.max(BYTES_MORE));
        }
    }

    /// Returns the index that divides the bytes most evenly, with at least one row on each side.
    pub fn middle(&self) -> usize {
        let mut before = 0;
        let half = |slot: &Slot| {
            before += slot.len();
            before > self.used / 2
        };
        self.slots.iter().position(half).unwrap_or(0).clamp(1, self.len() - 1)
    }
}

impl Slot {
    /// Returns the total length of the key and the value, in bytes.
    fn len(&self) -> usize {
        self.key_len as usize + self.value_len as usize
    }
}

/// Converts a place or a length in the block into its stored type.
fn offset(bytes: usize) -> u32 {
    u32::try_from(bytes).expect("keys and values have limits far below")
}

/// Returns the length of the longest common prefix of two keys.
pub(super) fn common_len(a: &[u8], b: &[u8]) -> usize {
    let words = a.chunks_exact(8).zip(b.chunks_exact(8)).take_while(|(a, b)| a == b).count() * 8;
    words + a[words..].iter().zip(&b[words..]).take_while(|(a, b)| a == b).count()
}

/// Returns the first bytes of a key, padded with zeros, as a number that sorts as they do.
fn leading(key: &[u8]) -> u64 {
    if let Some(word) = key.first_chunk() {
        return u64::from_be_bytes(*word);
    }
    let mut word = [0; 8];
    word[..key.len()].copy_from_slice(key);
    u64::from_be_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: a shorter value was written into the space of a longer one, and the rest of that space was never freed.
    #[test]
    fn a_shorter_value_gives_the_memory_of_the_longer_one_back() {
        let mut rows = Packed::default();
        rows.insert(0, b"key", &vec![7; 100_000]);
        rows.replace(0, &[8; 8]);
        assert!(rows.bytes.capacity() < 2_000, "a row of {} bytes", rows.bytes_len());
        assert_eq!((rows.key(0), rows.value(0)), (&b"key"[..], &[8; 8][..]));
    }
}
