//! [`NotificationFeed`]: the notifications in the order of their sequences.

mod tail;

use futures_util::future::{BoxFuture, select_all, try_join_all};

pub use self::tail::NotificationTail;
use crate::{
    context::Context,
    encoding::Sequence,
    error::Result,
    event::{Db, DbName, DdocId},
    feed::{Cursor, Feed, FeedPage, FeedRow},
    notification::Notification,
    store::{Isolation, RangeRead},
};

/// The feed of notifications: one row per database, ordered by sequence over all shards. Clones are cheap.
pub type NotificationFeed = Feed<Notification>;

/// Some notifications, in order. Derive what is new in them ([`Notification::news_since`]) from where the first page
/// began, until one has no more after it.
pub type NotificationPage = FeedPage<Notification>;

/// The most shards that are watched. With more of them the tail polls: a client has a limited number of watches.
const WATCHED_SHARDS_MAX: usize = 1_000;

impl FeedRow for Notification {
    fn from_stored(sequence: Sequence, bytes: &[u8]) -> Result<Self> {
        Self::from_bytes(sequence, bytes)
    }

    fn sequence(&self) -> Sequence {
        self.sequence
    }
}

impl NotificationFeed {
    /// Reads the feed as it grows, from `after` on.
    pub fn tail(&self, after: Sequence) -> NotificationTail {
        NotificationTail::new(self.clone(), after)
    }

    /// A page, and if it is the last one, a future that completes once there may be more. It is a hint, as watches are;
    /// `None` if no watch could be set, and false comes if they failed later.
    pub(crate) async fn page_and_watch(
        &self,
        cursor: Cursor,
        limit: usize,
    ) -> Result<(NotificationPage, Option<BoxFuture<'static, bool>>)> {
        let Context { db, keys, .. } = &*self.context;
        db.run(async |tx| {
            let page = self.page_in(&tx, cursor, limit).await?;
            if page.more {
                return Ok((page, None));
            }
            // At the read version of the page, so that what comes after it fires the watch. A reshard, after which rows
            // go elsewhere, closes the current entry.
            let topology = self.raw().topology(&tx).await?;
            let current = topology.current();
            if current.shards().len() > WATCHED_SHARDS_MAX {
                return Ok((page, None));
            }
            let mut hinted: Vec<_> = current.shards().map(|shard| keys.head(&self.id, shard)).collect();
            hinted.push(keys.topology(&self.id, current.first));
            let watches = match try_join_all(hinted.iter().map(|key| tx.watch(key))).await {
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
        let feed = self.raw();
        let read = async |tx| {
            let topology = feed.topology(&tx).await?;
            let row = feed.newest_of(&tx, &topology, name.as_str().as_bytes()).await?;
            row.map(|row| Notification::from_bytes(row.sequence, &row.value)).transpose()
        };
        self.context.db.run(read).await
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
}
