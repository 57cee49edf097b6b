//! [`ShardReader`]: reads one shard to its end.

use super::{Feed, FeedPage, FeedRow, Resharded, ShardPage};
use crate::{
    base::{
        cursor::Cursor,
        error::{Error, Result},
    },
    state::keys::ShardId,
};

/// What a shard has to tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ShardEvent<R> {
    /// Rows, at least one.
    Rows(FeedPage<R>),
    /// The shard is closed and was read to its end. This comes exactly once, and nothing after it.
    Resharded(Resharded),
}

/// Reads one shard from a position on, until it is closed and there is nothing left. It waits for nothing: whoever follows a
/// shard asks again when something may have come.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::{Bus, BusOptions, Cursor, feed::ShardEvent, store::Database};
///
/// let bus = Bus::open(&Database::memory(), BusOptions { shards: 2, ..BusOptions::default() }).await?;
/// let feed = bus.feed();
/// let live = feed.topology_at(Cursor::NOTHING).await?;
/// let mut reader = feed.shard_reader(live.shards[0], Cursor::NOTHING);
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
    /// The feed.
    feed: Feed<R>,
    /// The shard.
    shard: ShardId,
    /// What was returned.
    cursor: Cursor,
    /// The most rows that are read at once.
    limit: usize,
    /// Whether the shard was found to exist.
    is_known: bool,
    /// Whether its end was told.
    is_ended: bool,
}

impl<R: FeedRow> Feed<R> {
    /// Reads `shard` from `cursor` on, to its end. Which shards to read from a position on, [`Feed::topology_at`] tells.
    pub fn shard_reader(&self, shard: ShardId, cursor: impl Into<Cursor>) -> ShardReader<R> {
        let (feed, cursor) = (self.clone(), cursor.into());
        ShardReader { feed, shard, cursor, limit: 1_000, is_known: false, is_ended: false }
    }
}

impl<R: FeedRow> ShardReader<R> {
    /// Reads at most `limit` rows at once, 1 to 10,000. Default: 1,000.
    #[must_use]
    pub fn with_limit(self, limit: usize) -> Self {
        Self { limit, ..self }
    }

    /// Which shard it reads.
    pub fn shard(&self) -> ShardId {
        self.shard
    }

    /// What was returned. At the end of the shard, its successors are read from here on.
    pub fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// Whether the end of the shard was told: nothing will follow.
    pub fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// What comes next; `None` if there is nothing now, or nothing will follow. Never waits.
    ///
    /// Fails with [`Error::NoShard`] if the feed has no such shard, with [`Error::Expired`] if rows after the position may
    /// have been dropped, and with [`Error::Invalid`] if the position is ahead of the store.
    ///
    /// # Cancel safety
    ///
    /// What was not returned is returned by the next call.
    pub async fn try_next(&mut self) -> Result<Option<ShardEvent<R>>> {
        if self.is_ended {
            return Ok(None);
        }
        loop {
            let page = match self.feed.shard_page(self.shard, self.cursor, self.limit).await {
                Err(Error::NoShard { is_trimmed: true, .. }) if self.is_known => {
                    // It was dropped since, so it was empty: what is left of it is its end.
                    let resharded = self.feed.end_of_trimmed(self.shard).await?;
                    return Ok(Some(self.end(resharded)));
                }
                page => page?,
            };
            self.is_known = true;
            self.cursor = page.next;
            let ShardPage { rows, to, next, more, resharded } = page;
            if !rows.is_empty() {
                // The end is informed by the next call, which finds it again.
                return Ok(Some(ShardEvent::Rows(FeedPage { rows, to, next, more })));
            }
            // Of a page without rows none could be decoded, if there are more.
            if !more {
                return Ok(resharded.map(|resharded| self.end(resharded)));
            }
        }
    }

    /// Tells the end.
    fn end(&mut self, resharded: Resharded) -> ShardEvent<R> {
        self.is_ended = true;
        ShardEvent::Resharded(resharded)
    }
}
