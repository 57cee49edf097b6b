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
    task::{AbortHandle, JoinSet},
};

use super::{Message, StopReason};
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
    },
    roles::dispatcher::{Filter, SubscriberId},
};

/// What a listener can be linked to: it ends when all clones of this are dropped, or [`Parent::end`] is called.
#[derive(Debug, Clone)]
pub struct Parent(Arc<watch::Sender<bool>>);

impl Default for Parent {
    fn default() -> Self {
        Self::new()
    }
}

impl Parent {
    /// One without children.
    pub fn new() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }

    /// Ends the listeners that are linked to it.
    pub fn end(&self) {
        self.0.send_replace(true);
    }

    /// For a child.
    pub(super) fn ending(&self) -> watch::Receiver<bool> {
        self.0.subscribe()
    }

    /// The same parent, without keeping it.
    pub(super) fn downgrade(&self) -> WeakParent {
        WeakParent(Mutex::new(Some(Arc::downgrade(&self.0))))
    }
}

/// The parent that a listener is, without keeping it; `None` in it once the listener has ended.
#[derive(Debug)]
pub(super) struct WeakParent(Mutex<Option<Weak<watch::Sender<bool>>>>);

impl WeakParent {
    /// The parent. No holder of the lock can panic with it half changed.
    fn parent(&self) -> MutexGuard<'_, Option<Weak<watch::Sender<bool>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends its children, those that are still to come as well.
    pub fn end(&self) {
        let parent = self.parent().take();
        if let Some(parent) = parent.and_then(|parent| parent.upgrade()) {
            parent.send_replace(true);
        }
    }

    /// The parent, or a new one in its place if it is gone, and its children with it.
    fn upgrade(&self) -> Parent {
        let mut parent = self.parent();
        let Some(known) = &mut *parent else {
            return Parent(Arc::new(watch::Sender::new(true)));
        };
        known.upgrade().map_or_else(
            || {
                let new = Parent::new();
                *known = Arc::downgrade(&new.0);
                new
            },
            Parent,
        )
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

/// What the supervisor of a listener is told.
#[derive(Debug)]
pub(super) struct Control {
    /// Which subscriber.
    pub id: SubscriberId,
    /// Its name, if it has one.
    pub name: Option<Arc<str>>,
    /// Whether it is to end.
    pub stop: watch::Sender<bool>,
    /// What it is to want; the newest, until it is taken.
    pub filter: watch::Sender<Option<Filter>>,
    /// The last position that somebody waits for it to have worked on.
    pub awaited: watch::Sender<Sequence>,
    /// Up to where it had worked on everything when somebody waited for that.
    pub worked_to: watch::Sender<Sequence>,
    /// Why it has ended, once it has.
    pub ended: watch::Sender<Option<StopReason>>,
    /// What others are linked to.
    pub parent: WeakParent,
    /// The task of its supervisor, once that runs.
    pub task: OnceLock<tokio::task::Id>,
}

impl Control {
    /// Whether this is called by the listener itself.
    pub fn is_own_call(&self) -> bool {
        self.task.get().is_some_and(|task| tokio::task::try_id().as_ref() == Some(task))
    }

    /// Tells it to end, and waits until it has, unless it tells itself.
    async fn stop(&self) -> StopReason {
        self.stop.send_replace(true);
        if self.is_own_call() {
            return StopReason::Shutdown;
        }
        let mut ended = self.ended.subscribe();
        let ended = ended.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
        ended.unwrap_or(StopReason::Shutdown)
    }
}

/// A listener that runs, or has run. Clones are handles on the same one. Dropping them does not end it, but those that are
/// linked to it.
pub struct ListenerHandle<M> {
    /// What its supervisor is told.
    pub(super) control: Arc<Control>,
    /// Where its messages go.
    pub(super) messages: mpsc::Sender<Message<M>>,
    /// What others are linked to.
    pub(super) parent: Parent,
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
        let (mut worked_to, mut ended) = (self.control.worked_to.subscribe(), self.control.ended.subscribe());
        self.control.awaited.send_if_modified(|awaited| {
            let is_later = at > *awaited;
            *awaited = at.max(*awaited);
            is_later
        });
        tokio::select! {
            biased;
            Ok(_) = worked_to.wait_for(|worked_to| *worked_to >= at) => true,
            _ = ended.wait_for(Option::is_some) => false,
        }
    }

    /// Has it want something else from now on, as [`Subscription::replace`](crate::dispatcher::Subscription::replace) says.
    pub fn replace(&self, filter: Filter) {
        self.control.filter.send_replace(Some(filter));
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
        let mut ended = self.control.ended.subscribe();
        let ended = ended.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
        ended.unwrap_or(StopReason::Shutdown)
    }

    /// Whether it has ended.
    pub fn is_finished(&self) -> bool {
        self.control.ended.borrow().is_some()
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

/// A listener that was given a name.
struct Named {
    /// What its supervisor is told.
    control: Arc<Control>,
    /// Where its messages go, as a sender of its type of messages.
    messages: Box<dyn Any + Send + Sync>,
}

/// The listeners of a dispatcher.
#[derive(Default)]
pub(in crate::roles::dispatcher) struct Listeners {
    /// Their tasks.
    tasks: Mutex<JoinSet<()>>,
    /// Those with a name.
    names: DashMap<Arc<str>, Named>,
}

impl Listeners {
    /// The tasks. Nothing is done under the lock that could be left half done.
    fn tasks(&self) -> MutexGuard<'_, JoinSet<()>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `task`.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        let mut tasks = self.tasks();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task)
    }

    /// Lists the listener under its name. Fails if another one has it.
    pub(super) fn list<M: Send + 'static>(&self, name: &Arc<str>, handle: &ListenerHandle<M>) -> Result<()> {
        let dashmap::Entry::Vacant(place) = self.names.entry(Arc::clone(name)) else {
            let reason = format!("a listener named {name:?} runs already; stop it first");
            return Err(Error::invalid("listener name", reason));
        };
        place.insert(Named {
            control: Arc::clone(&handle.control),
            messages: Box::new(handle.messages.clone()),
        });
        Ok(())
    }

    /// Takes the listener `id` off the list.
    pub(super) fn unlist(&self, name: &str, id: SubscriberId) {
        self.names.remove_if(name, |_, named| named.control.id == id);
    }

    /// The listener `name`, whose messages are of the type `M`.
    pub fn find<M: Send + 'static>(&self, name: &str) -> Result<ListenerHandle<M>> {
        let named = self.names.get(name).ok_or_else(|| stranger(name))?;
        let Some(messages) = named.messages.downcast_ref::<mpsc::Sender<Message<M>>>() else {
            return Err(Error::invalid("listener", format!("{name:?} takes messages of another type")));
        };
        let (control, messages) = (Arc::clone(&named.control), messages.clone());
        let parent = control.parent.upgrade();
        Ok(ListenerHandle { control, messages, parent })
    }

    /// Stops the listener `name`, and waits until it has ended.
    pub async fn stop(&self, name: &str) -> Result<StopReason> {
        let control = self.names.get(name).map(|named| Arc::clone(&named.control));
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

impl fmt::Debug for Listeners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Listeners")
    }
}

/// That there is none of this name.
fn stranger(name: &str) -> Error {
    Error::NoSubscriber { subscriber: format!("named {name:?}") }
}

/// How long a shutdown waits for listeners.
pub(in crate::roles::dispatcher) const SHUTDOWN_LIMIT: Duration = Duration::from_secs(10);
