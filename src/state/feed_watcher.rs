//! The only task in a process that polls for rows of feeds, and the [`Listener`]s that wait for its results.
//!
//! Nothing else polls for rows. Every append changes the pulse of the notifications, a single key. The watcher reads it whenever a watch on
//! it fires, and also at regular intervals, to find appends that no watch reported. It publishes which lanes other processes have moved,
//! and up to which position it has polled, so an idle process makes one read per interval, however many tasks wait in it.
//!
//! Document feeds have no pulse, because it would cost each edit a mutation. Notifications report nearly all edits. For the rest, the
//! watcher reads the ends of these feeds in turn: each once a minute, a page of feeds at a time, and a limited number of shards per second.
//! With F feeds a full turn takes a minute or F / 16 s, whichever is longer. Only listeners with something to read are woken.
//!
//! If the watcher cannot poll, each listener reads its feed itself, at its own interval.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use futures_util::future::{BoxFuture, pending, try_join_all};
use tokio::{sync::watch, task::JoinSet};

use crate::{
    base::{
        backoff::FAILURE_PAUSE,
        cursor::Cursor,
        encoding::Sequence,
        error::{Error, Result},
        notification::Notification,
    },
    state::{
        context::Context,
        feed::RawFeed,
        keys::{FeedId, Lanes, PulseValue},
        polls::{self, Poll},
        skipped::SkippedAt,
        wakeups::{Heads, LaneHeads},
    },
    store::{Isolation, Transaction},
};

/// How often the watcher polls for listeners that do not set an interval.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The minimum time between two polls, or two hints from other processes. No watch is set within this time after an append by this process.
const HINT_INTERVAL: Duration = Duration::from_millis(10);

/// The minimum time from a hint that found nothing to the next one. Such a hint costs two transactions: one reads, and one sets a watch.
const USELESS_HINT_INTERVAL: Duration = Duration::from_millis(250);

/// How many notifications the watcher reads at once.
const PAGE_ROWS: usize = 1_000;

/// How often the watcher reads the end of each document feed, unless there are too many.
const TURN: Duration = Duration::from_mins(1);

/// How many document feeds the watcher reads at once.
const PAGE_FEEDS: usize = 16;

/// The pause after a page of document feeds; longer if the feeds of the page had more than [`PAGE_FEEDS`] shards in total.
const PAGE_PAUSE: Duration = Duration::from_millis(500);

/// The name under which failures of the watcher are logged.
const WATCHER: &str = "watcher of feeds";

/// The name under which failures of watches are logged.
const WATCH: &str = "watch of a feed";

/// Waits for rows of a feed.
#[derive(Debug)]
pub(crate) struct Listener {
    context: Arc<Context>,
    feed: FeedId,
    /// How often the watcher must poll for this listener.
    poll: Duration,
    /// Whether the watcher reads the notifications for this listener.
    follows: bool,
    /// How long the listener waits for the watcher before it reads its feed itself, and when it will do so.
    patience: Duration,
    looks_at: Duration,
    heads: watch::Receiver<Heads>,
    looked: watch::Receiver<Sequence>,
    watcher: Arc<JoinSet<()>>,
}

impl Listener {
    /// Listens to the notifications, which the watcher polls at least once per `interval`.
    pub fn to_notifications(context: &Arc<Context>, interval: Duration) -> Self {
        let poll = interval.max(HINT_INTERVAL);
        Self::new(context, &context.feed, (poll, poll.saturating_mul(2)), false)
    }

    /// Listens to any feed for a consumer, which reads the feed itself once the watcher has gone about `patience` without polling.
    pub fn of_consumer(context: &Arc<Context>, feed: &FeedId, patience: Duration) -> Self {
        Self::new(context, feed, (POLL_INTERVAL, patience), true)
    }

    /// Listens to a document feed for a reader that receives the notifications about the feed anyway.
    pub fn to_documents(context: &Arc<Context>, feed: &FeedId) -> Self {
        Self::new(context, feed, (POLL_INTERVAL, TURN.saturating_mul(2)), false)
    }

    fn new(
        context: &Arc<Context>,
        feed: &FeedId,
        (poll, patience): (Duration, Duration),
        follows: bool,
    ) -> Self {
        let (heads, looked) = context.wakeups.listen(feed, poll, follows);
        let (watcher, feed, context) = (watcher(context), feed.clone(), Arc::clone(context));
        let looks_at = Duration::MAX;
        let mut listener = Self { context, feed, poll, follows, patience, looks_at, heads, looked, watcher };
        listener.waits_again();
        listener
    }

    /// Returns the heads of the feed.
    pub fn heads(&self) -> Heads {
        *self.heads.borrow()
    }

    /// Returns the position up to which the watcher has polled. Heads that are read after this call cover all rows up to that position.
    pub fn looked_to(&self) -> Sequence {
        *self.looked.borrow()
    }

    /// Marks all messages so far as seen, because the caller is about to read. Only later messages will wake it.
    pub fn reads(&mut self) {
        self.heads.mark_unchanged();
        self.waits_again();
    }

    /// Restarts the time after which the listener reads its feed itself, unless the watcher polls earlier.
    fn waits_again(&mut self) {
        let env = self.context.env();
        self.looks_at = env.now().saturating_add(env.spread(self.patience, 0.75, 1.25));
        self.looked.mark_unchanged();
    }

    /// Waits until the heads have changed and `may_have_rows` holds, or until the watcher has gone too long without polling. Cancel safe.
    pub async fn changed(&mut self, may_have_rows: impl Fn(&Heads) -> bool) {
        let env = self.context.env().clone();
        loop {
            tokio::select! {
                biased;
                changed = self.heads.changed() => {
                    // An error is impossible: the shared context owns the sender.
                    if changed.is_err() || may_have_rows(&self.heads.borrow_and_update()) {
                        return;
                    }
                }
                () = env.sleep(self.looks_at.saturating_sub(env.now())) => {
                    // If the watcher has polled, it did so for all listeners.
                    let is_waiting = self.looked.has_changed().unwrap_or(false);
                    self.waits_again();
                    if !is_waiting {
                        return self.has_waited();
                    }
                }
            }
        }
    }

    /// Waits until the heads change or the watcher polls again, and returns the last position that the watcher could see. Returns `None` if
    /// the watcher has gone too long without polling. Cancel safe.
    pub async fn looked(&mut self) -> Option<Sequence> {
        let env = self.context.env().clone();
        let has_looked = tokio::select! {
            biased;
            looked = self.looked.changed() => looked.is_ok(),
            () = env.sleep(self.looks_at.saturating_sub(env.now())) => false,
            // This branch is last because an append by this process does not show that the watcher polls.
            _ = self.heads.changed() => return Some(self.looked_to()),
        };
        if !has_looked {
            self.has_waited();
        }
        self.waits_again();
        has_looked.then(|| self.looked_to())
    }

    /// Stops listening. If this was the last listener, returns once the watcher has ended.
    pub async fn close(self) {
        let watcher = Arc::clone(&self.watcher);
        drop(self);
        if let Some(mut watcher) = Arc::into_inner(watcher) {
            watcher.shutdown().await;
        }
    }

    /// Called when the watcher has gone too long without polling. If its runtime has ended, starts another in this listener's runtime.
    fn has_waited(&mut self) {
        self.watcher = watcher(&self.context);
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.context.wakeups.leave(&self.feed, self.poll, self.follows, &mut self.heads);
    }
}

/// Returns the process's watcher, which ends when its last handle is dropped.
pub(crate) fn watcher(context: &Arc<Context>) -> Arc<JoinSet<()>> {
    context.wakeups.watcher(|tasks| {
        let shared = Arc::clone(context);
        // After a panic another watcher starts. It knows nothing yet, so its listeners read everything again.
        let make = move || Watcher::new(&shared).run();
        tasks.spawn(context.stats.supervised(context.env(), WATCHER, make))
    })
}

struct Watcher {
    context: Arc<Context>,
    /// The appends by this process, and the last append for which the watcher gave up its watch.
    appends: watch::Receiver<Sequence>,
    appended: Sequence,
    /// The pulse of the notifications at the last poll, and the last position that this poll could see.
    known: Option<PulseValue>,
    seen: Sequence,
    /// Completes when the watch counts as a hint, with false if the watch failed; `None` if no watch is set.
    hint: Option<BoxFuture<'static, bool>>,
    /// When to set a watch, if none is set.
    watch_at: Duration,
    /// The poll that ended the last wait.
    poll: Option<Poll>,
    /// The position up to which notifications were read for listeners of document feeds; `None` while there are no such listeners.
    followed: Option<Sequence>,
    /// Whether there may be notifications after `followed`.
    is_behind: bool,
    /// The document feeds that the watcher has not read yet in this turn, and when the turn began.
    turn: VecDeque<FeedId>,
    turn_began: Option<Duration>,
    /// When the watcher may read the next page of these feeds.
    page_at: Duration,
}

impl Watcher {
    fn new(context: &Arc<Context>) -> Self {
        Self {
            appends: context.wakeups.appends(),
            context: Arc::clone(context),
            appended: Sequence::MIN,
            known: None,
            seen: Sequence::MIN,
            hint: None,
            watch_at: Duration::ZERO,
            poll: None,
            followed: None,
            is_behind: false,
            turn: VecDeque::new(),
            turn_began: None,
            page_at: Duration::ZERO,
        }
    }

    /// Polls until the bus is gone.
    async fn run(mut self) {
        let mut has_hint = false;
        while self.context.stats.health.ended().is_none() {
            if let Err(error) = self.look(has_hint).await {
                self.context.stats.health.complain(self.context.env(), WATCHER, &error);
                self.context.env().sleep(FAILURE_PAUSE).await;
                has_hint = false;
                continue;
            }
            has_hint = self.wait().await;
        }
    }

    /// Waits until there may be rows, or until the poll is due. Returns whether a watch fired. Cancel safe.
    async fn wait(&mut self) -> bool {
        if self.is_behind {
            // Lets the listeners run between two pages.
            tokio::task::yield_now().await;
            return false;
        }
        loop {
            let (env, wakeups) = (self.context.env(), &self.context.wakeups);
            let interval = wakeups.poll_interval();
            let pause = match self.hint {
                Some(_) => interval,
                None => interval.min(self.watch_at.saturating_sub(env.now())),
            };
            // Appends by this process matter only if a watch would fire for them, or if listeners follow the notifications.
            let asks = self.hint.is_some() || wakeups.are_followed();
            let (hint, after) = (&mut self.hint, self.appended.max(self.seen));
            let appended = async {
                if !asks {
                    pending::<()>().await;
                }
                self.appends.wait_for(|append| *append > after).await.map(|append| *append)
            };
            let hinted = async {
                match hint {
                    Some(hint) => hint.await,
                    None => pending().await,
                }
            };
            tokio::select! {
                biased;
                appended = appended => {
                    self.appended = appended.unwrap_or(after);
                    (self.hint, self.watch_at) = (None, env.now().saturating_add(HINT_INTERVAL));
                    if wakeups.are_followed() {
                        return false;
                    }
                }
                has_fired = hinted => {
                    self.hint = None;
                    if has_fired {
                        return true;
                    }
                    // The watch failed only after it was set, and the next one might fail at once. Do not set one before the next poll.
                    self.watch_at = env.now().saturating_add(interval);
                }
                () = wakeups.more_wanted() => return false,
                poll = self.context.polls.due(pause) => {
                    self.poll = Some(poll);
                    return false;
                }
            }
        }
    }

    /// Polls for appended rows, and publishes what it finds.
    async fn look(&mut self, has_hint: bool) -> Result<()> {
        let context = Arc::clone(&self.context);
        let (env, wakeups) = (context.env(), &context.wakeups);
        let (key, db) = (context.keys.pulse(&context.feed), &context.store);
        let read =
            async |tx: Transaction| tokio::try_join!(tx.get(&key, Isolation::Snapshot), tx.read_version());
        let read_polled = async |poll: Poll| {
            let tx = poll.transaction(db);
            let (polled, version) = tokio::try_join!(poll.polled(db, &context.keys), tx.read_version())?;
            Ok((polled.pulse.clone(), version))
        };
        let (pulse, version) = match self.poll.take() {
            Some(poll) => polls::read(poll, db, read_polled).await?,
            None => db.run(read).await?,
        };
        let pulse = PulseValue::new(pulse);
        let to = Sequence::last_at(context.config.incarnation, version);
        let own = wakeups.take_unseen(self.seen, to);
        let moved = self.known.as_ref().map_or(Lanes::ALL, |known| pulse.moved_since(&known.after(&own)));
        (self.known, self.seen) = (Some(pulse), to);
        self.is_behind |= !moved.is_empty() || !own.is_empty();
        wakeups.moved(moved, to);
        wakeups.looked(to);
        let now = env.now();
        if self.hint.is_none() && self.watch_at <= now {
            let last = *self.appends.borrow();
            if last > self.appended {
                // While this process keeps appending, no watch is set.
                (self.appended, self.watch_at) = (last, now.saturating_add(HINT_INTERVAL));
            } else {
                // The longer pause limits the rate of transactions if the watches of a store fire without a change.
                let is_useless = has_hint && moved.is_empty();
                let pause = if is_useless { USELESS_HINT_INTERVAL } else { HINT_INTERVAL };
                self.watch(&key, version, now.saturating_add(pause)).await;
            }
        }
        self.follow_documents().await?;
        self.look_at_documents().await
    }

    /// Sets a watch that fires for changes after `version`, and whose hint comes no earlier than `next`. Makes only one attempt: if it
    /// fails, no hint comes, and the next poll sets another watch.
    async fn watch(&mut self, key: &[u8], version: u64, next: Duration) {
        let env = self.context.env().clone();
        let tx = self.context.store.begin();
        tx.set_read_version(version);
        let set = async {
            let watch = tx.watch(key).await?;
            tx.commit().await?;
            Ok::<_, Error>(watch)
        };
        match set.await {
            Ok(watch) => {
                let stats = Arc::clone(&self.context.stats);
                self.hint = Some(Box::pin(async move {
                    let fired = watch.await.inspect_err(|error| stats.health.complain(&env, WATCH, error));
                    env.sleep(next.saturating_sub(env.now())).await;
                    fired.is_ok()
                }));
            }
            Err(error) => {
                self.context.stats.health.complain(&env, WATCH, &error);
                self.watch_at = env.now().saturating_add(self.context.wakeups.poll_interval());
            }
        }
    }

    /// Reads a page of notifications for listeners of document feeds, if there are any, and wakes those whose databases are in it.
    async fn follow_documents(&mut self) -> Result<()> {
        let wakeups = &self.context.wakeups;
        if !wakeups.are_followed() {
            (self.followed, self.is_behind) = (None, false);
            return Ok(());
        }
        let feed = RawFeed::notifications(&self.context);
        let Some(after) = self.followed else {
            self.followed = Some(self.context.store.run(async |tx| feed.last_readable(&tx).await).await?);
            // Earlier edits may have been missed.
            wakeups.all_documents_moved();
            self.is_behind = false;
            return Ok(());
        };
        if self.is_behind {
            let read = async |tx| feed.page(&tx, Cursor::from(after), PAGE_ROWS).await;
            let page = match self.context.store.run(read).await {
                Err(Error::Expired { .. }) => {
                    self.followed = None;
                    return Box::pin(self.follow_documents()).await;
                }
                page => page?,
            };
            for row in &page.rows {
                match Notification::from_bytes(row.sequence, &row.value) {
                    Ok(row) => {
                        wakeups.documents_moved(&FeedId::documents(row.instance));
                        if let Some(replaced) = row.replaced {
                            // The replaced instance is gone, and has no row of its own.
                            wakeups.documents_moved(&FeedId::documents(replaced.instance));
                        }
                    }
                    Err(error) => {
                        self.context.skip(&SkippedAt::Row(self.context.feed.clone(), row.sequence), &error);
                    }
                }
            }
            (self.followed, self.is_behind) = (Some(page.next.position()), page.more);
        }
        Ok(())
    }

    /// Reads the ends of the next document feeds, if that is due.
    async fn look_at_documents(&mut self) -> Result<()> {
        let (context, now) = (&self.context, self.context.env().now());
        if now < self.page_at {
            return Ok(());
        }
        if self.turn.is_empty() {
            if self.turn_began.is_some_and(|began| now < began.saturating_add(TURN)) {
                return Ok(());
            }
            (self.turn, self.turn_began) = (context.wakeups.documents().into(), Some(now));
        }
        let feeds: Vec<_> = self.turn.drain(..self.turn.len().min(PAGE_FEEDS)).collect();
        if feeds.is_empty() {
            self.turn_began = None;
            return Ok(());
        }
        let count = context.wakeups.count();
        let read =
            async |tx: Transaction| try_join_all(feeds.iter().map(|feed| heads(&tx, context, feed))).await;
        let found = match context.store.run(read).await {
            Ok(found) => found,
            Err(error) => {
                self.turn.extend(feeds);
                return Err(error);
            }
        };
        let mut shards = 0;
        for (feed, found) in feeds.iter().zip(found) {
            shards += found.map_or(1, |(_, shards)| shards);
            context.wakeups.found(feed, count, found.map(|(heads, _)| heads));
        }
        let pages = u32::try_from(shards.div_ceil(PAGE_FEEDS)).unwrap_or(u32::MAX);
        self.page_at = now.saturating_add(PAGE_PAUSE.saturating_mul(pages));
        Ok(())
    }
}

/// Returns the heads of a document feed, and its number of shards. Returns `None` if they cannot be read, for example because the feed is
/// gone. In that case its listeners will find out why.
async fn heads(tx: &Transaction, context: &Context, feed: &FeedId) -> Result<Option<(LaneHeads, usize)>> {
    let feed = RawFeed::new(context, feed);
    let read = async {
        let topology = feed.topology(tx).await?;
        let entry = topology.current();
        // Heads begin at the first sequence of the entry: a reader before that has yet to read the preceding shards to their end.
        let mut heads = [entry.first; Lanes::COUNT];
        for (shard, last) in feed.last_rows(tx, entry).await? {
            let head: &mut Sequence = &mut heads[Lanes::of(shard)];
            *head = last.map_or(*head, |last| last.max(*head));
        }
        Ok((heads, entry.shards().count()))
    };
    match read.await {
        Err(Error::Store(error)) => Err(error.into()),
        found => Ok(found.ok()),
    }
}
