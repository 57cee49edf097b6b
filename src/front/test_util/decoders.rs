//! [`Decoder`]: all decoders of bytes that come from outside: from the store, a client or a file.
//!
//! No decoder may panic, whatever its input. An accepted value must stay the same when written and read again. `fuzz/` runs the decoders on
//! a fuzzer's inputs, and `tests/decoders.rs` on rows of a store, some altered. Both also open folders with such bytes as a file.

use std::fmt::Debug;

use bytes::Bytes;

use crate::{
    base::{
        cursor::{Cursor, Start},
        encoding::{Sequence, Tally},
        error::Result,
        event::{DbInstance, DbName, DdocId},
        notification::Notification,
    },
    roles::changes::{Change, DocId, Revision},
    state::{
        feed::FeedRow,
        keys::{
            Config, ConsumerName, ConsumerRow, DeferredRow, EndOfIncarnation, FoldMark, Keys, Lease,
            MemberlessSince, NodeId, NodeRow, RowSpace, RunResult, ShardId, TopologyRow, watermark,
        },
    },
};

/// A kind of decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Decoder {
    /// The decoders of keys, and of rows that need their key to be decoded. The first byte of the input is the length of the key.
    Keys,
    /// The decoders of values.
    Values,
    /// The parsers of text: cursors, sequences, names, revisions.
    Texts,
    /// The query string and the headers of a request, one per line.
    #[cfg(feature = "http")]
    Query,
    /// The body of a request that records events.
    #[cfg(feature = "http")]
    Events,
}

impl Decoder {
    /// All kinds.
    pub const ALL: &[Self] = &[
        Self::Keys,
        Self::Values,
        Self::Texts,
        #[cfg(feature = "http")]
        Self::Query,
        #[cfg(feature = "http")]
        Self::Events,
    ];

    /// Decodes `input`.
    ///
    /// # Panics
    ///
    /// If a decoder panics, or if a value changes when it is written and read again.
    pub fn run(self, input: &[u8]) {
        match self {
            Self::Keys => keys(input),
            Self::Values => values(input),
            Self::Texts => texts(&String::from_utf8_lossy(input)),
            #[cfg(feature = "http")]
            Self::Query => crate::front::http::decode_query(input),
            #[cfg(feature = "http")]
            Self::Events => crate::front::http::decode_events(input),
        }
    }
}

/// Runs the decoders of keys.
fn keys(input: &[u8]) {
    let (len, rest) = input.split_first().unwrap_or((&0, &[]));
    let (key, value) = rest.split_at(usize::from(*len).min(rest.len()));
    let keys = Keys::new(&b"bus"[..]).expect("the prefix is short");
    let row = (Bytes::copy_from_slice(key), Bytes::copy_from_slice(value));
    drop(keys.age_mark_of(&row));
    drop(keys.ddoc_row(&row));
    drop(keys.node_of(key));
    drop(keys.role_of_node(key));
    drop(keys.node_of_role(key));
    drop(keys.drain_row(row.clone()));
    drop(keys.lease_row(key, value));
    drop(keys.consumer_of(key));
    drop(keys.consumer_checkpoint_of(key));
    drop(keys.deferred_id(key));
    drop(keys.newest_id(key));
    drop(keys.topology_key(key));
    drop(RowSpace::new(&b"bus"[..]).sequence(key));
    if let Ok((feed, row)) = keys.topology_row(&row) {
        assert_eq!(keys.topology(&feed, row.first), key, "a topology entry is stored elsewhere");
    }
}

/// Decodes `bytes`. An accepted value must stay the same when it is written and read again.
fn round<T: PartialEq + Debug>(
    bytes: &[u8],
    read: impl Fn(&[u8]) -> Result<T>,
    write: impl Fn(&T) -> Vec<u8>,
) {
    let Ok(value) = read(bytes) else { return };
    let again = read(&write(&value)).expect("what was written can be read");
    assert_eq!(value, again, "it was read from {bytes:?}");
}

/// Runs the decoders of values.
fn values(input: &[u8]) {
    round(input, Config::from_bytes, |it| it.to_bytes());
    round(input, EndOfIncarnation::from_bytes, EndOfIncarnation::to_bytes);
    round(input, ConsumerRow::from_bytes, ConsumerRow::to_bytes);
    round(input, DeferredRow::from_bytes, DeferredRow::to_bytes);
    round(input, MemberlessSince::from_bytes, |it| it.to_bytes());
    drop(watermark(input));
    drop(RunResult::from_bytes(input));
    round(input, FoldMark::from_bytes, |it| it.to_bytes());
    round(input, Lease::from_bytes, |it| it.to_bytes());
    round(input, NodeRow::from_bytes, |it| it.to_bytes());
    round(input, |bytes| TopologyRow::from_bytes(Sequence::MIN, bytes), TopologyRow::to_bytes);
    round(input, |bytes| Notification::from_bytes(Sequence::MAX, bytes), Notification::to_bytes);
    round(input, Cursor::from_bytes, Cursor::to_bytes);
    round(input, Sequence::from_bytes, |it| it.as_bytes().to_vec());
    round(input, Tally::from_bytes, |it| it.to_bytes().to_vec());
    drop(Change::from_stored(Sequence::MAX, input));
}

/// Runs the parsers of text.
fn texts(text: &str) {
    fn round<T: std::str::FromStr + ToString + PartialEq + Debug>(text: &str) {
        let Ok(value) = text.parse::<T>() else { return };
        let again = value.to_string().parse::<T>().ok();
        assert_eq!(again.as_ref(), Some(&value), "it was read from {text:?}");
    }
    round::<Cursor>(text);
    round::<Sequence>(text);
    round::<DbInstance>(text);
    round::<Revision>(text);
    round::<NodeId>(text);
    drop(text.parse::<Start>());
    drop(DbName::new(text));
    drop(DdocId::new(text));
    drop(DocId::new(text));
    drop(ConsumerName::new(text));
    drop(text.parse::<u64>().map(ShardId));
}
