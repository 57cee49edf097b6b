//! [`Dispatcher`]: tails the feed, once per node, and fans out to subscribers in the process.
//!
//! # How
//!
//! One task ([`tail`]) reads the feed and puts what it reads into a [`ring::Ring`] of recent batches. Subscribers of
//! everything and of patterns walk the ring, each with a cursor of its own; a row is shared, never copied, and a batch
//! wakes each walker once. Subscribers of exact names are looked up in a map instead: each has one slot per name, which
//! holds the newest row, so an event costs what its matching subscribers cost, whatever the number of the others
//! ([`registry`]).
//!
//! # Lagging
//!
//! The ring is bounded. A subscriber that falls behind it reads the feed itself, from its cursor, until it has caught up.
//! The feed has one row per database, so this is bounded and complete, and a slow subscriber costs no memory and slows
//! nobody. What a subscriber is told is always derived from a row and *its own* cursor, so it is right after a thousand
//! coalesced updates as well as after one.

mod callback;
mod fanout;
mod filter;
mod registry;
mod ring;
mod slots;
mod subscribe;
mod tail;
mod walker;

use std::{sync::Arc, time::Duration};

use tokio::{sync::Semaphore, task::JoinHandle};

pub use callback::CallbackHandle;
pub use fanout::Fanout;
pub use filter::Filter;
pub use subscribe::{Delivery, Interruption, Since, Subscribe, Subscription};

use self::{registry::Registry, ring::Ring};
use crate::{
    context::Context,
    encoding::Sequence,
    error::{Error, Result},
    feed::PAGE_ROWS_MAX,
    lease::RoleGuard,
    notification_feed::NotificationFeed,
};

/// How a dispatcher works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DispatcherOptions {
    /// The most rows that the ring holds; subscribers further behind read the feed. Default: 65,536.
    pub ring_rows_max: usize,
    /// The most rows that the tail reads at once, 1 to 10,000. Default: 1,000.
    pub page_rows_max: usize,
    /// How often the tail looks for rows that no hint has told of. Default: 1 s.
    pub poll_interval: Duration,
    /// How many lagging subscribers read the feed at once; others wait for their turn. Default: 8.
    pub catch_ups_max: usize,
}

impl Default for DispatcherOptions {
    fn default() -> Self {
        Self {
            ring_rows_max: 65_536,
            page_rows_max: 1_000,
            poll_interval: Duration::from_secs(1),
            catch_ups_max: 8,
        }
    }
}

impl DispatcherOptions {
    /// Fails if an option is out of its limits.
    fn check(&self) -> Result<()> {
        if self.ring_rows_max == 0 {
            return Err(Error::invalid("ring rows", "it is zero"));
        }
        if !(1..=PAGE_ROWS_MAX).contains(&self.page_rows_max) {
            return Err(Error::invalid(
                "page rows",
                format!("{} is not 1 to {PAGE_ROWS_MAX}", self.page_rows_max),
            ));
        }
        if self.poll_interval.is_zero() {
            return Err(Error::invalid("poll interval", "it is zero"));
        }
        if self.catch_ups_max == 0 {
            return Err(Error::invalid("catch-ups", "it is zero"));
        }
        Ok(())
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
    /// Subscribers of exact names.
    registry: Registry,
    /// Limits how many lagging subscribers read the feed at once.
    catch_ups: Semaphore,
    /// The most rows that are read at once.
    page_rows_max: usize,
}

/// A running dispatcher. Dropping it, or [`Dispatcher::shutdown`], ends its subscriptions after what they have been given.
#[derive(Debug)]
pub struct Dispatcher {
    /// Hands out what the tail reads.
    fanout: Fanout,
    /// The tail.
    tail: JoinHandle<()>,
    /// Its place among the roles of its node, if it was started from one.
    _role: Option<RoleGuard>,
}

impl Dispatcher {
    /// Starts the tail at the end of the feed. Its node lists it under `role` as long as it runs.
    pub(crate) async fn start(
        context: Arc<Context>,
        options: DispatcherOptions,
        role: Option<RoleGuard>,
    ) -> Result<Self> {
        let feed = NotificationFeed::new(Arc::clone(&context), context.feed.clone());
        let start = feed.now().await?;
        let fanout = Fanout::new(context, &options, start)?;
        let tail =
            feed.tail(start).with_limit(options.page_rows_max).with_poll_interval(options.poll_interval);
        let tail = tokio::spawn(tail::run(Arc::clone(fanout.shared()), tail));
        Ok(Self { fanout, tail, _role: role })
    }

    /// Subscribes to the databases that `filter` matches. Choose where to start and how to receive on what is returned.
    pub fn subscribe(&self, filter: Filter) -> Subscribe {
        self.fanout.subscribe(filter)
    }

    /// Up to where the tail has read the feed.
    pub fn position(&self) -> Sequence {
        self.fanout.position()
    }

    /// How many subscriptions there are now, those of dropped streams and handles not among them.
    pub fn subscribers(&self) -> usize {
        self.fanout.subscribers()
    }

    /// Stops the tail, and ends the subscriptions after what they have been given.
    pub async fn shutdown(mut self) {
        self.tail.abort();
        if let Err(error) = (&mut self.tail).await
            && error.is_panic()
        {
            tracing::error!(%error, "the tail has panicked");
        }
    }
}

impl Drop for Dispatcher {
    fn drop(&mut self) {
        self.tail.abort();
    }
}
