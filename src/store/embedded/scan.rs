//! Reading a range: the stored rows merged with the transaction's own writes, in either direction.

use std::iter::Peekable;

use bytes::Bytes;

use super::{
    overlay::{Overlay, Own},
    rows::Rows,
};
use crate::{
    base::error::StoreError,
    store::{KeyRange, Page, RangeRead, Row, range::key_after},
};

/// Collects rows up to the limits of a read.
struct Collector<'a> {
    read: &'a RangeRead,
    rows: Vec<Row>,
    /// The keys and values of further rows, one behind the other: rows of a block cost no allocation of their own.
    block: Vec<u8>,
    /// The lengths of their keys and values.
    lens: Vec<(usize, usize)>,
    /// The bytes of all keys and values.
    len: usize,
    /// Whether a limit has ended the page.
    more: bool,
}

/// A block of this many bytes gets no more rows. A caller that keeps one row of a page keeps its whole block.
const BLOCK_LEN: usize = 8_192;

impl Collector<'_> {
    /// Adds a row; false if it was the last one that fits.
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

    /// Makes rows of the block.
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

/// The rows of `read` in `root`, under the transaction's own writes. `read` must not be empty.
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

/// The part of the range that `page` depends on: all of it, or up to the last row if a limit ended the page.
pub(super) fn covered(read: &RangeRead, page: &Page) -> KeyRange {
    let mut range = read.range.clone();
    if let Some((last, _)) = page.rows.last().filter(|_| page.more) {
        if read.reverse {
            // A copy, because the range outlives the page.
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
    // The part that is not read yet.
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
            // Go on behind the cleared range, rather than row by row through it.
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
