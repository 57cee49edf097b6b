//! Ids with keys: they are worked on outside of the order of their shard, in a turn of their own.
//!
//! A pass over the keys of a shard looks for those that are due, a page at a time, so that their number costs no memory but a hash of each.
//! What is worked on is the newest row of the id, whatever failed before.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use bytes::Bytes;

use super::{
    exactly_once::{IdScope, Revoked, finished, is_finished},
    handler::{ConsumedRow, gone, left_instance, sequence_of},
    shard::{IdHashes, ShardTask, hash_of},
};
use crate::{
    base::{cursor::Cursor, encoding::Sequence, error::Result, event::DbInstance},
    state::{
        feed::{Newest, Topology},
        keys::{DeferredRow, Due},
        skipped::SkippedAt,
    },
    store::{Isolation, RangeRead, Transaction, key_after},
};

/// How many keys one transaction reads, or removes.
const PAGE_KEYS: usize = 500;

/// The shortest pause between two passes over the keys of a shard.
const PASS_PAUSE_MIN: Duration = Duration::from_millis(100);

/// The longest one.
const PASS_PAUSE_MAX: Duration = Duration::from_mins(1);

/// A pass is followed by a pause of at least so many times of what it took.
const PASS_SHARE: u32 = 10;

/// What a task knows of the keys of its shard.
#[derive(Default)]
pub(super) struct DeferredIds {
    /// Ids that may have keys. Others have none, but for those that somebody has just asked to work on again.
    hashes: IdHashes,
    /// Ids whose keys say only what is finished, by that position: removed once the checkpoint has passed it.
    finished: BTreeSet<(Sequence, Bytes)>,
    /// Where the pass goes on; `None` between two passes.
    place: Option<Bytes>,
    /// When the pass began.
    began: Duration,
    /// When the next key that the pass has met is due.
    soonest: Option<Duration>,
    /// When the next pass begins; `None` if there are no keys.
    next_pass: Option<Duration>,
}

impl DeferredIds {
    /// Whether `id` may have a key.
    pub fn may_have_key(&self, id: &[u8]) -> bool {
        !self.hashes.is_empty() && self.hashes.contains(&hash_of(id))
    }

    /// When there may be something to do.
    pub fn next_turn(&self) -> Option<Duration> {
        self.next_pass
    }

    /// A key of `id` was written that is due at `at`.
    pub fn note(&mut self, id: &[u8], at: Duration) {
        self.hashes.insert(hash_of(id));
        self.next_pass = Some(self.next_pass.map_or(at, |next| next.min(at)));
        self.soonest = Some(self.soonest.map_or(at, |soonest| soonest.min(at)));
    }

    /// The key of `id` says that everything up to `done` is finished, and nothing else.
    pub fn note_finished(&mut self, id: &Bytes, done: Sequence) {
        self.hashes.insert(hash_of(id));
        self.finished.insert((done, id.clone()));
    }

    fn was_cleared(&mut self, id: &[u8]) {
        self.hashes.remove(&hash_of(id));
    }
}

/// What a run works on.
pub(super) struct Job<R> {
    /// The newest row; `None` if the id has none any more.
    pub row: Option<Arc<R>>,
    /// What is finished of the id.
    pub since: Cursor,
    /// The database that the key of the id names.
    pub worked: Option<DbInstance>,
    /// Whether the id has a key.
    pub has_key: bool,
    pub again: Option<[u8; 16]>,
}

impl<R: ConsumedRow> Job<R> {
    /// The work on a row whose id has this key.
    pub fn new(row: Option<Arc<R>>, since: Cursor, key: Option<&DeferredRow>) -> Self {
        Self {
            row,
            since: key.map_or(since, |key| key.done),
            worked: key.and_then(|key| key.instance),
            has_key: key.is_some(),
            again: key.and_then(|key| key.again),
        }
    }

    /// The database whose end the handler has to learn.
    pub fn gone(&self) -> Option<DbInstance> {
        gone(self.row.as_deref(), &self.since, self.worked)
    }

    /// What is to be cleaned up, should the work end before it is finished.
    pub fn begun_instance(&self) -> Option<DbInstance> {
        left_instance(self.row.as_deref()).or_else(|| self.gone())
    }

    /// What the transactions of a run of this depend on.
    pub fn scope(&self, id: &Bytes) -> IdScope {
        IdScope {
            id: id.clone(),
            sequence: sequence_of(self.row.as_ref()),
            instance: left_instance(self.row.as_deref()),
            has_key: self.has_key,
            again: self.again,
        }
    }
}

/// A deferred id that is due, and how often its work has failed.
type DueId<R> = (Bytes, Job<R>, u32);

/// A key that is due, with the newest row of its id.
type DueKey = (Bytes, DeferredRow, Newest);

impl<R: ConsumedRow> ShardTask<R> {
    /// Reads which ids have keys.
    pub(super) async fn load_deferred(&mut self) -> Result<()> {
        let now = self.now();
        let mut rest = Some(RangeRead::new(self.keys_of_shard()).limit(PAGE_KEYS));
        self.deferred = DeferredIds::default();
        while let Some(read) = rest {
            let page = self.db().run(async |tx| tx.get_range(&read, Isolation::Snapshot).await).await?;
            for (key, value) in &page.rows {
                let (_, id) = self.held.context.keys.deferred_id(key)?;
                let row = DeferredRow::from_bytes(value).map_err(|error| error.at(key))?;
                match row.due {
                    Due::Never => self.deferred.note_finished(&id, row.done.position()),
                    Due::At(..) => self.deferred.note(&id, now),
                }
            }
            rest = read.after(&page);
        }
        Ok(())
    }

    fn keys_of_shard(&self) -> crate::store::KeyRange {
        self.held.context.keys.deferred_of(&self.held.consumer, Some(self.held.shard))
    }

    /// At most `room` ids that are due and not `in_hand`.
    pub(super) async fn due_ids(
        &mut self,
        room: usize,
        in_hand: impl Fn(&[u8]) -> bool,
    ) -> Result<Vec<DueId<R>>> {
        let mut found = Vec::new();
        let now = self.now();
        if self.deferred.next_pass.is_none_or(|next| next > now) {
            return Ok(found);
        }
        let range = self.keys_of_shard();
        if self.deferred.place.is_none() {
            (self.deferred.began, self.deferred.soonest) = (now, None);
        }
        while found.len() < room {
            let begin = self.deferred.place.clone().unwrap_or_else(|| range.begin.clone());
            let read =
                RangeRead::new(crate::store::KeyRange { begin, end: range.end.clone() }).limit(PAGE_KEYS);
            let left = room - found.len();
            let page = async |tx: Transaction| self.due_in(&tx, &read, left, &in_hand).await;
            let (keys, soonest, place) = self.db().run(page).await?;
            for (id, key, newest) in keys {
                if let Some(due) = self.due_id(id, key, newest).await? {
                    found.push(due);
                }
            }
            if let Some(pause) = soonest {
                let at = self.now().saturating_add(pause);
                self.deferred.soonest = Some(self.deferred.soonest.map_or(at, |known| known.min(at)));
            }
            self.deferred.place = place;
            if self.deferred.place.is_none() {
                // The pass has ended.
                let now = self.now();
                let least = (now.saturating_sub(self.deferred.began) * PASS_SHARE).max(PASS_PAUSE_MIN);
                let (least, most) = (now + least, now + PASS_PAUSE_MAX);
                self.deferred.next_pass = self.deferred.soonest.map(|soonest| soonest.max(least).min(most));
                break;
            }
        }
        Ok(found)
    }

    /// Among the keys of `read`, at most `room` that are due and not `in_hand`, with the newest rows of their ids; in how long the next one
    /// is due; and where to go on, if the range was not read to its end.
    async fn due_in(
        &self,
        tx: &Transaction,
        read: &RangeRead,
        room: usize,
        in_hand: &impl Fn(&[u8]) -> bool,
    ) -> Result<(Vec<DueKey>, Option<Duration>, Option<Bytes>)> {
        let (incarnation, version) = (self.held.context.config.incarnation, tx.read_version().await?);
        let page = tx.get_range(read, Isolation::Snapshot).await?;
        let (mut due, mut soonest) = (Vec::new(), None);
        let mut place = page.rows.last().filter(|_| page.more).map(|(key, _)| key_after(key));
        for (key, value) in &page.rows {
            let (_, id) = self.held.context.keys.deferred_id(key)?;
            let row = DeferredRow::from_bytes(value).map_err(|error| error.at(key))?;
            let pause = match row.due {
                Due::Never => continue,
                Due::At(of, at) if of == incarnation => at.saturating_sub(version),
                Due::At(..) => 0,
            };
            if pause > 0 {
                let pause = Duration::from_micros(pause);
                soonest = Some(soonest.map_or(pause, |known: Duration| known.min(pause)));
            } else if !in_hand(&id) {
                due.push((id, row));
                if due.len() == room {
                    place = Some(key_after(key));
                    break;
                }
            }
        }
        if due.is_empty() {
            return Ok((Vec::new(), soonest, place));
        }
        let topology = Topology::read(tx, self.feed(), Isolation::Snapshot).await?;
        let ids = due.iter().map(|(id, _)| &id[..]);
        let newest = self.feed().newest_of_each(tx, &topology, ids).await?;
        let due = due.into_iter().zip(newest).map(|((id, row), newest)| (id, row, newest)).collect();
        Ok((due, soonest, place))
    }

    /// What is to be done for a key that is due; `None` if it is finished, or cannot be worked on.
    async fn due_id(&mut self, id: Bytes, key: DeferredRow, newest: Newest) -> Result<Option<DueId<R>>> {
        let row = match newest {
            Newest::Gone => None,
            Newest::Damaged => {
                self.put_off(&id, "the newest row cannot be read").await?;
                return Ok(None);
            }
            Newest::Row(row) => match R::from_stored(row.sequence, &row.value) {
                Ok(row) => Some(Arc::new(row)),
                Err(error) => {
                    let place = SkippedAt::Row(self.member.feed.clone(), row.sequence);
                    self.held.context.skip(&place, &error);
                    self.put_off(&id, &error.to_string()).await?;
                    return Ok(None);
                }
            },
        };
        let attempts = key.attempts;
        let job = Job::new(row, key.done, Some(&key));
        let is_done = match &job.row {
            Some(row) => row.sequence() <= key.done.position(),
            None => key.instance.is_none(),
        };
        // A request to work again on all ids includes those that nobody here wants.
        let is_unwanted = key.again.is_some()
            && key.instance.is_none()
            && job.row.as_ref().is_some_and(|row| !row.is_wanted(&self.member.filter, &Cursor::NOTHING));
        if is_done && key.again.is_none() || is_unwanted {
            self.finish(&job, &id, true).await?;
            return Ok(None);
        }
        Ok(Some((id, job, attempts)))
    }

    /// Tries an id that cannot be worked on again later.
    async fn put_off(&mut self, id: &Bytes, error: &str) -> Result<()> {
        let held = Arc::clone(&self.held);
        let pause = self.member.options.backoff_max;
        let put_off = async |tx: Transaction| {
            held.lease.check(&tx).await?;
            if let Some(row) = held.deferred(&tx, id).await? {
                let due = held.due_after(&tx, pause).await?;
                let at_ms = held.context.env().wall_ms();
                let row = DeferredRow { due, at_ms, error: error.to_owned(), ..row };
                tx.set(&held.key(id), &row.to_bytes());
            }
            Ok(())
        };
        self.db().run(put_off).await?;
        self.deferred.note(id, self.now().saturating_add(pause));
        Ok(())
    }

    /// The run of `job` has succeeded, and its id has a key: writes that it is finished, or removes the key if the checkpoint decides the
    /// same. `is_covered` says that the checkpoint may pass rows of the id because of the key.
    pub(super) async fn finish(&mut self, job: &Job<R>, id: &Bytes, is_covered: bool) -> Result<()> {
        let (held, scope) = (Arc::clone(&self.held), job.scope(id));
        let now = self.now();
        let finish = async |tx: Transaction| {
            held.lease.check(&tx).await?;
            let Some(stored) = held.deferred(&tx, id).await? else { return Ok(None) };
            let checkpoint = held.checkpoint(&tx, Isolation::Serializable).await?;
            let newest = self.newest_sequence(&tx, id).await?;
            let mut row = finished(&scope, Some(stored));
            let done = Some(row.done.position());
            if newest > done && is_covered {
                // The checkpoint may have passed the newer row.
                row.due = Due::NOW;
            }
            let position = checkpoint.map(|checkpoint| checkpoint.position());
            let is_passed = newest.is_none() || newest <= position && newest <= done;
            if row.due == Due::Never && is_passed {
                tx.clear(&held.key(id));
                return Ok(None);
            }
            tx.set(&held.key(id), &row.to_bytes());
            Ok(Some(row))
        };
        match self.db().run(finish).await? {
            None => self.deferred.was_cleared(id),
            Some(row) if row.due == Due::Never => self.deferred.note_finished(id, row.done.position()),
            Some(_) => self.deferred.note(id, now),
        }
        Ok(())
    }

    /// The position of the newest row of `id`.
    async fn newest_sequence(&self, tx: &Transaction, id: &[u8]) -> Result<Option<Sequence>> {
        let key = self.held.context.keys.newest(&self.member.feed, id);
        let stored = tx.get(&key, Isolation::Snapshot).await?;
        // A damaged place is that of a row that was skipped.
        Ok(stored.and_then(|stored| Sequence::from_bytes(&stored).ok()))
    }

    /// Ends a run that did not succeed, and was closed. With `defer` the id gets a key, or keeps it, that is due after `pause`; otherwise it is tried again in
    /// memory. `attempts` counts the failures, this one included.
    pub(super) async fn revoke(
        &mut self,
        (job, id): (&Job<R>, &Bytes),
        (attempts, error): (u32, &str),
        defer: Option<Duration>,
    ) -> Result<Revoked> {
        let row = DeferredRow {
            done: job.since,
            instance: job.begun_instance(),
            due: Due::NOW,
            attempts,
            at_ms: self.env().wall_ms(),
            error: error.to_owned(),
            again: None,
        };
        let revoked = self.held.revoke(&job.scope(id), defer.map(|pause| (pause, row))).await?;
        if let (Revoked::Deferred, Some(pause)) = (revoked, defer) {
            let at = self.now().saturating_add(pause);
            self.deferred.note(id, at);
        }
        Ok(revoked)
    }

    /// Gives an id a key while it runs, so that it does not hold the checkpoint back.
    pub(super) async fn cover(&mut self, job: &Job<R>, id: &Bytes, attempts: u32) -> Result<()> {
        let (held, now, scope) = (Arc::clone(&self.held), self.now(), job.scope(id));
        let cover = async |tx: Transaction| {
            held.lease.check(&tx).await?;
            let row = match held.deferred(&tx, id).await? {
                // The run has committed, and has not returned.
                Some(stored) if is_finished(&stored, &scope) => DeferredRow { due: Due::NOW, ..stored },
                stored => {
                    let (done, again) =
                        stored.map_or((job.since, None), |stored| (stored.done, stored.again));
                    let (instance, error) = (job.begun_instance(), String::new());
                    DeferredRow { done, instance, due: Due::NOW, attempts, at_ms: 0, error, again }
                }
            };
            tx.set(&held.key(id), &row.to_bytes());
            Ok(())
        };
        self.db().run(cover).await?;
        self.deferred.note(id, now);
        Ok(())
    }

    /// A row of an id with a key has come, which the work on the id must not wait for: its database has ended, or nothing was due.
    pub(super) async fn make_due(&mut self, id: &Bytes) -> Result<()> {
        let (held, now) = (Arc::clone(&self.held), self.now());
        let make_due = async |tx: Transaction| {
            held.lease.check(&tx).await?;
            if let Some(row) = held.deferred(&tx, id).await? {
                tx.set(&held.key(id), &DeferredRow { due: Due::NOW, attempts: 0, ..row }.to_bytes());
            }
            Ok(())
        };
        self.db().run(make_due).await?;
        self.deferred.note(id, now);
        Ok(())
    }

    /// Removes keys that say only what is finished up to `checkpoint`, which decides the same.
    pub(super) async fn clear_finished(&mut self, checkpoint: Sequence) -> Result<()> {
        loop {
            let passed = self.deferred.finished.iter().take_while(|(done, _)| *done <= checkpoint);
            let some: Vec<_> = passed.take(PAGE_KEYS).cloned().collect();
            if some.is_empty() {
                return Ok(());
            }
            let held = Arc::clone(&self.held);
            let clear = async |tx: Transaction| {
                held.lease.check(&tx).await?;
                let stored = held.checkpoint(&tx, Isolation::Serializable).await?;
                let position = stored.map(|stored| stored.position());
                let clears = some.iter().map(|(_, id)| async {
                    let (row, newest) =
                        tokio::try_join!(held.deferred(&tx, id), self.newest_sequence(&tx, id))?;
                    // The checkpoint decides of newer rows as well: nothing passes it by because of such a key.
                    let is_needless = row.is_some_and(|row| row.due == Due::Never) && newest <= position;
                    if is_needless {
                        tx.clear(&held.key(id));
                    }
                    Ok::<_, crate::Error>((is_needless, newest))
                });
                futures_util::future::try_join_all(clears).await
            };
            let cleared = self.db().run(clear).await?;
            for (place, (is_cleared, newest)) in some.into_iter().zip(cleared) {
                self.deferred.finished.remove(&place);
                match newest.filter(|newest| !is_cleared && *newest > checkpoint) {
                    Some(newest) => drop(self.deferred.finished.insert((newest, place.1))),
                    None if is_cleared => self.deferred.was_cleared(&place.1),
                    None => {}
                }
            }
        }
    }
}
