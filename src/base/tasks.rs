//! [`Task`] and [`Tasks`]: tasks that never outlive the task that started them.
//!
//! Aborting a runtime task only asks it to end. On another thread the task may be in the middle of a poll, and continues until its next
//! await while its owner believes that it is gone. Its work can then interfere with the owner's clean-up. Waiting for a tracker (like that
//! of `tokio-util`) does not help when a future is dropped, because a drop cannot wait asynchronously; and futures are cancelled by
//! dropping, at any depth.
//!
//! So the work of a [`Task`] lives in a slot that the task shares with its handle. Dropping the handle takes the work out of the slot and
//! drops it, after waiting for a poll on another thread to end. Once the drop has returned, the task has stopped, and so has every [`Task`]
//! that it started.
//!
//! Polls are short. Work that blocks its thread blocks the drop of the handle for that long. Two tasks must not drop each other's handles
//! while they are polled. A task that drops its own handle ends after the current poll.
//!
//! [`supervised`] restarts the work of a task after a panic. A task that lasts as long as its role is never spawned without [`supervised`],
//! because a panic would then end the task for good, unnoticed.

use std::{
    fmt,
    panic::AssertUnwindSafe,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    thread::{self, ThreadId},
    time::Duration,
};

use futures_util::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use parking_lot::Mutex;
use tokio::task::{AbortHandle, JoinHandle};

use crate::base::{
    backoff::{Backoff, Failures},
    env::Env,
    error::{Error, panic_text},
};

/// Runs the work that `make` returns until it ends. After a panic, it calls `panicked` with the message, pauses as [`Backoff::ROLE`] says,
/// and calls `make` again.
pub(crate) async fn supervised<W: Future<Output = ()>>(
    env: &Env,
    mut make: impl FnMut() -> W,
    panicked: impl Fn(&str),
) {
    let mut panics = Failures::default();
    loop {
        let began = env.now();
        // `make` may panic as well, so the guard covers it.
        let work = AssertUnwindSafe(async { make().await });
        let Err(panic) = work.catch_unwind().await else { return };
        panicked(panic_text(&*panic));
        env.sleep(panics.again(&Backoff::ROLE, env.now().saturating_sub(began), env)).await;
    }
}

/// How long each step of a shutdown waits for the store.
pub(crate) const SHUTDOWN_MAX: Duration = Duration::from_secs(10);

/// Runs `work` during a shutdown. Fails if the store does not answer in time; the process then ends anyway.
pub(crate) async fn in_time<T>(
    env: &Env,
    what: &'static str,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    within(env, SHUTDOWN_MAX, what, work).await
}

/// Runs `work`. Fails with [`Error::GaveUp`] if it has no result after `limit`.
pub(crate) async fn within<T, E: From<Error>>(
    env: &Env,
    limit: Duration,
    what: &'static str,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    tokio::select! {
        biased;
        done = work => done,
        () = env.sleep(limit) => Err(Error::GaveUp { what, after: limit }.into()),
    }
}

/// Why a task ended without a result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Ended {
    /// The task was cancelled, or its runtime ended.
    #[error("it was cancelled")]
    Cancelled,
    /// The task panicked with this message.
    #[error("it panicked: {0}")]
    Panicked(String),
}

/// What a task returns.
pub(crate) type Joined<T> = Result<T, Ended>;

type Work<T> = BoxFuture<'static, T>;

/// Holds the work of a task until the task ends.
struct Slot<T> {
    /// The task's future; `None` once the task has ended. The lock is held while the future is polled.
    work: Mutex<Option<Work<T>>>,
    poller: Mutex<Option<ThreadId>>,
    /// Whether the task was cancelled, possibly by itself in the middle of a poll.
    is_cancelled: AtomicBool,
}

impl<T> Slot<T> {
    /// Polls the work once.
    fn poll(&self, context: &mut Context<'_>) -> Poll<Joined<T>> {
        let mut place = self.work.lock();
        let Some(work) = &mut *place else { return Poll::Ready(Err(Ended::Cancelled)) };
        self.set_poller(Some(thread::current().id()));
        let polled = std::panic::catch_unwind(AssertUnwindSafe(|| work.poll_unpin(context)));
        let polled = match polled {
            Ok(Poll::Ready(done)) => Poll::Ready(Ok(done)),
            Ok(Poll::Pending) if self.is_cancelled.load(Ordering::Relaxed) => {
                Poll::Ready(Err(Ended::Cancelled))
            }
            Ok(Poll::Pending) => Poll::Pending,
            Err(panic) => Poll::Ready(Err(Ended::Panicked(panic_text(&*panic).to_owned()))),
        };
        if polled.is_ready() {
            *place = None;
        }
        self.set_poller(None);
        polled
    }

    /// Records the thread that polls the work.
    fn set_poller(&self, thread: Option<ThreadId>) {
        *self.poller.lock() = thread;
    }

    /// Drops the work, after waiting for any poll on another thread to end.
    fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
        let poller = *self.poller.lock();
        if poller != Some(thread::current().id()) {
            let work = self.work.lock().take();
            drop(work);
        }
    }
}

/// Ends a task from elsewhere.
pub(crate) struct Canceller {
    slot: Arc<dyn Cancel>,
    task: AbortHandle,
}

/// A slot whose result may have any type.
trait Cancel: Send + Sync {
    /// See [`Slot::cancel`].
    fn cancel(&self);
}

impl<T: Send> Cancel for Slot<T> {
    fn cancel(&self) {
        Self::cancel(self);
    }
}

impl Canceller {
    /// Ends the task. Once this has returned, no part of the task runs, unless the task itself made the call.
    pub fn cancel(&self) {
        self.slot.cancel();
        self.task.abort();
    }
}

/// A handle to a runtime task. Dropping the handle ends the task. The handle is also a future with the task's result.
#[must_use = "dropping it ends the task"]
pub(crate) struct Task<T: Send + 'static> {
    number: u64,
    slot: Arc<Slot<T>>,
    handle: JoinHandle<Joined<T>>,
}

impl<T: Send + 'static> Task<T> {
    /// Runs `work` in a task of its own.
    pub fn spawn(work: impl Future<Output = T> + Send + 'static) -> Self {
        Self::numbered(0, work)
    }

    fn numbered(number: u64, work: impl Future<Output = T> + Send + 'static) -> Self {
        let slot = Arc::new(Slot {
            work: Mutex::new(Some(work.boxed())),
            poller: Mutex::new(None),
            is_cancelled: AtomicBool::new(false),
        });
        let polled = Arc::clone(&slot);
        let handle = tokio::spawn(std::future::poll_fn(move |context| polled.poll(context)));
        Self { number, slot, handle }
    }

    /// Returns a handle that can end the task from elsewhere.
    pub fn canceller(&self) -> Canceller {
        let slot: Arc<dyn Cancel> = Arc::<Slot<T>>::clone(&self.slot);
        Canceller { slot, task: self.handle.abort_handle() }
    }
}

impl<T: Send + 'static> Future for Task<T> {
    type Output = Joined<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Joined<T>> {
        let joined = ready!(self.handle.poll_unpin(context));
        Poll::Ready(joined.unwrap_or(Err(Ended::Cancelled)))
    }
}

impl<T: Send + 'static> fmt::Debug for Task<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Task").field("number", &self.number).finish_non_exhaustive()
    }
}

impl<T: Send + 'static> Drop for Task<T> {
    fn drop(&mut self) {
        self.slot.cancel();
        self.handle.abort();
    }
}

/// A set of tasks, all of which end when the set is dropped.
pub(crate) struct Tasks<T: Send + 'static> {
    /// The tasks that have not been joined.
    under_way: FuturesUnordered<Numbered<T>>,
}

/// A task that returns its number with its result.
struct Numbered<T: Send + 'static>(Task<T>);

impl<T: Send + 'static> Future for Numbered<T> {
    type Output = (u64, Joined<T>);

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let joined = ready!(self.0.poll_unpin(context));
        Poll::Ready((self.0.number, joined))
    }
}

impl<T: Send + 'static> Tasks<T> {
    pub fn new() -> Self {
        Self { under_way: FuturesUnordered::new() }
    }

    /// Runs `work` as task number `number`, and returns a handle that can end the task.
    pub fn spawn(&self, number: u64, work: impl Future<Output = T> + Send + 'static) -> Canceller {
        let task = Task::numbered(number, work);
        let canceller = task.canceller();
        self.under_way.push(Numbered(task));
        canceller
    }

    /// Waits for the next task to end, and returns its result with its number; `None` if no task is left. Cancel safe.
    pub async fn join_next(&mut self) -> Option<(u64, Joined<T>)> {
        self.under_way.next().await
    }

    /// Ends all tasks. Once this has returned, none of them is running.
    pub fn cancel_all(&mut self) {
        self.under_way = FuturesUnordered::new();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use tokio::sync::oneshot;

    use super::*;

    /// Counts its own drop.
    struct Dropped(Arc<AtomicUsize>);

    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[tokio::test]
    async fn a_task_returns_what_its_work_does_and_tells_of_a_panic() {
        assert_eq!(Task::spawn(async { 7 }).await.unwrap(), 7);
        let panicked = Task::spawn(async { panic!("it breaks") }).await;
        assert_eq!(panicked, Err::<(), _>(Ended::Panicked("it breaks".to_owned())));
    }

    #[tokio::test]
    async fn all_that_a_task_has_started_is_dropped_with_it_at_once() {
        let dropped = Arc::new(AtomicUsize::new(0));
        let guards = [(); 3].map(|()| Dropped(Arc::clone(&dropped)));
        let (started, is_started) = oneshot::channel();
        let outer = Task::spawn(async move {
            let mut inner = Tasks::new();
            for guard in guards {
                inner.spawn(0, async move {
                    let _guard = guard;
                    std::future::pending::<()>().await;
                });
            }
            started.send(()).unwrap();
            inner.join_next().await;
        });
        is_started.await.unwrap();
        drop(outer);
        assert_eq!(dropped.load(Ordering::SeqCst), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn work_that_panics_begins_again_until_it_ends() {
        let (count, panics) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let make = || {
            let number = count.fetch_add(1, Ordering::Relaxed);
            // The second call panics before it returns any work.
            assert_ne!(number, 1);
            async move { assert_ne!(number, 0) }
        };
        supervised(&Env::system(), make, |_| {
            panics.fetch_add(1, Ordering::Relaxed);
        })
        .await;
        assert_eq!((count.into_inner(), panics.into_inner()), (3, 2));
    }

    /// Aborting the task would have returned in the middle of the poll.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_poll_that_is_under_way_ends_before_the_drop_returns() {
        let (begun, has_begun) = oneshot::channel();
        let polled = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&polled);
        let task = Task::spawn(async move {
            begun.send(()).unwrap();
            thread::sleep(Duration::from_millis(100));
            count.fetch_add(1, Ordering::SeqCst);
            tokio::task::yield_now().await;
            count.fetch_add(1, Ordering::SeqCst);
        });
        has_begun.await.unwrap();
        drop(task);
        assert_eq!(polled.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn a_task_that_cancels_itself_ends_with_its_poll() {
        let (give, given) = oneshot::channel::<Canceller>();
        let task = Task::spawn(async move {
            given.await.ok().unwrap().cancel();
            tokio::task::yield_now().await;
            unreachable!("it was cancelled");
        });
        assert!(give.send(task.canceller()).is_ok());
        assert!(matches!(task.await, Err::<(), _>(Ended::Cancelled)));
    }

    #[tokio::test]
    async fn one_of_several_tasks_can_be_cancelled() {
        let mut tasks = Tasks::new();
        tasks.spawn(1, std::future::pending()).cancel();
        tasks.spawn(2, async {});
        let mut ended = vec![tasks.join_next().await.unwrap(), tasks.join_next().await.unwrap()];
        ended.sort_by_key(|(number, _)| *number);
        assert_eq!(ended, [(1, Err(Ended::Cancelled)), (2, Ok(()))]);
        assert!(tasks.join_next().await.is_none());
    }
}
