//! [`Dispatcher`]: tails the feed, once per node, and fans out to subscribers in the process.
//!
//! # One path
//!
//! One task ([`tail`]) reads the feed and puts what it reads, in batches, into a [`ring`]. Each batch is matched once: every pattern
//! that subscribers have ([`patterns`]) has a [`log`] of the rows that it matches, found by the names of the rows, whatever the
//! number of patterns. A subscriber is a cursor ([`reader`]): on the log of its pattern, or on the ring itself if it wants
//! everything or asks row by row. It is woken once for what the tail has read at once, reads by reference, and walks only its own rows; so one that is not
//! matched costs nothing, and is never behind.
//!
//! A subscriber whose oldest waiting row has left the ring reads the feed from its cursor, as all do at their start and after a
//! restart. The feed has one row per database, so this is bounded and complete, and a slow subscriber slows nobody. What a
//! subscriber is delivered is always derived from a row and *its own* cursor.
//!
//! # Memory
//!
//! The ring holds at most [`DispatcherOptions::ring_rows_max`] rows and one batch, and a number per row and pattern that it
//! matches. A subscriber holds no more than a batch of [`DispatcherOptions::catch_up_rows_max`] rows, or a round of 256 databases,
//! however much it has still to be delivered: its backlog is the feed.
//!
//! # Restarts
//!
//! Who has subscribed is known apart from the tail: a tail that panics is started again where it was, and a dispatcher that
//! is suspended ([`Dispatcher::suspend`]) and resumed goes on for the same subscribers.

mod autosave;
mod barrier;
mod batch;
mod callback;
mod delivery;
mod fanout;
mod filter;
mod listener;
mod log;
mod mirror;
mod pace;
mod patterns;
mod reader;
mod ring;
mod subscribe;
mod subscription;
mod sync;
mod tail;

use std::{
    fmt,
    sync::{
        Arc, RwLock,
        atomic::{AtomicBool, AtomicU64},
    },
    time::Duration,
};

use dashmap::DashMap;
use tokio::{
    sync::{Semaphore, watch},
    task::JoinHandle,
};

use self::{
    batch::Matched,
    listener::{Events, Listeners},
    log::{Log, SubscriberState},
    patterns::Patterns,
    ring::Ring,
};
pub use self::{
    batch::{DeliveryBatch, Iter as DeliveryIter},
    callback::CallbackHandle,
    delivery::{Delivery, DeliveryRef, Interruption},
    fanout::Fanout,
    filter::Filter,
    listener::{
        CastError, Listen, Listener, ListenerHandle, Message, Missed, Next, Parent, RestartPolicy,
        StopReason, Supervised, Supervision, SupervisionEvents,
    },
    mirror::{Mirror, MirrorView},
    subscribe::Subscribe,
    subscription::{BatchSubscription, Subscription},
};
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
        event::DbName,
    },
    state::{
        context::Context, feed::PAGE_ROWS_MAX, membership::RoleGuard, notification_feed::NotificationFeed,
    },
};

/// The most lagging subscribers that may read the feed at once.
const CATCH_UPS_MAX: usize = 10_000;

/// How a dispatcher works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DispatcherOptions {
    /// The most rows that the ring holds; subscribers further behind read the feed. Default: 65,536.
    pub ring_rows_max: usize,
    /// The most rows that the tail reads at once, 1 to 10,000. Default: 1,000.
    pub page_rows_max: usize,
    /// How often the tail looks for rows that no hint has told of. Default: 1 s.
    pub poll_interval: Duration,
    /// How many lagging subscribers read the feed at once, 1 to 10,000; others wait for their turn. Default: 8.
    pub catch_ups_max: usize,
    /// The most rows that a lagging subscriber reads at once, and of a batch of the ring: what a subscriber holds while it rests. 1 to
    /// 10,000; what is above [`DispatcherOptions::page_rows_max`] counts as that. Default: 256.
    pub catch_up_rows_max: usize,
}

impl Default for DispatcherOptions {
    fn default() -> Self {
        Self {
            ring_rows_max: 65_536,
            page_rows_max: 1_000,
            poll_interval: Duration::from_secs(1),
            catch_ups_max: 8,
            catch_up_rows_max: 256,
        }
    }
}

impl DispatcherOptions {
    /// Fails if an option is out of its limits.
    fn check(&self) -> Result<()> {
        if self.ring_rows_max == 0 {
            return Err(Error::invalid("ring_rows_max", "it is zero"));
        }
        for (what, rows) in
            [("page_rows_max", self.page_rows_max), ("catch_up_rows_max", self.catch_up_rows_max)]
        {
            if !(1..=PAGE_ROWS_MAX).contains(&rows) {
                return Err(Error::invalid(what, format!("{rows} is not 1 to {PAGE_ROWS_MAX}")));
            }
        }
        if self.poll_interval.is_zero() {
            return Err(Error::invalid("poll_interval", "it is zero"));
        }
        if !(1..=CATCH_UPS_MAX).contains(&self.catch_ups_max) {
            let reason = format!("{} is not 1 to {CATCH_UPS_MAX}", self.catch_ups_max);
            return Err(Error::invalid("catch_ups_max", reason));
        }
        Ok(())
    }
}

/// Which subscriber of a dispatcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SubscriberId(u64);

impl fmt::Display for SubscriberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What the tail and the subscribers share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// What the roles share.
    context: Arc<Context>,
    /// Where lagging subscribers read.
    feed: NotificationFeed,
    /// The recent batches.
    ring: Ring,
    /// The log of those who walk the ring.
    everything: Log<Matched>,
    /// The patterns of all others.
    patterns: Patterns,
    /// Held to write while a batch is matched, and to read while a pattern is added.
    matching: RwLock<()>,
    /// All subscribers.
    subscribers: DashMap<SubscriberId, Arc<SubscriberState>>,
    /// The id of the next one.
    next_id: AtomicU64,
    /// Up to where the ring has everything; the barriers wait for it.
    known: watch::Sender<Sequence>,
    /// Whether all were closed.
    is_closed: AtomicBool,
    /// Limits how many subscribers read the feed at once.
    turns: Semaphore,
    /// The most rows that one of them reads at once, and of a batch of the ring.
    batch_rows_max: usize,
    /// The supervised subscribers.
    listeners: Listeners,
    /// What becomes of them.
    events: Events,
}

/// A running dispatcher. Dropping it, or [`Dispatcher::shutdown`], ends its subscriptions after what they have been given.
#[derive(Debug)]
#[must_use = "dropping it ends its subscriptions"]
pub struct Dispatcher {
    /// The tail. It goes before what it fills.
    tail: Tail,
    /// Hands out what the tail reads.
    fanout: Fanout,
    /// How it works.
    options: DispatcherOptions,
    /// Its place among the roles of its node, if it was started from one.
    role: Option<RoleGuard>,
}

/// The task of the tail. Dropping it ends it.
#[derive(Debug)]
struct Tail(JoinHandle<()>);

impl Drop for Tail {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Tail {
    /// Ends it, and waits until it has.
    async fn end(mut self) {
        self.0.abort();
        if let Err(error) = (&mut self.0).await
            && error.is_panic()
        {
            tracing::error!(%error, "the tail has panicked");
        }
    }
}

/// A dispatcher that does not read the feed. Its subscribers are still there, and hear nothing until it is resumed. Dropping
/// it ends them.
#[derive(Debug)]
pub struct SuspendedDispatcher {
    /// The subscribers.
    fanout: Fanout,
    /// How it works.
    options: DispatcherOptions,
    /// Its place among the roles of its node.
    role: Option<RoleGuard>,
}

impl SuspendedDispatcher {
    /// Goes on where it was: nothing that has happened meanwhile is missed. Subscribers that it was suspended for too long
    /// for are told that they have expired.
    pub fn resume(self) -> Dispatcher {
        let Self { fanout, options, role } = self;
        Dispatcher::run(fanout, options, role)
    }

    /// How many subscriptions there are.
    pub fn subscribers(&self) -> usize {
        self.fanout.subscribers()
    }
}

impl Dispatcher {
    /// Starts the tail at the end of the feed. Its node lists it under `role` as long as it runs.
    pub(crate) async fn start(
        context: Arc<Context>,
        options: DispatcherOptions,
        role: Option<RoleGuard>,
    ) -> Result<Self> {
        options.check()?;
        let start = NotificationFeed::new(Arc::clone(&context), context.feed.clone()).now().await?;
        Ok(Self::run(Fanout::new(context, &options, start)?, options, role))
    }

    /// Starts a tail where `fanout` stands.
    fn run(fanout: Fanout, options: DispatcherOptions, role: Option<RoleGuard>) -> Self {
        let tail = tokio::spawn(tail::run(Arc::clone(fanout.shared()), options.clone()));
        Self { tail: Tail(tail), fanout, options, role }
    }

    /// Subscribes to the databases that `filter` matches. Choose where to start and how to receive on what is returned.
    pub fn subscribe(&self, filter: Filter) -> Subscribe {
        self.fanout.subscribe(filter)
    }

    /// Ends the subscriber `id`: its stream ends, its callback or listener is told to. Fails with [`Error::NoSubscriber`] if
    /// there is none, or not any more.
    pub fn unsubscribe(&self, id: SubscriberId) -> Result<()> {
        self.fanout.unsubscribe(id)
    }

    /// The listener `name`, whose messages are of the type `M`. Fails with [`Error::NoSubscriber`] if there is none, and with
    /// [`Error::Invalid`] if its messages are of another type.
    pub fn listener<M: Send + 'static>(&self, name: &str) -> Result<ListenerHandle<M>> {
        self.fanout.shared().listeners.find(name)
    }

    /// Stops the listener `name`, and waits until it has terminated. Fails with [`Error::NoSubscriber`] if there is none.
    pub async fn stop_listener(&self, name: &str) -> Result<StopReason> {
        self.fanout.shared().listeners.stop(name).await
    }

    /// What becomes of listeners and callbacks from now on.
    pub fn supervision(&self) -> SupervisionEvents {
        self.fanout.shared().events.listen()
    }

    /// A mirror of the living databases that `filter` matches. Fails with [`Error::Invalid`] if it does not want all kinds of
    /// events, or has a predicate.
    pub fn mirror(&self, filter: Filter) -> Result<Mirror> {
        Mirror::start(self.fanout.shared(), filter)
    }

    /// A freshness barrier: waits until every event that was committed at the version `version` or before
    /// ([`Versionstamp::version`](crate::event::Versionstamp::version) of the commit) is folded, and the tail has handed out its row.
    /// Returns a position: whoever has worked on everything up to there knows all of these events
    /// ([`ListenerHandle::reached`], [`Mirror::reached`]).
    ///
    /// It takes notifiers at work, and waits for as long as there are none. While it waits it reads the store every few
    /// milliseconds, the rows of databases with events that were not folded when it began.
    ///
    /// Fails with [`Error::Invalid`] if the version is ahead of the store, and with [`Error::NoSubscriber`] if the dispatcher ends
    /// before.
    pub async fn reached(&self, version: u64) -> Result<Sequence> {
        self.fanout.shared().reached(version).await
    }

    /// Up to where the tail has read the feed.
    pub fn position(&self) -> Sequence {
        self.fanout.position()
    }

    /// How many subscriptions there are now, those of dropped streams and handles not among them.
    pub fn subscribers(&self) -> usize {
        self.fanout.subscribers()
    }

    /// How many subscriptions name the database `name` exactly.
    pub fn subscribers_of(&self, name: &DbName) -> usize {
        self.fanout.shared().patterns.subscribers_of(name.as_str())
    }

    /// What the roles share.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.fanout.shared().context
    }

    /// Stops reading the feed, and keeps the subscribers: [`SuspendedDispatcher::resume`] goes on for them.
    pub async fn suspend(self) -> SuspendedDispatcher {
        let Self { tail, fanout, options, role } = self;
        tail.end().await;
        SuspendedDispatcher { fanout, options, role }
    }

    /// Stops the tail, and ends the subscriptions after what they have been given. Listeners terminate; one that takes longer
    /// than 10 s is aborted.
    pub async fn shutdown(self) {
        let Self { tail, fanout, .. } = self;
        tail.end().await;
        let shared = Arc::clone(fanout.shared());
        drop(fanout);
        shared.listeners.finish(shared.context.env().sleep(listener::SHUTDOWN_LIMIT)).await;
    }
}
