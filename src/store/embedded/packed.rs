//! [`Packed`]: a few rows in one block of memory, sorted by key.
//!
//! The rows of a tree's node are looked up, changed and copied together. In one block they are a few lines of the
//! processor's cache, and a copy of them copies bytes and counts no references.

use std::cmp::Ordering;

/// The place of a row in the block: its key, and its value behind the key.
#[derive(Debug, Clone, Copy)]
struct Slot {
    at: u32,
    key_len: u32,
    value_len: u32,
}

/// Rows by key.
#[derive(Debug, Default)]
pub(super) struct Packed {
    /// The places of the rows, in the order of the keys.
    slots: Vec<Slot>,
    /// The keys and values, in any order. There may be bytes in between that no row uses any more.
    bytes: Vec<u8>,
    /// The bytes that rows use.
    used: usize,
}

/// Least room that is made for further rows, in rows and in bytes.
const SLOTS_MORE: usize = 8;
const BYTES_MORE: usize = 256;

/// A copy has no unused bytes.
impl Clone for Packed {
    fn clone(&self) -> Self {
        let mut copy = Self::default();
        copy.extend(self, 0, self.len());
        copy
    }
}

impl Packed {
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// The bytes of all keys and values.
    pub fn bytes_len(&self) -> usize {
        self.used
    }

    pub fn key(&self, index: usize) -> &[u8] {
        self.key_of(self.slots[index])
    }

    pub fn value(&self, index: usize) -> &[u8] {
        let Slot { at, value_len, key_len } = self.slots[index];
        &self.bytes[at as usize + key_len as usize..][..value_len as usize]
    }

    fn key_of(&self, Slot { at, key_len, .. }: Slot) -> &[u8] {
        &self.bytes[at as usize..][..key_len as usize]
    }

    /// The index of `key`, or where it would be.
    pub fn find(&self, key: &[u8]) -> Result<usize, usize> {
        let (Some(&first), Some(&last)) = (self.slots.first(), self.slots.last()) else { return Err(0) };
        // All keys begin with what the first and the last have in common. Mostly that is all but a few bytes.
        let common = common_len(self.key_of(first), self.key_of(last));
        let (head, tail) = key.split_at(common.min(key.len()));
        match head.cmp(&self.key_of(first)[..common]) {
            Ordering::Less => return Err(0),
            Ordering::Greater => return Err(self.len()),
            Ordering::Equal => {}
        }
        let sought = leading(tail);
        self.slots.binary_search_by(|&slot| {
            let rest = &self.key_of(slot)[common..];
            leading(rest).cmp(&sought).then_with(|| rest.cmp(tail))
        })
    }

    /// How many keys are less than `key`.
    pub fn rank(&self, key: &[u8]) -> usize {
        self.find(key).unwrap_or_else(|index| index)
    }

    pub fn insert(&mut self, index: usize, key: &[u8], value: &[u8]) {
        self.make_room(1, key.len() + value.len());
        let slot = self.append(key, value);
        self.slots.insert(index, slot);
    }

    /// Gives the row at `index` another value.
    pub fn replace(&mut self, index: usize, value: &[u8]) {
        let Slot { at, value_len, key_len } = self.slots[index];
        if value.len() <= value_len as usize {
            let begin = at as usize + key_len as usize;
            self.bytes[begin..begin + value.len()].copy_from_slice(value);
            self.slots[index].value_len = value.len() as u32;
            self.used -= value_len as usize - value.len();
            self.compact();
        } else {
            let key = self.key(index).to_vec();
            self.remove(index);
            self.insert(index, &key, value);
        }
    }

    pub fn remove(&mut self, index: usize) {
        let Slot { value_len, key_len, .. } = self.slots.remove(index);
        self.used -= key_len as usize + value_len as usize;
        self.compact();
    }

    /// Gives memory back if rows use less than half of it.
    fn compact(&mut self) {
        if self.bytes.len() > 2 * self.used + BYTES_MORE {
            *self = self.clone();
        }
    }

    /// Removes the rows from `index` on, and returns them.
    pub fn split_off(&mut self, index: usize) -> Self {
        let (mut left, mut right) = (Self::default(), Self::default());
        left.extend(self, 0, index);
        right.extend(self, index, self.len());
        *self = left;
        right
    }

    /// Adds all rows of `other`, whose keys are greater.
    pub fn append_all(&mut self, other: &Self) {
        self.extend(other, 0, other.len());
    }

    /// Adds the rows of `other` from one index up to another; their keys are greater.
    fn extend(&mut self, other: &Self, begin: usize, end: usize) {
        let bytes =
            other.slots[begin..end].iter().map(|slot| slot.key_len as usize + slot.value_len as usize);
        self.make_room(end - begin, bytes.sum());
        for index in begin..end {
            let slot = self.append(other.key(index), other.value(index));
            self.slots.push(slot);
        }
    }

    /// Puts a row behind the others of the block.
    fn append(&mut self, key: &[u8], value: &[u8]) -> Slot {
        let len = |bytes: usize| u32::try_from(bytes).expect("keys and values have limits far below");
        let at = len(self.bytes.len());
        self.bytes.extend_from_slice(key);
        self.bytes.extend_from_slice(value);
        self.used += key.len() + value.len();
        Slot { at, key_len: len(key.len()), value_len: len(value.len()) }
    }

    /// Makes room for further rows; little more than they need, since most nodes never grow again.
    fn make_room(&mut self, rows: usize, bytes: usize) {
        if self.slots.capacity() - self.slots.len() < rows {
            self.slots.reserve_exact(rows.max(SLOTS_MORE));
        }
        if self.bytes.capacity() - self.bytes.len() < bytes {
            self.bytes.reserve_exact(bytes.max(BYTES_MORE));
        }
    }

    /// The index that divides the bytes most evenly, with a row on each side.
    pub fn middle(&self) -> usize {
        let mut before = 0;
        let half = |slot: &Slot| {
            before += slot.key_len as usize + slot.value_len as usize;
            before > self.used / 2
        };
        self.slots.iter().position(half).unwrap_or(0).clamp(1, self.len() - 1)
    }
}

/// How many bytes the keys have in common at their beginning.
pub(super) fn common_len(a: &[u8], b: &[u8]) -> usize {
    let words = a.chunks_exact(8).zip(b.chunks_exact(8)).take_while(|(a, b)| a == b).count() * 8;
    words + a[words..].iter().zip(&b[words..]).take_while(|(a, b)| a == b).count()
}

/// The first bytes of a key as a number with the same order, padded with zeros.
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

    /// Regression: a shorter value was written into the room of the longer one, which stayed for ever.
    #[test]
    fn a_shorter_value_gives_the_memory_of_the_longer_one_back() {
        let mut rows = Packed::default();
        rows.insert(0, b"key", &vec![7; 100_000]);
        rows.replace(0, &[8; 8]);
        assert!(rows.bytes.capacity() < 2_000, "a row of {} bytes", rows.bytes_len());
        assert_eq!((rows.key(0), rows.value(0)), (&b"key"[..], &[8; 8][..]));
    }
}
