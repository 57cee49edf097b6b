//! The store: an ordered, transactional key-value store with FoundationDB's semantics.
//!
//! Upper layers see two concrete types, [`Store`] and [`Transaction`], and the retry runner [`Store::run`]. Behind them is a backend; all
//! backends pass the same conformance suite (`tests/conformance`). The embedded backend keeps everything in memory and, optionally, in a
//! folder; the FoundationDB backend (cargo feature `foundationdb`) is for clusters.
//!
//! # Semantics
//!
//! - A transaction reads at one read version, and sees its own writes. Serializable reads go into its read-conflict set; the commit fails
//!   with `not_committed` (1020) if a key of that set has been written since. Snapshot reads, blind writes and atomic operations conflict
//!   with nothing.
//! - Mutations never fail immediately: a key or value over its limit makes later reads and the commit fail.
//! - A transaction can live for 5 s (after that: 1007) and hold 10 MB (above that: 2101).
//! - A commit puts one versionstamp into all mutations that ask for it. Versionstamps grow with every commit.
//! - The result of a commit can be unknown (1021): the commit may have happened. [`Store::run`] then tries again, so its body must be
//!   correct even if it takes effect twice; the body of [`Bus::run_exactly_once`](crate::Bus::run_exactly_once) takes effect only once.
//! - A watch is a hint. Rescan after it fires, and keep a poll as a fallback.

mod backend;
mod embedded;
mod extension;
#[cfg(feature = "foundationdb")]
mod fdb;
mod handle;
mod retry;
#[cfg(feature = "test-util")]
pub mod testing;
mod transaction;
mod types;

pub use crate::base::{
    env::{Env, Environment},
    error::{OpenCause, StoreError},
};
pub use embedded::{Damage, FolderReport};
pub(crate) use extension::Extension;
#[cfg(feature = "foundationdb")]
pub use fdb::{FoundationDbOptions, stop_network};
pub use handle::Store;
pub use retry::RetryPolicy;
pub(crate) use retry::Tries;
pub(crate) use transaction::AfterCommit;
pub use transaction::{Committed, Pages, Transaction};
pub use types::{
    AtomicOp, FolderOptions, Isolation, KeyRange, Page, Priority, RangeRead, Row, TransactionOption, Watch,
};
pub(crate) use types::{
    KEY_LEN_MAX, Mutation, TRANSACTION_LEN_MAX, TRANSACTION_LIFETIME, VALUE_LEN_MAX, key_after, write_len,
};
