//! [`Rows`]: rows of `_db_updates` that are new to a reader, and how they look; and [`Look`]: how they look to many readers.
//!
//! # Positions
//!
//! A client keeps one text and nothing else, so the text has to say all that a reader has to remember: it is that of a
//! [`Cursor`]. Mostly that is a plain sequence. Where a row that is still to come has news from before the position, the text says in
//! addition where and when the reading began:
//!
//! ```text
//! sequence   1          2          3
//!            a created  b created  a updated        since=0&limit=1 gives b
//!            (superseded)  row of b   row of a      since=2 has to give "a created", not "a updated"
//! ```
//!
//! The same distinguishes a reader that began with nothing, and has read half of what there is, from one that was away for too
//! long: the first one stands below the horizon, too, and misses nothing.

use std::sync::Arc;

use axum::body::Bytes;

use super::{
    form::{Form, Writer, write_string},
    page::reading,
};
use crate::{
    cursor::Cursor,
    dispatcher::DeliveryBatch,
    encoding::Sequence,
    event::{EventKind, Kinds},
    notification::Notification,
};

/// What a row says to a reader whose reading began as `cursor` says and that wants these kinds of events: one of them, or nothing.
///
/// A database has one row, which says what matters most of what is new: that it is deleted; or else that it was created; or that
/// it was updated. A new design document is an update to those who do not ask for it by name.
pub(super) fn kind_of(row: &Notification, cursor: &Cursor, wanted: Kinds) -> Option<EventKind> {
    let is_new = |at: Option<Sequence>| at.is_some_and(|at| cursor.is_news(at));
    if row.is_deleted() {
        // What comes for a database after its deletion is counted in its row, but is no second deletion.
        let is_delivered = is_new(row.deleted_at) && wanted.contains(EventKind::Deleted);
        return is_delivered.then_some(EventKind::Deleted);
    }
    let has_ddoc = is_new(row.ddoc_updated_at);
    let is_updated = is_new(row.updated_at) || (has_ddoc && !wanted.contains(EventKind::DdocUpdated));
    let candidates = [
        (EventKind::Created, is_new(row.created_at)),
        (EventKind::Updated, is_updated),
        (EventKind::DdocUpdated, has_ddoc),
    ];
    candidates.into_iter().find(|&(kind, is_new)| is_new && wanted.contains(kind)).map(|(kind, _)| kind)
}

/// Rows in order, for one reader, and how many of them were written.
#[derive(Debug)]
pub(super) struct Rows {
    /// The rows.
    all: Vec<Arc<Notification>>,
    /// For each row whether a client may stop behind it with a plain sequence.
    are_plain: Vec<bool>,
    /// The reading that they are a part of.
    reading: Cursor,
    /// Where to read on behind them.
    next: Cursor,
    /// The next one to be written.
    place: usize,
}

impl Rows {
    /// What a reader at `from` has read who stands at `next` now; rows up to `horizon` may have been dropped.
    pub fn new(rows: Vec<Arc<Notification>>, from: Cursor, next: Cursor, horizon: Sequence) -> Self {
        let reading = reading(from, next);
        let are_plain = are_plain(&rows, &reading, horizon, next.began().is_none());
        Self { all: rows, are_plain, reading, next, place: 0 }
    }

    /// What a subscriber was delivered, which knew something.
    pub fn of(batch: &DeliveryBatch) -> Self {
        let from = batch.iter().next().expect("a batch is never empty").since();
        let rows = batch.iter().map(|delivery| Arc::clone(delivery.notification())).collect();
        Self::new(rows, from, batch.cursor(), Sequence::MIN)
    }

    /// Where to read on behind them.
    pub fn next(&self) -> Cursor {
        self.next
    }

    /// How many are still to be written.
    pub fn left(&self) -> usize {
        self.all.len() - self.place
    }

    /// Whether they are all that there was to read.
    pub fn is_complete(&self) -> bool {
        self.next.began().is_none()
    }

    /// Writes those that have something new for a reader that wants `kinds`, at most `limit` and as much as the chunk takes.
    pub fn write(&mut self, kinds: Kinds, out: &mut Writer, limit: u64) {
        let before = out.rows();
        while let Some(row) = self.all.get(self.place)
            && out.rows() - before < limit
            && !out.is_full()
        {
            if let Some(kind) = kind_of(row, &self.reading, kinds) {
                write_row(out, row, kind, &self.seq(self.place));
            }
            self.place += 1;
        }
    }

    /// What a client gets as its position behind the row at `place`.
    fn seq(&self, place: usize) -> Cursor {
        let at = self.all[place].sequence;
        if self.are_plain[place] { at.into() } else { self.reading.at(at) }
    }

    /// Where a client stands that was sent what was written; `None` if nothing was: not where the reading has come to, but at the
    /// last row, so that the position stays while nothing happens.
    pub fn position(&self) -> Option<Cursor> {
        let last = self.place.checked_sub(1)?;
        // Below the horizon a sequence would not say that nothing was missed.
        let is_below = self.left() == 0 && self.is_complete() && !self.are_plain[last];
        Some(if is_below { self.next } else { self.seq(last) })
    }
}

/// For which rows and kinds of events a look is.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Wish(Form, Kinds);

/// How the rows of a batch look in one form, to all who want the same kinds of events.
#[derive(Debug)]
pub(super) struct Look {
    /// All rows that are wanted.
    pub bytes: Bytes,
    /// How many they are.
    pub rows: u64,
    /// Where a client stands behind them.
    pub position: Cursor,
}

/// How `batch` looks, made once for all who are delivered the same; no look if it would take more than a chunk, and `None` if
/// others are delivered something else.
pub(super) fn look(batch: &DeliveryBatch, form: Form, kinds: Kinds) -> Option<Arc<(Wish, Option<Look>)>> {
    let make = || {
        let (mut rows, mut out) = (Rows::of(batch), Writer::new(form));
        rows.write(kinds, &mut out, u64::MAX);
        let position = rows.position().filter(|_| rows.left() == 0)?;
        let (bytes, rows) = out.take();
        Some(Look { bytes, rows, position })
    };
    Some(batch.whole()?.once(Wish(form, kinds), make))
}

/// Writes a row.
pub(super) fn write_row(out: &mut Writer, row: &Notification, kind: EventKind, seq: &Cursor) {
    out.row(seq, |bytes| {
        use std::io::Write;
        bytes.extend_from_slice(b"{\"db_name\":");
        write_string(bytes, row.name.as_str());
        write!(bytes, ",\"type\":\"{}\",\"seq\":\"{seq}\"}}", kind.as_str())
            .expect("a vector takes all bytes");
    });
}

/// For each row whether a client may stop there with a plain sequence: nothing is new in later rows that happened before, and
/// nothing before was dropped.
fn are_plain(
    rows: &[Arc<Notification>],
    reading: &Cursor,
    horizon: Sequence,
    is_complete: bool,
) -> Vec<bool> {
    // The oldest news of all later rows.
    let mut oldest = if is_complete { Sequence::MAX } else { Sequence::MIN };
    let mut are_plain: Vec<_> = rows
        .iter()
        .rev()
        .map(|row| {
            let at = row.sequence;
            let is_plain = at < oldest && (!reading.knew_nothing() || at >= horizon);
            let news = [row.created_at, row.updated_at, row.ddoc_updated_at, row.deleted_at];
            let news = news.into_iter().flatten().filter(|&at| reading.is_news(at));
            let replaced = row.replaced.map(|replaced| replaced.deleted_at);
            let replaced = replaced.filter(|&at| reading.is_news_of_replaced(at));
            oldest = oldest.min(news.chain(replaced).min().unwrap_or(at));
            is_plain
        })
        .collect();
    are_plain.reverse();
    are_plain
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cursor::Knowledge,
        encoding::{Incarnation, Versionstamp},
        event::DbName,
        http::form::CHUNK_BYTES,
        notification::{Replaced, tests::row},
    };

    fn at(version: u64) -> Sequence {
        Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
    }

    /// A row of a database that was created, updated, got a design document and was deleted then, 0 for never.
    fn database(version: u64, [created, updated, ddoc, deleted]: [u64; 4]) -> Arc<Notification> {
        let when = |version| (version > 0).then(|| at(version));
        Arc::new(Notification {
            created_at: when(created),
            updated_at: when(updated),
            ddoc_updated_at: when(ddoc),
            deleted_at: when(deleted),
            replaced: None,
            ..row(at(version))
        })
    }

    /// The positions behind `rows`.
    fn seqs(rows: &[Arc<Notification>], from: Cursor, next: Cursor, horizon: Sequence) -> Vec<Cursor> {
        let rows = Rows::new(rows.to_vec(), from, next, horizon);
        (0..rows.left()).map(|place| rows.seq(place)).collect()
    }

    #[test]
    fn the_type_is_what_matters_most_of_what_is_new_and_wanted() {
        use EventKind::{Created, DdocUpdated, Deleted, Updated};
        let row = database(9, [2, 6, 9, 0]);
        let usual = Kinds::from_iter([Created, Deleted, Updated]);
        for (since, wanted, expected) in [
            (1, usual, Some(Created)),
            (2, usual, Some(Updated)),
            (6, usual, Some(Updated)),
            (6, Kinds::ALL, Some(DdocUpdated)),
            (5, Kinds::ALL, Some(Updated)),
            (1, Updated.into(), Some(Updated)),
            (1, DdocUpdated.into(), Some(DdocUpdated)),
            (2, Created.into(), None),
            (1, Deleted.into(), None),
        ] {
            assert_eq!(kind_of(&row, &at(since).into(), wanted), expected, "{since} {wanted:?}");
        }
        let deleted = database(9, [2, 6, 6, 9]);
        assert_eq!(kind_of(&deleted, &Cursor::NOTHING, usual), Some(Deleted));
        assert_eq!(kind_of(&deleted, &at(5).into(), Kinds::from_iter([Created, Updated])), None);
        // It was once delivered again for an update that came late.
        let updated_late = database(12, [2, 12, 6, 9]);
        assert_eq!(kind_of(&updated_late, &at(8).into(), usual), Some(Deleted));
        assert_eq!(kind_of(&updated_late, &at(9).into(), usual), None);
    }

    #[test]
    fn a_position_says_no_more_than_it_has_to() {
        let (from, end) = (Cursor::from(at(1)), Cursor::from(at(20)));
        let plain = |version| Cursor::from(at(version));
        let anchored = |version| Cursor::resumed(Knowledge::UpTo(at(1)), at(20), at(version));
        let rows = [database(4, [0, 4, 0, 0]), database(7, [3, 7, 0, 0]), database(9, [8, 9, 0, 0])];
        // Who stops after the first row has still to be delivered the creation at 3.
        assert_eq!(seqs(&rows, from, end, Sequence::MIN), [anchored(4), plain(7), plain(9)]);
        assert_eq!(seqs(&rows, from, anchored(9), Sequence::MIN), [4, 7, 9].map(anchored));
        // What was known before the reading is no news.
        assert_eq!(seqs(&rows, at(3).into(), end, Sequence::MIN)[0], plain(4));
    }

    /// The deletion of an instance that was replaced is news as well, and was once forgotten here.
    #[test]
    fn a_position_keeps_the_deletion_of_what_was_replaced() {
        let mut later = Notification::clone(&database(9, [8, 9, 0, 0]));
        later.replaced = Some(Replaced { instance: later.instance, deleted_at: at(3) });
        let rows = [database(4, [0, 4, 0, 0]), Arc::new(later)];
        let from = |version| seqs(&rows, at(version).into(), at(20).into(), Sequence::MIN)[0];
        assert_eq!(from(1), Cursor::resumed(Knowledge::UpTo(at(1)), at(20), at(4)));
        assert_eq!(from(3), at(4).into());
        let unknown = seqs(&rows, Cursor::NOTHING, at(20).into(), Sequence::MIN)[0];
        assert_eq!(unknown, at(4).into(), "who began with nothing never knew it");
    }

    #[test]
    fn who_began_with_nothing_is_told_so_below_the_horizon() {
        let rows = [database(4, [4, 0, 0, 0]), database(6, [6, 0, 0, 0])];
        let [below, above] = seqs(&rows, Cursor::NOTHING, at(20).into(), at(5))[..] else { panic!() };
        assert_eq!(above, at(6).into());
        assert_eq!(below.to_string(), format!("{}-{}", at(4), at(20)));
    }

    #[test]
    fn a_chunk_is_bounded_in_bytes_whatever_the_names() {
        let name = "\u{1}".repeat(1_024);
        let long = |version| {
            let row = Notification::clone(&database(version, [version, 0, 0, 0]));
            Arc::new(Notification { name: DbName::new(&name).unwrap(), ..row })
        };
        let all: Vec<_> = (1..100).map(long).collect();
        let mut rows = Rows::new(all, Cursor::NOTHING, at(200).into(), Sequence::MIN);
        let (mut out, mut chunks, mut written) = (Writer::new(Form::Lines), 0, 0);
        while rows.left() > 0 {
            rows.write(Kinds::ALL, &mut out, u64::MAX);
            let (bytes, rows) = out.take();
            // One row may stand over its edge: six bytes for each of the name's, and some more.
            assert!(bytes.len() < CHUNK_BYTES + 7_000, "{} bytes", bytes.len());
            (chunks, written) = (chunks + 1, written + rows);
        }
        assert_eq!(written, 99, "it goes on where it was");
        assert!(chunks >= 99 * 6 * 1_024 / (40 << 10), "{chunks} chunks");
    }
}
