//! Reading a range: the stored rows merged with the transaction's own writes, in either direction.

use std::iter::Peekable;

use bytes::Bytes;

use super::{
    conflicts::bounds,
    core::Root,
    overlay::{Overlay, Own},
};
use crate::{
    base::error::StoreError,
    store::{KeyRange, Page, RangeRead, range::key_after},
};

/// Collects rows up to the limits of a read.
struct Collector<'a> {
    read: &'a RangeRead,
    /// The rows so far.
    page: Page,
    /// Their bytes.
    len: usize,
}

impl Collector<'_> {
    /// Adds a row; false if it was the last one that fits.
    fn push(&mut self, key: &Bytes, value: Bytes) -> bool {
        self.len += key.len() + value.len();
        self.page.rows.push((key.clone(), value));
        self.page.more = self.page.rows.len() >= self.read.limit || self.len >= self.read.target_bytes;
        !self.page.more
    }
}

/// The rows of `read` in `root`, under the transaction's own writes. `read` must not be empty.
pub(super) fn page(root: &Root, overlay: Option<&Overlay>, read: &RangeRead) -> Result<Page, StoreError> {
    let mut collector = Collector { read, page: Page::default(), len: 0 };
    match overlay {
        None => {
            let mut rows = root.range::<_, [u8]>(bounds(&read.range));
            while let Some((key, value)) = if read.reverse { rows.next_back() } else { rows.next() } {
                if !collector.push(key, value.clone()) {
                    break;
                }
            }
        }
        Some(overlay) => merged(root, overlay, &mut collector)?,
    }
    Ok(collector.page)
}

/// The part of the range that `page` depends on: all of it, or up to the last row if a limit ended the page.
pub(super) fn covered(read: &RangeRead, page: &Page) -> KeyRange {
    let mut range = read.range.clone();
    if let Some((last, _)) = page.rows.last().filter(|_| page.more) {
        if read.reverse {
            range.begin = last.clone();
        } else {
            range.end = key_after(last);
        }
    }
    range
}

/// The rows of one side, in the direction of the read.
type Rows<'a, V> = Peekable<Box<dyn Iterator<Item = (&'a Bytes, &'a V)> + 'a>>;

/// `rows`, reversed if `reverse` is set.
fn directed<'a, V>(
    rows: impl DoubleEndedIterator<Item = (&'a Bytes, &'a V)> + 'a,
    reverse: bool,
) -> Rows<'a, V> {
    let rows: Box<dyn Iterator<Item = _>> = if reverse { Box::new(rows.rev()) } else { Box::new(rows) };
    rows.peekable()
}

/// Merges the stored rows with the transaction's own keys.
fn merged(root: &Root, overlay: &Overlay, collector: &mut Collector<'_>) -> Result<(), StoreError> {
    let read = collector.read;
    let stored_within = |range: &KeyRange| directed(root.range::<_, [u8]>(bounds(range)), read.reverse);
    let mut stored = stored_within(&read.range);
    let mut own = directed(overlay.keys(&read.range), read.reverse);
    // The part that is not read yet.
    let mut rest = read.range.clone();
    loop {
        let next = match (stored.peek(), own.peek()) {
            (None, None) => break,
            (Some((key, _)), None) | (None, Some((key, _))) => (*key).clone(),
            (Some((a, _)), Some((b, _))) if read.reverse => (*a).max(*b).clone(),
            (Some((a, _)), Some((b, _))) => (*a).min(*b).clone(),
        };
        let stored_value = stored.next_if(|(key, _)| **key == next).map(|(_, value)| value);
        let own_state = own.next_if(|(key, _)| **key == next).map(|(_, state)| state);
        if own_state.is_none()
            && let Some(cleared) = overlay.cleared(&next)
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
        let passed = pass(&mut rest, &next, read.reverse);
        if overlay.has_unreadable(&passed) {
            return Err(StoreError::ACCESSED_UNREADABLE);
        }
        let value = match own_state {
            None => stored_value.cloned(),
            Some(state) => Own::over(state, stored_value)?,
        };
        if let Some(value) = value
            && !collector.push(&next, value)
        {
            return Ok(());
        }
    }
    if overlay.has_unreadable(&rest) { Err(StoreError::ACCESSED_UNREADABLE) } else { Ok(()) }
}

/// Moves `rest` past `key` and returns the passed range, `key` included.
fn pass(rest: &mut KeyRange, key: &Bytes, reverse: bool) -> KeyRange {
    if reverse {
        let passed = KeyRange { begin: key.clone(), end: rest.end.clone() };
        rest.end = key.clone();
        passed
    } else {
        let after = key_after(key);
        let passed = KeyRange { begin: rest.begin.clone(), end: after.clone() };
        rest.begin = after;
        passed
    }
}
