//! [`ParallelJob`]: works through a sharded feed with one task per shard, and ends where all tasks have read the same version.
//!
//! # How
//!
//! ```text
//! round   1: snapshot A             2: snapshot C        3: snapshot D
//! task 1  ████████████A'████B       ███C                 D
//! task 2  ██████A                   █████C               D    ── all have read D: done
//! ```
//!
//! All tasks of a round read at the same version. A task that needs more time for its rows than a transaction may take continues at newer
//! versions of its own (`A'`, `B`). If a task has done that, the tasks have read different states, and another round brings all of them to
//! a newer state. A round only has to read what was written during the previous one. It reads these rows ahead of the work, unless there
//! are too many for memory. So sooner or later all tasks read to the end at the version of their round, however long the work takes. That
//! version is the result of the job.
//!
//! The shards of a topology entry are finished before those of the next, so that rows of one document come in order across a reshard.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use futures_util::{StreamExt, stream};
use tokio::sync::Semaphore;

use super::super::{HandlerResult, Work, exactly_once::Run};
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        error::{Error, Result},
        tasks::{Ended, Tasks},
    },
    state::{
        feed::{Feed, FeedRow, SHARDS_READ_AT_ONCE, ShardPage, Topology},
        keys::ShardId,
    },
    store::{Isolation, RetryPolicy, Transaction},
};

/// The maximum number of rows that a round after the first reads ahead of the work.
const ROWS_HELD_MAX: usize = 100_000;

/// How a parallel job works.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ParallelJobOptions {
    /// How many tasks work at once, 1 to 10,000; others wait. Default: 16.
    pub tasks_max: usize,
    /// The maximum number of rows in a batch, 1 to 10,000. Default: 1,000.
    pub batch_rows_max: usize,
    /// How many times a batch is tried before the job fails, at least 1. Default: 5.
    pub attempts_max: u32,
}

crate::base::macros::setters!(ParallelJobOptions {
    tasks_max: usize,
    batch_rows_max: usize,
    attempts_max: u32
});

impl ParallelJobOptions {
    /// The maximum number of tasks at once: no feed has more shards.
    pub const TASKS_MAX: usize = 10_000;
}

impl Default for ParallelJobOptions {
    fn default() -> Self {
        Self { tasks_max: 16, batch_rows_max: 1_000, attempts_max: 5 }
    }
}

/// Rows that a task has to work on.
pub struct ParallelBatch<R> {
    /// The shard of the rows.
    pub shard: ShardId,
    /// The rows, in order; at least one.
    pub rows: Vec<Arc<R>>,
    /// A transaction that reads the store as it was when the rows were read. Use it only to read. It is valid for 5 s from the beginning of
    /// the round. If a read fails with `transaction_too_old` (1007), read at a newer version in a transaction of your own: rows written
    /// since then come in a later batch.
    pub snapshot: Transaction,
    /// The number of the attempt: 1, or more if the work on these rows failed before.
    pub attempt: u32,
    /// The consumer's run that the job is part of, if any.
    fence: Option<Arc<Run>>,
    feed: Feed<R>,
}

impl<R: FeedRow> ParallelBatch<R> {
    /// Makes `tx` fail if the feed is removed or resharded, or if the consumer's run is over ([`ParallelJob::with_work`]), before the
    /// commit. Call it in each transaction that writes something permanent, because stopping a task does not stop a commit in flight.
    ///
    /// Fails with [`Error::NoFeed`] if the feed was removed, and with [`Error::Cancelled`] as [`Run::verify`](crate::consumer::Run::verify)
    /// does.
    pub async fn verify(&self, tx: &Transaction) -> Result<()> {
        let topology = Topology::read(tx, self.feed.raw(), Isolation::Serializable);
        match &self.fence {
            Some(fence) => tokio::try_join!(topology, fence.verify(tx)).map(|_| ()),
            None => topology.await.map(|_| ()),
        }
    }
}

/// A job over all shards of a feed after a position, for instance to index what was written since.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use std::sync::atomic::{AtomicUsize, Ordering};
///
/// use notibus::{Bus, BusOptions, changes::{ChangesOptions, DocId, DocSummary, Revision}, Cursor, Db, DbInstance, consumer::ParallelJob, store::Store};
///
/// let store = Store::memory();
/// let bus = Bus::open(&store, BusOptions::default()).await?;
/// let (changes, db) = (bus.changes(), Db::new("orders".parse()?, DbInstance::new()));
/// store.run(async |tx| changes.create(&tx, &db, &ChangesOptions::default().shards(8)).await).await?;
/// store
///     .run(async |tx| {
///         let writer = changes.writer(&tx, &db).await?;
///         for n in 0..100 {
///             let revision = Revision { position: 1, hash: [n; 16] };
///             let doc = DocSummary { id: DocId::new(&format!("doc{n}"))?, revision, branches: 1, is_deleted: false };
///             writer.record(&doc, None)?;
///         }
///         Ok(())
///     })
///     .await?;
///
/// static INDEXED: AtomicUsize = AtomicUsize::new(0);
/// let job = ParallelJob::new(changes.feed(&db), Cursor::BEGINNING);
/// let indexed_to = job
///     .run(|batch| async move {
///         INDEXED.fetch_add(batch.rows.len(), Ordering::Relaxed);
///         Ok(())
///     })
///     .await?;
/// assert_eq!(INDEXED.load(Ordering::Relaxed), 100);
/// assert!(changes.feed(&db).page(indexed_to, 1).await?.rows.is_empty());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct ParallelJob<R> {
    feed: Feed<R>,
    since: Cursor,
    options: ParallelJobOptions,
    /// The consumer's run that the job is part of, if any.
    fence: Option<Arc<Run>>,
}

/// The result of a task in a round.
struct Done {
    shard: ShardId,
    /// Where to continue in the shard.
    next: Cursor,
    /// The version at which the end was read.
    version: u64,
    /// Whether the shard is closed, so that no more rows will come.
    is_ended: bool,
}

impl<R: FeedRow> ParallelJob<R> {
    /// Makes a job for the rows of `feed` after `since`.
    pub fn new(feed: Feed<R>, since: impl Into<Cursor>) -> Self {
        Self { feed, since: since.into(), options: ParallelJobOptions::default(), fence: None }
    }

    /// Sets the options.
    #[must_use]
    pub fn with_options(self, options: ParallelJobOptions) -> Self {
        Self { options, ..self }
    }

    /// Makes the job part of the run of a consumer, such as a build: the transactions of its batches fail once the run is over
    /// ([`ParallelBatch::verify`]), and each finished batch counts as progress.
    #[must_use]
    pub fn with_work<W>(self, work: &Work<W>) -> Self {
        Self { fence: Some(Arc::clone(&work.run)), ..self }
    }

    /// Works through the feed until all tasks have read the same state. Returns the cursor of that state, where the next job starts.
    ///
    /// `work` gets each row at least once, newer rows of an id after older ones, and rows of different shards concurrently. It may get a
    /// batch again after a failure, and must tolerate that. If a job that started from nothing fails, drop what was derived from its rows,
    /// because the next job from nothing does not see what was deleted in between.
    ///
    /// # Errors
    ///
    /// [`Error::Task`] if `work` fails too often or panics; other tasks are stopped. [`Error::NoFeed`] if the feed was removed, even if
    /// `work` notices it ([`ParallelBatch::verify`]). [`Error::Invalid`] if an option is outside its limits. The errors of [`Feed::page`].
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped or fails, all its tasks have ended and all calls of `work` have been dropped by the time the drop returns;
    /// the drop waits for a poll of such a call that is in progress on another thread. A commit that is in flight may still happen, unless
    /// its transaction called [`ParallelBatch::verify`].
    pub async fn run<F, W>(&self, work: F) -> Result<Cursor>
    where
        F: Fn(ParallelBatch<R>) -> W + Send + Sync + 'static,
        W: Future<Output = HandlerResult> + Send + 'static,
    {
        let Self { feed, since, options, fence } = self;
        if !(1..=ParallelJobOptions::TASKS_MAX).contains(&options.tasks_max) {
            let reason =
                format!("{} at once is not 1 to {}", options.tasks_max, ParallelJobOptions::TASKS_MAX);
            return Err(Error::invalid("tasks of a parallel job", reason));
        }
        if options.attempts_max == 0 {
            return Err(Error::invalid("attempts of a parallel job", "the maximum is zero"));
        }
        let job = Self { feed: feed.clone(), since: *since, options: options.clone(), fence: fence.clone() };
        let task = Arc::new(Task { job, work });
        let turns = Arc::new(Semaphore::new(options.tasks_max));
        // Where to continue in each shard; `None` if it was read to its end.
        let mut cursors: HashMap<ShardId, Option<Cursor>> = HashMap::new();
        let (mut rounds_from, mut is_first) = (*since, true);
        // Everything up to this position was read. Each round checks it against the horizon, because dropped shards have no task for that.
        let mut read_to = *since;
        loop {
            let begin = async |tx: Transaction| {
                let (_, topology, _) = feed.raw().begin(&tx, read_to).await?;
                Ok((tx.read_version().await?, topology))
            };
            let (version, topology) = feed.context.store.run(begin).await?;
            let seen = Sequence::last_at(feed.context.config.incarnation, version);
            rounds_from = rounds_from.begin(seen);
            let entries = topology.after(since.position()).iter().map(|entry| {
                let start = rounds_from.at(rounds_from.position().max(entry.first.before()));
                let cursor = |shard| cursors.get(&shard).copied().unwrap_or(Some(start));
                entry.shards().filter_map(|shard| Some((shard, cursor(shard)?))).collect()
            });
            let entries: Vec<Vec<_>> = entries.collect();
            // The first round reads most rows. Later rounds read theirs ahead of the work, before the snapshot expires.
            let is_first = std::mem::take(&mut is_first);
            let mut held = if is_first { None } else { task.read_ahead(&entries, version).await? };
            let mut is_agreed = true;
            let mut reached = None;
            for shards in entries {
                // Only the last entry counts, because the shards of the entries before it were read to their ends.
                reached = None;
                let mut under_way = Tasks::new();
                for (shard, cursor) in shards {
                    let (task, turns) = (Arc::clone(&task), Arc::clone(&turns));
                    let rows = held.as_mut().and_then(|held| held.remove(&shard));
                    under_way.spawn(0, async move {
                        let _turn = turns.acquire().await.expect("the semaphore is never closed");
                        task.run(shard, cursor, version, rows).await
                    });
                }
                // If one task fails, dropping the set ends the others before the error is returned.
                while let Some((_, done)) = under_way.join_next().await {
                    let done = done.unwrap_or_else(|ended| Err(panicked(ended)))?;
                    is_agreed &= done.version == version;
                    let to = done.next.position().max(seen);
                    reached = Some(reached.map_or(to, |least: Sequence| least.min(to)));
                    cursors.insert(done.shard, (!done.is_ended).then_some(done.next));
                }
            }
            if is_agreed {
                return Ok(seen.into());
            }
            read_to = rounds_from.at(reached.unwrap_or(seen));
        }
    }
}

/// Rows of a shard that were read ahead, where to continue, and whether the shard has ended.
type Held<R> = (Vec<Arc<R>>, Cursor, bool);

/// Returns the error for a task that panicked, or was stopped with its runtime.
fn panicked(ended: Ended) -> Error {
    Error::Task { shard: None, attempts: 1, source: Arc::new(ended) }
}

/// What the tasks of a job share.
struct Task<R, F> {
    job: ParallelJob<R>,
    work: F,
}

impl<R, F, W> Task<R, F>
where
    R: FeedRow,
    F: Fn(ParallelBatch<R>) -> W + Send + Sync + 'static,
    W: Future<Output = HandlerResult> + Send + 'static,
{
    /// Works from `cursor` to the end of the shard at `version`, or at newer versions if that takes too long. Rows that were read ahead
    /// (`held`) already reach the end.
    async fn run(
        &self,
        shard: ShardId,
        mut cursor: Cursor,
        mut version: u64,
        held: Option<Held<R>>,
    ) -> Result<Done> {
        if let Some((rows, next, is_ended)) = held {
            for rows in rows.chunks(self.job.options.batch_rows_max) {
                self.work_on(shard, rows, version).await?;
            }
            return Ok(Done { shard, next, version, is_ended });
        }
        loop {
            let Some(page) = self.read(shard, cursor, version).await? else {
                version = self.job.feed.context.store.run(async |tx| tx.read_version().await).await?;
                continue;
            };
            if !page.rows.is_empty() {
                self.work_on(shard, &page.rows, version).await?;
            }
            cursor = page.next;
            if !page.more {
                return Ok(Done { shard, next: cursor, version, is_ended: page.resharded.is_some() });
            }
        }
    }

    /// Reads the remaining rows of the shards of all `entries` at `version`. Returns `None` if that takes too much memory or time.
    async fn read_ahead(
        &self,
        entries: &[Vec<(ShardId, Cursor)>],
        version: u64,
    ) -> Result<Option<HashMap<ShardId, Held<R>>>> {
        let budget = AtomicUsize::new(ROWS_HELD_MAX);
        // Collected first, because a future that holds the closure cannot be proven `Send`.
        let reads: Vec<_> =
            entries.iter().flatten().map(|at| self.read_shard_ahead(*at, version, &budget)).collect();
        let mut reads = stream::iter(reads).buffer_unordered(SHARDS_READ_AT_ONCE);
        let mut held = HashMap::new();
        while let Some(read) = reads.next().await {
            match read? {
                Some((shard, rows)) => held.insert(shard, rows),
                None => return Ok(None),
            };
        }
        Ok(Some(held))
    }

    /// Reads from `cursor` to the end of the shard at `version`; `None` if `budget` is too small, or the version too old.
    async fn read_shard_ahead(
        &self,
        (shard, mut cursor): (ShardId, Cursor),
        version: u64,
        budget: &AtomicUsize,
    ) -> Result<Option<(ShardId, Held<R>)>> {
        let mut rows = Vec::new();
        loop {
            let Some(page) = self.read(shard, cursor, version).await? else { return Ok(None) };
            let left =
                budget.fetch_sub(page.rows.len().min(budget.load(Ordering::Relaxed)), Ordering::Relaxed);
            if left < page.rows.len() {
                return Ok(None);
            }
            rows.extend(page.rows);
            cursor = page.next;
            if !page.more {
                return Ok(Some((shard, (rows, cursor, page.resharded.is_some()))));
            }
        }
    }

    /// Reads the rows after `cursor` at `version`; `None` if that version is too old.
    async fn read(&self, shard: ShardId, cursor: Cursor, version: u64) -> Result<Option<ShardPage<R>>> {
        let ParallelJob { feed, options, .. } = &self.job;
        if let Some(gone) = feed.context.stats.health.ended() {
            return Err(gone.clone());
        }
        let read = async |tx: Transaction| {
            match feed.shard_page_in(&tx, shard, cursor, options.batch_rows_max).await {
                // The shard was dropped meanwhile, so it had no more rows.
                Err(Error::NoShard { is_trimmed: true, .. }) => {
                    let to = cursor.position();
                    Ok(ShardPage { rows: Vec::new(), to, next: cursor, more: false, resharded: None })
                }
                page => page,
            }
        };
        feed.context.store.read_at(version, read).await
    }

    /// Calls `work` for `rows`, and calls it again after failures.
    async fn work_on(&self, shard: ShardId, rows: &[Arc<R>], version: u64) -> Result<()> {
        let ParallelJob { feed, options, fence, .. } = &self.job;
        let store = &feed.context.store;
        let mut attempt = 1;
        loop {
            let snapshot = store.begin();
            snapshot.set_read_version(version);
            let (rows, fence, feed) = (rows.to_vec(), fence.clone(), feed.clone());
            let batch = ParallelBatch { shard, rows, snapshot, attempt, fence, feed };
            let Err(source) = (self.work)(batch).await else {
                if let Some(fence) = &self.job.fence {
                    fence.progress();
                }
                return Ok(());
            };
            let own = self.job.feed.raw().id.to_string();
            let source = match source.downcast::<Error>() {
                // No further attempt would find the feed.
                Ok(error) if matches!(&*error, Error::NoFeed { feed } if *feed == own) => return Err(*error),
                Ok(error) => error,
                Err(source) => source,
            };
            if attempt >= options.attempts_max {
                return Err(Error::Task { shard: Some(shard.0), attempts: attempt, source: source.into() });
            }
            let health = &self.job.feed.context.stats.health;
            if let Some(unsaid) = health.remark(store.env(), "failed task of a parallel job") {
                tracing::warn!(shard = shard.0, attempt, error = %source, unsaid, "a task of a parallel job failed; trying again");
            }
            store.env().sleep(RetryPolicy::default().backoff().pause(attempt, store.env())).await;
            attempt += 1;
        }
    }
}
