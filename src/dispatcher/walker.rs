//! [`Walker`]: a subscriber of everything or of a pattern. It walks the ring with a cursor of its own, and the feed while
//! it is behind the ring.
//!
//! # Memory
//!
//! A walker that rests holds the batch of the ring in which it stands, or the page that it has read of the feed: both are
//! small. So a thousand walkers that rest for ever hold a thousand small batches at most, however much they have missed.

use std::{
    collections::HashMap,
    panic::resume_unwind,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tokio::task::JoinHandle;
use tokio_stream::{Stream, wrappers::WatchStream};

use super::{
    Shared,
    delivery::{Delivery, Interruption},
    filter::Filter,
    pace::Pace,
    registry::Seat,
    ring::{Batch, Next},
};
use crate::{
    bugs::{Bug, is_on},
    encoding::{Incarnation, Sequence, Versionstamp},
    error::{Error, Result},
    event::DbName,
    feed::Cursor,
    notification::Notification,
};

/// How many rows that do not match are walked before other tasks get their turn.
const ROWS_AT_ONCE: usize = 4_096;

/// The most rows of a round that are held. A round of more is read from the feed, which has each database once.
const ROUND_ROWS_MAX: usize = 256;

/// The first position at which something may be known.
fn after_zero() -> Sequence {
    Sequence::new(Incarnation(0), Versionstamp::default(), 1)
}

/// What a walker stands in.
enum Walking {
    /// A batch of the ring, and the place in it.
    Ring(Arc<Batch>, usize),
    /// A page that it has read of the feed, and the place in it.
    Page(Batch, usize),
    /// The rows of a round, the last first, and up to where they tell everything.
    Round(Vec<Arc<Notification>>, Sequence),
}

/// A read of the feed, in a task of its own: it has one of a few turns, and must come to its end although the subscriber
/// does something else meanwhile. Dropping it ends it.
struct Reading(JoinHandle<Result<(Batch, Cursor)>>);

impl Drop for Reading {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What a step through the current batch has led to.
enum Step {
    /// A row that matches.
    Delivery(Delivery),
    /// The end of the batch, or there was none.
    End,
    /// Many rows that do not match.
    Tired,
}

/// A subscriber of everything or of a pattern.
pub(super) struct Walker {
    /// The ring and the feed.
    shared: Arc<Shared>,
    /// What it wants.
    filter: Filter,
    /// What it wanted before, and up to where it was given that: not to be given again.
    before: Vec<(Filter, Sequence)>,
    /// Whether it would rather skip what it has missed than catch up.
    skips: bool,
    /// How often it is given something.
    pace: Option<Pace>,
    /// Every row up to here was walked.
    cursor: Sequence,
    /// Everything that happened up to here was told. It stays behind the cursor while there are more pages to walk: a
    /// database of a later page may have had events that a row before the cursor would have told, had it not been
    /// superseded.
    known: Sequence,
    /// While the feed is to be read on before the ring is walked again: a position that could be read when this began. A
    /// row up to there has not moved meanwhile, so its database was not met on an earlier page.
    behind: Option<Sequence>,
    /// What it is walking.
    walking: Option<Walking>,
    /// Wakes at new batches.
    pushes: WatchStream<Option<u64>>,
    /// A read of the feed that is under way.
    catch_up: Option<Reading>,
    /// The reader of the pages, while the feed is read: where and when it began. It is kept until the last page is walked, also
    /// if a read fails or a predicate panics in between: a position in the middle says too little.
    reading: Option<Cursor>,
    /// The row of which the filter is being asked for a round. If it is there when the next round is made, its predicate has
    /// panicked.
    asking: Option<Sequence>,
    /// Rows of the next round whose predicate has panicked: they are not asked for again.
    refused: Vec<Sequence>,
}

impl Walker {
    /// A walker that knows everything up to `cursor`.
    pub fn new(
        shared: Arc<Shared>,
        filter: Filter,
        skips: bool,
        pace: Option<Pace>,
        cursor: Sequence,
    ) -> Self {
        let pushes = WatchStream::from_changes(shared.ring.pushes());
        // Who starts ahead of the tail may be ahead of the store as well: the feed refuses it then.
        let behind = (cursor > shared.ring.position()).then_some(cursor);
        Self {
            shared,
            filter,
            before: Vec::new(),
            skips,
            pace,
            cursor,
            known: cursor,
            behind,
            walking: None,
            pushes,
            catch_up: None,
            reading: None,
            asking: None,
            refused: Vec::new(),
        }
    }

    /// Everything that happened up to here was told.
    pub fn known(&self) -> Sequence {
        self.known
    }

    /// The pace, for another source in its place.
    pub fn take_pace(&mut self) -> Option<Pace> {
        self.pace.as_mut().map(Pace::take)
    }

    /// Wants something else from now on. What it knows of databases that it wanted before is not told again.
    pub fn replace(&mut self, filter: Filter) {
        let before = std::mem::replace(&mut self.filter, filter);
        if self.cursor > self.known {
            self.before.push((before, self.cursor));
        }
        // What was walked since, and not wanted, may be wanted now.
        self.cursor = self.known;
        (self.walking, self.catch_up, self.reading) = (None, None, None);
        if let Some(pace) = &mut self.pace {
            pace.end();
        }
    }

    /// Whether `row` is to be delivered to a subscriber that knows everything up to `since`.
    fn wants(&self, row: &Notification, since: Sequence) -> bool {
        self.filter.passes(row, since)
            && !self.before.iter().any(|(before, to)| {
                row.sequence <= *to && before.passes(row, since) && before.wants_any_ddocs(row, since)
            })
    }

    /// Moves over `row`, which is next; what is to be delivered of it.
    fn pass(&mut self, row: &Arc<Notification>) -> Option<Delivery> {
        if row.sequence <= self.cursor {
            return None;
        }
        // The cursor moves first, so that a predicate that panics is not asked again.
        self.cursor = row.sequence;
        let since = match self.behind {
            // Who knows nothing is not told of replaced instances; but it may know this database from an earlier page.
            Some(began) if row.sequence > began => self.known.max(after_zero()),
            _ => self.known,
        };
        self.wants(row, since).then(|| Delivery::new(Arc::clone(row), since))
    }

    /// The next row that matches of what it is walking.
    fn walk(&mut self) -> Step {
        let mut walking = match self.walking.take() {
            None => return Step::End,
            Some(Walking::Round(mut rows, to)) => {
                let Some(row) = rows.pop() else {
                    self.know(to);
                    return Step::End;
                };
                self.cursor = row.sequence;
                let delivery = Delivery::new(row, self.known);
                self.walking = Some(Walking::Round(rows, to));
                return Step::Delivery(delivery);
            }
            Some(walking) => walking,
        };
        let (batch, place) = match &mut walking {
            Walking::Ring(batch, place) => (&**batch, place),
            Walking::Page(batch, place) => (&*batch, place),
            Walking::Round(..) => unreachable!("it was handled above"),
        };
        let last = batch.rows.len().min(*place + ROWS_AT_ONCE);
        while *place < last {
            let row = &batch.rows[*place];
            *place += 1;
            if let Some(delivery) = self.pass(row) {
                self.walking = Some(walking);
                return Step::Delivery(delivery);
            }
        }
        if *place < batch.rows.len() {
            self.walking = Some(walking);
            return Step::Tired;
        }
        let (to, is_complete) = (batch.to, batch.is_complete);
        self.cursor = self.cursor.max(to);
        if is_complete {
            self.know(to);
            (self.behind, self.reading) = (None, None);
        }
        Step::End
    }

    /// Notes that everything that happened up to `to` was told.
    fn know(&mut self, to: Sequence) {
        self.cursor = self.cursor.max(to);
        self.known = self.known.max(to);
        let known = self.known;
        self.before.retain(|(_, to)| *to > known);
        self.refused.retain(|refused| *refused > known);
    }

    /// Begins to read the feed after the cursor.
    fn catch_up(&mut self) {
        if let Some(pace) = &mut self.pace {
            pace.begin();
        }
        // The tail has read up to its position before, so whatever is read now reaches as far.
        self.behind.get_or_insert(self.shared.ring.position());
        let from = self.reading.map_or(self.cursor.into(), |reading| reading.at(self.cursor));
        self.catch_up = Some(Reading(tokio::spawn(read(Arc::clone(&self.shared), from))));
    }

    /// Finds out what follows, and begins with it; what to tell at once, if anything.
    fn advance(&mut self) -> Result<(), Interruption> {
        let cursor = self.cursor;
        if self.pace.is_some() && self.known == cursor && !self.shared.ring.is_closed() {
            return self.advance_round();
        }
        match self.shared.ring.after(cursor) {
            Next::Batch(batch) => {
                let place = batch.rows.partition_point(|row| row.sequence <= cursor);
                self.walking = Some(Walking::Ring(batch, place));
            }
            Next::Behind(to) => return self.fall_behind(to),
            Next::UpToDate(known) => self.know(known),
        }
        Ok(())
    }

    /// Begins with the next round: each database once, in its newest row of the ring.
    fn advance_round(&mut self) -> Result<(), Interruption> {
        let (batches, to) = match self.shared.ring.all_after(self.cursor) {
            Ok(found) => found,
            Err(Next::Behind(to)) => return self.fall_behind(to),
            Err(_) => return Ok(()),
        };
        self.refused.extend(self.asking.take());
        let mut newest: HashMap<DbName, Arc<Notification>> = HashMap::new();
        for row in batches.iter().flat_map(|batch| &batch.rows) {
            if row.sequence <= self.cursor || self.refused.contains(&row.sequence) {
                continue;
            }
            self.asking = Some(row.sequence);
            let is_wanted = self.wants(row, self.known);
            self.asking = None;
            if is_wanted {
                newest.insert(row.name.clone(), Arc::clone(row));
            }
            if newest.len() > ROUND_ROWS_MAX {
                self.catch_up();
                return Ok(());
            }
        }
        if let Some(pace) = self.pace.as_mut().filter(|_| !newest.is_empty()) {
            pace.begin();
        }
        let mut rows: Vec<_> = newest.into_values().collect();
        rows.sort_unstable_by_key(|row| std::cmp::Reverse(row.sequence));
        self.walking = Some(Walking::Round(rows, to));
        Ok(())
    }

    /// The ring no longer holds what follows; it holds what follows `to`.
    fn fall_behind(&mut self, to: Sequence) -> Result<(), Interruption> {
        if is_on(Bug::LaggardSkips) {
            self.cursor = to;
            return Ok(());
        }
        if self.skips {
            let from = std::mem::replace(&mut self.cursor, to);
            self.known = to;
            self.before.clear();
            return Err(Interruption::Lagged { from, to });
        }
        self.catch_up();
        Ok(())
    }

    /// Takes in what a read of the feed has brought.
    fn receive(&mut self, read: Result<(Batch, Cursor)>) -> Result<(), Interruption> {
        match read {
            Ok((batch, next)) => {
                self.reading = Some(next);
                self.walking = Some(Walking::Page(batch, 0));
                Ok(())
            }
            Err(Error::Expired { horizon }) => {
                (self.cursor, self.known, self.reading) = (Sequence::ZERO, Sequence::ZERO, None);
                self.before.clear();
                Err(Interruption::Expired { horizon })
            }
            Err(error) => Err(Interruption::Failed(error)),
        }
    }

    /// The next delivery, or why there is none. `None` once the dispatcher has ended and everything was walked.
    pub fn poll_next(
        &mut self,
        seat: &Seat,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Delivery, Interruption>>> {
        loop {
            match self.walk() {
                Step::Delivery(delivery) => return Poll::Ready(Some(Ok(delivery))),
                Step::Tired => {
                    context.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Step::End => {}
            }
            if let Some(reading) = &mut self.catch_up {
                let read = ready!(Pin::new(&mut reading.0).poll(context));
                self.catch_up = None;
                let read = match read {
                    Ok(read) => read,
                    Err(error) if error.is_panic() => resume_unwind(error.into_panic()),
                    // Nobody else aborts it: the runtime ends, and this task with it.
                    Err(_) => return Poll::Pending,
                };
                if let Err(interruption) = self.receive(read) {
                    return Poll::Ready(Some(Err(interruption)));
                }
                continue;
            }
            let is_closed = self.shared.ring.is_closed();
            if self.behind.is_some() && !is_closed {
                self.catch_up();
                continue;
            }
            if let Some(pace) = &mut self.pace {
                pace.end();
                // What waits when all ends is not to wait for the next round.
                if !seat.is_closed() && !matches!(self.shared.ring.after(self.cursor), Next::UpToDate(_)) {
                    ready!(pace.poll_open(context));
                }
            }
            let before = self.cursor;
            match self.advance() {
                Err(interruption) => return Poll::Ready(Some(Err(interruption))),
                Ok(()) if is_closed && self.catch_up.take().is_some() => return Poll::Ready(None),
                Ok(()) if self.walking.is_some() || self.catch_up.is_some() => {}
                // Its end was not complete when the round was about to begin, or it was only moved.
                Ok(()) if self.cursor != before => {}
                Ok(()) if is_closed => return Poll::Ready(None),
                Ok(()) => {
                    // Whatever the wake-up says, the ring knows better; a stream that has ended wakes no more.
                    if ready!(Pin::new(&mut self.pushes).poll_next(context)).is_none() {
                        return Poll::Ready(None);
                    }
                }
            }
        }
    }
}

/// Reads the feed after `cursor`, when it is this subscriber's turn. Returns what was read, and where to go on.
async fn read(shared: Arc<Shared>, cursor: Cursor) -> Result<(Batch, Cursor)> {
    let _turn = shared.catch_ups.acquire().await.expect("the semaphore is never closed");
    let page = shared.feed.page(cursor, shared.catch_up_rows_max).await?;
    let batch = Batch { rows: page.rows, from: cursor.position(), to: page.to, is_complete: !page.more };
    Ok((batch, page.next))
}
