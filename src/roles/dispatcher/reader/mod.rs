//! [`Reader`]: the one way from the tail to a subscriber. It follows the ring, by the log of its pattern or row by row, and reads
//! the feed where the ring does not reach: at its start, and when it has fallen behind.
//!
//! What is delivered is always derived from a row and the reader's own [`Cursor`]; so it is right whichever way the row came,
//! and after a thousand coalesced updates as well as after one.
//!
//! # Invariants
//!
//! 1. The cursor covers what was returned, and nothing else that is wanted: it moves when a batch is returned, or when nothing of
//!    a batch is wanted.
//! 2. A reader on the ring knows everything up to some sequence. One that began with nothing, or is in the middle of a reading
//!    of the feed, reads the feed to its end first.
//! 3. What is waiting in the ring is referred to, not copied: a reader that rests holds at most one batch.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::{StreamExt, TryStreamExt, future::BoxFuture, stream};
use tokio::task::JoinHandle;

use super::{
    Shared, SubscriberId,
    batch::{BATCH_BYTES_MAX, Batch, Chosen, Deliveries, DeliveryBatch, Indices, Matched, of_mark},
    delivery::{DeliveryRef, Interruption},
    filter::Filter,
    log::{Found, Log, SubscriberState},
    pace::Pace,
    patterns::Pattern,
};
use crate::{
    base::{
        bugs::{Bug, is_on},
        cursor::{Cursor, Knowledge},
        encoding::Sequence,
        error::{Error, Result},
        event::{DbName, EventKind},
        notification::Notification,
    },
    state::notification_feed::ChangedDdocs,
};

/// How many rows that do not match are asked for before other tasks get their turn.
const ROWS_AT_ONCE: usize = 4_096;

/// The most databases of a round that are taken from the ring. A round of more is read from the feed, which has each once.
const ROUND_ROWS_MAX: usize = 256;

/// How many exact names one read of the feed looks up.
const LOOK_UPS_MAX: usize = 400;

/// How long after a failed read of the feed the next one begins.
const FAILURE_PAUSE: Duration = Duration::from_millis(100);

/// How many databases' design documents are read at once.
const DDOC_READS_MAX: usize = 8;

/// What a read of the feed has brought.
struct Page {
    /// The rows.
    rows: Vec<Arc<Notification>>,
    /// What could be read when the reading began.
    began: Sequence,
    /// Up to where it was read.
    to: Sequence,
    /// Whether there is more to read.
    more: bool,
    /// The last name that was looked up, if more names are left.
    last: Option<DbName>,
}

/// A read of the feed, in a task of its own: it has one of a few turns, and must come to its end although the subscriber
/// does something else meanwhile. Dropping it ends it.
struct Load(JoinHandle<Result<Page>>);

impl Drop for Load {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A batch of which the rows that are wanted are being chosen. It outlives a predicate that panics, which has then seen its row.
struct Choice {
    /// The batch.
    batch: Arc<Batch>,
    /// For whom: the cursor before the batch.
    since: Cursor,
    /// The rows of which the filter is still to be asked, by their indices, the last one first.
    left: Vec<u32>,
    /// Those that have passed.
    passed: Indices,
}

/// What taking from the ring has led to.
enum Took {
    /// These are delivered.
    Batch(DeliveryBatch),
    /// Nothing that is wanted, or not yet.
    Something,
    /// There is nothing, and the reader is woken by what comes next.
    Nothing,
    /// What follows has left the ring, or may have.
    Behind,
}

/// The rows of names that were looked up, by their positions, as far as they are ahead of where the look-up ends.
#[derive(Default)]
struct Ahead(HashMap<DbName, Sequence>);

impl Ahead {
    /// Whether it has `row`, or a newer one of its name.
    fn has(&self, row: &Notification) -> bool {
        self.0.get(&row.name).is_some_and(|at| *at >= row.sequence)
    }
}

/// How far the newest rows of exact names are looked up, which is done instead of reading the whole feed.
struct LookUp {
    /// The last name that was.
    last: DbName,
    /// What could be read when the first one was.
    began: Sequence,
}

/// A read of the design documents that have changed, for each delivery of a batch.
type DdocRead = BoxFuture<'static, Result<Vec<Arc<ChangedDdocs>>>>;

/// What a subscriber of a dispatcher asks for.
pub(super) struct Wish {
    /// What it wants.
    pub filter: Filter,
    /// Whether it would rather skip what it has missed than catch up.
    pub skips: bool,
    /// How often it is delivered something; `None` for at once.
    pub pace: Option<Box<Pace>>,
    /// Whether deliveries say which design documents have changed.
    pub ddocs: bool,
}

/// A subscriber, from where it stands on.
pub(super) struct Reader {
    /// The ring and the feed.
    shared: Arc<Shared>,
    /// Which subscriber.
    id: SubscriberId,
    /// How it is woken.
    state: Arc<SubscriberState>,
    /// What it asks for.
    wish: Wish,
    /// What it wanted before in the present reading, and up to where it was delivered that: not to be delivered again.
    before: Vec<(Filter, Sequence)>,
    /// The pattern whose log it follows; `None` if it walks the ring.
    pattern: Option<Arc<Pattern>>,
    /// Where it stands.
    cursor: Cursor,
    /// Its place in the ring; `None` while the feed is to be read.
    place: Option<u64>,
    /// Whether the feed was read to its end, so that the ring may have what follows.
    is_at_end: bool,
    /// A read of the feed that is under way.
    load: Option<Load>,
    /// Whether the last read has failed, so that the next one waits a little.
    has_failed: bool,
    /// The names that are looked up, if it wants exact names and the feed is to be read.
    look_up: Option<Box<LookUp>>,
    /// What it was delivered ahead of where its look-up ends.
    ahead: Option<Box<Ahead>>,
    /// The batch of which rows are being chosen.
    choice: Option<Box<Choice>>,
    /// A batch whose design documents are being read.
    in_hand: Option<Box<(DeliveryBatch, Option<DdocRead>)>>,
    /// Where its first scan was complete, if it is still to be said.
    synced: Option<Sequence>,
}

impl Reader {
    /// A subscriber at `cursor`, up to which the feed was just read if it `is_caught_up`.
    pub fn new(shared: Arc<Shared>, wish: Wish, cursor: Cursor, is_caught_up: bool) -> Self {
        let (id, state) = shared.enter();
        let pattern = shared.join(&wish.filter);
        let mut reader = Self {
            shared,
            id,
            state,
            wish,
            before: Vec::new(),
            pattern,
            cursor,
            place: None,
            is_at_end: false,
            load: None,
            has_failed: false,
            look_up: None,
            ahead: None,
            choice: None,
            in_hand: None,
            synced: None,
        };
        reader.take_place(is_caught_up);
        reader
    }

    /// Which subscriber it is.
    pub fn id(&self) -> SubscriberId {
        self.id
    }

    /// What the subscribers share.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Whether it was told to end.
    pub fn is_ended(&self) -> bool {
        self.state.is_ended()
    }

    /// Where it stands: everything before, of what it wants, was returned. While nothing waits for it, that is where the ring ends.
    pub fn cursor(&mut self) -> Cursor {
        if let Some(place) = self.place
            && self.choice.is_none()
            && self.in_hand.is_none()
        {
            // The end is read before the log, which has all batches before it.
            let end = self.shared.ring.end();
            if !self.log().has_entries(place) {
                self.place = Some(place.max(end.place));
                self.move_to(self.cursor.joined(end.cursor));
            }
        }
        self.cursor
    }

    /// Wants something else from now on, and stands at `cursor`, which is its own; true if it was set back for that.
    pub fn replace(&mut self, filter: Filter, cursor: Cursor) -> bool {
        let pattern = self.shared.join(&filter);
        self.leave();
        self.pattern = pattern;
        let before = std::mem::replace(&mut self.wish.filter, filter);
        self.wish.ddocs |= self.wish.filter.ddocs.is_some();
        // What was passed over in the present reading may be wanted now.
        self.cursor = cursor.rewound();
        let is_set_back = self.cursor != cursor;
        if is_set_back {
            self.before.push((before, cursor.position()));
        }
        (self.load, self.look_up, self.choice, self.in_hand) = (None, None, None, None);
        (self.is_at_end, self.synced) = (false, None);
        if let Some(pace) = &mut self.wish.pace {
            pace.end();
        }
        self.take_place(false);
        is_set_back
    }

    /// Finds its place in the ring, if it is one to follow the ring from where it stands.
    fn take_place(&mut self, may_be_ahead: bool) {
        self.place = match (self.cursor.knowledge(), self.cursor.began()) {
            // What an earlier filter was delivered is known of the rows that the feed still has, and not of those that were
            // superseded since, which are in the ring as well.
            (Knowledge::UpTo(known), None) if self.before.is_empty() => {
                self.shared.ring.place_after(known, may_be_ahead)
            }
            _ => None,
        };
    }

    /// The log that it follows.
    fn log(&self) -> &Log<Matched> {
        self.pattern.as_ref().map_or(&self.shared.everything, |pattern| &pattern.log)
    }

    /// Leaves its pattern.
    fn leave(&mut self) {
        self.log().leave(&self.state);
        if let Some(pattern) = self.pattern.take() {
            self.shared.patterns.leave(&pattern);
        }
    }

    /// The next batch, or why there is none. `None` once the dispatcher has ended and everything was delivered.
    pub fn poll_next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<DeliveryBatch, Interruption>>> {
        if self.state.is_ended() {
            return Poll::Ready(None);
        }
        let was_closed = self.state.is_closed();
        self.state.register(context.waker());
        let polled = self.poll(context, was_closed);
        if polled.is_pending() && (self.state.is_closed() != was_closed || self.state.is_ended()) {
            context.waker().wake_by_ref();
        }
        polled
    }

    /// Completes when it has ended, without receiving anything; its task is woken by whatever comes.
    pub fn poll_rest(&self, context: &Context<'_>) -> Poll<()> {
        self.state.register(context.waker());
        if self.state.is_closed() { Poll::Ready(()) } else { Poll::Pending }
    }

    /// [`Reader::poll_next`] for one whose waker is registered, and whose end is looked for elsewhere.
    fn poll(
        &mut self,
        context: &mut Context<'_>,
        is_closed: bool,
    ) -> Poll<Option<Result<DeliveryBatch, Interruption>>> {
        let mut asked = 0;
        loop {
            if let Some(result) = ready!(self.poll_in_hand(context)) {
                return Poll::Ready(Some(result));
            }
            if self.choice.is_some() {
                if let Some(batch) = ready!(self.poll_choice(&mut asked, context)) {
                    return Poll::Ready(Some(Ok(batch)));
                }
                continue;
            }
            if let Some(at) = self.synced.take() {
                // Not before this is said: who is replaced or starts again in between is still in its first scan.
                self.move_to(at.into());
                return Poll::Ready(Some(Err(Interruption::Synced { at })));
            }
            if let Some(page) = ready!(self.poll_load(context)) {
                if let Some(received) = self.receive(page).transpose() {
                    return Poll::Ready(Some(received));
                }
                continue;
            }
            if std::mem::take(&mut self.is_at_end) {
                self.take_place(true);
            }
            let Some(place) = self.place else {
                if is_closed {
                    return Poll::Ready(None);
                }
                let may_skip =
                    self.look_up.is_none() && self.cursor.position() <= self.shared.ring.position();
                match if may_skip {
                    self.fall_behind()
                } else {
                    self.begin_load();
                    None
                } {
                    Some(lagged) => return Poll::Ready(Some(Err(lagged))),
                    None => continue,
                }
            };
            if self.wish.pace.is_some() && !is_closed {
                ready!(self.poll_pace(place, context));
            }
            // Other tasks of the thread get their turn, however much waits.
            let turn = ready!(tokio::task::coop::poll_proceed(context));
            let took = if self.wish.pace.is_some() { self.take_round(place) } else { self.take(place) };
            match took {
                Took::Batch(batch) => {
                    turn.made_progress();
                    return Poll::Ready(Some(Ok(batch)));
                }
                Took::Something => {}
                Took::Behind => {
                    self.skip_rest();
                    if let Some(lagged) = self.fall_behind() {
                        return Poll::Ready(Some(Err(lagged)));
                    }
                }
                Took::Nothing if is_closed => return Poll::Ready(None),
                Took::Nothing => return Poll::Pending,
            }
            turn.made_progress();
        }
    }

    /// Completes with what a read of the feed has brought; with `None` if none is under way.
    fn poll_load(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Page>>> {
        let Some(load) = &mut self.load else { return Poll::Ready(None) };
        let loaded = ready!(Pin::new(&mut load.0).poll(context));
        self.load = None;
        match loaded {
            Ok(page) => Poll::Ready(Some(page)),
            Err(error) if error.is_panic() => resume_unwind(error.into_panic()),
            // Nobody else aborts it: the runtime ends, and this task with it.
            Err(_) => Poll::Pending,
        }
    }

    /// Completes when the next round may begin, if something waits.
    fn poll_pace(&mut self, from: u64, context: &mut Context<'_>) -> Poll<()> {
        let waits = self.log().has_entries(from);
        let pace = self.wish.pace.as_mut().expect("it has a pace");
        pace.end();
        if waits { pace.poll_open(context) } else { Poll::Ready(()) }
    }

    /// Takes the next batch of the ring.
    fn take(&mut self, place: u64) -> Took {
        let (mut number, mut matched, more) = match self.log().read_or_wait(place, &self.state) {
            Found::Entry { number, entry, more } => (number, entry, more),
            Found::Nothing => return Took::Nothing,
            Found::Behind => return Took::Behind,
        };
        let since = self.cursor.joined(matched.batch.since);
        if more
            && self.wish.filter.exact().is_some_and(|names| names.len() == 1)
            && let Some((newest, latest)) = self.log().newest_after(number)
            && tells_all(&latest, &matched, &since)
        {
            // What waits is all of one database, whose newest row has the news of the others.
            (number, matched) = (newest, latest);
        }
        self.place = Some(number + 1);
        let are_named = self.pattern.is_some();
        self.choose_among(matched, since, are_named).map_or(Took::Something, Took::Batch)
    }

    /// Takes everything that waits in the ring as one round, each database in its newest row.
    fn take_round(&mut self, place: u64) -> Took {
        let end = self.shared.ring.end();
        let mut newest: HashMap<DbName, Arc<Notification>> = HashMap::new();
        let mut kept = Vec::new();
        let (mut next, mut to) = (place.max(end.place), end.cursor);
        let (mut at, mut since) = (place, None);
        loop {
            let (number, matched) = match self.log().read(at) {
                Found::Entry { number, entry, .. } => (number, entry),
                Found::Nothing => break,
                Found::Behind => return Took::Behind,
            };
            at = number + 1;
            let since = since.get_or_insert_with(|| self.cursor.joined(matched.batch.since));
            for row in matched.rows() {
                coalesce(since, row, &mut newest, &mut kept);
            }
            if at > next {
                // It was put in after the end was read.
                (next, to) = (at, batch_end(&matched.batch));
            }
            if newest.len() > ROUND_ROWS_MAX {
                self.place = None;
                self.begin_load();
                return Took::Something;
            }
        }
        let Some(since) = since else {
            return if self.log().wait(place, &self.state) { Took::Nothing } else { Took::Something };
        };
        let mut rows: Vec<_> = newest.into_values().chain(kept).collect();
        rows.sort_unstable_by_key(|row| row.sequence);
        self.place = Some(next);
        let is_complete = to.began().is_none();
        let batch = Batch::new(rows, since, to.position(), is_complete);
        self.choose_among(Matched::all(batch), since, false).map_or(Took::Something, Took::Batch)
    }

    /// Delivers what is wanted of `matched` to itself at `since`, unless the filter has to be asked row by row. The names are known
    /// to match if they `are_named`.
    fn choose_among(&mut self, matched: Matched, since: Cursor, are_named: bool) -> Option<DeliveryBatch> {
        let Matched { batch, chosen } = matched;
        // What the feed was read ahead of the tail for has been delivered.
        let chosen = match batch.rows.first() {
            Some(first) if first.sequence <= since.position() => {
                chosen.from(batch.rows.partition_point(|row| row.sequence <= since.position()) as u32)
            }
            _ => chosen,
        };
        let filter = &self.wish.filter;
        let passes_all = filter.passes_everything() || (are_named && filter.passes_all_of_its_names());
        if self.place.is_some() {
            self.ahead.take_if(|ahead| ahead.0.values().all(|at| *at < batch_begin(&batch)));
        }
        if passes_all && self.before.is_empty() && self.ahead.is_none() {
            return self.deliver(batch, since, chosen);
        }
        let left = chosen.indices(&batch).rev().collect();
        self.choice = Some(Box::new(Choice { batch, since, left, passed: Indices::new() }));
        None
    }

    /// Chooses the rows that are wanted. Completes with what is delivered of them at once.
    fn poll_choice(&mut self, asked: &mut usize, context: &Context<'_>) -> Poll<Option<DeliveryBatch>> {
        let choice = self.choice.as_mut().expect("the caller has looked");
        // The row is taken first, so that a predicate that panics is not asked again.
        while let Some(index) = choice.left.pop() {
            let row = &choice.batch.rows[index as usize];
            *asked += 1;
            if self.place.is_some() && self.ahead.as_ref().is_some_and(|ahead| ahead.has(row)) {
                continue;
            }
            if self.wish.filter.passes(row, &choice.since) && !was_delivered(&self.before, row, &choice.since)
            {
                choice.passed.push(index);
            }
            if *asked >= ROWS_AT_ONCE {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
        }
        let Choice { batch, since, passed, .. } = *self.choice.take().expect("it was just there");
        Poll::Ready(self.deliver(batch, since, Chosen::Indices(passed)))
    }

    /// Delivers the rows `chosen` of `batch` to itself at `since`; `None` if there are none, or their design documents are to be
    /// read first.
    fn deliver(&mut self, batch: Arc<Batch>, since: Cursor, chosen: Chosen) -> Option<DeliveryBatch> {
        if chosen.count(&batch) == 0 {
            self.move_to(batch.cursor_after(since));
            return None;
        }
        if let Some(pace) = &mut self.wish.pace {
            pace.begin();
        }
        let filters = self.wish.filter.set_and_kinds();
        let batch = DeliveryBatch(Arc::new(Deliveries { batch, chosen, since, filters, ddocs: None }));
        if self.wish.ddocs {
            self.in_hand = Some(Box::new((batch, None)));
            return None;
        }
        self.move_to(batch.cursor());
        Some(batch)
    }

    /// Stands at `cursor` from now on.
    fn move_to(&mut self, cursor: Cursor) {
        self.cursor = cursor;
        if cursor.began().is_none() {
            self.before.clear();
        }
    }

    /// Completes with the batch in hand, or a failure, once its design documents are read; with `None` if there is no batch, or
    /// nothing of it is wanted.
    fn poll_in_hand(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<DeliveryBatch, Interruption>>> {
        let Some(in_hand) = &mut self.in_hand else { return Poll::Ready(None) };
        let (batch, read) = &mut **in_hand;
        let read = read.get_or_insert_with(|| read_ddocs(&self.shared, batch.clone()));
        let ddocs = match ready!(read.as_mut().poll(context)) {
            Ok(ddocs) => ddocs,
            Err(error) => {
                self.in_hand.as_mut().expect("it was just there").1 = None;
                return Poll::Ready(Some(Err(Interruption::Failed(error))));
            }
        };
        let (batch, _) = *self.in_hand.take().expect("it was just there");
        let filter = &self.wish.filter;
        let batch = batch.with_ddocs(ddocs, |delivery| {
            // All of them have passed already. What a predicate panics on now is delivered, as it may be wanted.
            catch_unwind(AssertUnwindSafe(|| is_wanted(filter, delivery))).unwrap_or(true)
        });
        self.move_to(batch.cursor());
        Poll::Ready((batch.0.len() > 0).then_some(Ok(batch)))
    }

    /// Before the batch that has ended its rest it has missed nothing: it knows everything up to there, and stands no earlier.
    fn skip_rest(&mut self) {
        let begin = of_mark(self.log().taken_at(&self.state));
        self.move_to(self.cursor.joined(begin.into()));
    }

    /// The ring no longer holds what follows: reads the feed, or skips it if it would rather do so.
    fn fall_behind(&mut self) -> Option<Interruption> {
        let is_plain = self.cursor == self.cursor.rewound() && !self.cursor.knew_nothing();
        // To look names up costs little, however much was missed.
        let is_looked_up = self.wish.filter.exact().is_some();
        if !is_plain || is_looked_up || !(self.wish.skips || is_on(Bug::LaggardSkips)) {
            self.place = None;
            self.begin_load();
            return None;
        }
        let from = self.cursor.position();
        let (place, to) = self.shared.ring.begin();
        if self.place.is_some_and(|own| own >= place) {
            // The ring has it, but its pattern is too new.
            self.place = None;
            self.begin_load();
            return None;
        }
        let (place, to) = if self.log().begin() <= place {
            (place, to)
        } else {
            let end = self.shared.ring.end();
            (end.place, end.cursor.position())
        };
        if to <= from {
            // It is ahead of the tail, by its own reading.
            self.begin_load();
            return None;
        }
        self.place = Some(place);
        self.move_to(to.into());
        (!is_on(Bug::LaggardSkips)).then_some(Interruption::Lagged { from, to })
    }

    /// Begins to read the feed where it stands.
    fn begin_load(&mut self) {
        if let Some(pace) = &mut self.wish.pace {
            pace.begin();
        }
        let names = self.wish.filter.exact().map(|names| {
            let after = self.look_up.as_ref().map(|look_up| look_up.last.clone());
            let from = after.map_or(0, |after| names.partition_point(|name| *name <= after));
            names[from..].iter().take(LOOK_UPS_MAX + 1).cloned().collect()
        });
        let (shared, cursor, has_failed) = (Arc::clone(&self.shared), self.cursor, self.has_failed);
        self.load = Some(Load(tokio::spawn(async move {
            if has_failed {
                shared.context.env().sleep(FAILURE_PAUSE).await;
            }
            load(shared, cursor, names).await
        })));
    }

    /// Takes in what a read of the feed has brought, and delivers what is wanted of it.
    fn receive(&mut self, page: Result<Page>) -> Result<Option<DeliveryBatch>, Interruption> {
        self.has_failed = page.is_err();
        let page = match page {
            Ok(page) => page,
            Err(Error::Expired { horizon }) => {
                (self.place, self.look_up) = (None, None);
                self.before.clear();
                self.cursor = Cursor::NOTHING;
                return Err(Interruption::Expired { horizon });
            }
            Err(error) => return Err(Interruption::Failed(error)),
        };
        let Page { rows, began, to, more, last } = page;
        let since = if self.cursor.knew_nothing() { self.cursor.begin(began) } else { self.cursor };
        let to = match (last, more) {
            (Some(last), _) => {
                let began = self.look_up.as_ref().map_or(to, |look_up| look_up.began);
                self.look_up = Some(Box::new(LookUp { last, began }));
                // Other names have rows before those that were found.
                since.position()
            }
            (None, _) => self.look_up.take().map_or(to, |look_up| look_up.began),
        };
        let is_looked_up = self.wish.filter.exact().is_some();
        if is_looked_up {
            let end = self.look_up.as_ref().map_or(to, |look_up| look_up.began);
            for row in rows.iter().filter(|row| row.sequence > end) {
                self.ahead.get_or_insert_default().0.insert(row.name.clone(), row.sequence);
            }
        }
        self.is_at_end = !more;
        self.synced = (since.knew_nothing() && !more).then_some(to);
        let is_complete = !more && self.synced.is_none();
        Ok(self.choose_among(Matched::all(Batch::new(rows, since, to, is_complete)), since, false))
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.leave();
        self.shared.subscribers.remove(&self.id);
    }
}

/// The position of the first row of a batch.
fn batch_begin(batch: &Batch) -> Sequence {
    batch.rows.first().map_or(batch.to, |row| row.sequence)
}

/// Where a subscriber stands that was delivered a batch of the ring.
fn batch_end(batch: &Batch) -> Cursor {
    if batch.is_complete {
        return batch.to.into();
    }
    Cursor::resumed(batch.since.knowledge(), batch.to, batch.to)
}

/// Puts `row` in the place of an older one of its database, for a subscriber at `since`. The older one is kept as well if it tells of
/// a deletion of which the newer one says nothing: the janitor has dropped the tombstone in between.
fn coalesce(
    since: &Cursor,
    row: &Arc<Notification>,
    newest: &mut HashMap<DbName, Arc<Notification>>,
    kept: &mut Vec<Arc<Notification>>,
) {
    let Some(older) = newest.insert(row.name.clone(), Arc::clone(row)) else { return };
    let is_deletion = |row: &Notification| row.news_since(*since).kinds().contains(EventKind::Deleted);
    if is_deletion(&older) && !is_deletion(row) && !is_on(Bug::RoundForgetsTombstone) {
        kept.push(older);
    }
}

/// Whether the row of `latest` has all that the row of `first`, and whatever rows of the same name came between, would tell a
/// subscriber at `since`. Of a deletion nothing is left in later rows once the janitor has dropped the tombstone; one and the
/// same instance has none between its rows.
fn tells_all(latest: &Matched, first: &Matched, since: &Cursor) -> bool {
    let (Some(latest), Some(first)) = (latest.rows().next(), first.rows().next()) else { return false };
    let is_deletion = |row: &Notification| row.news_since(*since).kinds().contains(EventKind::Deleted);
    is_deletion(latest) || (latest.instance == first.instance && !is_deletion(first))
}

/// Whether one of the filters of `before` has had `row` delivered to a subscriber at `since`.
fn was_delivered(before: &[(Filter, Sequence)], row: &Notification, since: &Cursor) -> bool {
    before.iter().any(|(filter, to)| {
        row.sequence <= *to
            // A predicate that panics has delivered nothing.
            && catch_unwind(AssertUnwindSafe(|| {
                filter.passes(row, since) && filter.wants_any_ddocs(row, since)
            }))
            .unwrap_or(false)
    })
}

/// Whether `delivery` is wanted, now that it is known which design documents it tells of.
fn is_wanted(filter: &Filter, delivery: DeliveryRef<'_>) -> bool {
    let Some(wanted) = &filter.ddocs else { return true };
    (delivery.may_be_any_ddoc() && !is_on(Bug::DdocWithoutIdForgotten))
        || delivery.ddocs().is_some_and(|ddocs| ddocs.iter().any(|(id, _)| wanted.contains(id)))
        || filter.wants_besides_ddocs(delivery.notification(), delivery.batch_since())
}

/// Reads which design documents have changed, for each delivery of `batch`.
fn read_ddocs(shared: &Arc<Shared>, batch: DeliveryBatch) -> DdocRead {
    let shared = Arc::clone(shared);
    Box::pin(async move {
        let read = async |index: usize| {
            let delivery = DeliveryRef { batch: &batch.0, index };
            if !delivery.news().kinds().contains(EventKind::DdocUpdated) {
                return Ok(Arc::default());
            }
            shared.feed.ddocs(&delivery.notification().db(), *delivery.batch_since()).await.map(Arc::new)
        };
        stream::iter(0..batch.len()).map(read).buffered(DDOC_READS_MAX).try_collect().await
    })
}

/// Reads the feed after `cursor`, when it is this subscriber's turn: the newest rows of `names`, if there are some, all but the
/// last of which are to be read if they are too many.
async fn load(shared: Arc<Shared>, cursor: Cursor, names: Option<Vec<DbName>>) -> Result<Page> {
    let _turn = shared.turns.acquire().await.expect("the semaphore is never closed");
    let Some(mut names) = names else {
        let mut page = shared.feed.page(cursor, shared.batch_rows_max).await?;
        let began = page.next.began().unwrap_or(page.to);
        // It ends as batches of the ring do, because a subscriber that rests holds one.
        let mut bytes = 0;
        let fits = |row: &&Arc<Notification>| {
            let fits = bytes < BATCH_BYTES_MAX;
            bytes += row.name.as_str().len();
            fits
        };
        let kept = page.rows.iter().take_while(fits).count();
        if kept < page.rows.len() {
            page.rows.truncate(kept);
            (page.to, page.more) = (page.rows[kept - 1].sequence, true);
        }
        return Ok(Page { rows: page.rows, began, to: page.to, more: page.more, last: None });
    };
    let more = names.len() > LOOK_UPS_MAX;
    names.truncate(LOOK_UPS_MAX);
    let (rows, to) = shared.feed.newest_after(&names, cursor).await?;
    let last = if more { names.pop() } else { None };
    Ok(Page { rows, began: to, to, more, last })
}

#[cfg(test)]
mod tests;
