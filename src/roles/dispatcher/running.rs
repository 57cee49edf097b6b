//! [`Dispatcher`], and its tail: the one task of a node that reads the feed as it grows.

use std::sync::Arc;

use super::{
    log::SubscriberId,
    reader::Order,
    shared::{DispatcherOptions, Shared},
    subscribe::Subscribe,
};
#[cfg(any(test, feature = "test-util"))]
use crate::base::notification::Notification;
use crate::{
    base::{
        backoff::FAILURE_PAUSE,
        encoding::Sequence,
        error::{Error, Result},
        event::DbName,
        filter::Filter,
        tasks::{SHUTDOWN_MAX, Task, supervised},
    },
    state::context::Context,
};

const TAIL: &str = "tail of a dispatcher";

/// Delivers the feed to its subscribers. Dropping it, or [`Dispatcher::shutdown`], ends its subscriptions: waiting rows are no longer
/// delivered, and the cursors cover what was delivered.
///
/// The dispatcher also ends once a node of the process finds that the bus is gone. Its subscriptions then end with [`Error::BusGone`].
#[derive(Debug)]
#[must_use = "dropping it ends its subscriptions"]
pub struct Dispatcher {
    /// The task that reads the feed; `None` while the dispatcher is suspended, or if rows are pushed instead.
    tail: Option<Task<()>>,
    shared: Arc<Shared>,
    /// Whether dropping this handle ends the subscriptions.
    is_owner: bool,
}

impl Dispatcher {
    pub(crate) fn suspended(
        context: Arc<Context>,
        options: DispatcherOptions,
        start: Sequence,
    ) -> Result<Self> {
        options.check()?;
        let shared = Shared::new(context, options, start);
        shared.context.stats.health.end_with_bus(&shared);
        Ok(Self { tail: None, shared, is_owner: true })
    }

    #[cfg(test)]
    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Subscribes to the databases that `filter` matches. The returned builder sets where to start and how to receive.
    pub fn subscribe(&self, filter: Filter) -> Subscribe {
        Subscribe { shared: Arc::clone(&self.shared), order: Order::new(filter) }
    }

    /// Ends the subscriber `id`: its stream ends, or its callback after the current call. Fails with [`Error::NoSubscriber`] if there is no
    /// such subscriber or it has ended.
    pub fn unsubscribe(&self, id: SubscriberId) -> Result<()> {
        self.shared.end(id)
    }

    /// A freshness barrier: waits until every event that was committed at or before `version`
    /// ([`Versionstamp::version`](crate::event::Versionstamp::version) of the commit) is folded, and the tail has published its row.
    /// Returns a position. A subscriber that has worked on everything up to there knows all of these events
    /// ([`CallbackHandle::wait_until`](crate::dispatcher::CallbackHandle::wait_until),
    /// [`Mirror::wait_until`](crate::dispatcher::Mirror::wait_until)).
    ///
    /// The barrier needs running notifiers, and waits while there are none. While it waits, it reads the stored rows of the databases that
    /// had unfolded events when the wait began, every few milliseconds.
    ///
    /// Fails with [`Error::Invalid`] if the version is ahead of the store, with [`Error::NoSubscriber`] if the dispatcher ends first, and
    /// with [`Error::BusGone`] once the bus is gone.
    pub async fn wait_until(&self, version: u64) -> Result<Sequence> {
        self.shared.wait_until(version).await
    }

    /// The position up to which the tail has read the feed.
    pub fn position(&self) -> Sequence {
        self.shared.ring.read().position()
    }

    /// Returns how long the tail has been behind; `end` is the current end of the feed. If the tail has stopped reading, it has been behind
    /// since its next poll was due; otherwise since a still unreached end of the feed was seen.
    #[cfg(feature = "http")]
    pub(crate) fn lag(&self, end: Sequence) -> std::time::Duration {
        let (now, (read_to, read_at)) = (self.shared.context.env().now(), self.shared.progress.get());
        let overdue = now.saturating_sub(read_at).saturating_sub(self.shared.options.poll_interval);
        let mut wanted = self.shared.wanted.lock();
        let behind = match *wanted {
            Some((wanted, since)) if read_to < wanted => now.saturating_sub(since),
            _ => {
                *wanted = Some((end, now));
                // Without an append, the tail reaches the end only after the watcher's next poll, which may be far off, so this requests a
                // poll at once.
                self.shared.context.wakeups.look();
                std::time::Duration::ZERO
            }
        };
        overdue.max(behind)
    }

    /// The number of current subscriptions, not counting those whose stream or handle was dropped.
    pub fn subscribers(&self) -> usize {
        self.shared.count()
    }

    /// The number of subscriptions that name the database `name` exactly.
    pub fn subscribers_of(&self, name: &DbName) -> usize {
        self.shared.patterns.lock().subscribers_of(name.as_str())
    }

    /// Returns a handle that does not keep the dispatcher running: its subscriptions end with the dispatcher.
    pub(crate) fn subscriptions(&self) -> Self {
        Self { tail: None, shared: Arc::clone(&self.shared), is_owner: false }
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.shared.context
    }

    /// Publishes `rows` as if the tail had read them, and everything else up to `to`; for tests and benchmarks. The rows must be in order,
    /// after the current position and not after `to`. Fails with [`Error::Invalid`] otherwise, or if a tail reads the feed; a release build
    /// trusts that the rows are in order. Only one caller may push at a time.
    #[cfg(any(test, feature = "test-util"))]
    pub fn push(&self, rows: Vec<Arc<Notification>>, to: Sequence) -> Result<()> {
        let from = self.position();
        let ends = rows.first().map_or(to, |row| row.sequence)..=rows.last().map_or(to, |row| row.sequence);
        if self.tail.is_some() {
            return Err(Error::invalid("rows", "the dispatcher reads the feed itself: suspend it first"));
        }
        // A benchmark should not measure this check of all rows, which a tail does not make.
        let are_sorted = !cfg!(debug_assertions) || rows.is_sorted_by(|a, b| a.sequence < b.sequence);
        if !are_sorted || *ends.start() <= from || *ends.end() > to {
            return Err(Error::invalid("rows", format!("they are not in order between {from} and {to}")));
        }
        self.shared.publish(rows, to, to);
        Ok(())
    }

    /// Stops reading the feed, and keeps the subscribers; [`Dispatcher::resume`] continues for them.
    pub fn suspend(mut self) -> Self {
        self.tail = None;
        self
    }

    /// Resumes reading the feed at the current position. Nothing that happened meanwhile is missed, unless the dispatcher was suspended for
    /// longer than the retention. In that case subscribers get [`Item::Expired`](super::Item).
    pub fn resume(mut self) -> Self {
        let shared = &self.shared;
        self.tail.get_or_insert_with(|| Task::spawn(run_tail(Arc::clone(shared))));
        self
    }

    /// Stops the tail, and ends the subscriptions. Waits until none of their tasks is running: a callback call that takes longer than 10 s
    /// is cut off at its next await.
    pub async fn shutdown(self) {
        let shared = Arc::clone(&self.shared);
        drop(self);
        tokio::select! {
            biased;
            () = shared.at_rest() => {}
            () = shared.context.env().sleep(SHUTDOWN_MAX) => {
                shared.cut_off();
                shared.at_rest().await;
            }
        }
    }

    /// Cuts off the tasks that have not ended, and waits until no task of the subscriptions is running.
    pub(crate) async fn cut_off(&self) {
        self.shared.cut_off();
        self.shared.at_rest().await;
    }
}

impl Drop for Dispatcher {
    fn drop(&mut self) {
        self.tail = None;
        if self.is_owner {
            self.shared.close();
        }
    }
}

/// Follows the feed until the task is aborted or the dispatcher is closed. Subscribers do not notice panics of the tail.
async fn run_tail(shared: Arc<Shared>) {
    let (stats, env) = (&shared.context.stats, shared.context.env());
    let panicked = |panic: &str| {
        stats.tail_panics.add(1);
        stats.health.panicked(env, TAIL, panic);
    };
    tokio::select! {
        biased;
        () = shared.closed() => {}
        () = supervised(env, || follow(&shared), panicked) => {}
    }
}

/// Reads the feed from the position of the ring, and publishes what it reads.
async fn follow(shared: &Shared) {
    let (health, options) = (&shared.context.stats.health, &shared.options);
    let tail = shared.feed.tail(shared.ring.read().position());
    let mut tail = tail.with_limit(options.page_rows_max).with_poll_interval(options.poll_interval);
    tail.report_to(Arc::clone(&shared.progress));
    loop {
        match tail.next().await {
            Ok(page) => {
                health.works(TAIL, 0);
                shared.context.stats.rows_tailed.add(page.rows.len() as u64);
                let readable = page.next.readable().unwrap_or(page.to);
                tracing::debug_span!("batch", rows = page.rows.len(), to = %page.to)
                    .in_scope(|| shared.publish(page.rows, page.to, readable));
                // Let subscribers on this thread run between two pages.
                tokio::task::yield_now().await;
            }
            Err(Error::Expired { horizon }) => {
                tracing::error!(%horizon, "the tail was away for too long: its subscribers start over");
                shared.expire(horizon);
                tail.restart(horizon);
            }
            Err(error) => {
                health.failed(shared.context.env(), TAIL, 0, &error);
                shared.context.env().sleep(FAILURE_PAUSE).await;
            }
        }
    }
}
