//! [`BatchSubscription`] and [`Subscription`]: streams of what a subscriber is delivered.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tokio_stream::Stream;

use super::{
    Delivery, DeliveryBatch, Interruption, Shared, Subscribe, SubscriberId,
    autosave::Autosave,
    filter::Filter,
    reader::{Reader, Wish},
};
use crate::{
    base::{
        bugs::{Bug, is_on},
        cursor::{Cursor, Start},
        error::Result,
    },
    state::named_cursor::OpenCursor,
};

/// A stream of batches of deliveries: the cheapest way to receive many. It ends after the dispatcher has, or once the subscriber
/// is told to end.
///
/// # Saving
///
/// A durable one saves its cursor by itself while it is polled: whoever asks for the next batch has worked on those before.
/// That goes on while nothing matches, so a quiet subscriber does not expire.
///
/// # Cancel safety
///
/// A batch that was not returned is returned by the next call.
pub struct BatchSubscription {
    /// Where the batches come from.
    reader: Reader,
    /// The cursor of a durable one.
    autosave: Option<Box<Autosave>>,
    /// Whether another subscriber has opened that.
    is_lost: bool,
}

impl BatchSubscription {
    /// The subscription that was asked for.
    pub(super) fn new(subscribe: Subscribe) -> Self {
        let pace = subscribe.pace();
        let Subscribe { shared, filter, start, is_caught_up, skips, ddocs, cursor, save_interval, .. } =
            subscribe;
        let autosave = cursor.map(|cursor| {
            Box::new(Autosave::new(cursor, filter.hash(), save_interval, shared.context.env()))
        });
        let cursor = shared.cursor_at(start);
        let reader = Reader::new(shared, Wish { filter, skips, pace, ddocs }, cursor, is_caught_up);
        Self { reader, autosave, is_lost: false }
    }

    /// Which subscriber it is: [`Dispatcher::unsubscribe`](super::Dispatcher::unsubscribe) ends it.
    pub fn id(&self) -> SubscriberId {
        self.reader.id()
    }

    /// Where it stands: everything before, of what it wants, was returned. Whoever starts again from here misses nothing.
    pub fn cursor(&mut self) -> Cursor {
        self.reader.cursor()
    }

    /// Saves where it stands in the cursor of a durable subscription, once what was returned is worked on; another one starts
    /// from there. Does nothing if it is saved already, or the subscription is not durable.
    ///
    /// Fails with [`Error::CursorLost`](crate::Error::CursorLost) if another subscriber has opened the cursor.
    pub async fn checkpoint(&mut self) -> Result<()> {
        let cursor = self.cursor();
        self.checkpoint_at(cursor).await
    }

    /// Wants something else from now on. Nothing of the old filter that the new one does not want is delivered any more. Of
    /// databases that both want nothing is missed; others are delivered from where the subscription stands.
    ///
    /// In the middle of a scan the scan starts over, for what the old filter did not want. So a subscription from nothing that is
    /// still in its first scan is delivered every database that the new filter wants; and the deletions of those that it may have
    /// been delivered before.
    pub fn replace(&mut self, filter: Filter) {
        let cursor = self.cursor();
        self.replace_at(filter, cursor);
    }

    /// [`BatchSubscription::replace`], standing at `cursor`.
    fn replace_at(&mut self, filter: Filter, cursor: Cursor) {
        let hash = filter.hash();
        let is_set_back = self.reader.replace(filter, cursor);
        if let Some(autosave) = &mut self.autosave {
            autosave.replace(hash, is_set_back);
        }
    }

    /// [`BatchSubscription::checkpoint`] at `cursor`.
    pub(super) async fn checkpoint_at(&mut self, cursor: Cursor) -> Result<()> {
        let cursor = if is_on(Bug::CursorAhead) { self.shared().ring.position().into() } else { cursor };
        match &mut self.autosave {
            Some(autosave) => autosave.save(cursor).await,
            None => Ok(()),
        }
    }

    /// What the tail and the subscribers share.
    pub(super) fn shared(&self) -> &Arc<Shared> {
        self.reader.shared()
    }

    /// The next batch. What was returned before is worked on.
    fn poll_batch(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<DeliveryBatch, Interruption>>> {
        if self.is_lost {
            return Poll::Ready(None);
        }
        if let Some(lost) = self.poll_save(context, None) {
            return Poll::Ready(Some(Err(lost)));
        }
        if self.autosave.as_ref().is_some_and(|autosave| autosave.is_ahead()) {
            return self.reader.poll_rest(context).map(|()| None);
        }
        self.reader.poll_next(context)
    }

    /// Goes on saving where it stands: at `cursor`, or what is known of it without. Fails if another subscriber has opened the cursor.
    fn poll_save(&mut self, context: &mut Context<'_>, cursor: Option<Cursor>) -> Option<Interruption> {
        let Self { reader, autosave, is_lost } = self;
        let stands_at = || {
            if is_on(Bug::CursorAhead) {
                return reader.shared().ring.position().into();
            }
            cursor.unwrap_or_else(|| reader.cursor())
        };
        let error = autosave.as_mut()?.poll(context, stands_at).err()?;
        *is_lost = true;
        Some(Interruption::Failed(error))
    }
}

impl Stream for BatchSubscription {
    type Item = Result<DeliveryBatch, Interruption>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_batch(context)
    }
}

impl fmt::Debug for BatchSubscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchSubscription").field("id", &self.id()).finish_non_exhaustive()
    }
}

/// A stream of deliveries, one at a time: those of a [`BatchSubscription`], which says what it promises.
///
/// # Cancel safety
///
/// A delivery that was not returned is returned by the next call.
pub struct Subscription {
    /// Where they come from.
    batches: BatchSubscription,
    /// The batch that is being returned, and how much of it was.
    current: Option<(DeliveryBatch, usize)>,
}

impl Subscription {
    /// The subscription that was asked for.
    pub(super) fn new(subscribe: Subscribe) -> Self {
        Self { batches: BatchSubscription::new(subscribe), current: None }
    }

    /// Which subscriber it is: [`Dispatcher::unsubscribe`](super::Dispatcher::unsubscribe) ends it.
    pub fn id(&self) -> SubscriberId {
        self.batches.id()
    }

    /// Where it stands: everything before, of what it wants, was returned. Whoever starts again from here misses nothing.
    pub fn cursor(&mut self) -> Cursor {
        match &self.current {
            Some((batch, returned)) => batch.cursor_after(*returned),
            None => self.batches.cursor(),
        }
    }

    /// Saves where it stands: [`BatchSubscription::checkpoint`].
    pub async fn checkpoint(&mut self) -> Result<()> {
        let cursor = self.cursor();
        self.checkpoint_at(cursor).await
    }

    /// [`Subscription::checkpoint`] at `cursor`.
    pub(super) async fn checkpoint_at(&mut self, cursor: Cursor) -> Result<()> {
        self.batches.checkpoint_at(cursor).await
    }

    /// Wants something else from now on: [`BatchSubscription::replace`].
    pub fn replace(&mut self, filter: Filter) {
        let cursor = self.cursor();
        self.replace_at(filter, cursor);
    }

    /// [`Subscription::replace`], standing at `cursor`.
    pub(super) fn replace_at(&mut self, filter: Filter, cursor: Cursor) {
        self.current = None;
        self.batches.replace_at(filter, cursor);
    }

    /// Its cursor in the store, if it is durable; it saves it no more.
    pub(crate) fn take_cursor(&mut self) -> Option<OpenCursor> {
        self.batches.autosave.take().map(|autosave| autosave.into_cursor())
    }

    /// What the tail and the subscribers share.
    pub(super) fn shared(&self) -> &Arc<Shared> {
        self.batches.shared()
    }

    /// What is left of the batch that is being returned, or the next one.
    pub(super) fn poll_batch(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<DeliveryBatch, Interruption>>> {
        debug_assert!(self.current.is_none(), "a listener receives batches or deliveries, not both");
        self.batches.poll_batch(context)
    }
}

impl Stream for Subscription {
    type Item = Result<Delivery, Interruption>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self { batches, current } = &mut *self;
        loop {
            if let Some((batch, returned)) = current {
                if batches.reader.is_ended() {
                    return Poll::Ready(None);
                }
                if *returned < batch.len() {
                    if batches.autosave.is_some() {
                        if batches.is_lost {
                            return Poll::Ready(None);
                        }
                        let stands_at = batch.cursor_after(*returned);
                        if let Some(lost) = batches.poll_save(context, Some(stands_at)) {
                            return Poll::Ready(Some(Err(lost)));
                        }
                    }
                    *returned += 1;
                    return Poll::Ready(Some(Ok(batch.delivery(*returned - 1))));
                }
                *current = None;
            }
            match ready!(batches.poll_batch(context)) {
                Some(Ok(batch)) => *current = Some((batch, 0)),
                Some(Err(interruption)) => return Poll::Ready(Some(Err(interruption))),
                None => return Poll::Ready(None),
            }
        }
    }
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscription").field("id", &self.id()).finish_non_exhaustive()
    }
}

impl Shared {
    /// The cursor of a subscriber that starts there.
    pub(super) fn cursor_at(&self, start: Start) -> Cursor {
        match start {
            Start::Now => self.ring.position().into(),
            Start::At(cursor) => cursor,
        }
    }
}
