//! [`Fanout`]: the dispatcher without its tail.

use std::{sync::Arc, task::Waker};

use tokio::sync::Semaphore;

use super::{
    DispatcherOptions, Filter, Shared, Subscribe, SubscriberId,
    listener::{Events, Listeners},
    registry::Registry,
    ring::{Batch, Ring},
    wake,
};
use crate::{
    context::Context,
    encoding::Sequence,
    error::{Error, Result},
    notification::Notification,
    notification_feed::NotificationFeed,
};

/// The part of a dispatcher that fans out, without the tail that reads the feed. Rows are pushed by hand: for tests of
/// subscribers, and for benchmarks. Dropping it ends its subscriptions after what they have been given.
#[derive(Debug)]
pub struct Fanout(Arc<Shared>);

impl Fanout {
    /// A fan-out that stands at `start`.
    pub(crate) fn new(context: Arc<Context>, options: &DispatcherOptions, start: Sequence) -> Result<Self> {
        options.check()?;
        Ok(Self(Arc::new(Shared {
            feed: NotificationFeed::new(Arc::clone(&context), context.feed.clone()),
            context,
            ring: Ring::new(start, options.ring_rows_max),
            registry: Registry::new(start),
            catch_ups: Semaphore::new(options.catch_ups_max),
            catch_up_rows_max: options.catch_up_rows_max.min(options.page_rows_max),
            listeners: Listeners::default(),
            events: Events::default(),
        })))
    }

    /// What the subscribers share.
    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.0
    }

    /// Subscribes to the databases that `filter` matches. Choose where to start and how to receive on what is returned.
    pub fn subscribe(&self, filter: Filter) -> Subscribe {
        Subscribe::new(Arc::clone(&self.0), filter)
    }

    /// Ends the subscriber `id`. Fails with [`Error::NoSubscriber`] if there is none, or not any more.
    pub fn unsubscribe(&self, id: SubscriberId) -> Result<()> {
        let is_there = self.0.registry.end(id);
        is_there.then_some(()).ok_or_else(|| Error::NoSubscriber { subscriber: id.to_string() })
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
        self.0.registry.len()
    }
}

impl Shared {
    /// Goes on at `horizon`, although rows up to there may have been dropped unseen: subscribers are told so.
    pub(super) fn expire(&self, horizon: Sequence) {
        self.ring.skip_to(horizon);
        let woken = self.registry.expire(horizon);
        self.registry.set_filled(horizon);
        self.wake(woken, true);
    }

    /// Wakes `woken`, and the walkers if they have something to walk. Everything is in its place by then, so that a waker that
    /// panics costs nothing but its own subscriber's time.
    fn wake(&self, woken: Vec<Waker>, is_walked: bool) {
        wake::all(woken);
        if is_walked && !self.ring.wake() {
            self.registry.alarm();
        }
    }

    /// Gives rows to the ring and to the slots; `is_complete` if there was nothing more to read after them.
    pub(super) fn hand_out(&self, rows: Vec<Arc<Notification>>, to: Sequence, is_complete: bool) {
        let completes = is_complete && !self.ring.is_complete();
        // The position moves first: a subscriber that registers too late for these rows sees by it that it has to look.
        let mut parts = rows.chunks(self.catch_up_rows_max).peekable();
        if parts.peek().is_none() {
            self.ring.push(Arc::new(Batch { rows: Vec::new(), from: self.ring.position(), to, is_complete }));
        }
        // In small batches, because a subscriber that rests holds one.
        while let Some(part) = parts.next() {
            let is_last = parts.peek().is_none();
            let to = part.last().filter(|_| !is_last).map_or(to, |row| row.sequence);
            let (from, is_complete) = (self.ring.position(), is_complete && is_last);
            self.ring.push(Arc::new(Batch { rows: part.to_vec(), from, to, is_complete }));
        }
        // Who is told in rounds waits for the end of what was pushed before, although nothing follows it.
        let is_walked = !rows.is_empty() || completes;
        let mut woken = Vec::new();
        if !self.registry.has_no_names() {
            for row in rows {
                self.registry.put(&row, &mut woken);
            }
        }
        if is_complete {
            self.registry.set_filled(to);
        }
        self.wake(woken, is_walked);
    }
}

impl Drop for Fanout {
    fn drop(&mut self) {
        // Whoever the ring has not woken, the registry does.
        self.0.ring.close();
        self.0.registry.close();
    }
}
