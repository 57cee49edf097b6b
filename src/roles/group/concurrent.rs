//! [`each_concurrent`]: an observer that works on several rows at once.

use std::{future::Future, sync::Arc};

use futures_util::{StreamExt, stream};

use super::{GroupBatch, Observer, ObserverResult};
use crate::state::feed::FeedRow;

/// An observer that calls `work` for each row, with at most `most` rows of a batch at once (at least one).
///
/// The rows of a batch have different ids, and a batch begins after the one before has ended: so the rows of each id come in order. If
/// `work` fails for some rows, the other rows of the batch are still finished. Then everything before the first failed row is
/// saved as worked on, and the rest comes again, rows that have succeeded included. A panic counts as a failure of the whole batch.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use std::sync::Arc;
///
/// use notibus::{
///     Bus, BusOptions, NodeOptions, Notification,
///     group::{ConsumerOptions, GroupOptions, each_concurrent},
///     store::Database,
/// };
///
/// let bus = Bus::open(&Database::memory(), BusOptions::default()).await?;
/// let group = bus.group("indexer")?;
/// group.create(&GroupOptions::default()).await?;
/// let index = |row: Arc<Notification>| async move {
///     println!("{}", row.name);
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
    F: Fn(Arc<R>) -> W + Send + Sync + 'static,
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
    F: Fn(Arc<R>) -> W + Send + Sync + 'static,
    W: Future<Output = ObserverResult> + Send,
{
    async fn batch(&mut self, batch: GroupBatch<R>) -> ObserverResult {
        let work = |(index, row): (usize, &Arc<R>)| {
            let work = (self.work)(Arc::clone(row));
            async move { (index, work.await) }
        };
        // Collected first, because the compiler cannot name the type of the futures otherwise.
        let works: Vec<_> = batch.rows.iter().enumerate().map(work).collect();
        let mut works = stream::iter(works).buffer_unordered(self.most);
        let mut first = None;
        while let Some((index, worked)) = works.next().await {
            if let Err(error) = worked
                && first.as_ref().is_none_or(|(failed, _)| index < *failed)
            {
                first = Some((index, error));
            }
        }
        drop(works);
        let Some((failed, error)) = first else { return Ok(()) };
        if let Some(done) = failed.checked_sub(1) {
            batch.checkpoint_up_to(done).await?;
        }
        Err(error)
    }
}
