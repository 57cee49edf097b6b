//! Reads a feed within one transaction: one shard, or all of them merged in the order of their sequences.

use futures_util::future::try_join_all;

use super::{
    Entries, RawFeed, Topology, TopologyEntry,
    merge::{Direction, StoredRow, merged},
    topology::{Resharded, space_of},
};
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        error::{Error, Result},
    },
    state::{
        history::{Claim, History},
        keys::{Lanes, RowSpace, ShardId, TopologyRow},
        skipped::SkippedAt,
    },
    store::{Isolation, RangeRead, Transaction},
};

/// Some rows of a feed, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredPage {
    pub rows: Vec<StoredRow>,
    /// The position from which to continue; for rows read backwards, only its sequence counts.
    pub next: Cursor,
    /// Whether there is more to read at this read version.
    pub more: bool,
}

/// Some rows of a shard, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredShardPage {
    pub page: StoredPage,
    /// The successors, if the shard is closed and was read to its end.
    pub resharded: Option<Resharded>,
}

/// The newest row of an id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Newest {
    Row(StoredRow),
    /// The id has no row.
    Gone,
    /// The stored position of the row, or the row itself, cannot be read.
    Damaged,
}

impl Newest {
    /// Returns the row, if there is one that can be read.
    fn row(self) -> Option<StoredRow> {
        match self {
            Self::Row(row) => Some(row),
            Self::Gone | Self::Damaged => None,
        }
    }
}

/// What a reader knows once it has begun: the last sequence that its transaction can see, the topology, and its cursor.
pub(crate) type Begun = (Sequence, Topology, Cursor);

impl<'a> RawFeed<'a> {
    /// Returns the row spaces of the shards of `entry`.
    pub fn spaces(self, entry: &'a TopologyRow) -> impl ExactSizeIterator<Item = RowSpace> + use<'a> {
        entry.shards().map(move |shard| space_of(entry, self, shard))
    }

    pub async fn topology(self, tx: &Transaction) -> Result<Topology> {
        Topology::read(tx, self, Isolation::Snapshot).await
    }

    /// Returns the last sequence that `tx` can see.
    pub async fn last_readable(self, tx: &Transaction) -> Result<Sequence> {
        Ok(Sequence::last_at(self.context.config.incarnation, tx.read_version().await?))
    }

    /// Returns the oldest position from which a reader misses no dropped row.
    pub async fn horizon(self, tx: &Transaction, isolation: Isolation) -> Result<Sequence> {
        let key = self.context.keys.horizon(self.id);
        let Some(stored) = tx.get(&key, isolation).await? else { return Ok(Sequence::MIN) };
        Sequence::from_bytes(&stored).map_err(|error| error.at(&key))
    }

    /// Begins reading at `cursor`. Returns the last sequence that `tx` can see, the topology, and the cursor to continue with. Fails if the
    /// reader is ahead of the store or belongs to another history, or if rows that it has not seen may have been dropped.
    pub async fn begin(self, tx: &Transaction, cursor: Cursor) -> Result<Begun> {
        let horizon = self.horizon(tx, Isolation::Snapshot);
        let (last, topology, horizon) =
            tokio::try_join!(self.check_cursor(tx, cursor), self.topology(tx), horizon)?;
        cursor.check(horizon)?;
        Ok((last, topology, cursor.begin(last)))
    }

    /// Fails unless all positions of `cursor` belong to the history of the store ([`History::check`]). Returns the last sequence that `tx`
    /// can see. All readers call this, wherever their cursor comes from.
    pub async fn check_cursor(self, tx: &Transaction, cursor: Cursor) -> Result<Sequence> {
        let (history, after) = (History::of(self.context), cursor.position());
        let checked = history.check(tx, Claim::Reader(cursor, None)).await;
        if self.id.instance().is_none() || !matches!(checked, Err(Error::Expired { .. })) {
            return checked;
        }
        // Edits of documents do not move the end of an incarnation. A row at or after the position proves that the copy reaches that far.
        let (topology, to) = (self.topology(tx).await?, Sequence::last_at(after.incarnation(), u64::MAX));
        let entries = topology.after(after).iter();
        let bounds = (after.before(), to);
        let (rows, _) = self.rows_of(tx, entries, Lanes::ALL, bounds, 1, Direction::Ascending).await?;
        history.check(tx, Claim::Reader(cursor, rows.first().map(|row| row.sequence))).await
    }

    /// Returns the shards that were live at `since`. The cursor is checked as for any reader.
    pub async fn topology_at(self, tx: &Transaction, since: Cursor) -> Result<TopologyEntry> {
        let (_, topology, _) = self.begin(tx, since).await?;
        Ok(topology.at(since.position()).into())
    }

    /// Returns the rows of all shards after `cursor`, at most `limit`, in one total order. All shards are read at the read version of `tx`,
    /// so no row is missed between them.
    ///
    /// Fails with [`Error::Invalid`] if the cursor is ahead of what `tx` can read, and with [`Error::Expired`] if rows after it
    /// may have been dropped.
    #[tracing::instrument(level = "debug", skip_all, fields(since = %cursor, limit = limit))]
    pub async fn page(self, tx: &Transaction, cursor: Cursor, limit: usize) -> Result<StoredPage> {
        let begun = self.begin(tx, cursor).await?;
        self.page_of_lanes(tx, begun, Lanes::ALL, limit).await
    }

    /// Does the same as [`RawFeed::page`] for a reader that has already begun, but reads only the shards on `lanes`, which must have all
    /// rows after the cursor.
    pub async fn page_of_lanes(
        self,
        tx: &Transaction,
        (last, topology, cursor): Begun,
        lanes: Lanes,
        limit: usize,
    ) -> Result<StoredPage> {
        let after = cursor.position();
        if after == last {
            return Ok(StoredPage { rows: Vec::new(), next: last.into(), more: false });
        }
        let entries = topology.after(after).iter();
        let (rows, more) =
            self.rows_of(tx, entries, lanes, (after, last), limit, Direction::Ascending).await?;
        let next = match rows.last() {
            Some(row) if more => cursor.at(row.sequence),
            _ => last.into(),
        };
        Ok(StoredPage { rows, next, more })
    }

    /// Returns the rows of all shards before `before`, at most `limit`, newest first.
    pub async fn page_before(self, tx: &Transaction, before: Sequence, limit: usize) -> Result<StoredPage> {
        let (last, topology, _) = self.begin(tx, Cursor::BEGINNING).await?;
        let bounds = (Sequence::MIN, last.min(before.before()));
        let entries = topology.entries().iter().rev().filter(|entry| entry.first <= bounds.1);
        let (rows, more) =
            self.rows_of(tx, entries, Lanes::ALL, bounds, limit, Direction::Descending).await?;
        let to = rows.last().filter(|_| more).map_or(Sequence::MIN, |row| row.sequence);
        Ok(StoredPage { rows, next: to.into(), more })
    }

    /// Returns the rows of the shards of `entries` on `lanes`, entry by entry, at most `limit`, which is at least 1; and whether there may
    /// be more.
    async fn rows_of(
        self,
        tx: &Transaction,
        entries: impl Iterator<Item = &TopologyRow>,
        lanes: Lanes,
        bounds: (Sequence, Sequence),
        limit: usize,
        direction: Direction,
    ) -> Result<(Vec<StoredRow>, bool)> {
        let mut rows = Vec::new();
        for entry in entries {
            if rows.len() == limit {
                return Ok((rows, true));
            }
            let shards = entry.shards().filter(|shard| lanes.has(*shard));
            let spaces: Vec<_> = shards.map(|shard| space_of(entry, self, shard)).collect();
            let (found, more) = merged(tx, spaces.into_iter(), bounds, limit - rows.len(), direction).await?;
            rows.extend(found);
            if more {
                return Ok((rows, true));
            }
        }
        Ok((rows, false))
    }

    /// Returns the rows of `shard` after `cursor`, at most `limit`.
    pub async fn shard_page(
        self,
        tx: &Transaction,
        shard: ShardId,
        cursor: Cursor,
        limit: usize,
    ) -> Result<StoredShardPage> {
        let (last, topology, cursor) = self.begin(tx, cursor).await?;
        self.rows_of_shard(tx, shard, cursor, limit, (last, topology)).await
    }

    /// Does the same as [`RawFeed::shard_page`] for a consumer, whose low watermark keeps the janitor from dropping its rows.
    pub async fn kept_shard_page(
        self,
        tx: &Transaction,
        shard: ShardId,
        after: Sequence,
        limit: usize,
    ) -> Result<StoredShardPage> {
        // The position is stored together with the rows, so both belong to the same history.
        let last = History::of(self.context).check(tx, Claim::Kept(after));
        let begun = tokio::try_join!(last, Topology::of_shard(tx, self, shard))?;
        self.rows_of_shard(tx, shard, after.into(), limit, begun).await
    }

    /// Returns the rows of `shard` after `cursor`, up to the end of its topology entry.
    async fn rows_of_shard(
        self,
        tx: &Transaction,
        shard: ShardId,
        cursor: Cursor,
        limit: usize,
        (last, topology): (Sequence, Topology),
    ) -> Result<StoredShardPage> {
        let after = cursor.position();
        let (entry, successor) = topology.entry_of(shard)?;
        let space = std::iter::once(space_of(entry, self, shard));
        let (rows, more) = merged(tx, space, (after, last), limit, Direction::Ascending).await?;
        let next = match (rows.last(), successor) {
            (Some(row), _) if more => cursor.at(row.sequence),
            // Later rows are in other shards, so the cursor must not pass the beginning of the successor.
            (_, Some(successor)) => cursor.at(after.max(successor.first.before())),
            (_, None) => last.into(),
        };
        let resharded = successor.filter(|_| !more).map(Resharded::from);
        Ok(StoredShardPage { page: StoredPage { rows, next, more }, resharded })
    }

    /// Counts the rows of each of `spaces` after `after` and up to `last`, at most `limit` of them. Returns the counts, and the positions
    /// from which to continue if there are more rows.
    pub async fn count(
        self,
        tx: &Transaction,
        spaces: &[(RowSpace, Sequence)],
        last: Sequence,
        limit: usize,
    ) -> Result<Vec<(usize, Option<Sequence>)>> {
        let counts = spaces.iter().map(|(space, after)| {
            let read = RangeRead::new(space.rows(*after, last)).limit(limit);
            async move {
                let page = tx.get_range(&read, Isolation::Snapshot).await?;
                let rest = page.rows.last().filter(|_| page.more).map(|(key, _)| space.sequence(key));
                Ok((page.rows.len(), rest.transpose()?))
            }
        });
        try_join_all(counts).await
    }

    /// Returns the row space of `shard`; `None` if the shard was dropped.
    pub async fn space_of_shard(self, tx: &Transaction, shard: ShardId) -> Result<Option<RowSpace>> {
        match self.topology(tx).await?.entry_of(shard) {
            Err(Error::NoShard { is_trimmed: true, .. }) => Ok(None),
            entry => Ok(Some(space_of(entry?.0, self, shard))),
        }
    }

    /// Returns the sequence of the last row, if there is one.
    pub async fn last_row(self, tx: &Transaction) -> Result<Option<Sequence>> {
        self.last_row_of(tx, &self.topology(tx).await?).await
    }

    /// Does the same as [`RawFeed::last_row`], with a `topology` that was read before.
    pub async fn last_row_of(self, tx: &Transaction, topology: &Topology) -> Result<Option<Sequence>> {
        for entry in topology.entries().iter().rev() {
            let newest = self.last_rows(tx, entry).await?.into_iter().filter_map(|(_, last)| last).max();
            if newest.is_some() {
                return Ok(newest);
            }
        }
        Ok(None)
    }

    /// Returns the sequence of the last row of each shard of `entry`.
    pub async fn last_rows(
        self,
        tx: &Transaction,
        entry: &TopologyRow,
    ) -> Result<Vec<(ShardId, Option<Sequence>)>> {
        let last = entry.shards().zip(self.spaces(entry)).map(async |(shard, space)| {
            let read = RangeRead::new(space.rows(Sequence::MIN, Sequence::MAX)).limit(1).reverse();
            let page = tx.get_range(&read, Isolation::Snapshot).await?;
            Ok((shard, page.rows.first().map(|(key, _)| space.sequence(key)).transpose()?))
        });
        try_join_all(last).await
    }

    /// Returns the newest rows of `ids` after `cursor`, in the order of their sequences, and the last sequence that `tx` can see. Leaves
    /// out rows that [`RawFeed::newest_of_each`] finds damaged, and fails as [`RawFeed::page`] does.
    pub async fn newest_after(
        self,
        tx: &Transaction,
        ids: &[&[u8]],
        cursor: Cursor,
    ) -> Result<(Vec<StoredRow>, Sequence)> {
        let (last, _, cursor) = self.begin(tx, cursor).await?;
        let rows = self.newest_of_each(tx, ids).await?.into_iter().filter_map(Newest::row);
        let mut rows: Vec<_> = rows.filter(|row| row.sequence > cursor.position()).collect();
        rows.sort_unstable_by_key(|row| row.sequence);
        Ok((rows, last))
    }

    /// Returns the newest row of `id`, if it has one.
    pub async fn newest_of(self, tx: &Transaction, id: &[u8]) -> Result<Option<StoredRow>> {
        let mut entries = Entries::open(tx, self, Isolation::Snapshot).await?;
        let mut found = self.newest_rows(tx, &mut entries, &[id]).await?;
        found.pop().expect("one id has one answer")
    }

    /// Returns the newest row of each of `ids`, in their order. If damage prevents an id from being read, the others are still read: the id
    /// is skipped, counted and named, and its answer is [`Newest::Damaged`].
    pub async fn newest_of_each(self, tx: &Transaction, ids: &[&[u8]]) -> Result<Vec<Newest>> {
        let mut entries = Entries::open(tx, self, Isolation::Snapshot).await?;
        let found = self.newest_rows(tx, &mut entries, ids).await?;
        let answers = ids.iter().zip(found).map(|(id, found)| match found {
            Ok(Some(row)) => Newest::Row(row),
            Ok(None) => Newest::Gone,
            Err(error) => {
                self.context.skip(&self.newest_key(id), &error);
                Newest::Damaged
            }
        });
        Ok(answers.collect())
    }

    /// Returns the newest row of each of `ids`, in their order. An inner error is [`Error::Corrupt`], and concerns only that id. Adds to
    /// `entries` only the entries that contain these rows, so a long history of reshards does not make this slower.
    pub async fn newest_rows(
        self,
        tx: &Transaction,
        entries: &mut Entries,
        ids: &[&[u8]],
    ) -> Result<Vec<Result<Option<StoredRow>>>> {
        let newest = ids.iter().map(async |id| {
            let stored = tx.get(&self.context.keys.newest(self.id, id), Isolation::Snapshot).await?;
            Ok::<_, Error>(stored.map(|stored| Sequence::from_bytes(&stored)).transpose())
        });
        let newest = try_join_all(newest).await?;
        entries.extend(tx, self, newest.iter().flatten().copied().flatten()).await?;
        let entries = &*entries;
        let rows = ids.iter().zip(newest).map(async |(id, newest)| {
            let row = match newest {
                Ok(Some(sequence)) => self.newest_at(tx, entries, id, sequence).await.map(Some),
                answer => answer.map(|_| None),
            };
            match row {
                Err(error) if !matches!(error, Error::Corrupt { .. }) => Err(error),
                answer => Ok(answer),
            }
        });
        try_join_all(rows).await
    }

    /// Returns the key that stores the position of the newest row of `id`, to name that key in a report.
    pub fn newest_key(self, id: &[u8]) -> SkippedAt {
        SkippedAt::Key(self.context.keys.newest(self.id, id).into())
    }

    /// Returns the newest row of `id`, which is at `sequence`.
    pub async fn newest_at(
        self,
        tx: &Transaction,
        entries: &Entries,
        id: &[u8],
        sequence: Sequence,
    ) -> Result<StoredRow> {
        let key = entries.space_at(self, sequence, id)?.row(sequence);
        let value = tx.get(&key, Isolation::Snapshot).await?;
        let value = value.ok_or_else(|| {
            Error::corrupt("newest", format!("it points at {sequence}, where there is no row"))
        })?;
        Ok(StoredRow { sequence, value })
    }
}
