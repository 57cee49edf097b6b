//! [`Subscribe`]: how to subscribe.

use std::{fmt, sync::Arc, time::Duration};

use super::{
    callback::{CallbackHandle, Calling},
    delivery::{Delivery, DeliveryBatch, Interruption},
    listen::Listen,
    listener::Listener,
    shared::Shared,
    subscription::{BatchSubscription, Order, Subscription},
};
#[cfg(any(doc, feature = "http"))]
use crate::base::cursor::Cursor;
use crate::{
    base::{
        bugs::{Bug, is_on},
        cursor::Start,
        error::{Error, Result},
        filter::Filter,
    },
    state::named_cursor::NamedCursor,
};

/// Why a callback is made once.
const CALLBACK_STAYS: &str = "a callback goes on as it is after a panic";

/// A subscription in the making.
#[derive(Clone)]
#[must_use = "choose a stream, a callback or a listener to subscribe"]
pub struct Subscribe {
    shared: Arc<Shared>,
    order: Order,
}

impl Subscribe {
    /// A subscription from now on that catches up.
    pub(super) fn new(shared: Arc<Shared>, filter: Filter) -> Self {
        Self { shared, order: Order::new(filter) }
    }

    fn with(self, order: impl FnOnce(Order) -> Order) -> Self {
        Self { order: order(self.order), ..self }
    }

    /// Starts elsewhere than now: at a cursor, [`Cursor::NOTHING`] for every database first, or behind a sequence. Default: with
    /// what comes after the tail's present position, which can include events that were committed before and not yet folded.
    ///
    /// Of a durable subscription it says where a new cursor begins, if it comes before [`Subscribe::durable`]. After that, it is where
    /// the subscription starts whatever was saved.
    ///
    /// Whoever starts where an embedded store has never been gets [`Interruption::Expired`](super::Interruption), and whoever starts
    /// ahead of a cluster, or in a later incarnation, [`Interruption::Failed`](super::Interruption) with [`Error::Invalid`].
    pub fn since(self, start: impl Into<Start>) -> Self {
        self.with(|order| Order { start: start.into(), is_caught_up: false, ..order })
    }

    /// Starts at `cursor`, up to which the caller has just read the feed, which is not read again.
    #[cfg(feature = "http")]
    pub(crate) fn caught_up_at(self, cursor: Cursor) -> Self {
        self.with(|order| Order { start: cursor.into(), is_caught_up: true, ..order })
    }

    /// Skips what it has missed when it falls behind the dispatcher's ring, and says so with
    /// [`Interruption::Lagged`](super::Interruption). Anyone who begins with nothing reads the feed
    /// all the same, and exact names are looked up.
    pub fn skip_when_lagging(self) -> Self {
        self.with(|order| Order { skips: true, ..order })
    }

    /// Delivers in rounds that begin at least `pace` apart, the first at once. In a round each database comes once, with all
    /// that is new of it since it came last; also twice while the subscriber catches up with the feed, or if it was deleted and
    /// created while its tombstone was dropped. So a database that is updated a thousand times costs an indexer that comes by
    /// each minute one delivery. With [`Duration::MAX`] there is one round.
    ///
    /// Fails with [`Error::Invalid`] if it is zero: leave it out to be delivered everything at once.
    pub fn every(self, pace: Duration) -> Result<Self> {
        if pace.is_zero() {
            let reason = "it is zero; leave it out to be delivered everything at once";
            return Err(Error::invalid("pace", reason));
        }
        Ok(self.with(|order| Order { pace: Some(pace), ..order }))
    }

    /// Deliveries that tell of design documents say which were written or deleted ([`Delivery::ddocs`]). Each of them costs
    /// a read of the rows that the database's design documents have.
    pub fn with_ddocs(self) -> Self {
        self.with(|order| Order { ddocs: true, ..order })
    }

    /// Starts where `cursor` stands, and saves in it how far it has come: a restart of the process misses nothing, and may be
    /// delivered again what came after the last save. If the cursor is new, it begins where this subscription would have
    /// started, which is saved at once.
    ///
    /// It is saved once a second ([`Subscribe::save_every`]): up to what a callback or a listener has worked on, and with a stream
    /// up to what was returned before the next item was asked for. Whoever had the cursor open before loses it: a stream then
    /// returns [`Interruption::Failed`](super::Interruption) with [`Error::CursorLost`] at its next save, and ends.
    ///
    /// A stream does not save when it is dropped or the dispatcher ends: call [`Subscription::checkpoint`] before. A subscription that
    /// goes on behind its first scan is not told [`Interruption::Synced`](super::Interruption) again. With another filter than the one
    /// that the cursor was saved for, databases that the old one did not want come with their next event only; in the middle of
    /// the first scan, the scan starts over.
    pub async fn durable(self, cursor: &NamedCursor) -> Result<Self> {
        self.durable_from(cursor, false).await
    }

    /// [`Subscribe::durable`] for work of which nothing may be left out: with another filter than the one that the cursor was saved
    /// for, it begins at nothing again.
    pub(crate) async fn durable_work(self, cursor: &NamedCursor) -> Result<Self> {
        self.durable_from(cursor, true).await
    }

    /// Starts where `cursor` stands, which `starts_over` with another filter.
    async fn durable_from(self, cursor: &NamedCursor, starts_over: bool) -> Result<Self> {
        let start = self.shared.cursor_at(self.order.start);
        let cursor = cursor.open(start, self.order.filter.hash(), starts_over).await?;
        let start = if is_on(Bug::CursorNotRead) { start } else { cursor.stored() };
        let (start, cursor) = (start.into(), Some(cursor));
        Ok(self.with(|order| Order { start, is_caught_up: false, cursor, ..order }))
    }

    /// Saves the cursor of a durable subscription this often. Default: 1 s; with [`Duration::MAX`] only when
    /// [`Subscription::checkpoint`] is called, and when a callback or listener ends.
    ///
    /// Fails with [`Error::Invalid`] if it is zero.
    pub fn save_every(self, save_interval: Duration) -> Result<Self> {
        if save_interval.is_zero() {
            return Err(Error::invalid("save interval", "it is zero"));
        }
        Ok(self.with(|order| Order { save_interval, ..order }))
    }

    /// Receives by a stream. Dropping it ends the subscription.
    pub fn stream(self) -> Subscription {
        Subscription::new(self.shared, self.order)
    }

    /// Receives by a stream of batches, the cheapest way to receive many deliveries. Dropping it ends the subscription.
    pub fn batches(self) -> BatchSubscription {
        BatchSubscription::new(self.shared, self.order)
    }

    /// Receives by an async callback, in a task of its own. The subscription ends when the handle is dropped.
    ///
    /// Deliveries come one after the other. A panic of the callback, or of the filter's predicate, is caught, logged and
    /// counted, and the subscription goes on with the next delivery; it affects no other subscriber. The callback is given
    /// what a stream returns, an [`Interruption`] as an error. To decide what becomes of panics, write a [`Listener`].
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

    /// Receives by an async callback that is given batches, as [`Subscribe::callback`] otherwise. A batch on which it panics is
    /// given to it again, delivery by delivery, each as a batch of its own.
    pub fn batch_callback<F, R>(self, callback: F) -> CallbackHandle
    where
        F: FnMut(Result<DeliveryBatch, Interruption>) -> R + Send + 'static,
        R: Future<Output = ()> + Send + 'static,
    {
        let mut calling = Some(Calling(callback));
        CallbackHandle::start(self.listener(move || calling.take().expect(CALLBACK_STAYS)).in_batches())
    }

    /// Receives by a supervised [`Listener`], in a task of its own; `factory` makes it, and another one after a panic. Choose
    /// its name and its restarts on what is returned, and start it.
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
