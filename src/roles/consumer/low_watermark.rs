//! The low watermark of a consumer: a position before which every wanted row, in all shards, is finished or deferred.
//!
//! The janitor reads the low watermark before it drops a tombstone, so it need not read all checkpoints of all consumers. A shard begins at
//! its checkpoint or at the low watermark, whichever is later, so a shard with only unwanted rows need not write a checkpoint.
//!
//! The member that works on the first shard writes the low watermark now and then, while the feed grows. The value may be behind, but is
//! never too high: checkpoints only grow, later rows have later positions, and a reset removes the low watermark. Feeds of documents keep
//! no tombstones, and their consumers have no low watermark.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tokio::task::JoinSet;

use super::{
    handler::ConsumedRow,
    member::{Identity, Member, Passages},
};
use crate::{
    base::{
        backoff::{Backoff, Failures},
        cursor::{Cursor, Knowledge},
        encoding::Sequence,
        error::{Error, Result},
        notification::Notification,
    },
    roles::changes::Change,
    state::{
        feed::{FeedRow, StoredRow, StoredShardPage},
        feed_watcher::Listener,
        keys::ShardId,
        notification_feed::NotificationFeed,
        wakeups::Heads,
    },
    store::{Isolation, Priority, Transaction, TransactionOption},
};

/// How often a member checks whether the low watermark must be written.
const PAUSE: Duration = Duration::from_secs(30);

/// The pauses between attempts while a consumer makes no progress.
const STUCK: Backoff = Backoff { min: PAUSE, max: Duration::from_mins(10) };

/// How many rows are read at once.
const PAGE_ROWS: usize = 1_000;

/// The maximum number of pages of a shard that are searched before the low watermark is written.
const PAGES_MAX: usize = 100;

/// The pauses between checks of whether a consumer has caught up.
const CAUGHT_UP: Backoff = Backoff { min: Duration::from_millis(20), max: Duration::from_secs(1) };

/// The name under which failures of the task are logged.
const WRITER: &str = "low watermark of a consumer";

/// The rows of a shard that need no work.
struct Passed {
    /// The position up to which there are no other rows.
    to: Sequence,
    /// Whether no wanted row was found and the shard did not end. After the end of a shard, rows of its ids may be in other shards.
    is_all: bool,
}

/// The result of an attempt to write the low watermark.
enum Attempt {
    /// The low watermark is written, or need not be. `None` if the consumer does not exist.
    Done(Option<Sequence>),
    /// Other nodes work on these shards, and rows may have arrived after the checkpoints.
    Unknown(Identity, Vec<(ShardId, Cursor, Sequence)>),
}

impl Member {
    /// Starts the task that writes the low watermark, or none if the feed has no tombstones.
    pub fn start_low_watermark(self: &Arc<Self>, hints: &Arc<Listener>) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        if self.feed.instance().is_none() {
            let (low, hints) = (Arc::clone(self), Arc::clone(hints));
            let make = move || Arc::clone(&low).keep_low_watermark(Arc::clone(&hints));
            tasks.spawn(self.context.stats.supervised(self.context.env(), WRITER, make));
        }
        tasks
    }

    /// Writes the low watermark whenever that is due, until the future is dropped.
    async fn keep_low_watermark(self: Arc<Self>, hints: Arc<Listener>) {
        let env = self.context.env();
        let (mut seen, mut known) = (None, Sequence::MIN);
        let (mut stuck, mut due) = (Failures::default(), Duration::ZERO);
        loop {
            env.sleep(env.spread(PAUSE, 0.75, 1.25)).await;
            let Some(reads) = self.if_first() else {
                seen = None;
                continue;
            };
            let heads = hints.heads();
            let (now, is_behind) = (Some((heads.count, reads)), heads.any_may_have_rows(known));
            if seen == now && (!is_behind || env.now() < due) {
                continue;
            }
            let low = match self.write_low_watermark(&hints, true).await {
                Ok(low) => low.unwrap_or(Sequence::MIN),
                Err(error) => {
                    self.context.stats.health.complain(env, WRITER, &error);
                    continue;
                }
            };
            if seen != now || known != low {
                (stuck, due) = (Failures::default(), Duration::ZERO);
            } else {
                due = env.now().saturating_add(stuck.again(&STUCK, Duration::ZERO, env));
            }
            (seen, known) = (now, low);
        }
    }

    /// Writes the low watermark unless the stored one is current, and returns it; `None` if the consumer does not exist, or needs none.
    /// This node's tasks know how far their shards need no work. If `reads` is set, rows that may have arrived in other shards are read.
    pub async fn write_low_watermark(&self, hints: &Listener, reads: bool) -> Result<Option<Sequence>> {
        if self.feed.instance().is_some() {
            return Ok(None);
        }
        let looked = (hints.looked_to(), hints.heads());
        let (mut passed, working) = self.passed();
        let mut working = Some(working).filter(|_| reads);
        loop {
            let at_work = working.as_ref();
            let attempt =
                async |tx: Transaction| self.try_low_watermark(&tx, &looked, &passed, at_work).await;
            match self.context.store.run(attempt).await? {
                Attempt::Done(low) => return Ok(low),
                Attempt::Unknown(identity, shards) => {
                    if passed.0 != identity {
                        passed = (identity, BTreeMap::new());
                    }
                    for (shard, stored, from) in shards {
                        let found = self.unwanted_up_to(shard, stored, from, None).await?;
                        passed.1.insert(shard, found.to);
                    }
                    working = None;
                }
            }
        }
    }

    async fn try_low_watermark(
        &self,
        tx: &Transaction,
        (looked_to, heads): &(Sequence, Heads),
        passed: &Passages,
        working: Option<&BTreeSet<ShardId>>,
    ) -> Result<Attempt> {
        // The serializable reads conflict with a reset or a deletion of the consumer, which invalidates what was found.
        let (row, checkpoints, stored) = tokio::try_join!(
            self.row(tx, Isolation::Serializable),
            self.checkpoints(tx),
            self.low_watermark(tx, Isolation::Serializable)
        )?;
        let Some(row) = row else { return Ok(Attempt::Done(None)) };
        let identity = (row.identity, row.generation);
        let (mut lowest, mut unknown): (Option<Sequence>, _) = (None, Vec::new());
        for (shard, checkpoint) in checkpoints {
            let known = passed.1.get(&shard).filter(|_| passed.0 == identity);
            let from = checkpoint.position().max(stored).max(known.copied().unwrap_or(Sequence::MIN));
            let may_have_rows = heads.may_have_rows(shard, from);
            if may_have_rows && working.is_some_and(|working| row.is_paused || !working.contains(&shard)) {
                unknown.push((shard, checkpoint, from));
            }
            let to = if may_have_rows { from } else { from.max(*looked_to) };
            lowest = Some(lowest.map_or(to, |lowest| lowest.min(to)));
        }
        if !unknown.is_empty() {
            return Ok(Attempt::Unknown(identity, unknown));
        }
        let mut low = lowest.filter(|lowest| *lowest > stored && heads.any_may_have_rows(stored));
        if let Some(lowest) = low.filter(|lowest| lowest > looked_to) {
            // A store that is older than its own rows does not show them, so its closed shards seem to be read to their ends.
            let now = Sequence::last_at(self.context.config.incarnation, tx.read_version().await?);
            low = Some(lowest.min(now)).filter(|low| *low > stored);
        }
        if let Some(low) = low {
            tx.set(&self.context.keys.low_watermark(&self.name), low.as_bytes());
        }
        Ok(Attempt::Done(Some(low.unwrap_or(stored))))
    }

    /// Reads past the unwanted rows of `shard`, from its checkpoint `stored` or from `low`, whichever is later, up to the first wanted row.
    /// With a `barrier`, rows that show only later events are not wanted.
    async fn unwanted_up_to(
        &self,
        shard: ShardId,
        stored: Cursor,
        low: Sequence,
        barrier: Option<Sequence>,
    ) -> Result<Passed> {
        let mut passed = Passed { to: stored.position().max(low), is_all: true };
        // With a barrier all rows must be read; otherwise rows beyond this many pages are left to a later write of the low watermark.
        for _ in 0..barrier.map_or(PAGES_MAX, |_| usize::MAX) {
            let read = async |tx: Transaction| {
                tx.set_option(TransactionOption::Priority(Priority::Batch));
                self.feed().kept_shard_page(&tx, shard, passed.to, PAGE_ROWS).await
            };
            let StoredShardPage { page, resharded } = match self.context.store.run(read).await {
                // The consumer has left the shard since its checkpoint was read, and the janitor has dropped the shard.
                Err(Error::NoShard { is_trimmed: true, .. }) => {
                    return Ok(Passed { is_all: false, ..passed });
                }
                page => page?,
            };
            for row in &page.rows {
                if self.is_wanted(row, &stored, barrier) {
                    let to = row.sequence.before().max(passed.to);
                    return Ok(Passed { to, is_all: false });
                }
            }
            (passed.to, passed.is_all) = (page.next.position(), resharded.is_none());
            if !page.more {
                break;
            }
        }
        Ok(passed)
    }

    /// Whether `row` may show a wanted event. With a `barrier`, events after the barrier do not count.
    fn is_wanted(&self, row: &StoredRow, since: &Cursor, barrier: Option<Sequence>) -> bool {
        let is_later = barrier.is_some_and(|barrier| row.sequence > barrier);
        if self.feed.instance().is_some() {
            // The row of a new document cannot have moved from an earlier position.
            return !is_later || Change::decode(row.sequence, &row.value).is_ok_and(|(_, replaces)| replaces);
        }
        // A row that cannot be decoded counts as unwanted.
        Notification::from_stored(row.sequence, &row.value).is_ok_and(|row| {
            let may_have_moved = || row.previous.is_some_and(|previous| since.is_news(previous));
            row.is_wanted(&self.filter, since) && (!is_later || may_have_moved())
        })
    }

    /// Waits until everything that is in the feed now is finished or deferred.
    pub async fn caught_up(&self) -> Result<()> {
        self.wait_for(self.feed_end().await?).await
    }

    /// Returns the last position that can be read now.
    async fn feed_end(&self) -> Result<Sequence> {
        self.context.store.run(async |tx| self.feed().last_readable(&tx).await).await
    }

    /// Waits until everything that was committed up to `version` is finished or deferred.
    pub async fn wait_until(&self, version: u64) -> Result<()> {
        let at = if self.feed.instance().is_some() {
            let (at, now) =
                (Sequence::last_at(self.context.config.incarnation, version), self.feed_end().await?);
            if at > now {
                let reason = format!("{version} is ahead of the store, which is at {now}");
                return Err(Error::invalid("version", reason));
            }
            at
        } else {
            NotificationFeed::new(Arc::clone(&self.context), self.feed.clone()).folded(version).await?
        };
        self.wait_for(at).await
    }

    async fn wait_for(&self, at: Sequence) -> Result<()> {
        let env = self.context.env();
        let mut looks = Failures::default();
        while !self.has_passed(at).await? {
            env.sleep(looks.again(&CAUGHT_UP, Duration::ZERO, env)).await;
        }
        Ok(())
    }

    /// Whether everything up to `at` is finished or deferred. The position of a checkpoint does not show this: if an id changes before its
    /// row is read, the row moves to a later position, perhaps in a successor, and still shows the earlier events.
    async fn has_passed(&self, at: Sequence) -> Result<bool> {
        let read = async |tx: Transaction| {
            self.existing(&tx, Isolation::Snapshot).await?;
            tokio::try_join!(self.checkpoints(&tx), self.low_watermark(&tx, Isolation::Snapshot))
        };
        let (stored, low) = self.context.store.run(read).await?;
        for (shard, stored) in stored {
            let knows_all = matches!(stored.knowledge(), Knowledge::UpTo(known) if known >= at);
            if !knows_all && !self.unwanted_up_to(shard, stored, low, Some(at)).await?.is_all {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
