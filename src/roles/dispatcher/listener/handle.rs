//! [`ListenerHandle`]: how others deal with a listener.

use std::{
    any::Any,
    fmt,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    time::Duration,
};

use dashmap::DashMap;
use tokio::{
    sync::{mpsc, watch},
    task::{self, AbortHandle, JoinSet},
};

use super::{
    super::log::SubscriberId,
    behaviour::{Message, StopReason},
};
use crate::base::{
    encoding::Sequence,
    error::{Error, Result},
    filter::Filter,
};

/// How long a shutdown waits for listeners.
pub(in super::super) const SHUTDOWN_LIMIT: Duration = Duration::from_secs(10);

/// What a listener can be linked to: it ends when all clones of this are dropped, or [`Parent::end`] is called.
#[derive(Debug, Clone, Default)]
pub struct Parent(Arc<watch::Sender<bool>>);

impl Parent {
    /// One without children.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends the listeners that are linked to it.
    pub fn end(&self) {
        self.0.send_replace(true);
    }

    /// For a child: true, or an error, once it is to end.
    pub(in super::super) fn ending(&self) -> watch::Receiver<bool> {
        self.0.subscribe()
    }
}

/// A message was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CastError<M> {
    /// As many as it may have are waiting: try again later.
    #[error("the listener has too many messages waiting")]
    Full(M),
    /// The listener has ended.
    #[error("the listener has ended")]
    Ended(M),
}

/// What a listener is told.
#[derive(Debug, Default)]
pub(in super::super) struct Orders {
    pub stop: bool,
    /// What it is to want; the newest, until it is taken.
    pub filter: Option<Filter>,
    /// The last position that somebody waits for it to have worked on.
    pub awaited: Option<Sequence>,
}

/// What has become of a listener.
#[derive(Debug, Default)]
pub(in super::super) struct Report {
    /// Up to where it had worked on everything when somebody waited for that.
    pub worked_to: Option<Sequence>,
    pub ended: Option<StopReason>,
}

/// What a listener and those who deal with it share.
#[derive(Debug)]
pub(in super::super) struct Control {
    pub id: SubscriberId,
    pub name: Option<Arc<str>>,
    pub orders: watch::Sender<Orders>,
    pub report: watch::Sender<Report>,
    /// The parent that it is, without keeping it.
    parent: Mutex<Weak<watch::Sender<bool>>>,
    /// The task of its supervisor, once that runs.
    pub task: OnceLock<task::Id>,
}

impl Control {
    /// What a new listener shares, and the parent that it is.
    pub fn new(id: SubscriberId, name: Option<Arc<str>>) -> (Self, Parent) {
        let (orders, report, parent) = (watch::Sender::default(), watch::Sender::default(), Parent::new());
        let weak = Mutex::new(Arc::downgrade(&parent.0));
        (Self { id, name, orders, report, parent: weak, task: OnceLock::new() }, parent)
    }

    /// Tells it to end, and waits until it has, unless it tells itself.
    async fn stop(&self) -> StopReason {
        self.orders.send_modify(|orders| orders.stop = true);
        if self.task.get().is_some_and(|task| task::try_id().as_ref() == Some(task)) {
            return StopReason::Shutdown;
        }
        self.finished().await
    }

    /// Waits until it has ended.
    async fn finished(&self) -> StopReason {
        let mut report = self.report.subscribe();
        let report = report.wait_for(|report| report.ended.is_some()).await.ok();
        report.and_then(|report| report.ended.clone()).unwrap_or(StopReason::Shutdown)
    }

    /// It has ended, for `reason` if it has not said one, and its children with it: those that are still to come as well.
    pub fn end(&self, reason: StopReason) {
        self.report.send_modify(|report| report.ended = report.ended.take().or(Some(reason)));
        let parent = self.parent().upgrade();
        if let Some(parent) = parent {
            parent.send_replace(true);
        }
    }

    /// No holder of the lock can panic with it half changed.
    fn parent(&self) -> MutexGuard<'_, Weak<watch::Sender<bool>>> {
        self.parent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The parent that it is, or a new one in its place if that is gone, and its children with it.
    fn keep_parent(&self) -> Parent {
        let mut known = self.parent();
        if let Some(parent) = known.upgrade() {
            return Parent(parent);
        }
        // Under the lock: who ends the listener now finds the new one.
        let new = Parent(Arc::new(watch::Sender::new(self.report.borrow().ended.is_some())));
        *known = Arc::downgrade(&new.0);
        new
    }
}

/// A listener that runs, or has run. Clones are handles on the same one. Dropping them does not end it, but those that are
/// linked to it.
pub struct ListenerHandle<M> {
    pub(in super::super) control: Arc<Control>,
    pub(in super::super) messages: mpsc::Sender<Message<M>>,
    pub(in super::super) parent: Parent,
}

impl<M> Clone for ListenerHandle<M> {
    fn clone(&self) -> Self {
        let Self { control, messages, parent } = self;
        Self { control: Arc::clone(control), messages: messages.clone(), parent: parent.clone() }
    }
}

impl<M: Send + 'static> ListenerHandle<M> {
    /// Which subscriber it is.
    pub fn id(&self) -> SubscriberId {
        self.control.id
    }

    /// Its name, if it has one.
    pub fn name(&self) -> Option<&str> {
        self.control.name.as_deref()
    }

    /// Sends it `message`, and waits if as many as it may have are waiting.
    ///
    /// Fails with [`CastError::Ended`] if it has ended. If it ends, or panics, before it has looked at the message, the message
    /// is lost.
    pub async fn cast(&self, message: M) -> Result<(), CastError<M>> {
        self.messages.send(Message::Cast(message)).await.map_err(|error| match error.0 {
            Message::Cast(message) => CastError::Ended(message),
            _ => unreachable!("the message that was sent comes back"),
        })
    }

    /// Sends it `message` if there is room.
    pub fn try_cast(&self, message: M) -> Result<(), CastError<M>> {
        self.messages.try_send(Message::Cast(message)).map_err(|error| match error {
            mpsc::error::TrySendError::Full(Message::Cast(message)) => CastError::Full(message),
            mpsc::error::TrySendError::Closed(Message::Cast(message)) => CastError::Ended(message),
            _ => unreachable!("the message that was sent comes back"),
        })
    }

    /// Sends it a message of any type, and waits if as many as it may have are waiting. Whether it was still there to take
    /// it. One that does not know the type is expected to note it and to go on.
    pub async fn info(&self, message: impl Any + Send) -> bool {
        self.messages.send(Message::Info(Box::new(message))).await.is_ok()
    }

    /// Waits until it has worked on everything up to `at`, which the tail of its dispatcher has reached:
    /// [`Dispatcher::reached`](crate::Dispatcher::reached) returns such a position. Whether it has: false if it has ended before.
    pub async fn reached(&self, at: Sequence) -> bool {
        self.control.orders.send_if_modified(|orders| {
            let is_later = orders.awaited < Some(at);
            orders.awaited = orders.awaited.max(Some(at));
            is_later
        });
        let mut report = self.control.report.subscribe();
        let has = |report: &Report| report.worked_to >= Some(at);
        let told = report.wait_for(|report| has(report) || report.ended.is_some()).await;
        told.is_ok_and(|report| has(&report))
    }

    /// Has it want something else from now on, as [`Subscription::replace`](crate::dispatcher::Subscription::replace) says.
    pub fn replace(&self, filter: Filter) {
        self.control.orders.send_modify(|orders| orders.filter = Some(filter));
    }

    /// Lets it finish the call that it is in, has it terminate, and waits until it has. Says why it has ended: perhaps for
    /// another reason before.
    ///
    /// Called by the listener itself, from the task that it is called in, it does not wait: the call that the listener is in
    /// is the last one, and then it terminates.
    pub async fn stop(&self) -> StopReason {
        self.control.stop().await
    }

    /// Waits until it has ended, for whatever reason. Not for the listener itself, which would wait for itself.
    pub async fn finished(&self) -> StopReason {
        self.control.finished().await
    }

    /// Whether it has ended.
    pub fn is_finished(&self) -> bool {
        self.control.report.borrow().ended.is_some()
    }

    /// What other listeners can be linked to: they end when this one does, and when all handles on it are dropped.
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

/// A listener with a name, and the sender of its messages, which is one of their type.
type Named = (Arc<Control>, Box<dyn Any + Send + Sync>);

/// The listeners of a dispatcher.
#[derive(Default)]
pub(in super::super) struct Listeners {
    tasks: Mutex<JoinSet<()>>,
    names: DashMap<Arc<str>, Named>,
}

impl Listeners {
    /// Nothing is done under the lock that could be left half done.
    fn tasks(&self) -> MutexGuard<'_, JoinSet<()>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        let mut tasks = self.tasks();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task)
    }

    /// Lists the listener under its name. Fails if another one has it.
    pub fn list<M: Send + 'static>(&self, name: &Arc<str>, handle: &ListenerHandle<M>) -> Result<()> {
        let dashmap::Entry::Vacant(place) = self.names.entry(Arc::clone(name)) else {
            let reason = format!("a listener named {name:?} runs already; stop it first");
            return Err(Error::invalid("listener name", reason));
        };
        place.insert((Arc::clone(&handle.control), Box::new(handle.messages.clone())));
        Ok(())
    }

    /// Takes the listener `id` off the list.
    pub fn unlist(&self, name: &str, id: SubscriberId) {
        self.names.remove_if(name, |_, (control, _)| control.id == id);
    }

    /// The listener `name`, whose messages are of the type `M`.
    pub fn find<M: Send + 'static>(&self, name: &str) -> Result<ListenerHandle<M>> {
        let named = self.names.get(name).ok_or_else(|| stranger(name))?;
        let (control, messages) = named.value();
        let Some(messages) = messages.downcast_ref::<mpsc::Sender<Message<M>>>() else {
            return Err(Error::invalid("listener", format!("{name:?} takes messages of another type")));
        };
        let parent = control.keep_parent();
        Ok(ListenerHandle { control: Arc::clone(control), messages: messages.clone(), parent })
    }

    /// Stops the listener `name`, and waits until it has ended.
    pub async fn stop(&self, name: &str) -> Result<StopReason> {
        let control = self.names.get(name).map(|named| Arc::clone(&named.0));
        Ok(control.ok_or_else(|| stranger(name))?.stop().await)
    }

    /// Waits until all have ended; those that take longer than `limit` are aborted.
    pub async fn finish(&self, limit: impl Future<Output = ()>) {
        let mut tasks = std::mem::take(&mut *self.tasks());
        let all = async { while tasks.join_next().await.is_some() {} };
        let in_time = tokio::select! {
            () = all => true,
            () = limit => false,
        };
        if !in_time {
            tracing::warn!(listeners = tasks.len(), "listeners do not end and are aborted");
            tasks.shutdown().await;
        }
    }
}

/// That there is none of this name.
fn stranger(name: &str) -> Error {
    Error::NoSubscriber { subscriber: format!("named {name:?}") }
}
