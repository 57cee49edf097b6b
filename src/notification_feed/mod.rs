//! [`NotificationFeed`]: the notifications in the order of their sequences.

mod tail;

pub use self::tail::NotificationTail;
use futures_util::future::try_join_all;

use crate::{
    context::Context,
    encoding::Sequence,
    error::Result,
    event::{Db, DbName, DdocId},
    feed::{Feed, FeedPage, FeedRow, StoredRow},
    notification::Notification,
    store::{Isolation, RangeRead},
};

/// The feed of notifications: one row per database, ordered by sequence over all shards. Clones are cheap.
pub type NotificationFeed = Feed<Notification>;

/// Some notifications, in order. Derive what is new in them ([`Notification::news_since`]) from where the first page
/// began, until one has no more after it.
pub type NotificationPage = FeedPage<Notification>;

/// Design documents of a database that have changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChangedDdocs {
    /// Those whose ids producers have recorded, in their order, each with the sequence of the notification that last told of it.
    pub ids: Vec<(DdocId, Sequence)>,
    /// The sequence of the last notification that told of one whose id was not recorded: it may be any.
    pub nameless: Option<Sequence>,
}

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

    /// The newest rows of the databases `names`, in their order, read by one transaction: they should not be many.
    pub(crate) async fn newest_of_each(&self, names: &[&DbName]) -> Result<Vec<Option<Notification>>> {
        let feed = self.raw();
        let read = async |tx| {
            let topology = feed.topology(&tx).await?;
            let ids = names.iter().map(|name| name.as_str().as_bytes());
            let rows = try_join_all(ids.map(|id| feed.newest_of(&tx, &topology, id))).await?;
            let decode = |row: StoredRow| Notification::from_bytes(row.sequence, &row.value);
            rows.into_iter().map(|row| row.map(decode).transpose()).collect()
        };
        self.context.db.run(read).await
    }

    /// The design documents of `db` that were written or deleted after `since`, as far as notifiers have told of them. None of
    /// a database that is deleted.
    pub async fn ddocs(&self, db: &Db, since: Sequence) -> Result<ChangedDdocs> {
        let Context { db: store, keys, .. } = &*self.context;
        store
            .run(async |tx| {
                let mut pages = tx.pages(RangeRead::new(keys.ddocs(db)), Isolation::Snapshot);
                let mut found = ChangedDdocs::default();
                while let Some(rows) = pages.next().await? {
                    for row in &rows {
                        match keys.ddoc_row(row)? {
                            (_, told) if told <= since => {}
                            (Some(id), told) => found.ids.push((id, told)),
                            (None, told) => found.nameless = Some(told),
                        }
                    }
                }
                Ok(found)
            })
            .await
    }
}
