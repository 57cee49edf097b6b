//! [`Subscribe`]: a builder for subscriptions.

use std::{sync::Arc, time::Duration};

use super::{
    callback::{Callback, CallbackHandle, RestartPolicy},
    delivery::{BatchItem, DeliveryBatch, Item, Trouble},
    reader::Order,
    shared::Shared,
    subscription::{BatchSubscription, Deliveries, Source, Subscription},
};
#[cfg(any(doc, feature = "http"))]
use crate::base::cursor::Cursor;
use crate::base::{
    cursor::Start,
    error::{Error, Result},
    filter::Filter,
};

/// Starts a subscription, with the options that its methods set.
#[derive(Debug)]
#[must_use = "choose a stream or a callback to subscribe"]
pub struct Subscribe {
    pub(super) shared: Arc<Shared>,
    pub(super) order: Order,
}

impl Subscribe {
    /// Starts at a cursor, or after a sequence. A start at [`Cursor::BEGINNING`] delivers every database first. Default: after the tail's
    /// current position; this can include events that were committed earlier and are not folded yet.
    ///
    /// A subscription keeps its position only in memory. Use a [`consumer`](crate::consumer) for work that has to survive a crash.
    ///
    /// If the start is not in the history of an embedded store, the subscription gets [`Item::Expired`]. If the start is ahead of a
    /// cluster, or in a later incarnation, it gets [`Item::Failed`] with [`Error::Invalid`].
    pub fn since(mut self, start: impl Into<Start>) -> Self {
        (self.order.start, self.order.is_caught_up) = (start.into(), false);
        self
    }

    /// Starts at `cursor`, up to which the caller has just read the feed, so that it is not read again.
    #[cfg(feature = "http")]
    pub(crate) fn caught_up_at(mut self, cursor: Cursor) -> Self {
        (self.order.start, self.order.is_caught_up) = (cursor.into(), true);
        self
    }

    /// Skips missed rows when the subscriber falls behind the dispatcher's ring, and reports them with [`Item::Lagged`]. A subscriber that
    /// begins with nothing still reads the feed, and exact names are still looked up.
    pub fn skip_when_lagging(mut self) -> Self {
        self.order.skips = true;
        self
    }

    /// Delivers in rounds that begin at least `pace` apart, the first at once. A round has each database once, with all its news since its
    /// last delivery. A database comes twice if the round has several batches and the database is updated between them, or if it was
    /// deleted and created again and its tombstone was removed in between. So an indexer with a pace of one minute gets one delivery per
    /// minute for a database that is updated a thousand times. With [`Duration::MAX`] there is one round.
    ///
    /// Without a pace, a subscriber for which more than a page waits ([`DispatcherOptions::page_rows_max`](super::DispatcherOptions)) also
    /// takes such a round: however slow it is, it gets each database once.
    ///
    /// Fails with [`Error::Invalid`] if the pace is zero: leave it out to get every delivery at once.
    pub fn every(mut self, pace: Duration) -> Result<Self> {
        if pace.is_zero() {
            let reason = "it is zero; leave it out to get every delivery at once";
            return Err(Error::invalid("pace", reason));
        }
        self.order.pace = Some(pace);
        Ok(self)
    }

    /// Makes deliveries list the design documents that were written or deleted ([`Delivery::ddocs`](super::Delivery::ddocs)). Each
    /// delivery with such a change costs a read of the rows of the database's design documents.
    pub fn with_ddocs(mut self) -> Self {
        self.order.ddocs = true;
        self
    }

    fn source(self) -> Source {
        Source::new(self.shared, self.order)
    }

    /// Receives through a stream of [`Item`]s. Dropping the stream ends the subscription.
    pub fn stream(self) -> Subscription {
        Subscription { source: self.source() }
    }

    /// Receives through a stream of batches, the cheapest way to receive many deliveries. Dropping the stream ends the subscription.
    pub fn batches(self) -> BatchSubscription {
        BatchSubscription { source: self.source() }
    }

    /// Receives deliveries alone, for a plain loop. The loop ends when the subscription does, and for no other reason.
    ///
    /// `on_trouble` is called with each gap or failure: `|_| ()` would ignore that databases may be gone.
    ///
    /// ```
    /// # use notibus::{Dispatcher, Filter, dispatcher::Trouble};
    /// # use tokio_stream::StreamExt;
    /// # async fn example(dispatcher: &Dispatcher) {
    /// let mut deliveries = dispatcher.subscribe(Filter::all()).deliveries(|trouble| match trouble {
    ///     Trouble::Expired { .. } => println!("forget all databases: they are delivered again"),
    ///     trouble => eprintln!("{trouble}"),
    /// });
    /// while let Some(delivery) = deliveries.next().await {
    ///     println!("{}: {:?}", delivery.notification().name, delivery.news().kinds());
    /// }
    /// # }
    /// ```
    ///
    /// Code that forgets the closure, or mistakes a harmless item for the end, does not compile:
    ///
    /// ```compile_fail,E0061
    /// # fn example(dispatcher: &notibus::Dispatcher) {
    /// let deliveries = dispatcher.subscribe(notibus::Filter::all()).deliveries();
    /// # }
    /// ```
    ///
    /// ```compile_fail,E0308
    /// # use tokio_stream::StreamExt;
    /// # async fn example(dispatcher: &notibus::Dispatcher) {
    /// let mut items = dispatcher.subscribe(notibus::Filter::all()).stream();
    /// while let Some(Ok(delivery)) = items.next().await {}
    /// # }
    /// ```
    pub fn deliveries(self, on_trouble: impl FnMut(Trouble) + Send + 'static) -> Deliveries {
        Deliveries { source: self.source(), on_trouble: Box::new(on_trouble) }
    }

    /// Receives through an async callback, in a task of its own, which ends when the handle is dropped. Must be called within a tokio
    /// runtime.
    ///
    /// `factory` makes the callback when the first item arrives, and a new one after each panic, which is caught, logged and counted. The
    /// new callback gets the same item again. An item on which it panics as many times as `policy` allows is skipped, logged and counted.
    /// Items arrive one at a time, and other subscribers are not affected. A panic in the filter's predicate costs only its row.
    ///
    /// Fails with [`Error::Invalid`] if the policy is invalid.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
    /// use std::sync::{Arc, atomic::{AtomicUsize, Ordering}};
    ///
    /// use notibus::{Bus, BusOptions, Db, DbInstance, Filter, StartOptions, dispatcher::{Item, RestartPolicy}, store::Store};
    ///
    /// let store = Store::memory();
    /// let bus = Bus::open(&store, BusOptions::default()).await?;
    /// let running = bus.start(StartOptions::default()).await?;
    /// let (dispatcher, count) = (running.dispatcher(), Arc::new(AtomicUsize::new(0)));
    /// let counter = dispatcher.subscribe(Filter::all()).callback(RestartPolicy::default(), {
    ///     let count = Arc::clone(&count);
    ///     move || {
    ///         let count = Arc::clone(&count);
    ///         move |item| {
    ///             if let Item::Delivery(_) = item {
    ///                 count.fetch_add(1, Ordering::Relaxed);
    ///             }
    ///             std::future::ready(())
    ///         }
    ///     }
    /// })?;
    ///
    /// let (db, producer) = (Db::new("orders".parse()?, DbInstance::new()), bus.producer());
    /// let created = bus.run_exactly_once(None, async |tx| Ok(producer.created(&tx, &db))).await?;
    /// counter.wait_until(dispatcher.wait_until(created.committed.versionstamp.version()).await?).await;
    /// assert_eq!(count.load(Ordering::Relaxed), 1);
    /// counter.stop().await;
    /// running.shutdown().await
    /// # }
    /// ```
    pub fn callback<F, C, R>(self, policy: RestartPolicy, mut factory: F) -> Result<CallbackHandle>
    where
        F: FnMut() -> C + Send + 'static,
        C: FnMut(Item) -> R + Send + 'static,
        R: Future<Output = ()> + Send + 'static,
    {
        let factory = move || {
            let mut callback = factory();
            move |item: BatchItem| callback(item.map(DeliveryBatch::into_first))
        };
        Callback::start(self.shared, self.order, policy, false, factory)
    }

    /// Receives batches through an async callback, but otherwise works like [`Subscribe::callback`]. A batch on which the callback panics
    /// is tried as a whole as many times as `policy` allows, and then delivery by delivery, each as a batch of its own, so that only the
    /// deliveries on which it panics are skipped.
    pub fn batch_callback<F, C, R>(self, policy: RestartPolicy, factory: F) -> Result<CallbackHandle>
    where
        F: FnMut() -> C + Send + 'static,
        C: FnMut(BatchItem) -> R + Send + 'static,
        R: Future<Output = ()> + Send + 'static,
    {
        Callback::start(self.shared, self.order, policy, true, factory)
    }
}

macro_rules! replace {
    ($($stream:ty),*) => {$(
        impl $stream {
            /// Ends this subscription, and begins another one with `filter` and the same options. The returned builder sets how to receive.
            ///
            /// No news is missed for databases that both filters want; others are delivered from the current cursor on. A reading in
            /// progress starts over ([`Cursor::rewound`](crate::Cursor::rewound)), because the new filter may want rows that this one
            /// rejected. So everything delivered since the reading began, whether that is a first scan, another reading of the feed, a
            /// round or a batch, is delivered again if both filters want it. Nothing is delivered twice to a subscriber for which nothing
            /// waits.
            pub fn replace(mut self, filter: Filter) -> Subscribe {
                let cursor = self.cursor();
                let reader = &self.source.reader;
                Subscribe { shared: Arc::clone(&reader.shared), order: reader.order_with(filter, cursor) }
            }
        }
    )*};
}

replace!(Subscription, BatchSubscription, Deliveries);
