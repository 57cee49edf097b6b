//! [`Subscription`], [`BatchSubscription`] and [`Deliveries`]: streams of what a subscriber receives; and [`Source`], which they and
//! callbacks are built on.

use std::{
    convert::identity,
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tokio_stream::Stream;

use super::{
    delivery::{BatchItem, Delivery, DeliveryBatch, Item, Trouble},
    log::SubscriberId,
    reader::{Order, Reader},
    shared::Shared,
};
use crate::base::cursor::Cursor;

/// Receives for a subscriber, in batches or one delivery at a time.
pub(super) struct Source {
    pub reader: Reader,
    /// The rest of a batch whose deliveries are returned one by one.
    pub current: Option<DeliveryBatch>,
}

impl Source {
    pub fn new(shared: Arc<Shared>, order: Order) -> Self {
        Self { reader: Reader::new(shared, order), current: None }
    }

    pub fn cursor(&mut self) -> Cursor {
        self.current.as_ref().map_or_else(|| self.reader.cursor(), |left| left.cursor_after(0))
    }

    /// Returns the next batch if `in_batches`, or else the next delivery as a batch of its own; `convert` is applied to either. The rest in
    /// `current` is returned first, one delivery at a time. The caller must have worked on everything returned before. When the
    /// subscription ends, the rest is not returned, and the cursor is before it.
    #[inline]
    pub fn poll_next<T>(
        &mut self,
        context: &mut Context<'_>,
        in_batches: bool,
        convert: impl FnOnce(DeliveryBatch) -> T,
    ) -> Poll<Option<Item<T>>> {
        if self.current.is_some()
            && !self.reader.state.is_ended()
            && let Some(first) = DeliveryBatch::take_first(&mut self.current)
        {
            return Poll::Ready(Some(Item::Delivery(convert(first))));
        }
        self.poll_reader(context, in_batches, convert)
    }

    /// Does the same as [`Source::poll_next`] if there is no rest. Not inlined into the caller's loop, to keep the rest cheap.
    #[cold]
    #[inline(never)]
    fn poll_reader<T>(
        &mut self,
        context: &mut Context<'_>,
        in_batches: bool,
        convert: impl FnOnce(DeliveryBatch) -> T,
    ) -> Poll<Option<Item<T>>> {
        if self.reader.is_over {
            return Poll::Ready(None);
        }
        if self.reader.state.is_ended() {
            self.reader.is_over = true;
            let gone = self.reader.shared.context.stats.health.ended();
            return Poll::Ready(gone.cloned().map(Item::Failed));
        }
        let item = ready!(self.reader.poll_next(context)).map(|batch| {
            if in_batches {
                return convert(batch);
            }
            self.current = Some(batch);
            convert(DeliveryBatch::take_first(&mut self.current).expect("a batch is not empty"))
        });
        Poll::Ready(Some(item))
    }
}

macro_rules! subscription {
    ($name:ident) => {
        impl $name {
            /// The id of the subscriber: [`Dispatcher::unsubscribe`](crate::Dispatcher::unsubscribe) ends it.
            pub fn id(&self) -> SubscriberId {
                self.source.reader.state.id
            }

            /// The cursor: all wanted rows before it have been returned, and no others. A subscription that starts from it misses nothing.
            pub fn cursor(&mut self) -> Cursor {
                self.source.cursor()
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name)).field("id", &self.id()).finish_non_exhaustive()
            }
        }
    };
}

/// A stream of [`Item`]s with batches of deliveries: the cheapest way to receive many. It ends when the dispatcher ends or the subscriber
/// is asked to end; rows that still wait are not delivered, and the cursor covers what was delivered.
///
/// # Cancel safety
///
/// If the future is dropped, the next call returns the batch.
pub struct BatchSubscription {
    pub(super) source: Source,
}

subscription!(BatchSubscription);

impl Stream for BatchSubscription {
    type Item = BatchItem;

    #[inline]
    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<BatchItem>> {
        self.source.poll_next(context, true, identity)
    }
}

/// A stream of [`Item`]s, one delivery at a time. It has the same guarantees as a [`BatchSubscription`].
///
/// # Cancel safety
///
/// If the future is dropped, the next call returns the delivery.
pub struct Subscription {
    pub(super) source: Source,
}

subscription!(Subscription);

impl Stream for Subscription {
    type Item = Item;

    #[inline]
    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Item>> {
        self.source.poll_next(context, false, DeliveryBatch::into_first)
    }
}

/// A stream of deliveries alone, for plain loops; a closure gets everything else ([`Subscribe::deliveries`](super::Subscribe::deliveries)).
/// It has the same guarantees as a [`BatchSubscription`].
///
/// # Cancel safety
///
/// If the future is dropped, the next call returns the delivery.
pub struct Deliveries {
    pub(super) source: Source,
    pub(super) on_trouble: Box<dyn FnMut(Trouble) + Send>,
}

subscription!(Deliveries);

impl Stream for Deliveries {
    type Item = Delivery;

    #[inline]
    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Delivery>> {
        loop {
            let next = self.source.poll_next(context, false, DeliveryBatch::into_first);
            let Some(item) = ready!(next) else { return Poll::Ready(None) };
            match item.sorted() {
                Ok(Some(delivery)) => return Poll::Ready(Some(delivery)),
                Ok(None) => {}
                Err(trouble) => (self.on_trouble)(trouble),
            }
        }
    }
}
