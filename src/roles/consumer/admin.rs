//! [`ConsumerHandle`]: the management of a consumer as a whole.

use std::{fmt, time::Duration};

use bytes::Bytes;
use parking_lot::Mutex;
use serde::Serialize;

use super::{
    deferred::parts,
    member::{is_marked, shard_in, successor},
    stored::ConsumerHandle,
};
use crate::{
    base::{
        cursor::{Cursor, Start},
        encoding::Sequence,
        env::Env,
        error::{Error, Result},
        event::DbInstance,
        filter::{Filter, GlobMatcher},
    },
    state::{
        feed::{RawFeed, Topology},
        history::History,
        keys::{ConsumerRow, DeferredRow, Due, FeedId, Lease, NodeId, ShardId},
        membership::{changed, members},
    },
    store::{Isolation, KeyRange, RangeRead, Transaction, key_after},
};

/// How many ids one transaction changes.
const PAGE_IDS: usize = 200;

/// What a consumer follows, and where it starts.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ConsumerSettings {
    /// The database whose documents the consumer follows; `None` for the notifications. Default: the notifications.
    pub documents: Option<DbInstance>,
    /// The databases that the consumer wants. Consumers of documents have no filter. Default: all.
    pub filter: Filter,
    /// Where the consumer starts. Default: with new rows.
    pub start: Start,
    /// How long the consumer may be without a live member before the janitor deletes it. Default: never.
    pub expiry: Option<Duration>,
}

crate::base::macros::setters!(ConsumerSettings {
    documents: Option<DbInstance>,
    filter: Filter,
    start: Start,
    expiry: Option<Duration>
});

impl Default for ConsumerSettings {
    fn default() -> Self {
        Self { documents: None, filter: Filter::all(), start: Start::default(), expiry: None }
    }
}

impl ConsumerSettings {
    pub(super) fn feed(&self) -> FeedId {
        self.documents.map_or_else(FeedId::notifications, FeedId::documents)
    }

    /// Returns the expiry in milliseconds; 0 if there is none.
    fn expiry_ms(&self) -> Result<u64> {
        let Some(expiry) = self.expiry else { return Ok(0) };
        match u64::try_from(expiry.as_millis()) {
            Ok(ms) if ms > 0 => Ok(ms),
            _ => Err(Error::invalid("expiry", format!("{expiry:?} is not 1 ms to 500 million years"))),
        }
    }

    fn check_filter(&self) -> Result<()> {
        if self.filter.has_predicate() {
            let reason = "a consumer cannot detect that its predicate has changed: filter by names, and then in the handler";
            return Err(Error::invalid("filter", reason));
        }
        if self.filter.ddocs.is_some() {
            let reason = "a consumer does not look up design documents: filter by kinds, and call `Feed::ddocs` in the handler";
            return Err(Error::invalid("filter", reason));
        }
        if self.documents.is_some() && !self.filter.is_all() {
            return Err(Error::invalid("filter", "a consumer of documents has none: filter in the handler"));
        }
        Ok(())
    }
}

/// A deferred id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DeferredId {
    /// The id: the name of a database, or the id of a document.
    pub id: String,
    /// The shard in which the id is worked on.
    pub shard: ShardId,
    /// How many times the work on the id has failed.
    pub attempts: u32,
    /// The milliseconds until the next attempt; 0 if the id is due, or is being worked on.
    pub due_in_ms: u64,
    /// When the work last failed, in milliseconds since 1970; 0 if it has not failed.
    pub at_ms: u64,
    /// Why the work failed, in at most 1,000 bytes; empty if the work only takes long, or was requested again.
    pub error: String,
    /// Whether work on the id was requested again.
    pub is_again: bool,
}

/// A change to a consumer.
enum Change {
    Reset(Start),
    Pause(bool),
    Delete,
}

fn draw(env: &Env) -> [u8; 16] {
    NodeId::random(env).0
}

impl ConsumerHandle {
    /// Creates the consumer. If it exists with the same feed, filter and expiry (if one is given), nothing is changed. Returns whether it
    /// was created. A member creates its consumer itself.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the consumer exists with another feed, filter or expiry, if the filter has a predicate or design documents, if
    /// the start is ahead of the store, or if the expiry is outside its limits; [`Error::Expired`] if the start is below the horizon of the
    /// feed; [`Error::NoFeed`]. On failure nothing is changed.
    pub async fn create(&self, settings: &ConsumerSettings) -> Result<bool> {
        Ok(self.create_unless(settings, None).await? == Some(true))
    }

    /// Does the same as [`ConsumerHandle::create`], but returns `None` and creates nothing if `node` is a member of the consumer.
    pub(super) async fn create_unless(
        &self,
        settings: &ConsumerSettings,
        node: Option<NodeId>,
    ) -> Result<Option<bool>> {
        settings.check_filter()?;
        let (feed, expiry_ms) = (settings.feed(), settings.expiry_ms()?);
        let (filter, filter_text) = (settings.filter.hash(), settings.filter.to_string());
        // Each attempt draws its own identity, because an earlier attempt may have created a consumer that has been deleted since.
        let drawn = &Mutex::new(Vec::new());
        let create = async |tx: Transaction| {
            if let Some(row) = self.row(&tx, Isolation::Serializable).await? {
                let differs = |what, was: &dyn fmt::Display, is: &dyn fmt::Display| {
                    let name = &self.name;
                    let reason =
                        format!("consumer {name} {was}, not {is}: delete it first, or take another name");
                    Err(Error::invalid(what, reason))
                };
                if row.feed != feed {
                    return differs("feed", &format_args!("follows {}", row.feed), &feed);
                }
                if expiry_ms > 0 && row.expiry_ms != expiry_ms {
                    let after = |ms| if ms == 0 { "never".to_owned() } else { format!("after {ms} ms") };
                    let was = format!("was created to expire {}", after(row.expiry_ms));
                    return differs("expiry", &was, &after(expiry_ms));
                }
                if row.filter != filter {
                    let was = format!("was created with the filter {:?}", row.filter_text);
                    return differs("filter", &was, &format_args!("{filter_text:?}"));
                }
                return Ok(Some(drawn.lock().contains(&row.identity)));
            }
            if let Some(node) = node {
                let members = members(&tx, &self.context.keys, &self.name.role()).await?;
                if members.iter().any(|(member, _)| *member == node) {
                    return Ok(None);
                }
            }
            let identity = draw(self.env());
            drawn.lock().push(identity);
            let row = ConsumerRow {
                identity,
                generation: 1,
                feed: feed.clone(),
                start: Cursor::BEGINNING,
                filter,
                filter_text: filter_text.clone(),
                is_paused: false,
                created_ms: self.env().wall_ms(),
                expiry_ms,
            };
            self.begin_at(&tx, settings.start, row).await?;
            Ok(Some(true))
        };
        self.context.store.run(create).await
    }

    /// Moves the consumer to another position: to now, to the beginning, or to just after a sequence. Its members can no longer commit the
    /// work that they have in hand, and continue at the new position. Deferred ids are removed.
    ///
    /// Without `force`, this fails while nodes are members. A node that has crashed remains a member until its heartbeat has been missing
    /// for its expiry ([`NodeOptions::expiry`](crate::NodeOptions::expiry), 5 s by default).
    ///
    /// # Errors
    ///
    /// [`Error::Expired`] if the position is below the feed's horizon, or belongs to another history; [`Error::Invalid`] if it is ahead of
    /// the store; [`Error::ConsumerInUse`] while nodes are members; [`Error::NoConsumer`]. On failure nothing is changed.
    pub async fn reset(&self, to: impl Into<Start>, force: bool) -> Result<()> {
        self.change(force, &Change::Reset(to.into())).await
    }

    /// Deletes the consumer, with everything that is stored for it. Its members get no more work.
    ///
    /// Fails with [`Error::ConsumerInUse`] while nodes are members, unless `force` is set, and with [`Error::NoConsumer`].
    pub async fn delete(&self, force: bool) -> Result<()> {
        self.change(force, &Change::Delete).await
    }

    /// Stops the work on all nodes until [`ConsumerHandle::resume`]. Work in hand can no longer be committed. Fails with
    /// [`Error::NoConsumer`].
    pub async fn pause(&self) -> Result<()> {
        self.change(true, &Change::Pause(true)).await
    }

    /// Lets the members continue where they were paused. Fails with [`Error::NoConsumer`].
    pub async fn resume(&self) -> Result<()> {
        self.change(true, &Change::Pause(false)).await
    }

    /// Changes the consumer that has the name when the call begins. After an unknown result the change is tried again, unless the consumer
    /// has been deleted by then or, if the change is a reset, has been reset by then, whether by the first attempt or by another caller.
    async fn change(&self, force: bool, change: &Change) -> Result<()> {
        let attempted = &Mutex::new(None);
        let run = async |tx: Transaction| {
            let row = self.row(&tx, Isolation::Serializable).await?;
            let (before, is_in_doubt) = (*attempted.lock(), tx.may_have_committed());
            let is_reset = is_in_doubt && matches!(change, Change::Reset(_));
            let is_due = |row: &ConsumerRow| {
                before.is_none_or(|(identity, generation)| {
                    identity == row.identity && (!is_reset || generation == row.generation)
                })
            };
            let Some(row) = row.filter(is_due) else {
                return if is_in_doubt { Ok(()) } else { Err(self.missing()) };
            };
            if !force {
                let members = members(&tx, &self.context.keys, &self.name.role()).await?.len();
                tx.add_read_conflict(&self.context.keys.nodes_with(&self.name.role()));
                if members > 0 {
                    return Err(Error::ConsumerInUse { consumer: self.name.to_string(), members });
                }
            }
            *attempted.lock() = Some((row.identity, row.generation));
            self.apply(&tx, change, row).await
        };
        self.context.store.run(run).await
    }

    async fn apply(&self, tx: &Transaction, change: &Change, row: ConsumerRow) -> Result<()> {
        let keys = &self.context.keys;
        match *change {
            Change::Reset(to) => {
                let generation = row.generation + 1;
                self.begin_at(tx, to, ConsumerRow { generation, ..row }).await
            }
            Change::Pause(is_paused) if row.is_paused == is_paused => {
                // An earlier change whose result is unknown may still be committed. It conflicts with this.
                tx.add_write_conflict(&KeyRange::key(&keys.consumer(&self.name)));
                Ok(())
            }
            Change::Pause(is_paused) => {
                tx.set(&keys.consumer(&self.name), &ConsumerRow { is_paused, ..row }.to_bytes());
                changed(tx, keys, &self.name.pool());
                // The holder of a lease does nothing while the consumer is paused, and continues under the same lease.
                if is_paused { self.take_leases(tx, None).await } else { Ok(()) }
            }
            Change::Delete => {
                self.remove_in(tx);
                Ok(())
            }
        }
    }

    /// Moves the consumer of `row` to `start`.
    async fn begin_at(&self, tx: &Transaction, start: Start, row: ConsumerRow) -> Result<()> {
        let (keys, feed) = (&self.context.keys, RawFeed::new(&self.context, &row.feed));
        let topology = Topology::read(tx, feed, Isolation::Serializable).await?;
        let horizon = feed.horizon(tx, Isolation::Serializable).await?;
        // The janitor must not drop what this consumer has to read, nor its topology entry.
        tx.add_write_conflict(&keys.beginnings(&row.feed));
        let now = History::check_opened(&self.context, tx).await?;
        let start = match start {
            Start::Now => Cursor::from(now),
            Start::At(cursor) => {
                feed.check_cursor(tx, cursor).await?;
                let start = cursor.rewound();
                start.check(horizon)?;
                if start.knew_nothing() { start.begin(now) } else { start }
            }
        };
        let position = start.position();
        let shards: Vec<_> = topology.at(position).shards().collect();
        self.take_leases(tx, Some(&shards)).await?;
        changed(tx, keys, &self.name.pool());
        tx.clear_range(&keys.consumer_checkpoints(&self.name));
        tx.clear_range(&keys.deferred_of(&self.name, None));
        tx.clear(&keys.low_watermark(&self.name));
        for shard in shards {
            tx.set(&keys.consumer_checkpoint(&self.name, shard), &start.to_bytes());
        }
        tx.set(&keys.consumer(&self.name), &ConsumerRow { start, ..row }.to_bytes());
        Ok(())
    }

    /// Takes the leases of `shards`, or all leases, away from their owners. Other leases are removed.
    async fn take_leases(&self, tx: &Transaction, shards: Option<&[ShardId]>) -> Result<()> {
        let (keys, pool) = (&self.context.keys, self.name.pool());
        for (key, value) in tx.all_rows(keys.leases(&pool), Isolation::Serializable).await? {
            let (_, resource, lease) = keys.lease_row(&key, &value)?;
            if shards.is_none_or(|shards| shards.binary_search(&ShardId(resource)).is_ok()) {
                tx.set(&key, &Lease { epoch: lease.epoch + 1, owner: None }.to_bytes());
            } else {
                tx.clear(&key);
            }
        }
        Ok(())
    }

    /// Returns the deferred ids after `after`, at most `limit` (1 to 10,000), by shard and id. Begin with `None`, and continue after the
    /// shard and the id of the last one. Fails with [`Error::NoConsumer`].
    pub async fn deferred(&self, after: Option<(ShardId, &str)>, limit: usize) -> Result<Vec<DeferredId>> {
        if !(1..=10_000).contains(&limit) {
            return Err(Error::invalid("limit", format!("{limit} is not 1 to 10,000")));
        }
        let keys = &self.context.keys;
        let mut range = keys.deferred_of(&self.name, None);
        if let Some((shard, id)) = after {
            range.begin = key_after(&keys.deferred(&self.name, shard, id.as_bytes()));
        }
        let (mut rest, mut found) = (Some(RangeRead::new(range).limit(limit)), Vec::new());
        while let Some(read) = rest {
            let page = async |tx: Transaction| {
                self.existing(&tx, Isolation::Snapshot).await?;
                Ok((self.deferred_page(&tx, &read).await?, tx.clock_version().await?))
            };
            let ((ids, after), version) = self.context.store.run(page).await?;
            let described =
                ids.into_iter().filter_map(|(_, shard, id, row)| self.describe(shard, &id, row, version));
            found.extend(described);
            rest = after.filter(|_| found.len() < limit);
        }
        found.truncate(limit);
        Ok(found)
    }

    /// Describes a deferred id in human-readable form; `None` if there is nothing to do for it.
    fn describe(&self, shard: ShardId, id: &[u8], row: DeferredRow, version: u64) -> Option<DeferredId> {
        let DeferredRow { due, attempts, at_ms, error, again, .. } = row;
        let micros = match due {
            Due::Never => return None,
            Due::At(incarnation, at) if incarnation == self.context.config.incarnation => {
                at.saturating_sub(version)
            }
            Due::At(..) => 0,
        };
        let id = String::from_utf8_lossy(id).into_owned();
        Some(DeferredId {
            id,
            shard,
            attempts,
            due_in_ms: micros / 1_000,
            at_ms,
            error,
            is_again: again.is_some(),
        })
    }

    /// Makes the consumer work again on the ids that match the glob `ids`: on all such ids of the feed, or only on deferred ones. These ids
    /// are due at once, with their newest rows. Everything since the start of the consumer counts as new; for a deferred id, everything
    /// since its last finished work. Returns the number of ids. Runs in progress are not disturbed, and are followed by another run.
    ///
    /// Fails with [`Error::NoConsumer`], and with [`Error::Invalid`] if the glob is malformed.
    pub async fn again(&self, ids: &str, only_deferred: bool) -> Result<u64> {
        let glob = GlobMatcher::new(ids)?;
        let is_meant = |id: &[u8]| std::str::from_utf8(id).is_ok_and(|id| glob.is_match(id));
        let (store, keys) = (&self.context.store, &self.context.keys);
        let row = store.run(async |tx| self.existing(&tx, Isolation::Snapshot).await).await?;
        let range =
            if only_deferred { keys.deferred_of(&self.name, None) } else { keys.newest_of_feed(&row.feed) };
        let (mut rest, mut count) = (Some(RangeRead::new(range).limit(PAGE_IDS)), 0);
        while let Some(read) = rest {
            let page = async |tx: Transaction| {
                if only_deferred {
                    let (ids, rest) = self.deferred_page(&tx, &read).await?;
                    let ids = ids.into_iter().filter(|(.., row)| row.due != Due::Never);
                    return Ok((ids.map(|(_, _, id, _)| id).collect(), rest));
                }
                let page = tx.get_range(&read, Isolation::Snapshot).await?;
                let ids = page.rows.iter().map(|(key, _)| Ok(keys.newest_id(key)?.1.into()));
                Ok((ids.collect::<Result<Vec<Bytes>>>()?, read.clone().after(&page)))
            };
            let (mut found, after) = store.run(page).await?;
            found.retain(|id| is_meant(id));
            for some in parts(&found) {
                let again = draw(self.env());
                count += store
                    .run(async |tx| self.again_in(&tx, &row, (some, only_deferred), again).await)
                    .await?;
            }
            rest = after;
        }
        Ok(count)
    }

    async fn again_in(
        &self,
        tx: &Transaction,
        known: &ConsumerRow,
        (ids, only_deferred): (&[Bytes], bool),
        again: [u8; 16],
    ) -> Result<u64> {
        let row = self.row(tx, Isolation::Serializable).await?.filter(|row| row.identity == known.identity);
        let row = row.ok_or_else(|| self.missing())?;
        // The keys are read concurrently, so that the reads finish within the lifetime of a transaction.
        let keys = ids.iter().map(|id| async {
            let key = self.key_of(tx, &row, id).await?;
            let stored = self.deferred_at(tx, &key, Isolation::Serializable).await?;
            let newest = self.context.keys.newest(&row.feed, id);
            let newest = if only_deferred { tx.get(&newest, Isolation::Snapshot).await? } else { None };
            let newest = newest.map(|newest| Sequence::from_bytes(&newest)).transpose()?;
            Ok::<_, Error>((key, stored, newest))
        });
        let mut count = 0;
        for (key, stored, newest) in futures_util::future::try_join_all(keys).await? {
            // The key of an id that was discarded remains until a member has handled it.
            let is_unfinished = |row: &DeferredRow| {
                row.again.is_some() || newest.is_none_or(|newest| row.done.is_news(newest))
            };
            if only_deferred && !stored.as_ref().is_some_and(is_unfinished) {
                continue;
            }
            count += 1;
            let deferred = stored.unwrap_or_else(|| DeferredRow::new(row.start));
            let deferred = DeferredRow { due: Due::NOW, again: Some(again), ..deferred };
            tx.set(&key, &deferred.to_bytes());
        }
        changed(tx, &self.context.keys, &self.name.pool());
        Ok(count)
    }

    /// Returns the key of `id` in the shard in which the id is worked on, or in a drained shard from which the key has not been moved yet.
    async fn key_of(&self, tx: &Transaction, row: &ConsumerRow, id: &[u8]) -> Result<Vec<u8>> {
        let (keys, feed) = (&self.context.keys, RawFeed::new(&self.context, &row.feed));
        let topology = feed.topology(tx).await?;
        let first = RangeRead::new(keys.consumer_checkpoints(&self.name)).limit(1);
        let first = tx.get_range(&first, Isolation::Snapshot).await?;
        let (key, _) = first.rows.first().ok_or_else(|| self.missing())?;
        let (_, first) = keys.consumer_checkpoint_of(key)?;
        let key = |shard| keys.deferred(&self.name, shard, id);
        let shard = topology.shard_beside(feed, first, id)?;
        // Conflicts on the lease, which is written when a shard is drained or replaced, not on the checkpoint, which moves all the time.
        tx.add_read_conflict(&KeyRange::key(&keys.lease(&self.name.pool(), shard.0)));
        let stored = self.checkpoint_of(tx, shard, Isolation::Snapshot).await?;
        let stored = stored.ok_or_else(|| self.missing())?;
        if !is_marked(&topology, shard, stored) {
            return Ok(key(shard));
        }
        // The shard is drained, but the key may not have been moved yet.
        if tx.get(&key(shard), Isolation::Serializable).await?.is_some() {
            return Ok(key(shard));
        }
        Ok(key(shard_in(&topology, feed, successor(&topology, shard)?, id)?))
    }

    /// Gives up the work on a deferred id, up to its newest row; later rows of the id are worked on. A run of the id can no longer commit,
    /// but a batch that has the row in hand continues. The id stays in the list until a member has handled its key. Returns false if the id
    /// is not deferred. Fails with [`Error::NoConsumer`].
    pub async fn discard(&self, id: &[u8]) -> Result<bool> {
        let discard = async |tx: Transaction| {
            let row = self.existing(&tx, Isolation::Serializable).await?;
            let key = self.key_of(&tx, &row, id).await?;
            let stored = self.deferred_at(&tx, &key, Isolation::Serializable).await?;
            let Some(stored) = stored.filter(|stored| stored.due != Due::Never) else { return Ok(false) };
            let newest = self.context.keys.newest(&row.feed, id);
            let newest = tx.get(&newest, Isolation::Snapshot).await?;
            let newest = newest.map(|newest| Sequence::from_bytes(&newest)).transpose()?;
            let done = newest.map_or(stored.done, Cursor::from);
            // The key is due, so that the task of its shard finds the work finished. Until then the key covers new rows.
            tx.set(&key, &DeferredRow::new(done).to_bytes());
            changed(&tx, &self.context.keys, &self.name.pool());
            Ok(true)
        };
        self.context.store.run(discard).await
    }
}
