//! [`Fanout`]: a dispatcher without its tail.

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

/// A dispatcher without the tail that reads the feed: the caller pushes rows. For tests of
/// subscribers and for benchmarks. Dropping it ends its subscriptions after the deliveries that wait for them.
#[derive(Debug)]
#[must_use = "dropping it ends its subscriptions"]
pub struct Fanout {
    shared: Arc<Shared>,
    /// Whether dropping it ends the subscriptions.
    is_owner: bool,
}

impl Fanout {
    pub(crate) fn new(context: Arc<Context>, options: DispatcherOptions, start: Sequence) -> Result<Self> {
        options.check()?;
        Ok(Self { shared: Shared::new(context, options, start), is_owner: true })
    }

    /// A handle that ends no subscription.
    pub(super) fn handle(&self) -> Self {
        Self { shared: Arc::clone(&self.shared), is_owner: false }
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// As [`Dispatcher::reached`](super::Dispatcher::reached).
    pub(crate) async fn reached(&self, version: u64) -> Result<Sequence> {
        self.shared.reached(version).await
    }

    /// Subscribes to the databases that `filter` matches. Choose the start and the way of receiving on the returned value.
    pub fn subscribe(&self, filter: Filter) -> Subscribe {
        Subscribe::new(Arc::clone(&self.shared), filter)
    }

    /// Ends the subscriber `id`. Fails with [`Error::NoSubscriber`] if there is no such subscriber or it has ended.
    pub fn unsubscribe(&self, id: SubscriberId) -> Result<()> {
        self.shared.end(id)
    }

    /// Publishes `rows` as if a tail had read them, and had read everything up to `to`. The rows must be in order, after the
    /// present position and not after `to`; fails with [`Error::Invalid`] otherwise. For one caller at a time.
    pub fn push(&self, rows: Vec<Arc<Notification>>, to: Sequence) -> Result<()> {
        let from = self.position();
        let ends = rows.first().map_or(to, |row| row.sequence)..=rows.last().map_or(to, |row| row.sequence);
        if !rows.is_sorted_by(|a, b| a.sequence < b.sequence) || *ends.start() <= from || *ends.end() > to {
            return Err(Error::invalid("rows", format!("they are not in order between {from} and {to}")));
        }
        self.shared.publish(rows, to, true);
        Ok(())
    }

    /// The position up to which rows have been published.
    pub fn position(&self) -> Sequence {
        self.shared.ring.position()
    }

    /// Number of present subscriptions, without those whose stream or handle was dropped.
    pub fn subscribers(&self) -> usize {
        self.shared.count()
    }
}

impl Drop for Fanout {
    fn drop(&mut self) {
        if self.is_owner {
            self.shared.close();
        }
    }
}
