//! [`Subscribe`]: how to subscribe.

use std::{fmt, sync::Arc, time::Duration};

use super::{
    CallbackHandle, Delivery, Shared, Subscription, callback,
    filter::Filter,
    listener::{Listen, Listener},
    pace::Pace,
};
use crate::{
    bugs::{Bug, is_on},
    encoding::Sequence,
    error::{Error, Result},
    named_cursor::{NamedCursor, OpenCursor},
};

/// Where a subscription starts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Since {
    /// With what comes after the tail's present position. Events that were committed before the subscription but not yet
    /// told may be delivered.
    #[default]
    Now,
    /// After this sequence; [`Sequence::ZERO`] to be told of every database first. Whoever starts ahead of the store, with
    /// the cursor of another bus, gets [`Interruption::Failed`](super::Interruption) with [`Error::Invalid`].
    After(Sequence),
}

/// A subscription in the making.
#[must_use = "choose a stream, a callback or a listener to subscribe"]
pub struct Subscribe {
    /// What the tail and the subscribers share.
    pub(super) shared: Arc<Shared>,
    /// What it wants.
    pub(super) filter: Filter,
    /// Where it starts.
    pub(super) since: Since,
    /// Whether it would rather skip what it has missed than catch up.
    pub(super) skips: bool,
    /// How often it is given something; `None` for at once.
    pace: Option<Duration>,
    /// Whether it is told of the design documents that have changed.
    pub(super) ddocs: bool,
    /// Where it puts down how far it has come.
    pub(super) cursor: Option<OpenCursor>,
}

impl Subscribe {
    /// A subscription from now on that catches up.
    pub(super) fn new(shared: Arc<Shared>, filter: Filter) -> Self {
        let ddocs = filter.ddocs.is_some();
        Self { shared, filter, since: Since::Now, skips: false, pace: None, ddocs, cursor: None }
    }

    /// Starts elsewhere than now.
    pub fn since(self, since: Since) -> Self {
        Self { since, ..self }
    }

    /// Skips what it has missed when it falls behind the dispatcher's ring, and says so with
    /// [`Interruption::Lagged`](super::Interruption). Subscribers of exact names never fall behind.
    pub fn skip_when_lagging(self) -> Self {
        Self { skips: true, ..self }
    }

    /// Delivers in rounds that begin at least `pace` apart, the first at once. In a round each database comes once, with all
    /// that is new of it since it came last; also twice while the subscriber catches up with the feed. So a database that is
    /// updated a thousand times costs an indexer that comes by each minute one delivery.
    ///
    /// Fails with [`Error::Invalid`] if it is zero: leave it out to be told at once.
    pub fn every(self, pace: Duration) -> Result<Self> {
        if pace.is_zero() {
            return Err(Error::invalid("pace", "it is zero; leave it out to be told at once"));
        }
        Ok(Self { pace: Some(pace), ..self })
    }

    /// Deliveries that tell of design documents say which were written or deleted ([`Delivery::ddocs`]). Each of them costs
    /// a read of the rows that the database's design documents have.
    pub fn with_ddocs(self) -> Self {
        Self { ddocs: true, ..self }
    }

    /// Starts where `cursor` stands, and keeps in it how far it has come: a restart of the process misses nothing, and may be
    /// told again what came after the last checkpoint. If the cursor is new, it begins where this subscription would have
    /// started, which is put down at once.
    ///
    /// A callback or a listener puts down by itself what it has worked on; with a stream, call
    /// [`Subscription::checkpoint`]. Whoever had the cursor open before loses it.
    pub async fn durable(self, cursor: &NamedCursor) -> Result<Self> {
        let start = match self.since {
            Since::Now => self.shared.ring.position(),
            Since::After(sequence) => sequence,
        };
        let (cursor, position) = cursor.open(start).await?;
        let position = if is_on(Bug::CursorNotRead) { start } else { position };
        Ok(Self { since: Since::After(position), cursor: Some(cursor), ..self })
    }

    /// Receives by a stream. Dropping it ends the subscription.
    pub fn stream(self) -> Subscription {
        Subscription::new(self)
    }

    /// Receives by an async callback, in a task of its own. The subscription ends when the handle is dropped.
    ///
    /// Deliveries come one after the other. A panic of the callback, or of the filter's predicate, is caught, logged and
    /// counted, and the subscription goes on with the next delivery; it affects no other subscriber. `Lagged` and failures
    /// are logged. Who wants to decide what becomes of panics and interruptions writes a [`Listener`].
    pub fn callback<F, R>(self, callback: F) -> CallbackHandle
    where
        F: FnMut(Delivery) -> R + Send + 'static,
        R: Future<Output = ()> + Send + 'static,
    {
        callback::spawn(self, callback)
    }

    /// Receives by a supervised [`Listener`], in a task of its own; `factory` makes it, and another one after a panic. Choose
    /// its name and its restarts on what is returned, and start it.
    pub fn listener<L, F>(self, factory: F) -> Listen<L, F>
    where
        L: Listener,
        F: FnMut() -> L + Send + 'static,
    {
        Listen::new(self, factory)
    }

    /// How often it is given something.
    pub(super) fn pace(&self) -> Option<Pace> {
        self.pace.map(|every| Pace::new(every, self.shared.context.env()))
    }
}

impl fmt::Debug for Subscribe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscribe")
            .field("filter", &self.filter)
            .field("since", &self.since)
            .field("pace", &self.pace)
            .finish_non_exhaustive()
    }
}
