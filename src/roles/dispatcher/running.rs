//! [`Dispatcher`]: a running dispatcher with its tail; and [`Fanout`]: one without.

use std::sync::Arc;

use super::{
    handle::{ListenerHandle, SHUTDOWN_LIMIT},
    listener::StopReason,
    log::SubscriberId,
    options::DispatcherOptions,
    shared::Shared,
    subscribe::Subscribe,
    supervision::SupervisionEvents,
    tail,
};
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
        event::DbName,
        filter::Filter,
        notification::Notification,
        tasks::Task,
    },
    state::context::Context,
};

/// A dispatcher without the tail that reads the feed: it was suspended, or tests and benchmarks push its rows. Dropping it ends its
/// subscriptions after the deliveries that wait for them.
#[derive(Debug)]
#[must_use = "dropping it ends its subscriptions"]
pub struct Fanout {
    shared: Arc<Shared>,
    /// Whether dropping it ends the subscriptions.
    is_owner: bool,
}

impl Fanout {
    pub(crate) fn new(context: Arc<Context>, options: DispatcherOptions, start: Sequence) -> Result<Self> {
        options.check()?;
        Ok(Self { shared: Shared::new(context, options, start), is_owner: true })
    }

    #[cfg(test)]
    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Starts the tail, which continues at the present position. Nothing that has happened meanwhile is missed, unless the dispatcher was
    /// suspended for longer than the retention: then subscribers get [`Interruption::Expired`](super::Interruption).
    pub fn resume(self) -> Dispatcher {
        Dispatcher { tail: Task::spawn(tail::run(Arc::clone(&self.shared))), fanout: self }
    }

    /// As [`Dispatcher::reached`].
    pub(crate) async fn reached(&self, version: u64) -> Result<Sequence> {
        self.shared.reached(version).await
    }

    /// As [`Dispatcher::subscribe`].
    pub fn subscribe(&self, filter: Filter) -> Subscribe {
        Subscribe::new(Arc::clone(&self.shared), filter)
    }

    /// Publishes `rows` as if a tail had read them, and had read everything up to `to`. The rows must be in order, after the
    /// present position and not after `to`; fails with [`Error::Invalid`] otherwise. For one caller at a time.
    pub fn push(&self, rows: Vec<Arc<Notification>>, to: Sequence) -> Result<()> {
        let from = self.position();
        let ends = rows.first().map_or(to, |row| row.sequence)..=rows.last().map_or(to, |row| row.sequence);
        if !rows.is_sorted_by(|a, b| a.sequence < b.sequence) || *ends.start() <= from || *ends.end() > to {
            return Err(Error::invalid("rows", format!("they are not in order between {from} and {to}")));
        }
        self.shared.publish(rows, to, true);
        Ok(())
    }

    /// The position up to which rows have been published.
    pub fn position(&self) -> Sequence {
        self.shared.ring.read().position()
    }

    /// As [`Dispatcher::subscribers`].
    pub fn subscribers(&self) -> usize {
        self.shared.count()
    }
}

impl Drop for Fanout {
    fn drop(&mut self) {
        if self.is_owner {
            self.shared.close();
        }
    }
}

/// A running dispatcher. Dropping it, or [`Dispatcher::shutdown`], ends its subscriptions after the deliveries that wait for them.
#[derive(Debug)]
#[must_use = "dropping it ends its subscriptions"]
pub struct Dispatcher {
    /// Dropped before the fan-out that it fills.
    tail: Task<()>,
    fanout: Fanout,
}

impl Dispatcher {
    fn shared(&self) -> &Arc<Shared> {
        &self.fanout.shared
    }

    /// Subscribes to the databases that `filter` matches. Choose the start and the way of receiving on the returned value.
    pub fn subscribe(&self, filter: Filter) -> Subscribe {
        self.fanout.subscribe(filter)
    }

    /// Ends the subscriber `id`: its stream ends, or its callback or listener is stopped. Fails with [`Error::NoSubscriber`] if
    /// there is no such subscriber or it has ended.
    pub fn unsubscribe(&self, id: SubscriberId) -> Result<()> {
        self.shared().end(id)
    }

    /// Finds the listener `name`, whose messages are of the type `M`. Fails with [`Error::NoSubscriber`] if there is none, and with
    /// [`Error::Invalid`] if its messages are of another type.
    pub fn listener<M: Send + 'static>(&self, name: &str) -> Result<ListenerHandle<M>> {
        self.shared().listeners.find(name)
    }

    /// Stops the listener `name`, and waits until it has terminated. Fails with [`Error::NoSubscriber`] if there is none.
    pub async fn stop_listener(&self, name: &str) -> Result<StopReason> {
        self.shared().listeners.stop(name).await
    }

    /// Events of listeners and callbacks from now on.
    pub fn supervision(&self) -> SupervisionEvents {
        (&self.shared().supervision).into()
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
        self.shared().reached(version).await
    }

    /// The position up to which the tail has read the feed.
    pub fn position(&self) -> Sequence {
        self.fanout.position()
    }

    /// Number of present subscriptions, without those whose stream or handle was dropped.
    pub fn subscribers(&self) -> usize {
        self.fanout.subscribers()
    }

    /// Number of subscriptions that name the database `name` exactly.
    pub fn subscribers_of(&self, name: &DbName) -> usize {
        self.shared().patterns.lock().subscribers_of(name.as_str())
    }

    /// A handle that does not keep the dispatcher running: its subscriptions end with the dispatcher.
    pub(crate) fn subscriptions(&self) -> Fanout {
        Fanout { shared: Arc::clone(self.shared()), is_owner: false }
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.shared().context
    }

    /// Stops reading the feed, and keeps the subscribers; [`Fanout::resume`] continues for them.
    pub fn suspend(self) -> Fanout {
        self.fanout
    }

    /// Stops the tail, and ends the subscriptions after the deliveries that wait for them. A listener that takes longer
    /// than 10 s to terminate is aborted.
    pub async fn shutdown(self) {
        let Self { tail, fanout } = self;
        let shared = Arc::clone(&fanout.shared);
        drop(tail);
        drop(fanout);
        shared.listeners.finish(shared.context.env().sleep(SHUTDOWN_LIMIT)).await;
    }
}
