//! [`Fanout`]: the dispatcher without its tail.

use std::sync::Arc;

use super::{log::SubscriberId, options::DispatcherOptions, shared::Shared, subscribe::Subscribe};
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
        filter::Filter,
        notification::Notification,
    },
    state::context::Context,
};

/// The part of a dispatcher that fans out, without the tail that reads the feed. Rows are pushed by hand: for tests of
/// subscribers, and for benchmarks. Dropping it ends its subscriptions after what they have been given.
#[derive(Debug)]
#[must_use = "dropping it ends its subscriptions"]
pub struct Fanout(Arc<Shared>);

impl Fanout {
    /// A fan-out that stands at `start`.
    pub(crate) fn new(context: Arc<Context>, options: &DispatcherOptions, start: Sequence) -> Result<Self> {
        options.check()?;
        Ok(Self(Shared::new(context, options, start)))
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.0
    }

    /// Subscribes to the databases that `filter` matches. Choose where to start and how to receive on what is returned.
    pub fn subscribe(&self, filter: Filter) -> Subscribe {
        Subscribe::new(Arc::clone(&self.0), filter)
    }

    /// Ends the subscriber `id`. Fails with [`Error::NoSubscriber`] if there is none, or not any more.
    pub fn unsubscribe(&self, id: SubscriberId) -> Result<()> {
        self.0.end(id)
    }

    /// Hands out `rows` as if a tail had read them, and everything up to `to`. The rows must be in order, after the
    /// present position and not after `to`; fails with [`Error::Invalid`] otherwise. One caller at a time.
    pub fn push(&self, rows: Vec<Arc<Notification>>, to: Sequence) -> Result<()> {
        let from = self.position();
        let ends = rows.first().map_or(to, |row| row.sequence)..=rows.last().map_or(to, |row| row.sequence);
        if !rows.is_sorted_by(|a, b| a.sequence < b.sequence) || *ends.start() <= from || *ends.end() > to {
            return Err(Error::invalid("rows", format!("they are not in order between {from} and {to}")));
        }
        self.0.hand_out(rows, to, true);
        Ok(())
    }

    /// Up to where rows have been handed out.
    pub fn position(&self) -> Sequence {
        self.0.ring.position()
    }

    /// How many subscriptions there are now, those of dropped streams and handles not among them.
    pub fn subscribers(&self) -> usize {
        self.0.subscribers.len()
    }
}

/// A way to a dispatcher that does not keep it running: once it has ended, so does what subscribes.
#[derive(Debug, Clone)]
pub(crate) struct Subscriptions(Arc<Shared>);

impl Subscriptions {
    /// To the dispatcher of `shared`.
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        Self(Arc::clone(shared))
    }

    /// As [`Dispatcher::reached`](super::Dispatcher::reached).
    pub async fn reached(&self, version: u64) -> Result<Sequence> {
        self.0.reached(version).await
    }

    /// As [`Fanout::subscribe`].
    #[cfg(feature = "http")]
    pub fn subscribe(&self, filter: Filter) -> Subscribe {
        Subscribe::new(Arc::clone(&self.0), filter)
    }

    /// As [`Fanout::position`].
    #[cfg(feature = "http")]
    pub fn position(&self) -> Sequence {
        self.0.ring.position()
    }

    /// As [`Fanout::subscribers`].
    #[cfg(feature = "http")]
    pub fn subscribers(&self) -> usize {
        self.0.subscribers.len()
    }
}

impl Drop for Fanout {
    fn drop(&mut self) {
        self.0.close();
    }
}
