//! The check: what was delivered, how long that took, and how the final feed differs from the history.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Instant,
};

use notibus::{
    Bus, Cursor, DbName, Dispatcher, EventKind, Filter, Kinds, Notification, Sequence, dispatcher::Trouble,
    event::Counters,
};
use parking_lot::Mutex;
use tokio_stream::StreamExt;

use super::{Result, history::History};

/// A subscriber, and what it received.
pub struct Subscriber {
    name: &'static str,
    kinds: Kinds,
    /// Whether the subscriber wants a database with this name.
    wants: fn(&str) -> bool,
    began: Cursor,
    pub received: Arc<Mutex<Received>>,
}

#[derive(Default)]
pub struct Received {
    /// The newest row of each name.
    newest: HashMap<DbName, Sequence>,
    /// When each delivery arrived, the index of its database, and the number of events in its row.
    pub deliveries: Vec<(Instant, usize, u64)>,
    /// Problems of the subscription, and rows that arrived out of order.
    faults: Vec<String>,
}

impl Subscriber {
    /// Starts an indexer, which wants updates of every database; a replicator, which wants databases whose name contains "replicator"; and
    /// `db_updates`, which wants everything. They end with the dispatcher.
    pub fn start_all(dispatcher: &Dispatcher, history: &Arc<History>) -> Result<[Self; 3]> {
        let updates = Kinds::from(EventKind::Updated) | EventKind::DdocUpdated.into();
        let is_replicator = |name: &str| name.contains("replicator");
        let replicators = Filter::predicate(move |row| is_replicator(row.name.as_str()));
        let wanted = [
            ("indexer", Filter::all().kinds(updates)?, updates, (|_| true) as fn(&str) -> bool),
            ("replicator", replicators, Kinds::ALL, is_replicator),
            ("db_updates", Filter::all(), Kinds::ALL, |_| true),
        ];
        Ok(wanted.map(|(name, filter, kinds, wants)| {
            let received = Arc::<Mutex<Received>>::default();
            let (shared, troubled, history) =
                (Arc::clone(&received), Arc::clone(&received), Arc::clone(history));
            let on_trouble = move |trouble: Trouble| troubled.lock().faults.push(trouble.to_string());
            let mut deliveries = dispatcher.subscribe(filter).deliveries(on_trouble);
            let began = deliveries.cursor();
            tokio::spawn(async move {
                while let Some(delivery) = deliveries.next().await {
                    shared.lock().add(&history, delivery.notification());
                }
            });
            Self { name, kinds, wants, began, received }
        }))
    }

    /// Finds one of `rows` whose news was not delivered, or another fault. The last rows are delivered last, so they are checked first.
    pub fn fault(&self, rows: &[Arc<Notification>]) -> Option<String> {
        let received = self.received.lock();
        let is_missing = |row: &&Arc<Notification>| {
            let known = received.newest.get(&row.name).map_or(self.began, |&newest| newest.into());
            (self.wants)(row.name.as_str()) && row.news_since(known).kinds().intersects(self.kinds)
        };
        let missing = rows.iter().rev().find(is_missing).map(|row| format!("it did not receive {row:?}"));
        missing.or_else(|| received.faults.first().cloned()).map(|fault| format!("{}: {fault}", self.name))
    }

    /// Returns the sorted times from the commits of events to their deliveries, in microseconds. `commits` has the commit times.
    pub fn latencies(&self, history: &History, commits: &[Option<Instant>]) -> Vec<u64> {
        let mut waiting = vec![VecDeque::new(); history.instances.len()];
        for (transaction, commit) in history.transactions.iter().zip(commits) {
            for event in &history.events[transaction.events.clone()] {
                waiting[event.instance].extend(*commit);
            }
        }
        let (mut micros, mut delivered) = (Vec::new(), vec![0; history.instances.len()]);
        for &(at, instance, count) in &self.received.lock().deliveries {
            let due = (count.saturating_sub(delivered[instance]) as usize).min(waiting[instance].len());
            let latency = |commit| u64::try_from(at.saturating_duration_since(commit).as_micros());
            micros.extend(waiting[instance].drain(..due).flat_map(latency));
            delivered[instance] = delivered[instance].max(count);
        }
        micros.sort_unstable();
        micros
    }
}

impl Received {
    fn add(&mut self, history: &History, row: &Notification) {
        if let Some(&instance) = history.by_id.get(&row.instance) {
            self.deliveries.push((Instant::now(), instance, row.totals.total()));
        }
        let before = self.newest.insert(row.name.clone(), row.sequence);
        if let Some(before) = before.filter(|&before| before >= row.sequence) {
            self.faults.push(format!("{:?} went back from {before} to {}", row.name, row.sequence));
        }
    }
}

/// Reads all rows of the feed, in order.
pub async fn feed(bus: &Bus) -> Result<Vec<Arc<Notification>>> {
    let (mut rows, mut cursor) = (Vec::new(), Cursor::BEGINNING);
    loop {
        let page = bus.feed().page(cursor, 1_000).await?;
        rows.extend(page.rows);
        if !page.more {
            return Ok(rows);
        }
        cursor = page.next;
    }
}

/// Lists how the feed differs from the history; `rows` are those whose names occur in the history.
pub fn compare(history: &History, rows: &[Arc<Notification>], folded: Counters) -> Vec<String> {
    let mut differences = Vec::new();
    if folded != history.recorded {
        differences.push(format!("recorded {:?}, but folded {folded:?}", history.recorded));
    }
    if !rows.is_sorted_by(|a, b| a.sequence < b.sequence) {
        differences.push("the feed is not in order".to_owned());
    }
    let of_names: HashMap<_, _> = rows.iter().map(|row| (&row.name, row)).collect();
    if of_names.len() != rows.len() {
        differences.push("a database has more than one row".to_owned());
    }
    for (text, &index) in &history.index {
        let name = &history.names[index];
        let newest = &history.instances[name.newest];
        let is_right = |row: &Notification| {
            // If all databases of a name were created and deleted within one fold, the row may be about any of them.
            let is_newest =
                !name.exists || (row.instance == newest.db.instance && row.totals == newest.totals);
            is_newest && row.is_deleted() != name.exists
        };
        let row = of_names.get(text);
        if !row.is_some_and(|row| is_right(row)) {
            differences
                .push(format!("{text:?} should be {newest:?}, exists: {}; its row is {row:?}", name.exists));
        }
    }
    differences
}
