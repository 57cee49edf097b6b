//! [`ShardTask`]: the state of the task of a shard.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::sync::watch;

use super::parked::Parking;
use crate::{
    base::{cursor::Cursor, encoding::Sequence, env::Env},
    roles::group::{
        FencingToken, Observer,
        batch::{BatchContext, Stored},
        consuming::Consuming,
    },
    state::{
        feed::{FeedRow, StoredRow},
        feed_wakeups::FeedHeads,
        keys::{ShardId, Trouble},
        membership::{Held, Stop},
    },
    store::Database,
};

pub(in crate::roles::group) struct ShardTask<R, F> {
    pub consuming: Arc<Consuming<R, F>>,
    /// The lease and the stored position.
    pub shard_context: Arc<BatchContext>,
    /// Changes with the stored position, which observers save at any time.
    pub saved: watch::Receiver<Sequence>,
    pub stop: Stop,
    /// Reports new rows.
    pub hints: watch::Receiver<FeedHeads>,
    /// What the group knew when it began.
    pub start: Cursor,
    /// Everything up to here was read.
    pub read: Sequence,
    /// Everything up to here was read, and one read has found nothing further: so each row of then was passed on.
    pub caught_up: Sequence,
    /// Everything up to here was worked on.
    pub done: Sequence,
    /// Rows that were worked on since the last checkpoint.
    pub rows_since: u64,
    /// When rows were last worked on.
    pub worked: Duration,
    /// When the last checkpoint was written.
    pub written: Duration,
    /// Whether other shards have received rows since.
    pub others_moved: bool,
    /// The last row that was worked on.
    pub last_row: Sequence,
    /// The failed rows that are to be tried again.
    pub(super) failing: Option<Failing>,
    pub(super) parking: Parking,
    /// Changes when a caller has asked to try parked ids again.
    pub asked: watch::Receiver<Option<Bytes>>,
    /// Orders this consumer after those before.
    pub token: FencingToken,
    /// Rows up to here are passed to the observer one by one, because a batch that contains them has failed for good.
    pub careful_to: Sequence,
    /// The stored trouble, while it lasts.
    pub trouble: Option<Trouble>,
    /// When it last made progress, or had nothing to do.
    pub moved: Duration,
    /// When it was last reported as stuck.
    pub reported: Duration,
}

/// Why a session with an observer ends.
pub(super) enum End {
    /// The consumer was asked to stop.
    Stopped,
    /// The shard is closed and was worked through to its end.
    Drained,
    /// The observer has failed too often, or panicked.
    ObserverError,
}

/// Rows that were read.
pub(super) struct Chunk {
    pub rows: Vec<StoredRow>,
    /// Everything up to here was read.
    pub to: Sequence,
    /// Whether there was more to read.
    pub more: bool,
    /// Whether this is the end of the shard.
    pub is_end: bool,
    /// The last row for the observer, if later ones are held back.
    pub last_given: Option<Sequence>,
}

impl Chunk {
    /// The position of the last row for the observer. How far was read beyond it may differ from
    /// attempt to attempt.
    pub fn last_row(&self) -> Sequence {
        self.last_given.unwrap_or_else(|| self.rows.last().map_or(self.to, |row| row.sequence))
    }
}

/// Rows that have failed, and are tried again.
#[derive(Debug, Clone, Copy)]
pub(super) struct Failing {
    /// The first of them.
    pub first: Sequence,
    /// How often they were tried.
    pub attempts: u32,
    /// How often they had been tried when the present round of attempts began.
    pub earlier: u32,
    /// When the round began.
    pub began: Duration,
}

impl<R, F, O> ShardTask<R, F>
where
    R: FeedRow,
    F: Fn(ShardId) -> O + Send + Sync + 'static,
    O: Observer<R>,
{
    pub fn new(consuming: Arc<Consuming<R, F>>, lease: Held, stop: Stop) -> Self {
        let (context, group) = (Arc::clone(&consuming.group.context), consuming.group.id.clone());
        let (hints, now) = (context.wakeups.listen(&group.feed), context.env().now());
        let shard = ShardId(lease.resource);
        let token = FencingToken::new(context.config.incarnation, 0, shard, lease.epoch);
        let shard_context = BatchContext { context, group, shard, lease, stored: Stored::new(Sequence::MIN) };
        Self {
            parking: Parking::default(),
            asked: consuming.asked.subscribe(),
            token,
            consuming,
            saved: shard_context.stored.changes(),
            shard_context: Arc::new(shard_context),
            stop,
            hints,
            start: Cursor::NOTHING,
            read: Sequence::MIN,
            caught_up: Sequence::MIN,
            done: Sequence::MIN,
            rows_since: 0,
            worked: now,
            written: now,
            others_moved: true,
            last_row: Sequence::MIN,
            failing: None,
            careful_to: Sequence::MIN,
            trouble: None,
            moved: now,
            reported: now,
        }
    }

    pub fn db(&self) -> &Database {
        &self.shard_context.context.db
    }

    pub fn env(&self) -> &Env {
        self.shard_context.context.env()
    }
}
