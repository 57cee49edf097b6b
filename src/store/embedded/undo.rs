//! [`Undo`]: what a group of commits has replaced, as bytes.
//!
//! It is kept for as long as a transaction lives. As bytes in one block it costs a commit one allocation, and the values
//! that were replaced give their memory back at once. If they are many, the tree as it was is shared instead of
//! further values.

use super::rows::Rows;

/// The length of a missing value.
const MISSING: u32 = u32::MAX;

/// How many bytes of replaced rows are copied before the tree is shared. Few in tests, so that they meet it.
const COPIED_LEN_MAX: usize = if cfg!(test) { 4_096 } else { 1 << 20 };

/// The most bytes that are kept for the next group.
const KEPT_LEN: usize = 65_536;

/// The written keys in their order, each with its value before.
#[derive(Debug, Default)]
pub(super) struct Undo {
    bytes: Vec<u8>,
    /// From where on only keys were noted, and the rows at that moment.
    shared: Option<(usize, Rows)>,
}

impl Undo {
    /// How many bytes it keeps.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether so much was replaced that it should share the rows.
    pub fn is_full(&self) -> bool {
        self.shared.is_none() && self.bytes.len() > COPIED_LEN_MAX
    }

    /// Shares `rows`, the present ones, instead of copying what is replaced from now on.
    pub fn share(&mut self, rows: Rows) {
        self.shared = Some((self.bytes.len(), rows));
    }

    /// Notes that `key`, which had the value `before`, is written.
    pub fn push(&mut self, key: &[u8], before: Option<&[u8]>) {
        let before = before.filter(|_| self.shared.is_none());
        let len = |bytes: &[u8]| u32::try_from(bytes.len()).expect("keys and values have limits far below");
        self.bytes.extend_from_slice(&len(key).to_ne_bytes());
        self.bytes.extend_from_slice(&before.map_or(MISSING, len).to_ne_bytes());
        self.bytes.extend_from_slice(key);
        self.bytes.extend_from_slice(before.unwrap_or_default());
    }

    /// The written keys, in the order of the writes.
    pub fn keys(&self) -> impl Iterator<Item = &[u8]> {
        noted(&self.bytes).map(|(key, _)| key)
    }

    /// Makes of `rows`, as they were after the writes, those before them.
    pub fn revert(&self, rows: &mut Rows) {
        let copied = match &self.shared {
            Some((len, before)) => {
                rows.clone_from(before);
                &self.bytes[..*len]
            }
            None => &self.bytes,
        };
        let replaced: Vec<_> = noted(copied).collect();
        for (key, value) in replaced.into_iter().rev() {
            rows.change(key, |_| value);
        }
    }

    /// Takes all, in no more memory than it needs. Leaves the memory of little for the next group.
    pub fn take(&mut self) -> Self {
        let shared = self.shared.take();
        if let Some((len, _)) = shared {
            self.bytes.truncate(len);
        }
        let bytes = if self.bytes.len() <= KEPT_LEN {
            self.bytes.clone()
        } else {
            let mut bytes = std::mem::take(&mut self.bytes);
            bytes.shrink_to_fit();
            bytes
        };
        Self { bytes, shared }
    }

    /// Forgets all, and keeps the memory if it is little.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.shrink_to(KEPT_LEN);
        self.shared = None;
    }
}

/// The keys in `bytes` with their values before, in the order of the writes.
fn noted(bytes: &[u8]) -> impl Iterator<Item = (&[u8], Option<&[u8]>)> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let (key_len, behind) = rest.split_first_chunk()?;
        let (value_len, behind) = behind.split_first_chunk().expect("both lengths were written");
        let (key, behind) = behind.split_at(u32::from_ne_bytes(*key_len) as usize);
        let before = match u32::from_ne_bytes(*value_len) {
            MISSING => None,
            len => Some(&behind[..len as usize]),
        };
        rest = &behind[before.map_or(0, <[u8]>::len)..];
        Some((key, before))
    })
}
