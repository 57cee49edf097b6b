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

/// The most rows that a page can have.
pub const PAGE_ROWS_MAX: usize = 10_000;

/// How many shards are read at once where nothing else limits it.
pub(crate) const SHARDS_READ_AT_ONCE: usize = 64;

/// A type of row that a feed can hold.
pub trait FeedRow: Sized + Send + Sync + 'static {
    /// Decodes the row stored at `sequence` as `bytes`. Fails with [`Error::Corrupt`].
    fn from_stored(sequence: Sequence, bytes: &[u8]) -> Result<Self>;

    /// Its position.
    fn sequence(&self) -> Sequence;

    /// The id of the row: the name of a database, the id of a document. The feed has one row per id, and routes rows
    /// to shards by it.
    fn id(&self) -> &[u8];
}

/// Some rows of a feed, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FeedPage<R> {
    /// The rows. Rows that this program cannot decode, because they are damaged or a later version has written them,
    /// are left out, counted in [`StatsSnapshot::rows_skipped`](crate::node::StatsSnapshot::rows_skipped) and named
    /// by [`Bus::skipped_rows`](crate::Bus::skipped_rows).
    pub rows: Vec<Arc<R>>,
    /// Everything up to here was read: nothing will ever be added before it. For rows read backwards: everything from
    /// here on.
    ///
    /// While there is more to read, a reader does not know everything up to here: a row of a later page may have
    /// superseded an earlier one. So derive the news of all pages from the position where the first page began
    /// ([`Cursor::knowledge`]), until a page has no more after it.
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
    /// Everything of the shard up to here was read. It does not go beyond the end of a closed shard.
    pub to: Sequence,
    /// Where the next page begins, also the first one of a shard that took over.
    pub next: Cursor,
    /// Whether there was more to read when the page was read.
    pub more: bool,
    /// The successors, if the shard is closed and was read to its end. Each further page repeats them; a
    /// [`ShardReader`](super::ShardReader) returns them once.
    pub resharded: Option<Resharded>,
}

/// A feed: one row per id, its newest, ordered by sequence over all shards. Clones are cheap.
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
    /// The most rows that a page can have.
    pub const PAGE_ROWS_MAX: usize = PAGE_ROWS_MAX;

    pub(crate) fn new(context: Arc<Context>, id: FeedId) -> Self {
        Self { context, id, rows: PhantomData }
    }

    pub(crate) fn raw(&self) -> RawFeed<'_> {
        RawFeed::new(&self.context, &self.id)
    }

    /// The rows after `cursor`, at most `limit` (1 to 10,000), in the order of their sequences over all shards and
    /// all topologies. Begin at [`Cursor::BEGINNING`] or at a sequence, and go on at [`FeedPage::next`]. Each page has
    /// a transaction of its own, so reading a backlog may take any time. A row that is superseded meanwhile comes
    /// later, at its new position.
    ///
    /// # Errors
    ///
    /// [`Error::Expired`] if rows after the cursor may have been dropped, or if an embedded store has never given it
    /// out, because it is of another history; [`Error::Invalid`] if it is ahead of a cluster or of a later
    /// incarnation; [`Error::NoFeed`] if there is no such feed.
    pub async fn page(&self, cursor: impl Into<Cursor>, limit: usize) -> Result<FeedPage<R>> {
        let cursor = cursor.into();
        self.context.store.run(async |tx| self.page_in(&tx, cursor, limit).await).await
    }

    /// [`Feed::page`] within the caller's transaction.
    pub async fn page_in(
        &self,
        tx: &Transaction,
        cursor: impl Into<Cursor>,
        limit: usize,
    ) -> Result<FeedPage<R>> {
        check_limit(limit)?;
        Ok(self.page_of(&self.raw().page(tx, cursor.into(), limit).await?))
    }

    /// [`Feed::page_in`] for a reader that has begun, of the shards on `lanes` only, which must have all rows after the cursor.
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

    /// The rows before `before`, at most `limit` (1 to 10,000), newest first. Start at [`Sequence::MAX`], go on at
    /// [`FeedPage::to`]. Rows that are superseded between two pages move to positions that were read already. To get
    /// these, too, read forward from the [`Feed::now`] of before the first page.
    pub async fn page_before(&self, before: Sequence, limit: usize) -> Result<FeedPage<R>> {
        self.context.store.run(async |tx| self.page_before_in(&tx, before, limit).await).await
    }

    /// [`Feed::page_before`] within the caller's transaction.
    pub async fn page_before_in(
        &self,
        tx: &Transaction,
        before: Sequence,
        limit: usize,
    ) -> Result<FeedPage<R>> {
        check_limit(limit)?;
        Ok(self.page_of(&self.raw().page_before(tx, before, limit).await?))
    }

    /// The rows of `shard` after `cursor`, at most `limit` (1 to 10,000). All rows of an id that are written under
    /// one topology are in one shard, so readers of different shards are independent.
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

    /// [`Feed::shard_page`] within the caller's transaction.
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

    /// The history of the feed's shards, oldest first. Closed entries without rows are dropped from time to time.
    pub async fn topology(&self) -> Result<Vec<TopologyEntry>> {
        self.context
            .store
            .run(async |tx| {
                Ok(self.raw().topology(&tx).await?.entries().iter().map(TopologyEntry::from).collect())
            })
            .await
    }

    /// The shards that were live at `since`. A reader of single shards starts with these, and goes on with the
    /// successors of each closed shard; so it misses nothing after `since`. An empty shard may be dropped before its
    /// first read, which then fails with [`Error::NoShard`]: call this again.
    ///
    /// Fails as [`Feed::page`] does.
    pub async fn topology_at(&self, since: impl Into<Cursor>) -> Result<TopologyEntry> {
        let since = since.into();
        self.context.store.run(async |tx| self.raw().topology_at(&tx, since).await).await
    }

    /// The shards that can have rows. Ids are unique within the feed and never used again.
    pub async fn shards(&self) -> Result<Vec<ShardId>> {
        Ok(self.topology().await?.into_iter().flat_map(|entry| entry.shards).collect())
    }

    /// Changes the number of shards, 1 to 1,000, up or down, while the feed is written and read; and the hashing
    /// scheme, if `scheme` names one. It moves no rows: new rows go to the new shards from this sequence on. Returns
    /// the new entry.
    ///
    /// Writers that a reshard overtakes are tried again; a reader of a single shard gets [`Resharded`]. Concurrent
    /// reshards happen one after the other. A reshard with an unknown result is not done twice.
    ///
    /// Fails with [`Error::Invalid`] if `shards` is out of its limits, with [`Error::UnknownScheme`] if this process
    /// does not know the scheme, with [`Error::NoFeed`] if there is no such feed, and with [`Error::OlderThanRows`]. Nothing is changed
    /// then.
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

    /// The sequence of the newest row; `None` if there is none.
    pub async fn last_sequence(&self) -> Result<Option<Sequence>> {
        self.context.store.run(async |tx| self.raw().last_row(&tx).await).await
    }

    /// The position behind everything that is in the feed now. A reader that starts here gets only new rows.
    pub async fn now(&self) -> Result<Sequence> {
        self.context.store.run(async |tx| self.raw().last_readable(&tx).await).await
    }

    /// The oldest position from which a reader misses nothing.
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

    /// The rows of a stored page, without those that cannot be decoded.
    fn page_of(&self, page: &StoredPage) -> FeedPage<R> {
        let rows = page.rows.iter().filter_map(|row| self.decode(row)).map(Arc::new).collect();
        FeedPage { rows, to: page.next.position(), next: page.next, more: page.more }
    }

    /// The successors of `shard`, which was dropped.
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
