//! [`WireFormat`] makes the bytes that end a feed. [`Writer`] writes rows in a format.
//!
//! Clients parse these bytes line by line, not as JSON, so every byte counts.

use std::{fmt::Display, io::Write as _};

use axum::body::Bytes;

use super::query::Mode;

/// Once a chunk has this many bytes, it takes no more rows.
pub(super) const CHUNK_BYTES: usize = 32 << 10;

/// The room for the last row of a chunk. Rows of `_db_updates` are shorter, even if all characters of a name are escaped; only a database
/// with rows of several types may need more.
const ROW_BYTES: usize = 8 << 10;

/// A chunk grows by doubling up to this many bytes, and then gets the rest of its room at once.
const SMALL_BYTES: usize = 8 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WireFormat {
    /// One JSON object, with one row per line.
    Array,
    /// One JSON object per line.
    Lines,
    Events,
}

impl From<Mode> for WireFormat {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Normal | Mode::Longpoll => Self::Array,
            Mode::Continuous => Self::Lines,
            Mode::EventSource => Self::Events,
        }
    }
}

impl WireFormat {
    /// Returns the bytes after the last row. `pending` says how many rows come after the position, if the feed counts them;
    /// `resharded_at` says where a shard was closed.
    pub fn end(
        self,
        last: &impl Display,
        pending: Option<u64>,
        resharded_at: Option<&dyn Display>,
    ) -> Vec<u8> {
        let pending = pending.map_or(String::new(), |pending| format!(",\"pending\":{pending}"));
        let resharded = resharded_at.map_or(String::new(), |at| format!("\"resharded_at\":\"{at}\","));
        match self {
            Self::Array => format!("\n],\n{resharded}\"last_seq\":\"{last}\"{pending}}}\n").into_bytes(),
            Self::Lines => format!("{{{resharded}\"last_seq\":\"{last}\"{pending}}}\n").into_bytes(),
            Self::Events if resharded_at.is_some() => {
                format!("event: resharded\ndata: {{{resharded}\"last_seq\":\"{last}\"}}\n\n").into_bytes()
            }
            Self::Events => Vec::new(),
        }
    }
}

/// Writes rows in a format.
#[derive(Debug)]
pub(super) struct Writer {
    form: WireFormat,
    /// The bytes that were written but not yet taken.
    bytes: Vec<u8>,
    /// Bytes that were written elsewhere, and must be taken first.
    shared: Bytes,
    /// How many rows were written but not yet taken.
    rows: u64,
    /// Whether the feed already has rows.
    has_begun: bool,
}

impl Writer {
    pub fn new(form: WireFormat) -> Self {
        Self { form, bytes: Vec::new(), shared: Bytes::new(), rows: 0, has_begun: false }
    }

    pub fn form(&self) -> WireFormat {
        self.form
    }

    /// Writes a row with the position `seq`. `json` writes the row's JSON object on one line. The id of an event is JSON, too, as in
    /// CouchDB, because clients parse it.
    pub fn row(&mut self, seq: &impl Display, json: impl FnOnce(&mut Vec<u8>)) {
        let (len, most) = (self.bytes.len(), CHUNK_BYTES + ROW_BYTES);
        if len >= SMALL_BYTES && self.bytes.capacity() < most {
            self.bytes.reserve_exact(most - len);
        }
        match self.form {
            WireFormat::Array if self.has_begun => self.bytes.extend_from_slice(b",\r\n"),
            WireFormat::Array | WireFormat::Lines => {}
            WireFormat::Events => self.bytes.extend_from_slice(b"data: "),
        }
        json(&mut self.bytes);
        match self.form {
            WireFormat::Array => {}
            WireFormat::Lines => self.bytes.push(b'\n'),
            WireFormat::Events => {
                writeln!(self.bytes, "\nid: \"{seq}\"\n").expect("a vector takes all bytes");
            }
        }
        self.has_begun = true;
        self.rows += 1;
    }

    /// Adds `rows` rows that were written elsewhere in the same format, which must not be an array. Take all written bytes first.
    pub fn share(&mut self, bytes: Bytes, rows: u64) {
        debug_assert!(self.bytes.is_empty() && self.shared.is_empty(), "they would change places");
        self.shared = bytes;
        self.rows += rows;
        self.has_begun = true;
    }

    /// Returns how many rows were written but not yet taken.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Returns whether the written bytes fill a chunk. If so, take them before the next row.
    pub fn is_full(&self) -> bool {
        self.bytes.len() >= CHUNK_BYTES
    }

    /// Takes the written bytes, and returns them with the number of their rows.
    pub fn take(&mut self) -> (Bytes, u64) {
        let mut bytes = std::mem::take(&mut self.shared);
        if bytes.is_empty() {
            let mut written = std::mem::take(&mut self.bytes);
            // The allocator keeps a block that is more than half full, so this frees memory only for short chunks.
            written.shrink_to_fit();
            bytes = written.into();
        }
        (bytes, std::mem::take(&mut self.rows))
    }
}

pub(super) fn write_string(bytes: &mut Vec<u8>, text: &str) {
    serde_json::to_writer(bytes, text).expect("a vector takes all bytes, and text is JSON");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: chunks grew by doubling, so the server held 64 KB per chunk of 32 KB, and two chunks for a client that did not read.
    #[test]
    fn a_chunk_takes_hardly_more_memory_than_its_bytes() {
        for len in [10, 80, 1_000, 6_500] {
            let mut writer = Writer::new(WireFormat::Lines);
            while !writer.is_full() {
                writer.row(&0, |bytes| bytes.extend(std::iter::repeat_n(b'x', len)));
            }
            assert!(writer.bytes.capacity() <= CHUNK_BYTES + ROW_BYTES, "{}", writer.bytes.capacity());
        }
    }
}
