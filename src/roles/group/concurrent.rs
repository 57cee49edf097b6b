//! [`each_concurrent`]: an observer that works on several rows at once.

use std::{fmt, future::Future, sync::Arc, time::Duration};

use futures_util::{
    FutureExt, StreamExt,
    future::{BoxFuture, Fuse, FusedFuture},
    stream,
};

use super::{CheckpointPolicy, FencingToken, GroupBatch, Observer, ObserverResult, batch::Unsaved};
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
    },
    state::{feed::FeedRow, keys::ShardId},
};

/// How often a position within a batch is saved, unless the policy sets it.
const SAVE_PAUSE: Duration = Duration::from_secs(1);

/// A row for the work of [`each_concurrent`].
#[non_exhaustive]
pub struct ConcurrentRow<R> {
    /// The row.
    pub row: Arc<R>,
    /// Its shard.
    pub shard: ShardId,
    /// A position before the row, after which it has its news.
    pub after: Sequence,
    /// 1, or more if the row, or a batch that contained it, has failed before.
    pub attempt: u32,
    /// Orders the consumers of the shard. For effects outside of the store.
    pub fencing_token: FencingToken,
}

impl<R> fmt::Debug for ConcurrentRow<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { shard, after, attempt, .. } = self;
        f.debug_struct("ConcurrentRow")
            .field("shard", shard)
            .field("after", after)
            .field("attempt", attempt)
            .finish_non_exhaustive()
    }
}

/// An observer that calls `work` for each row, with at most `most` rows of a batch at once (at least one).
///
/// The rows of a batch have different ids, and a batch begins after the one before has ended: so the rows of each id come in order. If
/// `work` fails for some rows, the other rows of the batch are still finished. Then everything before the first failed row is
/// saved as worked on, and the rest comes again, rows that have succeeded included. A panic counts as a failure of the whole batch.
///
/// While a batch is in work, the position before which all of its rows are done is saved, so that a crash does not repeat the batch:
/// as often as [`CheckpointPolicy::Rows`] or [`CheckpointPolicy::Interval`] says, else each second. With
/// [`CheckpointPolicy::Explicit`] this observer saves the end of each batch as well, because `work` cannot.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::{
///     Bus, BusOptions, NodeOptions, Notification,
///     group::{ConcurrentRow, ConsumerOptions, GroupOptions, each_concurrent},
///     store::Database,
/// };
///
/// let bus = Bus::open(&Database::memory(), BusOptions::default()).await?;
/// let group = bus.group("indexer")?;
/// group.create(&GroupOptions::default()).await?;
/// let index = |work: ConcurrentRow<Notification>| async move {
///     println!("{}, attempt {}, by {}", work.row.name, work.attempt, work.fencing_token);
///     Ok(())
/// };
/// let node = bus.node(NodeOptions::default()).await?;
/// let consumer = node.consumer(&group, move |_| each_concurrent(8, index), ConsumerOptions::default()).await?;
/// consumer.shutdown().await?;
/// node.shutdown().await
/// # }
/// ```
pub fn each_concurrent<R, F, W>(most: usize, work: F) -> impl Observer<R>
where
    R: FeedRow,
    F: Fn(ConcurrentRow<R>) -> W + Send + Sync + 'static,
    W: Future<Output = ObserverResult> + Send,
{
    EachConcurrent { most: most.max(1), work }
}

struct EachConcurrent<F> {
    most: usize,
    work: F,
}

impl<R, F, W> Observer<R> for EachConcurrent<F>
where
    R: FeedRow,
    F: Fn(ConcurrentRow<R>) -> W + Send + Sync + 'static,
    W: Future<Output = ObserverResult> + Send,
{
    async fn batch(&mut self, batch: GroupBatch<R>) -> ObserverResult {
        let GroupBatch { shard, after, attempt, fencing_token, ref rows, .. } = batch;
        let work = |(index, row): (usize, &Arc<R>)| {
            let row = ConcurrentRow { row: Arc::clone(row), shard, after, attempt, fencing_token };
            let work = (self.work)(row);
            async move { (index, work.await) }
        };
        // Collected first, because the compiler cannot name the type of the futures otherwise.
        let works: Vec<_> = rows.iter().enumerate().map(work).collect();
        let mut works = stream::iter(works).buffer_unordered(self.most);
        let mut progress = Progress::new(batch.unsaved, rows.len());
        let mut saving = Fuse::<BoxFuture<'_, Result<()>>>::terminated();
        let mut first = None;
        loop {
            tokio::select! {
                biased;
                saved = &mut saving => only_lost(saved)?,
                worked = works.next() => match worked {
                    None => break,
                    Some((index, Ok(()))) => progress.done(index),
                    Some((index, Err(error))) => {
                        if first.as_ref().is_none_or(|(failed, _)| index < *failed) {
                            first = Some((index, error));
                        }
                    }
                },
            }
            if saving.is_terminated()
                && let Some(last) = progress.due(batch.checkpointer.now())
            {
                saving = batch.checkpointer.raise(rows[last].sequence()).boxed().fuse();
            }
        }
        if !saving.is_terminated() {
            only_lost(saving.await)?;
        }
        let Some((failed, error)) = first else {
            if batch.unsaved.policy == CheckpointPolicy::Explicit {
                batch.checkpointer.raise(batch.to).await?;
            }
            return Ok(());
        };
        if let Some(done) = failed.checked_sub(1) {
            batch.checkpointer.raise(rows[done].sequence()).await?;
        }
        Err(error)
    }
}

/// Keeps only the loss of a lease. The next save repairs other failures.
fn only_lost(saved: Result<()>) -> Result<()> {
    saved.or_else(|error| if matches!(error, Error::LeaseLost { .. }) { Err(error) } else { Ok(()) })
}

/// Which rows of a batch are done.
struct Progress {
    unsaved: Unsaved,
    is_done: Vec<bool>,
    /// The number of rows at the beginning that are done.
    low: usize,
    /// The number of these that are saved, or being saved.
    saved: usize,
}

impl Progress {
    fn new(unsaved: Unsaved, rows: usize) -> Self {
        Self { unsaved, is_done: vec![false; rows], low: 0, saved: 0 }
    }

    fn done(&mut self, index: usize) {
        self.is_done[index] = true;
        self.low += self.is_done[self.low..].iter().take_while(|is_done| **is_done).count();
    }

    /// Returns the last row of the done beginning, if it is time to save that. The consumer itself saves the end of the batch.
    fn due(&mut self, now: Duration) -> Option<usize> {
        if self.low == self.saved || self.low == self.is_done.len() {
            return None;
        }
        let (rows, time) = (self.low - self.saved, now.saturating_sub(self.unsaved.since));
        let is_due = match self.unsaved.policy {
            CheckpointPolicy::Rows(most) => self.unsaved.rows.saturating_add(rows as u64) >= most,
            CheckpointPolicy::Interval(most) => time >= most,
            CheckpointPolicy::EveryBatch | CheckpointPolicy::Explicit => time >= SAVE_PAUSE,
        };
        if !is_due {
            return None;
        }
        self.saved = self.low;
        (self.unsaved.rows, self.unsaved.since) = (0, now);
        Some(self.low - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(policy: CheckpointPolicy, rows: u64) -> Progress {
        Progress::new(Unsaved { policy, rows, since: Duration::ZERO }, 10)
    }

    #[test]
    fn only_the_rows_before_the_first_that_is_not_done_are_saved() {
        let mut progress = progress(CheckpointPolicy::Rows(2), 0);
        for index in [1, 2, 3] {
            progress.done(index);
            assert_eq!(progress.due(Duration::ZERO), None, "the first is not done");
        }
        progress.done(0);
        assert_eq!(progress.due(Duration::ZERO), Some(3));
        assert_eq!(progress.due(Duration::ZERO), None, "it is saved");
        progress.done(4);
        assert_eq!(progress.due(Duration::ZERO), None, "it is one row");
        (5..10).for_each(|index| progress.done(index));
        assert_eq!(progress.due(Duration::MAX), None, "the batch ends, and its consumer saves that");
    }

    #[test]
    fn positions_within_a_batch_are_saved_as_often_as_the_policy_says() {
        let due = |policy, rows, ms| {
            let mut progress = progress(policy, rows);
            progress.done(0);
            progress.due(Duration::from_millis(ms)).is_some()
        };
        assert!(due(CheckpointPolicy::Rows(5), 4, 0), "four were worked on before");
        assert!(!due(CheckpointPolicy::Rows(5), 3, 9_999));
        let interval = CheckpointPolicy::Interval(Duration::from_millis(300));
        assert!(due(interval, 0, 300) && !due(interval, 9_999, 299));
        for policy in [CheckpointPolicy::EveryBatch, CheckpointPolicy::Explicit] {
            assert!(due(policy, 0, 1_000) && !due(policy, 9_999, 999));
        }
    }
}
