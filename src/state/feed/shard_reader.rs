//! [`ShardReader`]: a reader of one shard, to its end.

use super::{Feed, FeedPage, FeedRow, Resharded, ShardPage};
use crate::{
    base::{
        cursor::Cursor,
        error::{Error, Result},
    },
    state::keys::ShardId,
};

/// The next event of a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ShardEvent<R> {
    /// At least one row.
    Rows(FeedPage<R>),
    /// The shard is closed and was read to its end. This event is returned exactly once, and nothing follows it.
    Resharded(Resharded),
}

/// Reads one shard from a position on, until the shard is closed and read to its end. The reader never waits: code that follows the shard
/// calls it again when there may be new rows.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::{Bus, BusOptions, Cursor, feed::ShardEvent, store::Store};
///
/// let bus = Bus::open(&Store::memory(), BusOptions::default().shards(2)).await?;
/// let feed = bus.feed();
/// let live = feed.topology_at(Cursor::BEGINNING).await?;
/// let mut reader = feed.shard_reader(live.shards[0], Cursor::BEGINNING);
/// assert!(reader.try_next().await?.is_none(), "nothing yet");
///
/// feed.reshard(8, None).await?;
/// let Some(ShardEvent::Resharded(resharded)) = reader.try_next().await? else { panic!("no rows") };
/// assert_eq!(resharded.successor.shards.len(), 8);
/// assert!(reader.try_next().await?.is_none() && reader.is_ended());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct ShardReader<R> {
    feed: Feed<R>,
    shard: ShardId,
    /// The position up to which rows were returned.
    cursor: Cursor,
    /// The maximum number of rows per read.
    limit: usize,
    /// Whether the shard is known to exist.
    is_known: bool,
    /// Whether the end of the shard was returned.
    is_ended: bool,
}

impl<R: FeedRow> Feed<R> {
    /// Returns a reader of `shard` from `cursor` on, to the end of the shard. [`Feed::topology_at`] returns the shards to read from a
    /// position on.
    pub fn shard_reader(&self, shard: ShardId, cursor: impl Into<Cursor>) -> ShardReader<R> {
        let (feed, cursor) = (self.clone(), cursor.into());
        ShardReader { feed, shard, cursor, limit: 1_000, is_known: false, is_ended: false }
    }
}

impl<R: FeedRow> ShardReader<R> {
    /// Sets the maximum number of rows per read, 1 to 10,000. Default: 1,000.
    #[must_use]
    pub fn with_limit(self, limit: usize) -> Self {
        Self { limit, ..self }
    }

    /// Returns the shard of this reader.
    pub fn shard(&self) -> ShardId {
        self.shard
    }

    /// Returns the position up to which rows were returned. At the end of the shard, read its successors from this position on.
    pub fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// Whether the end of the shard was returned, so that nothing will follow.
    pub fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// Returns the next event; `None` if there is none yet, or if none will follow. Never waits.
    ///
    /// Fails with [`Error::NoShard`] if the feed has no such shard, with [`Error::Expired`] if rows after the position may
    /// have been dropped, and with [`Error::Invalid`] if the position is ahead of the store.
    ///
    /// # Cancel safety
    ///
    /// An event that was not returned is returned by the next call.
    pub async fn try_next(&mut self) -> Result<Option<ShardEvent<R>>> {
        if self.is_ended {
            return Ok(None);
        }
        loop {
            let page = match self.feed.shard_page(self.shard, self.cursor, self.limit).await {
                Err(Error::NoShard { is_trimmed: true, .. }) if self.is_known => {
                    // The shard has been dropped since, so it was empty, and only its end is left.
                    let resharded = self.feed.end_of_trimmed(self.shard).await?;
                    return Ok(Some(self.end(resharded)));
                }
                page => page?,
            };
            self.is_known = true;
            self.cursor = page.next;
            let ShardPage { rows, to, next, more, resharded } = page;
            if !rows.is_empty() {
                // If the shard ends here, the next call finds the end again and returns it.
                return Ok(Some(ShardEvent::Rows(FeedPage { rows, to, next, more })));
            }
            // An empty page before the end means that none of its rows could be decoded: read on.
            if !more {
                return Ok(resharded.map(|resharded| self.end(resharded)));
            }
        }
    }

    fn end(&mut self, resharded: Resharded) -> ShardEvent<R> {
        self.is_ended = true;
        ShardEvent::Resharded(resharded)
    }
}
