//! [`Skipped`]: the rows of counters and feeds that this process found and could not decode.
//!
//! Such a row is damaged, or was written by a later version of the program. A reader that finds one continues without it, so that neither
//! its neighbours nor other readers have to wait for it, and reports it here: it is counted, logged at a limited rate, and shown in the
//! status if it is among the last ones.

use std::collections::VecDeque;

use bytes::Bytes;
use parking_lot::Mutex;

use crate::{
    base::{env::Env, error::Error, sequence::Sequence},
    state::{keys::FeedId, stats::Stats},
};

/// How many rows are remembered. When there are more, the row that was found longest ago is forgotten.
const ROWS_MAX: usize = 20;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SkippedAt {
    Key(Bytes),
    /// A row at this position in a feed.
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

/// A row that a reader skipped because it could not be decoded.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct SkippedRow {
    /// Where the row is: a key, with unprintable bytes as `\x00`, or a feed and a sequence.
    pub place: String,
    /// Why the row could not be decoded.
    pub reason: String,
    /// When this process last found the row, in milliseconds since 1970.
    pub last_ms: u64,
}

/// The last rows that this process could not decode, the newest last.
#[derive(Debug, Default)]
pub(crate) struct Skipped(Mutex<VecDeque<SkippedRow>>);

impl Skipped {
    /// Reports that a reader skipped the row at `place`.
    pub fn note(&self, env: &Env, stats: &Stats, place: &SkippedAt, error: &Error) {
        stats.rows_skipped.add(1);
        let row = SkippedRow { place: place.to_string(), reason: error.to_string(), last_ms: env.wall_ms() };
        if let Some(unsaid) = stats.health.remark(env, &row.place) {
            tracing::error!(place = row.place, %error, unsaid, "a row cannot be decoded and is skipped");
        }
        let mut met = self.0.lock();
        met.retain(|known| known.place != row.place);
        if met.len() == ROWS_MAX {
            met.pop_front();
        }
        met.push_back(row);
    }

    /// Returns the remembered rows, the newest last.
    pub fn rows(&self) -> Vec<SkippedRow> {
        self.0.lock().iter().cloned().collect()
    }
}
