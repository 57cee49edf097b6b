//! Dispatching against a naive model: random events over a few databases, and subscribers with random starts, filters and
//! paces. Each delivery must have exactly the news since the subscriber last knew the database.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{collections::BTreeMap, time::Duration};

use common::{db, eager, joined, record, until};
use futures_util::FutureExt;
use notibus::{
    Bus, BusOptions, Cursor, DbInstance, Delivery, Dispatcher, DispatcherOptions, EventKind, Filter, Kinds,
    Notification, Sequence,
    cursor::Start,
    dispatcher::{Item, Subscription},
    event::Counters,
    store::Store,
};
use tokio_stream::StreamExt;

const NAMES: [&str; 6] = ["a/x", "a/y", "b/x", "b/y", "c", "d"];

/// What is known about the databases at one time.
type Knowledge = BTreeMap<String, (DbInstance, Counters)>;

/// A subscriber, and its deliveries so far.
#[expect(clippy::struct_excessive_bools, reason = "they are independent of each other")]
struct Subscriber {
    what: String,
    subscription: Subscription,
    wants: Wants,
    kinds: Kinds,
    /// Whether the subscriber names its databases. It then looks them up instead of reading the feed, so rows do not arrive in the order of
    /// the feed.
    is_exact: bool,
    /// Whether the subscriber started at the beginning of the feed.
    from_nothing: bool,
    skips: bool,
    /// Whether deliveries may repeat, because the subscriber reads many pages.
    may_repeat: bool,
    start: Knowledge,
    known: Knowledge,
    /// The last sequence of each name.
    last: BTreeMap<String, Sequence>,
    /// The last sequence that was delivered, or to which the subscriber skipped.
    newest: Sequence,
}

/// Returns whether a name is wanted.
type Wants = fn(&str) -> bool;

/// Returns the filters to choose from, each with the names that it wants, and whether these are exact names.
fn filters() -> Vec<(Filter, Wants, bool)> {
    let parsed = |names: &[&str]| names.iter().map(|name| name.parse().unwrap()).collect::<Vec<_>>();
    vec![
        (Filter::all(), |_| true, false),
        (Filter::prefix("a/"), |name| name.starts_with("a/"), false),
        (Filter::suffix("/x"), |name| name.ends_with("/x"), false),
        (Filter::glob("?/y").unwrap(), |name| name.ends_with("/y"), false),
        (Filter::predicate(|row| row.name.as_str().len() == 1), |name| name.len() == 1, false),
        (Filter::name("c").unwrap(), |name| name == "c", true),
        (
            Filter::names(parsed(&["a/x", "b/x", "d"])).unwrap(),
            |name| ["a/x", "b/x", "d"].contains(&name),
            true,
        ),
        (
            Filter::any(["a/x", "a/y", "c"].map(|name| Filter::name(name).unwrap())).unwrap(),
            |name| ["a/x", "a/y", "c"].contains(&name),
            true,
        ),
        (
            Filter::any([Filter::name("c").unwrap(), Filter::suffix("/x")]).unwrap(),
            |name| name == "c" || name.ends_with("/x"),
            false,
        ),
    ]
}

impl Subscriber {
    /// Takes up to `most` items that are already there.
    fn take(&mut self, most: usize) {
        for _ in 0..most {
            match self.subscription.next().now_or_never() {
                Some(Some(item)) => self.receive(item),
                _ => return,
            }
        }
    }

    /// Takes all items until none arrives for 10 s.
    async fn finish(&mut self) {
        while let Ok(item) = tokio::time::timeout(Duration::from_secs(10), self.subscription.next()).await {
            self.receive(item.expect("the dispatcher runs"));
        }
    }

    fn receive(&mut self, item: Item) {
        match item {
            Item::Delivery(delivery) => self.check(&delivery),
            Item::Lagged { from, to } => {
                assert!(self.skips && from < to && to > self.newest, "{}", self.what);
                self.newest = to;
                // Rows in between were skipped, so the history of a database is unknown from here on.
                self.may_repeat = true;
            }
            Item::CaughtUp { .. } => {}
            Item::Expired { .. } | Item::Failed(_) => panic!("{}: {item:?}", self.what),
        }
    }

    /// Checks a delivery against what was known, and adds it to what is known.
    fn check(&mut self, delivery: &Delivery) {
        let row = delivery.notification();
        let name = row.name.as_str().to_owned();
        let what = format!("{}: {row:?}", self.what);
        assert!((self.wants)(&name), "{what}");
        let last = self.last.insert(name.clone(), row.sequence);
        assert!(last < Some(row.sequence), "per database, sequences grow: {what}");
        if !self.is_exact {
            assert!(self.newest < row.sequence, "without names, all sequences grow: {what}");
        }
        self.newest = self.newest.max(row.sequence);
        let delivered = delivery.news().kinds();
        assert!(delivered.intersects(self.kinds), "{what}");
        let before = self.known.insert(name, (row.instance, row.totals));
        // The kinds can be checked only if the subscriber gets every row. Otherwise its last row of a name may be older than what it knows.
        if self.kinds == Kinds::ALL && !self.skips {
            self.check_kinds(delivered, row, before, &what);
        }
    }

    /// Checks the kinds of a delivery against the totals that were known before.
    fn check_kinds(
        &self,
        delivered: Kinds,
        row: &Notification,
        before: Option<(DbInstance, Counters)>,
        what: &str,
    ) {
        let (same, known) = match before {
            Some((instance, totals)) if instance == row.instance => (true, totals),
            _ => (false, Counters::ZERO),
        };
        for kind in EventKind::ALL {
            let (then, now) = (known.lanes()[kind as usize], row.totals.lanes()[kind as usize]);
            if now > then {
                assert!(delivered.contains(kind), "{kind:?} was left out: {delivered:?} {what}");
            } else if kind == EventKind::Deleted && !same {
                self.check_replaced(delivered, row, before, what);
            } else if !self.may_repeat || (now == 0 && kind != EventKind::Deleted) {
                assert!(!delivered.contains(kind), "{kind:?} is not new: {delivered:?} {what}");
            }
        }
    }

    /// Checks whether the deletion of an earlier instance is delivered. If instances were created and deleted unseen, both are right.
    fn check_replaced(
        &self,
        delivered: Kinds,
        row: &Notification,
        before: Option<(DbInstance, Counters)>,
        what: &str,
    ) {
        match before {
            Some((_, totals)) if totals.deleted == 0 => {
                assert!(delivered.contains(EventKind::Deleted), "the end was left out: {what}");
            }
            Some((instance, _)) if instance.0[0] + 1 == row.instance.0[0] && !self.may_repeat => {
                assert!(!delivered.contains(EventKind::Deleted), "the end was delivered before: {what}");
            }
            None if self.from_nothing && row.instance.0[0] == 1 => {
                assert!(!delivered.contains(EventKind::Deleted), "there was none before: {what}");
            }
            _ => {}
        }
    }

    /// Checks that nothing in `rows` is missing.
    fn check_end(&self, rows: &[std::sync::Arc<Notification>]) {
        for row in rows.iter().filter(|row| (self.wants)(row.name.as_str())) {
            let name = row.name.as_str();
            let of = |knowledge: &Knowledge| match knowledge.get(name) {
                Some((instance, totals)) if *instance == row.instance => *totals,
                _ => Counters::ZERO,
            };
            let (start, delivered) = (of(&self.start), of(&self.known));
            for kind in self.kinds.iter() {
                let [start, delivered, now] =
                    [start, delivered, row.totals].map(|of| of.lanes()[kind as usize]);
                if now > start && !self.skips {
                    assert_eq!(delivered, now, "{kind:?} of {name} is missing: {}", self.what);
                }
            }
        }
    }
}

struct Run {
    /// Makes all random choices.
    random: fastrand::Rng,
    store: Store,
    bus: Bus,
    dispatcher: Dispatcher,
    /// Whether the feed is read in small pages.
    small_pages: bool,
    /// For each database, the number of its newest instance, and whether that exists.
    lives: Vec<(u8, bool)>,
    /// How many events were recorded.
    recorded: u64,
    /// Positions at which everything was idle, with the state of the feed then.
    checkpoints: Vec<(Sequence, Knowledge)>,
    subscribers: Vec<Subscriber>,
}

impl Run {
    /// Records one or a few events in one transaction.
    async fn record(&mut self) {
        let place = self.random.usize(..NAMES.len());
        let (instance, lives) = &mut self.lives[place];
        let mut lanes = [0; 4];
        if !*lives {
            (*instance, *lives) = (*instance + 1, true);
            lanes[0] = 1;
        }
        lanes[2] = self.random.u64(..3);
        lanes[3] = self.random.u64(..2);
        if self.random.u8(..5) == 0 {
            *lives = false;
            lanes[1] = 1;
        }
        if lanes == [0; 4] {
            lanes[2] = 1;
        }
        let database = db(NAMES[place], *instance);
        record(&self.store, &self.bus, &database, lanes).await;
        self.recorded += lanes.iter().sum::<u64>();
    }

    /// Waits until everything is folded and delivered, and remembers the position.
    async fn settle(&mut self) {
        until("all folds", async || self.bus.stats().folded.total() == self.recorded).await;
        let now = self.bus.feed().now().await.unwrap();
        until("the tail", async || self.dispatcher.position() >= now).await;
        let knowledge = common::rows(&self.bus)
            .await
            .iter()
            .map(|row| (row.name.as_str().to_owned(), (row.instance, row.totals)))
            .collect();
        self.checkpoints.push((now, knowledge));
    }

    /// Subscribes with a random filter, from a random position.
    async fn subscribe(&mut self) {
        let mut all = filters();
        let (filter, wants, is_exact) = all.swap_remove(self.random.usize(..all.len()));
        let kinds = match self.random.u8(..4) {
            0 => EventKind::Created.into(),
            1 => Kinds::from(EventKind::DdocUpdated) | EventKind::Deleted.into(),
            _ => Kinds::ALL,
        };
        let (since, start) = match self.random.u8(..3) {
            0 => (Start::At(Cursor::BEGINNING), Knowledge::new()),
            1 => {
                let (sequence, knowledge) =
                    self.checkpoints[self.random.usize(..self.checkpoints.len())].clone();
                (Start::from(sequence), knowledge)
            }
            _ => {
                self.settle().await;
                (Start::Now, self.checkpoints.last().unwrap().1.clone())
            }
        };
        let skips = self.random.u8(..5) == 0;
        let what = format!("{filter:?} since {since:?}, skips: {skips}");
        let subscribe = self.dispatcher.subscribe(filter.kinds(kinds).unwrap()).since(since);
        let subscription = if skips { subscribe.skip_when_lagging() } else { subscribe }.stream();
        let newest = if let Start::At(cursor) = since { cursor.position() } else { Sequence::MIN };
        self.subscribers.push(Subscriber {
            what,
            subscription,
            wants,
            kinds,
            is_exact,
            from_nothing: since == Start::At(Cursor::BEGINNING),
            skips: skips && !is_exact,
            may_repeat: self.small_pages,
            known: start.clone(),
            start,
            last: BTreeMap::new(),
            newest,
        });
    }
}

/// Runs a scenario that `random` draws.
async fn run(mut random: fastrand::Rng) {
    let store = Store::memory();
    let options = BusOptions::default().partitions(random.u32(1..4)).shards(random.u32(1..6));
    let bus = Bus::open(&store, options).await.unwrap();
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let small_pages = random.bool();
    let options = DispatcherOptions::default()
        .ring_rows_max(*random.choice(&[1, 3, 1_000]).unwrap())
        .page_rows_max(if small_pages { random.usize(1..3) } else { 1_000 })
        .catch_ups_max(random.usize(1..3));
    let dispatcher = bus.dispatcher(options).await.unwrap();
    let lives = vec![(0, false); NAMES.len()];
    let (recorded, checkpoints, subscribers) = (0, Vec::new(), Vec::new());
    let mut run =
        Run { random, store, bus, dispatcher, small_pages, lives, recorded, checkpoints, subscribers };
    run.settle().await;
    for _ in 0..150 {
        match run.random.u8(..20) {
            0 => run.settle().await,
            1..=2 => run.subscribe().await,
            3..=7 => tokio::time::sleep(Duration::from_millis(run.random.u64(..40))).await,
            8..=11 if !run.subscribers.is_empty() => {
                let place = run.random.usize(..run.subscribers.len());
                let most = run.random.usize(1..6);
                run.subscribers[place].take(most);
            }
            _ => run.record().await,
        }
    }
    run.settle().await;
    let rows = common::rows(&run.bus).await;
    for subscriber in &mut run.subscribers {
        subscriber.finish().await;
        subscriber.check_end(&rows);
    }
}

#[tokio::test(start_paused = true)]
async fn subscribers_get_what_the_model_says() {
    for _ in 0..60 {
        run(common::dice()).await;
    }
}
