//! Receivers: the only file of the simulation that uses the dispatcher.
//!
//! Receivers subscribe according to an [`Interest`] and [`ReceiverOptions`], and turn deliveries into plain values.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use notibus::{
    Result,
    cursor::Cursor,
    dispatcher::{
        BatchSubscription, Delivery, DeliveryBatch, DeliveryRef, Dispatcher, Filter, Item, Mirror, Subscribe,
        Subscription,
    },
    event::Sequence,
    store::Env,
};
use tokio_stream::StreamExt;

use super::context::{ActorContext, POLL_INTERVAL};
use crate::oracle::{Given, GivenDdocs, GivenRow, Interest, Start};

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ReceiverOptions {
    /// The position at which the receiver begins; `None` for now.
    pub start: Option<Cursor>,
    /// Whether the receiver prefers to skip rows that it missed.
    pub skips: bool,
    /// The interval of the receiver's rounds, if it has rounds.
    pub every: Option<Duration>,
}

/// The dispatchers of a process.
pub(super) struct Dispatchers {
    pub main: Arc<Dispatcher>,
    /// A dispatcher that reads nearly everything from the store, because its ring is tiny. Subscribers that resume use either dispatcher.
    without_ring: Option<Arc<Dispatcher>>,
}

impl Dispatchers {
    pub async fn start(actor: &ActorContext) -> Result<Self> {
        let plan = &actor.shared.plan;
        let main = Arc::new(actor.bus.dispatcher(plan.dispatcher.clone()).await?);
        let without_ring = if plan.subscribers.restarts {
            let options = plan.dispatcher.clone().ring_rows_max(1).catch_up_rows_max(1);
            Some(Arc::new(actor.bus.dispatcher(options).await?))
        } else {
            None
        };
        Ok(Self { main, without_ring })
    }

    pub fn sources(&self) -> Sources {
        let source = |dispatcher: &Arc<Dispatcher>| Source(Arc::downgrade(dispatcher));
        Sources { main: source(&self.main), without_ring: self.without_ring.as_ref().map(source) }
    }

    pub async fn shutdown(self, env: &Env) {
        for dispatcher in [Some(self.main), self.without_ring].into_iter().flatten() {
            // Tasks of feeds that were cut off release the dispatcher when they end.
            while Arc::strong_count(&dispatcher) > 1 {
                env.sleep(POLL_INTERVAL).await;
            }
            let dispatcher =
                Arc::into_inner(dispatcher).expect("subscribers do not wait with it in their hands");
            dispatcher.shutdown().await;
        }
    }
}

/// The dispatchers of a process, for as long as they run.
#[derive(Clone)]
pub(super) struct Sources {
    pub main: Source,
    without_ring: Option<Source>,
}

impl Sources {
    /// Chooses the dispatcher with which a subscriber resumes.
    pub fn any(&self, actor: &ActorContext) -> &Source {
        self.without_ring.as_ref().filter(|_| actor.random(2) == 0).unwrap_or(&self.main)
    }
}

/// A dispatcher of a process, for as long as it runs.
#[derive(Clone)]
pub(super) struct Source(Weak<Dispatcher>);

impl Source {
    /// Returns the position of the dispatcher's tail; `None` once the dispatcher has ended.
    pub fn position(&self) -> Option<Cursor> {
        self.0.upgrade().map(|dispatcher| dispatcher.position().into())
    }

    /// Waits until the tail has published everything committed up to `version`. Returns a position, or `None` if the tail never does.
    pub async fn reached(&self, actor: &ActorContext, version: u64) -> Option<Sequence> {
        let dispatcher = self.0.upgrade()?;
        tokio::select! {
            biased;
            at = dispatcher.wait_until(version) => at.ok(),
            // The process waits until no other task holds its dispatcher, so this must not wait forever.
            () = actor.until_the_end() => None,
        }
    }

    /// Starts a mirror of what `interest` wants; returns `None` once the dispatcher has ended.
    pub fn mirror(&self, interest: &Interest) -> Result<Option<Mirror>> {
        self.0.upgrade().map(|dispatcher| dispatcher.mirror(interest.filter())).transpose()
    }

    /// Subscribes to what `interest` wants; returns `None` once the dispatcher has ended.
    pub fn subscribe(&self, interest: &Interest, terms: &ReceiverOptions) -> Result<Option<Subscribe>> {
        let Some(dispatcher) = self.0.upgrade() else { return Ok(None) };
        let start = terms.start.map_or(notibus::cursor::Start::Now, Into::into);
        let mut subscribe = dispatcher.subscribe(interest.filter()).since(start);
        if interest.asks {
            subscribe = subscribe.with_ddocs();
        }
        if terms.skips {
            subscribe = subscribe.skip_when_lagging();
        }
        if let Some(every) = terms.every {
            subscribe = subscribe.every(every)?;
        }
        Ok(Some(subscribe))
    }
}

/// A stream of single deliveries, or of batches.
pub(super) enum Stream {
    Deliveries(Subscription),
    Batches(BatchSubscription),
}

impl Stream {
    /// Opens the stream of `subscribe`, in batches if `in_batches`.
    pub fn new(subscribe: Subscribe, in_batches: bool) -> Self {
        if in_batches { Self::Batches(subscribe.batches()) } else { Self::Deliveries(subscribe.stream()) }
    }

    /// Returns the next deliveries, as plain values; `None` at the end.
    pub async fn next(&mut self) -> Option<Vec<Given>> {
        Some(match self {
            Self::Deliveries(stream) => given(stream.next().await?, given_alone),
            Self::Batches(stream) => given(stream.next().await?, given_batch),
        })
    }

    /// Returns the cursor of the stream.
    pub fn cursor(&mut self) -> Cursor {
        match self {
            Self::Deliveries(stream) => stream.cursor(),
            Self::Batches(stream) => stream.cursor(),
        }
    }

    /// Returns another stream of the same kind with another filter, which continues from the cursor of this one.
    pub fn replace(self, filter: Filter) -> Self {
        match self {
            Self::Deliveries(stream) => Self::new(stream.replace(filter), false),
            Self::Batches(stream) => Self::new(stream.replace(filter), true),
        }
    }
}

/// Converts a delivery into plain values.
fn given_row(delivery: DeliveryRef<'_>) -> Given {
    let ddocs = delivery.ddocs().map(|ids| GivenDdocs {
        since: Start::from(delivery.since()),
        ids: ids.to_vec(),
        may_be_any: delivery.may_be_any_ddoc(),
    });
    Given::Row(GivenRow {
        row: Arc::clone(delivery.notification()),
        news: delivery.news().iter().collect(),
        wanted_by: delivery.wanted_by(),
        ddocs,
    })
}

pub(super) fn given_alone(delivery: &Delivery) -> Vec<Given> {
    vec![given_row(delivery.as_ref())]
}

pub(super) fn given_batch(batch: &DeliveryBatch) -> Vec<Given> {
    batch.iter().map(given_row).collect()
}

/// Converts an item into plain values.
pub(super) fn given<T>(item: Item<T>, rows: impl FnOnce(&T) -> Vec<Given>) -> Vec<Given> {
    vec![match item {
        Item::Delivery(delivery) => return rows(&delivery),
        Item::CaughtUp { at } => Given::CaughtUp { at },
        Item::Lagged { from, to } => Given::Lagged { from, to },
        Item::Expired { horizon } => Given::Expired { horizon },
        Item::Failed(_) => Given::Failed,
    }]
}

/// Formats a received value for readers of the trace.
pub(super) fn show(given: &Given) -> String {
    match given {
        Given::Row(GivenRow { row, news, .. }) => {
            format!("is given {} of {:?}: {news:?}", row.sequence, row.name)
        }
        other => format!("gets {other:?}"),
    }
}
