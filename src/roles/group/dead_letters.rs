//! Dead letters: rows that a group could not work on. They can be listed, replayed or deleted.

use std::{fmt, sync::Arc};

use serde::Serialize;

use super::{Group, ObserverResult, observer::chain};
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
    },
    state::{
        exactly_once::exactly_once,
        feed::FeedRow,
        keys::{DeadLetterRow, GroupId, ShardId},
    },
    store::{Isolation, KeyRange, RangeRead, Transaction, key_after},
};

const PAGE_ROWS: usize = 100;

/// Describes a dead letter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DeadLetterInfo {
    /// The position of the row in the feed.
    #[serde(rename = "seq")]
    pub sequence: Sequence,
    /// The shard of the row.
    pub shard: ShardId,
    /// How often it was tried.
    pub attempts: u32,
    /// When it was given up, or last replayed, in milliseconds since 1970.
    pub at_ms: u64,
    /// Why the last attempt failed, at most 1,000 bytes.
    pub error: String,
}

/// A dead letter that is being replayed.
pub struct DeadLetter<R> {
    /// The row as it was when it failed. The feed may have a newer row of its id by now.
    pub row: R,
    /// Its position, shard, attempts and error.
    pub info: DeadLetterInfo,
    key: Vec<u8>,
}

impl<R> DeadLetter<R> {
    /// Removes it in the caller's transaction: it is removed if and only if the rest of the transaction takes effect. Returns false if
    /// an earlier transaction has removed it already: then do nothing more in this one.
    pub async fn remove_in(&self, tx: &Transaction) -> Result<bool> {
        let is_there = tx.get(&self.key, Isolation::Serializable).await?.is_some();
        tx.clear(&self.key);
        Ok(is_there)
    }
}

impl<R> fmt::Debug for DeadLetter<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeadLetter").field("info", &self.info).finish_non_exhaustive()
    }
}

/// The result of a replay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Replayed {
    /// How many succeeded, and were removed.
    pub succeeded: u64,
    /// How many failed again, and stay.
    pub failed: u64,
}

fn info(sequence: Sequence, letter: &DeadLetterRow) -> DeadLetterInfo {
    let DeadLetterRow { shard, attempts, at_ms, error, .. } = letter;
    DeadLetterInfo { sequence, shard: *shard, attempts: *attempts, at_ms: *at_ms, error: error.clone() }
}

impl<R> Group<R> {
    /// The dead letters after `after`, at most `limit` (1 to 10,000), in the order of their sequences. Start at
    /// [`Sequence::MIN`], and continue after the last one.
    pub async fn dead_letters(&self, after: Sequence, limit: usize) -> Result<Vec<DeadLetterInfo>> {
        if !(1..=10_000).contains(&limit) {
            return Err(Error::invalid("limit", format!("{limit} is not 1 to 10,000")));
        }
        let page = self.letters(after, limit).await?;
        Ok(page.iter().map(|(sequence, letter)| info(*sequence, letter)).collect())
    }

    /// Deletes the dead letter of the row at `sequence`. Returns whether there was one.
    pub async fn delete_dead_letter(&self, sequence: Sequence) -> Result<bool> {
        let key = self.context.keys.dead_letter(&self.id, sequence);
        let delete = async |tx: Transaction| {
            let is_there = tx.get(&key, Isolation::Serializable).await?.is_some();
            tx.clear(&key);
            Ok(is_there)
        };
        Ok(exactly_once(&self.context.db, &self.context.keys, None, delete).await?.value)
    }

    /// Deletes all dead letters.
    pub async fn delete_dead_letters(&self) -> Result<()> {
        let range = self.context.keys.dead_letters(&self.id);
        let delete = async |tx: Transaction| {
            tx.clear_range(&range);
            Ok(())
        };
        self.context.db.run(delete).await
    }

    async fn letters(&self, after: Sequence, limit: usize) -> Result<Vec<(Sequence, DeadLetterRow)>> {
        let keys = &self.context.keys;
        let KeyRange { end, .. } = keys.dead_letters(&self.id);
        let range = KeyRange { begin: key_after(&keys.dead_letter(&self.id, after)), end };
        let read = async |tx: Transaction| {
            let mut letters = Vec::new();
            let mut rest = Some(RangeRead::new(range.clone()).limit(limit));
            while let Some(read) = rest.filter(|_| letters.len() < limit) {
                let page = tx.get_range(&read, Isolation::Snapshot).await?;
                for row in &page.rows {
                    let (_, sequence, letter): (GroupId, _, _) = keys.dead_letter_row(row)?;
                    letters.push((sequence, letter));
                }
                rest = read.after(&page);
            }
            letters.truncate(limit);
            Ok(letters)
        };
        self.context.db.run(read).await
    }
}

impl<R: FeedRow> Group<R> {
    /// Calls `work` for each dead letter, in the order of their sequences. Letters for which it succeeds are removed; for the others
    /// the error and the attempt are saved.
    ///
    /// `work` may get a letter again after a crash; [`DeadLetter::remove_in`] makes its effect exactly-once. Rows are as
    /// they were when they failed: read the feed if a newer row of the id matters.
    pub async fn replay_dead_letters<F, W>(&self, mut work: F) -> Result<Replayed>
    where
        F: FnMut(Arc<DeadLetter<R>>) -> W,
        W: Future<Output = ObserverResult>,
    {
        let mut replayed = Replayed::default();
        let mut after = Sequence::MIN;
        loop {
            let letters = self.letters(after, PAGE_ROWS).await?;
            let Some((last, _)) = letters.last() else { return Ok(replayed) };
            after = *last;
            for (sequence, stored) in letters {
                let key = self.context.keys.dead_letter(&self.id, sequence);
                let worked = match R::from_stored(sequence, &stored.row) {
                    Ok(row) => {
                        let (info, key) = (info(sequence, &stored), key.clone());
                        work(Arc::new(DeadLetter { row, info, key })).await
                    }
                    Err(error) => Err(error.into()),
                };
                match worked {
                    Ok(()) => replayed.succeeded += 1,
                    Err(_) => replayed.failed += 1,
                }
                let failed = worked.err().map(|error| DeadLetterRow {
                    attempts: stored.attempts.saturating_add(1),
                    at_ms: self.context.env().wall_ms(),
                    error: chain(&*error),
                    ..stored
                });
                self.put(&key, failed.as_ref()).await?;
            }
        }
    }

    /// Removes a letter, or saves its failure, unless it was deleted.
    async fn put(&self, key: &[u8], failed: Option<&DeadLetterRow>) -> Result<()> {
        let put = async |tx: Transaction| {
            if tx.get(key, Isolation::Serializable).await?.is_some() {
                match failed {
                    None => tx.clear(key),
                    Some(letter) => tx.set(key, &letter.to_bytes()),
                }
            }
            Ok(())
        };
        self.context.db.run(put).await
    }
}
