//! Work on ids side by side: a task for each id that runs, never two for one.

use std::{collections::HashMap, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::FutureExt;

use super::{
    FailurePolicy,
    deferred::{DueId, Job},
    exactly_once::{Fence, Revoked},
    handler::{AnyHandler, CloseReason, ConsumedRow, HandlerResult, Work, chain, left_instance, sequence_of},
    in_hand::{InHand, Offered},
    member::PendingClose,
    shard::{Change, End, Page, PageRow, Part, ShardTask, guarded, persist},
};
use crate::{
    base::{
        cursor::Cursor,
        error::Result,
        tasks::{Canceller, Ended, Joined, Tasks},
    },
    state::keys::{DeferredRow, Due},
};

/// How many rows are read at once.
const PAGE_ROWS: usize = 1_000;

/// A run that is under way.
struct Run {
    id: Bytes,
    fence: Arc<Fence>,
    began: Duration,
    canceller: Canceller,
}

/// The runs of a shard, and what waits for one.
struct Hand<R> {
    ids: InHand<Job<R>>,
    runs: HashMap<u64, Run>,
    tasks: Tasks<HandlerResult>,
    next_run: u64,
    /// When the runs are looked at: whether they stall, or have run for long.
    next_check: Option<Duration>,
}

impl<R: ConsumedRow> Hand<R> {
    fn run_of(&self, id: &[u8]) -> Option<u64> {
        self.runs.iter().find(|(_, run)| run.id[..] == *id).map(|(number, _)| *number)
    }

    /// Ends a run, whose future has been dropped when this returns.
    fn cancel(&mut self, number: u64) -> Option<Run> {
        let run = self.runs.remove(&number)?;
        run.canceller.cancel();
        Some(run)
    }
}

/// A newer row takes the place of the one before.
fn newest<R>(job: &mut Job<R>, newer: Job<R>) {
    job.row = newer.row;
}

impl<R: ConsumedRow> ShardTask<R> {
    /// Opens the handler, works with it, and closes it.
    pub(super) async fn session_of_ids(&mut self, handler: Arc<dyn AnyHandler<R>>) -> Result<End> {
        let shard = self.held.shard;
        let last = Arc::clone(&handler);
        let close = move |reason| last.closed(shard, reason);
        let mut close = PendingClose::new(&self.member, self.stop.clone(), Box::new(close));
        let ended = match guarded(async { handler.opened(shard).await }).await {
            Ok(()) => self.serve_ids(&handler).await,
            Err(panic) => Ok(self.did_not_open(&panic).await),
        };
        close.close(match &ended {
            Ok(End::Stopped | End::Changed) => CloseReason::Shutdown,
            Ok(End::Panicked) => CloseReason::Panicked,
            Ok(End::Drained) => CloseReason::Resharded,
            Err(_) => CloseReason::LeaseLost,
        });
        close.finish().await;
        ended
    }

    async fn serve_ids(&mut self, handler: &Arc<dyn AnyHandler<R>>) -> Result<End> {
        let mut hand = Hand {
            ids: InHand::new(self.member.tenants.clone()),
            runs: HashMap::new(),
            tasks: Tasks::new(),
            next_run: 0,
            next_check: None,
        };
        let (mut is_at_end, mut is_closed) = (self.part == Part::Deferred, false);
        loop {
            if self.stop.is_requested() {
                return self.stop_ids(&mut hand).await;
            }
            match self.look_at_changes().await? {
                Change::None => {}
                Change::Begins => is_at_end = false,
                Change::Ends => {
                    self.stop_ids(&mut hand).await?;
                    return Ok(End::Changed);
                }
                Change::Stops => return self.stop_ids(&mut hand).await,
            }
            // A store in memory never makes it wait, but other tasks must get their turn.
            tokio::task::yield_now().await;
            if !self.take_due_ids(&mut hand).await? {
                return self.stop_ids(&mut hand).await;
            }
            if !is_at_end && self.has_room(&hand) {
                self.forget_hints();
                let page =
                    persist!(self, "reading rows for a consumer", self.next_page(PAGE_ROWS, false).await);
                let Some(page) = page else { return self.stop_ids(&mut hand).await };
                (is_at_end, is_closed) = (!page.more, page.is_end);
                if !self.take_page(&mut hand, page).await? {
                    return self.stop_ids(&mut hand).await;
                }
            }
            self.start_runs(&mut hand, handler);
            self.finished_up_to(hand.ids.watermark(self.read));
            if self.save_at().is_some_and(|at| at <= self.now())
                && persist!(self, "saving a consumer's checkpoint", self.save().await).is_none()
            {
                return self.stop_ids(&mut hand).await;
            }
            if is_closed && hand.ids.len() == hand.ids.covered() {
                return self.end_of_ids(&mut hand).await;
            }
            let reads_on = !is_at_end && self.has_room(&hand);
            match self.next_event(&mut hand, is_at_end && self.part == Part::All, reads_on).await {
                Event::Ended(number, joined) => {
                    let mut ended = Some((number, joined));
                    // Those that have ended meanwhile, too.
                    while let Some((number, joined)) = ended {
                        if !self.run_ended(&mut hand, number, joined).await? {
                            return self.stop_ids(&mut hand).await;
                        }
                        ended = hand.tasks.join_next().now_or_never().flatten();
                    }
                }
                Event::Rows => is_at_end = false,
                Event::Check => {
                    if !self.check_runs(&mut hand).await? {
                        return self.stop_ids(&mut hand).await;
                    }
                }
                Event::Again => {}
            }
        }
    }

    /// Waits for something to do.
    async fn next_event(&mut self, hand: &mut Hand<R>, waits_for_rows: bool, reads_on: bool) -> Event {
        if reads_on && hand.runs.is_empty() {
            return Event::Again;
        }
        let env = self.env().clone();
        let until = |at: Option<Duration>| {
            let pause = at.map_or(Duration::MAX, |at| at.saturating_sub(env.now()));
            env.sleep(pause)
        };
        let has_room = hand.ids.running() < self.member.options.max_concurrency;
        let timers = [
            self.save_at(),
            hand.ids.next_due().filter(|_| has_room),
            self.deferred.next_turn().filter(|_| self.room_for_due(hand) > 0),
        ];
        let (again, check) = (until(timers.into_iter().flatten().min()), until(hand.next_check));
        let (mut stop, mut changes) = (self.stop.clone(), self.changes.clone());
        let Hand { tasks, runs, .. } = hand;
        tokio::select! {
            biased;
            () = stop.requested() => Event::Again,
            // The sender is in the member.
            _ = changes.changed() => Event::Again,
            Some((number, joined)) = tasks.join_next(), if !runs.is_empty() => Event::Ended(number, joined),
            () = std::future::ready(()), if reads_on => Event::Again,
            () = again => Event::Again,
            () = check => Event::Check,
            () = self.rows_may_have_come(), if waits_for_rows => Event::Rows,
        }
    }

    /// Whether more rows may be read. Ids with keys are few, and do not count.
    fn has_room(&self, hand: &Hand<R>) -> bool {
        hand.ids.len() - hand.ids.covered() < self.member.options.in_hand_max
    }

    /// How many more deferred ids may be in hand: they take at most half of what runs.
    fn room_for_due(&self, hand: &Hand<R>) -> usize {
        (self.member.options.max_concurrency / 2).max(1).saturating_sub(hand.ids.due())
    }

    /// Takes deferred ids that are due. False if the task is to stop.
    async fn take_due_ids(&mut self, hand: &mut Hand<R>) -> Result<bool> {
        let room = self.room_for_due(hand);
        if room == 0 || self.deferred.next_turn().is_none_or(|at| at > self.now()) {
            return Ok(true);
        }
        let due =
            persist!(self, "reading deferred ids", self.due_ids(room, |id| hand.ids.contains(id)).await);
        let Some(due) = due else { return Ok(false) };
        for DueId { id, job, attempts } in due {
            hand.ids.offer_covered(&id, job, attempts);
        }
        Ok(true)
    }

    /// Takes the rows of a page. False if the task is to stop.
    async fn take_page(&mut self, hand: &mut Hand<R>, page: Page<R>) -> Result<bool> {
        let debounce = self.member.options.debounce;
        let due = (!debounce.is_zero()).then(|| self.now().saturating_add(debounce));
        let knowledge = self.knowledge();
        for PageRow { row, key, .. } in page.rows {
            let id = Bytes::copy_from_slice(row.id());
            match &key {
                Some(key) if key.due != Due::Never => {
                    if !self.pass_by(hand, &id, &row, key).await? {
                        return Ok(false);
                    }
                    continue;
                }
                // It was finished before a crash, and the checkpoint was not saved; or a page from memory is older than the work on a newer row.
                Some(key) if row.sequence() <= key.done.position() => {
                    self.is_dirty = true;
                    continue;
                }
                _ => {}
            }
            let since = key.as_ref().map_or(knowledge, |key| key.done);
            let is_in_hand = hand.ids.contains(&id);
            if !row.is_wanted(&self.member.filter, &since) {
                continue;
            }
            let has_ended = is_in_hand && self.ends_work(hand, &id, &row);
            let job = Job::new(Some(Arc::clone(&row)), since, key.as_ref());
            let offered = hand.ids.offer(&id, row.sequence(), job, due, newest);
            if offered == Offered::Running && has_ended && !self.cancel_run(hand, &id).await? {
                return Ok(false);
            }
        }
        self.has_read(page.to, (page.more, page.is_end));
        Ok(true)
    }

    /// Whether `row` ends the database on which the work in hand works.
    fn ends_work(&self, hand: &Hand<R>, id: &[u8], row: &R) -> bool {
        let job = hand.ids.get(id).map(|entry| &entry.work);
        let worked = job.and_then(Job::begun_instance);
        worked.is_some() && worked != left_instance(Some(row))
    }

    /// Passes a row by, because the key of its id covers it. False if the task is to stop.
    async fn pass_by(&mut self, hand: &mut Hand<R>, id: &Bytes, row: &R, key: &DeferredRow) -> Result<bool> {
        self.is_dirty = true;
        let has_ended = row.is_tombstone() || key.instance.is_some() && key.instance != row.instance();
        if !has_ended {
            return Ok(true);
        }
        if hand.ids.get(id).is_some_and(|entry| entry.is_running()) {
            return self.cancel_run(hand, id).await;
        }
        hand.ids.remove(id);
        let made = persist!(self, "deferring an id", self.make_due(id).await);
        Ok(made.is_some())
    }

    /// Cancels the run of `id`, whose database has ended. It is deferred, and due at once. False if the task is to stop.
    async fn cancel_run(&mut self, hand: &mut Hand<R>, id: &Bytes) -> Result<bool> {
        let Some(run) = hand.run_of(id).and_then(|number| hand.cancel(number)) else { return Ok(true) };
        let entry = hand.ids.remove(id).expect("it runs");
        let revoked = persist!(
            self,
            "cancelling work",
            self.revoke((&entry.work, id, &run.fence), (0, ""), Some(Duration::ZERO)).await
        );
        match revoked {
            None => return Ok(false),
            // It was finished, and the newer row follows.
            Some(Revoked::Done | Revoked::Open) => {
                let made = persist!(self, "deferring an id", self.cover(&entry.work, id, 0).await);
                if made.is_none() {
                    return Ok(false);
                }
            }
            Some(Revoked::Deferred) => {}
        }
        self.is_dirty = true;
        Ok(true)
    }

    fn start_runs(&mut self, hand: &mut Hand<R>, handler: &Arc<dyn AnyHandler<R>>) {
        let now = self.now();
        while let Some(id) = hand.ids.start(now, self.member.options.max_concurrency) {
            let entry = hand.ids.get(&id).expect("it was just started");
            let job = &entry.work;
            let fence = job.fence(&self.held, &id);
            let work = Work {
                id: id.clone(),
                row: job.row.clone(),
                since: job.since,
                gone: job.gone(),
                is_again: job.again.is_some(),
                attempt: entry.attempts + 1,
                fence: Arc::clone(&fence),
            };
            let number = hand.next_run;
            hand.next_run += 1;
            let canceller = hand.tasks.spawn(number, Arc::clone(handler).handle(work));
            hand.runs.insert(number, Run { id, fence, began: now, canceller });
            let check = now.saturating_add(self.check_pause());
            hand.next_check = Some(hand.next_check.map_or(check, |next| next.min(check)));
        }
    }

    /// After how long a run is looked at for the first time.
    fn check_pause(&self) -> Duration {
        let options = &self.member.options;
        match options.failure {
            FailurePolicy::Defer => options.stall_limit.min(options.checkpoint_interval),
            FailurePolicy::Hold => options.stall_limit,
        }
    }

    /// Accounts for the end of a run. False if the task is to stop.
    async fn run_ended(
        &mut self,
        hand: &mut Hand<R>,
        number: u64,
        joined: Joined<HandlerResult>,
    ) -> Result<bool> {
        // One that was cancelled is accounted for.
        let Some(run) = hand.runs.remove(&number) else { return Ok(true) };
        match joined {
            Ok(Ok(())) => self.run_succeeded(hand, run).await,
            Ok(Err(error)) => self.run_failed(hand, run, &chain(&*error), false).await,
            Err(Ended::Panicked(text)) => {
                self.held.context.stats.consumer_panics.add(1);
                self.run_failed(hand, run, &format!("panic: {text}"), false).await
            }
            Err(Ended::Cancelled) => self.run_failed(hand, run, "it was cancelled", false).await,
        }
    }

    async fn run_succeeded(&mut self, hand: &mut Hand<R>, run: Run) -> Result<bool> {
        let Run { id, fence, .. } = run;
        fence.close();
        self.held.context.stats.consumer_rows.add(1);
        self.finish_in_hand(hand, &id, fence.has_committed()).await
    }

    /// The work of `id` is finished; `has_committed` says that its key may say so already.
    async fn finish_in_hand(&mut self, hand: &mut Hand<R>, id: &Bytes, has_committed: bool) -> Result<bool> {
        let entry = hand.ids.get(id).expect("it has run");
        let is_covered = entry.is_covered();
        let job = Job { row: entry.work.row.clone(), ..entry.work };
        if is_covered || job.has_key {
            let finished =
                persist!(self, "saving that work is finished", self.finish(&job, id, is_covered).await);
            if finished.is_none() {
                return Ok(false);
            }
        } else {
            if self.deferred.may_have_key(id) {
                // Somebody has asked for the work to be done again; the turn of deferred ids has passed over the id while it ran.
                self.deferred.note(id, self.now());
            }
            if has_committed && let Some(done) = sequence_of(job.row.as_ref()) {
                self.deferred.note_finished(id, done);
            }
        }
        self.is_dirty = true;
        let debounce = self.member.options.debounce;
        let due = (!debounce.is_zero()).then(|| self.now().saturating_add(debounce));
        if hand.ids.done(id, due) {
            let next = &mut hand.ids.get_mut(id).expect("a newer row waits").work;
            if let Some(done) = sequence_of(job.row.as_ref()) {
                next.since = Cursor::from(done);
            }
            next.worked = left_instance(job.row.as_deref());
            next.has_key = has_committed || job.has_key;
        }
        Ok(true)
    }

    async fn run_failed(&mut self, hand: &mut Hand<R>, run: Run, error: &str, at_once: bool) -> Result<bool> {
        let Run { id, fence, .. } = run;
        let entry = hand.ids.get_mut(&id).expect("it has run");
        entry.attempts = entry.attempts.saturating_add(1);
        let (attempts, is_covered) = (entry.attempts, entry.is_covered());
        self.report(Some(&id), attempts, error);
        let options = &self.member.options;
        let pause = options.pauses().backoff(attempts, self.env());
        let is_deferred = is_covered
            || options.failure == FailurePolicy::Defer && (at_once || attempts >= options.attempts_max);
        let entry = hand.ids.get(&id).expect("it has run");
        let defer = is_deferred.then_some(pause);
        let ended = (attempts, error);
        let revoked = persist!(
            self,
            "ending work that has failed",
            self.revoke((&entry.work, &id, &fence), ended, defer).await
        );
        match revoked {
            None => return Ok(false),
            Some(Revoked::Done) => return self.finish_in_hand(hand, &id, true).await,
            Some(Revoked::Open) => {
                let due = self.now().saturating_add(pause);
                hand.ids.retry(&id, due, newest);
            }
            Some(Revoked::Deferred) => {
                self.held.context.stats.consumer_deferred.add(u64::from(!is_covered));
                self.is_dirty = true;
                hand.ids.remove(&id);
            }
        }
        Ok(true)
    }

    /// Defers runs that stall, and gives keys to those that have run for long. False if the task is to stop.
    async fn check_runs(&mut self, hand: &mut Hand<R>) -> Result<bool> {
        let now = self.now();
        let (stall_limit, long) = (self.member.options.stall_limit, self.member.options.checkpoint_interval);
        let defers = self.member.options.failure == FailurePolicy::Defer;
        let (mut stalled, mut grown) = (Vec::new(), Vec::new());
        let mut next: Option<Duration> = None;
        for (number, run) in &hand.runs {
            let stalls_at = run.fence.progressed_at().saturating_add(stall_limit);
            let is_covered = hand.ids.get(&run.id).is_none_or(super::in_hand::Entry::is_covered);
            let grows_at = (defers && !is_covered).then(|| run.began.saturating_add(long));
            if stalls_at <= now {
                stalled.push(*number);
                continue;
            }
            if grows_at.is_some_and(|at| at <= now) {
                grown.push(run.id.clone());
            }
            let at = grows_at.filter(|at| *at > now).map_or(stalls_at, |at| at.min(stalls_at));
            next = Some(next.map_or(at, |next| next.min(at)));
        }
        hand.next_check = next;
        for number in stalled {
            let Some(run) = hand.cancel(number) else { continue };
            let error = format!("it made no progress for {stall_limit:?}");
            if !self.run_failed(hand, run, &error, true).await? {
                return Ok(false);
            }
        }
        for id in grown {
            let entry = hand.ids.get(&id).expect("it runs");
            let attempts = entry.attempts;
            let covered = persist!(
                self,
                "deferring an id that runs for long",
                self.cover(&entry.work, &id, attempts).await
            );
            if covered.is_none() {
                return Ok(false);
            }
            self.is_dirty = true;
            hand.ids.cover(&id);
            hand.ids.get_mut(&id).expect("it runs").work.has_key = true;
        }
        Ok(true)
    }

    /// Lets the runs end, within half of the time for a handover, or until they would stall, and saves the checkpoint.
    async fn stop_ids(&mut self, hand: &mut Hand<R>) -> Result<End> {
        let options = &self.member.options;
        let deadline = self.env().sleep((options.balance.handover / 2).min(options.stall_limit));
        tokio::pin!(deadline);
        while !hand.runs.is_empty() {
            let ended = tokio::select! {
                biased;
                ended = hand.tasks.join_next() => ended,
                () = &mut deadline => None,
            };
            let Some((number, joined)) = ended else { break };
            if let Some(run) = hand.runs.remove(&number)
                && let Ok(Ok(())) = joined
            {
                self.run_succeeded_at_stop(hand, run).await?;
            }
        }
        // Who goes on has a later epoch, so nothing of the others can be committed.
        hand.tasks.cancel_all();
        self.finished_up_to(hand.ids.watermark(self.read));
        self.save().await?;
        Ok(End::Stopped)
    }

    async fn run_succeeded_at_stop(&mut self, hand: &mut Hand<R>, run: Run) -> Result<()> {
        let Run { id, fence, .. } = run;
        fence.close();
        self.held.context.stats.consumer_rows.add(1);
        let entry = hand.ids.get(&id).expect("it has run");
        let (is_covered, job) = (entry.is_covered(), Job { row: entry.work.row.clone(), ..entry.work });
        if is_covered || job.has_key {
            self.finish(&job, &id, is_covered).await?;
        }
        self.is_dirty = true;
        hand.ids.done(&id, Some(Duration::MAX));
        Ok(())
    }

    /// Ends the work at the end of a closed shard: the ids that still run go on in its successors.
    async fn end_of_ids(&mut self, hand: &mut Hand<R>) -> Result<End> {
        self.stop_ids(hand).await?;
        Ok(if self.stop.is_requested() { End::Stopped } else { End::Drained })
    }
}

/// What wakes the work on ids.
enum Event {
    Ended(u64, Joined<HandlerResult>),
    /// There may be rows.
    Rows,
    /// Runs are to be looked at.
    Check,
    /// Something is due, or the task is to stop.
    Again,
}
