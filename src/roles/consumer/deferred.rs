//! The work on ids with keys, outside the order of their shard.
//!
//! A pass over the keys of a shard looks for those that are due, one page at a time, so that a key costs no memory beyond its hash. The
//! work is always on the newest row of the id, whichever row failed before.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;

use super::{
    exactly_once::{IdScope, finished, is_finished},
    handler::{ConsumedRow, left_instance, sequence_of},
    shard::ShardTask,
};
use crate::{
    base::{cursor::Cursor, encoding::Sequence, error::Result, event::DbInstance},
    state::{
        feed::Newest,
        keys::{DeferredRow, Due},
        skipped::SkippedAt,
    },
    store::{Isolation, KeyRange, RangeRead, Transaction, key_after},
};

/// How many keys one transaction reads.
const PAGE_KEYS: usize = 500;

/// The maximum size of a part, and the size of a key without its id, in bytes. So a part has at most 500 keys, and its transaction 3 MB.
const PART_SIZE: usize = 500_000;
const BESIDE_ID: usize = 1_000;

/// The shortest pause between two passes over the keys of a shard.
const PASS_PAUSE_MIN: Duration = Duration::from_millis(100);

/// The longest pause between two passes.
const PASS_PAUSE_MAX: Duration = Duration::from_mins(1);

/// The pause after a pass is at least this many times as long as the pass.
const PASS_SHARE: u32 = 10;

/// What a run works on.
pub(super) struct Job<R> {
    /// The newest row; `None` if the id no longer has one, or if the run only handles the end of a database.
    pub row: Option<Arc<R>>,
    /// The database whose end the run handles, if it handles nothing else.
    pub end: Option<DbInstance>,
    /// Up to where the work on the id is finished.
    pub since: Cursor,
    /// The database that the key of the id names.
    pub worked: Option<DbInstance>,
    /// Whether only the key ensures that the row is worked on, because the checkpoint may already have passed the row.
    pub is_covered: bool,
    pub again: Option<[u8; 16]>,
}

impl<R: ConsumedRow> Job<R> {
    /// Makes the job for `row`. `key` is the stored key of its id, if the id has one.
    pub fn new(row: Option<Arc<R>>, since: Cursor, key: Option<&DeferredRow>) -> Self {
        Self {
            row,
            end: None,
            since: key.map_or(since, |key| key.done),
            worked: key.and_then(|key| key.instance),
            is_covered: false,
            again: key.and_then(|key| key.again),
        }
    }

    /// Returns the database that has ended and that the handler must clean up; `None` if there is none.
    pub fn gone(&self) -> Option<DbInstance> {
        match self.row.as_deref() {
            None => self.worked,
            // Work on this database has begun, so the end of the previous one was handled, or will be handled in a run of its own.
            Some(row) if self.worked.is_some() && self.worked == left_instance(Some(row)) => None,
            Some(row) => self.worked.or_else(|| row.gone(&self.since)),
        }
    }

    /// Returns the database on which the run works.
    pub fn begun_instance(&self) -> Option<DbInstance> {
        let gone = self.gone().filter(|_| self.end.is_none());
        left_instance(self.row.as_deref()).or(gone)
    }

    /// Returns the value of the id's key while the work is unfinished. It keeps `done` and the request to work again from `stored`.
    fn key(&self, stored: Option<DeferredRow>) -> DeferredRow {
        let (ended, instance) = match left_instance(self.row.as_deref()) {
            _ if self.end.is_some() => {
                stored.as_ref().map_or((None, self.end), |stored| (stored.ended, stored.instance))
            }
            Some(begun) => (self.gone(), Some(begun)),
            None => (None, self.gone()),
        };
        let (done, again) = stored.map_or((self.since, None), |stored| (stored.done, stored.again));
        DeferredRow { instance, ended, again, ..DeferredRow::new(done) }
    }

    /// Returns what the transactions of a run of this job depend on.
    pub fn scope(&self, id: &Bytes) -> IdScope {
        IdScope {
            id: id.clone(),
            sequence: sequence_of(self.row.as_ref()),
            instance: left_instance(self.row.as_deref()),
            end: self.end,
            is_covered: self.is_covered,
            again: self.again,
        }
    }
}

/// A change to the key of an id.
pub(super) enum KeyChange<'a, R> {
    /// The run succeeded. The key is removed if the checkpoint alone shows that the work is finished.
    Finished { job: &'a Job<R> },
    /// There is nothing to do: the newest row is finished, or is not wanted.
    Passed { job: &'a Job<R> },
    /// The run did not succeed, and is closed. If `defer` has a pause, the id is deferred; otherwise it stays in memory and is tried again.
    /// `attempts` counts the failures, including this one.
    Failed { job: &'a Job<R>, attempts: u32, error: &'a str, defer: Option<Duration> },
    /// The run continues, but must not hold the checkpoint back, so a key covers its id.
    Covered { job: &'a Job<R>, attempts: u32 },
    /// A row makes the id due at once, because the id's database has ended (the one given here, if the key names none), or no work was due.
    Due(Option<(Sequence, DbInstance)>),
    /// The newest row cannot be read.
    Unreadable(&'a str),
}

impl<R> KeyChange<'_, R> {
    /// Returns the pause until the id is due.
    fn pause(&self, most: Duration) -> Duration {
        match self {
            Self::Failed { defer, .. } => defer.unwrap_or_default(),
            Self::Unreadable(_) => most,
            Self::Finished { .. } | Self::Passed { .. } | Self::Covered { .. } | Self::Due(_) => {
                Duration::ZERO
            }
        }
    }
}

/// The result of a change to a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Changed {
    /// The work is finished, perhaps by a transaction with an unknown result.
    Done,
    /// A key covers the id.
    Deferred,
    /// The work is not finished, and no key was written.
    Open,
}

/// What a pass does with a deferred id that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    Now,
    /// Enough ids of its tenant already run or wait: the next pass tries the id again.
    Later,
    /// The id is already in hand.
    InHand,
}

/// A deferred id that is due, its work, and how many times the work has failed.
type DueId<R> = (Bytes, Job<R>, u32);

/// A key that is due, with the newest row of its id.
type DueKey = (Bytes, DeferredRow, Newest);

/// Splits `ids` into parts, each small enough for one transaction that reads and writes the keys of the ids. The size of a transaction
/// counts a key up to six times, and ids of documents can be long.
pub(super) fn parts(ids: &[Bytes]) -> impl Iterator<Item = &[Bytes]> {
    let mut size = 0;
    ids.chunk_by(move |id, _| {
        size = size + id.len() + BESIDE_ID;
        let has_room = size < PART_SIZE;
        size = if has_room { size } else { 0 };
        has_room
    })
}

impl<R: ConsumedRow> ShardTask<R> {
    /// Reads which ids have keys.
    pub(super) async fn load_deferred(&mut self) -> Result<()> {
        let now = self.now();
        let mut rest = Some(RangeRead::new(self.keys_of_shard()).limit(PAGE_KEYS));
        // The commits that write some of these keys may only land after the read below.
        let finished = std::mem::take(&mut self.deferred).finished;
        for (id, done) in &finished {
            self.deferred.note_finished(id, *done);
        }
        while let Some(read) = rest {
            let (ids, after) = self.db().run(async |tx| self.held.deferred_page(&tx, &read).await).await?;
            for (_, _, id, row) in ids {
                match row.due {
                    Due::Never => self.deferred.note_finished(&id, row.done.position()),
                    Due::At(..) => self.deferred.note(&id, now),
                }
            }
            rest = after;
        }
        Ok(())
    }

    fn keys_of_shard(&self) -> KeyRange {
        self.held.context.keys.deferred_of(&self.held.name, Some(self.held.shard))
    }

    /// Returns at most `room` ids that are due and whose `turn` it is. Reads only one page of keys, so that rows get their turn however
    /// many keys there are. After an error, the next call reads the same page again.
    pub(super) async fn due_ids(
        &mut self,
        room: usize,
        turn: impl Fn(&[u8], &[(Bytes, DeferredRow)]) -> Turn,
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
        let begin = self.deferred.place.clone().unwrap_or_else(|| range.begin.clone());
        let read = RangeRead::new(KeyRange { begin, end: range.end }).limit(PAGE_KEYS);
        let page = async |tx: Transaction| self.due_in(&tx, &read, room, &turn).await;
        let (keys, soonest, place) = self.db().run(page).await?;
        for (id, key, newest) in keys {
            // A request may have made this key just now. From now on the key covers the rows of the id.
            self.deferred.note_key(&id);
            found.extend(self.due_id(id, key, newest).await?);
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
        }
        Ok(found)
    }

    /// Returns at most `room` keys in the range of `read` that are due and whose `turn` it is, with the newest rows of their ids; the pause
    /// until the next key is due; and where to continue if the range was not read to its end.
    async fn due_in(
        &self,
        tx: &Transaction,
        read: &RangeRead,
        room: usize,
        turn: &impl Fn(&[u8], &[(Bytes, DeferredRow)]) -> Turn,
    ) -> Result<(Vec<DueKey>, Option<Duration>, Option<Bytes>)> {
        let (incarnation, version) = (self.held.context.config.incarnation, tx.clock_version().await?);
        let (ids, rest) = self.held.deferred_page(tx, read).await?;
        let (mut due, mut soonest) = (Vec::new(), None);
        let mut place = rest.map(|rest| rest.range.begin);
        for (key, _, id, row) in ids {
            let pause = match row.due {
                Due::Never => continue,
                Due::At(of, at) if of == incarnation => at.saturating_sub(version),
                Due::At(..) => 0,
            };
            // An id with a row in the queue waits, because the work on its key would take a newer row than the queued one.
            let turn = if pause > 0 || self.ordered.contains(&id) { Turn::Later } else { turn(&id, &due) };
            if turn == Turn::Later {
                let pause = Duration::from_micros(pause);
                soonest = Some(soonest.map_or(pause, |known: Duration| known.min(pause)));
            } else if turn == Turn::Now {
                due.push((id, row));
                if due.len() == room {
                    place = Some(key_after(&key));
                    break;
                }
            }
        }
        if due.is_empty() {
            return Ok((Vec::new(), soonest, place));
        }
        let ids: Vec<_> = due.iter().map(|(id, _)| &id[..]).collect();
        let newest = self.feed().newest_of_each(tx, &ids).await?;
        let due = due.into_iter().zip(newest).map(|((id, row), newest)| (id, row, newest)).collect();
        Ok((due, soonest, place))
    }

    /// Returns the work for a key that is due; `None` if there is nothing to do, or if the newest row cannot be read.
    async fn due_id(&mut self, id: Bytes, key: DeferredRow, newest: Newest) -> Result<Option<DueId<R>>> {
        let row = match newest {
            Newest::Gone => None,
            Newest::Damaged => {
                self.change_key(&id, &KeyChange::Unreadable("the newest row cannot be read")).await?;
                return Ok(None);
            }
            Newest::Row(row) => match R::from_stored(row.sequence, &row.value) {
                Ok(row) => Some(Arc::new(row)),
                Err(error) => {
                    let place = SkippedAt::Row(self.member.feed.clone(), row.sequence);
                    self.held.context.skip(&place, &error);
                    self.change_key(&id, &KeyChange::Unreadable(&error.to_string())).await?;
                    return Ok(None);
                }
            },
        };
        let attempts = key.attempts;
        // Each end is handled in a run of its own, because the next database of the name may have ended, too, after work on it began.
        if let Some(end) = key.ended.or(key.instance.filter(|_| row.is_none())) {
            let again = key.again.filter(|_| row.is_none());
            let job =
                Job { end: Some(end), worked: Some(end), again, ..Job::new(None, key.done, Some(&key)) };
            return Ok(Some((id, Job { is_covered: true, ..job }, attempts)));
        }
        let job = Job { is_covered: true, ..Job::new(row, key.done, Some(&key)) };
        let is_done = job.row.as_ref().is_none_or(|row| row.sequence() <= key.done.position());
        // Requests to work again on all ids also make keys for ids that this consumer does not want.
        let is_unwanted = job.row.as_ref().is_some_and(|row| {
            let is_wanted = |since| row.is_wanted(&self.member.filter, since);
            let has_ended = key.instance.is_some() && key.instance != left_instance(Some(&**row));
            // A consumer that knows nothing need not handle the end of a database, unless the end came after the consumer's start.
            let is_repeatable =
                key.again.is_some() && (is_wanted(&Cursor::BEGINNING) || is_wanted(&self.start));
            !has_ended && !is_wanted(&key.done) && !is_repeatable
        });
        if is_done && key.again.is_none() || is_unwanted {
            self.change_key(&id, &KeyChange::Passed { job: &job }).await?;
            return Ok(None);
        }
        Ok(Some((id, job, attempts)))
    }

    /// Changes the key of `id`, in one transaction that reads and writes the key under the lease.
    pub(super) async fn change_key(&mut self, id: &Bytes, change: &KeyChange<'_, R>) -> Result<Changed> {
        let (held, pause) = (&self.held, change.pause(self.member.options.backoff_max));
        let write = async |tx: Transaction| {
            held.lease.check(&tx).await?;
            let stored = held.deferred(&tx, id).await?;
            let (changed, row) = self.changed_in(&tx, (id, stored.clone()), change, pause).await?;
            let key = held.key(id);
            match &row {
                // The key stays the same, but transactions of the run that have read it must conflict.
                Some(row) if Some(row) == stored.as_ref() => tx.add_write_conflict(&KeyRange::key(&key)),
                Some(row) => tx.set(&key, &row.to_bytes()),
                None => tx.clear(&key),
            }
            Ok((changed, row))
        };
        let (changed, row) = self.db().run(write).await?;
        match row {
            None => self.deferred.was_cleared(id),
            Some(row) if row.due == Due::Never => self.deferred.note_finished(id, row.done.position()),
            Some(_) => self.deferred.note(id, self.now().saturating_add(pause)),
        }
        Ok(changed)
    }

    /// Returns the result of `change`, and the key's new value; `None` removes it. The caller adds a conflict if the key is unchanged.
    async fn changed_in(
        &self,
        tx: &Transaction,
        (id, stored): (&Bytes, Option<DeferredRow>),
        change: &KeyChange<'_, R>,
        pause: Duration,
    ) -> Result<(Changed, Option<DeferredRow>)> {
        let held = &self.held;
        let at_ms = held.context.env().wall_ms();
        let row = match *change {
            KeyChange::Finished { job } | KeyChange::Passed { job } => {
                let Some(stored) = stored else { return Ok((Changed::Done, None)) };
                let checkpoint = held.checkpoint(tx, Isolation::Serializable).await?;
                let position = checkpoint.map(|checkpoint| checkpoint.position());
                let is_look = matches!(change, KeyChange::Passed { .. });
                // Without a run, a row that commits first may be wanted, and must conflict. After a run, such a row is past the checkpoint.
                let isolation = if is_look { Isolation::Serializable } else { Isolation::Snapshot };
                let newest = self.newest_sequence(tx, id, isolation).await?;
                let worked = stored.instance;
                let mut row = finished(&job.scope(id), Some(stored));
                if is_look {
                    row.instance = worked;
                }
                let done = Some(row.done.position());
                if newest > done && job.is_covered {
                    // The checkpoint may have passed the newer row.
                    row.due = Due::NOW;
                }
                let is_passed = newest.is_none() || newest <= position && newest <= done;
                return Ok((Changed::Done, Some(row).filter(|row| row.due != Due::Never || !is_passed)));
            }
            KeyChange::Failed { job, attempts, error, defer } => {
                if held.is_done(tx, &job.scope(id), stored.as_ref()).await? {
                    return Ok((Changed::Done, stored));
                }
                if defer.is_none() {
                    return Ok((Changed::Open, stored));
                }
                let due = held.due_after(tx, pause).await?;
                Some(DeferredRow { due, attempts, at_ms, error: error.to_owned(), ..job.key(stored) })
            }
            KeyChange::Covered { job, attempts } => match stored {
                // The run has committed, but has not returned yet.
                Some(stored) if is_finished(&stored, &job.scope(id)) => {
                    Some(DeferredRow { due: Due::NOW, ..stored })
                }
                stored => Some(DeferredRow { attempts, ..job.key(stored) }),
            },
            KeyChange::Due(ended) => stored.map(|row| {
                // The end is saved in the key, because the tombstone may be dropped before the id gets its turn.
                let ended = ended.filter(|(at, _)| *at > row.done.position()).map(|(_, ended)| ended);
                let instance = row.instance.or(ended);
                DeferredRow { due: Due::NOW, attempts: 0, instance, ..row }
            }),
            KeyChange::Unreadable(error) => {
                let due = held.due_after(tx, pause).await?;
                stored.map(|row| DeferredRow { due, at_ms, error: error.to_owned(), ..row })
            }
        };
        Ok((Changed::Deferred, row))
    }

    /// Returns the position of the newest row of `id`.
    async fn newest_sequence(
        &self,
        tx: &Transaction,
        id: &[u8],
        isolation: Isolation,
    ) -> Result<Option<Sequence>> {
        let key = self.held.context.keys.newest(&self.member.feed, id);
        let stored = tx.get(&key, isolation).await?;
        // A position that cannot be decoded belongs to a row that was skipped.
        Ok(stored.and_then(|stored| Sequence::from_bytes(&stored).ok()))
    }

    /// Removes keys that say only that work up to `checkpoint` is finished, because the checkpoint says so itself.
    pub(super) async fn clear_finished(&mut self, checkpoint: Sequence) -> Result<()> {
        let now = self.now();
        let passed = self.deferred.finished.iter().filter(|(_, done)| **done <= checkpoint);
        let passed: Vec<_> = passed.map(|(id, _)| id.clone()).collect();
        for some in parts(&passed) {
            let held = Arc::clone(&self.held);
            let clear = async |tx: Transaction| {
                held.lease.check(&tx).await?;
                let stored = held.checkpoint(&tx, Isolation::Serializable).await?;
                let position = stored.map(|stored| stored.position());
                let clears = some.iter().map(|id| async {
                    let (row, newest) = tokio::try_join!(
                        held.deferred(&tx, id),
                        self.newest_sequence(&tx, id, Isolation::Snapshot)
                    )?;
                    let row = row.filter(|row| row.due == Due::Never && newest <= position);
                    let is_needless = row.as_ref().is_some_and(|row| newest <= Some(row.done.position()));
                    match row {
                        Some(_) if is_needless => tx.clear(&held.key(id)),
                        // The run on the newest row ended before the commit of an earlier run landed.
                        Some(row) => tx.set(&held.key(id), &DeferredRow { due: Due::NOW, ..row }.to_bytes()),
                        // A commit that would write this key, but has not landed yet, must fail.
                        None => tx.add_write_conflict(&KeyRange::key(&held.key(id))),
                    }
                    Ok::<_, crate::Error>((is_needless, newest))
                });
                futures_util::future::try_join_all(clears).await
            };
            let cleared = self.db().run(clear).await?;
            for (id, (is_cleared, newest)) in some.iter().zip(cleared) {
                self.deferred.finished.remove(id);
                match newest.filter(|newest| !is_cleared && *newest > checkpoint) {
                    Some(newest) => drop(self.deferred.finished.insert(id.clone(), newest)),
                    None if is_cleared => self.deferred.was_cleared(id),
                    None => self.deferred.note(id, now),
                }
            }
        }
        Ok(())
    }
}
