//! [`Api`]: what all routers share.

use std::sync::Arc;

use axum::http::Extensions;
use tokio::sync::{Semaphore, watch};

use super::{
    ApiOptions, Failure, admission::Admission, answer_counts::AnswerCounts, bodies::Bodies,
    name_locks::NameLocks, query::Mode, stream::FeedContext,
};
use crate::{
    base::{env::Env, error::Result},
    bus::{Bus, observed::Watch, ownership::Owners},
    roles::dispatcher::{Dispatcher, Subscriptions},
    state::notification_feed::NotificationFeed,
};

/// What all routers share. Clones are handles on the same.
///
/// Live feeds end with [`Api::shutdown`], and when the last handle and router are gone.
#[derive(Clone)]
pub struct Api {
    /// What they share.
    pub(super) inner: Arc<Inner>,
}

/// What all feeds share.
pub(super) struct Inner {
    pub bus: Bus,
    /// Tells of what comes.
    pub dispatcher: Subscriptions,
    pub feed: NotificationFeed,
    /// How it answers.
    pub options: ApiOptions,
    /// Limits how many feeds read the store at once.
    pub reads: Semaphore,
    /// Room for the bodies of requests.
    pub bodies: Bodies,
    /// Whose turn it is to decide what a name stands for.
    pub turns: NameLocks,
    /// Limits how many of them ask a layer for documents.
    pub doc_reads: Semaphore,
    /// The feeds of each client.
    pub admission: Arc<Admission>,
    /// What was done.
    pub metrics: AnswerCounts,
    /// What is seen of the bus by looking more than once.
    pub watch: Watch,
    /// What is seen of who owns the partitions.
    pub owners: Owners,
    /// Counts the reshards that were asked for here, and wakes the feeds of single shards.
    pub reshards: watch::Sender<u64>,
    /// Turns true when all feeds have to end.
    pub closing: watch::Sender<bool>,
}

impl Inner {
    /// Time and randomness.
    pub fn env(&self) -> &Env {
        self.feed.context.env()
    }

    /// The context of a feed for the client of these extensions. Fails with 429 if the client has too many lasting feeds.
    pub fn surroundings(&self, mode: Mode, extensions: &Extensions) -> Result<FeedContext, Failure> {
        let place = match mode {
            Mode::Normal => None,
            _ => Some(self.admission.enter(extensions)?),
        };
        let (env, closing) = (self.env().clone(), self.closing.subscribe());
        Ok(FeedContext { env, metrics: self.metrics.clone(), closing, place })
    }

    /// Whether all feeds have to end.
    pub fn is_closing(&self) -> bool {
        *self.closing.borrow()
    }
}

impl Api {
    /// What answers for `bus`. Live feeds are subscribers of `dispatcher`, whose ring
    /// ([`DispatcherOptions::ring_rows_max`](crate::DispatcherOptions::ring_rows_max)) says how far behind they may be without
    /// reading the store. They end with it.
    ///
    /// Fails with [`Error::Invalid`] if an option is out of its limits.
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
            watch: Watch::default(),
            owners: Owners::default(),
            reshards: watch::Sender::new(0),
            closing: watch::Sender::new(false),
            options,
        };
        inner.feed.context.stats.health.close_at_end(inner.closing.clone());
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Ends all live feeds, each as clients expect it, and from now on answers with what there is.
    pub fn shutdown(&self) {
        self.inner.closing.send_replace(true);
    }
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").field("options", &self.inner.options).finish_non_exhaustive()
    }
}
