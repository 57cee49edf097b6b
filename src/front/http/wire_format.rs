//! [`WireFormat`]: how rows, heartbeats and ends of feeds look as bytes; [`Writer`]: puts rows into one.
//!
//! Clients take these bytes apart by lines, not as JSON, so every one of them counts.

use std::{fmt::Display, io::Write as _};

use axum::body::Bytes;

use super::query::Mode;

/// A chunk of so many bytes takes no further row.
pub(super) const CHUNK_BYTES: usize = 32 << 10;

/// How a feed looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WireFormat {
    /// One JSON object, a row a line.
    Array,
    /// A JSON object a line.
    Lines,
    /// Server-sent events.
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
    /// What stands before the first row.
    pub fn begin(self) -> &'static [u8] {
        match self {
            Self::Array => b"{\"results\":[\n",
            Self::Lines | Self::Events => b"",
        }
    }

    /// What is sent so that the line does not fall silent.
    pub fn heartbeat(self) -> &'static [u8] {
        match self {
            Self::Array | Self::Lines => b"\n",
            Self::Events => b"event: heartbeat\ndata: \n\n",
        }
    }

    /// What stands after the last row; `pending` is how many rows stand behind it, if that is told. A shard that was closed says
    /// where.
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

    /// The value of `Content-Type`.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Array | Self::Lines => "application/json",
            Self::Events => "text/event-stream",
        }
    }

    /// The value of `Cache-Control`.
    pub fn cache_control(self) -> &'static str {
        match self {
            Self::Array | Self::Lines => "must-revalidate",
            Self::Events => "no-cache",
        }
    }
}

/// Puts rows into their form.
#[derive(Debug)]
pub(super) struct Writer {
    /// How the feed looks.
    form: WireFormat,
    /// What was written and not taken.
    bytes: Vec<u8>,
    /// What was written by another one, and is to be taken before it.
    shared: Bytes,
    /// How many rows were written and not taken.
    rows: u64,
    /// Whether a row was written before.
    has_begun: bool,
}

impl Writer {
    /// A writer of a feed that looks so.
    pub fn new(form: WireFormat) -> Self {
        Self { form, bytes: Vec::new(), shared: Bytes::new(), rows: 0, has_begun: false }
    }

    /// How the feed looks.
    pub fn form(&self) -> WireFormat {
        self.form
    }

    /// Writes a row with the position `seq`, whose JSON object `json` writes on one line.
    pub fn row(&mut self, seq: &impl Display, json: impl FnOnce(&mut Vec<u8>)) {
        match self.form {
            WireFormat::Array if self.has_begun => self.bytes.extend_from_slice(b",\r\n"),
            WireFormat::Array | WireFormat::Lines => {}
            WireFormat::Events => self.bytes.extend_from_slice(b"data: "),
        }
        json(&mut self.bytes);
        match self.form {
            WireFormat::Array => {}
            WireFormat::Lines => self.bytes.push(b'\n'),
            WireFormat::Events => writeln!(self.bytes, "\nid: {seq}\n").expect("a vector takes all bytes"),
        }
        self.has_begun = true;
        self.rows += 1;
    }

    /// Takes over `rows` rows that were written elsewhere in the same form, which is not an array's. What was written has to
    /// be taken before.
    pub fn share(&mut self, bytes: Bytes, rows: u64) {
        debug_assert!(self.bytes.is_empty() && self.shared.is_empty(), "they would change places");
        self.shared = bytes;
        self.rows += rows;
        self.has_begun = true;
    }

    /// How many rows were written and not taken.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Whether what was written is enough for a chunk, and has to be taken before the next row.
    pub fn is_full(&self) -> bool {
        self.bytes.len() >= CHUNK_BYTES
    }

    /// What was written, and how many rows.
    pub fn take(&mut self) -> (Bytes, u64) {
        let mut bytes = std::mem::take(&mut self.shared);
        if bytes.is_empty() {
            let mut written = std::mem::take(&mut self.bytes);
            // A client that does not read holds no more than it was sent.
            written.shrink_to_fit();
            bytes = written.into();
        }
        (bytes, std::mem::take(&mut self.rows))
    }
}

/// Writes `text` as a JSON string.
pub(super) fn write_string(bytes: &mut Vec<u8>, text: &str) {
    serde_json::to_writer(bytes, text).expect("a vector takes all bytes, and text is JSON");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All bytes of a feed of these rows.
    fn feed(form: WireFormat, rows: &[&str]) -> String {
        let mut writer = Writer::new(form);
        for (place, row) in rows.iter().enumerate() {
            writer.row(&place, |bytes| bytes.extend_from_slice(row.as_bytes()));
        }
        let (bytes, count) = writer.take();
        assert_eq!(count, rows.len() as u64);
        let end = form.end(&7, Some(0), None);
        String::from_utf8([form.begin(), &bytes, &end].concat()).unwrap()
    }

    #[test]
    fn golden_bytes() {
        for (form, rows, expected) in [
            (WireFormat::Array, &[][..], "{\"results\":[\n\n],\n\"last_seq\":\"7\",\"pending\":0}\n"),
            (
                WireFormat::Array,
                &["{}", "{}"],
                "{\"results\":[\n{},\r\n{}\n],\n\"last_seq\":\"7\",\"pending\":0}\n",
            ),
            (WireFormat::Lines, &["{}", "{}"], "{}\n{}\n{\"last_seq\":\"7\",\"pending\":0}\n"),
            (WireFormat::Events, &["{}", "{}"], "data: {}\nid: 0\n\ndata: {}\nid: 1\n\n"),
            (WireFormat::Events, &[], ""),
        ] {
            assert_eq!(feed(form, rows), expected);
        }
    }

    #[test]
    fn without_a_count_nothing_is_said_of_it() {
        let end = |form: WireFormat| String::from_utf8(form.end(&7, None, None)).unwrap();
        assert_eq!(end(WireFormat::Array), "\n],\n\"last_seq\":\"7\"}\n");
        assert_eq!(end(WireFormat::Lines), "{\"last_seq\":\"7\"}\n");
    }

    #[test]
    fn a_closed_shard_says_where() {
        let end = |form: WireFormat| String::from_utf8(form.end(&7, Some(0), Some(&8))).unwrap();
        assert_eq!(
            end(WireFormat::Array),
            "\n],\n\"resharded_at\":\"8\",\"last_seq\":\"7\",\"pending\":0}\n"
        );
        assert_eq!(end(WireFormat::Lines), "{\"resharded_at\":\"8\",\"last_seq\":\"7\",\"pending\":0}\n");
        assert_eq!(
            end(WireFormat::Events),
            "event: resharded\ndata: {\"resharded_at\":\"8\",\"last_seq\":\"7\"}\n\n"
        );
    }
}
