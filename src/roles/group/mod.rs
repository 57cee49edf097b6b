//! [`Group`]: durable consumers that work through a feed together, over any number of nodes.
//!
//! A group is a name on a feed, and a checkpoint for each shard that it has still to read: everything in the shard up to
//! there was worked on. The shards are divided among the nodes that run a [`Consumer`] of the group, by leases
//! ([`membership`](crate::state::membership)); for each shard that a node holds, a task ([`shard`]) reads rows and gives them to an
//! [`Observer`], and saves how far it has come.
//!
//! ```text
//!  feed     ┌ shard 1 ──────────────┐┌ shards 3, 4, 5 ──────
//!           └ shard 2 ──────────────┘└
//!  group      1: ───checkpoint──►       (3, 4, 5: no checkpoints before 1 and 2 are drained)
//!             2: ───────────────────► drained
//! ```
//!
//! # Invariants
//!
//! 1. At any time the checkpoints of a group are those of the shards of one topology entry, and a lower bound of what the group
//!    has still to read. Those of an entry are replaced by those of the next in one transaction, once all its shards were read
//!    to their ends: so rows of a database come in order, also across a reshard.
//! 2. Only a transaction that has the shard's lease in its read-conflict set writes its checkpoint: a consumer that has lost the
//!    lease changes nothing any more.
//! 3. The start is stored in the transaction that creates the group, which reads the horizon of the feed serializably. The
//!    janitor reads the rows of groups serializably when it drops tombstones, so that no group begins in between.
//! 4. An id is parked, with its newest row, in the transaction that moves the checkpoint past that row, and all its later rows are, as
//!    long as it is. So a row is to be read, parked or done, and only one of these; the consumer of the shard to which the id is
//!    routed works on it.
//! 5. A reset or a deletion takes all leases of the group away, so that nothing of before can be written after it.
//!
//! # Cost
//!
//! A batch costs a read and, unless the observer writes the checkpoint with its own effects, a small write. While nothing
//! comes, one watcher per process looks for rows ([`watcher`]), and one shard of documents is read per
//! [`ConsumerOptions::poll_interval`], whatever the number of groups and shards. After rows have come into other shards of
//! the notification feed, a shard without rows saves its position once, because tombstones wait for it.

mod admin;
mod batch;
mod concurrent;
mod consumer;
mod dead_letters;
mod fencing;
mod lag;
mod observer;
mod options;
mod parked;
mod shard;
mod status;
mod watcher;

use std::{fmt, marker::PhantomData, sync::Arc};

pub use self::{
    batch::{CheckpointState, Checkpointer, GroupBatch},
    concurrent::each_concurrent,
    consumer::Consumer,
    dead_letters::{DeadLetter, DeadLetterInfo, Replayed},
    fencing::FencingToken,
    lag::{LAG_ROWS_MAX, ShardLag},
    observer::{CloseReason, Observer, ObserverResult},
    options::{CheckpointPolicy, ConsumerOptions, FailurePolicy, GroupOptions},
    parked::ParkedId,
    status::{GroupStatus, GroupTrouble, ShardStatus},
};
pub(crate) use status::statuses;

use crate::{
    base::{
        error::{Error, Result},
        event::DbInstance,
    },
    state::{
        context::Context,
        feed::{Feed, RawFeed},
        keys::{FeedId, GroupId, GroupName},
    },
};

/// A group of a feed, whether it exists or not. `R` is what the rows of the feed are; a group of which that is not known
/// (`Group<()>`) can be looked at and managed, but not consumed. Clones are cheap.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::{Bus, BusOptions, group::{ConsumerOptions, GroupBatch, GroupOptions}, Cursor, NodeOptions, Notification, store::Database};
///
/// let bus = Bus::open(&Database::memory(), BusOptions::default()).await?;
/// let group = bus.group("mailer")?;
/// assert!(group.create(&GroupOptions::default().start_from(Cursor::NOTHING)).await?);
/// assert!(!group.create(&GroupOptions::default()).await?, "it is there");
///
/// let node = bus.node(NodeOptions::default()).await?;
/// let print = |batch: GroupBatch<Notification>| async move {
///     batch.rows.iter().for_each(|row| println!("{}", row.name));
///     Ok(())
/// };
/// let consumer = node.consumer(&group, move |_shard| print, ConsumerOptions::default()).await?;
/// assert!(group.lag().await?.iter().all(|shard| shard.rows == 0));
/// consumer.shutdown().await?;
/// node.shutdown().await?;
/// group.delete(false).await
/// # }
/// ```
pub struct Group<R> {
    /// What the roles share.
    context: Arc<Context>,
    /// Which group.
    id: GroupId,
    /// What the rows of its feed are.
    rows: PhantomData<fn() -> R>,
}

impl<R> Clone for Group<R> {
    fn clone(&self) -> Self {
        Self { context: Arc::clone(&self.context), id: self.id.clone(), rows: PhantomData }
    }
}

impl<R> fmt::Debug for Group<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Group").field(&self.id).finish()
    }
}

impl<R> Feed<R> {
    /// The group `name` of the feed, to be created, consumed or looked at. Fails with [`Error::Invalid`] if the name is empty or
    /// longer than 256 bytes.
    pub fn group(&self, name: &str) -> Result<Group<R>> {
        let id = GroupId { feed: self.id.clone(), name: GroupName::new(name)? };
        Ok(Group { context: Arc::clone(&self.context), id, rows: PhantomData })
    }
}

impl Group<()> {
    /// The group `name` of the feed of notifications, or of the documents of `instance`.
    pub(crate) fn untyped(context: &Arc<Context>, instance: Option<DbInstance>, name: &str) -> Result<Self> {
        let feed = instance.map_or_else(FeedId::notifications, FeedId::documents);
        let id = GroupId { feed, name: GroupName::new(name)? };
        Ok(Self { context: Arc::clone(context), id, rows: PhantomData })
    }
}

impl<R> Group<R> {
    /// Its name.
    pub fn name(&self) -> &GroupName {
        &self.id.name
    }

    /// The database whose documents it follows; `None` if it follows the notifications.
    pub fn instance(&self) -> Option<DbInstance> {
        self.id.feed.instance()
    }

    /// Its feed as bytes.
    fn raw(&self) -> RawFeed<'_> {
        RawFeed::new(&self.context, &self.id.feed)
    }

    /// That it does not exist.
    fn missing(&self) -> Error {
        Error::NoGroup { group: self.id.to_string() }
    }
}
