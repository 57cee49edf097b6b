//! [`Shared`]: shared by the tail and the subscribers of a dispatcher. It publishes rows to them and ends them.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use dashmap::DashMap;
use tokio::sync::{Semaphore, broadcast, watch};

use super::{
    batch::{Batch, Chosen, Matched, batch_len, to_mark},
    listener::{EVENTS_MAX, Listeners, Supervision},
    log::{Log, SubscriberId, SubscriberState},
    options::DispatcherOptions,
    patterns::{Matches, Pattern, Patterns},
    ring::Ring,
};
use crate::{
    base::{
        cursor::{Cursor, Knowledge, Start},
        encoding::Sequence,
        error::{Error, Result, panic_text},
        filter::Filter,
        notification::Notification,
    },
    state::{context::Context, notification_feed::NotificationFeed},
};

pub(crate) struct Shared {
    pub context: Arc<Context>,
    pub feed: NotificationFeed,
    pub ring: Ring,
    /// The log of subscribers that follow the ring itself.
    pub everything: Log<Matched>,
    pub patterns: Patterns,
    /// Locked for writing while a batch is matched, and for reading while a pattern is added.
    matching: RwLock<()>,
    pub subscribers: DashMap<SubscriberId, Arc<SubscriberState>>,
    next_id: AtomicU64,
    /// The position up to which the ring is complete; barriers wait for it.
    known: watch::Sender<Sequence>,
    is_closed: AtomicBool,
    /// Limits how many subscribers read the feed at once.
    pub turns: Semaphore,
    /// The most rows of one such read, and of a batch of the ring.
    pub batch_rows_max: usize,
    pub listeners: Listeners,
    pub supervision: broadcast::Sender<Supervision>,
}

impl Shared {
    /// Makes the state of a dispatcher at `start`, without subscribers.
    pub fn new(context: Arc<Context>, options: &DispatcherOptions, start: Sequence) -> Arc<Self> {
        Arc::new(Self {
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
            supervision: broadcast::Sender::new(EVENTS_MAX),
        })
    }

    pub fn enter(&self) -> (SubscriberId, Arc<SubscriberState>) {
        let id = SubscriberId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let state = Arc::new(SubscriberState::new());
        self.subscribers.insert(id, Arc::clone(&state));
        // A concurrent `close` may have missed it.
        if self.is_closed.load(Ordering::SeqCst) {
            state.close();
        }
        (id, state)
    }

    /// Ends the subscriber `id`. Fails with [`Error::NoSubscriber`] if there is no such subscriber or it has ended.
    pub fn end(&self, id: SubscriberId) -> Result<()> {
        let state = self.subscribers.get(&id).map(|state| Arc::clone(&state));
        let state = state.ok_or_else(|| Error::NoSubscriber { subscriber: id.to_string() })?;
        state.end();
        wake(vec![state]);
        Ok(())
    }

    /// The cursor of a subscriber that starts at `start`.
    pub fn cursor_at(&self, start: Start) -> Cursor {
        match start {
            Start::Now => self.ring.position().into(),
            Start::At(cursor) => cursor,
        }
    }

    /// Adds a subscriber to the pattern of `filter`; returns `None` if it has to follow the ring itself.
    pub fn join(&self, filter: &Filter) -> Option<Arc<Pattern>> {
        let key = filter.key()?;
        // No batch is half matched now, so the log of a new pattern has all batches from here on.
        let _unmatched = self.matching.read().unwrap_or_else(PoisonError::into_inner);
        Some(self.patterns.join(&key, self.ring.end().place))
    }

    /// Appends rows to the ring and the logs, and wakes their subscribers. `is_complete` says that the feed ended after them.
    /// For one caller at a time.
    pub fn publish(&self, mut rows: Vec<Arc<Notification>>, to: Sequence, is_complete: bool) {
        let mut woken = Vec::new();
        loop {
            let part: Vec<_> = rows.drain(..batch_len(&rows, self.batch_rows_max)).collect();
            let batch = match part.last() {
                Some(last) if !rows.is_empty() => {
                    let last = last.sequence;
                    self.ring.batch(part, last, false)
                }
                _ => self.ring.batch(part, to, is_complete),
            };
            self.put(batch, &mut woken);
            if rows.is_empty() {
                break;
            }
        }
        // Only now: a waker may panic.
        wake(woken);
    }

    /// Appends `batch` to the ring and the logs. Adds the subscribers that wait for its rows to `woken`.
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

    /// Moves the end of the ring behind all batches, and informs the barriers. `patterns` match the last batch.
    fn settle(&self, patterns: Vec<Arc<Pattern>>) {
        if let Knowledge::UpTo(to) = self.ring.settle(patterns).knowledge() {
            self.known.send_if_modified(|known| {
                *known = to.max(*known);
                // A barrier that comes later reads the value first. To send without a receiver would cost, too.
                self.known.receiver_count() > 0
            });
        }
    }

    /// Continues at `horizon`, although rows up to there may have been deleted unseen. All subscribers are then behind, and their own
    /// cursors show whether they have expired.
    pub fn expire(&self, horizon: Sequence) {
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

    /// [`Dispatcher::reached`](super::Dispatcher::reached).
    pub async fn reached(&self, version: u64) -> Result<Sequence> {
        let at = self.feed.folded(version).await?;
        let mut known = self.known.subscribe();
        let reached = known.wait_for(|known| *known >= at || self.is_closed.load(Ordering::SeqCst)).await;
        if reached.is_ok_and(|known| *known >= at) {
            return Ok(at);
        }
        Err(Error::NoSubscriber { subscriber: "tail".into() })
    }

    /// Ends all subscriptions after the deliveries that wait for them.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        self.known.send_modify(|_| {});
        let all = self.subscribers.iter().map(|subscriber| (*subscriber.key(), Arc::clone(&subscriber)));
        let mut all: Vec<_> = all.collect();
        // In the order of their ids, so that a run can be replayed.
        all.sort_unstable_by_key(|(id, _)| *id);
        let all: Vec<_> = all.into_iter().map(|(_, state)| state).collect();
        for state in &all {
            state.close();
        }
        wake(all);
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("position", &self.ring.position()).finish_non_exhaustive()
    }
}

/// Wakes all of them, even if some wakers panic.
fn wake(subscribers: Vec<Arc<SubscriberState>>) {
    for subscriber in subscribers {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| subscriber.wake())) {
            tracing::error!(panic = panic_text(&*panic), "the waker of a subscriber has panicked");
        }
    }
}
