//! [`Dispatcher`]: a running dispatcher with its tail; and [`SuspendedDispatcher`]: one without, which keeps its subscribers.

use std::sync::Arc;

use super::{
    fanout::Fanout,
    listener::{ListenerHandle, SHUTDOWN_LIMIT, StopReason, SupervisionEvents},
    log::SubscriberId,
    subscribe::Subscribe,
    tail,
};
#[cfg(doc)]
use crate::base::error::Error;
use crate::{
    base::{encoding::Sequence, error::Result, event::DbName, filter::Filter, tasks::Task},
    state::context::Context,
};

/// A running dispatcher. Dropping it, or [`Dispatcher::shutdown`], ends its subscriptions after the deliveries that wait for them.
#[derive(Debug)]
#[must_use = "dropping it ends its subscriptions"]
pub struct Dispatcher {
    /// Dropped before the fan-out that it fills.
    tail: Task<()>,
    suspended: SuspendedDispatcher,
}

/// A dispatcher that does not read the feed. Its subscribers receive nothing until it is resumed. Dropping
/// it ends them.
#[derive(Debug)]
pub struct SuspendedDispatcher(Fanout);

impl SuspendedDispatcher {
    /// Continues where it was. Nothing that has happened meanwhile is missed, unless the dispatcher was suspended for longer than the
    /// retention: then subscribers get
    /// [`Interruption::Expired`](super::Interruption).
    pub fn resume(self) -> Dispatcher {
        let tail = tail::run(Arc::clone(self.0.shared()));
        Dispatcher { tail: Task::spawn(tail), suspended: self }
    }

    /// Number of subscriptions.
    pub fn subscribers(&self) -> usize {
        self.0.subscribers()
    }
}

impl Dispatcher {
    /// Starts the tail of `fanout`.
    pub(crate) fn start(fanout: Fanout) -> Self {
        SuspendedDispatcher(fanout).resume()
    }

    fn fanout(&self) -> &Fanout {
        &self.suspended.0
    }

    /// Subscribes to the databases that `filter` matches. Choose the start and the way of receiving on the returned value.
    pub fn subscribe(&self, filter: Filter) -> Subscribe {
        self.fanout().subscribe(filter)
    }

    /// Ends the subscriber `id`: its stream ends, or its callback or listener is stopped. Fails with [`Error::NoSubscriber`] if
    /// there is no such subscriber or it has ended.
    pub fn unsubscribe(&self, id: SubscriberId) -> Result<()> {
        self.fanout().unsubscribe(id)
    }

    /// Finds the listener `name`, whose messages are of the type `M`. Fails with [`Error::NoSubscriber`] if there is none, and with
    /// [`Error::Invalid`] if its messages are of another type.
    pub fn listener<M: Send + 'static>(&self, name: &str) -> Result<ListenerHandle<M>> {
        self.fanout().shared().listeners.find(name)
    }

    /// Stops the listener `name`, and waits until it has terminated. Fails with [`Error::NoSubscriber`] if there is none.
    pub async fn stop_listener(&self, name: &str) -> Result<StopReason> {
        self.fanout().shared().listeners.stop(name).await
    }

    /// Events of listeners and callbacks from now on.
    pub fn supervision(&self) -> SupervisionEvents {
        (&self.fanout().shared().supervision).into()
    }

    /// A freshness barrier: waits until every event that was committed at the version `version` or before
    /// ([`Versionstamp::version`](crate::event::Versionstamp::version) of the commit) is folded, and the tail has published its row.
    /// Returns a position. A subscriber that has worked on everything up to there knows all of these events
    /// ([`ListenerHandle::reached`], [`Mirror::reached`](crate::dispatcher::Mirror::reached)).
    ///
    /// It needs running notifiers, and waits while there are none. While it waits it reads from the store, every few
    /// milliseconds, the rows of databases that had unfolded events when it began.
    ///
    /// Fails with [`Error::Invalid`] if the version is ahead of the store, and with [`Error::NoSubscriber`] if the dispatcher ends
    /// before.
    pub async fn reached(&self, version: u64) -> Result<Sequence> {
        self.fanout().shared().reached(version).await
    }

    /// The position up to which the tail has read the feed.
    pub fn position(&self) -> Sequence {
        self.fanout().position()
    }

    /// Number of present subscriptions, without those whose stream or handle was dropped.
    pub fn subscribers(&self) -> usize {
        self.fanout().subscribers()
    }

    /// Number of subscriptions that name the database `name` exactly.
    pub fn subscribers_of(&self, name: &DbName) -> usize {
        self.fanout().shared().patterns.lock().subscribers_of(name.as_str())
    }

    /// A handle that does not keep the dispatcher running: its subscriptions end with the dispatcher.
    pub(crate) fn subscriptions(&self) -> Fanout {
        self.fanout().handle()
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.fanout().shared().context
    }

    /// Stops reading the feed, and keeps the subscribers; [`SuspendedDispatcher::resume`] continues for them.
    pub fn suspend(self) -> SuspendedDispatcher {
        self.suspended
    }

    /// Stops the tail, and ends the subscriptions after the deliveries that wait for them. A listener that takes longer
    /// than 10 s to terminate is aborted.
    pub async fn shutdown(self) {
        let Self { tail, suspended: SuspendedDispatcher(fanout) } = self;
        let shared = Arc::clone(fanout.shared());
        drop(tail);
        drop(fanout);
        shared.listeners.finish(shared.context.env().sleep(SHUTDOWN_LIMIT)).await;
    }
}
