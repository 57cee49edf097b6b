//! Moving a bus to another store: everything that it keeps, as a stream of bytes.
//!
//! Versionstamps start over in another store, so the incarnation is raised by one: what is written there sorts after all
//! that was written before, and the positions of readers stay valid (CouchDB RFC 003). What belongs to running processes
//! (doorbells, fold marks, nodes, leases) stays behind, and so do stamps that mean nothing elsewhere (heads, pulses, versions).
//!
//! # Fences
//!
//! Nothing of this may happen beside processes that work with the bus. What can be fenced is fenced:
//!
//! - an import writes a mark, by which [`Bus::open`](crate::Bus::open) refuses until the import has ended; and it fails if a bus is
//!   under the prefix, be it in the middle;
//! - an export and a raise watch the nodes first, and refuse if one lives ([`Silence`](crate::state::membership::Silence)); a raise
//!   removes nodes and leases in its own transaction, so that a process that was only paused commits no work any more.
//!
//! Producers and writers of documents keep no row by which they could be found: it takes their user to stop them.
//!
//! # Format
//!
//! A header (magic bytes, format, the stored configuration), then records, then the end:
//!
//! | tag | record |
//! |---|---|
//! | 1 | a key after the prefix of the bus, and its value |
//! | 0 | how many records there were (8 bytes), and the XXH3 hash (8) of all bytes before the hash |
//!
//! Rows of a legacy range, which lie elsewhere, go along as the rows of shard 0 that they are read as.
//!
//! Keys and values are preceded by their lengths, 4 bytes each; all numbers are big-endian.

mod export;
mod import;
mod incarnation;
mod stream;

pub use self::export::{ExportOptions, Exported};
pub(super) use self::{
    export::export,
    import::{check_no_import, discard, import},
    incarnation::{raise, stored},
};
