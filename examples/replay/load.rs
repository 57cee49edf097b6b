//! The load: the transactions of the history are committed, several at a time, while the feed is resharded.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use indicatif::ProgressBar;
use notibus::{
    EventKind, Producer,
    feed::NotificationFeed,
    store::{Isolation, KeyRange, Store, Transaction},
};
use tokio::{task::JoinSet, time::sleep};

use super::{Result, history::History};

/// Commits the transactions of a history, in order if they concern the same name; `busy` has the names in the running transactions.
pub struct Load {
    pub writer: Arc<Writer>,
    pub feed: NotificationFeed,
    pub bar: ProgressBar,
    pub commits: Vec<Option<Instant>>,
    pub retries: u64,
    pub reshards: u64,
    /// Each task returns the number of its transaction, the time of the commit and the number of attempts.
    running: JoinSet<Result<(usize, Instant, u64)>>,
    busy: HashSet<usize>,
}

impl Load {
    pub fn new(writer: Writer, feed: NotificationFeed, bar: ProgressBar) -> Self {
        let commits = vec![None; writer.history.transactions.len()];
        let (running, busy) = (JoinSet::new(), HashSet::new());
        Self { writer: Arc::new(writer), feed, bar, commits, retries: 0, reshards: 0, running, busy }
    }

    /// Commits all transactions: at most `writers` at a time, and at most `rate` events per second. After each `every` events it reshards
    /// the feed: to twice as many shards (or half as many if that would be more than 64), and back.
    pub async fn run(&mut self, writers: usize, rate: Option<u32>, every: Option<u64>) -> Result<()> {
        let (writer, began) = (Arc::clone(&self.writer), Instant::now());
        let before = self.feed.topology().await?;
        let first = before.last().map_or(1, |entry| entry.shards.len());
        let other = if 2 * first <= 64 { 2 * first } else { first / 2 };
        let shards = |reshards: u64| if reshards.is_multiple_of(2) { first } else { other };
        for (number, transaction) in writer.history.transactions.iter().enumerate() {
            if let Some(rate) = rate {
                let due = Duration::from_secs(transaction.events.start as u64) / rate;
                sleep(due.saturating_sub(began.elapsed())).await;
            }
            let names = writer.history.names_of(transaction);
            while self.running.len() == writers || !self.busy.is_disjoint(&names) {
                self.finish_one().await?;
            }
            self.busy.extend(names);
            self.running.spawn(Arc::clone(&writer).commit(number));
            while every.is_some_and(|every| (self.reshards + 1) * every <= transaction.events.end as u64) {
                self.reshards += 1;
                self.feed.reshard(shards(self.reshards).try_into()?, None).await?;
            }
        }
        while !self.running.is_empty() {
            self.finish_one().await?;
        }
        self.bar.finish_and_clear();
        let documents = KeyRange::prefix(writer.documents.clone());
        let clear = async |tx: Transaction| {
            tx.clear_range(&documents);
            Ok(())
        };
        writer.store.run(clear).await?;
        let after = self.feed.topology().await?;
        let open: Vec<_> = after.iter().filter(|entry| !entry.is_closed).collect();
        let is_right = open.len() == 1 && open[0].shards.len() == shards(self.reshards);
        if !is_right || (after.len() - before.len()) as u64 != self.reshards {
            return Err(format!("{} reshards led to a wrong topology: {after:?}", self.reshards).into());
        }
        Ok(())
    }

    /// Waits until one of the running transactions is committed.
    async fn finish_one(&mut self) -> Result<()> {
        let Some(ended) = self.running.join_next().await else { return Ok(()) };
        let (number, committed, attempts) = ended??;
        let transaction = &self.writer.history.transactions[number];
        let names = self.writer.history.names_of(transaction);
        self.busy.retain(|name| !names.contains(name));
        self.commits[number] = Some(committed);
        self.retries += attempts - 1;
        self.bar.inc(transaction.events.len() as u64);
        Ok(())
    }
}

pub struct Writer {
    pub store: Store,
    pub producer: Producer,
    pub history: Arc<History>,
    /// The key prefix of the documents that the transactions write.
    pub documents: Vec<u8>,
}

impl Writer {
    /// Commits a transaction that writes a document and records its events. After an unknown result, the document shows whether the
    /// transaction was committed.
    async fn commit(self: Arc<Self>, number: usize) -> Result<(usize, Instant, u64)> {
        let document = [&self.documents[..], &(number as u64).to_be_bytes()].concat();
        let transaction = &self.history.transactions[number];
        let attempts = AtomicU64::new(0);
        let record = async |tx: Transaction| {
            let is_first = attempts.fetch_add(1, Ordering::Relaxed) == 0;
            if !is_first && tx.get(&document, Isolation::Serializable).await?.is_some() {
                return Ok(());
            }
            tx.set(&document, b"");
            for event in &self.history.events[transaction.events.clone()] {
                let db = &self.history.instances[event.instance].db;
                match event.kind {
                    EventKind::Created => self.producer.created(&tx, db),
                    EventKind::Deleted => self.producer.deleted(&tx, db),
                    EventKind::Updated => self.producer.updated(&tx, db),
                    EventKind::DdocUpdated => self.producer.ddoc_updated(&tx, db, event.ddoc.as_ref()),
                }
            }
            Ok(())
        };
        let fail = |error| format!("the transaction that begins on line {}: {error}", transaction.line);
        self.store.run(record).await.map_err(fail)?;
        Ok((number, Instant::now(), attempts.into_inner()))
    }
}
