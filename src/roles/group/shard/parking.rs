//! The work on parked ids: rows of them are held back, and tried again after pauses. [`Parking`](super::parked::Parking) says what
//! is parked.

use std::{collections::HashMap, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::future::try_join_all;

use super::{
    parked::{Replaced, Turn, due_after},
    task::{Chunk, End, ShardTask},
};
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
    },
    roles::group::{
        Checkpointer, GroupBatch, Observer,
        observer::{Failure, Session},
        options::FailurePolicy,
    },
    state::{
        feed::{FeedRow, StoredRow, Topology},
        keys::{GroupParkedRow, ShardId},
        skipped::SkippedAt,
    },
    store::{Isolation, Transaction},
};

impl<R, F, O> ShardTask<R, F>
where
    R: FeedRow,
    F: Fn(ShardId) -> O + Send + Sync + 'static,
    O: Observer<R>,
{
    fn due_after(&self, attempts: u32) -> Duration {
        due_after(self.env(), &self.consuming.options.parked_retry, attempts)
    }

    /// Updates the parked ids after checkpoints and requests. Returns an id that is due.
    pub(super) async fn follow_parked(&mut self) -> Result<Option<Bytes>> {
        self.resolve_doubt().await?;
        self.settle_parked();
        if self.parking.is_stale || self.asked.has_changed().unwrap_or(false) {
            self.asked.mark_unchanged();
            self.load_parked().await?;
        }
        Ok(self.parking.due(self.env().now()))
    }

    /// Reads the stored position, if a save of the observer has had an unknown result.
    pub(super) async fn resolve_doubt(&self) -> Result<()> {
        let shard_context = &self.shard_context;
        if shard_context.stored.take_doubt() {
            let stored = shard_context.context.db.run(async |tx| shard_context.position(&tx).await).await;
            if let Some(stored) = stored.inspect_err(|_| shard_context.stored.doubt())? {
                shard_context.stored.raise(stored);
            }
        }
        Ok(())
    }

    /// Moves what checkpoints have parked to the parked ids.
    pub(super) fn settle_parked(&mut self) {
        let (env, consuming) = (self.env().clone(), Arc::clone(&self.consuming));
        let due = |attempts| due_after(&env, &consuming.options.parked_retry, attempts);
        self.parking.settle(self.shard_context.stored.get(), due);
    }

    /// Reads the parked ids that are routed to the shard.
    pub(super) async fn load_parked(&mut self) -> Result<()> {
        let (shard_context, feed) = (&self.shard_context, self.consuming.group.raw());
        let keys = &shard_context.context.keys;
        let read = async |tx: Transaction| {
            shard_context.lease.check(&tx).await?;
            let rows = tx.all_rows(keys.group_parked_ids(&shard_context.group), Isolation::Snapshot).await?;
            let (mut mine, all) = (Vec::new(), rows.len());
            if rows.is_empty() {
                return Ok((mine, HashMap::new(), all));
            }
            let topology = feed.topology(&tx).await?;
            for (key, value) in rows {
                let id = keys.group_parked_id(&key)?;
                match topology.shard_beside(feed, shard_context.shard, &id) {
                    Ok(shard) if shard == shard_context.shard => {
                        mine.push((id, key, GroupParkedRow::from_bytes(&value)));
                    }
                    // A dropped shard reads nothing; its successors have the parked ids.
                    Ok(_) | Err(Error::NoShard { is_trimmed: true, .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            let replaced = self.replaced_of(&tx, &topology, &mine).await?;
            Ok((mine, replaced, all))
        };
        let (mine, replaced, all) = self.db().run(read).await?;
        let mut before = std::mem::take(&mut self.parking.parked);
        for (id, key, row) in mine {
            let due = match row {
                Ok(row) if row.attempts == 0 => self.env().now(),
                Ok(row) => before.remove(&id).unwrap_or_else(|| self.due_after(row.attempts)),
                // Its later rows wait until the row is repaired or deleted.
                Err(error) => {
                    self.shard_context.context.skip(&SkippedAt::Key(key), &error);
                    Duration::MAX
                }
            };
            self.parking.doubted.remove(&id);
            self.parking.parked.insert(id, due);
        }
        let parked = &self.parking.parked;
        self.parking.replaced.retain(|id, _| parked.contains_key(id));
        self.parking.replaced.extend(replaced);
        (self.parking.all, self.parking.is_stale) = (all, false);
        Ok(())
    }

    /// Those of `parked` of which this task did not know, and which a newer row has replaced in the feed. Later rows of all others have
    /// waited.
    async fn replaced_of(
        &self,
        tx: &Transaction,
        topology: &Topology,
        parked: &[(Bytes, Bytes, Result<GroupParkedRow>)],
    ) -> Result<HashMap<Bytes, Replaced>> {
        let unknown = parked.iter().filter(|(id, ..)| !self.parking.holds(id));
        let unknown = unknown.filter_map(|(id, _, row)| Some((id, row.as_ref().ok()?.sequence)));
        let replaced = unknown.map(async |(id, sequence)| {
            let by = self.replaced_by(tx, topology, (id, sequence)).await?;
            Ok::<_, Error>(by.map(|by| (id.clone(), Replaced { sequence, by })))
        });
        Ok(try_join_all(replaced).await?.into_iter().flatten().collect())
    }

    /// Where the newer row of `id` is that has replaced the one at `sequence` in the feed, or an upper bound of that; `None` if there is none.
    async fn replaced_by(
        &self,
        tx: &Transaction,
        topology: &Topology,
        (id, sequence): (&Bytes, Sequence),
    ) -> Result<Option<Sequence>> {
        let feed = self.consuming.group.raw();
        if feed.id.instance().is_none() {
            // The row itself does not say it: the janitor removes tombstones.
            let newest = tx.get(&feed.context.keys.newest(feed.id, id), Isolation::Snapshot).await?;
            let newest = newest.map(|value| Sequence::from_bytes(&value)).transpose()?;
            return Ok(newest.filter(|newest| *newest > sequence));
        }
        // Feeds of documents keep no track of the newest row, but only an edit removes a row.
        let row = topology.space_at(feed, sequence, id)?.row(sequence);
        if tx.get(&row, Isolation::Snapshot).await?.is_some() {
            return Ok(None);
        }
        feed.last_readable(tx).await.map(Some)
    }

    /// Removes the rows of `decoded`, decoded from `rows`, that have to wait behind a parked row of their id, or were given up before the
    /// observer was replaced.
    pub(super) fn hold_back(&mut self, decoded: Vec<Arc<R>>, rows: &mut Chunk) -> Vec<Arc<R>> {
        let parking = &self.parking;
        if parking.parked.is_empty() && !parking.has_pending() && parking.doubted.is_empty() {
            return decoded;
        }
        let mut given = Vec::with_capacity(decoded.len());
        for (row, stored) in decoded.into_iter().zip(&rows.rows) {
            if self.parking.parks.letters.contains_key(&stored.sequence) {
                continue;
            }
            let id = Bytes::copy_from_slice(row.id());
            if self.parking.holds(&id) {
                let waits = self.parked_row(stored, 0, String::new());
                self.parking.add(id, waits);
                continue;
            }
            if self.parking.doubted.contains(&id) {
                Arc::make_mut(&mut self.parking.parks).overtaken.insert(id, row.sequence());
            }
            given.push(row);
        }
        rows.last_given = given.last().map(|row| row.sequence());
        given
    }

    fn parked_row(
        &self,
        StoredRow { sequence, value }: &StoredRow,
        attempts: u32,
        error: String,
    ) -> GroupParkedRow {
        let (shard, after, at_ms) = (self.shard_context.shard, self.read, self.env().wall_ms());
        GroupParkedRow { shard, after, sequence: *sequence, attempts, at_ms, error, row: value.clone() }
    }

    /// Parks the id of the only row of `rows`, which has failed `attempts` times. Returns whether it is parked, or will be
    /// with the next checkpoint; false if too many ids are parked.
    pub(super) async fn park(&mut self, rows: &Chunk, attempts: u32, failure: &Failure) -> Result<bool> {
        if self.parking.all.max(self.parking.parked.len()) >= FailurePolicy::PARKED_MAX {
            return Ok(false);
        }
        let stored = &rows.rows[0];
        let id = Bytes::copy_from_slice(R::from_stored(stored.sequence, &stored.value)?.id());
        let row = self.parked_row(stored, attempts, failure.text.clone());
        self.parking.add(id, row);
        self.parking.all += 1;
        self.shard_context.context.stats.group_parked.add(1);
        tracing::error!(
            group = %self.shard_context.group,
            shard = self.shard_context.shard.0,
            sequence = %stored.sequence,
            attempts,
            error = %failure,
            "a group parks an id: its rows wait, and are tried again"
        );
        self.failing = None;
        let is_whole = self.may_save();
        self.settle(rows);
        if is_whole {
            // Instead of the checkpoint that the observer would have written.
            self.write_checkpoint(rows.to).await?;
        }
        self.recovered().await;
        Ok(true)
    }

    /// Whether all rows that were passed to the observer are saved, or this task may save them.
    pub(super) fn may_save(&self) -> bool {
        !self.is_explicit() || self.shard_context.stored.get() >= self.last_row
    }

    /// Forgets the parked row of the database `id` at `sequence`, which a replay has parked, if the newer row was really read. It may have
    /// moved on before: then it comes, and takes the place of this one.
    async fn overtaken(&mut self, key: &[u8], id: &Bytes, sequence: Sequence) -> Result<()> {
        let shard_context = Arc::clone(&self.shard_context);
        let read = async |tx: Transaction| {
            shard_context.lease.check(&tx).await?;
            let topology = self.consuming.group.raw().topology(&tx).await?;
            self.replaced_by(&tx, &topology, (id, sequence)).await
        };
        match shard_context.context.db.run(read).await? {
            Some(by) if by > self.read => {
                self.parking.replaced.insert(id.clone(), Replaced { sequence, by });
                let due = self.due_after(1);
                self.parking.parked.insert(id.clone(), due);
                Ok(())
            }
            _ => self.unpark(key, id, sequence).await,
        }
    }

    /// Passes the stored row of `id` to the observer, once.
    pub(super) async fn retry_parked(
        &mut self,
        session: &mut Session<R, O>,
        id: Bytes,
    ) -> Result<Option<End>> {
        let shard_context = Arc::clone(&self.shard_context);
        let keys = &shard_context.context.keys;
        let key = keys.group_parked(&shard_context.group, &id);
        let read = async |tx: Transaction| {
            shard_context.lease.check(&tx).await?;
            tx.get(&key, Isolation::Snapshot).await
        };
        let Some(stored) = shard_context.context.db.run(read).await? else {
            // It was deleted, or the observer has saved it together with an effect.
            self.parking.parked.remove(&id);
            return Ok(None);
        };
        let decoded = GroupParkedRow::from_bytes(&stored)
            .and_then(|parked| Ok((R::from_stored(parked.sequence, &parked.row)?, parked)));
        let (row, GroupParkedRow { after, sequence, attempts, .. }) = match decoded {
            Ok(decoded) => decoded,
            Err(error) => {
                shard_context.context.skip(&SkippedAt::Key(key.into()), &error);
                self.parking.parked.insert(id, Duration::MAX);
                return Ok(None);
            }
        };
        // A feed of documents does not say where the newer row is now. If it has moved on unread, a read to the end of the feed meets it.
        let of_documents = self.consuming.group.instance().is_some();
        let passed = if of_documents { self.caught_up } else { self.read };
        match self.parking.turn(&id, sequence, passed) {
            Turn::Try => {}
            Turn::Wait => {
                let due = self.due_after(1);
                self.parking.parked.insert(id, due);
                return Ok(None);
            }
            Turn::Overtaken if of_documents => {
                self.unpark(&key, &id, sequence).await?;
                return Ok(None);
            }
            Turn::Overtaken => {
                self.overtaken(&key, &id, sequence).await?;
                return Ok(None);
            }
        }
        let attempt = attempts.saturating_add(1);
        let batch = GroupBatch {
            shard: shard_context.shard,
            rows: vec![Arc::new(row)],
            after,
            start: self.start,
            to: sequence,
            attempt,
            fencing_token: self.token,
            checkpointer: Checkpointer::of_parked(&shard_context, id.clone(), sequence),
            unsaved: self.unsaved(),
        };
        match self.watched(session.batch(batch), attempt).await {
            Ok(()) => {
                self.unpark(&key, &id, sequence).await?;
                shard_context.context.stats.group_rows.add(1);
                tracing::info!(group = %shard_context.group, shard = shard_context.shard.0, attempt, "a parked row is worked on");
                Ok(None)
            }
            Err(failure) => {
                self.note_retry(&key, id, attempt, &failure).await?;
                if failure.is_panic { self.over().await } else { Ok(None) }
            }
        }
    }

    /// Saves that the row of `id` at `sequence`, which is parked under `key`, is done.
    async fn unpark(&mut self, key: &[u8], id: &Bytes, sequence: Sequence) -> Result<()> {
        let shard_context = Arc::clone(&self.shard_context);
        let unpark = async |tx: Transaction| {
            // It does not matter whether it was done before.
            let _ = shard_context.unpark(&tx, id, sequence).await?;
            Ok(tx.get(key, Isolation::Snapshot).await?.is_some())
        };
        let has_more = shard_context.context.db.run(unpark).await?;
        self.retried(id.clone(), has_more, 0);
        Ok(())
    }

    /// Saves that the parked row of `id` under `key` has failed again.
    async fn note_retry(&mut self, key: &[u8], id: Bytes, attempts: u32, failure: &Failure) -> Result<()> {
        let shard_context = Arc::clone(&self.shard_context);
        shard_context.context.stats.group_errors.add(1);
        shard_context.context.stats.group_panics.add(failure.is_panic.into());
        let note = async |tx: Transaction| {
            // Once the shard was replaced, its successor works on the id.
            if shard_context.position(&tx).await?.is_none() {
                return Ok(false);
            }
            let Some(value) = tx.get(key, Isolation::Serializable).await? else { return Ok(false) };
            let (at_ms, error) = (shard_context.context.env().wall_ms(), failure.text.clone());
            let parked = GroupParkedRow { attempts, at_ms, error, ..GroupParkedRow::from_bytes(&value)? };
            tx.set(key, &parked.to_bytes());
            Ok(true)
        };
        let has_more = shard_context.context.db.run(note).await?;
        self.retried(id, has_more, attempts);
        Ok(())
    }

    /// Updates `id` after a retry: `has_more` says whether it is still parked.
    fn retried(&mut self, id: Bytes, has_more: bool, attempts: u32) {
        if has_more {
            let due = self.due_after(attempts);
            self.parking.parked.insert(id, due);
        } else {
            self.parking.parked.remove(&id);
        }
        self.moved = self.env().now();
    }
}
