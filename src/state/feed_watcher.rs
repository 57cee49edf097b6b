//! The watcher of a process: polls for new rows on behalf of all its consumers.
//!
//! Consumers do not poll their shards each for itself. This task waits for the pulse of the notification feed, which says to which
//! shards rows were appended. It tells consumers up to where their shards may have rows, so that only those read that have
//! something to read. Feeds of documents have no pulse; for them it reads the notifications, which tell of each database whose
//! documents were edited.
//!
//! So while nothing happens a process makes one read per interval, whatever the number of its consumers, shards and feeds.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::task::JoinSet;

use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
    },
    state::{
        context::Context,
        feed::{Probe, Pulse, PulseRead, RawFeed},
        keys::{FeedId, ShardId, TopologyRow},
        notification_feed::NotificationFeed,
        polls,
    },
    store::Transaction,
};

/// Pause after a failure.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

const PAGE_ROWS: usize = 1_000;

/// For each shard the sequence up to which it may have rows.
type Heads = HashMap<ShardId, Sequence>;

/// Its name in reports of trouble.
const WATCHER: &str = "watcher of consumers";

pub(crate) fn start(context: &Arc<Context>) -> JoinSet<()> {
    let shared = Arc::clone(context);
    // After a panic another one begins, which knows nothing: so its consumers look at everything once more.
    let make = move || Watcher::new(&shared).run();
    let mut tasks = JoinSet::new();
    tasks.spawn(context.stats.supervised(context.env(), WATCHER, make));
    tasks
}

struct Watcher {
    context: Arc<Context>,
    pulse: Pulse,
    /// The topology entry that was current at the last poll.
    current: Option<TopologyRow>,
    /// Up to where its shards may have rows.
    heads: Arc<Heads>,
    /// The position up to which notifications were read for the consumers of documents; `None` while there are none.
    documents: Option<Sequence>,
    /// Whether there may be notifications after that.
    is_behind: bool,
}

impl Watcher {
    fn new(context: &Arc<Context>) -> Self {
        Self {
            pulse: Pulse::new(context, &context.feed),
            context: Arc::clone(context),
            current: None,
            heads: Arc::default(),
            documents: None,
            is_behind: false,
        }
    }

    /// Polls until the bus is gone.
    async fn run(mut self) {
        while self.context.stats.health.ended().is_none() {
            let polled = match self.poll_feed().await {
                Ok(()) => self.follow_documents().await,
                Err(error) => Err(error),
            };
            if let Err(error) = polled {
                self.context.stats.health.complain(self.context.env(), WATCHER, &error);
                self.context.env().sleep(FAILURE_PAUSE).await;
                continue;
            }
            tokio::select! {
                biased;
                () = self.context.wakeups.joined() => {
                    // A consumer that has just joined knows no heads yet.
                    self.current = None;
                    self.pulse.forget();
                }
                () = self.pulse.wait() => {}
            }
        }
    }

    /// Polls for appended rows, and informs the consumers of notifications.
    async fn poll_feed(&mut self) -> Result<()> {
        let poll = self.pulse.take_poll();
        let (context, probe) = (&self.context, self.pulse.probe());
        let polled = async |tx| poll_in(&tx, context, probe).await;
        let (current, read) = polls::read(poll, &context.db, polled).await?;
        if let Some(current) = current {
            let is_known = self.current.as_ref() == Some(&current);
            let head = |shard: ShardId| {
                let before = self.heads.get(&shard).filter(|_| is_known && !read.moved().has(shard));
                (shard, *before.unwrap_or(&read.last()))
            };
            // Closed shards are not included, so that their consumers poll for the end.
            self.heads = Arc::new(current.shards().map(head).collect());
            self.current = Some(current);
            context.wakeups.notify(&context.feed, Some(Arc::clone(&self.heads)));
            self.is_behind = true;
        }
        self.pulse.adopt(read, true);
        context.wakeups.polled();
        Ok(())
    }

    /// Informs the consumers of documents whose databases have new notifications, if there are such consumers.
    async fn follow_documents(&mut self) -> Result<()> {
        let wakeups = &self.context.wakeups;
        if wakeups.documents() == 0 {
            self.documents = None;
            return Ok(());
        }
        let feed = NotificationFeed::new(Arc::clone(&self.context), self.context.feed.clone());
        let Some(mut after) = self.documents else {
            self.documents = Some(feed.now().await?);
            // Edits before that may not have been seen.
            wakeups.notify_documents();
            return Ok(());
        };
        while self.is_behind {
            let page = match feed.page(after, PAGE_ROWS).await {
                Err(Error::Expired { .. }) => {
                    self.documents = None;
                    return Box::pin(self.follow_documents()).await;
                }
                page => page?,
            };
            for row in &page.rows {
                wakeups.notify(&FeedId::documents(row.instance), None);
                if let Some(replaced) = row.replaced {
                    // The replaced instance is gone, and has no row of its own.
                    wakeups.notify(&FeedId::documents(replaced.instance), None);
                }
            }
            after = page.to;
            (self.documents, self.is_behind) = (Some(after), page.more);
        }
        Ok(())
    }
}

/// Reads the current topology entry, unless nothing was appended; sets a watch.
async fn poll_in(
    tx: &Transaction,
    context: &Context,
    probe: Probe<'_>,
) -> Result<(Option<TopologyRow>, PulseRead)> {
    let mut read = probe.read(tx).await?;
    let current = match read.unchanged() {
        Some(_) => None,
        None => Some(RawFeed::notifications(context).topology(tx).await?.current().clone()),
    };
    probe.watch(tx, &mut read).await?;
    Ok((current, read))
}
