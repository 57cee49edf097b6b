//! The stored state of consumers. A problem shows up as an id with a key, or as a shard that waits.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, future::try_join_all, stream};
use serde::Serialize;

use super::ConsumerHandle;
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        error::{Error, Result},
        event::DbInstance,
        notification::Notification,
    },
    state::{
        context::Context,
        failing::ShardFailure,
        feed::{FeedRow, RawFeed, SHARDS_READ_AT_ONCE, Topology},
        keys::{
            ConsumerName, ConsumerRow, DeferredRow, Due, FeedId, Keys, MemberlessSince, NodeId, RowSpace,
            ShardId, watermark,
        },
        membership::Holdings,
    },
    store::{Isolation, KeyRange, RangeRead, Transaction},
};

/// The age at which a waiting row needs attention, in milliseconds. The alert uses the same limit.
const LATE_MS: u64 = 600_000;

/// The maximum number of deferred ids that are counted for a consumer.
const DEFERRED_MAX: u64 = 1_000;

/// The maximum number of keys that are read to count a consumer's deferred ids. Finished ids have keys until the checkpoint passes them.
const KEYS_MAX: u64 = 10_000;

/// How many ranges of consumers, or feeds, are read at the same time.
const RUNS: usize = 16;

/// The maximum number of rows in one page.
const PAGE_ROWS: usize = 1_000;

/// About how many rows are read, over all shards of a feed, to find out how far behind its consumers are.
const TAIL_ROWS: usize = 40_000;

/// The minimum number of these rows to read in each shard.
const TAIL_ROWS_MIN: usize = 16;

/// The maximum number of positions that lie before these rows and whose next row is read separately, lowest positions first.
const OLDEST_MAX: usize = 1_000;

/// The maximum number of feeds for which the lag of consumers is read, notifications first.
const FEEDS_MAX: usize = 100;

/// The status of each consumer, by name.
pub(crate) type Consumers = BTreeMap<ConsumerName, ConsumerStatus>;

/// The stored state of a consumer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ConsumerStatus {
    /// The name of the consumer.
    pub name: ConsumerName,
    /// The database whose documents the consumer follows; `None` if it follows the notifications.
    pub instance: Option<DbInstance>,
    /// The filter of the consumer, for display only.
    pub filter: String,
    /// Where the consumer began when it was created or last reset.
    pub start: Cursor,
    /// 1 when the consumer is created, raised by each reset.
    pub generation: u64,
    /// Whether the consumer is paused.
    pub is_paused: bool,
    /// When the consumer was created, in milliseconds since 1970.
    pub created_ms: u64,
    /// The milliseconds without a member after which the consumer is deleted; `None` for never.
    pub expiry_ms: Option<u64>,
    /// How long the consumer has been without a member, in milliseconds, as far as the janitor has counted.
    pub memberless_ms: u64,
    /// The nodes that are members of the consumer. Some may have died.
    pub members: Vec<NodeId>,
    /// The shards that the consumer reads, in the order of their ids.
    pub shards: Vec<ConsumerShard>,
    /// A position that the consumer has passed in all shards. Tombstones after it are kept.
    pub low_watermark: Sequence,
    /// Whether the consumer has deferred ids.
    pub has_deferred: bool,
}

/// A shard that a consumer reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ConsumerShard {
    /// The id of the shard.
    pub shard: ShardId,
    /// The node that owns the shard, alive or not; `None` if no node does.
    pub owner: Option<NodeId>,
    /// The position up to which everything is finished or deferred.
    pub checkpoint: Sequence,
    /// What fails in the shard and holds the checkpoint back. Known only if this process works on the shard; the lag is known in any case.
    pub failing: Option<ShardFailure>,
}

/// How far behind a consumer is in a shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ConsumerLag {
    /// The id of the shard.
    pub shard: ShardId,
    /// The number of rows after the checkpoint, wanted or not.
    pub rows: u64,
    /// Whether `rows` is exact; otherwise there are more.
    pub is_exact: bool,
    /// The age of the oldest of these rows in milliseconds, by the wall clocks of the notifier and of this process. `None` if there are no
    /// rows, and for rows without a time, such as documents.
    pub age_ms: Option<u64>,
}

impl ConsumerLag {
    /// The maximum number of rows that are counted in a shard; fewer if the feed has more than four shards.
    pub const ROWS_MAX: u64 = 10_000;
}

impl ConsumerStatus {
    fn new(name: ConsumerName, row: ConsumerRow) -> Self {
        Self {
            name,
            instance: row.feed.instance(),
            filter: row.filter_text,
            start: if row.start.knew_nothing() { Cursor::BEGINNING } else { row.start },
            generation: row.generation,
            is_paused: row.is_paused,
            created_ms: row.created_ms,
            expiry_ms: Some(row.expiry_ms).filter(|ms| *ms > 0),
            memberless_ms: 0,
            members: Vec::new(),
            shards: Vec::new(),
            low_watermark: row.start.position(),
            has_deferred: false,
        }
    }

    /// Describes what needs attention. `lag` says how far behind the consumer is.
    pub fn troubles(&self, lag: &[ConsumerLag]) -> Vec<String> {
        let mut troubles = Vec::new();
        if self.is_paused {
            troubles.push("it is paused: nothing is worked on until it is resumed".to_owned());
        } else if self.members.is_empty() {
            troubles
                .push("no node works for it, and it keeps the tombstones after its low watermark".to_owned());
        } else {
            let without = self.shards.iter().filter(|shard| shard.owner.is_none()).count();
            if without > 0 {
                troubles.push(format!("{without} of {} shards have no owner", self.shards.len()));
            }
        }
        for shard in &self.shards {
            if let Some(ShardFailure { id, attempts, error, .. }) = &shard.failing {
                let what = id.as_ref().map_or_else(|| "a batch of rows".to_owned(), |id| format!("{id:?}"));
                let held =
                    format!("shard {} waits for {what}, which has failed {attempts} times", shard.shard.0);
                troubles.push(format!("{held}: {error}"));
            }
        }
        let is_failing = |lag: &ConsumerLag| {
            self.shards.iter().any(|shard| shard.shard == lag.shard && shard.failing.is_some())
        };
        for lag in lag.iter().filter(|lag| lag.age_ms >= Some(LATE_MS) && !self.is_paused && !is_failing(lag))
        {
            let minutes = lag.age_ms.unwrap_or_default() / 60_000;
            let late = format!("the oldest row of shard {} has waited for {minutes} min", lag.shard.0);
            troubles
                .push(format!("{late}: no node works on it, or the work is slow or fails: see its owner"));
        }
        if self.has_deferred {
            troubles.push("ids are deferred: their errors are in the list of deferred ids".to_owned());
        }
        troubles
    }
}

impl ConsumerStatus {
    fn feed(&self) -> FeedId {
        self.instance.map_or_else(FeedId::notifications, FeedId::documents)
    }

    /// Adds which nodes work for the consumer, what fails in this process, and whether ids are deferred.
    pub(crate) fn add(&mut self, context: &Context, holdings: &Holdings, deferred: u64) {
        let pool = self.name.pool();
        self.members = holdings.nodes_with(&self.name.role()).to_vec();
        self.has_deferred = deferred > 0;
        for status in &mut self.shards {
            let Some((owner, epoch)) = holdings.owned(&pool, status.shard.0) else { continue };
            status.owner = Some(owner);
            let place = (&self.name, status.shard, epoch);
            status.failing = context.failing.of(place, status.checkpoint.max(self.low_watermark));
        }
    }

    /// Returns the shards that the consumer reads, or will read after a reshard, each with the position up to which nothing is left to do.
    fn positions(&self, topology: &Topology) -> Vec<(ShardId, Sequence)> {
        let low = self.low_watermark;
        let mut shards: Vec<_> =
            self.shards.iter().map(|shard| (shard.shard, shard.checkpoint.max(low))).collect();
        // Rows in topology entries that the consumer has not begun yet are waiting, too.
        if let Some((last, _)) = shards.last().copied() {
            let later = topology.entries().iter().filter(|entry| entry.shards().all(|shard| shard > last));
            shards.extend(later.flat_map(|entry| entry.shards().map(|shard| (shard, entry.first.before()))));
        }
        shards
    }
}

/// Reads the stored state of the consumer `only`, or of all consumers, without what [`ConsumerStatus::add`] adds.
pub(crate) async fn stored(tx: &Transaction, keys: &Keys, only: Option<&ConsumerName>) -> Result<Consumers> {
    let one = |key: Vec<u8>| KeyRange::key(&key);
    let [rows, checkpoints, low, idle] = match only {
        None => {
            [keys.consumers(), keys.all_consumer_checkpoints(), keys.low_watermarks(), keys.consumers_idle()]
        }
        Some(name) => [
            one(keys.consumer(name)),
            keys.consumer_checkpoints(name),
            one(keys.low_watermark(name)),
            one(keys.consumer_idle(name)),
        ],
    };
    let read = |range| tx.all_rows(range, Isolation::Snapshot);
    let (rows, checkpoints, low, idle) =
        tokio::try_join!(read(rows), read(checkpoints), read(low), read(idle))?;
    let mut statuses = BTreeMap::new();
    for (key, value) in rows {
        let row = ConsumerRow::from_bytes(&value).map_err(|error| error.at(&key))?;
        let name = keys.consumer_of(&key)?;
        statuses.insert(name.clone(), ConsumerStatus::new(name, row));
    }
    for (key, value) in checkpoints {
        let (name, shard) = keys.consumer_checkpoint_of(&key)?;
        let checkpoint = Cursor::from_bytes(&value).map_err(|error| error.at(&key))?.position();
        if let Some(status) = statuses.get_mut(&name) {
            status.shards.push(ConsumerShard { shard, owner: None, checkpoint, failing: None });
        }
    }
    for (key, value) in low {
        if let Some(status) = statuses.get_mut(&keys.consumer_of(&key)?) {
            status.low_watermark = watermark(&value).map_err(|error| error.at(&key))?;
        }
    }
    for (key, value) in idle {
        if let Some(status) = statuses.get_mut(&keys.consumer_of(&key)?) {
            let since = MemberlessSince::from_bytes(&value).map_err(|error| error.at(&key))?;
            status.memberless_ms = since.idle_ms;
        }
    }
    Ok(statuses)
}

/// Counts the deferred ids of each consumer, up to [`DEFERRED_MAX`]; consumers without any are left out. `consumers` is sorted by name.
pub(crate) async fn deferred(
    tx: &Transaction,
    keys: &Keys,
    consumers: &[&ConsumerName],
) -> Result<BTreeMap<ConsumerName, u64>> {
    let runs = consumers.chunks(consumers.len().div_ceil(RUNS).max(1));
    let runs = runs.map(|run| deferred_in(tx, keys, run[0], run[run.len() - 1]));
    Ok(try_join_all(runs).await?.into_iter().flatten().collect())
}

/// Does the same as [`deferred`], for the consumers from `first` to `last`.
async fn deferred_in(
    tx: &Transaction,
    keys: &Keys,
    first: &ConsumerName,
    last: &ConsumerName,
) -> Result<BTreeMap<ConsumerName, u64>> {
    let range = |begin, name| KeyRange { begin, end: keys.deferred_of(name, None).end };
    let all = RangeRead::new(range(keys.deferred_of(first, None).begin, last)).limit(PAGE_ROWS);
    let (mut counts, mut rest) = (BTreeMap::new(), Some(all));
    let (mut looked_at, mut current) = (0, None);
    while let Some(read) = rest {
        let page = tx.get_range(&read, Isolation::Snapshot).await?;
        for (key, value) in &page.rows {
            let name = keys.deferred_consumer(key)?;
            if current.as_ref() != Some(&name) {
                (looked_at, current) = (0, Some(name.clone()));
            }
            looked_at += 1;
            if DeferredRow::from_bytes(value).map_err(|error| error.at(key))?.due != Due::Never {
                let count = counts.entry(name).or_insert(0);
                *count = DEFERRED_MAX.min(*count + 1);
            }
        }
        rest = read.after(&page);
        // Enough keys of this consumer were read, so the rest are skipped.
        if let Some(name) = &current
            && (looked_at >= KEYS_MAX || counts.get(name).is_some_and(|count| *count >= DEFERRED_MAX))
        {
            let after = range(keys.deferred_of(name, None).end, last);
            rest = rest.filter(|_| !after.is_empty()).map(|_| RangeRead::new(after).limit(PAGE_ROWS));
        }
    }
    Ok(counts)
}

/// Returns how far behind each of `consumers` is, by shard. Reads the newest rows of each shard, back to the lowest position, but at most a
/// share of [`TAIL_ROWS`]. The cost does not grow with the number of consumers, except for a read per position that is further back. A
/// consumer at such a position is behind by at least these rows. Consumers whose feed is gone, or beyond [`FEEDS_MAX`], are left out.
pub(crate) async fn lags(
    context: &Context,
    tx: &Transaction,
    consumers: &Consumers,
) -> Result<BTreeMap<ConsumerName, Vec<ConsumerLag>>> {
    let mut feeds: BTreeMap<Option<DbInstance>, Vec<&ConsumerStatus>> = BTreeMap::new();
    for status in consumers.values() {
        feeds.entry(status.instance).or_default().push(status);
    }
    let feeds = feeds.into_values().take(FEEDS_MAX).map(|consumers| lags_in(context, tx, consumers));
    // Collected first, because the compiler cannot name the type of the futures otherwise.
    let feeds: Vec<_> = feeds.collect();
    let lags: Vec<_> = stream::iter(feeds).buffered(RUNS).try_collect().await?;
    Ok(lags.into_iter().flatten().collect())
}

/// Does the same as [`lags`], for one or more consumers of one feed.
async fn lags_in(
    context: &Context,
    tx: &Transaction,
    consumers: Vec<&ConsumerStatus>,
) -> Result<Vec<(ConsumerName, Vec<ConsumerLag>)>> {
    let feed = consumers[0].feed();
    let raw = RawFeed::new(context, &feed);
    let (now, topology) = match tokio::try_join!(raw.last_readable(tx), raw.topology(tx)) {
        Err(Error::NoFeed { .. }) => return Ok(Vec::new()),
        read => read?,
    };
    let positions: Vec<_> =
        consumers.into_iter().map(|status| (status.name.clone(), status.positions(&topology))).collect();
    let mut lowest: BTreeMap<ShardId, Sequence> = BTreeMap::new();
    for &(shard, position) in positions.iter().flat_map(|(_, positions)| positions) {
        lowest.entry(shard).and_modify(|lowest| *lowest = position.min(*lowest)).or_insert(position);
    }
    let limit = (TAIL_ROWS / lowest.len().max(1)).clamp(TAIL_ROWS_MIN, ConsumerLag::ROWS_MAX as usize);
    let spaces = topology.entries().iter().flat_map(|entry| entry.shards().zip(raw.spaces(entry)));
    let tails = spaces.filter_map(|(shard, space)| {
        let after = *lowest.get(&shard)?;
        Some(async move { Ok::<_, Error>((shard, Tail::read(tx, space, (after, now), limit).await?)) })
    });
    let tails: BTreeMap<_, _> = try_join_all(tails).await?.into_iter().collect();
    let oldest = oldest_before(tx, &positions, &tails, now).await?;
    let lag = |&(shard, after): &(ShardId, Sequence)| {
        // A shard that was dropped has no rows.
        let none = ConsumerLag { shard, rows: 0, is_exact: true, age_ms: None };
        let Some(tail) = tails.get(&shard) else { return none };
        let rows = tail.count(after);
        let first = oldest.get(&(after, shard)).or_else(|| tail.rows.get(rows.checked_sub(1)?));
        let age_ms = first.and_then(|(sequence, value)| age_ms(context, &feed, *sequence, value));
        ConsumerLag { rows: rows as u64, is_exact: tail.reaches(after), age_ms, ..none }
    };
    let lags = positions.iter().map(|(name, positions)| (name.clone(), positions.iter().map(lag).collect()));
    Ok(lags.collect())
}

/// The newest rows of a shard, newest first.
struct Tail {
    space: RowSpace,
    rows: Vec<(Sequence, Bytes)>,
    /// Whether the rows reach back to the lowest position that was asked for.
    is_whole: bool,
}

impl Tail {
    async fn read(
        tx: &Transaction,
        space: RowSpace,
        (after, now): (Sequence, Sequence),
        limit: usize,
    ) -> Result<Self> {
        let newest = RangeRead::new(space.rows(after, now)).limit(limit.min(PAGE_ROWS)).reverse();
        let (mut rows, mut rest) = (Vec::new(), (after < now).then_some(newest));
        while let Some(read) = rest.take() {
            let page = tx.get_range(&read, Isolation::Snapshot).await?;
            for (key, value) in &page.rows {
                rows.push((space.sequence(key)?, value.clone()));
            }
            rest = read.after(&page);
            if rows.len() >= limit {
                break;
            }
        }
        Ok(Self { space, rows, is_whole: rest.is_none() })
    }

    /// Returns the number of rows of the tail after `position`.
    fn count(&self, position: Sequence) -> usize {
        self.rows.partition_point(|(sequence, _)| *sequence > position)
    }

    /// Whether the tail has all rows after `position`.
    fn reaches(&self, position: Sequence) -> bool {
        self.is_whole || self.count(position) < self.rows.len()
    }
}

type Oldest = BTreeMap<(Sequence, ShardId), (Sequence, Bytes)>;

/// Reads the first row after each position that the tails do not reach.
async fn oldest_before(
    tx: &Transaction,
    positions: &[(ConsumerName, Vec<(ShardId, Sequence)>)],
    tails: &BTreeMap<ShardId, Tail>,
    now: Sequence,
) -> Result<Oldest> {
    let all = positions.iter().flat_map(|(_, positions)| positions);
    let is_far =
        |(shard, after): &&(ShardId, Sequence)| tails.get(shard).is_some_and(|tail| !tail.reaches(*after));
    let far: BTreeSet<_> = all.filter(is_far).map(|&(shard, after)| (after, shard)).collect();
    let first = far.into_iter().take(OLDEST_MAX).map(|(after, shard)| async move {
        let space = &tails[&shard].space;
        let page =
            tx.get_range(&RangeRead::new(space.rows(after, now)).limit(1), Isolation::Snapshot).await?;
        let Some((key, value)) = page.rows.into_iter().next() else { return Ok(None) };
        Ok::<_, Error>(Some(((after, shard), (space.sequence(&key)?, value))))
    });
    let first: Vec<_> = first.collect();
    let first: Vec<_> = stream::iter(first).buffered(SHARDS_READ_AT_ONCE).try_collect().await?;
    Ok(first.into_iter().flatten().collect())
}

/// Returns how long ago a row was written; `None` for rows of documents, which have no time, and for rows that cannot be decoded.
fn age_ms(context: &Context, feed: &FeedId, sequence: Sequence, value: &[u8]) -> Option<u64> {
    let row = feed.instance().is_none().then(|| Notification::from_stored(sequence, value).ok())??;
    Some(context.env().wall_ms().saturating_sub(row.written_ms))
}

impl ConsumerHandle {
    /// Returns the state of the consumer. Fails with [`Error::NoConsumer`](crate::Error::NoConsumer).
    pub async fn status(&self) -> Result<ConsumerStatus> {
        let (keys, name) = (&self.context.keys, &self.name);
        let read = async |tx: Transaction| {
            let (pool, only) = (name.pool(), [name]);
            let (mut stored, holdings, deferred) = tokio::try_join!(
                stored(&tx, keys, Some(name)),
                Holdings::read(&tx, keys, Some(&pool)),
                deferred(&tx, keys, &only),
            )?;
            let mut status = stored.remove(name).ok_or_else(|| self.missing())?;
            status.add(&self.context, &holdings, deferred.get(name).copied().unwrap_or_default());
            Ok(status)
        };
        self.context.store.run(read).await
    }

    /// Returns how far behind the consumer is in each shard that it reads, or will read after a reshard, in the order of the shard ids,
    /// even if no node works for it. Fails with [`Error::NoConsumer`](crate::Error::NoConsumer) and
    /// [`Error::NoFeed`](crate::Error::NoFeed).
    pub async fn lag(&self) -> Result<Vec<ConsumerLag>> {
        let read = async |tx: Transaction| {
            let stored = stored(&tx, &self.context.keys, Some(&self.name)).await?;
            let status = stored.get(&self.name).ok_or_else(|| self.missing())?;
            let lag = lags(&self.context, &tx, &stored).await?.remove(&self.name);
            lag.ok_or_else(|| Error::NoFeed { feed: status.feed().to_string() })
        };
        self.context.store.run(read).await
    }
}
