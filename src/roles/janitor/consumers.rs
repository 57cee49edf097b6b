//! Deletes consumers that have had no member for longer than the expiry they were created with.
//!
//! When a pass first finds a consumer without members, it saves its [`JanitorClock`]'s time, because the consumer may have had a member
//! until now. A later pass deletes the consumer once the saved time is further back than the expiry. A pass that finds a member removes the
//! saved time, and so does a node in the transaction that makes it a member. So a consumer may be deleted later than promised, but never
//! sooner. A pass can be repeated: it writes the same rows again.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::{StreamExt, future::try_join_all, stream};

use super::{
    clock::JanitorClock,
    pass::{Failed, Pass},
};
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
    },
    state::{
        keys::{ConsumerName, ConsumerRow, FeedId, MemberlessSince, ShardId, watermark},
        membership::changed,
    },
    store::{Isolation, RangeRead, Transaction},
};

/// How many rows are read at once.
const PAGE_ROWS: usize = 100;

/// How many consumers are judged at once, each in a transaction of its own.
const JUDGED_AT_ONCE: usize = 16;

impl Pass<'_> {
    /// Deletes the consumers that have expired. A consumer that cannot be judged does not keep others from being deleted.
    pub async fn expire_consumers(&self, clock: JanitorClock) -> Result<()> {
        let consumers = self.expiring_consumers().await?;
        let judged = consumers.iter().map(|(name, row)| async move {
            (name, self.write(async |tx| self.expire_consumer(&tx, name, row, clock).await).await)
        });
        // Collected first, because otherwise the compiler cannot name the type of the futures.
        let judged: Vec<_> = judged.collect();
        let (mut judged, mut failed) =
            (stream::iter(judged).buffer_unordered(JUDGED_AT_ONCE), Failed::default());
        while let Some((consumer, expired)) = judged.next().await {
            if failed.note(expired)? == Some(true) {
                tracing::info!(%consumer, "deleted a consumer that had no member for too long");
                self.context.stats.consumers_expired.add(1);
            }
        }
        failed.end()
    }

    async fn expiring_consumers(&self) -> Result<Vec<(ConsumerName, ConsumerRow)>> {
        let keys = &self.context.keys;
        let mut consumers = Vec::new();
        let mut rest = Some(RangeRead::new(keys.consumers()).limit(PAGE_ROWS));
        while let Some(read) = rest {
            let page = self.read(async |tx| tx.get_range(&read, Isolation::Snapshot).await).await?;
            for (key, value) in &page.rows {
                let row = ConsumerRow::from_bytes(value).map_err(|error| error.at(key))?;
                if row.expiry_ms > 0 {
                    consumers.push((keys.consumer_of(key)?, row));
                }
            }
            rest = read.after(&page);
        }
        Ok(consumers)
    }

    /// Returns since when `consumer` has had no member, as an earlier pass saved it.
    async fn memberless(&self, tx: &Transaction, consumer: &ConsumerName) -> Result<Option<MemberlessSince>> {
        let key = self.context.keys.consumer_idle(consumer);
        let stored = tx.get(&key, Isolation::Serializable).await?;
        stored.map(|value| MemberlessSince::from_bytes(&value).map_err(|error| error.at(&key))).transpose()
    }

    /// Deletes `consumer` if it has had no member for long enough, or else saves how long it has had none. Returns whether it was deleted.
    /// `tx` fails if a member joins before the commit.
    async fn expire_consumer(
        &self,
        tx: &Transaction,
        consumer: &ConsumerName,
        row: &ConsumerRow,
        clock: JanitorClock,
    ) -> Result<bool> {
        let (keys, env) = (&self.context.keys, self.context.env());
        let before_ms = clock.now_ms(env);
        let (row_key, member) =
            (keys.consumer(consumer), RangeRead::new(keys.nodes_with(&consumer.role())).limit(1));
        let (stored, member, since) = tokio::try_join!(
            tx.get(&row_key, Isolation::Serializable),
            tx.get_range(&member, Isolation::Serializable),
            self.memberless(tx, consumer),
        )?;
        let stored = stored.map(|value| ConsumerRow::from_bytes(&value)).transpose();
        let stored = stored.map_err(|error| error.at(&row_key))?;
        let key = keys.consumer_idle(consumer);
        if stored.is_none_or(|stored| stored.identity != row.identity) || !member.rows.is_empty() {
            if since.is_some() {
                tx.clear(&key);
            }
            return Ok(false);
        }
        // Without a saved time, a member may have been there until just before this read.
        let alive_ms = since.map_or_else(|| clock.now_ms(env), |since| since.alive_ms);
        let idle_ms = before_ms.saturating_sub(alive_ms);
        if idle_ms < row.expiry_ms {
            tx.set(&key, &MemberlessSince { alive_ms, idle_ms }.to_bytes());
            return Ok(false);
        }
        for range in keys.whole_consumer(consumer) {
            tx.clear_range(&range);
        }
        changed(tx, keys, &consumer.pool());
        Ok(true)
    }

    /// Returns a sequence that every consumer of the notifications has passed. `tx` must have the feed's `beginnings`, which every creation
    /// and every reset writes, in its conflict set.
    pub async fn passed_by_consumers(&self, tx: &Transaction) -> Result<Sequence> {
        let keys = &self.context.keys;
        let mut low = BTreeMap::new();
        for (key, value) in tx.all_rows(keys.low_watermarks(), Isolation::Snapshot).await? {
            low.insert(keys.consumer_of(&key)?, watermark(&value).map_err(|error| error.at(&key))?);
        }
        let mut passed = Sequence::MAX;
        for (key, value) in tx.all_rows(keys.consumers(), Isolation::Snapshot).await? {
            let row = ConsumerRow::from_bytes(&value).map_err(|error| error.at(&key))?;
            if row.feed.instance().is_none() {
                let low = low.get(&keys.consumer_of(&key)?).copied();
                passed = passed.min(low.unwrap_or(row.start.position()));
            }
        }
        Ok(passed)
    }

    /// Returns, for each of `feeds` that has consumers, the first shard in use. Snapshot reads are enough, because a consumer only moves on
    /// to the next entry. Only a creation or a reset puts it elsewhere, and both write the `beginnings` of its feed, so `tx` must have the
    /// `beginnings` of `feeds` in its conflict set.
    pub async fn first_shards_in_use<'f>(
        &self,
        tx: &Transaction,
        feeds: BTreeSet<&'f FeedId>,
    ) -> Result<BTreeMap<&'f FeedId, ShardId>> {
        let keys = &self.context.keys;
        let mut consumers = Vec::new();
        for (key, value) in tx.all_rows(keys.consumers(), Isolation::Snapshot).await? {
            let row = ConsumerRow::from_bytes(&value).map_err(|error| error.at(&key))?;
            if let Some(feed) = feeds.get(&row.feed) {
                consumers.push((*feed, keys.consumer_of(&key)?));
            }
        }
        let mut in_use = BTreeMap::new();
        for some in consumers.chunks(PAGE_ROWS) {
            let reads = some.iter().map(|(feed, name)| async move {
                let first = RangeRead::new(keys.consumer_checkpoints(name)).limit(1);
                Ok::<_, Error>((*feed, tx.get_range(&first, Isolation::Snapshot).await?))
            });
            for (feed, page) in try_join_all(reads).await? {
                for (key, _) in &page.rows {
                    let (_, shard) = keys.consumer_checkpoint_of(key)?;
                    let first = in_use.entry(feed).or_insert(shard);
                    *first = shard.min(*first);
                }
            }
        }
        Ok(in_use)
    }
}
