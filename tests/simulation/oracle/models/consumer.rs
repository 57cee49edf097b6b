//! [`ConsumerModel`] and [`Run`]: what the oracle knows about a consumer, and about a call of its handler.

use std::collections::{BTreeMap, BTreeSet};

use notibus::{
    consumer::FencingToken,
    cursor::{Cursor, Knowledge},
    event::{
        DbInstance, EventKind,
        EventKind::{Created, DdocUpdated, Deleted, Updated},
        Kinds, Notification, Sequence,
    },
    feed::ShardId,
    test_util::inspect::{StoredConsumer, StoredKey},
};

use crate::{
    kernel::Issuer,
    oracle::{Interest, given::Start},
};

/// The number of a run.
pub(crate) type RunId = u64;

/// A row that was given to a handler, and what the handler was shown with it.
#[derive(Debug, Clone)]
pub(crate) struct Shown {
    pub id: String,
    /// The row; `None` if the id no longer has one.
    pub at: Option<Sequence>,
    /// The kinds of the news.
    pub news: Kinds,
    /// The earlier database whose end was among the news.
    pub end: Option<DbInstance>,
}

impl Shown {
    /// Describes the end of a database, without a row.
    pub fn end_of(id: &[u8], end: Option<DbInstance>) -> Self {
        Self { id: String::from_utf8_lossy(id).into_owned(), at: None, news: Kinds::NONE, end }
    }
}

/// A call of a handler.
#[derive(Debug, Clone)]
pub(crate) struct Run {
    /// The process of the handler.
    pub issuer: Issuer,
    pub consumer: String,
    pub token: FencingToken,
    pub shard: ShardId,
    pub shown: Vec<Shown>,
    /// The number of commits before the run began.
    pub began: u64,
    /// Whether the run began after the faults.
    pub is_calm: bool,
    /// Whether the handler returned or was dropped.
    pub is_over: bool,
}

impl Run {
    /// Returns the generation of the consumer for which the handler was called.
    pub fn generation(&self) -> u64 {
        u64::from_str_radix(&self.token.to_string()[2..18], 16).expect("it is a part of each token")
    }
}

/// A row of the feed that a consumer follows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Followed<'a> {
    pub id: &'a str,
    pub at: Sequence,
    /// The row itself, if it is a notification; `None` if it is about a document.
    pub notification: Option<&'a Notification>,
}

impl<'a> From<&'a Notification> for Followed<'a> {
    fn from(row: &'a Notification) -> Self {
        Self { id: row.name.as_str(), at: row.sequence, notification: Some(row) }
    }
}

impl Followed<'_> {
    /// Returns the database that exists according to this row.
    pub fn lives(&self) -> Option<DbInstance> {
        self.notification.filter(|row| !row.is_deleted()).map(|row| row.instance)
    }
}

/// What the oracle knows about the work on an id since the consumer was created or reset.
#[derive(Debug, Clone, Default)]
pub(crate) struct Progress {
    /// The newest row on which the work was finished.
    pub finished: Option<Sequence>,
    /// The databases that a handler has worked on, and whose end the consumer has not learned yet.
    pub begun: BTreeSet<DbInstance>,
    /// The number of commits before the current request to repeat the work.
    pub asked: Option<u64>,
    /// The random value in the last request. A retry of a request that may have been answered has the same value.
    words: Option<[u8; 16]>,
    /// How many times the work may be repeated on the row on which it was finished: once for each request.
    repeats: u32,
    /// Whether an operator gave up the id, and nothing has happened since. A batch does not read that, so it may still finish the work.
    pub is_given_up: bool,
    /// When the run that last finished the work began, as a number of commits.
    pub answered: Option<u64>,
}

impl Progress {
    /// Records a request to repeat the work, made after this many commits. It may replace a request that a run is about to answer.
    pub fn ask(&mut self, commits: u64, words: Option<[u8; 16]>) {
        if self.words != words {
            (self.asked, self.words) = (Some(commits), words);
        }
        self.repeats += 1;
    }

    /// Whether the work on the row at `at` may be finished without breaking exactly-once.
    pub fn may_finish(&self, at: Sequence) -> bool {
        self.finished != Some(at) || self.repeats > 0 || self.is_given_up
    }

    /// Records that the work on the row at `at`, which may be gone, was finished. Returns whether this repeated the work.
    pub fn finish(&mut self, at: Option<Sequence>, has_row: bool) -> bool {
        let is_again = has_row && at == self.finished && self.repeats > 0;
        self.repeats -= u32::from(is_again);
        self.finished = self.finished.max(at);
        is_again
    }

    /// Records that an operator gave up the work on the row at `at`. A batch that already has the row continues.
    pub fn give_up(&mut self, at: Sequence, is_batch: bool) {
        let finished = self.finished.max(Some(at));
        *self = Self { finished, is_given_up: is_batch, ..Self::default() };
    }

    /// Ends all requests. Only a batch that already held the row before the request may finish it once more. Returns the number of commits
    /// before the last request.
    pub fn end_requests(&mut self, is_batch: bool) -> Option<u64> {
        self.repeats = self.repeats.min(u32::from(is_batch));
        self.asked.take()
    }
}

#[derive(Debug, Clone)]
pub(crate) struct ConsumerModel {
    pub row: StoredConsumer,
    /// The version, in microseconds, at which the consumer was created.
    pub created: u64,
    /// The number of commits before the consumer was created or last reset.
    pub since: u64,
    pub checkpoints: BTreeMap<ShardId, Sequence>,
    /// The keys of the consumer's ids, by id and shard.
    pub keys: BTreeMap<String, BTreeMap<ShardId, StoredKey>>,
    pub low: Option<Sequence>,
    pub progress: BTreeMap<String, Progress>,
    /// The databases whose end the consumer has learned since it was created.
    pub ended: BTreeSet<DbInstance>,
    /// Whether a handler of the consumer has ever worked.
    pub is_used: bool,
}

impl ConsumerModel {
    pub fn new(row: StoredConsumer, created: u64, since: u64) -> Self {
        Self {
            row,
            created,
            since,
            checkpoints: BTreeMap::new(),
            keys: BTreeMap::new(),
            low: None,
            progress: BTreeMap::new(),
            ended: BTreeSet::new(),
            is_used: false,
        }
    }

    /// Whether the consumer has read past the row at `at` of `shard`.
    pub fn has_passed(&self, shard: ShardId, at: Sequence) -> bool {
        let lowest = self.checkpoints.values().min();
        self.low.is_some_and(|low| at <= low)
            || match self.checkpoints.get(&shard) {
                Some(checkpoint) => at <= *checkpoint,
                // Rows of earlier shards are before all checkpoints.
                None => lowest.is_some_and(|lowest| at <= *lowest),
            }
    }

    /// Returns the key of `id` that records pending work, if there is any.
    pub fn pending(&self, id: &str) -> Option<&StoredKey> {
        self.keys.get(id)?.values().find(|key| key.is_pending)
    }

    /// Returns the position up to which the work on `id` is finished.
    pub fn base(&self, id: &str) -> Start {
        match self.progress.get(id).and_then(|progress| progress.finished) {
            Some(finished) => Start::At(finished),
            None => Start::from(self.row.start),
        }
    }

    /// Returns the facts in `row` that the consumer must still learn if its work is finished up to `base`.
    pub fn facts(&self, row: Followed<'_>, base: Start, interest: &Interest) -> Vec<Sequence> {
        let Some(row) = row.notification else {
            return Some(row.at).filter(|at| base.is_before(*at)).into_iter().collect();
        };
        let wanted = interest.kinds_of(&row.name);
        if wanted.is_empty() {
            return Vec::new();
        }
        let kinds = [Created, Updated, DdocUpdated].into_iter().filter(|kind| wanted.contains(*kind));
        let mut facts: Vec<_> = kinds.filter_map(|kind| is_news(row, kind, base)).collect();
        facts.extend(self.ends(row, base));
        facts
    }

    /// Returns the ends of databases in `row` that the consumer must still learn if its work is finished up to `base`.
    pub fn ends(&self, row: &Notification, base: Start) -> Vec<Sequence> {
        let own = is_news(row, Deleted, base);
        let before = row.replaced.filter(|replaced| match base {
            _ if self.ended.contains(&replaced.instance) => false,
            Start::At(known) => replaced.deleted_at > known,
            Start::Nothing => began(&self.row.start).is_some_and(|began| replaced.deleted_at > began),
        });
        own.into_iter().chain(before.map(|replaced| replaced.deleted_at)).collect()
    }
}

/// Returns when the last event of `kind` in `row` happened, if that was after `base`.
pub(crate) fn is_news(row: &Notification, kind: EventKind, base: Start) -> Option<Sequence> {
    let at = match kind {
        Created => row.created_at,
        Updated => row.updated_at,
        DdocUpdated => row.ddoc_updated_at,
        Deleted => row.deleted_at,
    };
    at.filter(|at| base.is_before(*at))
}

/// Returns where the reader at `cursor` began if it knew nothing then, or else the position up to which it knew everything.
pub(crate) fn began(cursor: &Cursor) -> Option<Sequence> {
    match cursor.knowledge() {
        Knowledge::Nothing => cursor.began(),
        Knowledge::UpTo(known) => Some(known),
    }
}

pub mod tests {
    use super::*;
    use notibus::event::{Incarnation, Versionstamp};

    /// Returns how many times the work on the row at `at` can still be finished.
    fn finish_often(progress: &mut Progress, at: Sequence) -> usize {
        std::iter::repeat_with(|| progress.may_finish(at) && progress.finish(Some(at), true))
            .take_while(|is| *is)
            .count()
    }

    /// Regression: the oracle did not count a request that replaced the one that a run had begun to answer, so the run for the second
    /// request was reported as a breach.
    pub fn work_is_finished_once_more_for_each_request() {
        let (mut progress, at) =
            (Progress::default(), Sequence::new(Incarnation(0), Versionstamp::new(1, 0), 0));
        assert!(progress.may_finish(at) && !progress.finish(Some(at), true));
        assert_eq!(finish_often(&mut progress, at), 0);
        progress.ask(1, Some([1; 16]));
        progress.ask(2, Some([2; 16]));
        assert_eq!(finish_often(&mut progress, at), 2);
        for is_batch in [false, true] {
            progress.ask(3, Some([3; 16]));
            progress.ask(4, Some([4; 16]));
            progress.ask(5, Some([5; 16]));
            assert!(progress.may_finish(at) && progress.finish(Some(at), true), "one run answers them all");
            assert_eq!(progress.end_requests(is_batch), Some(5));
            assert_eq!(finish_often(&mut progress, at), usize::from(is_batch));
            // This retries the last request, whose result was unknown.
            progress.ask(6, Some([5; 16]));
            assert_eq!(progress.end_requests(is_batch), None, "it was answered");
        }
    }
}
