//! [`Supervision`]: events in the life of supervised subscribers.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::sync::broadcast;
use tokio_stream::{
    Stream,
    wrappers::{BroadcastStream, errors::BroadcastStreamRecvError},
};

use super::{listener::StopReason, log::SubscriberId};
use crate::base::{encoding::Sequence, event::DbName};

/// How many events are kept for a slow reader.
pub(super) const EVENTS_MAX: usize = 1_024;

/// An event in the life of a supervised subscriber.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Supervision {
    /// The subscriber.
    pub id: SubscriberId,
    /// Its name, if it has one.
    pub name: Option<Arc<str>>,
    /// What happened to it.
    pub what: Supervised,
}

/// What happened to a supervised subscriber.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Supervised {
    /// It was started.
    Started,
    /// The listener, its factory or the predicate of its filter has panicked.
    Panicked {
        /// The message of the panic.
        text: String,
        /// The row that it was working on, if any.
        at: Option<Sequence>,
    },
    /// It will be restarted.
    Restarting {
        /// The number of this restart.
        restarts: u32,
        /// The pause before it.
        after: Duration,
    },
    /// It has panicked on a row as often as allowed; the row is skipped.
    PassedOver {
        /// The database.
        name: DbName,
        /// The row.
        sequence: Sequence,
    },
    /// It has ended.
    Stopped(StopReason),
}

/// How many events a reader that was too slow has missed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} supervision events were missed")]
pub struct Missed(pub u64);

/// A stream of supervision events. It ends after the dispatcher has.
#[derive(Debug)]
pub struct SupervisionEvents(BroadcastStream<Supervision>);

impl From<&broadcast::Sender<Supervision>> for SupervisionEvents {
    fn from(events: &broadcast::Sender<Supervision>) -> Self {
        Self(BroadcastStream::new(events.subscribe()))
    }
}

impl Stream for SupervisionEvents {
    type Item = Result<Supervision, Missed>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let event = ready!(Pin::new(&mut self.0).poll_next(context));
        Poll::Ready(event.map(|event| event.map_err(|BroadcastStreamRecvError::Lagged(count)| Missed(count))))
    }
}
