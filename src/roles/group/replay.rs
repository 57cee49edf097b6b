//! Replaying: rows that a group has worked on are given to its consumers again.
//!
//! Checkpoints stay where they are, so that nothing else comes again. Instead the rows are parked, to be tried at once
//! ([`FailurePolicy::Park`](super::FailurePolicy::Park)): consumers work on what is parked whatever their policy is, the rows of an id
//! that come meanwhile wait behind it, and what fails again is tried again. Only rows that are done are parked so, and only the newest
//! one of each id: so a row is in exactly one of three states: unread, parked, done.

use std::{fmt, str::FromStr, time::Duration};

use bytes::Bytes;

use super::Group;
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
        notification::Notification,
    },
    roles::changes::Change,
    state::{
        exactly_once::exactly_once,
        feed::{FeedRow, StoredRow},
        keys::{GroupParkedRow, GroupRow, ShardId, TopologyRow, checkpoint_position},
        membership::changed,
    },
    store::{AtomicOp, Isolation, RangeRead, Transaction},
};

/// How many rows are read at once.
const PAGE_ROWS: usize = 250;

/// The most parked ids that were not tried yet. Beyond that a replay parks no more.
const WAITING_MAX: usize = 500;

/// How often a replay asks whether there is room again.
const PAUSE: Duration = Duration::from_millis(500);

/// Where a replay goes on. Its text form is for clients that ask for page after page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReplayPosition {
    /// The token of the group when the replay began: a group that was reset or created again has another one.
    token: u128,
    shard: ShardId,
    after: Sequence,
}

impl fmt::Display for ReplayPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}-{}-{}", self.token, self.shard, self.after)
    }
}

impl FromStr for ReplayPosition {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let invalid = || Error::invalid("position of a replay", "it is not the `next` of an answer");
        let mut parts = text.split('-');
        let mut part = || parts.next().ok_or_else(invalid);
        Ok(Self {
            token: u128::from_str_radix(part()?, 16).map_err(|_| invalid())?,
            shard: ShardId(part()?.parse().map_err(|_| invalid())?),
            after: part()?.parse().map_err(|_| invalid())?,
        })
    }
}

#[derive(Debug)]
pub(crate) struct ReplayPage {
    /// How many rows were parked.
    pub rows: u64,
    /// Where it goes on; `None` at the end.
    pub next: Option<ReplayPosition>,
    /// Whether nothing was parked because too many rows wait for consumers.
    pub is_full: bool,
}

impl<R: FeedRow> Group<R> {
    /// Has consumers work once more on the rows that `wants` accepts, of those that the group has worked on: of each id the newest row,
    /// if the group has passed it. Returns how many rows wait for that, or were worked on meanwhile.
    ///
    /// The rows come one in a batch, with [`GroupBatch::after`](super::GroupBatch::after) at the group's start. Rows of the same ids that
    /// come meanwhile wait behind them. One that fails is parked, and tried again, whatever the failure policy is; [`Group::parked`] lists what
    /// is left.
    ///
    /// A few hundred rows wait at a time. If more are wanted, this returns only while consumers work. If it is dropped, rows that are
    /// parked already stay parked. Called again, it gives the same rows again.
    ///
    /// Fails with [`Error::NoGroup`] if there is no such group, or it is reset or deleted meanwhile, and with [`Error::NoFeed`].
    pub async fn replay(&self, wants: impl Fn(&R) -> bool) -> Result<u64> {
        self.replay_rows(|row| {
            // No observer was given a row that cannot be decoded.
            let row = R::from_stored(row.sequence, &row.value).ok().filter(|row| wants(row))?;
            Some(Bytes::copy_from_slice(row.id()))
        })
        .await
    }
}

impl Group<()> {
    /// [`Group::replay`] of the rows whose ids `wants` accepts: names of databases, or ids of documents.
    pub async fn replay_ids(&self, wants: impl Fn(&str) -> bool) -> Result<u64> {
        self.replay_rows(|row| self.id_if(row, &wants)).await
    }

    /// A page of [`Group::replay_ids`], from `from` on. It waits for no consumer.
    #[cfg(feature = "http")]
    pub(crate) async fn replay_page_of_ids(
        &self,
        from: Option<ReplayPosition>,
        wants: impl Fn(&str) -> bool,
    ) -> Result<ReplayPage> {
        self.replay_page(from, &|row| self.id_if(row, &wants)).await
    }

    /// The id of `row`, if `wants` accepts it.
    fn id_if(&self, row: &StoredRow, wants: impl Fn(&str) -> bool) -> Option<Bytes> {
        let StoredRow { sequence, value } = row;
        let id = if self.instance().is_some() {
            Change::from_stored(*sequence, value).ok().map(|row| Bytes::copy_from_slice(row.id()))
        } else {
            Notification::from_stored(*sequence, value).ok().map(|row| Bytes::copy_from_slice(row.id()))
        };
        id.filter(|id| wants(&String::from_utf8_lossy(id)))
    }
}

impl<R> Group<R> {
    /// Parks the rows for which `wanted` returns the id.
    async fn replay_rows(&self, wanted: impl Fn(&StoredRow) -> Option<Bytes>) -> Result<u64> {
        let (mut count, mut from) = (0, None);
        loop {
            let page = self.replay_page(from, &wanted).await?;
            count += page.rows;
            if page.next.is_none() {
                return Ok(count);
            }
            from = page.next;
            if page.is_full {
                self.context.env().sleep(PAUSE).await;
            }
        }
    }

    /// Parks the rows of a page, from `from` on, for which `wanted` returns the id.
    async fn replay_page(
        &self,
        from: Option<ReplayPosition>,
        wanted: &impl Fn(&StoredRow) -> Option<Bytes>,
    ) -> Result<ReplayPage> {
        let db = &self.context.db;
        let begin = async |tx: Transaction| {
            let group = self.row(&tx).await?.ok_or_else(|| self.missing())?;
            Ok((group, self.raw().topology(&tx).await?))
        };
        let (group, topology) = db.run(begin).await?;
        let token = u128::from_be_bytes(group.token);
        if from.is_some_and(|from| from.token != token) {
            return Err(self.missing());
        }
        let mut shards = topology
            .after(group.start.position())
            .iter()
            .flat_map(TopologyRow::shards)
            .skip_while(|shard| from.is_some_and(|from| *shard < from.shard));
        let Some(shard) = shards.next() else {
            return Ok(ReplayPage { rows: 0, next: None, is_full: false });
        };
        let position = |shard, after| ReplayPosition { token, shard, after };
        let from = from.filter(|from| from.shard == shard).unwrap_or(position(shard, group.start.position()));
        let behind = shards.next().map(|shard| position(shard, group.start.position()));
        let read =
            async |tx: Transaction| self.raw().kept_shard_page(&tx, shard, from.after, PAGE_ROWS).await;
        let page = match db.run(read).await {
            // The shard had no rows left.
            Err(Error::NoShard { is_trimmed: true, .. }) => {
                return Ok(ReplayPage { rows: 0, next: behind, is_full: false });
            }
            page => page?.page,
        };
        let next = if page.more { Some(position(shard, page.next.position())) } else { behind };
        let rows: Vec<_> = page.rows.into_iter().filter_map(|row| Some((wanted(&row)?, row))).collect();
        if rows.is_empty() {
            return Ok(ReplayPage { rows: 0, next, is_full: false });
        }
        if !self.has_room().await? {
            return Ok(ReplayPage { rows: 0, next: Some(from), is_full: true });
        }
        let park = async |tx: Transaction| self.park_again(&tx, &group, shard, &rows).await;
        Ok(ReplayPage {
            rows: exactly_once(db, &self.context.keys, None, park).await?.value,
            next,
            is_full: false,
        })
    }

    /// Whether there is room for more parked ids that were not tried yet.
    async fn has_room(&self) -> Result<bool> {
        let (db, range) = (&self.context.db, self.context.keys.group_parked_ids(&self.id));
        let rows = db.run(async |tx| tx.all_rows(range.clone(), Isolation::Snapshot).await).await?;
        let is_new = |value: &Bytes| GroupParkedRow::from_bytes(value).is_ok_and(|row| row.attempts == 0);
        Ok(rows.iter().filter(|(_, value)| is_new(value)).count() < WAITING_MAX)
    }

    /// Parks those of `rows` of `shard` that are done, and still in the feed. Returns how many. A reset of the group and a newer row,
    /// which removes this one, make `tx` fail; checkpoints, which only grow, do not.
    async fn park_again(
        &self,
        tx: &Transaction,
        begun: &GroupRow,
        shard: ShardId,
        rows: &[(Bytes, StoredRow)],
    ) -> Result<u64> {
        let keys = &self.context.keys;
        let group =
            self.row(tx).await?.filter(|row| row.token == begun.token).ok_or_else(|| self.missing())?;
        let (done, topology) = (self.done_in(tx, shard).await?, self.raw().topology(tx).await?);
        let mut count = 0;
        for (id, StoredRow { sequence, value }) in rows {
            if *sequence > done {
                continue;
            }
            // The conflict is on the row itself, because only notifications have a key for the newest row of an id.
            let row = topology.space_at(self.raw(), *sequence, id)?.row(*sequence);
            let key = keys.group_parked(&self.id, id);
            let (row, parked) = tokio::try_join!(
                tx.get(&row, Isolation::Serializable),
                tx.get(&key, Isolation::Serializable)
            )?;
            if row.is_none() || parked.is_some() {
                continue;
            }
            let (at_ms, error) = (self.context.env().wall_ms(), String::new());
            let parked = GroupParkedRow {
                shard,
                after: group.start.position(),
                sequence: *sequence,
                attempts: 0,
                at_ms,
                error,
                row: value.clone(),
            };
            tx.set(&key, &parked.to_bytes());
            count += 1;
        }
        if count > 0 {
            tx.atomic(AtomicOp::Add, &keys.group_asked(&self.id), &1_u64.to_le_bytes());
            changed(tx, keys, &self.id.pool());
        }
        Ok(count)
    }

    /// The position up to which the group has worked on `shard`: its end, if the group has gone on to later shards.
    async fn done_in(&self, tx: &Transaction, shard: ShardId) -> Result<Sequence> {
        let keys = &self.context.keys;
        if let Some(stored) = tx.get(&keys.checkpoint(&self.id, shard), Isolation::Snapshot).await? {
            return checkpoint_position(&stored);
        }
        let first = RangeRead::new(keys.checkpoints_of(&self.id)).limit(1);
        let first = tx.get_range(&first, Isolation::Snapshot).await?;
        let first = first.rows.first().map(|(key, _)| keys.checkpoint_shard(key)).transpose()?;
        Ok(if first.is_some_and(|first| first > shard) { Sequence::MAX } else { Sequence::MIN })
    }
}
