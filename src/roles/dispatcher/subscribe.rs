//! [`Subscribe`]: a builder for subscriptions; and [`Listen`]: one that starts a listener.

use std::{fmt, marker::PhantomData, sync::Arc, time::Duration};

use tokio::task::AbortHandle;

use super::{
    delivery::{Delivery, DeliveryBatch, Interruption},
    handle::{CallbackHandle, ListenerHandle},
    listener::{Listener, Next},
    options::Order,
    shared::Shared,
    subscription::{BatchSubscription, Source, Subscription},
    supervisor::{RestartPolicy, SupervisionPolicy, Supervisor},
};
#[cfg(any(doc, feature = "http"))]
use crate::base::cursor::Cursor;
use crate::base::{
    backoff::Backoff,
    cursor::Start,
    error::{Error, Result},
};

/// Starts a subscription, with the options that its methods set.
#[derive(Debug)]
#[must_use = "choose a stream, a callback or a listener to subscribe"]
pub struct Subscribe {
    pub(super) shared: Arc<Shared>,
    pub(super) order: Order,
}

impl Subscribe {
    /// Starts at a cursor, at [`Cursor::NOTHING`] for every database first, or behind a sequence. Default: after the tail's
    /// present position; this can include events that were committed before and are not folded yet.
    ///
    /// A subscription keeps its position in memory only. Work that has to survive a crash is a [`consumer`](crate::consumer).
    ///
    /// A start that an embedded store has never had gives [`Interruption::Expired`](super::Interruption). A start ahead of a cluster, or
    /// in a later incarnation, gives [`Interruption::Failed`](super::Interruption) with [`Error::Invalid`].
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

    /// Skips missed rows when it falls behind the dispatcher's ring, and reports them with
    /// [`Interruption::Lagged`](super::Interruption). A subscriber that begins with nothing reads the feed
    /// all the same, and exact names are looked up.
    pub fn skip_when_lagging(mut self) -> Self {
        self.order.skips = true;
        self
    }

    /// Delivers in rounds that begin at least `pace` apart, the first at once. A round has each database once, with all its news since
    /// its last delivery. It has a database twice if the subscriber catches up with the feed meanwhile, or if the database was deleted
    /// and created and its tombstone was removed in between. So an indexer with a pace of one minute gets one delivery per minute for a
    /// database that is updated a thousand times. With [`Duration::MAX`] there is one round.
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

    /// Makes deliveries list the design documents that were written or deleted ([`Delivery::ddocs`]). Each delivery with such a change
    /// costs a read of the rows of the database's design documents.
    pub fn with_ddocs(mut self) -> Self {
        self.order.ddocs = true;
        self
    }

    /// Receives through a stream. Dropping the stream ends the subscription.
    pub fn stream(self) -> Subscription {
        Subscription(Source::new(self.shared, self.order))
    }

    /// Receives through a stream of batches, the cheapest way to receive many deliveries. Dropping it ends the subscription.
    pub fn batches(self) -> BatchSubscription {
        BatchSubscription(Source::new(self.shared, self.order))
    }

    /// Receives through an async callback, in its own task. The subscription ends when the handle is dropped.
    ///
    /// Deliveries come one after the other. The argument of the callback is an item as a stream returns it, an [`Interruption`] as an
    /// error. A panic of the callback, or of the filter's predicate, is caught, logged and counted, and the subscription continues with
    /// the next delivery; other subscribers are not affected. To handle panics differently, write a [`Listener`].
    pub fn callback<F, R>(self, mut callback: F) -> CallbackHandle
    where
        F: FnMut(Result<Delivery, Interruption>) -> R + Send + 'static,
        R: Future<Output = ()> + Send + 'static,
    {
        self.call(false, move |item: Result<DeliveryBatch, _>| callback(item.map(DeliveryBatch::into_first)))
    }

    /// Receives batches through an async callback, otherwise as [`Subscribe::callback`]. A batch on which it panics is
    /// delivered again, delivery by delivery, each as a batch of its own.
    pub fn batch_callback<F, R>(self, callback: F) -> CallbackHandle
    where
        F: FnMut(Result<DeliveryBatch, Interruption>) -> R + Send + 'static,
        R: Future<Output = ()> + Send + 'static,
    {
        self.call(true, callback)
    }

    /// Starts a listener that is not restarted, and continues with the next delivery after a panic.
    fn call<F, R>(self, in_batches: bool, callback: F) -> CallbackHandle
    where
        F: FnMut(Result<DeliveryBatch, Interruption>) -> R + Send + 'static,
        R: Future<Output = ()> + Send + 'static,
    {
        let mut calling = Some(Calling(callback));
        let mut listen = self.listener(move || calling.take().expect("a callback is made once"));
        listen.terms = SupervisionPolicy { attempts_max: 1, in_batches, is_callback: true, ..listen.terms };
        let (listener, task) = listen.start_with_task();
        CallbackHandle { listener, task }
    }

    /// Receives through a supervised [`Listener`], in its own task. `factory` makes the listener, and another one after a panic. Choose
    /// its restarts on the returned value, and start it.
    pub fn listener<L, F>(self, factory: F) -> Listen<L, F>
    where
        L: Listener,
        F: FnMut() -> L + Send + 'static,
    {
        let (terms, listener) = (SupervisionPolicy::default(), PhantomData);
        Listen { subscribe: self, factory, terms, listener }
    }
}

/// Starts a listener, with the options that its methods set.
#[must_use = "start it"]
pub struct Listen<L, F> {
    subscribe: Subscribe,
    factory: F,
    terms: SupervisionPolicy,
    listener: PhantomData<fn() -> L>,
}

impl<L, F> Listen<L, F>
where
    L: Listener,
    F: FnMut() -> L + Send + 'static,
{
    /// Whether the listener is restarted after a panic. Default: always.
    pub fn restart(mut self, policy: RestartPolicy) -> Self {
        self.terms.restart = policy;
        self
    }

    /// The pause before a restart: `min` at first, longer after each further panic, up to `max`; a delivery that succeeds resets it.
    /// Default: 100 ms up to 30 s. Fails if `min` is greater than `max`.
    pub fn backoff(mut self, min: Duration, max: Duration) -> Result<Self> {
        if min > max {
            return Err(Error::invalid("back-off", format!("at least {min:?} is more than at most {max:?}")));
        }
        self.terms.backoff = Backoff { min, max };
        Ok(self)
    }

    /// How often a delivery on which the listener panics is tried before it is skipped. Default: 3. Fails if it is zero.
    pub fn attempts(mut self, attempts: u32) -> Result<Self> {
        if attempts == 0 {
            return Err(Error::invalid("attempts", "it is zero: nothing would ever be delivered"));
        }
        self.terms.attempts_max = attempts;
        Ok(self)
    }

    /// Passes the listener batches ([`Listener::handle_batch`]) instead of one delivery at a time. A batch on which it panics is tried again as a
    /// whole a few times, and then delivery by delivery, each as a batch of its own, so that only the deliveries on which it panics are
    /// skipped.
    pub fn in_batches(mut self) -> Self {
        self.terms.in_batches = true;
        self
    }

    /// Starts the listener. It ends when it is stopped, returns [`Next::Stop`], or its dispatcher ends.
    pub fn start(self) -> ListenerHandle {
        self.start_with_task().0
    }

    fn start_with_task(self) -> (ListenerHandle, AbortHandle) {
        let Self { subscribe: Subscribe { shared, order }, factory, terms, .. } = self;
        let source = Source::new(Arc::clone(&shared), order);
        let handle = ListenerHandle::new(source.reader.state.id);
        let supervisor = Supervisor::new(&handle, source, factory, terms);
        let task = shared.listeners.spawn(supervisor.run());
        (handle, task)
    }
}

impl<L, F> fmt::Debug for Listen<L, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { subscribe, terms, .. } = self;
        f.debug_struct("Listen").field("subscribe", subscribe).field("terms", terms).finish_non_exhaustive()
    }
}

/// A listener that calls a callback, with a batch of one for a single delivery.
struct Calling<F>(F);

impl<F, R> Listener for Calling<F>
where
    F: FnMut(Result<DeliveryBatch, Interruption>) -> R + Send + 'static,
    R: Future<Output = ()> + Send + 'static,
{
    async fn handle_event(&mut self, delivery: Delivery) -> Next {
        self.handle_batch(delivery.alone()).await
    }

    async fn handle_batch(&mut self, batch: DeliveryBatch) -> Next {
        (self.0)(Ok(batch)).await;
        Next::Continue
    }

    async fn handle_interruption(&mut self, interruption: Interruption) -> Next {
        (self.0)(Err(interruption)).await;
        Next::Continue
    }
}
