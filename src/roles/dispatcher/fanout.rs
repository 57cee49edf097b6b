//! [`Fanout`]: the dispatcher without its tail.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use dashmap::DashMap;
use tokio::sync::{Semaphore, watch};

use super::{
    DispatcherOptions, Filter, Shared, Subscribe, SubscriberId,
    batch::{BATCH_BYTES_MAX, Batch, Chosen, Matched, to_mark},
    listener::{Events, Listeners},
    log::{Log, SubscriberState},
    patterns::{Matches, Pattern, Patterns},
    ring::Ring,
};
use crate::{
    base::{
        cursor::Knowledge,
        encoding::Sequence,
        error::{Error, Result, panic_text},
        notification::Notification,
    },
    state::{context::Context, notification_feed::NotificationFeed},
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
            everything: Log::new(0),
            patterns: Patterns::default(),
            matching: RwLock::default(),
            subscribers: DashMap::new(),
            next_id: AtomicU64::new(1),
            known: watch::Sender::new(start),
            is_closed: AtomicBool::new(false),
            turns: Semaphore::new(options.catch_ups_max),
            batch_rows_max: options.catch_up_rows_max.min(options.page_rows_max),
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
        let state = self.0.subscribers.get(&id).map(|state| Arc::clone(&state));
        let state = state.ok_or_else(|| Error::NoSubscriber { subscriber: id.to_string() })?;
        state.end();
        wake(vec![state]);
        Ok(())
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

impl Shared {
    /// Adds a subscriber.
    pub(super) fn enter(&self) -> (SubscriberId, Arc<SubscriberState>) {
        let id = SubscriberId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let state = Arc::new(SubscriberState::new());
        self.subscribers.insert(id, Arc::clone(&state));
        // Who closes all may not have seen it.
        if self.is_closed.load(Ordering::SeqCst) {
            state.close();
        }
        (id, state)
    }

    /// The pattern of `filter`, for one more subscriber; `None` if it walks the ring.
    pub(super) fn join(&self, filter: &Filter) -> Option<Arc<Pattern>> {
        let key = filter.key()?;
        // No batch is half matched: the log of a new pattern has all batches from here on.
        let _unmatched = self.matching.read().unwrap_or_else(PoisonError::into_inner);
        Some(self.patterns.join(&key, self.ring.end().place))
    }

    /// Goes on at `horizon`, although rows up to there may have been dropped unseen. All subscribers are behind, and find out by
    /// their cursors whether they have expired.
    pub(super) fn expire(&self, horizon: Sequence) {
        let mut woken = Vec::new();
        {
            let _matching = self.matching.write().unwrap_or_else(PoisonError::into_inner);
            let next = self.ring.skip_to(horizon);
            for pattern in self.patterns.all() {
                pattern.log.skip_to(next, &mut woken);
            }
            self.everything.skip_to(next, &mut woken);
            self.settle(Vec::new());
        }
        wake(woken);
    }

    /// Puts rows into the ring and the logs, and wakes who waits for them; `is_complete` if there was nothing more to read after
    /// them. One caller at a time.
    pub(super) fn hand_out(&self, rows: Vec<Arc<Notification>>, to: Sequence, is_complete: bool) {
        let mut woken = Vec::new();
        if rows.is_empty() {
            self.put(self.ring.batch(rows, to, is_complete), &mut woken);
            return;
        }
        // In small batches, because a subscriber that rests holds one.
        let mut rows = rows.into_iter().peekable();
        while rows.peek().is_some() {
            let (mut part, mut bytes) = (Vec::with_capacity(rows.len().min(self.batch_rows_max)), 0);
            while part.len() < self.batch_rows_max
                && bytes < BATCH_BYTES_MAX
                && let Some(row) = rows.next()
            {
                bytes += row.name.as_str().len();
                part.push(row);
            }
            let last = part.last().expect("there was a row").sequence;
            let batch = match rows.peek() {
                Some(_) => self.ring.batch(part, last, false),
                None => self.ring.batch(part, to, is_complete),
            };
            self.put(batch, &mut woken);
        }
        // Everything is in its place by now, whatever the wakers do.
        wake(woken);
    }

    /// Puts `batch` into the ring and the logs. Adds who waits for its rows to `woken`.
    fn put(&self, batch: Batch, woken: &mut Vec<Arc<SubscriberState>>) {
        let batch = Arc::new(batch);
        let _matching = self.matching.write().unwrap_or_else(PoisonError::into_inner);
        let Matches { patterns, rows } = self.patterns.matches(&batch);
        let (begin, pushed) = (to_mark(batch.since.position()), self.ring.push(&batch));
        for (pattern, rows) in patterns.iter().zip(rows) {
            let matched = Matched { batch: Arc::clone(&batch), chosen: Chosen::Indices(rows) };
            pattern.log.append(pushed.number, begin, matched, woken);
        }
        if !batch.rows.is_empty() {
            let matched = Matched { batch, chosen: Chosen::From(0) };
            self.everything.append(pushed.number, begin, matched, woken);
        }
        for pattern in pushed.pruned {
            pattern.log.prune(pushed.begin);
        }
        self.everything.prune(pushed.begin);
        self.settle(patterns);
    }

    /// Moves the end of the ring behind all that was pushed, the last batch of which `patterns` match, and tells the barriers.
    fn settle(&self, patterns: Vec<Arc<Pattern>>) {
        if let Knowledge::UpTo(to) = self.ring.settle(patterns).knowledge() {
            self.known.send_if_modified(|known| {
                *known = to.max(*known);
                // Who comes later looks first. To wake nobody costs, too.
                self.known.receiver_count() > 0
            });
        }
    }

    /// Ends all subscriptions after what they have been given.
    fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        self.known.send_modify(|_| {});
        let all = self.subscribers.iter().map(|subscriber| (*subscriber.key(), Arc::clone(&subscriber)));
        let mut all: Vec<_> = all.collect();
        // In the order in which they came, so that a run can be replayed.
        all.sort_unstable_by_key(|(id, _)| *id);
        let all: Vec<_> = all.into_iter().map(|(_, state)| state).collect();
        for state in &all {
            state.close();
        }
        wake(all);
    }
}

impl Drop for Fanout {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Wakes all of them, whatever the wakers of some do.
pub(super) fn wake(subscribers: Vec<Arc<SubscriberState>>) {
    for subscriber in subscribers {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| subscriber.wake())) {
            tracing::error!(panic = panic_text(&*panic), "the waker of a subscriber has panicked");
        }
    }
}
