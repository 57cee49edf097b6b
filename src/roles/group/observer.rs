//! [`Observer`]: works on the rows of a shard.

use std::{
    error::Error as StdError,
    fmt,
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::FutureExt;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::task::JoinSet;

use super::GroupBatch;
use crate::{
    base::{encoding::Sequence, env::Env, error::panic_text},
    state::{keys::ShardId, membership::Stop},
};

/// The result of an observer for a batch. The error says in its own terms why it failed.
pub type ObserverResult = Result<(), Box<dyn StdError + Send + Sync>>;

/// Why an observer is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CloseReason {
    /// The consumer is shut down or dropped, or the shard is handed over to another node with fewer shards. Checkpoints can still
    /// be written.
    Shutdown,
    /// The lease is lost: another node has taken over, the group was reset or deleted, or this node has expired. Unfinished work
    /// of the observer cannot be committed with a checkpoint any more.
    LeaseLost,
    /// The shard was closed by a reshard and is drained. Checkpoints can still be written.
    Resharded,
    /// The observer has failed too often, or panicked. Another one is opened in its place.
    ObserverError,
}

/// Works on the rows of one shard. A group's consumer has one observer per shard that its node holds; the factory
/// that was passed to the consumer makes them.
///
/// For each observer, `opened` is called once at first, `closed` once at last (also if the work was aborted within a
/// call: its future is dropped first), and `batch` in between, one call at a time. `closed` is always called, unless the process
/// ends. A closure of a [`GroupBatch`] is an observer, too.
///
/// ```
/// use notibus::{group::{CloseReason, GroupBatch, ObserverResult}, Notification, Observer, Sequence, feed::ShardId};
///
/// struct Mailer;
///
/// impl Observer<Notification> for Mailer {
///     async fn opened(&mut self, shard: ShardId, position: Sequence) {
///         println!("shard {shard} from {position} on");
///     }
///
///     async fn batch(&mut self, batch: GroupBatch<Notification>) -> ObserverResult {
///         batch.rows.iter().for_each(|row| println!("{}", row.name));
///         Ok(())
///     }
///
///     async fn closed(&mut self, reason: CloseReason) {
///         println!("{reason:?}");
///     }
/// }
/// ```
pub trait Observer<R>: Send + 'static {
    /// Called when the node begins to work on `shard`, after `position`. If it panics, the observer gets no batch: it is closed, and after
    /// a pause another one is opened.
    fn opened(&mut self, shard: ShardId, position: Sequence) -> impl Future<Output = ()> + Send {
        let _ = (shard, position);
        std::future::ready(())
    }

    /// Works on some rows. If it returns an error or panics, it gets the same rows again and must tolerate that, unless it
    /// writes the checkpoint in its own transaction.
    fn batch(&mut self, batch: GroupBatch<R>) -> impl Future<Output = ObserverResult> + Send;

    /// Called when the observer will get nothing more.
    fn closed(&mut self, reason: CloseReason) -> impl Future<Output = ()> + Send {
        let _ = reason;
        std::future::ready(())
    }
}

impl<R, F, W> Observer<R> for F
where
    F: FnMut(GroupBatch<R>) -> W + Send + 'static,
    W: Future<Output = ObserverResult> + Send,
{
    fn batch(&mut self, batch: GroupBatch<R>) -> impl Future<Output = ObserverResult> + Send {
        self(batch)
    }
}

/// Pending calls of `closed` of observers whose work was aborted.
#[derive(Debug, Clone, Default)]
pub(super) struct PendingCloses {
    tasks: Arc<Mutex<JoinSet<()>>>,
    is_dropped: Arc<AtomicBool>,
}

/// Notes when it is dropped that the consumer is dropped.
#[derive(Debug)]
pub(super) struct Alive(Arc<AtomicBool>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl PendingCloses {
    pub fn alive(&self) -> Alive {
        Alive(Arc::clone(&self.is_dropped))
    }

    /// Finishes `closing`, with a time limit. It survives the consumer.
    fn add(&self, env: &Env, limit: Duration, closing: impl Future<Output = ()> + Send + 'static) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (owner, deadline) = (self.clone(), env.sleep(limit));
        let closing = async move {
            tokio::select! {
                () = closing => {}
                () = deadline => tracing::warn!("an observer does not close in time and is dropped"),
            }
            drop(owner);
        };
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn_on(closing, &runtime);
    }

    pub async fn finish(&self) {
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        while tasks.join_next().await.is_some() {}
    }
}

/// An opened observer, until it is closed. Dropping it closes the observer as after an abort.
pub(super) struct Session<R: 'static, O: Observer<R>> {
    /// `None` once it is being closed.
    observer: Option<O>,
    /// Shows whether the end is a shutdown or the loss of a lease.
    stop: Stop,
    /// Continues the closing after an abort.
    pending_closes: PendingCloses,
    env: Env,
    /// Time limit for closing after an abort.
    limit: Duration,
    rows: std::marker::PhantomData<fn() -> R>,
}

impl<R: Send + Sync + 'static, O: Observer<R>> Session<R, O> {
    /// Opens `observer`. It is to be closed even if that has failed.
    pub async fn open(
        observer: O,
        (shard, position): (ShardId, Sequence),
        (stop, pending_closes): (Stop, PendingCloses),
        (env, limit): (Env, Duration),
    ) -> (Self, Result<(), Failure>) {
        let rows = std::marker::PhantomData;
        let mut session = Self { observer: Some(observer), stop, pending_closes, env, limit, rows };
        let observer = session.observer.as_mut().expect("it was just put there");
        let opened = guarded(async { observer.opened(shard, position).await }).await;
        (session, opened)
    }

    pub async fn batch(&mut self, batch: GroupBatch<R>) -> Result<(), Failure> {
        let observer = self.observer.as_mut().expect("it is there until it is closed");
        let worked = guarded(async { observer.batch(batch).await }).await?;
        worked.map_err(|error| Failure { text: chain(&*error), is_panic: false })
    }

    pub async fn close(mut self, reason: CloseReason) {
        if let Some(observer) = self.observer.take() {
            close(observer, reason).await;
        }
    }
}

impl<R: 'static, O: Observer<R>> Drop for Session<R, O> {
    fn drop(&mut self) {
        if let Some(observer) = self.observer.take() {
            let is_shutdown = self.stop.was_given() || self.pending_closes.is_dropped.load(Ordering::Relaxed);
            let reason = if is_shutdown { CloseReason::Shutdown } else { CloseReason::LeaseLost };
            self.pending_closes.add(&self.env, self.limit, close(observer, reason));
        }
    }
}

async fn close<R, O: Observer<R>>(mut observer: O, reason: CloseReason) {
    if let Err(failure) = guarded(async { observer.closed(reason).await }).await {
        tracing::error!(?reason, error = %failure, "an observer has panicked when it was closed");
    }
}

/// Awaits a call of an observer; a panic is a failure. `call` makes the call as well, because that may panic, too.
async fn guarded<T>(call: impl Future<Output = T>) -> Result<T, Failure> {
    let called = AssertUnwindSafe(call).catch_unwind().await;
    called.map_err(|panic| Failure { text: format!("panic: {}", panic_text(&*panic)), is_panic: true })
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    pub text: String,
    /// Whether it has panicked, so that it must not be used any more.
    pub is_panic: bool,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Text of `error` and its sources.
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
