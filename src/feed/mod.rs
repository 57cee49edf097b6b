//! The sharded feed: rows ordered by sequence, spread over shards; each id has exactly one row, its newest.
//!
//! Writers append with the store's own stamp, so no key is hot and no writer waits for another. A reader at a read version
//! sees every row up to that version, and none is ever added below it: a cursor never skips a row.

mod reader;
mod routing;
mod topology;
mod writer;

pub(crate) use reader::{FeedPage, last_readable, newest_of, page, shard_page};
pub(crate) use topology::Topology;
pub(crate) use writer::FeedWriter;
