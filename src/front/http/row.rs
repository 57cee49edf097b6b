//! [`Rows`] writes the rows of `_db_updates` that are news to one reader. [`Rendering`] holds the bytes of a batch for many readers.
//!
//! # Positions
//!
//! A client keeps only one string, which has to contain everything that a reader must remember: the text of a [`Cursor`]. Usually that is a
//! plain sequence. But if a later row has news from before the position, the text also says what the reader knew and could read:
//!
//! ```text
//! sequence   1          2          3
//!            a created  b created  a updated        since=0&limit=1 gives b
//!            (superseded)  row of b   row of a      since=2 has to give "a created", not "a updated"
//! ```
//!
//! The text also distinguishes a reader that began with nothing from one that was away for too long. Both may be below the horizon. The
//! first has yet to read some of the rows and misses nothing; the second has missed rows.
//!
//! A database can have several rows, one for each type. They are written together. All but the last have the position before all of them,
//! so a client that is cut off between two of them gets all of them again.

use std::{sync::Arc, vec};

use axum::body::Bytes;
use smallvec::SmallVec;

use super::{
    page::reading,
    query::Query,
    wire_format::{WireFormat, Writer, write_string},
};
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        event::{EventKind, Kinds},
        filter::Filter,
        notification::Notification,
    },
    roles::dispatcher::DeliveryBatch,
};

/// The work after which a turn ends: the length of the glob times the total length of the names compared with it, in bytes. With a glob
/// that was chosen to be slow, this takes about half a millisecond. A turn compares at least one name, which takes up to 10 ms if the name
/// and the glob are as long as allowed.
const GLOB_WORK_PER_TURN: usize = 50_000;

/// The types of the rows that a reader gets for one database.
type Types = SmallVec<[EventKind; 4]>;

/// The rows that a client wants.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub kinds: Kinds,
    /// The databases whose rows are wanted; `None` for all.
    pub names: Option<Filter>,
}

impl Wanted {
    /// Returns the rows that `query` asks for.
    pub fn of(query: &Query) -> Self {
        Self { kinds: query.types, names: query.names.clone() }
    }

    /// Returns the length of the glob with which names are compared, if there is one.
    pub fn glob_len(&self) -> Option<usize> {
        self.names.as_ref().and_then(Filter::glob_len)
    }

    /// Returns the wanted events of `row` that are news to a reader, in the order in which they happened. `cursor` says how the reading
    /// began.
    ///
    /// For a deleted database only the deletion is returned. A reader that does not want `ddoc_updated` gets a new design document as an
    /// update.
    pub fn types_of(&self, row: &Notification, cursor: &Cursor) -> Types {
        use EventKind::{Created, DdocUpdated, Deleted, Updated};
        if self.names.as_ref().is_some_and(|names| !names.matches(row, cursor)) {
            return Types::new();
        }
        let news = |at: Option<Sequence>| at.filter(|&at| cursor.is_news(at));
        let ddoc = news(row.ddoc_updated_at);
        let happened: [(EventKind, Option<Sequence>); 4] = if row.is_deleted() {
            // An event after the deletion is counted in the row, but is not a second deletion.
            let none = (Created, None);
            [(Deleted, news(row.deleted_at)), none, none, none]
        } else {
            // An earlier database with this name was deleted. The reader may have known it.
            let gone = row.replaced.map(|replaced| replaced.deleted_at);
            let updated = news(row.updated_at).max(ddoc.filter(|_| !self.kinds.contains(DdocUpdated)));
            [
                (Deleted, gone.filter(|&at| cursor.is_news_of_replaced(at))),
                (Created, news(row.created_at)),
                (Updated, updated),
                (DdocUpdated, ddoc),
            ]
        };
        let wanted = happened.into_iter().filter(|(kind, _)| self.kinds.contains(*kind));
        let mut wanted: SmallVec<[(Sequence, EventKind); 4]> =
            wanted.filter_map(|(kind, at)| Some((at?, kind))).collect();
        // The sort is stable, so events from the same fold keep their order.
        wanted.sort_by_key(|(at, _)| *at);
        wanted.into_iter().map(|(_, kind)| kind).collect()
    }
}

/// Rows in order for one reader. Each row is dropped once it is written, so a client that does not read holds only the remaining ones.
#[derive(Debug)]
pub(super) struct Rows {
    /// The rows to write. The flag says whether a client may stop after the row with a plain sequence.
    left: vec::IntoIter<(Arc<Notification>, bool)>,
    /// The cursor of the reading that these rows belong to.
    reading: Cursor,
    /// Where to continue reading after these rows.
    pub next: Cursor,
    /// Whether these rows reach the end of the feed.
    pub is_complete: bool,
    /// Whether the newest rows come first. If so, `next` is where to continue reading, before these rows.
    descending: bool,
    /// The position of a client that has received every row that was written; `None` if none was. This is the position of the last row, not
    /// the end of the reading, so that it stays the same while nothing happens.
    last: Option<Cursor>,
}

impl Rows {
    /// Creates the rows of a page that began at `from` and ended at `next`. Rows up to `horizon` may have been dropped.
    pub fn new(rows: Vec<Arc<Notification>>, from: Cursor, next: Cursor, horizon: Sequence) -> Self {
        let (reading, is_complete) = (reading(from, next), next.readable().is_none());
        let are_plain = are_plain(&rows, &reading, horizon, is_complete);
        let rows: Vec<_> = rows.into_iter().zip(are_plain).collect();
        Self { left: rows.into_iter(), reading, next, is_complete, descending: false, last: None }
    }

    /// Creates the rows of a page that was read from its newest row back to `to`. No client resumes in the middle of such a feed.
    pub fn backwards(rows: Vec<Arc<Notification>>, to: Sequence, is_complete: bool) -> Self {
        let rows: Vec<_> = rows.into_iter().map(|row| (row, true)).collect();
        let (reading, next) = (Cursor::BEGINNING, to.into());
        Self { left: rows.into_iter(), reading, next, is_complete, descending: true, last: None }
    }

    /// Creates the rows from a batch that the dispatcher delivered to a subscriber with a position.
    pub fn of(batch: &DeliveryBatch) -> Self {
        let from = batch.iter().next().expect("a batch is never empty").since();
        let rows = batch.iter().map(|delivery| Arc::clone(delivery.notification())).collect();
        Self::new(rows, from, batch.cursor(), Sequence::MIN)
    }

    /// Returns how many rows remain to be written.
    pub fn left(&self) -> usize {
        self.left.len()
    }

    /// Writes the wanted rows, database by database, until `limit` rows are written, the chunk is full, or the task should yield.
    pub fn write(&mut self, wanted: &Wanted, out: &mut Writer, limit: u64) {
        let before = out.rows();
        let (glob_len, mut work) = (wanted.glob_len().unwrap_or(0), 0);
        while out.rows() - before < limit
            && !out.is_full()
            && work < GLOB_WORK_PER_TURN
            && let Some((row, is_plain)) = self.left.next()
        {
            work += glob_len * row.name.as_str().len();
            let after = self.after(row.sequence, is_plain);
            let mut types = wanted.types_of(&row, &self.reading);
            if self.descending {
                types.reverse();
            }
            for (place, kind) in types.iter().enumerate() {
                let is_last = self.descending || place + 1 == types.len();
                write_row(out, &row, *kind, if is_last { after } else { self.before(row.sequence) });
            }
            // Below the horizon, a plain sequence would not show that the client has missed nothing.
            let is_below = self.left() == 0 && self.is_complete && !is_plain;
            self.last = Some(if is_below { self.next } else { after });
        }
    }

    /// Returns the position of a client after the row at `at`.
    fn after(&self, at: Sequence, is_plain: bool) -> Cursor {
        if is_plain { at.into() } else { self.reading.at(at) }
    }

    /// Returns the position of a client before the row at `at`, whose news the client has yet to receive.
    fn before(&self, at: Sequence) -> Cursor {
        self.reading.at(at.before())
    }

    /// Returns the position of a client that has received everything written so far; `None` if nothing was written.
    pub fn position(&self) -> Option<Cursor> {
        self.last
    }
}

/// The format and the kinds of events that rendered bytes are for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RenderKey(WireFormat, Kinds);

/// The bytes of a batch in one format, for all readers that want the same kinds of events. The chunks live as long as the batch.
pub(super) type Rendering = (RenderKey, Vec<RenderedChunk>);

/// A part of the bytes of a batch, as large as a chunk of a feed.
#[derive(Debug)]
pub(super) struct RenderedChunk {
    pub bytes: Bytes,
    pub rows: u64,
    /// The position of a client after these rows.
    pub position: Cursor,
}

/// Renders `batch` once for all readers that get the same rows. Returns `None` if readers of this batch get different rows.
pub(super) fn render(batch: &DeliveryBatch, form: WireFormat, wanted: &Wanted) -> Option<Arc<Rendering>> {
    let make = || {
        let (mut rows, mut out, mut chunks) = (Rows::of(batch), Writer::new(form), Vec::new());
        while rows.left() > 0 {
            rows.write(wanted, &mut out, u64::MAX);
            let position = rows.position().expect("an empty chunk has room for something");
            let (bytes, rows) = out.take();
            chunks.push(RenderedChunk { bytes, rows, position });
        }
        chunks
    };
    // A whole batch has exactly the rows with wanted names, so the key needs only the kinds.
    Some(batch.whole()?.once(RenderKey(form, wanted.kinds), make))
}

fn write_row(out: &mut Writer, row: &Notification, kind: EventKind, seq: Cursor) {
    out.row(&seq, |bytes| {
        use std::io::Write;
        bytes.extend_from_slice(b"{\"db_name\":");
        write_string(bytes, row.name.as_str());
        write!(bytes, ",\"type\":\"{}\",\"seq\":\"{seq}\"}}", kind.as_str())
            .expect("a vector takes all bytes");
    });
}

/// Returns for each row whether a client may stop there with a plain sequence. It may if no later row has news from before the row, and no
/// earlier row was dropped.
fn are_plain(
    rows: &[Arc<Notification>],
    reading: &Cursor,
    horizon: Sequence,
    is_complete: bool,
) -> Vec<bool> {
    // The oldest news in all later rows.
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
            // In an older copy of the store, the row may be at any earlier position, with other news: it may have moved many times.
            let moved = row.previous.filter(|&at| reading.is_news(at)).map(|_| Sequence::MIN);
            oldest = oldest.min(news.chain(replaced).chain(moved).min().unwrap_or(at));
            is_plain
        })
        .collect();
    are_plain.reverse();
    are_plain
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{
        cursor::Knowledge,
        encoding::{Incarnation, Versionstamp},
        notification::{Replaced, tests::row},
    };

    fn at(version: u64) -> Sequence {
        Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
    }

    /// Makes the row of a database from the versions at which it was created, updated, given a design document and deleted; 0 means never.
    fn database(version: u64, [created, updated, ddoc, deleted]: [u64; 4]) -> Arc<Notification> {
        let when = |version| (version > 0).then(|| at(version));
        Arc::new(Notification {
            created_at: when(created),
            updated_at: when(updated),
            ddoc_updated_at: when(ddoc),
            deleted_at: when(deleted),
            replaced: None,
            previous: None,
            ..row(at(version))
        })
    }

    /// Returns the positions after `rows`.
    fn seqs(rows: &[Arc<Notification>], from: Cursor, next: Cursor, horizon: Sequence) -> Vec<Cursor> {
        let mut rows = Rows::new(rows.to_vec(), from, next, horizon);
        let mut seqs = Vec::new();
        while let Some((row, is_plain)) = rows.left.next() {
            seqs.push(rows.after(row.sequence, is_plain));
        }
        seqs
    }

    /// Regression: a reader got only one of several new kinds, so `types=deleted` returned nothing for a database deleted and created
    /// again.
    #[test]
    fn each_kind_that_is_new_and_wanted_is_delivered_in_the_order_of_events() {
        use EventKind::{Created, DdocUpdated, Deleted, Updated};
        let of = |row: &Notification, since: u64, wanted| {
            Wanted { kinds: wanted, names: None }.types_of(row, &at(since).into()).to_vec()
        };
        let row = database(9, [2, 6, 9, 0]);
        let usual = Kinds::from_iter([Created, Deleted, Updated]);
        for (since, wanted, expected) in [
            (1, usual, &[Created, Updated][..]),
            (2, usual, &[Updated]),
            (6, usual, &[Updated]),
            (9, usual, &[]),
            (1, Kinds::ALL, &[Created, Updated, DdocUpdated]),
            (6, Kinds::ALL, &[DdocUpdated]),
            (1, Updated.into(), &[Updated]),
            (1, DdocUpdated.into(), &[DdocUpdated]),
            (2, Created.into(), &[]),
            (1, Deleted.into(), &[]),
        ] {
            assert_eq!(of(&row, since, wanted), expected, "{since} {wanted:?}");
        }
        assert_eq!(of(&database(9, [2, 9, 6, 0]), 1, Kinds::ALL), [Created, DdocUpdated, Updated]);
        let deleted = database(9, [2, 6, 6, 9]);
        assert_eq!(of(&deleted, 1, usual), [Deleted]);
        assert_eq!(of(&deleted, 5, Kinds::from_iter([Created, Updated])), []);
        // Regression: an update after the deletion made the deletion news again to readers that knew it.
        let updated_late = database(12, [2, 12, 6, 9]);
        assert_eq!((of(&updated_late, 8, usual), of(&updated_late, 9, usual)), (vec![Deleted], vec![]));
        // An earlier database with this name was deleted.
        let mut again = Notification::clone(&database(9, [9, 9, 0, 0]));
        again.replaced = Some(Replaced { instance: again.instance, deleted_at: at(5) });
        assert_eq!(of(&again, 4, usual), [Deleted, Created, Updated]);
        assert_eq!(of(&again, 4, Deleted.into()), [Deleted]);
        assert_eq!(of(&again, 5, usual), [Created, Updated]);
        let known = Wanted { kinds: usual, names: None };
        assert_eq!(known.types_of(&again, &Cursor::BEGINNING).len(), 2, "it was never known");
    }

    /// Cause: a position between two rows of a database had to say which were sent, and grew to 90 digits. Now a database is sent whole: a
    /// client that is cut off within one gets all of it again, and the limit is exceeded by at most three rows.
    #[test]
    fn the_rows_of_a_database_are_not_split() {
        let mut first = Notification::clone(&database(9, [7, 8, 9, 0]));
        first.replaced = Some(Replaced { instance: first.instance, deleted_at: at(5) });
        let (first, second) = (Arc::new(first), database(10, [10, 0, 0, 0]));
        let wanted = Wanted { kinds: Kinds::ALL, names: None };
        let read = |since: Cursor| {
            let all = [&first, &second].map(Arc::clone).into_iter();
            let left = all.filter(|row| row.sequence > since.position()).collect();
            let mut rows = Rows::new(left, since, at(20).into(), Sequence::MIN);
            let mut out = Writer::new(WireFormat::Lines);
            rows.write(&wanted, &mut out, 1);
            let text = String::from_utf8(out.take().0.to_vec()).unwrap();
            let fields = |line: &str| [7, 11].map(|place| line.split('"').nth(place).unwrap().to_owned());
            (text.lines().map(fields).collect::<Vec<_>>(), rows.position().unwrap())
        };
        let (rows, position) = read(at(2).into());
        let kinds: Vec<_> = rows.iter().map(|[kind, _]| kind.as_str()).collect();
        assert_eq!(kinds, ["deleted", "created", "updated", "ddoc_updated"]);
        assert!(rows.is_sorted_by_key(|[_, seq]| seq.clone()));
        assert_eq!((position, &rows[3][1]), (at(9).into(), &at(9).to_string()));
        for [_, seq] in &rows[..3] {
            assert_eq!(read(seq.parse().unwrap()).0, rows, "since {seq}");
        }
        assert_eq!(read(position).0, [["created".to_owned(), at(10).to_string()]]);
    }

    #[test]
    fn a_position_says_no_more_than_it_has_to() {
        let (from, end) = (Cursor::from(at(1)), Cursor::from(at(20)));
        let plain = |version| Cursor::from(at(version));
        let anchored = |version| Cursor::resumed(Knowledge::UpTo(at(1)), at(1), at(version), at(20));
        let rows = [database(4, [0, 4, 0, 0]), database(7, [3, 7, 0, 0]), database(9, [8, 9, 0, 0])];
        // A client that stops after the first row has not received the creation at 3 yet.
        assert_eq!(seqs(&rows, from, end, Sequence::MIN), [anchored(4), plain(7), plain(9)]);
        assert_eq!(seqs(&rows, from, anchored(9), Sequence::MIN), [4, 7, 9].map(anchored));
        // Events from before the reading are not news.
        assert_eq!(seqs(&rows, at(3).into(), end, Sequence::MIN)[0], plain(4));
    }

    /// Bug: a client stopped with a plain sequence after a former position of a row, the last one or an earlier one. It continued in an
    /// older copy of the store, which still had the row at that position, and never got the row. Fix: the position says how far the client
    /// could read, wherever the row was.
    #[test]
    fn a_position_says_what_could_be_read_between_the_places_of_a_row_that_moved() {
        let mut moved = Notification::clone(&database(9, [0, 9, 0, 0]));
        moved.previous = Some(at(5));
        let rows = [database(4, [4, 0, 0, 0]), database(7, [7, 0, 0, 0]), Arc::new(moved)];
        let stops = |from: u64| seqs(&rows, at(from).into(), at(20).into(), Sequence::MIN);
        let anchored = |version| Cursor::resumed(Knowledge::UpTo(at(1)), at(1), at(version), at(20));
        assert_eq!(stops(1), [anchored(4), anchored(7), at(9).into()], "it may have moved to 5");
        assert_eq!(stops(6)[1], at(7).into(), "it knew the row where it was");
    }

    /// Regression: positions did not take into account that the deletion of a replaced instance is news.
    #[test]
    fn a_position_keeps_the_deletion_of_what_was_replaced() {
        let mut later = Notification::clone(&database(9, [8, 9, 0, 0]));
        later.replaced = Some(Replaced { instance: later.instance, deleted_at: at(3) });
        let rows = [database(4, [0, 4, 0, 0]), Arc::new(later)];
        let from = |version| seqs(&rows, at(version).into(), at(20).into(), Sequence::MIN)[0];
        assert_eq!(from(1), Cursor::resumed(Knowledge::UpTo(at(1)), at(1), at(4), at(20)));
        assert_eq!(from(3), at(4).into());
        let unknown = seqs(&rows, Cursor::BEGINNING, at(20).into(), Sequence::MIN)[0];
        assert_eq!(unknown, at(4).into(), "who began with nothing never knew it");
    }

    #[test]
    fn rows_below_the_horizon_name_the_end_for_a_reader_that_began_with_nothing() {
        let rows = [database(4, [4, 0, 0, 0]), database(6, [6, 0, 0, 0])];
        let [below, above] = seqs(&rows, Cursor::BEGINNING, at(20).into(), at(5))[..] else { panic!() };
        assert_eq!(above, at(6).into());
        assert_eq!(below.to_string(), format!("{}-{}-{}-0", at(4), at(20), at(20)));
    }

    /// Regression: requests with slow globs compared a whole page of names without a pause, so many of them together stopped the heartbeats of
    /// the process.
    #[test]
    fn rows_that_are_compared_with_a_glob_are_written_in_turns() {
        let rows: Vec<_> = (1..=120).map(|n| database(n, [n, 0, 0, 0])).collect();
        let name_len = rows[0].name.as_str().len();
        let mut rows = Rows::new(rows, Cursor::BEGINNING, at(150).into(), Sequence::MIN);
        let glob = format!("*z{}", "?".repeat(998));
        let wanted = Wanted { kinds: Kinds::ALL, names: Some(Filter::glob(&glob).unwrap()) };
        let (mut out, turn) = (Writer::new(WireFormat::Lines), GLOB_WORK_PER_TURN / (1_000 * name_len));
        for turns in 1..=2 {
            rows.write(&wanted, &mut out, u64::MAX);
            assert_eq!((rows.left(), out.rows()), (120 - turns * turn, 0));
        }
    }
}
