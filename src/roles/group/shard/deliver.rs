//! Passes rows to an observer, and handles its success or failure.

use std::sync::Arc;

use super::task::{Chunk, End, Failing, ShardTask};
use crate::{
    base::error::Result,
    roles::group::{
        CheckpointPolicy, Checkpointer, FailurePolicy, GroupBatch, Observer,
        batch::Unsaved,
        observer::{Failure, Session, chain},
    },
    state::{
        feed::{FeedRow, StoredRow},
        keys::{DeadLetterRow, ShardId, Trouble},
        skipped::SkippedAt,
    },
    store::{Isolation, Transaction},
};

impl<R, F, O> ShardTask<R, F>
where
    R: FeedRow,
    F: Fn(ShardId) -> O + Send + Sync + 'static,
    O: Observer<R>,
{
    /// Passes `rows`, at least one, to the observer, once.
    #[tracing::instrument(name = "group_batch", level = "debug", skip_all, fields(group = %self.shard_context.group.name, shard = %self.shard_context.shard, rows = rows.rows.len()))]
    pub(super) async fn deliver(
        &mut self,
        session: &mut Session<R, O>,
        mut rows: Chunk,
    ) -> Result<Option<End>> {
        let first = rows.rows[0].sequence;
        let now = self.env().now();
        let failing = self.failing.filter(|failing| failing.first == first);
        let mut failing = failing.unwrap_or(Failing { first, attempts: 0, earlier: 0, began: now });
        failing.attempts += 1;
        let failure = match decode(&mut rows) {
            Ok(decoded) => {
                let decoded = self.hold_back(decoded, &mut rows);
                if decoded.is_empty() {
                    self.worked(&rows, 0).await?;
                    return Ok(None);
                }
                let (after, to, count) = (self.read, rows.to, decoded.len());
                let parks = self.parking.parks();
                let batch = GroupBatch {
                    shard: self.shard_context.shard,
                    rows: decoded,
                    after,
                    start: self.start,
                    to,
                    attempt: failing.attempts,
                    fencing_token: self.token,
                    checkpointer: Checkpointer::of_rows(
                        &self.shard_context,
                        (after, rows.last_row()),
                        to,
                        parks,
                    ),
                    unsaved: self.unsaved(),
                };
                match self.watched(session.batch(batch), failing.attempts).await {
                    Ok(()) => {
                        self.worked(&rows, count).await?;
                        return Ok(None);
                    }
                    Err(failure) => failure,
                }
            }
            // The first row cannot be decoded. Trying again cannot help; another version of the program can, if the row is kept.
            Err(error) => {
                let failure = Failure { text: chain(&error), is_panic: false };
                let is_kept = self.consuming.options.failure == FailurePolicy::DeadLetter;
                let feed = self.shard_context.group.feed.clone();
                self.shard_context.context.skip(&SkippedAt::Row(feed, first), &error);
                if self.give_up(&rows, failing.attempts, &failure, is_kept).await? {
                    return Ok(None);
                }
                failure
            }
        };
        self.failed(&rows, failing, failure).await
    }

    /// What is not saved yet.
    pub(super) fn unsaved(&self) -> Unsaved {
        let policy = self.consuming.options.checkpoint;
        let since =
            if matches!(policy, CheckpointPolicy::Interval(_)) { self.written } else { self.env().now() };
        Unsaved { policy, rows: self.rows_since, since }
    }

    /// Awaits `work` of the observer; reports the shard as stuck while that takes too long.
    pub(super) async fn watched<T>(&mut self, work: impl Future<Output = T>, attempts: u32) -> T {
        tokio::pin!(work);
        loop {
            let since = self.moved.max(self.reported);
            let until = since.saturating_add(self.consuming.options.stuck_after);
            let pause = self.env().sleep(until.saturating_sub(self.env().now()));
            tokio::select! {
                biased;
                done = &mut work => return done,
                () = pause => {}
            }
            self.report_stuck();
            let text = match &self.trouble {
                Some(trouble) => trouble.text.clone(),
                None => "the observer has not returned".to_owned(),
            };
            let at_ms = self.env().wall_ms();
            self.put_trouble(Trouble { is_current: true, is_stuck: true, attempts, at_ms, text }).await;
        }
    }

    /// Accounts for `rows`: `count` of them were worked on, and the others wait behind parked ids. Saves the position if that
    /// is due.
    async fn worked(&mut self, rows: &Chunk, count: usize) -> Result<()> {
        self.failing = None;
        self.rows_since += rows.rows.len() as u64;
        self.shard_context.context.stats.group_rows.add(count as u64);
        self.settle(rows);
        if count > 0 {
            self.last_row = rows.last_row();
        }
        if self.shard_context.stored.get() >= rows.to {
            // The observer has saved it.
            self.was_written();
        } else {
            let is_due = match self.consuming.options.checkpoint {
                CheckpointPolicy::EveryBatch => true,
                CheckpointPolicy::Rows(most) => self.rows_since >= most,
                CheckpointPolicy::Interval(most) => self.env().now().saturating_sub(self.written) >= most,
                CheckpointPolicy::Explicit => self.parking.has_pending() && self.may_save(),
            };
            if is_due {
                self.write_checkpoint(rows.to).await?;
            }
        }
        self.recovered().await;
        Ok(())
    }

    /// Marks `rows` as worked on, parked, or given up.
    pub(super) fn settle(&mut self, rows: &Chunk) {
        (self.read, self.done, self.worked) = (rows.to, rows.to, self.env().now());
        if !rows.more {
            self.caught_up = rows.to;
        }
    }

    async fn failed(&mut self, rows: &Chunk, mut failing: Failing, failure: Failure) -> Result<Option<End>> {
        let Failing { attempts, earlier, began, .. } = failing;
        let stats = &self.shard_context.context.stats;
        stats.group_errors.add(1);
        stats.group_panics.add(failure.is_panic.into());
        if let Some(end) = self.find_out(rows, &failure).await? {
            return Ok(end);
        }
        self.failing = Some(failing);
        self.trouble(failure.text.clone(), attempts).await;
        let retry = &self.consuming.options.retry;
        let (pause, now) = (retry.backoff(attempts, self.env()), self.env().now());
        let is_exhausted = retry.is_exhausted(attempts - earlier, now.saturating_sub(began));
        let mut is_over = failure.is_panic;
        if is_exhausted && rows.rows.len() > 1 {
            // Perhaps only one of the rows fails, so they are tried one by one.
            self.careful_to = rows.rows.last().expect("there are several").sequence;
            self.failing = None;
        } else if is_exhausted && self.set_aside(rows, attempts, &failure).await? {
            return if is_over { self.over().await } else { Ok(None) };
        } else if is_exhausted {
            (failing.earlier, failing.began) = (attempts, now);
            self.failing = Some(failing);
            is_over = true;
        }
        if self.sleep(pause).await {
            self.flush().await?;
            return Ok(Some(End::Stopped));
        }
        if is_over { self.over().await } else { Ok(None) }
    }

    /// Gives the only row of `rows` up, or parks it, as the options say. Returns `false` if it has to be tried again.
    async fn set_aside(&mut self, rows: &Chunk, attempts: u32, failure: &Failure) -> Result<bool> {
        match self.consuming.options.failure {
            FailurePolicy::KeepRetrying => Ok(false),
            FailurePolicy::DeadLetter => self.give_up(rows, attempts, failure, true).await,
            FailurePolicy::Park => self.park(rows, attempts, failure).await,
        }
    }

    /// Ends the session: the next observer starts from the saved position.
    pub(super) async fn over(&mut self) -> Result<Option<End>> {
        self.flush().await?;
        Ok(Some(End::ObserverError))
    }

    /// Checks whether `rows` were saved although the observer has failed, as after a commit of unknown result. Returns how to
    /// continue, if they were.
    async fn find_out(&mut self, rows: &Chunk, failure: &Failure) -> Result<Option<Option<End>>> {
        let shard_context = Arc::clone(&self.shard_context);
        let Some(stored) = shard_context.context.db.run(async |tx| shard_context.position(&tx).await).await?
        else {
            return Ok(None);
        };
        shard_context.stored.set(stored);
        // An earlier attempt, which read less far beyond them, may have saved them all.
        if stored >= rows.last_row() {
            tracing::info!(shard = shard_context.shard.0, %failure, "an observer has failed after its checkpoint was written");
            self.worked(rows, rows.rows.len()).await?;
            return Ok(Some(if failure.is_panic { self.over().await? } else { None }));
        }
        if stored > self.read {
            // A part was saved: the rest is read again. The transaction in doubt may have parked something.
            self.parking.is_stale = true;
            (self.read, self.done) = (stored, stored);
        }
        Ok(None)
    }

    /// Gives the only row of `rows` up. If `is_kept`, the transaction that moves the checkpoint past it writes it to the dead letters,
    /// unless the checkpoint is past it already, because it was worked on after all. Returns false if too many dead letters wait for
    /// a checkpoint.
    async fn give_up(
        &mut self,
        rows: &Chunk,
        attempts: u32,
        failure: &Failure,
        is_kept: bool,
    ) -> Result<bool> {
        let shard_context = Arc::clone(&self.shard_context);
        let StoredRow { sequence, value } = &rows.rows[0];
        let letter = DeadLetterRow {
            shard: shard_context.shard,
            attempts,
            at_ms: self.env().wall_ms(),
            error: failure.text.clone(),
            row: value.clone(),
        };
        let key = shard_context.context.keys.dead_letter(&shard_context.group, *sequence);
        if is_kept && !self.parking.give_up(*sequence, letter) {
            // The save may write the dead letters that wait.
            self.flush().await?;
            return Ok(false);
        }
        self.failing = None;
        // If the observer writes the checkpoints, rows that it has not saved are not saved for it.
        let is_whole = self.may_save();
        self.settle(rows);
        if is_whole {
            self.write_checkpoint(rows.to).await?;
        }
        let is_done = is_whole && is_kept && {
            let read = async |tx: Transaction| tx.get(&key, Isolation::Snapshot).await;
            shard_context.context.db.run(read).await?.is_none()
        };
        if is_done {
            tracing::info!(shard = shard_context.shard.0, %failure, "a row that was to be given up had been saved as worked on");
            shard_context.context.stats.group_rows.add(1);
        } else if is_kept {
            tracing::error!(
                group = %shard_context.group,
                shard = shard_context.shard.0,
                %sequence,
                attempts,
                error = %failure,
                "a group gives a row up; it is kept among its dead letters"
            );
            shard_context.context.stats.group_dead_letters.add(1);
        }
        self.recovered().await;
        Ok(true)
    }
}

/// Takes and decodes the rows before the first one that cannot be decoded, and leaves the rest in `rows`. Fails if that is the first
/// row, and takes nothing then.
fn decode<R: FeedRow>(rows: &mut Chunk) -> Result<Vec<Arc<R>>> {
    let mut decoded = Vec::with_capacity(rows.rows.len());
    for (index, row) in rows.rows.iter().enumerate() {
        match R::from_stored(row.sequence, &row.value) {
            Ok(row) => decoded.push(Arc::new(row)),
            Err(error) => {
                let kept = index.max(1);
                if kept < rows.rows.len() {
                    rows.rows.truncate(kept);
                    (rows.to, rows.more) = (rows.rows[kept - 1].sequence, true);
                }
                return if index == 0 { Err(error) } else { Ok(decoded) };
            }
        }
    }
    Ok(decoded)
}
