//! [`ListenerHandle`]: stops a listener and waits for it; and [`CallbackHandle`].

use std::{
    fmt,
    ops::Deref,
    sync::{Arc, OnceLock},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::watch,
    task::{self, AbortHandle, JoinSet},
};

use super::{listener::StopReason, log::SubscriberId};
use crate::base::{cursor::Knowledge, encoding::Sequence, filter::Filter};

pub(super) const SHUTDOWN_LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(super) struct State {
    pub stop: bool,
    /// The newest filter to switch to, until the listener takes it.
    pub filter: Option<Filter>,
    pub ended: Option<StopReason>,
}

/// Shared by a listener and its handles.
#[derive(Debug)]
pub(super) struct Control {
    pub id: SubscriberId,
    pub state: watch::Sender<State>,
    /// What it has worked on, updated while a caller waits for more.
    pub worked_to: watch::Sender<Knowledge>,
    /// The task of its supervisor, once it runs.
    pub task: OnceLock<task::Id>,
}

impl Control {
    /// Asks it to end, and waits until it has ended, unless its own task calls this.
    async fn stop(&self) -> StopReason {
        self.state.send_modify(|state| state.stop = true);
        if self.task.get().is_some_and(|task| task::try_id().as_ref() == Some(task)) {
            return StopReason::Shutdown;
        }
        self.finished().await
    }

    async fn finished(&self) -> StopReason {
        let mut state = self.state.subscribe();
        let state = state.wait_for(|state| state.ended.is_some()).await.ok();
        state.and_then(|state| state.ended.clone()).unwrap_or(StopReason::Shutdown)
    }

    /// Marks it as ended, for `reason` if no other was set.
    pub fn end(&self, reason: StopReason) {
        self.state.send_modify(|state| state.ended = state.ended.take().or(Some(reason)));
        self.worked_to.send_modify(|_| {});
    }
}

/// A handle on a listener. Clones refer to the same listener. Dropping all of them does not end the listener.
#[derive(Clone)]
pub struct ListenerHandle {
    pub(super) control: Arc<Control>,
}

impl ListenerHandle {
    pub(super) fn new(id: SubscriberId) -> Self {
        let (state, worked_to) = (watch::Sender::default(), watch::Sender::default());
        Self { control: Arc::new(Control { id, state, worked_to, task: OnceLock::new() }) }
    }

    /// The id of the subscriber.
    pub fn id(&self) -> SubscriberId {
        self.control.id
    }

    /// Waits until it has worked on everything up to `at`, a position that
    /// [`Dispatcher::reached`](crate::Dispatcher::reached) has returned. Returns false if it ended before that.
    pub async fn reached(&self, at: Sequence) -> bool {
        let at = Knowledge::UpTo(at);
        let mut worked_to = self.control.worked_to.subscribe();
        // From now on the listener reports its progress.
        self.control.state.send_modify(|_| {});
        let waited = worked_to.wait_for(|known| *known >= at || self.is_finished()).await;
        waited.is_ok_and(|known| *known >= at)
    }

    /// Replaces the filter, as [`Subscription::replace`](crate::dispatcher::Subscription::replace) does.
    pub fn replace(&self, filter: Filter) {
        self.control.state.send_modify(|state| state.filter = Some(filter));
    }

    /// Waits until its present call has returned and `terminate` was called. Returns why it has ended, perhaps for an earlier
    /// reason.
    ///
    /// If the listener itself calls it, from its own task, it does not wait: the present call is the last one before `terminate`.
    pub async fn stop(&self) -> StopReason {
        self.control.stop().await
    }

    /// Asks it to end, and does not wait.
    pub(crate) fn request_stop(&self) {
        self.control.state.send_modify(|state| state.stop = true);
    }

    /// Waits until it has ended for any reason. A listener must not call it for itself: it would never return.
    pub async fn finished(&self) -> StopReason {
        self.control.finished().await
    }

    /// Whether it has ended.
    pub fn is_finished(&self) -> bool {
        self.control.state.borrow().ended.is_some()
    }
}

impl fmt::Debug for ListenerHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ListenerHandle").field("id", &self.control.id).finish_non_exhaustive()
    }
}

/// A subscription that passes its deliveries to a callback: the handle on its listener. Dropping it ends the subscription at once;
/// [`ListenerHandle::stop`] lets the present call return.
#[derive(Debug)]
#[must_use = "dropping the handle ends the subscription"]
pub struct CallbackHandle {
    pub(super) listener: ListenerHandle,
    pub(super) task: AbortHandle,
}

impl Deref for CallbackHandle {
    type Target = ListenerHandle;

    fn deref(&self) -> &ListenerHandle {
        &self.listener
    }
}

impl Drop for CallbackHandle {
    fn drop(&mut self) {
        // A callback may stop itself: its present call is the last one.
        if !self.listener.control.state.borrow().stop {
            self.task.abort();
        }
    }
}

/// The tasks of all listeners of a dispatcher.
#[derive(Default)]
pub(super) struct Listeners(Mutex<JoinSet<()>>);

impl Listeners {
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        let mut tasks = self.0.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task)
    }

    /// Waits until all have ended; aborts those that take longer than `limit`.
    pub async fn finish(&self, limit: impl Future<Output = ()>) {
        let mut tasks = std::mem::take(&mut *self.0.lock());
        tokio::select! {
            () = async { while tasks.join_next().await.is_some() {} } => return,
            () = limit => {}
        }
        tracing::warn!(listeners = tasks.len(), "listeners do not end and are aborted");
        tasks.shutdown().await;
    }
}
