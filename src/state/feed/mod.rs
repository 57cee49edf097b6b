//! The sharded feed: rows ordered by sequence, spread over shards; each id has exactly one row, its newest.
//!
//! Writers append with the store's own stamp, so no key is hot and no writer waits for another. A reader at a read version sees every row
//! up to that version, and no row is ever added below it, so a cursor never skips a row.
//!
//! # Resharding
//!
//! No rows are moved. A reshard closes the current topology entry and opens the next one at its own stamp:
//!
//! ```text
//! sequence   0 ──────────────────── 5678 ─────────────────────── 9012 ────────►
//! entry      {shard 1}, closed      {shards 2, 3, 4, 5}, closed  {shards 6, 7}
//! row of x        ✗ (superseded)         ✗ (superseded)               x
//! ```
//!
//! 1. Every writer has read the current entry serializably, so a writer that a reshard has overtaken cannot commit.
//!    No row is ever added to a closed shard, and every row of an entry is before the first sequence of the next.
//! 2. The shard of an id follows from the row's sequence and the topology history, so it is not stored anywhere.
//! 3. New shard ids continue from those of the current entry, which is never dropped, so no id is reused.

mod counting;
mod handle;
mod merge;
mod reader;
mod reshard;
mod shard_reader;
mod topology;
mod writer;

#[cfg(feature = "http")]
pub(crate) use self::counting::{Counted, KnownMarks, Mark};
pub(crate) use self::{
    handle::SHARDS_READ_AT_ONCE,
    merge::StoredRow,
    reader::{Newest, StoredShardPage},
    reshard::{NewTopology, check_legacy_prefix, check_shards},
    topology::{Entries, Topology},
    writer::{FeedWriter, PendingRows, RowPlace, append, remove},
};
pub use self::{
    handle::{Feed, FeedPage, FeedRow, PAGE_ROWS_MAX, ShardPage},
    shard_reader::{ShardEvent, ShardReader},
    topology::{Resharded, TopologyEntry},
};
use crate::state::{context::Context, keys::FeedId};

/// A feed of a bus whose rows are raw bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawFeed<'a> {
    pub context: &'a Context,
    pub id: &'a FeedId,
}

impl<'a> RawFeed<'a> {
    pub fn new(context: &'a Context, id: &'a FeedId) -> Self {
        Self { context, id }
    }

    pub fn notifications(context: &'a Context) -> Self {
        Self { context, id: &context.feed }
    }
}
