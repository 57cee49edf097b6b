//! [`Group`]: durable consumers that work through a feed together, over any number of nodes.
//!
//! A group is a name on a feed, with a checkpoint for each shard that it has yet to read: everything in the shard up to
//! the checkpoint was worked on. Leases divide the shards among the nodes that run a [`Consumer`] of the group
//! ([`membership`](crate::state::membership)). For each shard that a node holds, a task ([`shard`]) reads rows, passes them to an
//! [`Observer`], and saves its position.
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
//!    has yet to read. One transaction replaces the checkpoints of an entry by those of the next, once all its shards are drained:
//!    so rows of a database come in order, also across a reshard.
//! 2. Only a transaction that has the shard's lease in its read-conflict set writes its checkpoint: a consumer that has lost the
//!    lease can change nothing any more.
//! 3. The transaction that creates the group stores the start, and reads the horizon of the feed serializably. The
//!    janitor reads the rows of groups serializably when it deletes tombstones, so that no group begins in between.
//! 4. The transaction that moves the checkpoint past a failed row parks its id with this row. While the id is parked, its later rows
//!    are parked in the same way. So each row is in exactly one of three states: unread, parked, done; the consumer of the shard to
//!    which the id is routed works on it.
//! 5. A reset or a deletion takes all leases of the group away, so that no earlier consumer can write after it.
//!
//! # Cost
//!
//! A batch costs a read and, unless the observer writes the checkpoint with its own effects, a small write. While no rows
//! come, one watcher per process polls for all groups ([`watcher`](crate::roles::consumer::watcher)), and one shard of documents is read per
//! [`ConsumerOptions::poll_interval`], whatever the number of groups and shards. After rows have come into other shards of
//! the notification feed, a shard without rows saves its position once, because it would keep tombstones otherwise.

mod admin;
mod batch;
mod concurrent;
mod consumer;
mod consuming;
mod dead_letters;
mod fencing;
mod lag;
mod lowest;
mod observer;
mod options;
mod parked;
mod replay;
mod shard;
mod status;

use std::{fmt, marker::PhantomData, sync::Arc};

pub use self::{
    batch::{CheckpointState, Checkpointer, GroupBatch},
    concurrent::{ConcurrentRow, each_concurrent},
    consumer::Consumer,
    dead_letters::{DeadLetter, DeadLetterInfo, Replayed},
    fencing::FencingToken,
    lag::ShardLag,
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

/// A group of a feed, whether it exists or not. `R` is the type of the feed's rows; a group of unknown type
/// (`Group<()>`) can be inspected and managed, but not consumed. Clones are cheap.
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
    context: Arc<Context>,
    id: GroupId,
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
    /// A handle on the group `name` of the feed. Fails with [`Error::Invalid`] if the name is empty or
    /// longer than 256 bytes.
    pub fn group(&self, name: &str) -> Result<Group<R>> {
        let id = GroupId { feed: self.id.clone(), name: GroupName::new(name)? };
        Ok(Group { context: Arc::clone(&self.context), id, rows: PhantomData })
    }
}

impl Group<()> {
    /// The group `name` of the notification feed, or of the documents of `instance`.
    pub(crate) fn untyped(context: &Arc<Context>, instance: Option<DbInstance>, name: &str) -> Result<Self> {
        let feed = instance.map_or_else(FeedId::notifications, FeedId::documents);
        let id = GroupId { feed, name: GroupName::new(name)? };
        Ok(Self { context: Arc::clone(context), id, rows: PhantomData })
    }
}

impl<R> Group<R> {
    /// The name of the group.
    pub fn name(&self) -> &GroupName {
        &self.id.name
    }

    /// The database whose documents it follows; `None` if it follows the notifications.
    pub fn instance(&self) -> Option<DbInstance> {
        self.id.feed.instance()
    }

    /// The group, whatever its rows are.
    fn without_type(&self) -> Group<()> {
        Group { context: Arc::clone(&self.context), id: self.id.clone(), rows: PhantomData }
    }

    fn raw(&self) -> RawFeed<'_> {
        RawFeed::new(&self.context, &self.id.feed)
    }

    fn missing(&self) -> Error {
        Error::NoGroup { group: self.id.to_string() }
    }
}
