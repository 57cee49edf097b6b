//! Moves a bus to another store: writes all its data as a stream of bytes, and reads it back.
//!
//! Versionstamps start over in another store, so the incarnation is raised by one: everything written there sorts after everything written
//! before, and the positions of readers stay valid (CouchDB RFC 003). Data of running processes (doorbells, fold marks, nodes, leases) is
//! not moved, nor are stamps that mean nothing elsewhere (pulses, versions).
//!
//! # Fences
//!
//! A move must not happen while processes work with the bus. Fences prevent this as far as they can:
//!
//! - An import writes a mark that makes [`Bus::open`](crate::Bus::open) fail until the import has ended. The import fails if there is a bus
//!   under the prefix, even one that appears while it runs.
//! - An export first watches the nodes, and fails if one is alive ([`Silence`](crate::state::membership::Silence)). So does a raise, unless
//!   the store is older than its rows, in which case nodes do nothing. A raise removes nodes and leases in its own transaction, so that a
//!   process that was only paused can no longer commit work.
//!
//! No row shows that producers or writers of documents are running, so the operator has to stop them.
//!
//! # Format
//!
//! A header (magic bytes, format, the stored configuration), then records, then the end:
//!
//! | tag | record |
//! |---|---|
//! | 1 | a key after the prefix of the bus, and its value |
//! | 0 | the number of records (8 bytes), the end of the incarnation as its key has it, with the last sequence that the export could see, and the XXH3 hash (8) of all bytes before the hash |
//!
//! The rows of a legacy range, which are stored elsewhere, are exported as rows of shard 0, because that is how readers see them.
//!
//! Keys and values are preceded by their lengths, 4 bytes each; all numbers are big-endian.

mod export;
mod import;
mod of_bus;

pub use self::export::{ExportOptions, Exported};
pub(super) use self::import::check_no_import;
