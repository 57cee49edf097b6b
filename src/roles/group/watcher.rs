//! The watcher of a process: polls for new rows on behalf of all its consumers.
//!
//! Consumers do not poll each for itself. This task waits for the pulse of the notification feed; when it has
//! moved, the task reads the heads of all shards in one range. It informs consumers up to which sequence their shards may have rows,
//! so that only consumers with something to read do so. Feeds of documents have no heads; for them it reads the notifications, which
//! name each database whose documents were edited.
//!
//! So while nothing happens a process makes one read per interval, whatever the number of its consumers, shards and feeds.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::task::JoinSet;

use crate::{
    base::{
        encoding::{Incarnation, Sequence, Versionstamp},
        error::{Error, Result},
    },
    state::{
        context::Context,
        feed::{Probe, Pulse, PulseRead, RawFeed},
        keys::{FeedId, ShardId, TopologyRow},
        notification_feed::NotificationFeed,
    },
    store::{Isolation, Transaction},
};

/// Pause after a failure.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

const PAGE_ROWS: usize = 1_000;

/// For each shard the sequence up to which it may have rows.
type Heads = HashMap<ShardId, Sequence>;

pub(super) fn start(context: &Arc<Context>) -> JoinSet<()> {
    let watcher = Watcher {
        pulse: Pulse::new(context, &context.feed),
        context: Arc::clone(context),
        current: None,
        heads: Arc::default(),
        documents: None,
        is_behind: false,
    };
    let mut tasks = JoinSet::new();
    tasks.spawn(watcher.run());
    tasks
}

struct Watcher {
    context: Arc<Context>,
    pulse: Pulse,
    /// The topology entry that was current at the last poll.
    current: Option<TopologyRow>,
    /// The heads of its shards then.
    heads: Arc<Heads>,
    /// The position up to which notifications were read for the consumers of documents; `None` while there are none.
    documents: Option<Sequence>,
    /// Whether there may be notifications after that.
    is_behind: bool,
}

/// The result of a poll.
struct FeedState {
    /// The current topology entry.
    current: TopologyRow,
    /// The heads of its shards.
    heads: Heads,
}

impl Watcher {
    async fn run(mut self) {
        loop {
            self.pulse.begin();
            let polled = match self.poll_feed().await {
                Ok(()) => self.follow_documents().await,
                Err(error) => Err(error),
            };
            if let Err(error) = polled {
                self.context.stats.health.complain(self.context.env(), "watcher of groups", &error);
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
        let (context, probe) = (&self.context, self.pulse.probe());
        let (seen, look) = context.db.run(async |tx| poll_in(&tx, context, probe).await).await?;
        self.pulse.adopt(look, true);
        let Some(seen) = seen else {
            context.wakeups.looked();
            return Ok(());
        };
        if self.current.as_ref() != Some(&seen.current) || *self.heads != seen.heads {
            self.current = Some(seen.current);
            self.heads = Arc::new(seen.heads);
            // Heads of closed shards are not included, so that their consumers poll for the end.
            context.wakeups.notify(&context.feed, Some(Arc::clone(&self.heads)));
            self.is_behind = true;
        }
        context.wakeups.looked();
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

/// Reads the current topology entry and its heads, unless nothing was appended; sets watches.
async fn poll_in(
    tx: &Transaction,
    context: &Context,
    probe: Probe<'_>,
) -> Result<(Option<FeedState>, PulseRead)> {
    let mut look = probe.look(tx).await?;
    let seen = if look.unchanged().is_some() { None } else { Some(read_heads(tx, context).await?) };
    probe.watch(tx, &mut look).await?;
    Ok((seen, look))
}

async fn read_heads(tx: &Transaction, context: &Context) -> Result<FeedState> {
    let (keys, feed) = (&context.keys, &context.feed);
    let current = RawFeed::notifications(context).topology(tx).await?.current().clone();
    let mut shards = current.shards();
    let first = shards.next().expect("an entry has shards");
    let last = shards.last().unwrap_or(first);
    // A shard without a head has had no row.
    let mut heads: Heads = current.shards().map(|shard| (shard, Sequence::MIN)).collect();
    for (key, value) in tx.all_rows(keys.heads(feed, first, last), Isolation::Snapshot).await? {
        heads.insert(keys.head_shard(&key)?, head(context.config.incarnation, &value)?);
    }
    Ok(FeedState { current, heads })
}

/// The last position that the transaction of a head's versionstamp can have written.
fn head(incarnation: Incarnation, value: &[u8]) -> Result<Sequence> {
    let stamp = value.try_into().map_err(|_| Error::corrupt("head", format!("{} bytes", value.len())))?;
    Ok(Sequence::new(incarnation, Versionstamp(stamp), u16::MAX))
}
