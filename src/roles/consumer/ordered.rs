//! Work on batches of rows, in the order of the shard.

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::FutureExt;

use super::{
    FailurePolicy,
    deferred::{DueId, Job},
    exactly_once::{Fence, Revoked, Scope},
    handler::{AnyBatchHandler, Batch, CloseReason, ConsumedRow, HandlerResult, chain},
    member::PendingClose,
    shard::{Change, End, PageRow, Part, ShardTask, guarded, moved, persist},
};
use crate::{
    base::{
        encoding::Sequence,
        error::{Result, panic_text},
    },
    state::keys::Due,
};

/// What was tried in a shard. It outlives a handler that panics.
#[derive(Debug)]
pub(super) struct Tried {
    /// Rows up to here are tried one by one, because a batch of them has failed.
    careful_to: Sequence,
    /// The first row of the batch that has failed last.
    first: Sequence,
    /// How often it has failed.
    attempts: u32,
}

impl Default for Tried {
    fn default() -> Self {
        Self { careful_to: Sequence::MIN, first: Sequence::MIN, attempts: 0 }
    }
}

/// A handler, until it is closed.
struct Opened<R> {
    handler: Box<dyn AnyBatchHandler<R>>,
    /// Whether the last batch was a deferred id, so that rows of the shard are next.
    was_deferred: bool,
}

/// How a call of a handler has ended.
enum Called {
    Succeeded,
    Failed { error: String, is_panic: bool, is_stall: bool },
}

impl<R: ConsumedRow> ShardTask<R> {
    /// Opens the handler, works with it, and closes it.
    pub(super) async fn session_of_batches(&mut self, handler: Box<dyn AnyBatchHandler<R>>) -> Result<End> {
        let shard = self.held.shard;
        // An abort drops this future, and with it the handler: then it is closed elsewhere.
        let slot = Arc::new(parking_lot::Mutex::new(None::<Box<dyn AnyBatchHandler<R>>>));
        let opened = Opened { handler, was_deferred: false };
        let close = {
            let slot = Arc::clone(&slot);
            move |reason| match slot.lock().take() {
                Some(handler) => handler.closed(reason),
                None => std::future::ready(()).boxed(),
            }
        };
        let mut close = PendingClose::new(&self.member, self.stop.clone(), Box::new(close));
        let mut returned = Returned { opened: Some(opened), slot };
        let opened = returned.opened.as_mut().expect("it was just put there");
        let ended = match guarded(async { opened.handler.opened(shard).await }).await {
            Ok(()) => self.serve_batches(opened).await,
            Err(panic) => Ok(self.did_not_open(&panic).await),
        };
        drop(returned);
        close.close(match &ended {
            Ok(End::Stopped | End::Changed) => CloseReason::Shutdown,
            Ok(End::Drained) => CloseReason::Resharded,
            Ok(End::Panicked) => CloseReason::Panicked,
            Err(_) => CloseReason::LeaseLost,
        });
        close.finish().await;
        ended
    }

    async fn serve_batches(&mut self, opened: &mut Opened<R>) -> Result<End> {
        let (mut is_at_end, mut is_closed) = (self.part == Part::Deferred, false);
        loop {
            if self.stop.is_requested() {
                return self.stop_batches().await;
            }
            match self.look_at_changes().await? {
                Change::None => {}
                Change::Begins => is_at_end = false,
                Change::Ends => return self.stop_batches().await.map(|_| End::Changed),
                Change::Stops => return self.stop_batches().await,
            }
            tokio::task::yield_now().await;
            if (!opened.was_deferred || is_at_end) && self.is_turn_of_deferred() {
                opened.was_deferred = true;
                match self.work_on_deferred(opened).await? {
                    Step::Goes => {}
                    Step::Stops => return self.stop_batches().await,
                    Step::Panicked => return Ok(End::Panicked),
                }
            }
            opened.was_deferred &= is_at_end;
            if self.save_at().is_some_and(|at| at <= self.now())
                && persist!(self, "saving a consumer's checkpoint", self.save().await).is_none()
            {
                return self.stop_batches().await;
            }
            if is_closed && is_at_end {
                self.stop_batches().await?;
                return Ok(if self.stop.is_requested() { End::Stopped } else { End::Drained });
            }
            if is_at_end {
                let until = [self.save_at(), self.deferred.next_turn()].into_iter().flatten().min();
                let (mut stop, mut changes) = (self.stop.clone(), self.changes.clone());
                let pause = until.map_or(Duration::MAX, |until| until.saturating_sub(self.now()));
                let (due, has_begun) = (self.env().sleep(pause), self.part == Part::All);
                let has_rows = tokio::select! {
                    biased;
                    () = stop.requested() => false,
                    _ = changes.changed() => false,
                    () = due => false,
                    () = self.rows_may_have_come(), if has_begun => true,
                };
                if !has_rows {
                    continue;
                }
            }
            match self.work_on_rows(opened).await? {
                Read::Rows { more, is_end } => (is_at_end, is_closed) = (!more, is_end),
                Read::Failed => is_at_end = false,
                Read::Stops => return self.stop_batches().await,
                Read::Panicked => return Ok(End::Panicked),
            }
        }
    }

    fn is_turn_of_deferred(&self) -> bool {
        self.deferred.next_turn().is_some_and(|at| at <= self.now())
    }

    async fn stop_batches(&mut self) -> Result<End> {
        self.save().await?;
        Ok(End::Stopped)
    }

    /// Reads the next rows, and passes them to the handler.
    async fn work_on_rows(&mut self, opened: &mut Opened<R>) -> Result<Read> {
        self.forget_hints();
        let is_again = self.tried.attempts > 0 || self.read < self.tried.careful_to;
        let limit = if self.read < self.tried.careful_to { 1 } else { self.member.options.batch_rows_max };
        let page = persist!(self, "reading rows for a consumer", self.next_page(limit, is_again).await);
        let Some(page) = page else { return Ok(Read::Stops) };
        let (mut to, mut more, mut is_end) = (page.to, page.more, page.is_end);
        let knowledge = self.knowledge();
        let (mut rows, mut bytes) = (Vec::with_capacity(page.rows.len()), 0);
        for PageRow { row, key, len } in page.rows {
            if let Some(key) = key {
                let has_ended =
                    row.is_tombstone() || key.instance.is_some() && key.instance != row.instance();
                let is_finished = key.due == Due::Never && row.sequence() <= key.done.position();
                if !is_finished && (has_ended || key.due == Due::Never) {
                    let id = Bytes::copy_from_slice(row.id());
                    let made = persist!(self, "deferring an id", self.make_due(&id).await);
                    if made.is_none() {
                        return Ok(Read::Stops);
                    }
                }
                self.is_dirty = true;
            } else if row.is_wanted(&self.member.filter, &knowledge) {
                bytes += len;
                rows.push(row);
                if bytes >= self.member.options.batch_bytes_max {
                    (to, more, is_end) = (rows[rows.len() - 1].sequence(), true, false);
                    break;
                }
            }
        }
        if !rows.is_empty() {
            match self.deliver(opened, rows, (to, more || is_end)).await? {
                Delivered::Done => {}
                Delivered::Failed => return Ok(Read::Failed),
                Delivered::Stops => return Ok(Read::Stops),
                Delivered::Panicked => return Ok(Read::Panicked),
            }
        }
        self.has_read(to, (more, is_end));
        self.finished_up_to(to);
        Ok(Read::Rows { more, is_end })
    }

    /// Passes `rows` to the handler, once.
    async fn deliver(
        &mut self,
        opened: &mut Opened<R>,
        rows: Vec<Arc<R>>,
        (to, more): (Sequence, bool),
    ) -> Result<Delivered> {
        let (first, last) = (rows[0].sequence(), rows[rows.len() - 1].sequence());
        if self.tried.first != first {
            (self.tried.first, self.tried.attempts) = (first, 0);
        }
        // Once everything up to the end was worked on, nothing before it is news.
        let after_it = if more { moved(self.knowledge(), to) } else { to.into() };
        let scope = Scope::Rows { after: self.read, last, to: after_it };
        let fence = Fence::new(&self.held, scope);
        let batch = Batch {
            rows: rows.clone(),
            since: self.knowledge(),
            attempt: self.tried.attempts + 1,
            is_deferred: false,
            fence: Arc::clone(&fence),
        };
        let (error, is_panic, is_stall) = match self.call(opened, batch, &fence).await {
            Called::Succeeded => {
                self.rows_finished(rows.len());
                return Ok(Delivered::Done);
            }
            Called::Failed { error, is_panic, is_stall } => (error, is_panic, is_stall),
        };
        self.tried.attempts = self.tried.attempts.saturating_add(1);
        self.report(None, self.tried.attempts, &error);
        let stored = persist!(self, "ending work that has failed", fence.revoke_rows().await);
        let Some(stored) = stored else { return Ok(Delivered::Stops) };
        let over = |delivered| if is_panic { Delivered::Panicked } else { delivered };
        let stored = stored.map_or(Sequence::MAX, |stored| stored.position());
        if stored >= last {
            // Its transaction was committed, although the handler does not know it.
            self.rows_finished(rows.len());
            return Ok(over(Delivered::Done));
        }
        if stored > self.read {
            // A part was committed: the rest is read again.
            self.has_read(stored, (true, false));
            self.finished_up_to(stored);
            return Ok(over(Delivered::Failed));
        }
        let options = &self.member.options;
        let is_exhausted = is_stall || self.tried.attempts >= options.attempts_max;
        let pause = options.pauses().backoff(self.tried.attempts, self.env());
        if rows.len() > 1 && (is_exhausted || self.tried.attempts == 1) {
            // Perhaps only one of the rows fails, so they are tried one by one.
            (self.tried.careful_to, self.tried.attempts) = (last, 0);
        } else if is_exhausted && options.failure == FailurePolicy::Defer {
            let row = &rows[0];
            let id = Bytes::copy_from_slice(row.id());
            let job = Job::new(Some(Arc::clone(row)), self.knowledge(), None);
            let fence = job.fence(&self.held, &id);
            let attempts = self.tried.attempts;
            let revoked = persist!(
                self,
                "deferring an id",
                self.revoke((&job, &id, &fence), (attempts, &error), Some(pause)).await
            );
            if revoked.is_none() {
                return Ok(Delivered::Stops);
            }
            self.held.context.stats.consumer_deferred.add(1);
            (self.tried.attempts, self.is_dirty) = (0, true);
            return Ok(over(Delivered::Done));
        }
        if self.sleeps_until_stop(pause).await { Ok(Delivered::Stops) } else { Ok(over(Delivered::Failed)) }
    }

    fn rows_finished(&mut self, count: usize) {
        (self.tried.attempts, self.is_dirty) = (0, true);
        self.held.context.stats.consumer_rows.add(count as u64);
    }

    /// Works on one deferred id that is due.
    async fn work_on_deferred(&mut self, opened: &mut Opened<R>) -> Result<Step> {
        let due = persist!(self, "reading deferred ids", self.due_ids(1, |_| false).await);
        let Some(due) = due else { return Ok(Step::Stops) };
        let Some(DueId { id, job, attempts }) = due.into_iter().next() else { return Ok(Step::Goes) };
        let fence = job.fence(&self.held, &id);
        let Some(row) = job.row.clone() else {
            // Nothing is left of it that a batch could show.
            let finished = persist!(self, "saving that work is finished", self.finish(&job, &id, true).await);
            return Ok(if finished.is_some() { Step::Goes } else { Step::Stops });
        };
        let batch = Batch {
            rows: vec![row],
            since: job.since,
            attempt: attempts + 1,
            is_deferred: true,
            fence: Arc::clone(&fence),
        };
        let called = self.call(opened, batch, &fence).await;
        let Called::Failed { error, is_panic, .. } = called else {
            fence.close();
            self.held.context.stats.consumer_rows.add(1);
            let finished = persist!(self, "saving that work is finished", self.finish(&job, &id, true).await);
            return Ok(if finished.is_some() { Step::Goes } else { Step::Stops });
        };
        let attempts = attempts.saturating_add(1);
        self.report(Some(&id), attempts, &error);
        let pause = self.member.options.pauses().backoff(attempts, self.env());
        let revoked = persist!(
            self,
            "ending work that has failed",
            self.revoke((&job, &id, &fence), (attempts, &error), Some(pause)).await
        );
        match revoked {
            None => return Ok(Step::Stops),
            Some(Revoked::Done) => {
                let finished =
                    persist!(self, "saving that work is finished", self.finish(&job, &id, true).await);
                if finished.is_none() {
                    return Ok(Step::Stops);
                }
            }
            Some(Revoked::Deferred | Revoked::Open) => {}
        }
        Ok(if is_panic { Step::Panicked } else { Step::Goes })
    }

    /// Calls the handler, until it returns or makes no progress for too long.
    async fn call(&self, opened: &mut Opened<R>, batch: Batch<R>, fence: &Fence) -> Called {
        let env = self.env().clone();
        let limit = self.member.options.stall_limit;
        // The call itself may panic as well.
        let call = AssertUnwindSafe(async { opened.handler.batch(batch).await }).catch_unwind();
        tokio::pin!(call);
        let called: std::result::Result<HandlerResult, _> = loop {
            let stalls_at = fence.progressed_at().saturating_add(limit);
            let now = env.now();
            if stalls_at <= now {
                let error = format!("it made no progress for {limit:?}");
                return Called::Failed { error, is_panic: false, is_stall: true };
            }
            tokio::select! {
                biased;
                called = &mut call => break called,
                () = env.sleep(stalls_at.saturating_sub(now)) => {}
            }
        };
        match called {
            Ok(Ok(())) => {
                fence.close();
                Called::Succeeded
            }
            Ok(Err(error)) => Called::Failed { error: chain(&*error), is_panic: false, is_stall: false },
            Err(panic) => {
                self.held.context.stats.consumer_panics.add(1);
                let error = format!("panic: {}", panic_text(&*panic));
                Called::Failed { error, is_panic: true, is_stall: false }
            }
        }
    }
}

/// Returns the handler when the session ends, also if that is dropped.
struct Returned<R> {
    opened: Option<Opened<R>>,
    slot: Arc<parking_lot::Mutex<Option<Box<dyn AnyBatchHandler<R>>>>>,
}

impl<R> Drop for Returned<R> {
    fn drop(&mut self) {
        *self.slot.lock() = self.opened.take().map(|opened| opened.handler);
    }
}

/// What became of a batch.
enum Delivered {
    /// It is finished, or deferred.
    Done,
    /// Its rows are to be read again.
    Failed,
    Stops,
    Panicked,
}

/// What became of a read.
enum Read {
    Rows { more: bool, is_end: bool },
    Failed,
    Stops,
    Panicked,
}

/// What became of a deferred id.
enum Step {
    Goes,
    Stops,
    Panicked,
}
