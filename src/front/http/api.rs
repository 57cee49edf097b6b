//! [`Api`] holds what all routers share.

use std::sync::Arc;

use axum::http::Extensions;
use tokio::sync::{Semaphore, watch};

use super::{
    ApiOptions, Failure, admission::Admission, answer_counts::AnswerCounts, bodies::Bodies,
    name_locks::NameLocks, query::Mode, stream::FeedContext,
};
use crate::{
    base::{env::Env, error::Result, health::EndsWithBus},
    bus::Bus,
    roles::dispatcher::Dispatcher,
    state::notification_feed::NotificationFeed,
};

/// The state that all routers share. Clones share it, too.
///
/// Live feeds end with [`Api::shutdown`], or when the last handle and the last router are dropped.
#[derive(Clone)]
pub struct Api {
    pub(super) inner: Arc<Inner>,
}

/// The state that all feeds share.
pub(super) struct Inner {
    pub bus: Bus,
    pub dispatcher: Dispatcher,
    pub feed: NotificationFeed,
    pub options: ApiOptions,
    pub reads: Semaphore,
    pub bodies: Bodies,
    /// Puts requests that create or delete the same name in order.
    pub turns: NameLocks,
    /// Limits how many feeds ask a layer for documents at once.
    pub doc_reads: Semaphore,
    pub admission: Arc<Admission>,
    pub metrics: AnswerCounts,
    /// Becomes true when all feeds have to end.
    pub closing: watch::Sender<bool>,
}

impl Inner {
    pub fn env(&self) -> &Env {
        self.feed.context.env()
    }

    /// Builds the context of a feed for the client that sent a request with these extensions. Fails with 429 if the client has too
    /// many lasting feeds.
    pub fn feed_context(&self, mode: Mode, extensions: &Extensions) -> Result<FeedContext, Failure> {
        let place = match mode {
            Mode::Normal => None,
            _ => Some(self.admission.enter(extensions)?),
        };
        let (env, closing) = (self.env().clone(), self.closing.subscribe());
        let (metrics, stats) = (self.metrics.clone(), Arc::clone(&self.feed.context.stats));
        Ok(FeedContext { env, metrics, stats, closing, place })
    }

    pub fn is_closing(&self) -> bool {
        *self.closing.borrow()
    }
}

impl EndsWithBus for Inner {
    /// Ends all live feeds.
    fn end_with_bus(&self) {
        self.closing.send_replace(true);
    }
}

impl Api {
    /// Makes the routers' shared state for `bus`. Live feeds are subscribers of `dispatcher` and end with it. The length of its
    /// ring ([`DispatcherOptions::ring_rows_max`](crate::DispatcherOptions::ring_rows_max)) limits how far a feed may be behind
    /// without reading the store.
    ///
    /// Fails with [`Error::Invalid`](crate::Error::Invalid) if an option is out of its limits.
    pub fn start(bus: &Bus, dispatcher: &Dispatcher, options: ApiOptions) -> Result<Self> {
        options.check()?;
        let inner = Inner {
            bus: bus.clone(),
            dispatcher: dispatcher.subscriptions(),
            feed: bus.feed(),
            reads: Semaphore::new(options.reads_max),
            bodies: Bodies::new(options.bodies_len_max),
            turns: NameLocks::default(),
            doc_reads: Semaphore::new(options.doc_reads_max),
            admission: Admission::new(options.feeds_per_client_max),
            metrics: AnswerCounts::default(),
            closing: watch::Sender::new(false),
            options,
        };
        let inner = Arc::new(inner);
        inner.feed.context.stats.health.end_with_bus(&inner);
        Ok(Self { inner })
    }

    /// Ends all live feeds, each in the way that clients expect. Later requests get the rows that exist, and do not wait for more.
    pub fn shutdown(&self) {
        self.inner.closing.send_replace(true);
    }
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").field("options", &self.inner.options).finish_non_exhaustive()
    }
}
