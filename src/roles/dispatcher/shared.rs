//! [`Shared`]: the state that the tail and the subscribers of a dispatcher share. It publishes rows to the subscribers, and ends their
//! subscriptions. Its [`Ring`] records which of the tail's batches are in memory. The batches themselves are in the logs of the patterns
//! that match them; the pattern that matches everything has all of them.
//!
//! Each batch with rows that is appended to the ring gets the next number. A place in the ring is the number of the first batch after it.
//!
//! # Invariants of the ring
//!
//! 1. The batches hold all rows between the beginning and the end of the ring; the end is the position of the tail. Between two batches,
//!    and after the last one, there was nothing to read.
//! 2. A batch holds every row of the feed in its range that had no newer row when the batch was read. The events of a row that had a newer
//!    one are delivered with the newer one: in the same batch if that is complete, or else in a later one.
//! 3. The end moves only after every log has the batches before it: first the logs, then [`Ring::push`].

use std::{
    collections::VecDeque,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use parking_lot::{Mutex, RwLock};
use tokio::sync::{Semaphore, watch};

use super::{
    delivery::{Batch, Matched, batch_len, to_mark},
    log::{SubscriberId, SubscriberState},
    patterns::{Pattern, Patterns},
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
        feed::PAGE_ROWS_MAX,
        notification_feed::{NotificationFeed, TailProgress},
    },
};

/// Options for a dispatcher.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DispatcherOptions {
    /// The maximum number of rows in the ring; subscribers that are further behind read the feed. Default: 65,536.
    pub ring_rows_max: usize,
    /// The maximum number of rows that the tail reads at once, 1 to 10,000. Default: 1,000.
    pub page_rows_max: usize,
    /// How often the tail polls for rows whose hint was lost. Default: 1 s.
    pub poll_interval: Duration,
    /// The maximum number of lagging subscribers that read the feed at once, 1 to 10,000; others wait their turn. Default: 8.
    pub catch_ups_max: usize,
    /// The maximum number of rows that a lagging subscriber reads at once, and of rows in a batch of the ring: an idle subscriber may hold
    /// that many. 1 to 10,000, and never more than [`DispatcherOptions::page_rows_max`]. Default: 256.
    pub catch_up_rows_max: usize,
}

crate::base::macros::setters!(DispatcherOptions {
    ring_rows_max: usize,
    page_rows_max: usize,
    poll_interval: Duration,
    catch_ups_max: usize,
    catch_up_rows_max: usize
});

impl Default for DispatcherOptions {
    fn default() -> Self {
        Self {
            ring_rows_max: 65_536,
            page_rows_max: 1_000,
            poll_interval: Duration::from_secs(1),
            catch_ups_max: 8,
            catch_up_rows_max: 256,
        }
    }
}

impl DispatcherOptions {
    /// The maximum of [`DispatcherOptions::catch_ups_max`](field@Self::catch_ups_max).
    pub const CATCH_UPS_MAX: usize = 10_000;
    /// The maximum of [`DispatcherOptions::page_rows_max`](field@Self::page_rows_max) and
    /// [`DispatcherOptions::catch_up_rows_max`](field@Self::catch_up_rows_max).
    pub const ROWS_MAX: usize = PAGE_ROWS_MAX;

    pub(crate) fn check(&self) -> Result<()> {
        if self.ring_rows_max == 0 {
            return Err(Error::invalid("ring_rows_max", "it is zero"));
        }
        for (what, number, max) in [
            ("page_rows_max", self.page_rows_max, Self::ROWS_MAX),
            ("catch_up_rows_max", self.catch_up_rows_max, Self::ROWS_MAX),
            ("catch_ups_max", self.catch_ups_max, Self::CATCH_UPS_MAX),
        ] {
            if !(1..=max).contains(&number) {
                return Err(Error::invalid(what, format!("{number} is not 1 to {max}")));
            }
        }
        if self.poll_interval.is_zero() {
            return Err(Error::invalid("poll_interval", "it is zero"));
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct End {
    pub batch_number: u64,
    /// The cursor of a subscriber that knew everything before the ring and has received all of its rows in the ring.
    pub cursor: Cursor,
}

struct Kept {
    to: Sequence,
    rows: usize,
    patterns: Vec<Arc<Pattern>>,
}

pub(super) struct Ring {
    /// The batches with rows, oldest first.
    queue: VecDeque<Kept>,
    rows: usize,
    rows_max: usize,
    /// The oldest place: the number of the oldest batch, and the position before it.
    pub begin: (u64, Sequence),
    pub end: End,
    /// The last row that a row of the ring superseded, whether or not it was ever in the ring. All rows after it have different names.
    pub superseded: Sequence,
}

impl Ring {
    pub fn new(start: Sequence, rows_max: usize) -> Self {
        let end = End { batch_number: 0, cursor: start.into() };
        Self { queue: VecDeque::new(), rows: 0, rows_max, begin: (0, start), end, superseded: Sequence::MIN }
    }

    /// Appends a batch that all logs already have, and drops the oldest batches beyond the limit. `patterns` match the batch. Returns the
    /// patterns that matched the dropped batches.
    pub fn push(&mut self, batch: &Batch, patterns: Vec<Arc<Pattern>>) -> Vec<Arc<Pattern>> {
        self.end.cursor = batch.cursor_after(batch.since);
        let superseded = batch.rows.iter().filter_map(|row| row.previous).max();
        self.superseded = self.superseded.max(superseded.unwrap_or(Sequence::MIN));
        if !batch.rows.is_empty() {
            self.end.batch_number += 1;
            self.rows += batch.rows.len();
            self.queue.push_back(Kept { to: batch.to, rows: batch.rows.len(), patterns });
        }
        let mut pruned = Vec::new();
        while self.queue.len() > 1 && self.rows > self.rows_max {
            let oldest = self.queue.pop_front().expect("there are at least two");
            self.rows -= oldest.rows;
            self.begin = (self.begin.0 + 1, oldest.to);
            pruned.extend(oldest.patterns);
        }
        pruned
    }

    /// Continues at `to` with batch number `next`, which must skip at least one number. Drops all earlier batches.
    pub fn skip_to(&mut self, next: u64, to: Sequence) {
        (self.begin, self.end) = ((next, to), End { batch_number: next, cursor: to.into() });
        (self.rows, self.queue) = (0, VecDeque::new());
    }

    /// Returns the place of the first batch with rows after `position`; `None` if such rows have left the ring. With `may_be_ahead`, a
    /// position ahead of the ring has its place at the end of the ring.
    pub fn batch_after(&self, position: Sequence, may_be_ahead: bool) -> Option<u64> {
        if position < self.begin.1 || (position > self.end.cursor.position() && !may_be_ahead) {
            return None;
        }
        let after = self.queue.partition_point(|batch| batch.to <= position);
        Some(self.begin.0 + after as u64)
    }

    pub fn position(&self) -> Sequence {
        self.end.cursor.position()
    }
}

pub(crate) struct Shared {
    pub context: Arc<Context>,
    pub options: DispatcherOptions,
    pub feed: NotificationFeed,
    pub ring: RwLock<Ring>,
    /// How far the tail has read, even where it found no rows and the ring did not move.
    pub progress: Arc<TailProgress>,
    /// An end of the feed that the tail has not reached yet, and when it was seen.
    #[cfg(feature = "http")]
    pub wanted: Mutex<Option<(Sequence, Duration)>>,
    /// The tail holds this lock while it matches a batch.
    pub patterns: Mutex<Patterns>,
    subscribers: Mutex<Subscribers>,
    /// The knowledge of a subscriber that has received all of its rows in the ring. Barriers wait for it to grow.
    known: watch::Sender<Knowledge>,
    phase: watch::Sender<Phase>,
    /// How many tasks of callbacks and readers are running.
    tasks: watch::Sender<usize>,
    /// Limits how many subscribers read the feed at once.
    pub turns: Semaphore,
    /// The maximum number of rows in one read of the feed by a subscriber, and in one batch of the ring.
    pub batch_rows_max: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Open,
    /// All subscribers are being ended; callback calls in progress continue.
    Closed,
    /// All tasks end at their next await.
    CutOff,
}

#[derive(Default)]
struct Subscribers {
    /// Sorted by id, so that a run can be replayed. `None` for a subscriber that has left; these never outnumber the others.
    states: Vec<(SubscriberId, Option<Arc<SubscriberState>>)>,
    present: usize,
    last_id: u64,
}

impl Subscribers {
    /// Returns the entry for `id`, if there is one.
    fn get(&mut self, id: SubscriberId) -> Option<&mut Option<Arc<SubscriberState>>> {
        let index = self.states.binary_search_by_key(&id, |(known, _)| *known).ok()?;
        Some(&mut self.states[index].1)
    }
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
        subscribers.states.push((id, Some(Arc::clone(&state))));
        subscribers.present += 1;
        state
    }

    pub fn exit(&self, id: SubscriberId) {
        let mut subscribers = self.subscribers.lock();
        *subscribers.get(id).expect("it has entered") = None;
        subscribers.present -= 1;
        if subscribers.present < subscribers.states.len() / 2 {
            subscribers.states.retain(|(_, state)| state.is_some());
        }
    }

    pub fn count(&self) -> usize {
        self.subscribers.lock().present
    }

    pub fn end(&self, id: SubscriberId) -> Result<()> {
        let state = self.subscribers.lock().get(id).and_then(|state| state.clone());
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
        // While this lock is held, no batch is half matched, so the log of a new pattern has all batches from here on.
        let mut patterns = self.patterns.lock();
        patterns.join(key, self.ring.read().end.batch_number)
    }

    /// Appends rows up to `to` to the ring and the logs, and wakes the subscribers that wait for them. The feed could be read up to
    /// `readable`; if that is `to`, the feed ended there. Only one caller may publish at a time.
    pub fn publish(&self, mut rows: Vec<Arc<Notification>>, to: Sequence, readable: Sequence) {
        let mut woken = Vec::new();
        loop {
            let rest = rows.split_off(batch_len(&rows, self.batch_rows_max));
            let since = self.ring.read().end.cursor.rewound();
            let Some(last) = rows.last().filter(|_| !rest.is_empty()).map(|row| row.sequence) else {
                self.put(Batch::new(rows, since, to, readable), &mut woken);
                break;
            };
            self.put(Batch::new(rows, since, last, readable), &mut woken);
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
            let matched = Matched { batch: Arc::clone(&batch), chosen };
            pattern.log.append(number, begin, matched.len(), matched, woken);
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
            // A barrier reads the value before it waits, so nothing needs to be sent while no barrier waits.
            self.known.receiver_count() > 0
        });
    }

    /// Continues at `horizon`, although rows up to there may have been deleted unseen. All subscribers are then behind, and their own
    /// cursors show whether they have expired.
    pub fn expire(&self, horizon: Sequence) {
        let mut woken = Vec::new();
        let patterns = self.patterns.lock();
        // Skip one number, so that a subscriber at the end is behind as well.
        let next = self.ring.read().end.batch_number + 1;
        for pattern in patterns.all() {
            pattern.log.skip_to(next, &mut woken);
        }
        self.ring.write().skip_to(next, horizon);
        drop(patterns);
        self.inform_barriers();
        self.wake(woken);
    }

    pub async fn wait_until(&self, version: u64) -> Result<Sequence> {
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
                Err(gone.unwrap_or_else(|| Error::NoSubscriber { subscriber: "left: the dispatcher has ended".into() }))
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

    /// Runs `work` as a task of the dispatcher, until it ends or all tasks are cut off.
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

    /// Waits until no task of the dispatcher is running.
    pub async fn at_rest(&self) {
        self.tasks.subscribe().wait_for(|tasks| *tasks == 0).await.expect("the sender is here");
    }

    /// Ends all tasks, at their next await.
    pub fn cut_off(&self) {
        let tasks = *self.tasks.borrow();
        if tasks > 0 {
            tracing::warn!(tasks, "callback calls have not ended and are cut off");
        }
        self.phase.send_replace(Phase::CutOff);
    }

    /// Wakes all `subscribers`, even if some of their wakers panic.
    fn wake(&self, subscribers: Vec<Arc<SubscriberState>>) {
        for subscriber in subscribers {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| subscriber.waker.wake())) {
                let Context { stats, .. } = &*self.context;
                stats.health.panicked(self.context.env(), "waker of a subscriber", panic_text(&*panic));
            }
        }
    }

    pub fn close(&self) {
        // Any subscriber that enters from now on ends at once.
        self.phase.send_modify(|phase| *phase = Phase::Closed.max(*phase));
        let all: Vec<_> =
            self.subscribers.lock().states.iter().filter_map(|(_, state)| state.clone()).collect();
        for state in &all {
            state.end();
        }
        self.wake(all);
    }
}

/// Counts as a running task until it is dropped.
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
