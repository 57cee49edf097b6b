//! The task of one shard: reads rows, passes them to an observer, and saves its position.

mod deliver;
mod drain;
mod parked;
mod parking;
mod task;

use std::{sync::Arc, time::Duration};

use futures_util::FutureExt;

pub(super) use self::task::ShardTask;
use self::task::{Chunk, End};
use super::{
    CheckpointPolicy, CloseReason, FencingToken, Observer,
    batch::BatchContext,
    consuming::Consuming,
    observer::{Failure, Session, chain},
};
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        error::{Error, Result},
    },
    state::{
        feed::FeedRow,
        keys::{ShardId, Trouble},
    },
    store::RetryPolicy,
};

/// How long an idle shard waits before it saves a position that is not saved, or that other shards have passed.
const ADVANCE_PAUSE: Duration = Duration::from_secs(30);

/// Time limit for saving a trouble, which is for people only.
const TROUBLE_TIME_MAX: Duration = Duration::from_secs(1);

impl<R, F, O> ShardTask<R, F>
where
    R: FeedRow,
    F: Fn(ShardId) -> O + Send + Sync + 'static,
    O: Observer<R>,
{
    /// Works until it is asked to stop; fails if the lease is lost. At the end of the shard it waits until the
    /// shard is given up.
    pub async fn run(mut self) -> Result<()> {
        loop {
            if !self.load().await? {
                // The shard has no checkpoint any more. A round of balancing ends this task, unless the group comes to the shard again
                // before, as after a reset: then the lease has stayed, and nobody else works on the shard.
                if self.sleep(self.consuming.options.balance.interval).await {
                    return Ok(());
                }
                continue;
            }
            let end = if self.is_at_end().await? {
                // Rows that were given up are saved, or newer rows have replaced them.
                self.parking.forget_letters();
                End::Drained
            } else {
                self.session().await?
            };
            match end {
                End::Stopped => return Ok(()),
                End::ObserverError => {}
                End::Drained => match self.drain().await? {
                    // A round of balancing comes soon, so that the successors of the shard are worked on.
                    drain::Drained::Replaced => return Ok(()),
                    // The janitor may drop the successor meanwhile. Then the group goes on to a later entry, so a drained shard asks
                    // again. Nothing else wakes it, so it does not share its polls, as shards do that wait for rows.
                    drain::Drained::Waits => {
                        if self.sleep(self.consuming.options.poll_interval).await {
                            return Ok(());
                        }
                    }
                    drain::Drained::Behind => {
                        let text =
                            "the observer was closed at the end of the shard without a checkpoint there";
                        self.shard_context.context.stats.group_errors.add(1);
                        self.trouble(text.to_owned(), 1).await;
                        if self.sleep(self.consuming.options.retry.backoff_max).await {
                            return Ok(());
                        }
                    }
                },
            }
        }
    }

    /// Loads the stored position; false if the group does not read the shard.
    async fn load(&mut self) -> Result<bool> {
        let read = async |tx| {
            let position = self.shard_context.position(&tx).await?;
            Ok((position, self.consuming.group.row(&tx).await?))
        };
        let (Some(position), row) = self.db().run(read).await? else {
            return Ok(false);
        };
        let generation = row.map_or(0, |row| row.generation);
        self.start = row.map_or(Cursor::NOTHING, |row| row.start);
        let (incarnation, BatchContext { shard, lease, .. }) =
            (self.shard_context.context.config.incarnation, &*self.shard_context);
        self.token = FencingToken::new(incarnation, generation, *shard, lease.epoch);
        self.parking.forget_pending();
        self.shard_context.stored.set(position);
        (self.read, self.done, self.last_row, self.rows_since) = (position, position, position, 0);
        // What was read beyond that comes again.
        self.caught_up = Sequence::MIN;
        Ok(true)
    }

    /// Whether the shard was drained already, so that no observer is needed.
    async fn is_at_end(&mut self) -> Result<bool> {
        match self.rows().await {
            Ok(rows) => Ok(rows.rows.is_empty() && rows.is_end),
            Err(error @ Error::LeaseLost { .. }) => Err(error),
            // The session meets the error again, and reports it.
            Err(_) => Ok(false),
        }
    }

    /// Opens an observer, works with it, and closes it.
    async fn session(&mut self) -> Result<End> {
        let Consuming { options, factory, pending_closes, .. } = &*self.consuming;
        let limits = (self.env().clone(), options.balance.handover);
        let place = (self.shard_context.shard, self.read);
        let observer = factory(self.shard_context.shard);
        let open = Session::open(observer, place, (self.stop.clone(), pending_closes.clone()), limits);
        let (mut session, opened) = self.watched(open, 0).await;
        let ended = match opened {
            Ok(()) => self.serve(&mut session).await,
            Err(failure) => self.not_opened(failure).await,
        };
        let reason = match &ended {
            Ok(End::Stopped) => CloseReason::Shutdown,
            Ok(End::Drained) => CloseReason::Resharded,
            Ok(End::ObserverError) => CloseReason::ObserverError,
            Err(_) => CloseReason::LeaseLost,
        };
        self.watched(session.close(reason), 0).await;
        ended
    }

    /// Accounts for an observer that has panicked when it was opened, and waits before the next one is.
    async fn not_opened(&mut self, failure: Failure) -> Result<End> {
        let stats = &self.shard_context.context.stats;
        stats.group_errors.add(1);
        stats.group_panics.add(1);
        let attempts = self.next_attempt();
        self.trouble(failure.text, attempts).await;
        let pause = self.consuming.options.retry.backoff(attempts, self.env());
        Ok(if self.sleep(pause).await { End::Stopped } else { End::ObserverError })
    }

    /// The number of the attempt in a row that has failed now, whatever it was.
    fn next_attempt(&self) -> u32 {
        self.trouble.as_ref().map_or(0, |trouble| trouble.attempts).saturating_add(1)
    }

    /// Passes rows to the observer until the session has to end. Fails only if the lease is lost.
    async fn serve(&mut self, session: &mut Session<R, O>) -> Result<End> {
        loop {
            let step = self.step(session).await;
            match step {
                Ok(None) => {}
                Ok(Some(end)) => return Ok(end),
                Err(error @ Error::LeaseLost { .. }) => return Err(error),
                Err(error) => {
                    // The store has failed, not the observer.
                    let attempts = self.next_attempt();
                    self.shard_context.context.stats.group_errors.add(1);
                    self.trouble(chain(&error), attempts).await;
                    let pause = self.consuming.options.retry.backoff(attempts, self.env());
                    if self.sleep(pause).await {
                        return Ok(End::Stopped);
                    }
                    // The store has the stored position; rows after it are read again.
                    if self.shard_context.stored.get() < self.done && !self.is_explicit() {
                        self.write_checkpoint(self.done).await.or_else(only_lost)?;
                    }
                }
            }
        }
    }

    /// Reads rows, and works on these or on a parked id.
    async fn step(&mut self, session: &mut Session<R, O>) -> Result<Option<End>> {
        if self.stop.is_requested() {
            self.flush().await?;
            return Ok(Some(End::Stopped));
        }
        // A store in memory never makes it wait, but other tasks must get their turn.
        tokio::task::yield_now().await;
        if let Some(id) = self.follow_parked().await? {
            return self.retry_parked(session, id).await;
        }
        self.hints.mark_unchanged();
        let rows = self.rows().await?;
        if !rows.rows.is_empty() {
            return self.deliver(session, rows).await;
        }
        self.read = rows.to;
        if !rows.more {
            self.caught_up = rows.to;
        }
        self.moved = self.env().now();
        if rows.is_end {
            self.done = rows.to;
            self.flush().await?;
            return Ok(Some(End::Drained));
        }
        if !rows.more {
            self.idle().await?;
            self.wait().await;
        }
        Ok(None)
    }

    /// Reads the next rows, as many as a batch can have. Fails if the lease is lost.
    async fn rows(&self) -> Result<Chunk> {
        let options = &self.consuming.options;
        let BatchContext { shard, lease, .. } = &*self.shard_context;
        let after = self.read;
        let limit = if after < self.careful_to { 1 } else { options.rows_max };
        let read = async |tx| {
            let feed = self.consuming.group.raw();
            let (checked, page) =
                tokio::join!(lease.check(&tx), feed.kept_shard_page(&tx, *shard, after, limit));
            checked?;
            match page {
                // A shard is dropped only when it is empty, so it was worked through.
                Err(Error::NoShard { is_trimmed: true, .. }) => {
                    Ok(Chunk { rows: Vec::new(), to: after, more: false, is_end: true, last_given: None })
                }
                page => page.map(|read| Chunk {
                    rows: read.page.rows,
                    to: read.page.next.position(),
                    more: read.page.more,
                    is_end: read.resharded.is_some(),
                    last_given: None,
                }),
            }
        };
        let mut read = self.db().run(read).await?;
        let mut bytes = 0;
        let fits = read.rows.iter().position(|row| {
            bytes += row.value.len();
            bytes >= options.bytes_max
        });
        if let Some(last) = fits.filter(|last| last + 1 < read.rows.len()) {
            read.rows.truncate(last + 1);
            let to = read.rows[last].sequence;
            read = Chunk { to, rows: read.rows, more: true, is_end: false, last_given: None };
        }
        Ok(read)
    }

    /// Whether only the observer writes checkpoints.
    fn is_explicit(&self) -> bool {
        self.consuming.options.checkpoint == CheckpointPolicy::Explicit
    }

    /// Writes that everything up to `to` was worked on.
    async fn write_checkpoint(&mut self, to: Sequence) -> Result<()> {
        let (shard_context, parks) = (&self.shard_context, Arc::clone(self.parking.parks()));
        shard_context.context.db.run(async |tx| shard_context.advance(&tx, to, &parks).await).await?;
        shard_context.stored.raise(to);
        shard_context.context.stats.group_checkpoints.add(1);
        self.parking.was_written();
        self.was_written();
        Ok(())
    }

    /// Accounts for a checkpoint that was just written.
    fn was_written(&mut self) {
        self.rows_since = 0;
        self.written = self.env().now();
    }

    /// Saves unsaved work, unless only the observer does that.
    async fn flush(&mut self) -> Result<()> {
        let is_due = !self.is_explicit() || self.parking.has_pending() && self.may_save();
        if self.shard_context.stored.get() < self.done && is_due {
            self.write_checkpoint(self.done).await?;
        }
        Ok(())
    }

    /// Saves the position of a shard without new rows: unsaved work, and, now and then while other shards receive
    /// rows, the position itself, because the janitor keeps the tombstones after it. Feeds of documents have no tombstones.
    async fn idle(&mut self) -> Result<()> {
        if self.waits_for_save() {
            // A save that the observer has given up may have come late. Only the store knows.
            self.shard_context.stored.doubt();
        }
        self.saved.mark_unchanged();
        self.resolve_doubt().await?;
        if self.waits_for_save() {
            self.flush().await?;
        }
        if self.advance_at().is_some_and(|at| at <= self.env().now()) {
            self.others_moved = false;
            self.write_checkpoint(self.read).await?;
        }
        Ok(())
    }

    /// Whether rows are to be parked or given up with a save of the observer.
    fn waits_for_save(&self) -> bool {
        self.is_explicit() && self.parking.has_pending()
    }

    /// When the position without rows is to be saved; `None` if it need not be.
    fn advance_at(&self) -> Option<Duration> {
        let is_saved = self.shard_context.stored.get() >= self.done;
        let (is_needed, since) = if is_saved {
            (self.others_moved && self.consuming.group.instance().is_none(), self.written)
        } else {
            (!self.is_explicit(), self.worked)
        };
        is_needed.then(|| since.saturating_add(ADVANCE_PAUSE))
    }

    /// Completes when there may be rows, a poll is due, or the observer has saved something for which others wait.
    async fn wait(&mut self) {
        // The position of an idle shard may just have been saved.
        self.settle_parked();
        let env = self.env().clone();
        let interval = env.spread(self.poll_interval(), 0.75, 1.25);
        let mut poll = env.now().saturating_add(interval);
        let mut polls = self.shard_context.context.wakeups.polls();
        loop {
            let others = self.advance_at().into_iter().chain(self.parking.next_due());
            let until = others.fold(poll, std::cmp::min);
            tokio::select! {
                biased;
                () = self.stop.requested() => return,
                // `changed` cannot fail: `consuming` owns the sender.
                _ = self.asked.changed() => {
                    self.parking.is_stale = true;
                    return;
                }
                // It cannot fail either: `shard_context` owns the sender.
                _ = self.saved.changed(), if self.parking.has_pending() => return,
                changed = self.hints.changed() => {
                    // An error is impossible: the shared context owns the sender.
                    if changed.is_err() || self.hints.borrow_and_update().may_have_rows(self.shard_context.shard, self.read) {
                        self.others_moved = true;
                        return;
                    }
                    self.others_moved = true;
                }
                () = env.sleep(until.saturating_sub(env.now())) => {
                    let polled = std::mem::replace(&mut polls, self.shard_context.context.wakeups.polls());
                    if until < poll || polled == polls || !self.is_seen_empty() || self.waits_for_save() {
                        return;
                    }
                    // The watcher has polled for all shards at once.
                    poll = env.now().saturating_add(interval);
                }
            }
        }
    }

    /// Interval of polls without a hint. Shards of documents share the polls of one shard: notifications announce
    /// their rows, and a process with many shards must not poll more often for it.
    fn poll_interval(&self) -> Duration {
        let interval = self.consuming.options.poll_interval;
        if self.consuming.group.instance().is_none() {
            return interval;
        }
        let sharers = self.shard_context.context.wakeups.documents();
        interval.saturating_mul(u32::try_from(sharers).unwrap_or(u32::MAX).max(1))
    }

    /// Whether the watcher, while it polls, sees no new rows in the shard. It does not know document shards.
    fn is_seen_empty(&self) -> bool {
        self.consuming.group.instance().is_none()
            && !self.hints.borrow().may_have_rows(self.shard_context.shard, self.read)
    }

    /// Sleeps; returns whether the task is to end.
    async fn sleep(&mut self, pause: Duration) -> bool {
        let sleep = self.env().sleep(pause);
        tokio::select! {
            biased;
            () = self.stop.requested() => true,
            () = sleep => false,
        }
    }

    /// Reports a trouble in the log, and saves it for people. Reports the shard as stuck if it has made no progress
    /// for too long.
    async fn trouble(&mut self, text: String, attempts: u32) {
        let (group, shard, health) =
            (&self.shard_context.group, self.shard_context.shard.0, &self.shard_context.context.stats.health);
        if let Some(unsaid) = health.remark(self.env(), &format!("work of {group}")) {
            tracing::warn!(%group, shard, attempts, error = %text, unsaid, "a group could not work on rows, trying again");
        }
        let is_stuck = self.is_stuck();
        if is_stuck {
            self.report_stuck();
        }
        let is_stuck = is_stuck || self.trouble.as_ref().is_some_and(|trouble| trouble.is_stuck);
        self.put_trouble(Trouble { is_current: true, is_stuck, attempts, at_ms: self.env().wall_ms(), text })
            .await;
    }

    fn is_stuck(&self) -> bool {
        let limit = self.consuming.options.stuck_after;
        let since = self.moved.max(self.reported);
        self.env().now().saturating_sub(since) >= limit
    }

    fn report_stuck(&mut self) {
        let now = self.env().now();
        let seconds = now.saturating_sub(self.moved).as_secs();
        tracing::warn!(
            group = %self.shard_context.group,
            shard = self.shard_context.shard.0,
            seconds,
            position = %self.done,
            "a shard of a group is stuck: rows wait, and its owner makes no progress"
        );
        self.shard_context.context.stats.group_stuck.add(1);
        self.reported = now;
    }

    /// Saves `trouble` for people. If that does not succeed in a moment, it is not saved.
    async fn put_trouble(&mut self, trouble: Trouble) {
        let shard_context = Arc::clone(&self.shard_context);
        let key = shard_context.context.keys.trouble(&shard_context.group, shard_context.shard);
        let policy = RetryPolicy { elapsed_max: Some(TROUBLE_TIME_MAX), ..RetryPolicy::default() };
        let stored = shard_context.context.db.run_with(&policy, async |tx| {
            // A shard that the group has left has no trouble.
            if shard_context.position(&tx).await?.is_some() {
                tx.set(&key, &trouble.to_bytes());
            }
            Ok(())
        });
        if let Err(error) = stored.boxed().await {
            shard_context.context.stats.health.complain(self.env(), "saving of a group's trouble", &error);
        }
        self.trouble = trouble.is_current.then_some(trouble);
    }

    /// Ends a trouble after progress.
    async fn recovered(&mut self) {
        self.moved = self.env().now();
        if let Some(trouble) = self.trouble.take() {
            self.put_trouble(Trouble { is_current: false, is_stuck: false, ..trouble }).await;
        }
    }
}

/// Keeps only the loss of a lease; other failures are met again.
fn only_lost(error: Error) -> Result<()> {
    if matches!(error, Error::LeaseLost { .. }) { Err(error) } else { Ok(()) }
}
