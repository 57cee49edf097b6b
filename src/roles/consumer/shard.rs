//! [`ShardTask`]: the work on one shard, under its lease.
//!
//! The task reads the rows of the shard in order, and calls the handler for them, in batches or id by id ([`runs`](super::runs)). Ids with
//! keys are worked on outside that order ([`deferred`](super::deferred)). At the end of the shard the task moves their keys to the
//! successors ([`reshard`](super::reshard)).

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::sync::watch;

use super::{
    exactly_once::{FencingToken, HeldShard},
    handler::ConsumedRow,
    known_keys::KnownKeys,
    member::{Changes, Identity, Working, is_marked},
    ordered::Ordered,
};
use crate::{
    base::{
        backoff::FAILURE_PAUSE,
        cursor::{Cursor, Knowledge},
        encoding::Sequence,
        env::Env,
        error::{Error, Result},
    },
    state::{
        failing::ShardFailure,
        feed::{RawFeed, StoredRow, Topology},
        feed_watcher::Listener,
        keys::{ConsumerRow, DeferredRow, ShardId},
        membership::{Held, Stop},
        page_cache::Turn,
        skipped::SkippedAt,
    },
    store::{Isolation, Store, Transaction},
};

/// The maximum length of an error that is shown, in bytes.
const ERROR_LEN_MAX: usize = 1_000;

/// Repeats `$work`, which uses the store, until it succeeds or the work on the shard is over.
macro_rules! persist {
    ($task:expr, $what:expr, $work:expr) => {
        loop {
            match $work {
                Ok(done) => break done,
                Err(error) => $task.has_failed($what, error).await?,
            }
        }
    };
}
pub(super) use persist;

/// Why the work on a shard ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Stopped,
    /// The consumer, or the set of its shards, has changed.
    Changed,
    /// The shard is closed, and everything in it is finished or deferred.
    Drained,
    /// The handler panicked.
    Panicked,
}

/// Why the task stops its work: an orderly end, or an error.
#[derive(Debug)]
pub(super) enum Halt {
    End(End),
    /// The lease is lost, or the feed or the bus is gone.
    Failed(Error),
}

impl From<End> for Halt {
    fn from(end: End) -> Self {
        Self::End(end)
    }
}

/// The result of one step of the work.
pub(super) type Go<T> = std::result::Result<T, Halt>;

/// What the consumer has to do in a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// Work on rows and on deferred ids.
    All,
    /// Work only on the ids that the predecessors of the shard have handed over, because not all predecessors are drained yet.
    Deferred,
    /// Move the keys to the successors, because the shard is marked as drained.
    Leave,
    /// Nothing: the consumer is paused or gone, or does not read the shard.
    Nothing,
}

/// What a change to the consumer means for the work on a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// Nothing changed, or only which ids are deferred.
    None,
    /// The predecessors are drained: from now on the rows of the shard are worked on, too.
    Begins,
    /// The work must start over from the stored state.
    Ends,
}

/// What is stored for the consumer in the shard.
struct Loaded {
    version: u64,
    /// `None` if the consumer is gone or paused.
    row: Option<ConsumerRow>,
    part: Part,
    stored: Cursor,
    low: Sequence,
}

/// A page of rows of the shard.
pub(super) struct Page<R> {
    /// The rows, each with the number of its stored bytes.
    pub rows: Vec<(R, usize)>,
    /// The keys of those ids that have one, by the index of the row in `rows`.
    pub keys: BTreeMap<usize, DeferredRow>,
    pub to: Sequence,
    pub more: bool,
    /// Whether the shard is closed and ends with this page.
    pub is_end: bool,
}

pub(super) struct ShardTask<R> {
    pub member: Arc<Working<R>>,
    pub held: Arc<HeldShard>,
    reader: Turn,
    pub stop: Stop,
    pub part: Part,
    /// Shows how far the rows of each shard may reach.
    hints: Listener,
    /// Changes whenever the consumer or its shards change, or work on ids is requested again.
    pub changes: watch::Receiver<Changes>,
    /// What the task knew when it last read the stored state: the number of changes to the shards, and the version of the store.
    loaded: Changes,
    pub deferred: KnownKeys,
    /// The identity and generation of the consumer when its row was last read.
    identity: Identity,
    /// Where the consumer began when it was created or last reset.
    pub start: Cursor,
    /// The stored checkpoint.
    stored: Cursor,
    /// What is known about all ids without keys, and up to where their rows are finished.
    knowledge: Cursor,
    /// The position up to which rows were read.
    pub read: Sequence,
    /// The latest version at which a page was read.
    read_version: u64,
    /// The positions at which reading reached the end of the shard: the first one up to which work is not finished yet, and the last one.
    caught_up: Option<(Sequence, Sequence)>,
    /// Whether something was finished that the stored checkpoint does not cover.
    pub is_dirty: bool,
    pub saved_at: Duration,
    /// Rows that wait for their batch.
    pub ordered: Ordered<R>,
    /// How many times a handler panicked when it was opened.
    openings: u32,
}

impl<R: ConsumedRow> ShardTask<R> {
    pub fn new(member: Arc<Working<R>>, lease: Held, stop: Stop) -> Self {
        let context = Arc::clone(&member.context);
        let (shard, epoch) = (ShardId(lease.resource), lease.epoch);
        let token = FencingToken { incarnation: context.config.incarnation, generation: 0, shard, epoch };
        let hints = Listener::of_consumer(&context, &member.feed, member.options.poll_interval);
        let now = context.env().now();
        let consumer = member.consumer.clone();
        let reader = context.pages.reader(&member.feed, shard);
        Self {
            held: Arc::new(HeldShard { consumer, shard, lease, token }),
            reader,
            stop,
            part: Part::Nothing,
            hints,
            changes: member.changes.subscribe(),
            loaded: Changes::default(),
            member,
            deferred: KnownKeys::default(),
            identity: Identity::default(),
            start: Cursor::BEGINNING,
            stored: Cursor::BEGINNING,
            knowledge: Cursor::BEGINNING,
            read: Sequence::MIN,
            read_version: 0,
            caught_up: None,
            is_dirty: false,
            saved_at: now,
            ordered: Ordered::new(),
            openings: 0,
        }
    }

    pub fn db(&self) -> &Store {
        &self.held.context.store
    }

    pub fn env(&self) -> &Env {
        self.held.context.env()
    }

    pub fn now(&self) -> Duration {
        self.env().now()
    }

    pub fn feed(&self) -> RawFeed<'_> {
        RawFeed::new(&self.held.context, &self.member.feed)
    }

    /// Works until the task is asked to stop. Fails if the lease is lost.
    pub async fn run(mut self) -> Result<()> {
        let mut ended = self.work().await;
        if let Err(Halt::Failed(gone @ Error::NoFeed { .. })) = ended {
            ended = self.end_with_feed(gone).await;
        }
        match ended {
            Err(Halt::Failed(error)) => Err(error),
            Err(Halt::End(_)) | Ok(()) => Ok(()),
        }
    }

    async fn work(&mut self) -> Go<()> {
        loop {
            self.part = persist!(self, "reading a consumer's checkpoint", self.load().await);
            match self.part {
                Part::Nothing => {
                    self.wait_for_change().await?;
                    continue;
                }
                Part::Leave => {
                    self.leave_shard().await?;
                    continue;
                }
                Part::All | Part::Deferred => {}
            }
            match self.session().await.map_err(Halt::Failed)? {
                End::Changed | End::Panicked => {}
                End::Drained => self.leave_shard().await?,
                end @ End::Stopped => return Err(end.into()),
            }
        }
    }

    /// Completes when the consumer changes, or after the poll interval.
    pub async fn wait_for_change(&mut self) -> Go<()> {
        let pause = self.env().sleep(self.member.options.poll_interval);
        tokio::select! {
            biased;
            () = self.stop.requested() => Err(End::Stopped.into()),
            // This cannot fail, because the member holds the sender.
            _ = self.changes.changed() => Ok(()),
            () = pause => Ok(()),
        }
    }

    /// Handles a failure of the store: waits before the next attempt, unless the work on the shard is over.
    pub async fn has_failed(&mut self, what: &'static str, error: Error) -> Go<()> {
        if is_final(&error) {
            return Err(Halt::Failed(error));
        }
        self.held.context.stats.health.complain(self.env(), what, &error);
        self.sleep(FAILURE_PAUSE).await
    }

    /// Sleeps for `pause`, or until the task must stop.
    async fn sleep(&mut self, pause: Duration) -> Go<()> {
        let pause = self.env().sleep(pause);
        tokio::select! {
            biased;
            () = self.stop.requested() => Err(End::Stopped.into()),
            () = pause => Ok(()),
        }
    }

    /// Reads what to do in the shard, where to begin, and which ids have keys.
    async fn load(&mut self) -> Result<Part> {
        let shards = self.changes.borrow_and_update().shards;
        let Loaded { version, row, part, stored, low } = self.read_stored().await?;
        self.loaded = Changes { shards, version };
        // Cached pages that were read earlier must not be used: another member may have finished newer rows since.
        self.read_version = version;
        let Some(row) = row else { return Ok(Part::Nothing) };
        (self.start, self.identity) = (row.start, (row.identity, row.generation));
        if row.generation != self.held.token.generation {
            let token = FencingToken { generation: row.generation, ..self.held.token };
            self.held = Arc::new(HeldShard { token, ..HeldShard::clone(&self.held) });
        }
        self.load_deferred().await?;
        if part == Part::All {
            self.begin_at(stored, low);
        }
        Ok(part)
    }

    /// Reads what has changed, if anything has.
    pub async fn look_at_changes(&mut self) -> Go<Change> {
        if !self.changes.has_changed().unwrap_or(true) {
            return Ok(Change::None);
        }
        let changes = *self.changes.borrow_and_update();
        if changes.shards == self.loaded.shards && changes.version <= self.loaded.version {
            return Ok(Change::None);
        }
        Ok(persist!(self, "reading a consumer", self.read_change().await))
    }

    /// Decides whether the work continues, and reads which ids have keys.
    async fn read_change(&mut self) -> Result<Change> {
        let shards = self.changes.borrow_and_update().shards;
        let Loaded { version, row, part, stored, low } = self.read_stored().await?;
        self.loaded = Changes { shards, version };
        let begins = (self.part, part) == (Part::Deferred, Part::All);
        if row.is_none_or(|row| row.generation != self.held.token.generation) || part != self.part && !begins
        {
            return Ok(Change::Ends);
        }
        self.load_deferred().await?;
        if !begins {
            return Ok(Change::None);
        }
        // The runs continue, because ending them here would mean ending them in the store as well.
        self.read_version = version;
        self.begin_at(stored, low);
        Ok(Change::Begins)
    }

    /// Reads what the consumer has to do in the shard.
    async fn read_stored(&self) -> Result<Loaded> {
        let read = async |tx: Transaction| {
            let (version, stored, row, low, topology) = tokio::try_join!(
                tx.read_version(),
                self.held.checkpoint(&tx, Isolation::Snapshot),
                self.held.row(&tx, Isolation::Snapshot),
                self.held.low_watermark(&tx, Isolation::Snapshot),
                Topology::of_shard(&tx, self.feed(), self.held.shard),
            )?;
            self.held.lease.check(&tx).await?;
            let shard = self.held.shard;
            let row = row.filter(|row| !row.is_paused);
            let part = match stored {
                _ if row.is_none() => Part::Nothing,
                Some(stored) if is_marked(&topology, shard, stored) => Part::Leave,
                Some(_) => Part::All,
                None if self.member.is_successor(shard) => Part::Deferred,
                None => Part::Nothing,
            };
            Ok(Loaded { version, row, part, stored: stored.unwrap_or(Cursor::BEGINNING), low })
        };
        self.db().run(read).await
    }

    /// Starts reading at the checkpoint `stored`, or at `low` if that is later.
    fn begin_at(&mut self, stored: Cursor, low: Sequence) {
        (self.part, self.stored) = (Part::All, stored);
        self.knowledge = moved(stored, stored.position().max(low));
        self.read = self.knowledge.position();
        (self.caught_up, self.is_dirty, self.saved_at) = (None, false, self.now());
    }

    /// Whether there is nothing to read, because no row has arrived after the stored checkpoint. Marks all hints so far as seen.
    pub fn is_at_end(&mut self) -> bool {
        self.forget_hints();
        let position = self.stored.position();
        let has_caught_up = matches!(self.stored.knowledge(), Knowledge::UpTo(known) if known >= position);
        // Only a read finds out whether the store is older than its own rows.
        let last = Sequence::last_at(self.held.context.config.incarnation, self.loaded.version);
        let heads = self.hints.heads();
        has_caught_up && self.read <= last && !heads.may_have_rows(self.held.shard, self.read)
    }

    /// Returns what is known about an id without a key.
    pub fn knowledge(&self) -> Cursor {
        self.knowledge
    }

    /// Reads the next rows, at most `limit`.
    pub async fn next_page(&mut self, limit: usize) -> Result<Page<R>> {
        let after = self.read;
        // After a batch has failed, its rows are read again in their newest versions.
        let is_again = self.ordered.has_failed();
        let (rows, to, more, is_end) = self.read_rows(after, limit, is_again).await?;
        let mut page = Page { rows: Vec::with_capacity(rows.len()), keys: BTreeMap::new(), to, more, is_end };
        for StoredRow { sequence, value } in rows {
            match R::from_stored(sequence, &value) {
                Ok(row) => page.rows.push((row, value.len())),
                Err(error) => {
                    self.held.context.skip(&SkippedAt::Row(self.member.feed.clone(), sequence), &error);
                }
            }
        }
        // Few ids have keys, so keys are only read for ids that may have one.
        let keyed: Vec<_> =
            (0..page.rows.len()).filter(|&at| self.deferred.may_have_key(page.rows[at].0.id())).collect();
        if !keyed.is_empty() {
            let ids: Vec<_> = keyed.iter().map(|&at| Bytes::copy_from_slice(page.rows[at].0.id())).collect();
            let keys = self.read_keys(&ids).await?;
            page.keys = keyed.into_iter().zip(keys).filter_map(|(at, key)| Some((at, key?))).collect();
        }
        Ok(page)
    }

    /// Reads the keys of `ids` concurrently.
    async fn read_keys(&self, ids: &[Bytes]) -> Result<Vec<Option<DeferredRow>>> {
        let read = async |tx: Transaction| {
            let keys = ids.iter().map(|id| async {
                self.held.deferred_at(&tx, &self.held.key(id), Isolation::Snapshot).await
            });
            futures_util::future::try_join_all(keys).await
        };
        self.db().run(read).await
    }

    /// Returns the rows after `after`, from a page that another consumer of the process has read, or else from the store.
    async fn read_rows(
        &mut self,
        after: Sequence,
        limit: usize,
        is_again: bool,
    ) -> Result<(Vec<StoredRow>, Sequence, bool, bool)> {
        let (held, member) = (Arc::clone(&self.held), Arc::clone(&self.member));
        let (pages, feed, shard) = (&held.context.pages, &member.feed, held.shard);
        let _turn = self.reader.lock().await;
        // Taken before the read: a hint that comes during the read may be for rows that the read does not show.
        let hints = self.hints.heads().count;
        if let Some(page) = pages.get(feed, shard, after, self.read_version).filter(|_| !is_again) {
            self.read_version = page.version;
            let rows = page.rows.iter().filter(|(sequence, _)| *sequence > after);
            let mut rows: Vec<_> = rows
                .map(|(sequence, value)| StoredRow { sequence: *sequence, value: value.clone() })
                .collect();
            if rows.len() > limit {
                rows.truncate(limit);
                let to = rows[limit - 1].sequence;
                return Ok((rows, to, true, false));
            }
            return Ok((rows, page.to, page.more || page.hints != hints, false));
        }
        let read = async |tx: Transaction| {
            let version = tx.read_version().await?;
            let page = member.feed().kept_shard_page(&tx, shard, after, limit).await?;
            let is_end = page.resharded.is_some();
            Ok((version, page.page.rows, page.page.next.position(), page.page.more, is_end))
        };
        let (version, rows, to, more, is_end) = held.context.store.run(read).await?;
        self.read_version = version;
        if !is_end && !is_again && to > after {
            let kept = || rows.iter().map(|row| (row.sequence, row.value.clone())).collect();
            pages.put((feed, shard, &self.reader), (after, to), kept, (version, more, hints));
        }
        Ok((rows, to, more, is_end))
    }

    /// Accounts for a page whose rows were all taken. If the shard ends with the page (`is_end`), the task has not caught up, because the
    /// successors may have newer rows of the same ids, which show events from before the end.
    pub fn has_read(&mut self, to: Sequence, (more, is_end): (bool, bool)) {
        self.read = to;
        if !more && !is_end {
            let first = self.caught_up.map_or(to, |(first, _)| first);
            self.caught_up = Some((first, to));
        }
    }

    /// Forgets what was read after `at`, so that the rows are read again.
    pub fn read_again_from(&mut self, at: Sequence) {
        // Meanwhile newer rows may have replaced those that were read. They show the same news, but may be after the end that was reached.
        (self.read, self.caught_up) = (at, None);
    }

    /// Returns what is known once everything without a key up to `watermark` is finished.
    pub fn knowledge_at(&self, watermark: Sequence) -> Cursor {
        match self.caught_up {
            Some((first, last)) if watermark >= first => {
                // In a shard that is never idle, the watermark hardly ever reaches the last end, so the first one counts as well.
                let end = if watermark >= last { last } else { first };
                moved(end.into(), watermark)
            }
            _ => moved(self.knowledge, watermark.max(self.knowledge.position())),
        }
    }

    /// Notes that everything without a key up to `watermark` is finished.
    pub fn finished_up_to(&mut self, watermark: Sequence) {
        self.knowledge = self.knowledge_at(watermark);
        // All events up to `first` are in rows that were read, so none of them is news any longer.
        if let Some((first, last)) = self.caught_up
            && watermark >= first
        {
            // A checkpoint that was saved before reading reached an end also wants rows that are no longer wanted, so it must be replaced.
            self.is_dirty |= match self.stored.knowledge() {
                Knowledge::Nothing => true,
                Knowledge::UpTo(known) => known < self.stored.position(),
            };
            self.caught_up = (watermark < last).then_some((last, last));
        }
    }

    /// Reports to the member up to where no row after the stored checkpoint needed work.
    pub fn note_passed(&self) {
        if !self.is_dirty {
            self.member.note_passed(self.identity, self.held.shard, self.knowledge.position());
        }
    }

    /// Returns when the checkpoint must be saved; `None` if there is nothing to save.
    pub fn save_at(&self) -> Option<Duration> {
        let is_behind = self.is_dirty && self.stored.position() < self.knowledge.position();
        is_behind.then(|| self.saved_at.saturating_add(self.member.options.checkpoint_interval))
    }

    /// Saves the checkpoint if something after it was finished, and removes the keys that it makes unnecessary.
    pub async fn save(&mut self) -> Result<()> {
        if self.is_dirty && self.stored.position() < self.knowledge.position() {
            let (held, to) = (Arc::clone(&self.held), self.knowledge);
            let save = async |tx: Transaction| {
                held.lease.check(&tx).await?;
                let stored = held.checkpoint(&tx, Isolation::Serializable).await?;
                // The checkpoint never goes back, and is not created again once the consumer has left the shard.
                if stored.is_some_and(|stored| stored.position() < to.position()) {
                    held.set_checkpoint(&tx, to);
                }
                Ok(())
            };
            self.db().run(save).await?;
            self.held.context.stats.consumer_checkpoints.add(1);
            self.was_saved(to);
        }
        self.clear_finished(self.stored.position()).await
    }

    /// Notes that a transaction saved the checkpoint `to`.
    pub fn was_saved(&mut self, to: Cursor) {
        if to.position() > self.stored.position() {
            self.stored = to;
        }
        (self.is_dirty, self.saved_at) = (false, self.now());
    }

    /// Completes when there may be rows after those that were read, or when a poll is due.
    pub async fn rows_may_have_come(&mut self) {
        let (shard, read) = (self.held.shard, self.read);
        self.hints.changed(|heads| heads.may_have_rows(shard, read)).await;
    }

    /// Marks all hints so far as seen: only later ones wake the task.
    pub fn forget_hints(&mut self) {
        self.hints.reads();
    }

    /// Accounts for a handler that panicked when it was opened, and waits before another one is opened.
    pub async fn did_not_open(&mut self, panic: &str) -> End {
        self.held.context.stats.consumer_panics.add(1);
        self.openings = self.openings.saturating_add(1);
        self.report(None, self.openings, panic);
        let pause = self.member.options.backoff().pause(self.openings, self.env());
        if self.sleep(pause).await.is_ok() { End::Panicked } else { End::Stopped }
    }

    /// Notes that the work on rows up to `last` failed and will be tried again. Until it succeeds, it holds the checkpoint back.
    pub fn holds(&self, id: Option<&[u8]>, last: Sequence, attempts: u32, error: &str) {
        let (context, held) = (&self.held.context, &self.held);
        let failure = ShardFailure {
            id: id.map(|id| String::from_utf8_lossy(id).into_owned()),
            attempts,
            error: error[..error.floor_char_boundary(ERROR_LEN_MAX)].to_owned(),
            at_ms: self.env().wall_ms(),
        };
        context.failing.note((&held.name, held.shard, held.lease.epoch), last, failure);
    }

    /// Logs a failure of the handler.
    pub fn report(&self, id: Option<&[u8]>, attempts: u32, error: &str) {
        let (context, consumer, shard) = (&self.held.context, &self.held.name, self.held.shard);
        context.stats.consumer_failures.add(1);
        if let Some(unsaid) = context.stats.health.remark(self.env(), &format!("work of {consumer}")) {
            let id = id.map(|id| String::from_utf8_lossy(id).into_owned());
            tracing::warn!(%consumer, shard = shard.0, id, attempts, error, unsaid, "a consumer's handler failed; trying again");
        }
    }
}

/// Whether `error` ends the work on a shard; after other errors the work is tried again.
fn is_final(error: &Error) -> bool {
    matches!(error, Error::LeaseLost { .. } | Error::BusGone { .. } | Error::NoFeed { .. })
}

/// Returns a cursor with the knowledge of `cursor`, but at the position `to`.
pub(super) fn moved(cursor: Cursor, to: Sequence) -> Cursor {
    match cursor.knowledge() {
        known @ Knowledge::UpTo(at) => Cursor::resumed(known, at, to, cursor.readable().unwrap_or(at)),
        Knowledge::Nothing => cursor.at(to),
    }
}
