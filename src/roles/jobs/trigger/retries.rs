//! [`Retries`]: when parked databases are tried again.
//!
//! The store keeps no times, because nothing compares clocks. Instead all parked databases are read in rounds, one page at a time,
//! so that memory does not grow with their number. A database that was parked lately is tried in each round; one that has failed
//! repeatedly in every second, fourth round, and so on. A request for a retry starts a round at the next poll.

use std::{collections::VecDeque, time::Duration};

use futures_util::future::BoxFuture;

use crate::{
    base::{env::Env, error::Result, event::Db},
    state::{
        keys::ParkedRow,
        named_cursor::{NamedCursor, Parked},
    },
};

const PAGE_ROWS: usize = 64;

/// How often it polls for requests.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// A database is tried in at least one of `2^SKIPS_MAX` rounds.
const SKIPS_MAX: u32 = 4;

const FIRST: u64 = 1;

/// The result of a read.
pub(super) enum Step {
    /// The number of requests so far.
    Polled(Result<u64>),
    /// A page of parked databases.
    Read(Result<Vec<Parked>>),
}

pub(super) struct Retries {
    /// Time from the begin of one round to that of the next.
    interval: Duration,
    /// When the next round begins.
    round_at: Duration,
    round: u64,
    /// Whether the round is for all, not only for requested databases.
    is_full: bool,
    is_reading: bool,
    /// Whether the last read of a page has failed; the page is read again after a pause.
    has_failed: bool,
    /// The number of requests when they were last read.
    asked: Option<u64>,
    /// The last database that was read in the round.
    last: Option<Db>,
    /// The databases whose turn it is.
    queue: VecDeque<(Db, ParkedRow)>,
    /// The present read.
    step: Option<BoxFuture<'static, Step>>,
}

impl Retries {
    /// Rounds that begin `interval` apart. The first one begins at once, for all: an operator may have repaired them before the start.
    pub fn new(interval: Duration, env: &Env) -> Self {
        let interval = interval.max(Duration::from_secs(1));
        Self {
            interval,
            round_at: env.now(),
            round: 0,
            is_full: false,
            is_reading: false,
            has_failed: false,
            asked: None,
            last: None,
            queue: VecDeque::new(),
            step: None,
        }
    }

    /// Begins the next read, unless databases are waiting for their turn.
    pub fn begin(&mut self, env: &Env, cursor: &NamedCursor) {
        if self.step.is_some() || !self.queue.is_empty() {
            return;
        }
        let cursor = cursor.clone();
        self.step = Some(if self.is_reading {
            let last = self.last.clone();
            let pause = env.sleep(if self.has_failed { POLL_INTERVAL } else { Duration::ZERO });
            Box::pin(async move {
                pause.await;
                Step::Read(cursor.parked(last.as_ref(), PAGE_ROWS).await)
            })
        } else {
            // The first poll is at once: a request may have come while no trigger was running.
            let rest = self.asked.map_or(Duration::ZERO, |_| POLL_INTERVAL.min(self.interval));
            let rest = env.sleep(rest);
            Box::pin(async move {
                rest.await;
                Step::Polled(cursor.asked().await)
            })
        });
    }

    /// The present read.
    pub fn step(&mut self) -> Option<&mut BoxFuture<'static, Step>> {
        self.step.as_mut()
    }

    /// Receives the result of a read at `now`. A read that has failed is repeated later.
    pub fn end(&mut self, now: Duration, step: Step) -> Result<()> {
        (self.step, self.has_failed) = (None, false);
        match step {
            Step::Polled(Ok(asked)) => {
                let is_asked = self.asked.replace(asked).map_or(asked > 0, |known| known != asked);
                self.is_full = now >= self.round_at;
                if self.is_full {
                    self.round = self.round.wrapping_add(1);
                    self.round_at = now.saturating_add(self.interval);
                }
                self.is_reading = self.is_full || is_asked;
                self.last = None;
            }
            Step::Read(Ok(page)) => {
                self.is_reading = page.len() == PAGE_ROWS;
                self.last = page.last().map(|(db, _)| db.clone());
                let (round, is_full) = (self.round, self.is_full);
                // A later version of the program may be able to decode the row, so it stays.
                let known = page.into_iter().filter_map(|(db, row)| Some((db, row.ok()?)));
                self.queue.extend(known.filter(|(db, row)| is_turn(db, row, round, is_full)));
            }
            Step::Polled(Err(error)) => {
                self.asked = self.asked.or(Some(0));
                return Err(error);
            }
            Step::Read(Err(error)) => {
                self.has_failed = true;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Notes that a database whose turn it was cannot be tried now. If a retry of it was requested, it is read again at the next poll.
    pub fn put_off(&mut self, row: &ParkedRow) {
        if row.is_asked {
            self.asked = self.asked.map(|asked| asked.wrapping_sub(1));
        }
    }

    /// The next database whose turn it is.
    pub fn next(&mut self) -> Option<(Db, ParkedRow)> {
        self.queue.pop_front()
    }
}

/// Whether it is the turn of `db` in this round.
fn is_turn(db: &Db, row: &ParkedRow, round: u64, is_full: bool) -> bool {
    let every = 1 << row.retries.min(SKIPS_MAX);
    let is_in_turn = round == FIRST || round.wrapping_add(u64::from(db.instance.0[15])).is_multiple_of(every);
    row.is_asked || is_full && is_in_turn
}
