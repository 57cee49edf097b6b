//! [`Reader`]: the one path from the tail to a subscriber. It follows the ring through the log of its pattern, and filters row by row if
//! the pattern does not decide. For rows that the ring does not hold, at its start or after falling behind, it reads the feed.
//!
//! # States
//!
//! A batch in progress ([`Step`]) is finished first. Then the reader continues at its [`ReadsFrom`]:
//!
//! | where | continues when | with |
//! |---|---|---|
//! | *documents* | the design documents of a batch were read | the batch is returned |
//! | *choosing* | the filter has judged all rows of a batch | *documents*, or the batch is returned |
//! | on the feed | a page was read | *choosing*; after the last page (`is_at_end`), `CaughtUp` if it began with nothing, then the ring |
//! | | the read failed, or returned `Expired` | the feed, at the same cursor, or from nothing |
//! | on the ring | there is an entry | *choosing*; its place is then after the entry, or after a page of a round |
//! | | the entry has left the ring | the feed; a reader that skips returns `Lagged` and continues where the ring begins |
//!
//! # A cursor never overtakes its rows
//!
//! 1. The cursor covers the returned rows, and no other wanted row. It moves only in [`Reader::deliver`] (a batch is returned, or has no
//!    wanted row), in [`Reader::poll_documents`] (the batch is returned with its design documents), with `CaughtUp` (all earlier pages were
//!    returned), in [`Reader::skip`] (`Lagged` reports the rows in between), and in [`Reader::rest_at`], which moves it to a position that
//!    no undelivered wanted row precedes. Such a position is the end of the ring, if that was read before the log, the log had no entry,
//!    and nothing is in progress; or the beginning of the next entry, if the reader has read that entry or was taken off the list by it.
//! 2. The cursor never moves back, except after `Expired`. Where the ring knows more than the cursor, the two are joined
//!    ([`Cursor::joined`]), which keeps the larger knowledge and the later position.
//! 3. A reader on the ring knows everything up to some sequence. A reader that began with nothing, or is in the middle of reading the feed,
//!    reads the feed to its end first.
//! 4. Within a round the reader's knowledge stays where it was when the round began, because rows of the round stand in for older rows that
//!    the reader has passed. The reader may leave the ring at any time: a reader that continues from its cursor reads the feed.
//! 5. Rows that wait in the ring are referenced, not copied: an idle reader holds at most one batch.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::{FutureExt, StreamExt, TryStreamExt, future::BoxFuture, stream};
use parking_lot::Mutex;

use super::{
    delivery::{
        Batch, BatchItem, Content, DeliveryBatch, DeliveryRef, Indices, Item, Matched, batch_len, of_mark,
    },
    log::{Empty, Entry, SubscriberState},
    newest::{Newest, Page},
    patterns::Pattern,
    shared::Shared,
};
use crate::{
    base::{
        backoff::FAILURE_PAUSE,
        cursor::{Cursor, Knowledge, Start},
        encoding::Sequence,
        error::{Error, Result},
        event::{DbName, EventKind},
        filter::Filter,
        tasks::{Ended, Task},
    },
    state::notification_feed::{ChangedDdocs, NotificationPage},
};

/// How many rows the filter judges per unit of the task's budget. A task without budget yields to other tasks.
const ROWS_PER_TURN: usize = 32;

const DDOC_READS_MAX: usize = 8;

/// The start and the options of a subscription.
#[derive(Debug)]
pub(super) struct Order {
    pub filter: Filter,
    pub start: Start,
    /// Whether the feed was just read up to `start`, which is therefore not ahead of the store.
    pub is_caught_up: bool,
    pub skips: bool,
    /// The minimum time between the starts of two rounds; `None` to deliver at once.
    pub pace: Option<Duration>,
    pub ddocs: bool,
}

impl Order {
    pub fn new(filter: Filter) -> Self {
        Self {
            ddocs: filter.ddocs.is_some(),
            filter,
            start: Start::Now,
            is_caught_up: false,
            skips: false,
            pace: None,
        }
    }
}

enum Step {
    Idle,
    Choosing(Box<Choice>),
    Documents(Box<(DeliveryBatch, DdocRead)>),
}

/// A batch whose wanted rows are being chosen. It survives a panic in the predicate, and the row that caused the panic is not judged again.
struct Choice {
    matched: Matched,
    since: Cursor,
    judged: usize,
    passed: Indices,
}

struct Pace {
    every: Duration,
    /// Completes when `every` has passed since the last round began.
    pause: Option<BoxFuture<'static, ()>>,
}

/// Where a reader continues.
enum ReadsFrom {
    /// In the ring, at the batch with this number.
    Ring(u64),
    Feed(Box<OnFeed>),
}

/// The state of a reader that reads the feed.
#[derive(Default)]
struct OnFeed {
    /// The page that is being read.
    load: Option<Load>,
    /// Whether the last page was read.
    is_at_end: bool,
    has_failed: bool,
    look_up: Option<LookUp>,
}

/// Progress in looking up exact names, which the reader does instead of reading the whole feed.
struct LookUp {
    count: usize,
    /// The end of the feed when the first name was looked up.
    to: Sequence,
    /// Whether a name had a row after `to`. If so, the feed is read from there once all names have been looked up.
    is_outrun: bool,
}

#[expect(clippy::struct_excessive_bools, reason = "each is independent of the others")]
pub(super) struct Reader {
    pub shared: Arc<Shared>,
    pub state: Arc<SubscriberState>,
    filter: Filter,
    skips: bool,
    pace: Option<Box<Pace>>,
    ddocs: bool,
    pattern: Arc<Pattern>,
    /// The newest rows of the pattern, while the reader takes a round or is slow.
    newest: Option<Arc<Mutex<Newest>>>,
    is_in_round: bool,
    /// Whether the subscription has returned its last item.
    pub is_over: bool,
    cursor: Cursor,
    place: ReadsFrom,
    step: Step,
}

impl Reader {
    pub fn new(shared: Arc<Shared>, order: Order) -> Self {
        let Order { filter, skips, ddocs, .. } = order;
        let pace = order.pace.map(|every| Box::new(Pace { every, pause: None }));
        let (cursor, pattern) = (shared.cursor_at(order.start), shared.join(&filter));
        let state = shared.enter();
        let begins = place_after(&shared, cursor, order.is_caught_up);
        Self {
            shared,
            state,
            filter,
            skips,
            pace,
            ddocs,
            pattern,
            newest: None,
            is_in_round: false,
            is_over: false,
            cursor,
            place: begins,
            step: Step::Idle,
        }
    }

    /// Returns the cursor: all wanted rows before it have been returned. If no row is waiting, the cursor is the end of the ring.
    pub fn cursor(&mut self) -> Cursor {
        if let (&ReadsFrom::Ring(batch_number), Step::Idle) = (&self.place, &self.step) {
            // Read the end before the log, so that the log has all batches before that end.
            let end = self.shared.ring.read().end;
            if !self.pattern.log.has_entries(batch_number) {
                self.place = ReadsFrom::Ring(batch_number.max(end.batch_number));
                self.rest_at(end.cursor);
            }
        }
        self.cursor
    }

    /// Returns the order of this reader with another filter. The new order begins at `cursor`, and starts the current reading over, because
    /// the new filter may want rows that this one rejected.
    pub fn order_with(&self, filter: Filter, cursor: Cursor) -> Order {
        Order {
            start: cursor.rewound().into(),
            skips: self.skips,
            pace: self.pace.as_ref().map(|pace| pace.every),
            ddocs: self.ddocs || filter.ddocs.is_some(),
            ..Order::new(filter)
        }
    }

    /// Returns the next item. The caller must check whether the subscriber has ended.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<BatchItem> {
        self.state.waker.register(context.waker());
        let polled = self.poll(context);
        if polled.is_pending() && self.state.is_ended() {
            context.waker().wake_by_ref();
        }
        polled
    }

    /// Does the work of [`Reader::poll_next`] once the waker is registered.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<BatchItem> {
        loop {
            let item = match &mut self.step {
                Step::Documents(_) => ready!(self.poll_documents(context)),
                Step::Choosing(_) => ready!(self.poll_choice(context)).map(Item::Delivery),
                Step::Idle => match self.place {
                    ReadsFrom::Feed(_) => ready!(self.poll_feed(context)),
                    ReadsFrom::Ring(batch_number) => match ready!(self.poll_ring(batch_number, context)) {
                        Ok(batch) => batch.map(Item::Delivery),
                        Err(Empty::Behind) => self.fall_behind(),
                        Err(Empty::Nothing) => return Poll::Pending,
                    },
                },
            };
            if let Some(item) = item {
                return Poll::Ready(item);
            }
        }
    }

    /// Continues on the feed: reads the next page, or, after the last one, returns `CaughtUp` or leaves the feed.
    fn poll_feed(&mut self, context: &mut Context<'_>) -> Poll<Option<BatchItem>> {
        let ReadsFrom::Feed(feed) = &mut self.place else { return Poll::Ready(None) };
        if feed.is_at_end && self.cursor.knew_nothing() {
            let at = self.cursor.position();
            self.cursor = at.into();
            return Poll::Ready(Some(Item::CaughtUp { at }));
        }
        if feed.is_at_end {
            self.place = place_after(&self.shared, self.cursor, true);
            return Poll::Ready(None);
        }
        let Some(load) = &mut feed.load else {
            let lagged = self.skip(false);
            if lagged.is_none() {
                self.begin_load();
            }
            return Poll::Ready(lagged);
        };
        let page = ready!(load.poll_unpin(context));
        feed.load = None;
        let panicked = |ended: Ended| Err(Error::corrupt("page", ended.to_string()));
        Poll::Ready(self.receive(page.unwrap_or_else(panicked)))
    }

    /// Takes the next rows from the ring, once the next round may begin.
    fn poll_ring(
        &mut self,
        batch_number: u64,
        context: &mut Context<'_>,
    ) -> Poll<Result<Option<DeliveryBatch>, Empty>> {
        if let Some(Pace { pause, .. }) = self.pace.as_deref_mut()
            && let Some(paused) = pause
            && !self.is_in_round
        {
            // Check the log only once: a row that arrived between two checks would be taken during the pause.
            if self.pattern.log.wait(batch_number, &self.state) {
                return Poll::Ready(Err(Empty::Nothing));
            }
            ready!(paused.as_mut().poll(context));
            *pause = None;
        }
        // Let other tasks of the thread run, however many rows wait.
        ready!(tokio::task::coop::poll_proceed(context)).made_progress();
        Poll::Ready(self.take(batch_number))
    }

    /// Takes the next batch from the ring, or a page of a round.
    fn take(&mut self, batch_number: u64) -> Result<Option<DeliveryBatch>, Empty> {
        let read = self.pattern.log.read_or_wait(batch_number, &self.state);
        if self.is_in_round {
            // The cursor must not move here, because rows before the next entry may have newer rows, which are not delivered yet.
            return self.take_round(read?.number, self.cursor);
        }
        if matches!(read, Err(Empty::Behind)) {
            self.rest_at(of_mark(self.pattern.log.taken_at(&self.state)).into());
        }
        let Entry { number, content: matched, rows_after } = read?;
        // The reader may be on the waiting list even though it holds this entry: from now on a later entry may take it off that list.
        self.rest_at(matched.batch.since);
        let since = self.cursor;
        let is_slow = rows_after > 0 && self.is_slow(matched.len() as u64 + rows_after);
        if self.pace.is_some() || is_slow && self.has_superseded(number, since)? {
            return self.take_round(number, since);
        }
        if rows_after == 0 {
            self.newest = None;
        }
        self.place = ReadsFrom::Ring(number + 1);
        Ok(self.choose_among(matched, since, true))
    }

    /// Whether `rows`, the number of waiting rows, exceeds a page, or the number of exact names that the filter wants if that is smaller.
    fn is_slow(&self, rows: u64) -> bool {
        let page = self.shared.options.page_rows_max;
        let names = self.filter.exact().map_or(page, |names| names.len().min(page));
        rows > names as u64
    }

    /// Whether any row that waits from batch `number` on has a newer row. Otherwise a round would deliver every waiting row anyway.
    fn has_superseded(&mut self, number: u64, since: Cursor) -> Result<bool, Empty> {
        let (pattern, shared) = (&self.pattern, &self.shared);
        if shared.ring.read().superseded <= since.position() {
            return Ok(false);
        }
        let mut newest = self.newest.get_or_insert_with(|| shared.patterns.lock().newest(pattern)).lock();
        let begin = shared.ring.read().begin;
        newest.read(&pattern.log, number, begin)?;
        Ok(newest.superseded > Some(since.position()))
    }

    /// Takes a page of the rows that wait from batch `number` on: the newest row of each database. An older row is also kept if the newer
    /// one no longer shows a deletion, because the janitor deleted the tombstone in between.
    fn take_round(&mut self, number: u64, since: Cursor) -> Result<Option<DeliveryBatch>, Empty> {
        let (pattern, shared) = (&self.pattern, &self.shared);
        let mut newest = self.newest.get_or_insert_with(|| shared.patterns.lock().newest(pattern)).lock();
        let begin = shared.ring.read().begin;
        newest.read(&pattern.log, number, begin)?;
        let Page { rows, next, end, more } = newest.page(since.position(), shared.batch_rows_max);
        drop(newest);
        (self.place, self.is_in_round) = (ReadsFrom::Ring(next), more);
        let end = end.unwrap_or(since);
        let last = rows.last().filter(|_| more).map(|row| row.sequence);
        if !more {
            self.newest = None;
        }
        let readable = end.readable().unwrap_or(end.position());
        let batch = Batch::new(rows, since, last.unwrap_or(end.position()), readable);
        Ok(self.choose_among(Matched::all(batch), since, true))
    }

    /// Delivers the wanted rows of `matched`, unless the filter has to judge each row. With `by_pattern`, the pattern has matched them.
    fn choose_among(
        &mut self,
        mut matched: Matched,
        since: Cursor,
        by_pattern: bool,
    ) -> Option<DeliveryBatch> {
        // The feed may have been read ahead of the tail: rows up to the cursor have already been delivered.
        matched.drop_up_to(since.position());
        if self.filter.passes_all(by_pattern) {
            return self.deliver(matched, since);
        }
        let passed = Indices::new();
        self.step = Step::Choosing(Box::new(Choice { matched, since, judged: 0, passed }));
        None
    }

    fn poll_choice(&mut self, context: &mut Context<'_>) -> Poll<Option<DeliveryBatch>> {
        let Step::Choosing(choice) = &mut self.step else { return Poll::Ready(None) };
        while choice.judged < choice.matched.len() {
            if choice.judged % ROWS_PER_TURN == 0 {
                ready!(tokio::task::coop::poll_proceed(context)).made_progress();
            }
            let (row, index) = (choice.matched.row(choice.judged), choice.matched.index_of(choice.judged));
            // Count the row as judged first, so that it is not judged again if the predicate panics.
            choice.judged += 1;
            if self.filter.passes(row, &choice.since) {
                choice.passed.push(index);
            }
        }
        let Step::Choosing(choice) = std::mem::replace(&mut self.step, Step::Idle) else {
            return Poll::Ready(None);
        };
        let Choice { matched, since, passed, .. } = *choice;
        Poll::Ready(self.deliver(Matched { chosen: Some(passed), ..matched }, since))
    }

    /// Delivers `rows`. Returns `None` if there are none, or if their design documents must be read first.
    fn deliver(&mut self, rows: Matched, since: Cursor) -> Option<DeliveryBatch> {
        if rows.len() == 0 {
            self.cursor = rows.batch.cursor_after(since);
            return None;
        }
        if let Some(pace) = &mut self.pace {
            // A round begins here, unless one is in progress.
            pace.pause.get_or_insert_with(|| self.shared.context.env().sleep(pace.every));
        }
        let filters = self.filter.set_and_kinds();
        let batch = DeliveryBatch::new(Content { rows, since, filters, ddocs: None });
        if self.ddocs {
            let read = read_ddocs(&self.shared, batch.clone(), false);
            self.step = Step::Documents(Box::new((batch, read)));
            return None;
        }
        self.cursor = batch.cursor();
        Some(batch)
    }

    /// Completes once the batch's design documents have been read: with the batch, with a failure, or with `None` if no row is wanted.
    fn poll_documents(&mut self, context: &mut Context<'_>) -> Poll<Option<BatchItem>> {
        let Step::Documents(documents) = &mut self.step else { return Poll::Ready(None) };
        let (batch, read) = &mut **documents;
        let ddocs = match ready!(read.as_mut().poll(context)) {
            Ok(ddocs) => ddocs,
            Err(error) => {
                *read = read_ddocs(&self.shared, batch.clone(), true);
                return Poll::Ready(Some(Item::Failed(error)));
            }
        };
        let filter = &self.filter;
        let batch = batch.with_ddocs(ddocs, |delivery| {
            // All rows have passed the filter. If the predicate panics now, deliver the row, because it may be wanted.
            catch_unwind(AssertUnwindSafe(|| is_wanted(filter, delivery))).unwrap_or(true)
        });
        self.step = Step::Idle;
        self.cursor = batch.cursor();
        Poll::Ready((batch.len() > 0).then_some(Item::Delivery(batch)))
    }

    /// Joins `cursor` into the reader's cursor. There must be no undelivered wanted row before `cursor`.
    fn rest_at(&mut self, cursor: Cursor) {
        self.cursor = self.cursor.joined(cursor);
    }

    /// Skips, or continues on the feed, because the ring no longer holds the next rows.
    fn fall_behind(&mut self) -> Option<BatchItem> {
        let is_in_round = std::mem::take(&mut self.is_in_round);
        self.newest = None;
        let lagged = self.skip(is_in_round);
        if lagged.is_none() {
            self.place = ReadsFrom::Feed(Box::default());
            self.begin_load();
        }
        lagged
    }

    /// Continues in the ring if the reader skips missed rows. It cannot skip if it began with nothing or is in the middle of reading the
    /// feed, because rows then have older news. It does not skip if it looks up names, which is cheap however many rows it has missed.
    fn skip(&mut self, is_in_round: bool) -> Option<BatchItem> {
        let Knowledge::UpTo(from) = self.cursor.knowledge() else { return None };
        let is_reading = !is_in_round && self.cursor != from.into();
        if !self.skips || is_reading || self.filter.exact().is_some() {
            return None;
        }
        let (begin, mut to) = self.shared.ring.read().begin;
        let mut batch_number = begin;
        if matches!(self.place, ReadsFrom::Ring(own) if own >= begin) {
            // The ring has the rows, but the log of the pattern began later.
            return None;
        }
        if self.pattern.log.begin() > begin {
            let end = self.shared.ring.read().end;
            (batch_number, to) = (end.batch_number, end.cursor.position());
        }
        // Reading the feed may have taken the reader ahead of the tail.
        if to <= self.cursor.position() {
            return None;
        }
        (self.place, self.cursor) = (ReadsFrom::Ring(batch_number), to.into());
        Some(Item::Lagged { from, to })
    }

    /// Starts to read the next page of the feed.
    fn begin_load(&mut self) {
        let ReadsFrom::Feed(feed) = &mut self.place else { return };
        let looked_up = feed.look_up.as_ref().map_or(0, |look_up| look_up.count);
        let names = self.filter.exact().and_then(|names| names.get(looked_up..)).unwrap_or_default();
        let names = names.iter().take(self.shared.batch_rows_max).cloned().collect();
        feed.load = Some(load(&self.shared, self.cursor, names, feed.has_failed));
    }

    /// Receives a page of the feed, and delivers its wanted rows.
    fn receive(&mut self, page: Result<NotificationPage>) -> Option<BatchItem> {
        let ReadsFrom::Feed(feed) = &mut self.place else { return None };
        feed.has_failed = page.is_err();
        let NotificationPage { mut rows, next, mut to, mut more } = match page {
            Ok(page) => page,
            Err(Error::Expired { horizon }) => {
                (feed.look_up, self.cursor) = (None, Cursor::BEGINNING);
                return Some(Item::Expired { horizon });
            }
            Err(error) => return Some(Item::Failed(error)),
        };
        let began = next.readable().unwrap_or(to);
        let since = if self.cursor.knew_nothing() { self.cursor.begin(began) } else { self.cursor };
        // Several transactions look up the names, and a later one may have read more.
        let readable = rows.last().map_or(began, |row| row.sequence.max(began));
        let names = self.filter.exact().unwrap_or_default().len();
        let mut look_up = feed.look_up.take().unwrap_or(LookUp { count: 0, to, is_outrun: false });
        if look_up.count < names {
            look_up.count = names.min(look_up.count + self.shared.batch_rows_max);
            let found = rows.len();
            rows.retain(|row| row.sequence <= look_up.to);
            look_up.is_outrun |= rows.len() < found;
            // Names that have not been looked up yet may have earlier rows.
            let is_last = look_up.count == names;
            to = if is_last { look_up.to } else { since.position() };
            more = !is_last || look_up.is_outrun;
        }
        feed.look_up = more.then_some(look_up);
        feed.is_at_end = !more;
        let readable = if more { readable } else { to };
        self.choose_among(Matched::all(Batch::new(rows, since, to, readable)), since, false)
            .map(Item::Delivery)
    }
}

/// Returns where a reader at `cursor` continues: in the ring if that has all later rows. With `may_be_ahead`, it may be past the tail.
fn place_after(shared: &Shared, cursor: Cursor, may_be_ahead: bool) -> ReadsFrom {
    let batch_number = match (cursor.knowledge(), cursor.readable()) {
        (Knowledge::UpTo(known), None) => shared.ring.read().batch_after(known, may_be_ahead),
        _ => None,
    };
    batch_number.map_or_else(|| ReadsFrom::Feed(Box::default()), ReadsFrom::Ring)
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.pattern.log.leave(&self.state);
        self.shared.patterns.lock().leave(&self.pattern);
        self.shared.exit(self.state.id);
    }
}

/// Whether `delivery` is wanted, given its changed design documents.
fn is_wanted(filter: &Filter, delivery: DeliveryRef<'_>) -> bool {
    let Some(wanted) = &filter.ddocs else { return true };
    delivery.may_be_any_ddoc()
        || delivery.ddocs().is_some_and(|ddocs| ddocs.iter().any(|(id, _)| wanted.contains(id)))
        || filter.wants_besides_ddocs(delivery.notification(), delivery.batch_since())
}

/// A read of the feed, in a task of its own: it holds one of a few permits, so it must finish even if the subscriber is not polled.
type Load = Task<Result<NotificationPage>>;

/// Reads the feed after `cursor` once a permit is free. If there are `names`, looks up their newest rows instead.
fn load(shared: &Arc<Shared>, cursor: Cursor, names: Vec<DbName>, has_failed: bool) -> Load {
    let closed = Arc::clone(shared);
    let read = read(Arc::clone(shared), cursor, names, has_failed);
    Task::spawn(async move {
        // Stop reading once all subscribers have ended.
        let until_closed = async {
            tokio::select! {
                biased;
                () = closed.closed() => None,
                page = read => Some(page),
            }
        };
        let page = Arc::clone(&closed).until_cut_off(until_closed).await.flatten();
        page.unwrap_or_else(|| Err(Error::NoSubscriber { subscriber: "reader".into() }))
    })
}

async fn read(
    shared: Arc<Shared>,
    cursor: Cursor,
    names: Vec<DbName>,
    has_failed: bool,
) -> Result<NotificationPage> {
    pause(&shared, has_failed).await;
    let _turn = shared.turns.acquire().await.expect("the semaphore is never closed");
    if !names.is_empty() {
        let (rows, to) = shared.feed.newest_after(&names, cursor).await?;
        return Ok(NotificationPage { rows, to, next: to.into(), more: false });
    }
    let mut page = shared.feed.page(cursor, shared.batch_rows_max).await?;
    let kept = batch_len(&page.rows, shared.batch_rows_max);
    if kept < page.rows.len() {
        page.rows.truncate(kept);
        page.next = page.next.begin(page.next.readable().unwrap_or(page.to));
        (page.to, page.more) = (page.rows[kept - 1].sequence, true);
    }
    Ok(page)
}

async fn pause(shared: &Shared, has_failed: bool) {
    if has_failed {
        shared.context.env().sleep(FAILURE_PAUSE).await;
    }
}

type DdocRead = BoxFuture<'static, Result<Vec<Arc<ChangedDdocs>>>>;

fn read_ddocs(shared: &Arc<Shared>, batch: DeliveryBatch, has_failed: bool) -> DdocRead {
    let shared = Arc::clone(shared);
    Box::pin(async move {
        pause(&shared, has_failed).await;
        let read = async |index: usize| {
            let delivery = batch.delivery(index);
            if !delivery.news().kinds().contains(EventKind::DdocUpdated) {
                return Ok(Arc::default());
            }
            shared.feed.ddocs(&delivery.notification().db(), *delivery.batch_since()).await.map(Arc::new)
        };
        stream::iter(0..batch.len()).map(read).buffered(DDOC_READS_MAX).try_collect().await
    })
}
