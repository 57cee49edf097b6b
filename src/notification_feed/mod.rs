//! [`NotificationFeed`]: reads the notifications in the order of their sequences, all of them or those of one shard.

mod tail;

use std::sync::Arc;

use futures_util::future::{BoxFuture, select_all, try_join_all};

pub use self::tail::NotificationTail;
use crate::{
    context::Context,
    encoding::Sequence,
    error::{Error, Result},
    event::{Db, DbName, DdocId},
    feed::{self, FeedPage, Topology},
    keys::ShardId,
    notification::Notification,
    store::{Isolation, RangeRead, Transaction},
};

/// Some notifications, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotificationPage {
    /// The rows.
    pub rows: Vec<Arc<Notification>>,
    /// Everything up to here was read: go on from here, nothing will ever be added before it.
    ///
    /// While there is more to read, this is no position up to which everything is known: a row that a later page will bring
    /// may have superseded one before it. So derive what is new in the rows of all pages
    /// ([`Notification::changes_since`]) from where the first page began, until one has no more after it.
    pub to: Sequence,
    /// Whether there was more to read when the page was read.
    pub more: bool,
}

/// The feed of notifications: one row per database, ordered by sequence over all shards. Clones are cheap.
#[derive(Debug, Clone)]
pub struct NotificationFeed {
    /// What the roles share.
    context: Arc<Context>,
}

/// The most rows of a page.
pub(crate) const PAGE_ROWS_MAX: usize = 10_000;

impl NotificationFeed {
    /// The feed of the bus with this context.
    pub(crate) fn new(context: Arc<Context>) -> Self {
        Self { context }
    }

    /// The rows after `after`, at most `limit` (1 to 10,000) of each shard. Start at [`Sequence::ZERO`], go on at
    /// [`NotificationPage::to`].
    ///
    /// Fails with [`Error::Invalid`] if `after` is ahead of the store, as a cursor of another bus would be.
    pub async fn page(&self, after: Sequence, limit: usize) -> Result<NotificationPage> {
        self.context.db.run(async |tx| self.page_in(&tx, after, limit).await).await
    }

    /// The shards that can have rows. Ids are unique within the feed and never used again.
    pub async fn shards(&self) -> Result<Vec<ShardId>> {
        let Context { db, keys, feed, .. } = &*self.context;
        db.run(async |tx| Ok(Topology::read(&tx, keys, feed, Isolation::Snapshot).await?.shards().collect()))
            .await
    }

    /// The rows of `shard` after `after`, at most `limit` (1 to 10,000). All rows of a database are in one shard, so that
    /// readers of different shards need not know of each other.
    ///
    /// Fails with [`Error::Invalid`] if the feed has no such shard, or `after` is ahead of the store.
    pub async fn shard_page(
        &self,
        shard: ShardId,
        after: Sequence,
        limit: usize,
    ) -> Result<NotificationPage> {
        let Context { db, keys, feed, config, .. } = &*self.context;
        self.check(after, limit)?;
        db.run(async |tx| {
            let topology = Topology::read(&tx, keys, feed, Isolation::Snapshot).await?;
            if !topology.shards().any(|known| known == shard) {
                return Err(Error::invalid("shard", format!("the feed has no shard {}", shard.0)));
            }
            let page = feed::shard_page(&tx, keys, feed, config.incarnation, shard, after, limit).await?;
            decoded(page)
        })
        .await
    }

    /// Reads the feed as it grows, from `after` on.
    pub fn tail(&self, after: Sequence) -> NotificationTail {
        NotificationTail::new(self.clone(), after)
    }

    /// [`NotificationFeed::page`] within a transaction.
    async fn page_in(&self, tx: &Transaction, after: Sequence, limit: usize) -> Result<NotificationPage> {
        let Context { keys, feed, config, .. } = &*self.context;
        self.check(after, limit)?;
        decoded(feed::page(tx, keys, feed, config.incarnation, after, limit).await?)
    }

    /// Fails if no page can be asked for so.
    fn check(&self, after: Sequence, limit: usize) -> Result<()> {
        let config = &self.context.config;
        if !(1..=PAGE_ROWS_MAX).contains(&limit) {
            return Err(Error::invalid("limit", format!("{limit} is not 1 to {PAGE_ROWS_MAX}")));
        }
        if after.incarnation() > config.incarnation {
            return Err(Error::invalid(
                "sequence",
                format!(
                    "{after} is of incarnation {}, the bus is at {}",
                    after.incarnation().0,
                    config.incarnation.0
                ),
            ));
        }
        Ok(())
    }

    /// A page, and if it is the last one, a future that completes once there may be more. It is a hint, as watches are;
    /// `None` if no watch could be set, and false comes if they failed later.
    pub(crate) async fn page_and_watch(
        &self,
        after: Sequence,
        limit: usize,
    ) -> Result<(NotificationPage, Option<BoxFuture<'static, bool>>)> {
        let Context { db, keys, feed, .. } = &*self.context;
        db.run(async |tx| {
            let page = self.page_in(&tx, after, limit).await?;
            if page.more {
                return Ok((page, None));
            }
            // At the read version of the page, so that what comes after it fires the watch.
            let topology = Topology::read(&tx, keys, feed, Isolation::Snapshot).await?;
            let heads: Vec<_> = topology.shards().map(|shard| keys.head(feed, shard)).collect();
            let watches = match try_join_all(heads.iter().map(|head| tx.watch(head))).await {
                Ok(watches) => watches,
                Err(error) if error.is_retryable() => return Err(error),
                Err(error) => {
                    tracing::warn!(%error, "no watch on the feed, polling instead");
                    return Ok((page, None));
                }
            };
            let fired: BoxFuture<'static, bool> = Box::pin(async {
                let (fired, _, _others) = select_all(watches).await;
                fired
                    .inspect_err(|error| tracing::warn!(%error, "no watch on the feed, polling instead"))
                    .is_ok()
            });
            Ok((page, Some(fired)))
        })
        .await
    }

    /// The newest row of the database `name`, if it has one.
    pub async fn newest(&self, name: &DbName) -> Result<Option<Notification>> {
        let Context { db, keys, feed, .. } = &*self.context;
        db.run(async |tx| {
            let topology = Topology::read(&tx, keys, feed, Isolation::Snapshot).await?;
            let row = feed::newest_of(&tx, keys, feed, &topology, name.as_str().as_bytes()).await?;
            row.map(|row| Notification::from_bytes(row.sequence, &row.value)).transpose()
        })
        .await
    }

    /// The design documents of `db` that were written or deleted after `since`, as far as producers have recorded their ids
    /// and notifiers have told of them, each with the sequence of the notification. None of a database that is deleted.
    pub async fn ddocs(&self, db: &Db, since: Sequence) -> Result<Vec<(DdocId, Sequence)>> {
        let Context { db: store, keys, .. } = &*self.context;
        store
            .run(async |tx| {
                let mut pages = tx.pages(RangeRead::new(keys.ddocs(db)), Isolation::Snapshot);
                let mut found = Vec::new();
                while let Some(rows) = pages.next().await? {
                    for row in &rows {
                        let (id, told) = keys.ddoc_row(row)?;
                        if told > since {
                            found.push((id, told));
                        }
                    }
                }
                Ok(found)
            })
            .await
    }

    /// The position behind everything that is in the feed now: whoever starts here gets what comes.
    pub async fn now(&self) -> Result<Sequence> {
        let Context { db, config, .. } = &*self.context;
        db.run(async |tx| feed::last_readable(&tx, config.incarnation).await).await
    }
}

/// The notifications in the rows of a page.
fn decoded(page: FeedPage) -> Result<NotificationPage> {
    let rows = page.rows.into_iter();
    let rows = rows.map(|row| Notification::from_bytes(row.sequence, &row.value).map(Arc::new));
    Ok(NotificationPage { rows: rows.collect::<Result<_>>()?, to: page.to, more: page.more })
}
