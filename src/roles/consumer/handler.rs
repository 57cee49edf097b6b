//! [`Handler`] and [`BatchHandler`]: the user's code that a consumer calls, and what it is given.

use std::{error::Error as StdError, fmt, future::ready, marker::PhantomData, sync::Arc};

use futures_util::{FutureExt, future::BoxFuture};
use serde::Serialize;

use super::exactly_once::{CommitState, Fence, FencingToken};
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        error::Result,
        event::{DbInstance, EventKind},
        filter::Filter,
        notification::{News, Notification},
    },
    roles::changes::Change,
    state::{feed::FeedRow, keys::ShardId},
    store::Transaction,
};

/// The result of a handler. The error says in its own terms why it failed.
pub type HandlerResult = std::result::Result<(), Box<dyn StdError + Send + Sync>>;

/// A type of rows that consumers work on: [`Notification`], and [`Change`](crate::changes::Change).
pub trait ConsumedRow: FeedRow {
    /// The database that the row is about; `None` for rows of documents.
    #[doc(hidden)]
    fn instance(&self) -> Option<DbInstance> {
        None
    }

    /// Whether the row says that its id is gone.
    #[doc(hidden)]
    fn is_tombstone(&self) -> bool {
        false
    }

    /// Whether a consumer that knows `since` wants the row. Ends of databases are always wanted.
    #[doc(hidden)]
    fn is_wanted(&self, filter: &Filter, since: &Cursor) -> bool {
        let _ = (filter, since);
        true
    }

    /// The database that a consumer that knows `since` may have worked on, and that is gone.
    #[doc(hidden)]
    fn gone(&self, since: &Cursor) -> Option<DbInstance> {
        let _ = since;
        None
    }
}

impl ConsumedRow for Notification {
    fn instance(&self) -> Option<DbInstance> {
        Some(self.instance)
    }

    fn is_tombstone(&self) -> bool {
        self.is_deleted()
    }

    fn is_wanted(&self, filter: &Filter, since: &Cursor) -> bool {
        filter.passes(self, since) || (filter.matches(self, since) && self.gone(since).is_some())
    }

    fn gone(&self, since: &Cursor) -> Option<DbInstance> {
        if self.is_tombstone() {
            return Some(self.instance);
        }
        let deleted = self.news_since(*since).iter().find(|(_, kind)| *kind == EventKind::Deleted);
        deleted.map(|(instance, _)| instance)
    }
}

impl ConsumedRow for Change {}

/// Why a handler is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CloseReason {
    /// The consumer is shut down or dropped, or the shard goes to another node. Effects can still be committed.
    Shutdown,
    /// The lease is lost: another node has taken over, the consumer was paused, reset or deleted, or this node has expired. Nothing
    /// can be committed any more.
    LeaseLost,
    /// The shard was closed by a reshard and is drained.
    Resharded,
    /// The handler has panicked. Another one is made in its place.
    Panicked,
}

/// Works on ids side by side: [`ConsumerBuilder::run`](super::ConsumerBuilder::run). A closure of a [`Work`] is a handler, too.
///
/// For each shard that a node holds, `opened` is called first, `closed` last (unless the process ends), and `handle` in between: for
/// several ids at once, never twice at once for one id.
pub trait Handler<R>: Send + Sync + 'static {
    /// Works on the newest row of an id. After an error, a panic or a crash it is called again, and must tolerate that, unless the
    /// effect is in a transaction that called [`Work::commit_in`]. If the work is cancelled, its future is dropped.
    fn handle(&self, work: Work<R>) -> impl Future<Output = HandlerResult> + Send;

    /// Called when the node begins to work on `shard`.
    fn opened(&self, shard: ShardId) -> impl Future<Output = ()> + Send {
        let _ = shard;
        ready(())
    }

    /// Called when the handler will get nothing more of `shard`.
    fn closed(&self, shard: ShardId, reason: CloseReason) -> impl Future<Output = ()> + Send {
        let _ = (shard, reason);
        ready(())
    }
}

impl<R, F, W> Handler<R> for F
where
    F: Fn(Work<R>) -> W + Send + Sync + 'static,
    W: Future<Output = HandlerResult> + Send,
{
    fn handle(&self, work: Work<R>) -> impl Future<Output = HandlerResult> + Send {
        self(work)
    }
}

/// Works on batches of rows in the order of their shard: [`ConsumerBuilder::run_batches`](super::ConsumerBuilder::run_batches). A closure
/// of a [`Batch`] is a handler, too.
///
/// There is one for each shard that a node holds. `opened` is called first, `closed` last (unless the process ends), and `batch` in
/// between, one call at a time.
pub trait BatchHandler<R>: Send + 'static {
    /// Works on some rows. After an error, a panic or a crash it gets the same rows again, and must tolerate that, unless the effect is in a
    /// transaction that called [`Batch::commit_in`].
    fn batch(&mut self, batch: Batch<R>) -> impl Future<Output = HandlerResult> + Send;

    /// Called when the node begins to work on `shard`.
    fn opened(&mut self, shard: ShardId) -> impl Future<Output = ()> + Send {
        let _ = shard;
        ready(())
    }

    /// Called when the handler will get nothing more.
    fn closed(&mut self, reason: CloseReason) -> impl Future<Output = ()> + Send {
        let _ = reason;
        ready(())
    }
}

impl<R, F, W> BatchHandler<R> for F
where
    F: FnMut(Batch<R>) -> W + Send + 'static,
    W: Future<Output = HandlerResult> + Send,
{
    fn batch(&mut self, batch: Batch<R>) -> impl Future<Output = HandlerResult> + Send {
        self(batch)
    }
}

/// The work on one id. Clones belong to the same run.
pub struct Work<R> {
    pub(super) id: bytes::Bytes,
    pub(super) row: Option<Arc<R>>,
    pub(super) since: Cursor,
    pub(super) gone: Option<DbInstance>,
    pub(super) is_again: bool,
    pub(super) attempt: u32,
    pub(super) fence: Arc<Fence>,
}

impl<R> Clone for Work<R> {
    fn clone(&self) -> Self {
        Self {
            id: self.id.clone(),
            row: self.row.clone(),
            since: self.since,
            gone: self.gone,
            is_again: self.is_again,
            attempt: self.attempt,
            fence: Arc::clone(&self.fence),
        }
    }
}

impl<R> Work<R> {
    /// The id: the name of a database, or the id of a document.
    pub fn id(&self) -> &[u8] {
        &self.id
    }

    /// The newest row of the id; `None` if it has none any more, because its tombstone was dropped while the id was deferred.
    pub fn row(&self) -> Option<&Arc<R>> {
        self.row.as_ref()
    }

    /// What the consumer has finished of the id, for [`Notification::news_since`]. A kind of event may be news more than once.
    pub fn since(&self) -> Cursor {
        self.since
    }

    /// The database whose end is news: drop what was made for it, before anything is made for its successor.
    pub fn gone(&self) -> Option<DbInstance> {
        self.gone
    }

    /// Whether somebody has asked for the work to be done again ([`ConsumerHandle::again`](super::ConsumerHandle::again)).
    pub fn is_again(&self) -> bool {
        self.is_again
    }

    /// 1, or more if the work on the id has failed before.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The shard.
    pub fn shard(&self) -> ShardId {
        self.fence.held.shard
    }

    /// Orders the members that work on the shard, for effects outside of the store.
    pub fn fencing_token(&self) -> FencingToken {
        self.fence.held.token
    }

    /// Makes `tx` the transaction that finishes the work: it commits once, and only while the work was not cancelled and the shard is held.
    /// Costs two reads and a small write.
    ///
    /// Fails with [`Error::LeaseLost`](crate::Error::LeaseLost) and [`Error::Cancelled`](crate::Error::Cancelled); return either from the handler.
    pub async fn commit_in(&self, tx: &Transaction) -> Result<CommitState> {
        self.fence.commit_in(tx).await
    }

    /// Makes `tx` fail if the work is finished or cancelled, or the shard is lost, before the commit. For every transaction of work that
    /// takes several. Counts as progress. Fails as [`Work::commit_in`] does.
    pub async fn verify(&self, tx: &Transaction) -> Result<()> {
        self.fence.verify(tx).await
    }

    /// Notes progress ([`ConsumerOptions::stall_limit`](super::ConsumerOptions::stall_limit)).
    pub fn progress(&self) {
        self.fence.progress();
    }
}

impl Work<Notification> {
    /// What is new in the row; `None` if there is no row.
    pub fn news(&self) -> Option<News> {
        Some(self.row.as_ref()?.news_since(self.since))
    }
}

impl<R> fmt::Debug for Work<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work")
            .field("id", &self.id)
            .field("attempt", &self.attempt)
            .field("is_again", &self.is_again)
            .finish_non_exhaustive()
    }
}

/// Rows of one shard, in order. Clones belong to the same run.
pub struct Batch<R> {
    /// The rows, at least one. A deferred id comes alone, in its newest row.
    pub rows: Vec<Arc<R>>,
    pub(super) since: Cursor,
    pub(super) attempt: u32,
    pub(super) is_deferred: bool,
    pub(super) fence: Arc<Fence>,
}

impl<R> Clone for Batch<R> {
    fn clone(&self) -> Self {
        let (rows, fence) = (self.rows.clone(), Arc::clone(&self.fence));
        Self { rows, since: self.since, attempt: self.attempt, is_deferred: self.is_deferred, fence }
    }
}

impl<R> Batch<R> {
    /// What the consumer has finished before the batch, for [`Notification::news_since`]. A kind of event may be news more than once.
    pub fn since(&self) -> Cursor {
        self.since
    }

    /// 1, or more if these rows, or a batch that contained them, have failed before.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Whether it is a deferred id, which comes outside of the order of its shard.
    pub fn is_deferred(&self) -> bool {
        self.is_deferred
    }

    /// The shard.
    pub fn shard(&self) -> ShardId {
        self.fence.held.shard
    }

    /// As [`Work::fencing_token`].
    pub fn fencing_token(&self) -> FencingToken {
        self.fence.held.token
    }

    /// Makes `tx` the transaction that finishes the batch: it commits once, and only while the shard is held. Costs two reads and a small
    /// write, whatever the number of rows.
    ///
    /// Fails with [`Error::LeaseLost`](crate::Error::LeaseLost) and [`Error::Cancelled`](crate::Error::Cancelled), and with [`Error::PartlyDone`](crate::Error::PartlyDone) if an earlier attempt of unknown result has
    /// finished a part; return any of them from the handler.
    pub async fn commit_in(&self, tx: &Transaction) -> Result<CommitState> {
        self.fence.commit_in(tx).await
    }

    /// As [`Work::verify`].
    pub async fn verify(&self, tx: &Transaction) -> Result<()> {
        self.fence.verify(tx).await
    }

    /// As [`Work::progress`].
    pub fn progress(&self) {
        self.fence.progress();
    }
}

impl<R> fmt::Debug for Batch<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("rows", &self.rows.len())
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}

/// [`Handler`], whatever its type.
pub(super) trait AnyHandler<R>: Send + Sync {
    fn handle(self: Arc<Self>, work: Work<R>) -> BoxFuture<'static, HandlerResult>;
    fn opened(&self, shard: ShardId) -> BoxFuture<'_, ()>;
    fn closed(self: Arc<Self>, shard: ShardId, reason: CloseReason) -> BoxFuture<'static, ()>;
}

pub(super) struct Ids<H>(pub H);

impl<R: ConsumedRow, H: Handler<R>> AnyHandler<R> for Ids<H> {
    fn handle(self: Arc<Self>, work: Work<R>) -> BoxFuture<'static, HandlerResult> {
        async move { self.0.handle(work).await }.boxed()
    }

    fn opened(&self, shard: ShardId) -> BoxFuture<'_, ()> {
        self.0.opened(shard).boxed()
    }

    fn closed(self: Arc<Self>, shard: ShardId, reason: CloseReason) -> BoxFuture<'static, ()> {
        async move { self.0.closed(shard, reason).await }.boxed()
    }
}

/// [`BatchHandler`], whatever its type.
pub(super) trait AnyBatchHandler<R>: Send {
    fn batch(&mut self, batch: Batch<R>) -> BoxFuture<'_, HandlerResult>;
    fn opened(&mut self, shard: ShardId) -> BoxFuture<'_, ()>;
    fn closed(self: Box<Self>, reason: CloseReason) -> BoxFuture<'static, ()>;
}

pub(super) struct Batches<H, R>(pub H, pub PhantomData<fn() -> R>);

impl<R: ConsumedRow, H: BatchHandler<R>> AnyBatchHandler<R> for Batches<H, R> {
    fn batch(&mut self, batch: Batch<R>) -> BoxFuture<'_, HandlerResult> {
        self.0.batch(batch).boxed()
    }

    fn opened(&mut self, shard: ShardId) -> BoxFuture<'_, ()> {
        self.0.opened(shard).boxed()
    }

    fn closed(mut self: Box<Self>, reason: CloseReason) -> BoxFuture<'static, ()> {
        async move { self.0.closed(reason).await }.boxed()
    }
}

/// Makes the handler of a shard.
pub(super) enum Factory<R> {
    Ids(Box<dyn Fn(ShardId) -> Arc<dyn AnyHandler<R>> + Send + Sync>),
    Batches(Box<dyn Fn(ShardId) -> Box<dyn AnyBatchHandler<R>> + Send + Sync>),
}

/// The text of `error` and its sources.
pub(super) fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let more = error.to_string();
        // Many errors already include the text of their source.
        if !text.ends_with(&more) {
            text = format!("{text}: {more}");
        }
        source = error.source();
    }
    text
}

/// What a row says of where its work ends, for the fence.
pub(super) fn left_instance<R: ConsumedRow>(row: Option<&R>) -> Option<DbInstance> {
    row.filter(|row| !row.is_tombstone()).and_then(ConsumedRow::instance)
}

/// The database whose end the handler has to learn, where `worked` is the one in the key of the id.
pub(super) fn gone<R: ConsumedRow>(
    row: Option<&R>,
    since: &Cursor,
    worked: Option<DbInstance>,
) -> Option<DbInstance> {
    match row {
        None => worked,
        Some(row) => {
            row.gone(since).or_else(|| worked.filter(|worked| Some(*worked) != left_instance(Some(row))))
        }
    }
}

/// The sequence of a row that may be missing.
pub(super) fn sequence_of<R: FeedRow>(row: Option<&Arc<R>>) -> Option<Sequence> {
    row.map(|row| row.sequence())
}
