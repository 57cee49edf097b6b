//! [`Handler`]: the user's code that a consumer calls, and what it is given.

use std::{error::Error as StdError, fmt, future::ready, marker::PhantomData, ops::Deref, sync::Arc};

use futures_util::{FutureExt, future::BoxFuture};
use serde::Serialize;

use super::exactly_once::Run;
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        event::{DbInstance, EventKind},
        filter::Filter,
        notification::{News, Notification},
    },
    roles::changes::Change,
    state::{feed::FeedRow, keys::ShardId},
};

/// The result of a handler. The error says, in the handler's own terms, why it failed.
pub type HandlerResult = Result<(), Box<dyn StdError + Send + Sync>>;

/// A type of row that consumers work on: [`Notification`] or [`Change`](crate::changes::Change).
pub trait ConsumedRow: FeedRow + Clone {
    /// Returns the database that the row is about; `None` for rows of documents.
    #[doc(hidden)]
    fn instance(&self) -> Option<DbInstance> {
        None
    }

    /// Whether the row says that its id is gone.
    #[doc(hidden)]
    fn is_tombstone(&self) -> bool {
        false
    }

    /// Whether a consumer whose cursor is `since` wants the row. A row that ends a database is always wanted.
    #[doc(hidden)]
    fn is_wanted(&self, filter: &Filter, since: &Cursor) -> bool {
        let _ = (filter, since);
        true
    }

    /// Returns the instance whose deletion this row reports, if a consumer at `since` may have worked on it.
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
    /// The consumer is shut down or dropped, or the shard moves to another node. Effects can still be committed.
    Shutdown,
    /// The lease is lost: another node has taken over, the consumer was paused, reset or deleted, or this node has expired. Nothing more
    /// can be committed.
    LeaseLost,
    /// The shard was closed by a reshard and is drained.
    Resharded,
    /// The handler panicked. Another one is made in its place.
    Panicked,
}

/// A handler of [`Work`] works on ids side by side ([`ConsumerBuilder::run`](super::ConsumerBuilder::run)), and a handler of [`Batch`] on
/// batches of rows in the order of their shard ([`ConsumerBuilder::run_batches`](super::ConsumerBuilder::run_batches)). A closure that
/// takes either is a handler, too.
///
/// For each shard that a node holds, `opened` is called first, `closed` last (unless the process ends), and `handle` in between: for
/// several ids at once, but never twice at once for the same id; for batches one at a time. If a handler of batches panics, it is replaced.
pub trait Handler<W>: Send + Sync + 'static {
    /// Works on the newest row of an id, or on a batch of rows. After an error, a panic or a crash it is called again, and must tolerate
    /// that, unless the effect is in a transaction that called [`Run::commit_in`]. If the work is cancelled, its future is dropped.
    fn handle(&self, work: W) -> impl Future<Output = HandlerResult> + Send;

    /// Called when the node begins to work on `shard`.
    fn opened(&self, shard: ShardId) -> impl Future<Output = ()> + Send {
        let _ = shard;
        ready(())
    }

    /// Called when the handler will get nothing more from `shard`.
    fn closed(&self, shard: ShardId, reason: CloseReason) -> impl Future<Output = ()> + Send {
        let _ = (shard, reason);
        ready(())
    }
}

impl<W, F, H> Handler<W> for F
where
    F: Fn(W) -> H + Send + Sync + 'static,
    H: Future<Output = HandlerResult> + Send,
{
    fn handle(&self, work: W) -> impl Future<Output = HandlerResult> + Send {
        self(work)
    }
}

/// The work on one id. Clones belong to the same [`Run`].
#[derive(Clone)]
pub struct Work<R> {
    pub(super) id: bytes::Bytes,
    pub(super) row: Option<Arc<R>>,
    pub(super) gone: Option<DbInstance>,
    pub(super) run: Arc<Run>,
}

impl<R> Deref for Work<R> {
    type Target = Run;

    fn deref(&self) -> &Run {
        &self.run
    }
}

impl<R> Work<R> {
    /// Returns the id: the name of a database, or the id of a document.
    pub fn id(&self) -> &[u8] {
        &self.id
    }

    /// Returns the newest row of the id; `None` if there is only an end to handle ([`Work::gone`]), or if the id no longer has a row,
    /// because its tombstone was dropped while the id was deferred.
    pub fn row(&self) -> Option<&Arc<R>> {
        self.row.as_ref()
    }

    /// Returns the database whose end is news: drop what was made for it before you make anything for its successor. After a failure, the
    /// end may come without a row, and the row of the successor afterwards.
    pub fn gone(&self) -> Option<DbInstance> {
        self.gone
    }
}

impl Work<Notification> {
    /// Returns what is new in the row; `None` if there is no row.
    pub fn news(&self) -> Option<News> {
        Some(self.row.as_ref()?.news_since(self.since()))
    }
}

impl<R> fmt::Debug for Work<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("id", &self.id).field("since", &self.since()).finish_non_exhaustive()
    }
}

/// Rows of one shard, in order. Clones belong to the same [`Run`].
#[derive(Clone)]
pub struct Batch<R> {
    /// The rows. A deferred id comes alone, with its newest row, or without a row if there is only an end to handle ([`Batch::gone`]).
    pub rows: Vec<R>,
    pub(super) gone: Option<(bytes::Bytes, DbInstance)>,
    pub(super) run: Arc<Run>,
}

impl<R> Batch<R> {
    /// Returns the name and the instance of a database that ended while its name was deferred, if no row says so: drop what was made for
    /// it. The row of its successor comes afterwards.
    pub fn gone(&self) -> Option<(&[u8], DbInstance)> {
        self.gone.as_ref().map(|(id, instance)| (&id[..], *instance))
    }
}

impl<R> Deref for Batch<R> {
    type Target = Run;

    fn deref(&self) -> &Run {
        &self.run
    }
}

impl<R> fmt::Debug for Batch<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rows, since) = (self.rows.len(), self.since());
        f.debug_struct("Batch").field("rows", &rows).field("since", &since).finish_non_exhaustive()
    }
}

/// The argument with which a handler is called.
pub(super) enum Call<R> {
    Id(Work<R>),
    Rows(Batch<R>),
}

impl<R> From<Call<R>> for Work<R> {
    fn from(call: Call<R>) -> Self {
        let Call::Id(work) = call else { unreachable!("ids come one by one") };
        work
    }
}

impl<R> From<Call<R>> for Batch<R> {
    fn from(call: Call<R>) -> Self {
        let Call::Rows(batch) = call else { unreachable!("rows come in batches") };
        batch
    }
}

/// The handler of a shard, whatever its type.
pub(super) trait AnyHandler<R>: Send + Sync {
    fn call(self: Arc<Self>, call: Call<R>) -> BoxFuture<'static, HandlerResult>;
    fn opened(self: Arc<Self>, shard: ShardId) -> BoxFuture<'static, ()>;
    fn closed(self: Arc<Self>, shard: ShardId, reason: CloseReason) -> BoxFuture<'static, ()>;
}

/// A [`Handler`] of `W`, as an [`AnyHandler`].
pub(super) struct Of<H, W>(pub H, pub PhantomData<fn(W)>);

impl<R: ConsumedRow, W: From<Call<R>> + Send + 'static, H: Handler<W>> AnyHandler<R> for Of<H, W> {
    fn call(self: Arc<Self>, call: Call<R>) -> BoxFuture<'static, HandlerResult> {
        async move { self.0.handle(call.into()).await }.boxed()
    }

    fn opened(self: Arc<Self>, shard: ShardId) -> BoxFuture<'static, ()> {
        async move { self.0.opened(shard).await }.boxed()
    }

    fn closed(self: Arc<Self>, shard: ShardId, reason: CloseReason) -> BoxFuture<'static, ()> {
        async move { self.0.closed(shard, reason).await }.boxed()
    }
}

/// Makes the handler of a shard.
pub(super) type Factory<R> = Box<dyn Fn(ShardId) -> Arc<dyn AnyHandler<R>> + Send + Sync>;

/// Returns the text of `error` and its sources. The text comes from the user's code, which may panic.
pub(super) fn chain(error: &(dyn StdError + 'static)) -> String {
    let text = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| chain_of(error)));
    text.unwrap_or_else(|_| "an error whose text panics".to_owned())
}

fn chain_of(error: &(dyn StdError + 'static)) -> String {
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

/// Returns the database that still exists once the work on `row` is done; `None` if there is none.
pub(super) fn left_instance<R: ConsumedRow>(row: Option<&R>) -> Option<DbInstance> {
    row.filter(|row| !row.is_tombstone()).and_then(ConsumedRow::instance)
}

/// Returns the sequence of `row`; `None` if there is no row.
pub(super) fn sequence_of<R: FeedRow>(row: Option<&Arc<R>>) -> Option<Sequence> {
    row.map(|row| row.sequence())
}
