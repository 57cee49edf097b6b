//! [`BatchSubscription`] and [`Subscription`]: streams of deliveries; and [`Source`], which both are built on.

use std::{
    convert::identity,
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tokio_stream::Stream;

use super::{
    delivery::{Delivery, DeliveryBatch, Interruption, NextItem},
    log::SubscriberId,
    options::Order,
    reader::Reader,
    shared::Shared,
};
use crate::{
    base::{
        cursor::Cursor,
        error::{Error, Result},
        filter::Filter,
    },
    state::named_cursor::autosave::Autosave,
};

/// Receives for a subscriber, in batches or one delivery at a time, and saves its cursor.
pub(super) struct Source {
    pub reader: Reader,
    autosave: Option<Box<Autosave>>,
    /// The rest of a batch that is returned one by one.
    pub current: Option<DeliveryBatch>,
}

impl Source {
    pub fn new(shared: Arc<Shared>, mut order: Order) -> Self {
        let (filter, interval, env) = (order.filter.hash(), order.save_interval, shared.context.env());
        let autosave =
            order.cursor.take().map(|cursor| Box::new(Autosave::new(cursor, filter, interval, env)));
        Self { reader: Reader::new(shared, order), autosave, current: None }
    }

    pub fn cursor(&mut self) -> Cursor {
        self.current.as_ref().map_or_else(|| self.reader.cursor(), |left| left.cursor_after(0))
    }

    pub async fn checkpoint_at(&mut self, cursor: Cursor) -> Result<()> {
        let Some(autosave) = &mut self.autosave else { return Ok(()) };
        autosave.save(cursor).await
    }

    pub fn replace_at(&mut self, filter: Filter, cursor: Cursor) {
        self.current = None;
        let hash = filter.hash();
        let is_set_back = self.reader.replace(filter, cursor);
        if let Some(autosave) = &mut self.autosave {
            autosave.replace(hash, is_set_back);
        }
    }

    /// Saves the cursor when a save is due. Fails if the subscription ends, or waits for what could not be saved.
    fn poll_save(&mut self, context: &mut Context<'_>) -> Option<Interruption> {
        let mut autosave = self.autosave.take()?;
        let saved = autosave.poll(context, || self.cursor());
        self.autosave = Some(autosave);
        saved.err().map(|error| {
            if matches!(error, Error::CursorLost { .. } | Error::BusGone { .. }) {
                self.reader.state.end();
            }
            Interruption::Failed(error)
        })
    }

    /// The next batch if `in_batches`, or else the next delivery, as a batch of its own. The rest in `current` goes first, one
    /// delivery at a time. The caller has worked on what was returned before.
    pub fn poll_given(&mut self, context: &mut Context<'_>, in_batches: bool) -> Poll<NextItem> {
        if self.reader.state.is_ended() {
            return Poll::Ready(None);
        }
        if let Some(gone) = self.reader.shared.context.stats.health.ended() {
            // Neither the rows in memory nor those in the store need belong to this bus any more.
            self.reader.state.end();
            return Poll::Ready(Some(Err(Interruption::Failed(gone.clone()))));
        }
        if let Some(failed) = self.poll_save(context) {
            return Poll::Ready(Some(Err(failed)));
        }
        if self.current.is_none() {
            if let Some(autosave) = &mut self.autosave {
                if autosave.is_ahead() {
                    return self.reader.poll_rest(context).map(|()| None);
                }
                if let Some(horizon) = autosave.take_expired() {
                    return Poll::Ready(Some(Err(Interruption::Expired { horizon })));
                }
            }
            match (ready!(self.reader.poll_next(context)), &mut self.autosave) {
                (Some(Err(Interruption::Expired { horizon })), Some(autosave)) => {
                    autosave.expire(horizon);
                    return self.poll_given(context, in_batches);
                }
                (Some(Ok(batch)), _) if !in_batches => self.current = Some(batch),
                (item, _) => return Poll::Ready(item),
            }
        }
        let next = self.current.as_mut().map(DeliveryBatch::take_first);
        self.current.take_if(|left| left.len() == 0);
        Poll::Ready(next.map(Ok))
    }
}

macro_rules! subscription {
    ($name:ident, $item:ty, $in_batches:literal, $into_item:expr) => {
        impl $name {
            /// The id of the subscriber: [`Dispatcher::unsubscribe`](crate::Dispatcher::unsubscribe) ends it.
            pub fn id(&self) -> SubscriberId {
                self.0.reader.state.id
            }

            /// The cursor: all wanted rows before it were returned. A subscription that starts from it misses nothing.
            pub fn cursor(&mut self) -> Cursor {
                self.0.cursor()
            }

            /// Saves the cursor of a durable subscription; call it once the returned items are worked on. Another subscription then
            /// starts from there. Does nothing if the cursor is saved already, or the subscription is not durable.
            ///
            /// Fails with [`Error::CursorLost`](crate::Error::CursorLost) if another subscriber has opened the cursor.
            pub async fn checkpoint(&mut self) -> Result<()> {
                let cursor = self.cursor();
                self.0.checkpoint_at(cursor).await
            }

            /// Replaces the filter. Rows that only the old filter wants are not delivered any more.
            /// Databases that both filters want miss nothing; others are delivered from the present cursor on.
            ///
            /// In the middle of a scan the scan starts over, for what the old filter did not want. So a subscription from nothing
            /// that is still in its first scan gets every database that the new filter wants, and the deletions of those
            /// that it may have been delivered before.
            pub fn replace(&mut self, filter: Filter) {
                let cursor = self.cursor();
                self.0.replace_at(filter, cursor);
            }
        }

        impl Stream for $name {
            type Item = Result<$item, Interruption>;

            fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
                self.0.poll_given(context, $in_batches).map_ok($into_item)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name)).field("id", &self.id()).finish_non_exhaustive()
            }
        }
    };
}

/// A stream of batches of deliveries: the cheapest way to receive many. It ends after the dispatcher has ended, or when the subscriber
/// is asked to end.
///
/// # Saving
///
/// A durable subscription saves its cursor by itself while it is polled: it takes a request for the next batch as a sign that the
/// batches before are worked on. It also saves while no row matches, so a quiet subscriber does not expire.
///
/// # Cancel safety
///
/// If the future is dropped, the next call returns the batch.
pub struct BatchSubscription(pub(super) Source);

subscription!(BatchSubscription, DeliveryBatch, true, identity);

/// A stream of deliveries, one at a time. It has the guarantees of a [`BatchSubscription`].
///
/// # Cancel safety
///
/// If the future is dropped, the next call returns the delivery.
pub struct Subscription(pub(super) Source);

subscription!(Subscription, Delivery, false, DeliveryBatch::into_first);
