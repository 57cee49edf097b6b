//! The subscribers of a replay: their deliveries, and the time from commit to delivery.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Instant,
};

use hdrhistogram::Histogram;
use notibus::{Cursor, DbInstance, DbName, Dispatcher, Filter, Kinds, Notification, Sequence};
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio_stream::StreamExt;

use super::{
    check::FinalFeed,
    history::{Event, History},
};

/// A subscriber of a replay.
pub struct Observer {
    /// Its name, for reports.
    name: &'static str,
    /// The kinds of events that it wants.
    kinds: Kinds,
    /// Whether it wants a database of this name.
    wants: fn(&str) -> bool,
    began: Cursor,
    delivered: Arc<Mutex<Delivered>>,
    /// Receives deliveries.
    task: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Delivered {
    /// The newest row of each database.
    newest: HashMap<DbName, Sequence>,
    deliveries: u64,
    /// When the last one came.
    last: Option<Instant>,
    /// Interruptions, and rows that came out of order.
    faults: Vec<String>,
}

impl Observer {
    /// Subscribes with `filter`, which must match `kinds` and `wants`.
    pub fn start(
        dispatcher: &Dispatcher,
        name: &'static str,
        filter: Filter,
        kinds: Kinds,
        wants: fn(&str) -> bool,
        latencies: Option<Arc<Latencies>>,
    ) -> Self {
        let delivered = Arc::<Mutex<Delivered>>::default();
        let mut deliveries = dispatcher.subscribe(filter).stream();
        let began = deliveries.cursor();
        let task = tokio::spawn({
            let delivered = Arc::clone(&delivered);
            async move {
                while let Some(item) = deliveries.next().await {
                    let mut delivered = delivered.lock();
                    match item {
                        Ok(delivery) => {
                            let row = delivery.notification();
                            if let Some(latencies) = &latencies {
                                latencies.delivered(row);
                            }
                            delivered.add(row);
                        }
                        Err(interruption) => delivered.faults.push(interruption.to_string()),
                    }
                }
            }
        });
        Self { name, kinds, wants, began, delivered, task }
    }

    pub fn deliveries(&self) -> u64 {
        self.delivered.lock().deliveries
    }

    /// When the last delivery came.
    pub fn last(&self) -> Option<Instant> {
        self.delivered.lock().last
    }

    /// Whether all news of `feed` were delivered. It looks at the last rows first, which are delivered last, so it costs
    /// little while they are missing.
    pub fn has_all(&self, feed: &FinalFeed) -> bool {
        let delivered = self.delivered.lock();
        feed.of_history.iter().rev().all(|row| self.missed(&delivered, row).is_none())
    }

    /// The news of `feed` that were not delivered to the subscriber, and its other faults.
    pub fn missing(&self, feed: &FinalFeed) -> Vec<String> {
        let delivered = self.delivered.lock();
        let missed = feed.of_history.iter().filter_map(|row| {
            let news = self.missed(&delivered, row)?;
            Some(format!("{} was not delivered {news:?} of {:?}", self.name, row.name))
        });
        missed.chain(delivered.faults.iter().map(|fault| format!("{}: {fault}", self.name))).collect()
    }

    /// The news of `row`, if the subscriber wants some of them and got none.
    fn missed(&self, delivered: &Delivered, row: &Notification) -> Option<Kinds> {
        if !(self.wants)(row.name.as_str()) {
            return None;
        }
        let known = delivered.newest.get(&row.name).map_or(self.began, |&newest| newest.into());
        Some(row.news_since(known).kinds()).filter(|news| news.intersects(self.kinds))
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Delivered {
    fn add(&mut self, row: &Notification) {
        self.deliveries += 1;
        self.last = Some(Instant::now());
        let before = self.newest.insert(row.name.clone(), row.sequence);
        if let Some(before) = before.filter(|&before| before >= row.sequence) {
            self.faults.push(format!("{:?} went back from {before} to {}", row.name, row.sequence));
        }
    }
}

/// Measures the time from the commit of each event to its delivery.
pub struct Latencies {
    /// Pending events by the index of the instance.
    instances: Vec<Mutex<Pending>>,
    /// The indices of an instance and of earlier instances of its name.
    places: HashMap<DbInstance, Vec<usize>>,
    /// In microseconds.
    histogram: Mutex<Histogram<u64>>,
}

/// The events of an instance that were committed but not delivered.
#[derive(Debug, Default)]
struct Pending {
    /// Times of commits, each with its number of events; oldest first.
    commits: VecDeque<(Instant, u64)>,
    committed: u64,
    delivered: u64,
}

impl Latencies {
    /// Makes it for the events of `history`.
    pub fn new(history: &History) -> Self {
        let places = history.names.iter().flat_map(|name| {
            (0..name.instances.len()).map(|last| {
                let instance = history.instances[name.instances[last]].db.instance;
                (instance, name.instances[..=last].to_vec())
            })
        });
        Self {
            instances: history.instances.iter().map(|_| Mutex::default()).collect(),
            places: places.collect(),
            histogram: Mutex::new(Histogram::new(3).expect("3 significant digits are allowed")),
        }
    }

    /// Notes that the transaction of `events` has committed.
    pub fn committed(&self, events: &[Event]) {
        let now = Instant::now();
        for event in events {
            let mut pending = self.instances[event.instance].lock();
            pending.committed += 1;
            if pending.committed <= pending.delivered {
                // The delivery came before the writer got here.
                self.measured(0, 1);
            } else {
                pending.commits.push_back((now, 1));
            }
        }
    }

    /// Notes the delivery of a row: its totals count the delivered events of the instance, and earlier instances are over.
    pub fn delivered(&self, row: &Notification) {
        let now = Instant::now();
        let Some((&newest, earlier)) = self.places.get(&row.instance).and_then(|places| places.split_last())
        else {
            return;
        };
        self.deliver_up_to(newest, row.totals.total(), now);
        for &instance in earlier {
            self.deliver_up_to(instance, u64::MAX, now);
        }
    }

    /// Notes that the first `count` events of `instance` are delivered.
    fn deliver_up_to(&self, instance: usize, count: u64, now: Instant) {
        let mut pending = self.instances[instance].lock();
        while let Some(&(committed, events)) = pending.commits.front()
            && pending.delivered.saturating_add(events) <= count
        {
            pending.commits.pop_front();
            pending.delivered += events;
            let micros = u64::try_from(now.duration_since(committed).as_micros()).unwrap_or(u64::MAX);
            self.measured(micros, events);
        }
        pending.delivered = pending.delivered.max(count);
    }

    /// Adds `count` events that took `micros`.
    fn measured(&self, micros: u64, count: u64) {
        self.histogram.lock().record_n(micros, count).expect("the histogram grows by itself");
    }

    /// A quantile of the latencies in microseconds.
    pub fn quantile(&self, quantile: f64) -> u64 {
        self.histogram.lock().value_at_quantile(quantile)
    }

    /// The greatest latency, in microseconds.
    pub fn max(&self) -> u64 {
        self.histogram.lock().max()
    }
}
