//! [`Subscription`]: a stream of deliveries.

use std::{
    collections::{BTreeSet, HashMap},
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use futures_util::future::{BoxFuture, try_join_all};
use tokio_stream::Stream;

use super::{
    Delivery, Interruption, Shared, Since, Subscribe, SubscriberId,
    filter::Filter,
    pace::Pace,
    registry::{Listing, Registry, Seat, Seated},
    slots::Mailbox,
    walker::Walker,
};
use crate::{
    bugs::{Bug, is_on},
    encoding::Sequence,
    error::{Error, Result},
    event::{DbName, EventKind},
    named_cursor::OpenCursor,
    notification_feed::ChangedDdocs,
};

/// How many names are looked up by one transaction.
const LOOK_UPS_MAX: usize = 100;

/// How many transactions look names up at once.
const READERS_MAX: usize = 4;

/// A stream of deliveries. It ends after the dispatcher has, or once the subscriber is told to end.
///
/// # Cancel safety
///
/// A delivery that was not returned is returned by the next call.
pub struct Subscription {
    /// What the tail and the subscribers share.
    shared: Arc<Shared>,
    /// What it wants.
    filter: Filter,
    /// Where the deliveries come from.
    source: Source,
    /// Whether it would rather skip what it has missed than catch up.
    skips: bool,
    /// Whether it is told of the design documents that have changed.
    ddocs: bool,
    /// The delivery whose design documents are being read, if any are; `None` in it after a failure.
    in_hand: Option<(Delivery, Option<DdocRead>)>,
    /// The horizon, if it has expired by what it wanted before and was not told so; and how far it had come.
    expired: Option<(Sequence, Sequence)>,
    /// Where it puts down how far it has come.
    cursor: Option<OpenCursor>,
    /// Its place in the registry.
    seated: Seated,
}

/// A read of the design documents of a database.
type DdocRead = BoxFuture<'static, Result<ChangedDdocs>>;

/// Where deliveries come from.
enum Source {
    /// Slots of exact names, filled first by a look-up if the subscription starts in the past.
    Exact(Box<Exact>),
    /// The ring, and the feed.
    Walk(Box<Walker>),
}

impl Subscription {
    /// The subscription that was asked for.
    pub(super) fn new(subscribe: Subscribe) -> Self {
        let pace = subscribe.pace();
        let Subscribe { shared, filter, since, skips, ddocs, cursor, .. } = subscribe;
        let start = match since {
            Since::Now => shared.ring.position(),
            Since::After(sequence) => sequence,
        };
        let seated = Registry::enter(&shared);
        let source = Source::new(&shared, filter.clone(), skips, pace, start);
        Self { shared, filter, source, skips, ddocs, in_hand: None, expired: None, cursor, seated }
    }

    /// Which subscriber it is: [`Dispatcher::unsubscribe`](super::Dispatcher::unsubscribe) ends it.
    pub fn id(&self) -> SubscriberId {
        self.seated.id
    }

    /// Everything that happened up to here, of what it wants, was returned: whoever starts again from here misses nothing. It
    /// may stay behind while deliveries are waiting.
    pub fn position(&self) -> Sequence {
        // Whoever starts again from zero is not told that it has expired.
        if let Some((_, position)) = self.expired {
            return position;
        }
        match &self.source {
            Source::Walk(walker) => walker.known(),
            Source::Exact(exact) if self.in_hand.is_some() => exact.mailbox.noted(),
            Source::Exact(exact) => exact.known(),
        }
    }

    /// Puts the position down in the cursor of a durable subscription, once what was returned is worked on; another one starts
    /// from there. Does nothing if it stands there already, or the subscription is not durable.
    ///
    /// Fails with [`Error::CursorLost`] if another subscriber has opened the cursor.
    pub async fn checkpoint(&mut self) -> Result<()> {
        let position = if is_on(Bug::CursorAhead) { self.shared.ring.position() } else { self.position() };
        match &mut self.cursor {
            Some(cursor) => cursor.save(position).await,
            None => Ok(()),
        }
    }

    /// Where it puts down how far it has come; it does so no more.
    pub(crate) fn take_cursor(&mut self) -> Option<OpenCursor> {
        self.cursor.take()
    }

    /// What the tail and the subscribers share.
    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Whether it keeps a cursor.
    pub(super) fn is_durable(&self) -> bool {
        self.cursor.is_some()
    }

    /// Wants something else from now on. Nothing of the old filter that the new one does not want is delivered any more. Of
    /// databases that both want nothing is missed. Others are told of from [`Subscription::position`] on.
    ///
    /// What was delivered since that position can be delivered again if one of the filters has exact names and the other
    /// has not, or the old one names design documents.
    pub fn replace(&mut self, filter: Filter) {
        let mut position = self.position();
        self.ddocs |= filter.ddocs.is_some();
        let in_hand = self.in_hand.take();
        if let Source::Exact(exact) = &self.source
            && let Some(horizon) = exact.mailbox.expired()
        {
            self.expired = Some((horizon, position));
        }
        if self.expired.is_some() {
            position = Sequence::ZERO;
        }
        match (&mut self.source, filter.exact()) {
            (Source::Walk(walker), Some(_)) => {
                let pace = walker.take_pace();
                self.source = Source::new(&self.shared, filter.clone(), self.skips, pace, position);
            }
            (Source::Walk(walker), None) => walker.replace(filter.clone()),
            (Source::Exact(exact), Some(names)) => {
                let told = exact.told();
                let told = names.iter().map(|name| told.get(name).copied().unwrap_or(position)).collect();
                let pace = exact.pace.as_mut().map(Pace::take);
                let next = Exact::new(&self.shared, filter.clone(), Arc::clone(names), told, pace, position);
                // Only now the old one goes: in between both hear what comes.
                self.source = Source::Exact(Box::new(next));
            }
            (Source::Exact(exact), None) => {
                let pace = exact.pace.as_mut().map(Pace::take);
                self.source = Source::new(&self.shared, filter.clone(), self.skips, pace, position);
            }
        }
        // It has left its source, which will not give it again.
        self.in_hand =
            in_hand.filter(|(delivery, _)| filter.passes(delivery.notification(), delivery.since()));
        self.filter = filter;
    }

    /// The next delivery of the source, with its design documents if those are wanted.
    fn poll_delivery(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Delivery, Interruption>>> {
        loop {
            if let Some((delivery, read)) = &mut self.in_hand {
                let read = read.get_or_insert_with(|| read_ddocs(&self.shared, delivery));
                let ddocs = match ready!(read.as_mut().poll(context)) {
                    Ok(ddocs) => ddocs,
                    Err(error) => {
                        self.in_hand.as_mut().expect("it was just there").1 = None;
                        return Poll::Ready(Some(Err(Interruption::Failed(error))));
                    }
                };
                let (delivery, _) = self.in_hand.take().expect("it was just there");
                let delivery = delivery.with(&self.filter, Some(ddocs));
                if is_wanted(&self.filter, &delivery) {
                    return Poll::Ready(Some(Ok(delivery)));
                }
            }
            if let Some((horizon, _)) = self.expired.take() {
                return Poll::Ready(Some(Err(Interruption::Expired { horizon })));
            }
            let received = match &mut self.source {
                Source::Walk(walker) => walker.poll_next(&self.seated.seat, context),
                Source::Exact(exact) => exact.poll_next(&self.seated.seat, context),
            };
            let delivery = match ready!(received) {
                Some(Ok(delivery)) => delivery,
                other => return Poll::Ready(other),
            };
            if !self.ddocs {
                return Poll::Ready(Some(Ok(delivery.with(&self.filter, None))));
            }
            if !delivery.news().kinds().contains(EventKind::DdocUpdated) {
                return Poll::Ready(Some(Ok(delivery.with(&self.filter, Some(ChangedDdocs::default())))));
            }
            self.in_hand = Some((delivery, None));
        }
    }
}

/// Reads which design documents have changed since the subscriber knew the database of `delivery`.
fn read_ddocs(shared: &Arc<Shared>, delivery: &Delivery) -> DdocRead {
    let (shared, db, since) = (Arc::clone(shared), delivery.notification().db(), delivery.since());
    Box::pin(async move { shared.feed.ddocs(&db, since).await })
}

/// Whether `delivery`, which tells of changes of design documents, is wanted.
fn is_wanted(filter: &Filter, delivery: &Delivery) -> bool {
    let Some(wanted) = &filter.ddocs else { return true };
    (delivery.may_be_any_ddoc() && !is_on(Bug::DdocWithoutIdForgotten))
        || delivery.ddocs().is_some_and(|ddocs| ddocs.iter().any(|(id, _)| wanted.contains(id)))
        || filter.wants_besides_ddocs(delivery.notification(), delivery.since())
}

impl Stream for Subscription {
    type Item = Result<Delivery, Interruption>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let seat = &self.seated.seat;
        if seat.is_ended() {
            return Poll::Ready(None);
        }
        let (was_closed, alarms) = (seat.is_closed(), self.shared.registry.alarms());
        let polled = self.poll_delivery(context);
        if polled.is_pending() {
            let seat = &self.seated.seat;
            seat.register(context);
            let is_alarmed = self.shared.registry.alarms() != alarms;
            if seat.is_ended() || seat.is_closed() != was_closed || is_alarmed {
                context.waker().wake_by_ref();
            }
        }
        polled
    }
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscription").field("id", &self.seated.id).finish_non_exhaustive()
    }
}

impl Source {
    /// A source for a subscriber that knows everything up to `start`.
    fn new(shared: &Arc<Shared>, filter: Filter, skips: bool, pace: Option<Pace>, start: Sequence) -> Self {
        if let Some(names) = filter.exact() {
            let (names, told) = (Arc::clone(names), vec![start; names.len()]);
            return Self::Exact(Box::new(Exact::new(shared, filter, names, told, pace, start)));
        }
        Self::Walk(Box::new(Walker::new(Arc::clone(shared), filter, skips, pace, start)))
    }
}

/// A subscriber of exact names.
struct Exact {
    /// What it is given.
    mailbox: Arc<Mailbox>,
    /// Looks at the feed.
    look_up: LookUp,
    /// How often it is given something.
    pace: Option<Pace>,
    /// How many rows of the present round are left.
    left: usize,
    /// Its names in the registry.
    _listing: Listing,
}

impl Exact {
    /// A subscriber of `names` that knows everything up to `start`, and of each of them what `told` says.
    fn new(
        shared: &Arc<Shared>,
        filter: Filter,
        names: Arc<BTreeSet<DbName>>,
        told: Vec<Sequence>,
        pace: Option<Pace>,
        start: Sequence,
    ) -> Self {
        let mailbox = Arc::new(Mailbox::new(filter, told, start));
        let listing = Registry::list(shared, &mailbox, &names);
        // The slots are in place, so what is looked up now and what comes meet without a gap. The position is taken
        // after it: the tail may have handed rows out before there were slots.
        // Who starts ahead of the tail has nothing to look up, but may be ahead of the store as well.
        let is_at_end = start == shared.ring.position();
        let shared = Arc::clone(shared);
        let look_up = LookUp { shared, mailbox: Arc::clone(&mailbox), names, under_way: None };
        let look_up = if is_at_end { look_up } else { look_up.from(start) };
        Self { mailbox, look_up, pace, left: 0, _listing: listing }
    }

    /// Up to where the receiver has been told about each of its names.
    fn told(&self) -> HashMap<&DbName, Sequence> {
        self.look_up.names.iter().zip(self.mailbox.told()).collect()
    }

    /// Everything up to here was taken.
    fn known(&self) -> Sequence {
        if self.look_up.under_way.is_some() {
            return self.mailbox.noted();
        }
        self.mailbox.known(self.look_up.shared.registry.filled())
    }

    /// The next row that waits.
    fn poll_next(
        &mut self,
        seat: &Seat,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Delivery, Interruption>>> {
        if let Err(error) = ready!(self.look_up.poll(context)) {
            return Poll::Ready(Some(Err(Interruption::Failed(error))));
        }
        if let Some(pace) = self.pace.as_mut().filter(|_| self.left == 0) {
            pace.end();
            // What waits when all ends is not to wait for the next round.
            if !seat.is_closed() {
                ready!(pace.poll_open(context));
            }
            self.left = self.mailbox.waiting();
        }
        let taken = ready!(self.mailbox.poll_take(context));
        self.left = self.left.saturating_sub(1);
        if let Some(pace) = &mut self.pace {
            pace.begin();
        }
        if let Some(Err(Interruption::Expired { .. })) = &taken {
            self.look_up.begin(Sequence::ZERO);
        }
        Poll::Ready(taken)
    }
}

/// The looks of a subscriber of exact names at the feed: at its beginning, and after it has expired.
struct LookUp {
    /// Where to look.
    shared: Arc<Shared>,
    /// Where to put what is found.
    mailbox: Arc<Mailbox>,
    /// The names, in the order of the slots.
    names: Arc<BTreeSet<DbName>>,
    /// The look that is under way, and up to where the subscriber knows everything.
    under_way: Option<(Sequence, BoxFuture<'static, Result<()>>)>,
}

impl LookUp {
    /// Looks again, for a subscriber that knows everything up to `cursor`.
    fn from(mut self, cursor: Sequence) -> Self {
        self.begin(cursor);
        self
    }

    /// Begins to look.
    fn begin(&mut self, cursor: Sequence) {
        let look =
            look_up(cursor, Arc::clone(&self.shared), Arc::clone(&self.mailbox), Arc::clone(&self.names));
        self.under_way = Some((cursor, Box::pin(look)));
    }

    /// Completes when nothing is under way any more. After a failure it looks again.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<()>> {
        let Some((cursor, look)) = &mut self.under_way else {
            return Poll::Ready(Ok(()));
        };
        let cursor = *cursor;
        let done = ready!(look.as_mut().poll(context));
        self.under_way = None;
        match &done {
            Ok(()) => {}
            // The mailbox tells it, and then it is looked up from the beginning.
            Err(Error::Expired { horizon }) => {
                drop(self.mailbox.expire(*horizon));
                return Poll::Ready(Ok(()));
            }
            Err(_) => self.begin(cursor),
        }
        Poll::Ready(done)
    }
}

/// Puts the newest rows of `names`, in the order of the slots, into `mailbox`. Fails if `cursor` is ahead of the store, or
/// rows after it may have been dropped.
async fn look_up(
    cursor: Sequence,
    shared: Arc<Shared>,
    mailbox: Arc<Mailbox>,
    names: Arc<BTreeSet<DbName>>,
) -> Result<()> {
    if cursor > shared.ring.position() {
        shared.feed.page(cursor, 1).await?;
    }
    let all: Vec<_> = names.iter().collect();
    let mut slot = 0;
    for some in all.chunks(LOOK_UPS_MAX * READERS_MAX) {
        let read = some.chunks(LOOK_UPS_MAX).map(|names| shared.feed.newest_of_each(names));
        for row in try_join_all(read).await?.into_iter().flatten() {
            if let Some(row) = row {
                mailbox.put(slot, &Arc::new(row));
            }
            slot += 1;
        }
    }
    // Now, not before: what was missing above may have been dropped in between.
    let horizon = shared.feed.horizon().await?;
    if Sequence::ZERO < cursor && cursor < horizon {
        return Err(Error::Expired { horizon });
    }
    Ok(())
}
