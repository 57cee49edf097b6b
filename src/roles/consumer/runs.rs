//! The work on a shard: on its rows, in batches or id by id, and on its deferred ids.

use std::{collections::BTreeMap, convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::FutureExt;
use tracing::Instrument;

use super::{
    FailurePolicy,
    deferred::{Changed, Job, KeyChange, Turn},
    exactly_once::{Run, Scope},
    handler::{
        AnyHandler, Batch, Call, CloseReason, ConsumedRow, HandlerResult, Work, chain, left_instance,
        sequence_of,
    },
    in_hand::InHand,
    member::OpenHandler,
    shard::{Change, End, Go, Halt, Page, Part, ShardTask, persist},
};
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        error::Result,
        tasks::{Canceller, Ended, Joined, Tasks},
    },
    state::keys::{DeferredRow, Due},
};

/// How many rows one read fetches when ids are worked on side by side.
const PAGE_ROWS: usize = 1_000;

/// A run in progress. The scope of `run` says whether it works on an id or on a batch.
struct UnderWay<R> {
    run: Arc<Run>,
    canceller: Canceller,
    /// The number of rows in the batch; 1 for an id.
    len: usize,
    /// The row of the batch, if the batch has only one.
    only: Option<Arc<R>>,
}

/// The runs of a shard, and the ids that wait for a run.
struct Hand<R> {
    handler: Arc<dyn AnyHandler<R>>,
    /// The ids that are worked on side by side. Deferred ids are among them even if the handler works on batches.
    ids: InHand<Job<R>>,
    runs: BTreeMap<u64, UnderWay<R>>,
    tasks: Tasks<HandlerResult>,
    next_run: u64,
    /// When to check next whether a run has stalled, or is taking long.
    next_check: Option<Duration>,
    /// Whether all rows of the shard were read. `is_closed` says whether the shard is closed, so that no more rows will come.
    is_at_end: bool,
    is_closed: bool,
}

impl<R: ConsumedRow> Hand<R> {
    fn run_of(&self, id: &[u8]) -> Option<u64> {
        let works_on = |ended: &UnderWay<R>| ended.run.id().is_some_and(|running| running[..] == *id);
        self.runs.iter().find(|(_, run)| works_on(run)).map(|(number, _)| *number)
    }

    /// Decides whether a deferred id can be taken now, together with those in `taken`.
    fn turn(&self, id: &[u8], taken: &[(Bytes, DeferredRow)]) -> Turn {
        match self.ids.contains(id) {
            true => Turn::InHand,
            false if self.ids.has_turn(id, taken.iter().map(|(id, _)| id)) => Turn::Now,
            false => Turn::Later,
        }
    }

    /// Whether `row` shows that the database of the work in hand on `id` has ended.
    fn ends_work(&self, id: &[u8], row: &R) -> bool {
        let job = self.ids.get(id).map(|entry| &entry.work);
        let worked = job.and_then(Job::begun_instance);
        worked.is_some() && worked != left_instance(Some(row))
    }

    /// Cancels a run. Its future is dropped by the time this returns.
    fn cancel(&mut self, number: u64) -> Option<UnderWay<R>> {
        let run = self.runs.remove(&number)?;
        run.canceller.cancel();
        Some(run)
    }
}

/// How a run failed.
struct Failure {
    error: String,
    is_panic: bool,
    is_stall: bool,
}

/// Why the task wakes up.
enum Event {
    Ended(u64, Joined<HandlerResult>),
    /// There may be new rows.
    Rows,
    /// It is time to check the runs.
    Check,
    /// Something is due or has changed, or the task must stop.
    Again,
}

/// Replaces the row of `job` with that of `newer`.
fn newest<R>(job: &mut Job<R>, newer: Job<R>) {
    job.row = newer.row;
}

impl<R: ConsumedRow> ShardTask<R> {
    /// Opens a handler, works with it, and closes it.
    pub(super) async fn session(&mut self) -> Result<End> {
        let open = OpenHandler::new(&self.member, self.held.shard, self.stop.clone());
        let ended = match open.opened().await {
            Ok(()) => {
                let mut hand = Hand {
                    handler: Arc::clone(open.handler()),
                    ids: InHand::new(self.member.tenants.clone()),
                    runs: BTreeMap::new(),
                    tasks: Tasks::new(),
                    next_run: 0,
                    next_check: None,
                    is_at_end: self.part == Part::Deferred || self.is_at_end(),
                    is_closed: false,
                };
                match self.serve(&mut hand).await {
                    Err(Halt::End(end)) => self.stop_runs(&mut hand).await.map(|()| end),
                    Err(Halt::Failed(error)) => Err(error),
                    Ok(never) => match never {},
                }
            }
            Err(panic) => Ok(self.did_not_open(&panic).await),
        };
        let ended = ended.map(|end| if self.stop.is_requested() { End::Stopped } else { end });
        open.close(match &ended {
            Ok(End::Stopped | End::Changed) => CloseReason::Shutdown,
            Ok(End::Drained) => CloseReason::Resharded,
            Ok(End::Panicked) => CloseReason::Panicked,
            Err(_) => CloseReason::LeaseLost,
        })
        .await;
        ended
    }

    async fn serve(&mut self, hand: &mut Hand<R>) -> Go<Infallible> {
        loop {
            if self.stop.is_requested() {
                return Err(End::Stopped.into());
            }
            match self.look_at_changes().await? {
                Change::None => {}
                Change::Begins => hand.is_at_end = false,
                Change::Ends => return Err(End::Changed.into()),
            }
            // An in-memory store never makes this task wait, so the task must yield to let others run.
            tokio::task::yield_now().await;
            self.take_due_ids(hand).await?;
            if self.reads_on(hand) {
                self.forget_hints();
                let limit =
                    if self.member.is_ordered { self.member.options.batch_rows_max } else { PAGE_ROWS };
                let page = persist!(self, "reading rows for a consumer", self.next_page(limit).await);
                (hand.is_at_end, hand.is_closed) = (!page.more, page.is_end);
                self.take_page(hand, page).await?;
            }
            self.start_runs(hand);
            self.finished_up_to(self.watermark(hand));
            if self.save_at().is_some_and(|at| at <= self.now()) {
                persist!(self, "saving a consumer's checkpoint", self.save().await);
            }
            self.note_passed();
            if hand.is_closed
                && hand.is_at_end
                && hand.ids.len() == hand.ids.covered()
                && self.ordered.is_empty()
            {
                return Err(End::Drained.into());
            }
            match self.next_event(hand).await {
                Event::Ended(number, joined) => {
                    let mut ended = Some((number, joined));
                    // Other runs may have ended meanwhile.
                    while let Some((number, joined)) = ended {
                        self.run_ended(hand, number, joined).await?;
                        ended = hand.tasks.join_next().now_or_never().flatten();
                    }
                }
                Event::Rows => hand.is_at_end = false,
                Event::Check => self.check_runs(hand).await?,
                Event::Again => {}
            }
        }
    }

    /// Whether to read more rows now. Waiting batches run first, and the number of ids in hand is limited, not counting the few with keys.
    fn reads_on(&self, hand: &Hand<R>) -> bool {
        let has_room = if self.member.is_ordered {
            hand.runs.is_empty() && self.ordered.is_empty() && self.ordered.resume_at <= self.now()
        } else {
            hand.ids.len() - hand.ids.covered() < self.member.options.in_hand_max
        };
        !hand.is_at_end && has_room
    }

    /// Returns the position up to which everything is finished or covered by keys.
    fn watermark(&self, hand: &Hand<R>) -> Sequence {
        self.ordered.watermark(hand.ids.watermark(self.read))
    }

    /// Waits until there is something to do.
    async fn next_event(&mut self, hand: &mut Hand<R>) -> Event {
        let reads_on = self.reads_on(hand);
        if reads_on && hand.runs.is_empty() {
            return Event::Again;
        }
        let env = self.env().clone();
        let until = |at: Option<Duration>| {
            let pause = at.map_or(Duration::MAX, |at| at.saturating_sub(env.now()));
            env.sleep(pause)
        };
        let has_room = hand.ids.running() < self.member.options.max_concurrency;
        let resume_at = self.ordered.resume_at;
        let timers = [
            self.save_at(),
            hand.ids.next_due().filter(|_| has_room),
            self.deferred.next_turn().filter(|_| self.room_for_due(hand) > 0),
            (resume_at > self.now()).then_some(resume_at),
        ];
        let (again, check) = (until(timers.into_iter().flatten().min()), until(hand.next_check));
        let (mut stop, mut changes) = (self.stop.clone(), self.changes.clone());
        let waits_for_rows = hand.is_at_end && self.part == Part::All && self.ordered.is_empty();
        let Hand { tasks, runs, .. } = hand;
        tokio::select! {
            biased;
            () = stop.requested() => Event::Again,
            // This cannot fail, because the member holds the sender.
            _ = changes.changed() => Event::Again,
            Some((number, joined)) = tasks.join_next(), if !runs.is_empty() => Event::Ended(number, joined),
            () = check => Event::Check,
            () = std::future::ready(()), if reads_on => Event::Again,
            // Polled before `again`, because deferred ids may always keep that ready. They get their turn in each pass of the loop anyway.
            () = self.rows_may_have_come(), if waits_for_rows => Event::Rows,
            () = again => Event::Again,
        }
    }

    /// Returns how many more deferred ids may be taken: up to half of the concurrency may be in hand, or one for batches.
    fn room_for_due(&self, hand: &Hand<R>) -> usize {
        let most = if self.member.is_ordered { 1 } else { (self.member.options.max_concurrency / 2).max(1) };
        most.saturating_sub(hand.ids.due())
    }

    /// Takes in hand the deferred ids that are due.
    async fn take_due_ids(&mut self, hand: &mut Hand<R>) -> Go<()> {
        let room = self.room_for_due(hand);
        if room == 0 || self.deferred.next_turn().is_none_or(|at| at > self.now()) {
            return Ok(());
        }
        let due = persist!(
            self,
            "reading deferred ids",
            self.due_ids(room, |id, taken| hand.turn(id, taken)).await
        );
        for (id, job, attempts) in due {
            hand.ids.offer_covered(&id, job, attempts);
        }
        Ok(())
    }

    /// Returns when the work on an id that has changed may begin; `None` means at once.
    fn debounced(&self) -> Option<Duration> {
        let debounce = self.member.options.debounce;
        (!debounce.is_zero()).then(|| self.now().saturating_add(debounce))
    }

    /// Takes the rows of a page, except those that are finished, not wanted, or covered by keys.
    async fn take_page(&mut self, hand: &mut Hand<R>, page: Page<R>) -> Go<()> {
        let (due, knowledge) = (self.debounced(), self.knowledge());
        for (place, (row, len)) in page.rows.into_iter().enumerate() {
            let key = page.keys.get(&place);
            if let Some(key) = key {
                self.is_dirty = true;
                // The row was finished, but a crash came before the checkpoint was saved; or a newer row of the id is finished.
                if key.due == Due::Never && row.sequence() <= key.done.position() {
                    continue;
                }
                if key.due != Due::Never {
                    self.pass_by(hand, &row, key).await?;
                    continue;
                }
            }
            let since = key.map_or(knowledge, |key| key.done);
            if !row.is_wanted(&self.member.filter, &since) {
                continue;
            }
            if self.member.is_ordered {
                match key {
                    // The commit of a batch writes no keys, so an id that has one is worked on as a deferred id.
                    Some(key) => self.pass_by(hand, &row, key).await?,
                    None => self.ordered.push(row, len),
                }
                continue;
            }
            let id = Bytes::copy_from_slice(row.id());
            let has_ended = hand.ids.contains(&id) && hand.ends_work(&id, &row);
            let at = row.sequence();
            let job = Job::new(Some(Arc::new(row)), since, key);
            if hand.ids.offer(&id, at, job, due, newest) && has_ended {
                self.cancel_run(hand, &id).await?;
            }
        }
        self.has_read(page.to, (page.more, page.is_end));
        Ok(())
    }

    /// Skips a row that the key of its id covers.
    async fn pass_by(&mut self, hand: &mut Hand<R>, row: &R, key: &DeferredRow) -> Go<()> {
        let id = &Bytes::copy_from_slice(row.id());
        let has_ended = row.is_tombstone() || key.instance.is_some() && key.instance != row.instance();
        // A key made by an operator's request names no instance, so the instance of the running work is compared as well.
        let running = hand.ids.get(id).filter(|entry| entry.is_running());
        if running.is_some_and(|entry| entry.work.end.is_some()) {
            // That run only handles the end of a database. The row is worked on afterwards, whatever it shows.
            return Ok(());
        }
        if running.is_some() && (has_ended || hand.ends_work(id, row)) {
            return self.cancel_run(hand, id).await;
        }
        if has_ended || key.due == Due::Never {
            hand.ids.remove(id);
            let is_wanted = |since| row.is_wanted(&self.member.filter, since);
            let is_end = row.is_tombstone() && (is_wanted(&key.done) || is_wanted(&self.start));
            let passed = row.instance().filter(|_| is_end).map(|ended| (row.sequence(), ended));
            persist!(self, "deferring an id", self.change_key(id, &KeyChange::Due(passed)).await);
        }
        Ok(())
    }

    /// Cancels the run of `id`, because its database has ended, and defers the id without a pause.
    async fn cancel_run(&mut self, hand: &mut Hand<R>, id: &Bytes) -> Go<()> {
        let Some(ended) = hand.run_of(id).and_then(|number| hand.cancel(number)) else { return Ok(()) };
        ended.run.close();
        let work = &hand.ids.get(id).expect("it runs").work;
        let (job, defer) = (&Job { row: work.row.clone(), ..*work }, Some(Duration::ZERO));
        let cancelled = KeyChange::Failed { job, attempts: 0, error: "", defer };
        if persist!(self, "cancelling work", self.change_key(id, &cancelled).await) != Changed::Deferred {
            // The work was already finished. The newer row still has to be worked on.
            let covered = KeyChange::Covered { job, attempts: 0 };
            persist!(self, "deferring an id", self.change_key(id, &covered).await);
        }
        // The id is removed only now that a key covers it: until then it had to hold the checkpoint back.
        hand.ids.remove(id);
        self.is_dirty = true;
        Ok(())
    }

    fn start_runs(&mut self, hand: &mut Hand<R>) {
        let now = self.now();
        if !self.member.is_ordered {
            while let Some(id) = hand.ids.start(now, self.member.options.max_concurrency) {
                self.start_id(hand, id);
            }
        } else if hand.runs.is_empty() {
            // Rows and deferred ids take turns.
            let has_rows = self.ordered.has_rows();
            if !(has_rows && self.ordered.was_deferred)
                && let Some(id) = hand.ids.start(now, 1)
            {
                self.ordered.was_deferred = true;
                self.start_id(hand, id);
            } else if has_rows {
                self.start_batch(hand);
            }
        }
    }

    fn start_id(&self, hand: &mut Hand<R>, id: Bytes) {
        let entry = hand.ids.get(&id).expect("it was just started");
        let job = &entry.work;
        let (row, gone) = (job.row.clone(), job.gone());
        let run = Run::new(&self.held, Scope::Id(job.scope(&id)), job.since, entry.attempts);
        let call = if self.member.is_ordered {
            let gone = gone.filter(|_| row.is_none()).map(|gone| (id, gone));
            let rows = row.iter().map(|row| R::clone(row)).collect();
            Call::Rows(Batch { rows, gone, run: Arc::clone(&run) })
        } else {
            Call::Id(Work { id, row, gone, run: Arc::clone(&run) })
        };
        self.spawn(hand, run, call, (1, None));
    }

    fn start_batch(&mut self, hand: &mut Hand<R>) {
        let after = self.watermark(hand);
        let (rows, failed, is_last) = self.ordered.start(&self.member.options);
        let (len, last) = (rows.len(), rows[rows.len() - 1].sequence());
        let only = (len == 1).then(|| Arc::new(rows[0].clone()));
        let to = self.knowledge_at(if is_last { self.read } else { last });
        let run = Run::new(&self.held, Scope::Rows { after, last, to }, self.knowledge(), failed);
        let call = Call::Rows(Batch { rows, gone: None, run: Arc::clone(&run) });
        self.spawn(hand, run, call, (len, only));
    }

    fn spawn(&self, hand: &mut Hand<R>, run: Arc<Run>, call: Call<R>, (len, only): (usize, Option<Arc<R>>)) {
        let (number, now) = (hand.next_run, self.now());
        hand.next_run += 1;
        let options = &self.member.options;
        // Only ids are deferred if they take long. A batch holds the checkpoint back, however long it runs.
        let defers = options.failure == FailurePolicy::Defer && run.id().is_some();
        let pause =
            if defers { options.stall_limit.min(options.checkpoint_interval) } else { options.stall_limit };
        let check = now.saturating_add(pause);
        hand.next_check = Some(hand.next_check.map_or(check, |next| next.min(check)));
        let handler = Arc::clone(&hand.handler);
        let (consumer, shard) = (&self.held.name, self.held.shard.0);
        let span = tracing::debug_span!("consumer_run", %consumer, shard, attempt = run.attempt());
        // `call` itself may panic too, so it is called inside the future.
        let called = async move { handler.call(call).await };
        let canceller = hand.tasks.spawn(number, called.instrument(span));
        hand.runs.insert(number, UnderWay { run, canceller, len, only });
    }

    /// Accounts for the end of a run.
    async fn run_ended(&mut self, hand: &mut Hand<R>, number: u64, joined: Joined<HandlerResult>) -> Go<()> {
        // A cancelled run was already accounted for.
        let Some(ended) = hand.runs.remove(&number) else { return Ok(()) };
        ended.run.close();
        let (error, is_panic) = match joined {
            Ok(Ok(())) => {
                let Some(id) = ended.run.id() else {
                    self.batch_is_done(ended.len);
                    return Ok(());
                };
                self.held.context.stats.consumer_rows.add(1);
                return self.finish_in_hand(hand, id, ended.run.has_committed()).await;
            }
            Ok(Err(error)) => (chain(&*error), false),
            Err(Ended::Panicked(text)) => (format!("panic: {text}"), true),
            Err(Ended::Cancelled) => ("it was cancelled".to_owned(), false),
        };
        self.held.context.stats.consumer_panics.add(is_panic.into());
        self.run_failed(hand, ended, Failure { error, is_panic, is_stall: false }).await
    }

    async fn run_failed(&mut self, hand: &mut Hand<R>, ended: UnderWay<R>, failure: Failure) -> Go<()> {
        ended.run.close();
        match &ended.run.scope {
            Scope::Id(scope) => self.id_failed(hand, &scope.id, &failure).await?,
            Scope::Rows { after, last, .. } => {
                self.batch_failed(hand, &ended, (*after, *last), &failure).await?;
            }
        }
        // After a panic, the state of a handler for batches is unknown, so the handler is replaced.
        if failure.is_panic && self.member.is_ordered { Err(End::Panicked.into()) } else { Ok(()) }
    }

    fn batch_is_done(&mut self, rows: usize) {
        self.ordered.done();
        self.is_dirty = true;
        self.held.context.stats.consumer_rows.add(rows as u64);
    }

    async fn batch_failed(
        &mut self,
        hand: &mut Hand<R>,
        ended: &UnderWay<R>,
        (after, last): (Sequence, Sequence),
        failure: &Failure,
    ) -> Go<()> {
        let UnderWay { run, len, only, .. } = ended;
        let attempts = run.attempt();
        self.report(None, attempts, &failure.error);
        let stored = persist!(self, "ending failed work", run.revoke_rows().await);
        let stored = stored.map_or(Sequence::MAX, |stored| stored.position());
        if stored >= last {
            // The transaction of the run was committed, even though the run failed.
            self.batch_is_done(*len);
            return Ok(());
        }
        let again_from = stored.max(after);
        if stored > after {
            self.ordered.forget();
        } else {
            let options = &self.member.options;
            let pause = options.backoff().pause(attempts, self.env());
            if self.ordered.is_given_up(attempts, failure.is_stall, options) {
                let row = only.as_ref().expect("rows of several are tried one by one");
                let id = Bytes::copy_from_slice(row.id());
                let job = Job::new(Some(Arc::clone(row)), self.knowledge(), None);
                let (error, defer) = (&failure.error[..], Some(pause));
                let failed = KeyChange::Failed { job: &job, attempts, error, defer };
                persist!(self, "deferring an id", self.change_key(&id, &failed).await);
                self.held.context.stats.consumer_deferred.add(1);
                self.is_dirty = true;
                self.ordered.done();
                return Ok(());
            }
            self.holds(only.as_ref().map(|row| row.id()), last, attempts, &failure.error);
            self.ordered.resume_at = self.now().saturating_add(pause);
        }
        self.read_again_from(again_from);
        (hand.is_at_end, hand.is_closed) = (false, false);
        Ok(())
    }

    /// Accounts for finished work on `id`. If `has_committed` is set, the key of the id may already say that the work is finished.
    async fn finish_in_hand(&mut self, hand: &mut Hand<R>, id: &Bytes, has_committed: bool) -> Go<()> {
        let entry = hand.ids.get(id).expect("it has run");
        let job = Job { row: entry.work.row.clone(), ..entry.work };
        // The work may have been requested again while it ran.
        if job.is_covered || self.deferred.may_have_key(id) {
            let finished = KeyChange::Finished { job: &job };
            persist!(self, "saving that work is finished", self.change_key(id, &finished).await);
        } else if has_committed && let Some(done) = sequence_of(job.row.as_ref()) {
            self.deferred.note_finished(id, done);
        }
        self.is_dirty = true;
        if hand.ids.done(id, self.debounced()) {
            let next = &mut hand.ids.get_mut(id).expect("a newer row waits").work;
            if let Some(done) = sequence_of(job.row.as_ref()) {
                next.since = Cursor::from(done);
            }
            next.worked = left_instance(job.row.as_deref());
        }
        Ok(())
    }

    async fn id_failed(&mut self, hand: &mut Hand<R>, id: &Bytes, failure: &Failure) -> Go<()> {
        let entry = hand.ids.get_mut(id).expect("it has run");
        entry.attempts = entry.attempts.saturating_add(1);
        let (attempts, is_covered) = (entry.attempts, entry.is_covered());
        self.report(Some(id), attempts, &failure.error);
        let options = &self.member.options;
        let pause = options.backoff().pause(attempts, self.env());
        // The pauses of an id must not hold the checkpoint back for longer than a checkpoint interval.
        let until = self.now().saturating_add(pause);
        let is_long =
            entry.began.is_some_and(|began| until.saturating_sub(began) > options.checkpoint_interval);
        let is_exhausted = failure.is_stall || is_long || attempts >= options.attempts_max;
        let is_deferred = is_covered || options.failure == FailurePolicy::Defer && is_exhausted;
        let job = &hand.ids.get(id).expect("it has run").work;
        let (error, defer) = (&failure.error[..], is_deferred.then_some(pause));
        let failed = KeyChange::Failed { job, attempts, error, defer };
        match persist!(self, "ending failed work", self.change_key(id, &failed).await) {
            Changed::Done => return self.finish_in_hand(hand, id, true).await,
            Changed::Open => {
                let last = sequence_of(hand.ids.get(id).expect("it has run").work.row.as_ref());
                self.holds(Some(id), last.unwrap_or(Sequence::MIN), attempts, error);
                hand.ids.retry(id, until, newest);
            }
            Changed::Deferred => {
                self.held.context.stats.consumer_deferred.add(u64::from(!is_covered));
                self.is_dirty = true;
                hand.ids.remove(id);
            }
        }
        Ok(())
    }

    /// Ends runs that have stalled, and writes keys for the ids of runs that are taking long.
    async fn check_runs(&mut self, hand: &mut Hand<R>) -> Go<()> {
        let now = self.now();
        let (stall_limit, long) = (self.member.options.stall_limit, self.member.options.checkpoint_interval);
        let defers = self.member.options.failure == FailurePolicy::Defer;
        let (mut stalled, mut grown) = (Vec::new(), Vec::new());
        let mut next: Option<Duration> = None;
        for (number, under_way) in &hand.runs {
            let stalls_at = under_way.run.progressed_at().saturating_add(stall_limit);
            if stalls_at <= now {
                stalled.push(*number);
                continue;
            }
            let mut at = stalls_at;
            if let Some(id) = under_way.run.id()
                && defers
                && let Some(entry) = hand.ids.get(id).filter(|entry| !entry.is_covered())
            {
                let grows_at = entry.began.unwrap_or(now).saturating_add(long);
                if grows_at <= now {
                    grown.push(id.clone());
                } else {
                    at = at.min(grows_at);
                }
            }
            next = Some(next.map_or(at, |next| next.min(at)));
        }
        hand.next_check = next;
        for number in stalled {
            let Some(ended) = hand.cancel(number) else { continue };
            let error = format!("it made no progress for {stall_limit:?}");
            self.run_failed(hand, ended, Failure { error, is_panic: false, is_stall: true }).await?;
        }
        for id in grown {
            let entry = hand.ids.get(&id).expect("it runs");
            let covered = KeyChange::Covered { job: &entry.work, attempts: entry.attempts };
            persist!(self, "deferring an id that runs for long", self.change_key(&id, &covered).await);
            self.is_dirty = true;
            hand.ids.cover(&id);
            let job = &mut hand.ids.get_mut(&id).expect("it runs").work;
            job.is_covered = true;
        }
        Ok(())
    }

    /// Waits for the runs to end, for at most half of the handover time or the stall limit, whichever is shorter, and saves the checkpoint.
    async fn stop_runs(&mut self, hand: &mut Hand<R>) -> Result<()> {
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
            if let Err(Halt::Failed(error)) = self.run_ended(hand, number, joined).await {
                return Err(error);
            }
        }
        // The work of the remaining runs is repeated elsewhere, or in the successors of the shard.
        for under_way in hand.runs.values() {
            under_way.run.close();
        }
        hand.tasks.cancel_all();
        self.finished_up_to(self.watermark(hand));
        self.ordered.forget();
        self.save().await
    }
}
