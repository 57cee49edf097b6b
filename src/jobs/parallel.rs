//! [`ParallelJob`]: works through a sharded feed with one task per shard, and ends where all tasks have seen the same.
//!
//! # How
//!
//! ```text
//! round   1: snapshot A             2: snapshot C        3: snapshot D
//! task 1  ████████████A'████B       ███C                 D
//! task 2  ██████A                   █████C               D    ── all have seen D: done
//! ```
//!
//! All tasks of a round read at one version. A task whose rows take longer than a transaction lives goes on at a newer
//! version, by itself (`A'`, `B`). If that happened to any, the tasks have seen different states, and another round brings
//! all of them to a newer one. A round has only to read what was written during the one before, so rounds become short, and
//! one of them is read at its version to the end. That version is what the job has seen.
//!
//! The shards of a topology entry are done before those of the next: rows of one document come in order across a reshard.

use std::{collections::HashMap, error::Error as StdError, sync::Arc};

use tokio::{sync::Semaphore, task::JoinSet};

use crate::{
    encoding::Sequence,
    error::{Error, Result},
    feed::{Feed, FeedRow, ShardPage},
    keys::ShardId,
    store::{RetryPolicy, Transaction},
};

/// What the work of a task returns: why it failed, in its own terms.
pub type TaskResult = std::result::Result<(), Box<dyn StdError + Send + Sync>>;

/// How a parallel job works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParallelJobOptions {
    /// How many tasks work at once; others wait for their turn. Default: 16.
    pub tasks_max: usize,
    /// The most rows of a batch, 1 to 10,000. Default: 1,000.
    pub batch_rows_max: usize,
    /// How often a batch is tried before the job fails, at least once. Default: 5.
    pub attempts_max: u32,
}

impl Default for ParallelJobOptions {
    fn default() -> Self {
        Self { tasks_max: 16, batch_rows_max: 1_000, attempts_max: 5 }
    }
}

/// Rows for a task to work on.
pub struct Batch<R> {
    /// The shard.
    pub shard: ShardId,
    /// The rows, in order; at least one.
    pub rows: Vec<Arc<R>>,
    /// A transaction that reads the store as it was when the rows were read. It is for reading, and lives 5 s from the round's
    /// beginning: if a read fails with `transaction_too_old` (1007), read at a newer version of your own, as the rows of what
    /// was written since come in a later batch.
    pub snapshot: Transaction,
    /// 1, or more if the work on these rows has failed before.
    pub attempt: u32,
}

/// A job over all shards of a feed, from a position on: such as building an index of what was written since.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use std::sync::atomic::{AtomicUsize, Ordering};
///
/// use notibus::{
///     Bus, BusOptions, ChangesOptions, Db, DbInstance, DocId, DocSummary, ParallelJob, Revision, Sequence, store::Database,
/// };
///
/// let store = Database::memory();
/// let bus = Bus::open(&store, BusOptions::default()).await?;
/// let (changes, db) = (bus.changes(), Db::new("orders".parse()?, DbInstance::random(store.env())));
/// store.run(async |tx| changes.create(&tx, &db, &ChangesOptions { shards: 8, ..Default::default() }).await).await?;
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
/// let job = ParallelJob::new(changes.feed(&db), Sequence::ZERO);
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
    /// The feed.
    feed: Feed<R>,
    /// Where to start.
    since: Sequence,
    /// How to work.
    options: ParallelJobOptions,
}

/// What a task has done in a round.
struct Done {
    /// The shard.
    shard: ShardId,
    /// Everything of the shard up to here was worked on.
    to: Sequence,
    /// The version at which the end was seen.
    version: u64,
}

impl<R: FeedRow> ParallelJob<R> {
    /// A job on what was written to `feed` after `since`.
    pub fn new(feed: Feed<R>, since: Sequence) -> Self {
        Self { feed, since, options: ParallelJobOptions::default() }
    }

    /// The job with other options.
    #[must_use]
    pub fn with_options(self, options: ParallelJobOptions) -> Self {
        Self { options, ..self }
    }

    /// Works through the feed, until every task has seen the same state of it, which is returned: the next job starts there.
    ///
    /// `work` is given each row at least once, newer rows of an id after older ones, and rows of different shards at once.
    /// It may be given a batch again after it has failed, so it has to bear that.
    ///
    /// # Errors
    ///
    /// [`Error::Task`] if `work` has failed too often, or panicked: the other tasks are stopped, and the job has seen nothing.
    /// [`Error::Invalid`] if an option is out of its limits, and whatever [`Feed::page`] fails with.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, its tasks are stopped.
    pub async fn run<F, W>(&self, work: F) -> Result<Sequence>
    where
        F: Fn(Batch<R>) -> W + Send + Sync + 'static,
        W: Future<Output = TaskResult> + Send + 'static,
    {
        let Self { feed, since, options } = self;
        if options.tasks_max == 0 || options.attempts_max == 0 {
            return Err(Error::invalid("parallel job", "its tasks or attempts are zero"));
        }
        let db = &feed.context.db;
        let work = Arc::new(work);
        let turns = Arc::new(Semaphore::new(options.tasks_max));
        let mut cursors = HashMap::new();
        loop {
            let (version, topology) =
                db.run(async |tx| Ok((tx.read_version().await?, feed.raw().topology(&tx).await?))).await?;
            let mut is_agreed = true;
            for entry in topology.after(*since) {
                let mut tasks = JoinSet::new();
                for shard in entry.shards() {
                    let after = cursors.get(&shard).copied().unwrap_or(*since);
                    let task =
                        Task { feed: feed.clone(), shard, options: options.clone(), work: Arc::clone(&work) };
                    let turns = Arc::clone(&turns);
                    tasks.spawn(async move {
                        let _turn = turns.acquire().await.expect("the semaphore is never closed");
                        task.run(after, version).await
                    });
                }
                // Dropping the set stops the others.
                while let Some(done) = tasks.join_next().await {
                    let done = done.unwrap_or_else(|error| Err(panicked(error)))?;
                    is_agreed &= done.version == version;
                    cursors.insert(done.shard, done.to);
                }
            }
            if is_agreed {
                return Ok(Sequence::last_at(feed.context.config.incarnation, version));
            }
        }
    }
}

/// The failure of a task that has panicked, or was stopped with its runtime.
fn panicked(error: tokio::task::JoinError) -> Error {
    Error::Task { shard: None, attempts: 1, source: Arc::new(error) }
}

/// The task of one shard in one round.
struct Task<R, F> {
    /// The feed.
    feed: Feed<R>,
    /// The shard.
    shard: ShardId,
    /// How to work.
    options: ParallelJobOptions,
    /// What to do with each batch.
    work: Arc<F>,
}

impl<R, F, W> Task<R, F>
where
    R: FeedRow,
    F: Fn(Batch<R>) -> W + Send + Sync + 'static,
    W: Future<Output = TaskResult> + Send + 'static,
{
    /// Works from `after` to the end of the shard, as it is at `version` or, if that takes too long, later.
    async fn run(&self, mut after: Sequence, mut version: u64) -> Result<Done> {
        loop {
            let Some(page) = self.read(after, version).await? else {
                version = self.feed.context.db.run(async |tx| tx.read_version().await).await?;
                continue;
            };
            if !page.rows.is_empty() {
                self.work_on(&page.rows, version).await?;
            }
            after = page.to;
            if !page.more {
                return Ok(Done { shard: self.shard, to: after, version });
            }
        }
    }

    /// The rows after `after` at `version`; `None` if that is too old to be read.
    async fn read(&self, after: Sequence, version: u64) -> Result<Option<ShardPage<R>>> {
        let Self { feed, shard, options, .. } = self;
        let read = async |tx: Transaction| {
            match feed.shard_page_in(&tx, *shard, after, options.batch_rows_max).await {
                // It was dropped since, so nothing was left in it.
                Err(Error::NoShard { is_trimmed: true, .. }) => {
                    Ok(ShardPage { rows: Vec::new(), to: after, more: false, resharded: None })
                }
                page => page,
            }
        };
        feed.context.db.read_at(version, read).await
    }

    /// Has the work done on `rows`, and done again if it fails.
    async fn work_on(&self, rows: &[Arc<R>], version: u64) -> Result<()> {
        let db = &self.feed.context.db;
        let mut attempt = 1;
        loop {
            let snapshot = db.begin();
            snapshot.set_read_version(version);
            let batch = Batch { shard: self.shard, rows: rows.to_vec(), snapshot, attempt };
            let Err(source) = (self.work)(batch).await else {
                return Ok(());
            };
            if attempt >= self.options.attempts_max {
                return Err(Error::Task {
                    shard: Some(self.shard.0),
                    attempts: attempt,
                    source: source.into(),
                });
            }
            tracing::warn!(shard = self.shard.0, attempt, error = %source, "task failed, trying again");
            db.env().sleep(RetryPolicy::default().backoff(attempt, db.env())).await;
            attempt += 1;
        }
    }
}
