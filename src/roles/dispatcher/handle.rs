//! [`ListenerHandle`]: stops a listener, waits for it and sends it messages; and [`CallbackHandle`].

use std::{
    any::Any,
    fmt,
    ops::Deref,
    sync::{Arc, OnceLock, Weak},
    time::Duration,
};

use dashmap::DashMap;
use parking_lot::Mutex;
use tokio::{
    sync::{mpsc, watch},
    task::{self, AbortHandle, JoinSet},
};

use super::{
    listener::{Message, StopReason},
    log::SubscriberId,
};
use crate::base::{
    cursor::Knowledge,
    encoding::Sequence,
    error::{Error, Result},
    filter::Filter,
};

pub(super) const SHUTDOWN_LIMIT: Duration = Duration::from_secs(10);

/// A parent of listeners: they end when all clones of it are dropped, or [`Parent::end`] is called.
#[derive(Debug, Clone, Default)]
pub struct Parent(pub(super) Arc<watch::Sender<bool>>);

impl Parent {
    /// Makes a parent without children.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends the listeners that are linked to it.
    pub fn end(&self) {
        self.0.send_replace(true);
    }
}

/// A message could not be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CastError<M> {
    /// The listener's queue of messages is full: try again later.
    #[error("the listener has too many messages waiting")]
    Full(M),
    /// The listener has ended.
    #[error("the listener has ended")]
    Ended(M),
}

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
    pub name: Option<Arc<str>>,
    pub state: watch::Sender<State>,
    /// What it has worked on, updated while a caller waits for more.
    pub worked_to: watch::Sender<Knowledge>,
    /// The parent of its children, held weakly.
    parent: Mutex<Weak<watch::Sender<bool>>>,
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

    /// Marks it as ended, for `reason` if no other was set. Its children end with it, future ones included.
    pub fn end(&self, reason: StopReason) {
        self.state.send_modify(|state| state.ended = state.ended.take().or(Some(reason)));
        self.worked_to.send_modify(|_| {});
        let parent = self.parent.lock().upgrade();
        if let Some(parent) = parent {
            parent.send_replace(true);
        }
    }

    /// The parent of its children; a new one if the old one was dropped, which has ended its children.
    fn keep_parent(&self) -> Parent {
        let mut known = self.parent.lock();
        if let Some(parent) = known.upgrade() {
            return Parent(parent);
        }
        // This happens under the lock, so that `end` either finds the new parent or has set the reason before.
        let new = Parent(Arc::new(watch::Sender::new(self.state.borrow().ended.is_some())));
        *known = Arc::downgrade(&new.0);
        new
    }
}

/// A handle on a listener. Clones refer to the same listener. Dropping all of them does not end the listener, but ends the listeners
/// that are linked to it.
pub struct ListenerHandle<M> {
    pub(super) control: Arc<Control>,
    pub(super) messages: mpsc::Sender<Message<M>>,
    pub(super) parent: Parent,
}

impl<M> Clone for ListenerHandle<M> {
    fn clone(&self) -> Self {
        let Self { control, messages, parent } = self;
        Self { control: Arc::clone(control), messages: messages.clone(), parent: parent.clone() }
    }
}

impl<M: Send + 'static> ListenerHandle<M> {
    pub(super) fn new(id: SubscriberId, name: Option<Arc<str>>, messages: mpsc::Sender<Message<M>>) -> Self {
        let (state, worked_to) = (watch::Sender::default(), watch::Sender::default());
        let (parent, task) = (Mutex::default(), OnceLock::new());
        let control = Arc::new(Control { id, name, state, worked_to, parent, task });
        Self { parent: control.keep_parent(), control, messages }
    }

    /// The id of the subscriber.
    pub fn id(&self) -> SubscriberId {
        self.control.id
    }

    /// Its name, if it has one.
    pub fn name(&self) -> Option<&str> {
        self.control.name.as_deref()
    }

    /// Sends it `message`, and waits while its queue of messages is full.
    ///
    /// Fails with [`CastError::Ended`] if it has ended. The message is lost if the listener ends or panics before it handles it.
    pub async fn cast(&self, message: M) -> Result<(), CastError<M>> {
        let Ok(place) = self.messages.reserve().await else { return Err(CastError::Ended(message)) };
        place.send(Message::Cast(message));
        Ok(())
    }

    /// Sends it `message` if its queue has room.
    pub fn try_cast(&self, message: M) -> Result<(), CastError<M>> {
        match self.messages.try_reserve() {
            Ok(place) => place.send(Message::Cast(message)),
            Err(mpsc::error::TrySendError::Full(())) => return Err(CastError::Full(message)),
            Err(mpsc::error::TrySendError::Closed(())) => return Err(CastError::Ended(message)),
        }
        Ok(())
    }

    /// Sends it a message of any type, and waits while its queue is full. Returns whether the listener was still running. A listener
    /// that does not know the type should log the message and go on.
    pub async fn info(&self, message: impl Any + Send) -> bool {
        self.messages.send(Message::Info(Box::new(message))).await.is_ok()
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

    /// Waits until it has ended for any reason. A listener must not call it for itself: it would never return.
    pub async fn finished(&self) -> StopReason {
        self.control.finished().await
    }

    /// Whether it has ended.
    pub fn is_finished(&self) -> bool {
        self.control.state.borrow().ended.is_some()
    }

    /// The parent to which other listeners can be linked. They end when this listener ends, or all handles on it are dropped.
    pub fn parent(&self) -> &Parent {
        &self.parent
    }
}

impl<M> fmt::Debug for ListenerHandle<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Control { id, name, .. } = &*self.control;
        f.debug_struct("ListenerHandle").field("id", id).field("name", name).finish_non_exhaustive()
    }
}

/// A subscription that passes its deliveries to a callback: the handle on its listener. Dropping it ends the subscription at once;
/// [`ListenerHandle::stop`] lets the present call return, and a durable subscription save its cursor.
#[derive(Debug)]
#[must_use = "dropping the handle ends the subscription"]
pub struct CallbackHandle {
    pub(super) listener: ListenerHandle<()>,
    pub(super) task: AbortHandle,
}

impl Deref for CallbackHandle {
    type Target = ListenerHandle<()>;

    fn deref(&self) -> &ListenerHandle<()> {
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

/// A named listener, and the sender of its messages, whose type only the caller knows.
type Named = (Arc<Control>, Box<dyn Any + Send + Sync>);

#[derive(Default)]
pub(super) struct Listeners {
    /// The parent of those that have no other; it does not end.
    pub parent: Parent,
    tasks: Mutex<JoinSet<()>>,
    names: DashMap<Arc<str>, Named>,
}

impl Listeners {
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task)
    }

    pub fn list<M: Send + 'static>(&self, name: &Arc<str>, handle: &ListenerHandle<M>) -> Result<()> {
        let dashmap::Entry::Vacant(place) = self.names.entry(Arc::clone(name)) else {
            let reason = format!("a listener named {name:?} runs already; stop it first");
            return Err(Error::invalid("listener name", reason));
        };
        place.insert((Arc::clone(&handle.control), Box::new(handle.messages.clone())));
        Ok(())
    }

    pub fn unlist(&self, name: &str, id: SubscriberId) {
        self.names.remove_if(name, |_, (control, _)| control.id == id);
    }

    pub fn find<M: Send + 'static>(&self, name: &str) -> Result<ListenerHandle<M>> {
        let named = self.names.get(name).ok_or_else(|| unknown_listener(name))?;
        let (control, messages) = named.value();
        let Some(messages) = messages.downcast_ref::<mpsc::Sender<Message<M>>>() else {
            return Err(Error::invalid("listener", format!("{name:?} takes messages of another type")));
        };
        let parent = control.keep_parent();
        Ok(ListenerHandle { control: Arc::clone(control), messages: messages.clone(), parent })
    }

    pub async fn stop(&self, name: &str) -> Result<StopReason> {
        let control = self.names.get(name).map(|named| Arc::clone(&named.0));
        Ok(control.ok_or_else(|| unknown_listener(name))?.stop().await)
    }

    /// Waits until all have ended; aborts those that take longer than `limit`.
    pub async fn finish(&self, limit: impl Future<Output = ()>) {
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        tokio::select! {
            () = async { while tasks.join_next().await.is_some() {} } => return,
            () = limit => {}
        }
        tracing::warn!(listeners = tasks.len(), "listeners do not end and are aborted");
        tasks.shutdown().await;
    }
}

fn unknown_listener(name: &str) -> Error {
    Error::NoSubscriber { subscriber: format!("named {name:?}") }
}
