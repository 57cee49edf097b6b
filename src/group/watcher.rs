//! The watcher of a process: looks for new rows on behalf of all its consumers.
//!
//! Consumers do not poll their shards each for itself. This task reads the heads of the notification feed, all of them in
//! one range: when the process itself has appended, when a watch on one fires, and in any case once per interval. It tells
//! consumers up to where their shards may have rows, so that only those read that have something to read. Feeds of documents
//! have no heads; for them it reads the notifications, which tell of each database whose documents were edited.
//!
//! So while nothing happens a process makes two reads per interval, whatever the number of its consumers, shards and feeds.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures_util::future::{BoxFuture, pending, select_all, try_join_all};
use tokio::{sync::watch, task::JoinSet};

use crate::{
    context::Context,
    encoding::{Incarnation, Sequence, Versionstamp},
    error::{Error, Result},
    feed::RawFeed,
    keys::{FeedId, ShardId, TopologyRow},
    notification_feed::NotificationFeed,
    store::{Isolation, RangeRead, Transaction},
};

/// How long it waits for appends of its own process before it sets watches for those of others.
const QUIET: Duration = Duration::from_millis(10);

/// How often it looks for rows that no hint has told of.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// How many notifications are read at once.
const PAGE_ROWS: usize = 1_000;

/// Up to where shards may have rows.
type Heads = HashMap<ShardId, Sequence>;

/// Starts the watcher of a process.
pub(super) fn start(context: &Arc<Context>) -> JoinSet<()> {
    let watcher = Watcher {
        appends: context.signals.appends(),
        context: Arc::clone(context),
        current: None,
        heads: Arc::default(),
        documents: None,
        is_behind: false,
        fired: None,
        arm: false,
    };
    let mut tasks = JoinSet::new();
    tasks.spawn(watcher.run());
    tasks
}

/// The state of the watcher.
struct Watcher {
    /// What the roles share.
    context: Arc<Context>,
    /// Counts the appends of this process.
    appends: watch::Receiver<u64>,
    /// The topology entry to which rows were written when it last looked.
    current: Option<TopologyRow>,
    /// The heads of its shards then.
    heads: Arc<Heads>,
    /// Up to where the notifications were read for the consumers of documents; `None` while there are none.
    documents: Option<Sequence>,
    /// Whether there may be notifications after that.
    is_behind: bool,
    /// The watches that are set, if any.
    fired: Option<BoxFuture<'static, bool>>,
    /// Whether the next look sets watches.
    arm: bool,
}

/// What a look has found.
struct Seen {
    /// The topology entry to which rows are written.
    current: TopologyRow,
    /// The heads of its shards.
    heads: Heads,
    /// Completes once there may be more, if watches were set; with false if they have failed.
    fired: Option<BoxFuture<'static, bool>>,
}

impl Watcher {
    /// Watches until it is dropped.
    async fn run(mut self) {
        loop {
            self.appends.mark_unchanged();
            let looked = match self.look().await {
                Ok(()) => self.follow_documents().await,
                Err(error) => Err(error),
            };
            if let Err(error) = looked {
                tracing::warn!(%error, "the watcher of groups could not look, trying again");
                self.context.env().sleep(POLL_INTERVAL).await;
                continue;
            }
            self.wait().await;
        }
    }

    /// Reads the heads, and tells the consumers of notifications if they have changed.
    async fn look(&mut self) -> Result<()> {
        let (context, arm) = (&self.context, self.arm);
        let seen = context.db.run(async |tx| look_in(&tx, context, arm).await).await?;
        self.fired = seen.fired.or(self.fired.take());
        if self.current.as_ref() != Some(&seen.current) || *self.heads != seen.heads {
            self.current = Some(seen.current);
            self.heads = Arc::new(seen.heads);
            // The heads of closed shards are not among them, so that their consumers look for the ends.
            context.arrivals.tell(&context.feed, Some(Arc::clone(&self.heads)));
            self.is_behind = true;
        }
        context.arrivals.looked();
        Ok(())
    }

    /// Tells the consumers of documents of the databases that have new notifications, if there are such consumers.
    async fn follow_documents(&mut self) -> Result<()> {
        let arrivals = &self.context.arrivals;
        if !arrivals.has_documents() {
            self.documents = None;
            return Ok(());
        }
        let feed = NotificationFeed::new(Arc::clone(&self.context), self.context.feed.clone());
        let Some(mut after) = self.documents else {
            self.documents = Some(feed.now().await?);
            // What came before that may not have been seen.
            arrivals.tell_all();
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
                arrivals.tell(&FeedId::documents(row.instance), None);
            }
            after = page.to;
            (self.documents, self.is_behind) = (Some(after), page.more);
        }
        Ok(())
    }

    /// Completes when there may be rows; then `arm` says whether the next look sets watches.
    async fn wait(&mut self) {
        // Where watches were just refused, asking again at once would not help.
        let is_watching = self.fired.is_some();
        let pause = if is_watching || self.arm { POLL_INTERVAL } else { QUIET };
        let Self { fired, appends, context, current, arm, .. } = self;
        let env = context.env();
        *arm = tokio::select! {
            // A sender that is gone cannot be: the context that owns it is shared.
            _ = appends.changed() => false,
            () = context.arrivals.joined() => {
                // Whoever has joined knows no heads yet.
                *current = None;
                false
            }
            changed = async { match &mut *fired { Some(fired) => fired.await, None => pending().await } } => {
                *fired = None;
                if !changed {
                    // Refused as late as this: the poll goes on, and asks again.
                    tokio::select! {
                        _ = appends.changed() => {}
                        () = env.sleep(POLL_INTERVAL) => {}
                    }
                }
                false
            }
            // Nothing for a while: set watches, unless they are set.
            () = env.sleep(pause) => !is_watching,
        };
    }
}

/// Reads the current topology entry and its heads, and sets watches on them if asked to.
async fn look_in(tx: &Transaction, context: &Context, arm: bool) -> Result<Seen> {
    let (keys, feed) = (&context.keys, &context.feed);
    let current = RawFeed::notifications(context).topology(tx).await?.current().clone();
    let mut shards = current.shards();
    let first = shards.next().expect("an entry has shards");
    let last = shards.last().unwrap_or(first);
    // A shard without a head has had no row.
    let mut heads: Heads = current.shards().map(|shard| (shard, Sequence::ZERO)).collect();
    let mut pages = tx.pages(RangeRead::new(keys.heads(feed, first, last)), Isolation::Snapshot);
    while let Some(rows) = pages.next().await? {
        for (key, value) in &rows {
            heads.insert(keys.head_shard(key)?, head(context.config.incarnation, value)?);
        }
    }
    let fired = if arm { set_watches(tx, context, &current).await? } else { None };
    Ok(Seen { current, heads, fired })
}

/// The last position that the transaction of a head's stamp can have written.
fn head(incarnation: Incarnation, value: &[u8]) -> Result<Sequence> {
    let stamp = value.try_into().map_err(|_| Error::corrupt("head", format!("{} bytes", value.len())))?;
    Ok(Sequence::new(incarnation, Versionstamp(stamp), u16::MAX))
}

/// Sets watches on the heads of `current` and on its end; `None` if the store refuses.
async fn set_watches(
    tx: &Transaction,
    context: &Context,
    current: &TopologyRow,
) -> Result<Option<BoxFuture<'static, bool>>> {
    let Context { keys, feed, .. } = context;
    let mut hints: Vec<_> = current.shards().map(|shard| keys.head(feed, shard)).collect();
    hints.push(keys.topology(feed, current.first));
    let watches = match try_join_all(hints.iter().map(|key| tx.watch(key))).await {
        Ok(watches) => watches,
        Err(error) if error.is_retryable() => return Err(error),
        Err(error) => {
            tracing::warn!(%error, "no watch for groups, polling instead");
            return Ok(None);
        }
    };
    Ok(Some(Box::pin(async {
        let (fired, _, _others) = select_all(watches).await;
        fired.inspect_err(|error| tracing::warn!(%error, "no watch for groups, polling instead")).is_ok()
    })))
}
