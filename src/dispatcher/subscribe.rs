//! [`Subscribe`] and [`Subscription`]: how to subscribe, and what a subscriber receives.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use futures_util::future::BoxFuture;
use tokio_stream::Stream;

use super::{
    CallbackHandle, Shared, callback,
    filter::{Filter, Names},
    registry::{Registration, Registry},
    slots::Mailbox,
    walker::Walker,
};
use crate::{
    encoding::Sequence,
    error::{Error, Result},
    event::DbName,
    notification::{News, Notification},
};

/// Where a subscription starts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Since {
    /// With what comes after the tail's present position. Events that were committed before the subscription but not yet
    /// told may be delivered.
    #[default]
    Now,
    /// After this sequence; [`Sequence::ZERO`] to be told of every database first. Whoever starts ahead of the store, with
    /// the cursor of another bus, gets [`Interruption::Failed`] with [`Error::Invalid`].
    After(Sequence),
}

/// A row, as news to one subscriber.
#[derive(Debug, Clone)]
pub struct Delivery {
    /// The row.
    row: Arc<Notification>,
    /// Up to where the subscriber knew the database.
    since: Sequence,
}

impl Delivery {
    /// `row` for a subscriber that knew the database up to `since`.
    pub(super) fn new(row: Arc<Notification>, since: Sequence) -> Self {
        Self { row, since }
    }

    /// The newest row of the database.
    pub fn notification(&self) -> &Arc<Notification> {
        &self.row
    }

    /// What is new to this subscriber, in the order in which it happened.
    ///
    /// Nothing is left out. While the subscriber catches up over several pages of the feed, a database that moves meanwhile
    /// can be delivered again with kinds that were told before.
    pub fn news(&self) -> News {
        self.row.news_since(self.since)
    }

    /// Up to where the subscriber knew everything of every database that it wants. Whoever starts again from here misses
    /// nothing, and may be told again what came after it.
    pub fn since(&self) -> Sequence {
        self.since
    }

    /// The position of the row. Other databases may have had events before it that are still to be delivered, so this is
    /// no place to start again from, unless the subscription is to one name.
    pub fn sequence(&self) -> Sequence {
        self.row.sequence
    }
}

/// Why a subscription has something other than a row to say.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Interruption {
    /// A subscriber that skips has fallen behind: it was not told of what lies between. It goes on from `to`.
    #[error("skipped everything between {from} and {to}")]
    Lagged {
        /// The last position that it knew.
        from: Sequence,
        /// Where it goes on.
        to: Sequence,
    },
    /// The subscriber was away for so long that rows which it has not seen may have been dropped: databases that it knows
    /// may be gone. It should forget what it knows; it goes on as one who knows nothing, with every database that it wants.
    #[error("rows up to {horizon} may have been dropped unseen")]
    Expired {
        /// Up to where rows may have been dropped.
        horizon: Sequence,
    },
    /// The feed could not be read. The subscriber keeps its position; receiving again tries again.
    #[error(transparent)]
    Failed(#[from] Error),
}

/// A subscription in the making.
#[must_use = "choose a stream or a callback to subscribe"]
pub struct Subscribe {
    /// What the tail and the subscribers share.
    shared: Arc<Shared>,
    /// What it wants.
    filter: Filter,
    /// Where it starts.
    since: Since,
    /// Whether it would rather skip what it has missed than catch up.
    skips: bool,
}

impl Subscribe {
    /// A subscription from now on that catches up.
    pub(super) fn new(shared: Arc<Shared>, filter: Filter) -> Self {
        Self { shared, filter, since: Since::Now, skips: false }
    }

    /// Starts elsewhere than now.
    pub fn since(self, since: Since) -> Self {
        Self { since, ..self }
    }

    /// Skips what it has missed when it falls behind the dispatcher's ring, and says so with [`Interruption::Lagged`].
    /// Subscribers of exact names never fall behind.
    pub fn skip_when_lagging(self) -> Self {
        Self { skips: true, ..self }
    }

    /// Receives by a stream. Dropping it ends the subscription.
    pub fn stream(self) -> Subscription {
        let Self { shared, filter, since, skips } = self;
        let now = shared.ring.position();
        let cursor = match since {
            Since::Now => now,
            Since::After(sequence) => sequence,
        };
        let (registration, source) = if let Names::Exact(names) = filter.names.clone() {
            let mailbox = Arc::new(Mailbox::new(filter, names.len(), cursor));
            let registration = Registry::enter(&shared, Some((Arc::clone(&mailbox), names.clone())));
            if shared.ring.is_closed() {
                mailbox.close();
            }
            // The slots are in place, so what is looked up now and what comes meet without a gap. The position is taken
            // again: the tail may have handed rows out before there were slots.
            // Who starts ahead of the tail has nothing to look up, but may be ahead of the store as well.
            let is_at_end = cursor == shared.ring.position();
            let names = names.into_iter().collect();
            let look_up = LookUp { shared, mailbox: Arc::clone(&mailbox), names, under_way: None };
            let look_up = if is_at_end { look_up } else { look_up.from(cursor) };
            (registration, Source::Exact { mailbox, look_up })
        } else {
            let registration = Registry::enter(&shared, None);
            (registration, Source::Walk(Box::new(Walker::new(Arc::clone(&shared), filter, skips, cursor))))
        };
        Subscription { source, _registration: registration }
    }

    /// Receives by an async callback, in a task of its own. The subscription ends when the handle is dropped.
    ///
    /// Deliveries come one after the other. A panic of the callback, or of the filter's predicate, is caught, logged and counted, and the subscription
    /// goes on with the next delivery; it affects no other subscriber. `Lagged` and failures are logged.
    pub fn callback<F, R>(self, callback: F) -> CallbackHandle
    where
        F: FnMut(Delivery) -> R + Send + 'static,
        R: Future<Output = ()> + Send + 'static,
    {
        let context = Arc::clone(&self.shared.context);
        callback::spawn(context, self.stream(), callback)
    }
}

impl fmt::Debug for Subscribe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscribe")
            .field("filter", &self.filter)
            .field("since", &self.since)
            .finish_non_exhaustive()
    }
}

/// The looks of a subscriber of exact names at the feed: at its beginning, and after it has expired.
struct LookUp {
    /// Where to look.
    shared: Arc<Shared>,
    /// Where to put what is found.
    mailbox: Arc<Mailbox>,
    /// The names, in the order of the slots.
    names: Arc<[DbName]>,
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
    names: Arc<[DbName]>,
) -> Result<()> {
    if cursor > shared.ring.position() {
        shared.feed.page(cursor, 1).await?;
    }
    for (slot, name) in names.iter().enumerate() {
        if let Some(row) = shared.feed.newest(name).await? {
            mailbox.put(slot, &Arc::new(row));
        }
    }
    // Now, not before: what was missing above may have been dropped in between.
    let horizon = shared.feed.horizon().await?;
    if Sequence::ZERO < cursor && cursor < horizon {
        return Err(Error::Expired { horizon });
    }
    Ok(())
}

/// A stream of deliveries. It ends after the dispatcher has.
///
/// # Cancel safety
///
/// A delivery that was not returned is returned by the next call.
pub struct Subscription {
    /// Where the deliveries come from.
    source: Source,
    /// Takes the subscription out of the registry.
    _registration: Registration,
}

/// Where deliveries come from.
enum Source {
    /// Slots of exact names, filled first by a look-up if the subscription starts in the past.
    Exact {
        /// The slots.
        mailbox: Arc<Mailbox>,
        /// Looks at the feed.
        look_up: LookUp,
    },
    /// The ring, and the feed.
    Walk(Box<Walker>),
}

#[cfg(feature = "http")]
impl Subscription {
    /// Up to where the subscriber was told of everything that it wants; `None` if it wants exact names.
    pub(crate) fn known(&self) -> Option<Sequence> {
        match &self.source {
            Source::Exact { .. } => None,
            Source::Walk(walker) => Some(walker.known()),
        }
    }
}

impl Stream for Subscription {
    type Item = Result<Delivery, Interruption>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match &mut self.source {
            Source::Walk(walker) => walker.poll_next(context),
            Source::Exact { mailbox, look_up } => {
                if let Err(error) = ready!(look_up.poll(context)) {
                    return Poll::Ready(Some(Err(Interruption::Failed(error))));
                }
                let taken = ready!(mailbox.poll_take(context));
                if let Some(Err(Interruption::Expired { .. })) = &taken {
                    look_up.begin(Sequence::ZERO);
                }
                Poll::Ready(taken)
            }
        }
    }
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Subscription")
    }
}
