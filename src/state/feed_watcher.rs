//! The one poll of a process for rows of feeds, and the [`Listener`]s that wait for what it finds.
//!
//! Nobody else polls for rows. The watcher reads the pulse of the notifications, one key that every append moves: when a watch says that
//! it has moved, and by its poll, which finds what no hint tells of. It publishes which lanes others than this process have moved, and
//! up to where it has looked; so an idle process makes one read per interval, whatever waits in it.
//!
//! Feeds of documents have no pulse, which would cost each edit a mutation. Notifications tell of nearly all edits. For the others the
//! watcher looks at the ends of these feeds in turns: at each feed once a minute, a page of feeds at a time, and at so many shards a
//! second at most. With F feeds a turn takes a minute, or F / 16 s if that is longer. It wakes only who has something to read.
//!
//! If the watcher cannot poll, each listener looks for itself, by an interval of its own.

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

/// How often it polls for listeners that do not say so.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The shortest time between two polls, and between two hints of other processes. After an append of this process no watch is set for as long.
const HINT_INTERVAL: Duration = Duration::from_millis(10);

/// The same for a hint after one that came for nothing. Each costs two transactions: one that finds nothing, and one that sets a watch.
const USELESS_HINT_INTERVAL: Duration = Duration::from_millis(250);

/// How many notifications it reads at once.
const PAGE_ROWS: usize = 1_000;

/// How often it looks at each feed of documents, if there are not too many.
const TURN: Duration = Duration::from_mins(1);

/// At how many feeds of documents it looks at once.
const PAGE_FEEDS: usize = 16;

/// The pause after it has looked at a page of feeds of documents; longer, if they had more shards than a page has feeds.
const PAGE_PAUSE: Duration = Duration::from_millis(500);

/// Its name in reports of trouble.
const WATCHER: &str = "watcher of feeds";

/// The name of watches in reports of trouble.
const WATCH: &str = "watch of a feed";

/// One that waits for rows of a feed.
#[derive(Debug)]
pub(crate) struct Listener {
    context: Arc<Context>,
    feed: FeedId,
    /// How often the watcher looks for it.
    poll: Duration,
    /// Whether the watcher reads the notifications for this listener.
    follows: bool,
    /// How long it waits for the watcher before it looks for itself, and when it does so.
    patience: Duration,
    looks_at: Duration,
    heads: watch::Receiver<Heads>,
    looked: watch::Receiver<Sequence>,
    watcher: Arc<JoinSet<()>>,
}

impl Listener {
    /// Listens to the notifications, at which the watcher looks within each `interval`.
    pub fn to_notifications(context: &Arc<Context>, interval: Duration) -> Self {
        let poll = interval.max(HINT_INTERVAL);
        Self::new(context, &context.feed, (poll, poll.saturating_mul(2)), false)
    }

    /// Listens to any feed for a consumer, which looks for itself after about `patience`.
    pub fn of_consumer(context: &Arc<Context>, feed: &FeedId, patience: Duration) -> Self {
        Self::new(context, feed, (POLL_INTERVAL, patience), true)
    }

    /// Listens to a feed of documents on behalf of one who receives its notifications.
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

    /// The heads of the feed.
    pub fn heads(&self) -> Heads {
        *self.heads.borrow()
    }

    /// Up to where the watcher has looked: no row up to there is behind heads that are read after this.
    pub fn looked_to(&self) -> Sequence {
        *self.looked.borrow()
    }

    /// Messages that come from now on are news: a read follows.
    pub fn reads(&mut self) {
        self.heads.mark_unchanged();
        self.waits_again();
    }

    /// It looks for itself after another while, unless the watcher looks before.
    fn waits_again(&mut self) {
        let env = self.context.env();
        self.looks_at = env.now().saturating_add(env.spread(self.patience, 0.75, 1.25));
        self.looked.mark_unchanged();
    }

    /// Completes when the heads have changed and `may_have_rows`, or when the watcher has not looked for too long. Cancel safe.
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
                    // If the watcher has looked, it has done so for all at once.
                    let is_waiting = self.looked.has_changed().unwrap_or(false);
                    self.waits_again();
                    if !is_waiting {
                        return self.has_waited();
                    }
                }
            }
        }
    }

    /// Completes when the heads have changed or the watcher has looked again, with the last position that it could see; with `None` if it
    /// has not looked for too long. Cancel safe.
    pub async fn looked(&mut self) -> Option<Sequence> {
        let env = self.context.env().clone();
        let has_looked = tokio::select! {
            biased;
            looked = self.looked.changed() => looked.is_ok(),
            () = env.sleep(self.looks_at.saturating_sub(env.now())) => false,
            // Last, because an append of this process does not show that the watcher looks.
            _ = self.heads.changed() => return Some(self.looked_to()),
        };
        if !has_looked {
            self.has_waited();
        }
        self.waits_again();
        has_looked.then(|| self.looked_to())
    }

    /// Stops listening; returns once the watcher has ended, if this was the last listener.
    pub async fn close(self) {
        let watcher = Arc::clone(&self.watcher);
        drop(self);
        if let Some(mut watcher) = Arc::into_inner(watcher) {
            watcher.shutdown().await;
        }
    }

    /// The watcher has not looked for too long. Its runtime may have ended: then another one begins in that of this listener.
    fn has_waited(&mut self) {
        self.watcher = watcher(&self.context);
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.context.wakeups.leave(&self.feed, self.poll, self.follows, &mut self.heads);
    }
}

/// The watcher of the process. It ends with its last handle.
pub(crate) fn watcher(context: &Arc<Context>) -> Arc<JoinSet<()>> {
    context.wakeups.watcher(|tasks| {
        let shared = Arc::clone(context);
        // After a panic another one begins, which knows nothing: so its listeners look at everything once more.
        let make = move || Watcher::new(&shared).run();
        tasks.spawn(context.stats.supervised(context.env(), WATCHER, make))
    })
}

struct Watcher {
    context: Arc<Context>,
    /// The appends of this process, and the last one for which it has given up its watch.
    appends: watch::Receiver<Sequence>,
    appended: Sequence,
    /// The pulse of the notifications at the last look, and the last position that the look could see.
    known: Option<PulseValue>,
    seen: Sequence,
    /// Completes when the watch counts as a hint, with false if it has failed; `None` if none is set.
    hint: Option<BoxFuture<'static, bool>>,
    /// When a watch is set, if there is none.
    watch_at: Duration,
    /// The poll that has ended the last wait.
    poll: Option<Poll>,
    /// The position up to which notifications were read for listeners to documents; `None` while there are none.
    followed: Option<Sequence>,
    /// Whether there may be notifications after that.
    is_behind: bool,
    /// The feeds of documents at which it has still to look in this turn, and when the turn began.
    turn: VecDeque<FeedId>,
    turn_began: Option<Duration>,
    /// When it may look at the next page of them.
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

    /// Looks until the bus is gone.
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

    /// Completes when there may be rows, or when the poll is due. Returns whether a watch has fired. Cancel safe.
    async fn wait(&mut self) -> bool {
        if self.is_behind {
            // The listeners get their turn between two pages.
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
            // Appends of this process matter only if a watch would fire for them, or if listeners follow the notifications.
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
                    // It was refused late, and might be again at once.
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

    /// Looks for appended rows, and publishes what it finds.
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
                // Under steady load of this process there is no watch.
                (self.appended, self.watch_at) = (last, now.saturating_add(HINT_INTERVAL));
            } else {
                // A store whose watches fire for nothing costs a bounded rate.
                let is_useless = has_hint && moved.is_empty();
                let pause = if is_useless { USELESS_HINT_INTERVAL } else { HINT_INTERVAL };
                self.watch(&key, version, now.saturating_add(pause)).await;
            }
        }
        self.follow_documents().await?;
        self.look_at_documents().await
    }

    /// Sets a watch that fires for what comes after `version`, and counts as a hint from `next` on. It is tried once: one that cannot be
    /// set is a hint that did not come, and the poll sets another.
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

    /// Reads a page of notifications for listeners to documents, if there are such listeners, and tells those whose databases are in it.
    async fn follow_documents(&mut self) -> Result<()> {
        let wakeups = &self.context.wakeups;
        if !wakeups.are_followed() {
            (self.followed, self.is_behind) = (None, false);
            return Ok(());
        }
        let feed = RawFeed::notifications(&self.context);
        let Some(after) = self.followed else {
            self.followed = Some(self.context.store.run(async |tx| feed.last_readable(&tx).await).await?);
            // Edits before that may not have been seen.
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

    /// Looks at the ends of the next feeds of documents, if that is due.
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

/// The heads of a feed of documents, and how many shards it has. `None` if they cannot be read, as those of a feed that is gone: its
/// listeners find out why.
async fn heads(tx: &Transaction, context: &Context, feed: &FeedId) -> Result<Option<(LaneHeads, usize)>> {
    let feed = RawFeed::new(context, feed);
    let read = async {
        let topology = feed.topology(tx).await?;
        let entry = topology.current();
        // Who has read less than that has not seen the end of the shards before.
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
