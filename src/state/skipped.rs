//! [`Skipped`]: the rows that this process has met and cannot decode.
//!
//! Such a row is damaged, or a later version of the program has written it. A reader that meets one goes on without
//! it, so that neither its neighbours nor other readers wait for it, and reports it here: it is counted, logged now
//! and then, and named in the status until it is gone.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    time::Duration,
};

use bytes::Bytes;
use parking_lot::Mutex;

use crate::{
    base::{env::Env, error::Error, sequence::Sequence},
    state::{keys::FeedId, stats::Stats},
};

/// How many rows are remembered. Beyond that, the row that was not met for the longest is forgotten.
const ROWS_MAX: usize = 1_000;

/// The first pause between two log lines of a row; it doubles each time, up to the second one.
const LOG_PAUSE: Duration = Duration::from_mins(1);
const LOG_PAUSE_MAX: Duration = Duration::from_hours(24);

/// How many lines are logged at most within [`LOG_PAUSE`], however many rows there are.
const LINES_MAX: u32 = 20;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SkippedAt {
    Key(Bytes),
    /// In a feed, at this position.
    Row(FeedId, Sequence),
}

impl std::fmt::Display for SkippedAt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Key(key) => write!(f, "key {}", key.escape_ascii()),
            Self::Row(feed, sequence) => write!(f, "feed of {feed}, sequence {sequence}"),
        }
    }
}

/// A row that cannot be decoded, and that readers skip.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct SkippedRow {
    /// Its place: a key, with unprintable bytes as `\x00`, or a feed and a sequence.
    pub place: String,
    /// Why it cannot be decoded.
    pub reason: String,
    /// When this process first met it, in milliseconds since 1970.
    pub since_ms: u64,
    /// How often this process has met it.
    pub times: u64,
}

/// A remembered row.
#[derive(Debug)]
struct RememberedRow {
    /// Why it cannot be decoded.
    reason: String,
    /// When it was first met, in milliseconds since 1970; then when it was last met.
    since_ms: u64,
    last: Duration,
    /// How often it was met.
    times: u64,
    /// When it may be logged again, and the pause after that.
    log_at: Duration,
    log_pause: Duration,
}

/// The rows that this process has met and cannot decode.
#[derive(Debug, Default)]
pub(crate) struct Skipped(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    rows: BTreeMap<SkippedAt, RememberedRow>,
    /// When the present [`LOG_PAUSE`] began, and the number of lines since.
    log_since: Duration,
    lines: u32,
}

impl Skipped {
    /// Reports that a reader went on without the row at `place`.
    pub fn note(&self, env: &Env, stats: &Stats, place: &SkippedAt, error: &Error) {
        stats.rows_skipped.add(1);
        let now = env.now();
        let mut met = self.0.lock();
        if met.rows.len() >= ROWS_MAX && !met.rows.contains_key(place) {
            let oldest = met.rows.iter().min_by_key(|(_, known)| known.last).map(|(place, _)| place.clone());
            oldest.and_then(|oldest| met.rows.remove(&oldest));
        }
        if now.saturating_sub(met.log_since) >= LOG_PAUSE {
            (met.log_since, met.lines) = (now, 0);
        }
        let may_log = met.lines < LINES_MAX;
        let known = match met.rows.entry(place.clone()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(RememberedRow {
                reason: String::new(),
                since_ms: env.wall_ms(),
                last: now,
                times: 0,
                log_at: now,
                log_pause: LOG_PAUSE,
            }),
        };
        (known.last, known.times) = (now, known.times + 1);
        known.reason = error.to_string();
        if may_log && now >= known.log_at {
            known.log_at = now.saturating_add(known.log_pause);
            known.log_pause = known.log_pause.saturating_mul(2).min(LOG_PAUSE_MAX);
            let times = known.times;
            met.lines += 1;
            drop(met);
            tracing::error!(%place, %error, times, "a row cannot be decoded and is skipped");
        }
    }

    /// The places of all rows.
    pub fn places(&self) -> Vec<SkippedAt> {
        self.0.lock().rows.keys().cloned().collect()
    }

    /// Forgets the row at `place`, which is gone or was repaired.
    pub fn forget(&self, place: &SkippedAt) {
        self.0.lock().rows.remove(place);
    }

    /// All rows.
    pub fn rows(&self) -> Vec<SkippedRow> {
        let row = |(place, known): (&SkippedAt, &RememberedRow)| SkippedRow {
            place: place.to_string(),
            reason: known.reason.clone(),
            since_ms: known.since_ms,
            times: known.times,
        };
        self.0.lock().rows.iter().map(row).collect()
    }
}
