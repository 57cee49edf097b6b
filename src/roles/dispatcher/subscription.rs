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
use crate::base::{cursor::Cursor, error::Result, filter::Filter};

/// Receives for a subscriber, in batches or one delivery at a time.
pub(super) struct Source {
    pub reader: Reader,
    /// The rest of a batch that is returned one by one.
    pub current: Option<DeliveryBatch>,
}

impl Source {
    pub fn new(shared: Arc<Shared>, order: Order) -> Self {
        Self { reader: Reader::new(shared, order), current: None }
    }

    pub fn cursor(&mut self) -> Cursor {
        self.current.as_ref().map_or_else(|| self.reader.cursor(), |left| left.cursor_after(0))
    }

    pub fn replace_at(&mut self, filter: Filter, cursor: Cursor) {
        self.current = None;
        self.reader.replace(filter, cursor);
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
        if self.current.is_none() {
            match ready!(self.reader.poll_next(context)) {
                Some(Ok(batch)) if !in_batches => self.current = Some(batch),
                item => return Poll::Ready(item),
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
