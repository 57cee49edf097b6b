//! [`Shared`]: shared by the tail and the subscribers of a dispatcher. It publishes rows to them and ends them.

use std::{
    collections::BTreeMap,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering},
};

use parking_lot::{Mutex, RwLock};
use tokio::sync::{Semaphore, watch};

use super::{
    batch::{Batch, Matched, batch_len, to_mark},
    log::{SubscriberId, SubscriberState},
    options::DispatcherOptions,
    patterns::{Pattern, Patterns},
    ring::Ring,
};
use crate::{
    base::{
        cursor::{Cursor, Knowledge, Start},
        encoding::Sequence,
        error::{Error, Result, panic_text},
        filter::Filter,
        health::EndsWithBus,
        notification::Notification,
    },
    state::{
        context::Context,
        notification_feed::{NotificationFeed, TailProgress},
    },
};

pub(crate) struct Shared {
    pub context: Arc<Context>,
    pub options: DispatcherOptions,
    pub feed: NotificationFeed,
    pub ring: RwLock<Ring>,
    /// How far the tail has read, also where there were no rows: the ring does not move there.
    pub progress: Arc<TailProgress>,
    /// An end of the feed that the tail has not reached yet, and when it was seen.
    #[cfg(feature = "http")]
    pub wanted: Mutex<Option<(Sequence, std::time::Duration)>>,
    /// The tail holds this lock while it matches a batch.
    pub patterns: Mutex<Patterns>,
    subscribers: Mutex<Subscribers>,
    /// What a subscriber knows that was delivered all its rows of the ring; barriers wait for it.
    known: watch::Sender<Knowledge>,
    phase: watch::Sender<Phase>,
    /// How many tasks of callbacks and of readers run.
    tasks: watch::Sender<usize>,
    /// Limits how many subscribers read the feed at once.
    pub turns: Semaphore,
    /// The most rows of one such read, and of a batch of the ring.
    pub batch_rows_max: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Open,
    /// All subscribers are ended; calls of callbacks that have begun go on.
    Closed,
    /// All tasks are ended.
    CutOff,
}

#[derive(Default)]
struct Subscribers {
    /// In the order of their ids, so that a run can be replayed.
    states: BTreeMap<SubscriberId, Arc<SubscriberState>>,
    last_id: u64,
}

impl Shared {
    pub fn new(context: Arc<Context>, options: DispatcherOptions, start: Sequence) -> Arc<Self> {
        let progress = TailProgress::new(start, context.env().now());
        Arc::new(Self {
            feed: NotificationFeed::new(Arc::clone(&context), context.feed.clone()),
            context,
            ring: RwLock::new(Ring::new(start, options.ring_rows_max)),
            progress,
            #[cfg(feature = "http")]
            wanted: Mutex::default(),
            patterns: Mutex::new(Patterns::new()),
            subscribers: Mutex::default(),
            known: watch::Sender::new(Knowledge::UpTo(start)),
            phase: watch::Sender::new(Phase::Open),
            tasks: watch::Sender::new(0),
            turns: Semaphore::new(options.catch_ups_max),
            batch_rows_max: options.catch_up_rows_max.min(options.page_rows_max),
            options,
        })
    }

    pub fn enter(&self) -> Arc<SubscriberState> {
        let mut subscribers = self.subscribers.lock();
        subscribers.last_id += 1;
        let id = SubscriberId(subscribers.last_id);
        let state = Arc::new(SubscriberState::new(id));
        if *self.phase.borrow() != Phase::Open {
            state.end();
        }
        subscribers.states.insert(id, Arc::clone(&state));
        state
    }

    pub fn exit(&self, id: SubscriberId) {
        self.subscribers.lock().states.remove(&id);
    }

    pub fn count(&self) -> usize {
        self.subscribers.lock().states.len()
    }

    pub fn end(&self, id: SubscriberId) -> Result<()> {
        let state = self.subscribers.lock().states.get(&id).map(Arc::clone);
        let state = state.ok_or_else(|| Error::NoSubscriber { subscriber: id.to_string() })?;
        state.end();
        self.wake(vec![state]);
        Ok(())
    }

    pub fn cursor_at(&self, start: Start) -> Cursor {
        match start {
            Start::Now => self.ring.read().position().into(),
            Start::At(cursor) => cursor,
        }
    }

    /// Adds a subscriber to the pattern of `filter`.
    pub fn join(&self, filter: &Filter) -> Arc<Pattern> {
        let key = filter.key();
        // No batch is half matched now, so the log of a new pattern has all batches from here on.
        let mut patterns = self.patterns.lock();
        patterns.join(key, self.ring.read().end.batch_number)
    }

    /// Appends rows to the ring and the logs, and wakes their subscribers. `is_complete` says that the feed ended after them.
    /// For one caller at a time.
    pub fn publish(&self, mut rows: Vec<Arc<Notification>>, to: Sequence, is_complete: bool) {
        let mut woken = Vec::new();
        loop {
            let rest = rows.split_off(batch_len(&rows, self.batch_rows_max));
            let since = self.ring.read().end.cursor.rewound();
            let Some(last) = rows.last().filter(|_| !rest.is_empty()).map(|row| row.sequence) else {
                self.put(Batch::new(rows, since, to, is_complete), &mut woken);
                break;
            };
            self.put(Batch::new(rows, since, last, false), &mut woken);
            rows = rest;
        }
        // A waker may panic, so subscribers are woken last.
        self.wake(woken);
    }

    /// Appends `batch` to the logs and the ring, and informs the barriers. Adds the subscribers that wait for its rows to `woken`.
    fn put(&self, batch: Batch, woken: &mut Vec<Arc<SubscriberState>>) {
        let batch = Arc::new(batch);
        let (number, begin) = (self.ring.read().end.batch_number, to_mark(batch.since.position()));
        let mut patterns = self.patterns.lock();
        let mut append = |pattern: Arc<Pattern>, chosen| {
            let mut matched = Matched { batch: Arc::clone(&batch), chosen, before: 0 };
            matched.before = pattern.rows.fetch_add(matched.len() as u64, Ordering::Relaxed);
            pattern.log.append(number, begin, matched, woken);
            pattern
        };
        let found = patterns.matches(&batch).into_iter();
        let mut matching: Vec<_> = found.map(|(pattern, rows)| append(pattern, Some(rows))).collect();
        if !batch.rows.is_empty() {
            matching.push(append(Arc::clone(&patterns.everything), None));
        }
        let pruned = self.ring.write().push(&batch, matching);
        let begin = self.ring.read().begin.0;
        for pattern in pruned {
            pattern.log.prune(begin);
        }
        self.inform_barriers();
    }

    fn inform_barriers(&self) {
        let knowledge = self.ring.read().end.cursor.knowledge();
        self.known.send_if_modified(|known| {
            *known = knowledge.max(*known);
            // A later barrier reads the value before it waits, so nothing is sent while no barrier waits.
            self.known.receiver_count() > 0
        });
    }

    /// Continues at `horizon`, although rows up to there may have been deleted unseen. All subscribers are then behind, and their own
    /// cursors show whether they have expired.
    pub fn expire(&self, horizon: Sequence) {
        let mut woken = Vec::new();
        let patterns = self.patterns.lock();
        // One number is left out, so that a subscriber at the end is behind as well.
        let next = self.ring.read().end.batch_number + 1;
        for pattern in patterns.all() {
            pattern.log.skip_to(next, &mut woken);
        }
        self.ring.write().skip_to(next, horizon);
        drop(patterns);
        self.inform_barriers();
        self.wake(woken);
    }

    pub async fn reached(&self, version: u64) -> Result<Sequence> {
        let reached = async {
            let at = self.feed.folded(version).await?;
            let mut known = self.known.subscribe();
            known.wait_for(|known| *known >= Knowledge::UpTo(at)).await.expect("the sender is here");
            Ok(at)
        };
        tokio::select! {
            biased;
            at = reached => at,
            () = self.closed() => {
                let gone = self.context.stats.health.ended().cloned();
                Err(gone.unwrap_or_else(|| Error::NoSubscriber { subscriber: "any more: the dispatcher has ended".into() }))
            }
        }
    }

    pub async fn closed(&self) {
        self.in_phase(Phase::Closed).await;
    }

    async fn in_phase(&self, wanted: Phase) {
        let mut phase = self.phase.subscribe();
        phase.wait_for(|phase| *phase >= wanted).await.expect("the sender is here");
    }

    /// Does `work` as one of its tasks, until it ends or all are cut off.
    pub fn until_cut_off<T>(
        self: Arc<Self>,
        work: impl Future<Output = T>,
    ) -> impl Future<Output = Option<T>> {
        self.tasks.send_modify(|tasks| *tasks += 1);
        let running = Running(self);
        async move {
            let running = running;
            tokio::select! {
                biased;
                () = running.0.in_phase(Phase::CutOff) => None,
                done = work => Some(done),
            }
        }
    }

    /// Waits until none of its tasks runs.
    pub async fn at_rest(&self) {
        self.tasks.subscribe().wait_for(|tasks| *tasks == 0).await.expect("the sender is here");
    }

    /// Ends all tasks, at their next await.
    pub fn cut_off(&self) {
        let tasks = *self.tasks.borrow();
        if tasks > 0 {
            tracing::warn!(tasks, "calls of callbacks do not end and are cut off");
        }
        self.phase.send_replace(Phase::CutOff);
    }

    /// Wakes all of them, even if some wakers panic.
    fn wake(&self, subscribers: Vec<Arc<SubscriberState>>) {
        for subscriber in subscribers {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| subscriber.wake())) {
                let Context { stats, .. } = &*self.context;
                stats.health.panicked(self.context.env(), "waker of a subscriber", panic_text(&*panic));
            }
        }
    }

    pub fn close(&self) {
        // A subscriber that enters from now on is ended at once.
        self.phase.send_modify(|phase| *phase = Phase::Closed.max(*phase));
        let all: Vec<_> = self.subscribers.lock().states.values().cloned().collect();
        for state in &all {
            state.end();
        }
        self.wake(all);
    }
}

/// A task that runs.
struct Running(Arc<Shared>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.tasks.send_modify(|tasks| *tasks -= 1);
    }
}

impl EndsWithBus for Shared {
    fn end_with_bus(&self) {
        self.close();
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("position", &self.ring.read().position()).finish_non_exhaustive()
    }
}
