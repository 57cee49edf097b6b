//! [`Feed`]: a feed as its readers see it, with rows of one type.

use std::{fmt, marker::PhantomData, sync::Arc};

use super::{
    NewTopology, RawFeed, Resharded, TopologyEntry,
    merge::StoredRow,
    reader::{Begun, StoredPage},
};
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        error::{Error, Result},
    },
    state::{
        context::Context,
        keys::{FeedId, Lanes, ShardId},
        routing::SchemeId,
        skipped::SkippedAt,
    },
    store::{RetryPolicy, Transaction},
};

/// The maximum number of rows in a page.
pub const PAGE_ROWS_MAX: usize = 10_000;

/// How many shards are read at once if no other limit applies.
pub(crate) const SHARDS_READ_AT_ONCE: usize = 64;

/// A type of row that a feed can hold.
pub trait FeedRow: Sized + Send + Sync + 'static {
    /// Decodes the row stored at `sequence` as `bytes`. Fails with [`Error::Corrupt`].
    fn from_stored(sequence: Sequence, bytes: &[u8]) -> Result<Self>;

    /// Returns the position of the row.
    fn sequence(&self) -> Sequence;

    /// Returns the id of the row, a database name or a document id. A feed has one row per id, and routes rows to shards by id.
    fn id(&self) -> &[u8];
}

/// Some rows of a feed, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FeedPage<R> {
    /// The rows. Rows that this program cannot decode, because they are damaged or were written by a later version, are left out, counted
    /// in [`StatsSnapshot::rows_skipped`](crate::node::StatsSnapshot::rows_skipped) and named by
    /// [`Bus::skipped_rows`](crate::Bus::skipped_rows).
    pub rows: Vec<Arc<R>>,
    /// Everything up to here was read, and nothing will ever be added before it. For rows read backwards, everything from here on was read.
    ///
    /// While there is more to read, a reader does not know everything up to here: a row of a later page may have superseded an earlier one.
    /// So derive the news of all pages from the position where the first page began ([`Cursor::knowledge`]), until there is nothing more to
    /// read.
    pub to: Sequence,
    /// Where the next page begins.
    pub next: Cursor,
    /// Whether there was more to read when the page was read.
    pub more: bool,
}

/// Some rows of one shard, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardPage<R> {
    /// The rows; see [`FeedPage::rows`].
    pub rows: Vec<Arc<R>>,
    /// Everything in the shard up to here was read. This position is never beyond the end of a closed shard.
    pub to: Sequence,
    /// Where the next page begins, even if it is the first page of a successor.
    pub next: Cursor,
    /// Whether there was more to read when the page was read.
    pub more: bool,
    /// The successors, if the shard is closed and was read to its end. Further pages repeat them; a [`ShardReader`](super::ShardReader)
    /// returns them only once.
    pub resharded: Option<Resharded>,
}

/// A feed: the newest row of each id, ordered by sequence over all shards. Clones are cheap.
pub struct Feed<R> {
    pub(crate) context: Arc<Context>,
    pub(crate) id: FeedId,
    rows: PhantomData<fn() -> R>,
}

impl<R> Clone for Feed<R> {
    fn clone(&self) -> Self {
        Self { context: Arc::clone(&self.context), id: self.id.clone(), rows: PhantomData }
    }
}

impl<R> fmt::Debug for Feed<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Feed").field(&self.id).finish()
    }
}

impl<R: FeedRow> Feed<R> {
    /// The maximum number of rows in a page.
    pub const PAGE_ROWS_MAX: usize = PAGE_ROWS_MAX;

    pub(crate) fn new(context: Arc<Context>, id: FeedId) -> Self {
        Self { context, id, rows: PhantomData }
    }

    pub(crate) fn raw(&self) -> RawFeed<'_> {
        RawFeed::new(&self.context, &self.id)
    }

    /// Returns the rows after `cursor`, at most `limit` (1 to 10,000), in the order of their sequences over all shards and all topologies.
    /// Begin at [`Cursor::BEGINNING`] or at a sequence, and continue at [`FeedPage::next`]. Each page has its own transaction, so reading a
    /// backlog may take any amount of time. A row that is superseded meanwhile appears later, at its new position.
    ///
    /// # Errors
    ///
    /// [`Error::Expired`] if rows after the cursor may have been dropped, or if an embedded store never gave out the cursor, because the
    /// cursor belongs to another history; [`Error::Invalid`] if the cursor is ahead of a cluster or belongs to a later incarnation;
    /// [`Error::NoFeed`] if there is no such feed.
    pub async fn page(&self, cursor: impl Into<Cursor>, limit: usize) -> Result<FeedPage<R>> {
        let cursor = cursor.into();
        self.context.store.run(async |tx| self.page_in(&tx, cursor, limit).await).await
    }

    /// Does the same as [`Feed::page`], within the caller's transaction.
    pub async fn page_in(
        &self,
        tx: &Transaction,
        cursor: impl Into<Cursor>,
        limit: usize,
    ) -> Result<FeedPage<R>> {
        check_limit(limit)?;
        Ok(self.page_of(&self.raw().page(tx, cursor.into(), limit).await?))
    }

    /// Does the same as [`Feed::page_in`] for a reader that has already begun, but reads only the shards on `lanes`, which must have all
    /// rows after the cursor.
    pub(crate) async fn page_of_lanes_in(
        &self,
        tx: &Transaction,
        begun: Begun,
        lanes: Lanes,
        limit: usize,
    ) -> Result<FeedPage<R>> {
        check_limit(limit)?;
        Ok(self.page_of(&self.raw().page_of_lanes(tx, begun, lanes, limit).await?))
    }

    /// Returns the rows before `before`, at most `limit` (1 to 10,000), newest first. Start at [`Sequence::MAX`], and continue at
    /// [`FeedPage::to`]. Rows that are superseded between two pages move to positions that were already read. To get these as well, call
    /// [`Feed::now`] before the first page, and read forward from there.
    pub async fn page_before(&self, before: Sequence, limit: usize) -> Result<FeedPage<R>> {
        self.context.store.run(async |tx| self.page_before_in(&tx, before, limit).await).await
    }

    /// Does the same as [`Feed::page_before`], within the caller's transaction.
    pub async fn page_before_in(
        &self,
        tx: &Transaction,
        before: Sequence,
        limit: usize,
    ) -> Result<FeedPage<R>> {
        check_limit(limit)?;
        Ok(self.page_of(&self.raw().page_before(tx, before, limit).await?))
    }

    /// Returns the rows of `shard` after `cursor`, at most `limit` (1 to 10,000). All rows of an id that are written under one topology are
    /// in one shard, so readers of different shards are independent.
    ///
    /// Fails with [`Error::NoShard`] if the feed has no such shard, and as [`Feed::page`] does.
    pub async fn shard_page(
        &self,
        shard: ShardId,
        cursor: impl Into<Cursor>,
        limit: usize,
    ) -> Result<ShardPage<R>> {
        let cursor = cursor.into();
        self.context.store.run(async |tx| self.shard_page_in(&tx, shard, cursor, limit).await).await
    }

    /// Does the same as [`Feed::shard_page`], within the caller's transaction.
    pub async fn shard_page_in(
        &self,
        tx: &Transaction,
        shard: ShardId,
        cursor: impl Into<Cursor>,
        limit: usize,
    ) -> Result<ShardPage<R>> {
        check_limit(limit)?;
        let read = self.raw().shard_page(tx, shard, cursor.into(), limit).await?;
        let FeedPage { rows, to, next, more } = self.page_of(&read.page);
        Ok(ShardPage { rows, to, next, more, resharded: read.resharded })
    }

    /// Returns the history of the feed's shards, oldest first. Closed entries without rows are dropped from time to time.
    pub async fn topology(&self) -> Result<Vec<TopologyEntry>> {
        self.context
            .store
            .run(async |tx| {
                Ok(self.raw().topology(&tx).await?.entries().iter().map(TopologyEntry::from).collect())
            })
            .await
    }

    /// Returns the shards that were live at `since`. A reader of single shards starts with these, and continues with the successors of each
    /// closed shard, so it misses nothing after `since`. An empty shard may be dropped before its first read, which then fails with
    /// [`Error::NoShard`]. In that case call this again.
    ///
    /// Fails as [`Feed::page`] does.
    pub async fn topology_at(&self, since: impl Into<Cursor>) -> Result<TopologyEntry> {
        let since = since.into();
        self.context.store.run(async |tx| self.raw().topology_at(&tx, since).await).await
    }

    /// Returns the shards that can have rows. Ids are unique within the feed, and are never used again.
    pub async fn shards(&self) -> Result<Vec<ShardId>> {
        Ok(self.topology().await?.into_iter().flat_map(|entry| entry.shards).collect())
    }

    /// Changes the number of shards to `shards`, 1 to 1,000, and the hashing scheme if `scheme` names one. The feed can be read and written
    /// meanwhile. No rows are moved: new rows go to the new shards from the sequence of the reshard on. Returns the new entry.
    ///
    /// A writer that a reshard overtakes tries again; a reader of a single shard gets [`Resharded`]. Concurrent reshards happen one at a
    /// time. A reshard whose result is unknown is not done twice.
    ///
    /// Fails with [`Error::Invalid`] if `shards` is outside its limits, with [`Error::UnknownScheme`] if this process does not know the
    /// scheme, with [`Error::NoFeed`] if there is no such feed, and with [`Error::OlderThanRows`]. In these cases nothing has changed.
    pub async fn reshard(&self, shards: u32, scheme: Option<SchemeId>) -> Result<TopologyEntry> {
        let store = &self.context.store;
        let new = NewTopology::new(shards, scheme, store.env())?;
        let reshard = async |tx: Transaction| self.raw().reshard(&tx, &new).await;
        let (entry, committed) = store.run_committed(&RetryPolicy::default(), reshard).await?;
        let first = committed.map_or(entry.first, |committed| {
            Sequence::new(self.context.config.incarnation, committed.versionstamp, 0)
        });
        match self.id.instance() {
            None => self.context.wakeups.look(),
            // The end of a shard causes no notification.
            Some(_) => self.context.wakeups.documents_moved(&self.id),
        }
        Ok(TopologyEntry { first, ..TopologyEntry::from(&entry) })
    }

    /// Returns the sequence of the newest row; `None` if there is none.
    pub async fn last_sequence(&self) -> Result<Option<Sequence>> {
        self.context.store.run(async |tx| self.raw().last_row(&tx).await).await
    }

    /// Returns the position after everything that is in the feed now. A reader that starts here gets only new rows.
    pub async fn now(&self) -> Result<Sequence> {
        self.context.store.run(async |tx| self.raw().last_readable(&tx).await).await
    }

    /// Returns the oldest position from which a reader misses nothing.
    pub async fn horizon(&self) -> Result<Sequence> {
        let isolation = crate::store::Isolation::Snapshot;
        self.context.store.run(async |tx| self.raw().horizon(&tx, isolation).await).await
    }

    /// Decodes `row`; `None` if it cannot be decoded, which is reported as a skipped row.
    pub(crate) fn decode(&self, row: &StoredRow) -> Option<R> {
        match R::from_stored(row.sequence, &row.value) {
            Ok(row) => Some(row),
            Err(error) => {
                self.context.skip(&SkippedAt::Row(self.id.clone(), row.sequence), &error);
                None
            }
        }
    }

    /// Decodes the rows of a stored page, and leaves out those that cannot be decoded.
    fn page_of(&self, page: &StoredPage) -> FeedPage<R> {
        let rows = page.rows.iter().filter_map(|row| self.decode(row)).map(Arc::new).collect();
        FeedPage { rows, to: page.next.position(), next: page.next, more: page.more }
    }

    /// Returns the successors of `shard`, which was dropped.
    pub(super) async fn end_of_trimmed(&self, shard: ShardId) -> Result<Resharded> {
        let read = async |tx| {
            let topology = self.raw().topology(&tx).await?;
            topology
                .successor_of_trimmed(shard)
                .map(Resharded::from)
                .ok_or(Error::NoShard { shard: shard.0, is_trimmed: true })
        };
        self.context.store.run(read).await
    }
}

fn check_limit(limit: usize) -> Result<()> {
    if (1..=PAGE_ROWS_MAX).contains(&limit) {
        Ok(())
    } else {
        Err(Error::invalid("limit", format!("{limit} is not 1 to {PAGE_ROWS_MAX}")))
    }
}
