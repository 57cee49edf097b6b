//! [`Subscribe`]: a builder for subscriptions.

use std::{fmt, sync::Arc, time::Duration};

use super::{
    callback::{CallbackHandle, Calling},
    delivery::{Delivery, DeliveryBatch, Interruption},
    listen::Listen,
    listener::Listener,
    options::Order,
    shared::Shared,
    subscription::{BatchSubscription, Subscription},
};
#[cfg(any(doc, feature = "http"))]
use crate::base::cursor::Cursor;
use crate::{
    base::{
        cursor::Start,
        error::{Error, Result},
        filter::Filter,
    },
    state::named_cursor::NamedCursor,
};

const CALLBACK_STAYS: &str = "a callback is not made again after a panic";

/// Starts a subscription, with the options that its methods set.
#[derive(Clone)]
#[must_use = "choose a stream, a callback or a listener to subscribe"]
pub struct Subscribe {
    shared: Arc<Shared>,
    order: Order,
}

impl Subscribe {
    pub(super) fn new(shared: Arc<Shared>, filter: Filter) -> Self {
        Self { shared, order: Order::new(filter) }
    }

    /// Starts at a cursor, at [`Cursor::NOTHING`] for every database first, or behind a sequence. Default: after the tail's
    /// present position; this can include events that were committed before and are not folded yet.
    ///
    /// Before [`Subscribe::durable`], it sets where a new cursor begins. After it, the subscription starts there whatever was saved.
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

    /// Starts at the position of `cursor`, and saves its progress in it: after a restart of the process it misses nothing, and may get
    /// deliveries after the last save again. A new cursor begins where this subscription would have started; that is saved at once.
    ///
    /// It saves once a second ([`Subscribe::save_every`]): up to what a callback or a listener has worked on, and for a stream
    /// up to what was returned before the next item was requested. A subscriber that had the cursor open before loses it: its stream
    /// returns [`Interruption::Failed`](super::Interruption) with [`Error::CursorLost`] at its next save, and ends.
    ///
    /// A stream does not save when it is dropped or the dispatcher ends: call [`Subscription::checkpoint`] before. A subscription that
    /// continues after its first scan does not get [`Interruption::Synced`](super::Interruption) again. If the filter differs from the
    /// one that the cursor was saved with, databases that only the new filter wants come with their next event; in the middle of
    /// the first scan, the scan starts over.
    pub async fn durable(self, cursor: &NamedCursor) -> Result<Self> {
        self.durable_from(cursor, false).await
    }

    /// [`Subscribe::durable`]. If `starts_over`, and the filter differs from the one that the cursor was saved with, it begins at nothing
    /// again: for work that must not miss a database.
    pub(crate) async fn durable_from(self, cursor: &NamedCursor, starts_over: bool) -> Result<Self> {
        let start = self.shared.cursor_at(self.order.start);
        let cursor = cursor.open(start, self.order.filter.hash(), starts_over).await?;
        let mut subscribe = self.since(cursor.stored());
        subscribe.order.cursor = Some(cursor);
        Ok(subscribe)
    }

    /// Saves the cursor of a durable subscription this often. Default: 1 s; with [`Duration::MAX`] only when
    /// [`Subscription::checkpoint`] is called, and when a callback or listener ends.
    ///
    /// Fails with [`Error::Invalid`] if it is zero.
    pub fn save_every(mut self, save_interval: Duration) -> Result<Self> {
        if save_interval.is_zero() {
            return Err(Error::invalid("save interval", "it is zero"));
        }
        self.order.save_interval = save_interval;
        Ok(self)
    }

    /// Receives through a stream. Dropping the stream ends the subscription.
    pub fn stream(self) -> Subscription {
        Subscription::new(self.shared, self.order)
    }

    /// Receives through a stream of batches, the cheapest way to receive many deliveries. Dropping it ends the subscription.
    pub fn batches(self) -> BatchSubscription {
        BatchSubscription::new(self.shared, self.order)
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
        let mut calling = Some(Calling(move |item: Result<DeliveryBatch, _>| {
            callback(item.map(DeliveryBatch::into_first))
        }));
        CallbackHandle::start(self.listener(move || calling.take().expect(CALLBACK_STAYS)))
    }

    /// Receives batches through an async callback, otherwise as [`Subscribe::callback`]. A batch on which it panics is
    /// delivered again, delivery by delivery, each as a batch of its own.
    pub fn batch_callback<F, R>(self, callback: F) -> CallbackHandle
    where
        F: FnMut(Result<DeliveryBatch, Interruption>) -> R + Send + 'static,
        R: Future<Output = ()> + Send + 'static,
    {
        let mut calling = Some(Calling(callback));
        CallbackHandle::start(self.listener(move || calling.take().expect(CALLBACK_STAYS)).in_batches())
    }

    /// Receives through a supervised [`Listener`], in its own task. `factory` makes the listener, and another one after a panic. Choose
    /// its name and its restarts on the returned value, and start it.
    pub fn listener<L, F>(self, factory: F) -> Listen<L, F>
    where
        L: Listener,
        F: FnMut() -> L + Send + 'static,
    {
        Listen::new(self.shared, self.order, factory)
    }
}

impl fmt::Debug for Subscribe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Order { filter, start, pace, .. } = &self.order;
        let debug = &mut f.debug_struct("Subscribe");
        debug.field("filter", filter).field("start", start).field("pace", pace).finish_non_exhaustive()
    }
}
