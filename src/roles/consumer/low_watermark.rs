//! The low watermark of a consumer: a position before which no shard has a wanted row that is not finished or deferred.
//!
//! The janitor reads it before it drops a tombstone, so that it need not read checkpoints, which are as many as consumers times shards. And
//! a shard begins at the later of its checkpoint and this: so a shard whose rows nobody wants writes nothing.
//!
//! The member that works on the first shard writes it now and then, while the feed moves. It may be behind, and is never too high:
//! checkpoints only grow, what comes later stands later, and a reset removes it. Feeds of documents keep no tombstones, and their
//! consumers have none.

use std::{sync::Arc, time::Duration};

use tokio::task::JoinSet;

use super::{handler::ConsumedRow, member::Member};
use crate::{
    base::{
        backoff::{Backoff, Failures},
        cursor::Cursor,
        encoding::Sequence,
        error::{Error, Result},
        notification::Notification,
    },
    state::{
        feed::FeedRow, feed_watcher::Listener, keys::ShardId, notification_feed::NotificationFeed,
        wakeups::Heads,
    },
    store::{Isolation, Priority, Transaction, TransactionOption},
};

/// How often a member checks whether it has to be written.
const PAUSE: Duration = Duration::from_secs(30);

/// The most such pauses between two attempts that find nothing new.
const PAUSES_MAX: u32 = 20;

/// How many rows are read at once.
const PAGE_ROWS: usize = 1_000;

/// How many pages of a shard are looked through before it is written.
const PAGES_MAX: usize = 100;

/// The pauses between two looks at whether a consumer has caught up.
const CAUGHT_UP: Backoff = Backoff { min: Duration::from_millis(20), max: Duration::from_secs(1) };

/// Its name in reports of trouble.
const WRITER: &str = "low watermark of a consumer";

/// The rows of a shard that nobody has to work on.
struct Passed {
    /// Up to where there is no other.
    to: Sequence,
    rows: usize,
    /// Whether no wanted row was met.
    is_all: bool,
}

impl Member {
    /// Starts the task that writes it; none, if the feed has no tombstones.
    pub fn start_low_watermark(self: &Arc<Self>) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        if self.feed.instance().is_none() {
            let hints = Arc::new(Listener::of_consumer(&self.context, &self.feed, Duration::MAX));
            let low = Arc::clone(self);
            let make = move || Arc::clone(&low).keep_low_watermark(Arc::clone(&hints));
            tasks.spawn(self.context.stats.supervised(self.context.env(), WRITER, make));
        }
        tasks
    }

    /// Writes it whenever that is due, until it is dropped.
    async fn keep_low_watermark(self: Arc<Self>, hints: Arc<Listener>) {
        let env = self.context.env();
        let (mut seen, mut known) = (None, Sequence::MIN);
        let (mut pauses, mut waited) = (0, 0);
        loop {
            env.sleep(env.spread(PAUSE, 0.75, 1.25)).await;
            let Some(reads) = self.if_first() else {
                seen = None;
                continue;
            };
            let looked = (hints.looked_to(), hints.heads());
            let heads = &looked.1;
            let (now, is_behind) = (Some((heads.count, reads)), heads.any_may_have_rows(known));
            waited += 1;
            if seen == now && (!is_behind || waited <= pauses) {
                continue;
            }
            let low = match self.write_low_watermark(Some(&looked)).await {
                Ok(low) => low.unwrap_or(Sequence::MIN),
                Err(error) => {
                    self.context.stats.health.complain(env, WRITER, &error);
                    continue;
                }
            };
            let has_moved = seen != now || known != low;
            pauses = if has_moved { 0 } else { (pauses * 2 + 1).min(PAUSES_MAX) };
            (seen, known, waited) = (now, low, 0);
        }
    }

    /// Writes it, unless it is written already. Returns it; `None` if the consumer does not exist, or needs none. If it is `known` up to
    /// where the watcher has looked, and what it has seen, only shards that may have rows are read.
    pub async fn write_low_watermark(&self, known: Option<&(Sequence, Heads)>) -> Result<Option<Sequence>> {
        if self.feed.instance().is_some() {
            return Ok(None);
        }
        let Some((identity, low, has_passed)) = self.find_low_watermark(known).await? else {
            return Ok(None);
        };
        if !has_passed {
            return Ok(Some(low));
        }
        let write = async |tx: Transaction| {
            // A reset or a deletion since then makes what was found void.
            let row = self.row(&tx, Isolation::Serializable).await?;
            if row.is_none_or(|row| (row.identity, row.generation) != identity) {
                return Ok(None);
            }
            let stored = self.low_watermark(&tx, Isolation::Serializable).await?;
            if stored < low {
                tx.set(&self.context.keys.low_watermark(&self.name), low.as_bytes());
            }
            Ok(Some(low.max(stored)))
        };
        self.context.db.run(write).await
    }

    /// Finds the position, for which consumer it holds, and whether any row was passed since it was written.
    async fn find_low_watermark(
        &self,
        known: Option<&(Sequence, Heads)>,
    ) -> Result<Option<(([u8; 16], u64), Sequence, bool)>> {
        let read = async |tx: Transaction| {
            tokio::try_join!(
                self.row(&tx, Isolation::Snapshot),
                self.checkpoints(&tx),
                self.low_watermark(&tx, Isolation::Snapshot)
            )
        };
        let (row, checkpoints, low) = self.context.db.run(read).await?;
        let Some(row) = row else { return Ok(None) };
        let (mut lowest, mut has_passed): (Option<Sequence>, bool) = (None, false);
        for (shard, stored) in checkpoints {
            let from = stored.position().max(low);
            let passed = match known {
                Some((looked_to, heads)) if !heads.may_have_rows(shard, from) => {
                    Passed { to: from.max(*looked_to), rows: 0, is_all: true }
                }
                _ => self.unwanted_up_to(shard, stored, low, None).await?,
            };
            has_passed |= passed.rows > 0 || stored.position() > low;
            lowest = Some(lowest.map_or(passed.to, |lowest| lowest.min(passed.to)));
        }
        Ok(lowest.map(|lowest| ((row.identity, row.generation), lowest, has_passed)))
    }

    /// Passes the rows of `shard` after the checkpoint `stored` and the low watermark `low` up to the first wanted one, or at most up to
    /// `enough`.
    async fn unwanted_up_to(
        &self,
        shard: ShardId,
        stored: Cursor,
        low: Sequence,
        enough: Option<Sequence>,
    ) -> Result<Passed> {
        let mut passed = Passed { to: stored.position().max(low), rows: 0, is_all: true };
        for pages in 0.. {
            // What is behind so many pages is written another time; a barrier has to see all of it.
            if enough.map_or(pages == PAGES_MAX, |enough| passed.to >= enough) {
                break;
            }
            let read = async |tx: Transaction| {
                tx.set_option(TransactionOption::Priority(Priority::Batch));
                self.feed().kept_shard_page(&tx, shard, passed.to, PAGE_ROWS).await
            };
            let page = match self.context.db.run(read).await {
                // The consumer has left the shard since its checkpoint was read, and the janitor has dropped it.
                Err(Error::NoShard { is_trimmed: true, .. }) => return Ok(passed),
                page => page?.page,
            };
            for row in &page.rows {
                if enough.is_some_and(|enough| row.sequence > enough) {
                    return Ok(passed);
                }
                if self.is_wanted(row.sequence, &row.value, &stored) {
                    let to = row.sequence.before().max(passed.to);
                    return Ok(Passed { to, is_all: false, ..passed });
                }
                passed.rows += 1;
            }
            passed.to = page.next.position();
            if !page.more {
                break;
            }
        }
        Ok(passed)
    }

    fn is_wanted(&self, sequence: Sequence, value: &[u8], since: &Cursor) -> bool {
        if self.feed.instance().is_some() {
            return true;
        }
        // A row that cannot be decoded is wanted by nobody.
        Notification::from_stored(sequence, value).is_ok_and(|row| row.is_wanted(&self.filter, since))
    }

    /// Waits until everything up to what is in the feed now is finished, or deferred.
    pub async fn caught_up(&self) -> Result<()> {
        self.wait_for(self.feed_end().await?).await
    }

    /// The last position that can be read now.
    async fn feed_end(&self) -> Result<Sequence> {
        self.context.db.run(async |tx| self.feed().last_readable(&tx).await).await
    }

    /// Waits until everything that was committed up to `version` is finished, or deferred.
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

    /// Whether no shard has a wanted row up to `at` that is neither finished nor deferred.
    async fn has_passed(&self, at: Sequence) -> Result<bool> {
        let read = async |tx: Transaction| {
            self.existing(&tx, Isolation::Snapshot).await?;
            tokio::try_join!(
                self.checkpoints(&tx),
                self.low_watermark(&tx, Isolation::Snapshot),
                self.feed().topology(&tx)
            )
        };
        let (stored, low, topology) = self.context.db.run(read).await?;
        for (shard, stored) in stored {
            if !self.unwanted_up_to(shard, stored, low, Some(at)).await?.is_all {
                return Ok(false);
            }
            // Rows of successors are before `at` as well.
            let (_, successor) = topology.entry_of(shard)?;
            if successor.is_some_and(|successor| successor.first <= at) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
