//! [`Rows`] writes the rows of `_db_updates` that are news to one reader. [`Rendering`] has the bytes of a batch for many readers.
//!
//! # Positions
//!
//! A client keeps only one text, so the text has to contain all that a reader must remember. The text is that of a [`Cursor`].
//! Mostly that is a plain sequence. But if a later row has news from before the position, the text also says where and when the
//! reading began:
//!
//! ```text
//! sequence   1          2          3
//!            a created  b created  a updated        since=0&limit=1 gives b
//!            (superseded)  row of b   row of a      since=2 has to give "a created", not "a updated"
//! ```
//!
//! Between two rows of one database, the text also says which of them were sent ([`Position`]). And it says whether a reader began
//! with nothing, or was away for too long. Both may stand below the horizon. The first one has still to read half of the rows and
//! misses nothing; the second one has missed rows.

use std::{sync::Arc, vec};

use axum::body::Bytes;
use smallvec::SmallVec;

use super::{
    page::reading,
    position::{Part, Position},
    wire_format::{WireFormat, Writer, write_string},
};
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        event::{EventKind, Kinds},
        notification::Notification,
    },
    roles::dispatcher::DeliveryBatch,
};

/// What a row of `_db_updates` says about a database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowEvent {
    /// An earlier database of the name was deleted. The reader may have known it.
    Gone,
    /// An event of the row's own database.
    Event(EventKind),
}

impl RowEvent {
    /// The bit of this event in a position. Bits never change, because clients keep positions.
    fn bit(self) -> u8 {
        match self {
            Self::Event(kind) => 1 << kind as u8,
            Self::Gone => 1 << 4,
        }
    }

    /// Returns the type that clients read.
    pub fn kind(self) -> EventKind {
        match self {
            Self::Gone => EventKind::Deleted,
            Self::Event(kind) => kind,
        }
    }
}

/// The events of one row that a reader gets.
pub(super) type RowEvents = SmallVec<[RowEvent; 4]>;

/// Returns the events of `row` that are news to a reader, in the order in which they happened. The `cursor` says how its reading
/// began, `wanted` which kinds of events it wants, and `part` which events of this row it has received.
///
/// A deleted database has only its deletion. A reader that does not ask for `ddoc_updated` gets a new design document as an update.
pub(super) fn items_of(row: &Notification, cursor: &Cursor, wanted: Kinds, part: Option<&Part>) -> RowEvents {
    use EventKind::{Created, DdocUpdated, Deleted, Updated};
    let news = |at: Option<Sequence>| at.filter(|&at| cursor.is_news(at));
    let ddoc = news(row.ddoc_updated_at);
    let happened: [(RowEvent, Option<Sequence>); 4] = if row.is_deleted() {
        // An event after the deletion is counted in the row, but is no second deletion.
        let none = (RowEvent::Gone, None);
        [(RowEvent::Event(Deleted), news(row.deleted_at)), none, none, none]
    } else {
        let gone = row.replaced.map(|replaced| replaced.deleted_at);
        let updated = news(row.updated_at).max(ddoc.filter(|_| !wanted.contains(DdocUpdated)));
        [
            (RowEvent::Gone, gone.filter(|&at| cursor.is_news_of_replaced(at))),
            (RowEvent::Event(Created), news(row.created_at)),
            (RowEvent::Event(Updated), updated),
            (RowEvent::Event(DdocUpdated), ddoc),
        ]
    };
    let part = part.filter(|part| part.instance == row.instance);
    let is_sent = |item: RowEvent, at| part.is_some_and(|part| part.sent & item.bit() != 0 && at <= part.at);
    let mut items: SmallVec<[(Sequence, RowEvent); 4]> = happened
        .into_iter()
        .filter(|(item, _)| wanted.contains(item.kind()))
        .filter_map(|(item, at)| at.filter(|&at| !is_sent(item, at)).map(|at| (at, item)))
        .collect();
    // The sort is stable, so events of one fold keep their order.
    items.sort_by_key(|(at, _)| *at);
    items.into_iter().map(|(_, item)| item).collect()
}

/// Rows in order for one reader. A row that was written is dropped, so a client that does not read holds only the others.
#[derive(Debug)]
pub(super) struct Rows {
    /// The rows to write, each with whether a client may stop after it with a plain sequence.
    left: vec::IntoIter<(Arc<Notification>, bool)>,
    /// The cursor of the reading that these rows belong to.
    reading: Cursor,
    /// Where to read on after these rows.
    next: Cursor,
    /// The position of a client that has received every row that was written; `None` if there was none. This is the position of the
    /// last row, not the end of the reading, so that it stays the same while nothing happens.
    last: Option<Position>,
    /// The events of the next row that were written, one bit each.
    sent: u8,
    /// The position of a client that has received some events of the next row, but not all.
    middle: Option<Position>,
    /// The events that the reader received earlier of a row that is still to come.
    part: Option<Part>,
}

impl Rows {
    /// Makes the rows of a page that began at `from` and ended at `next`. Rows up to `horizon` may have been dropped.
    pub fn new(rows: Vec<Arc<Notification>>, from: Position, next: Cursor, horizon: Sequence) -> Self {
        let reading = reading(from.cursor, next);
        let are_plain = are_plain(&rows, &reading, horizon, next.began().is_none());
        let rows: Vec<_> = rows.into_iter().zip(are_plain).collect();
        Self { left: rows.into_iter(), reading, next, last: None, sent: 0, middle: None, part: from.part }
    }

    /// Makes the rows that the dispatcher delivered to a subscriber with a position.
    pub fn of(batch: &DeliveryBatch) -> Self {
        let from = batch.iter().next().expect("a batch is never empty").since();
        let rows = batch.iter().map(|delivery| Arc::clone(delivery.notification())).collect();
        Self::new(rows, from.into(), batch.cursor(), Sequence::MIN)
    }

    /// Returns where to read on after these rows.
    pub fn next(&self) -> Position {
        // A reader at the end has passed the row of the part.
        Position { cursor: self.next, part: self.part.filter(|_| !self.is_complete()) }
    }

    /// Returns how many rows are still to be written.
    pub fn left(&self) -> usize {
        self.left.len()
    }

    /// Returns whether these rows reach the end of the feed.
    pub fn is_complete(&self) -> bool {
        self.next.began().is_none()
    }

    /// Writes the events of the kinds `kinds` that are news to the reader, one row each. It stops after `limit` rows, or when the
    /// chunk is full.
    pub fn write(&mut self, kinds: Kinds, out: &mut Writer, limit: u64) {
        let before = out.rows();
        while let Some((row, _)) = self.left.as_slice().first() {
            let row = Arc::clone(row);
            let items = items_of(&row, &self.reading, kinds, self.part.as_ref());
            let is_left = |sent: u8| items.iter().any(|item| item.bit() & !sent != 0);
            for item in &items {
                if self.sent & item.bit() != 0 {
                    continue;
                }
                if out.rows() - before >= limit || out.is_full() {
                    return;
                }
                self.sent |= item.bit();
                self.middle = is_left(self.sent).then(|| self.between(&row, &items));
                let seq = self.middle.unwrap_or_else(|| self.behind().unwrap_or_else(|| self.next()));
                write_row(out, &row, item.kind(), &seq);
            }
            self.pass();
        }
    }

    /// Drops the next row, which was written.
    fn pass(&mut self) {
        let behind = self.behind();
        let Some((row, is_plain)) = self.left.next() else { return };
        if self.part.is_some_and(|part| part.instance == row.instance) {
            self.part = None;
        }
        // Below the horizon, a plain sequence would not say that the client has missed nothing.
        let is_below = self.left() == 0 && self.is_complete() && !is_plain;
        self.last = if is_below { Some(self.next()) } else { behind };
        self.sent = 0;
    }

    /// Returns the position of a client after the next row.
    fn behind(&self) -> Option<Position> {
        let (row, is_plain) = self.left.as_slice().first()?;
        let at = row.sequence;
        let is_last = self.left() == 1 && self.is_complete();
        let part = self.part.filter(|part| part.instance != row.instance && !is_last);
        let is_plain = part.is_none() && *is_plain;
        Some(Position { cursor: if is_plain { at.into() } else { self.reading.at(at) }, part })
    }

    /// Returns the position of a client between two of the `items` of the next row.
    fn between(&self, row: &Notification, items: &RowEvents) -> Position {
        let bits = |items: &RowEvents| items.iter().fold(0, |bits, item| bits | item.bit());
        let before = self.part.as_ref().filter(|part| part.instance == row.instance).map_or(0, |part| {
            // If an event was sent and happened again, it is still to come. That also holds for a reader whose next request wants
            // other kinds.
            let again = items_of(row, &self.reading, Kinds::ALL, Some(part));
            part.sent & !bits(items) & !bits(&again)
        });
        let part = Part { sent: self.sent | before, instance: row.instance, at: row.sequence };
        Position { cursor: self.reading.at(row.sequence.before()), part: Some(part) }
    }

    /// Returns the position of a client that has received what was written; `None` if nothing was.
    pub fn position(&self) -> Option<Position> {
        self.middle.or(self.last)
    }
}

/// The format and the kinds of events that rendered bytes are for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RenderKey(WireFormat, Kinds);

/// The bytes of a batch in one format, for all readers that want the same kinds of events: one chunk or more. They are kept as long as
/// the batch is.
pub(super) type Rendering = (RenderKey, Vec<RenderedChunk>);

/// A part of the bytes of a batch, as long as a chunk of any feed.
#[derive(Debug)]
pub(super) struct RenderedChunk {
    pub bytes: Bytes,
    pub rows: u64,
    /// The position of a client after these rows.
    pub position: Position,
}

/// Renders `batch` once for all readers that are delivered the same rows. Returns `None` if other readers are delivered other rows.
pub(super) fn render(batch: &DeliveryBatch, form: WireFormat, kinds: Kinds) -> Option<Arc<Rendering>> {
    let make = || {
        let (mut rows, mut out, mut chunks) = (Rows::of(batch), Writer::new(form), Vec::new());
        while rows.left() > 0 {
            rows.write(kinds, &mut out, u64::MAX);
            let position = rows.position().expect("an empty chunk has room for something");
            let (bytes, rows) = out.take();
            chunks.push(RenderedChunk { bytes, rows, position });
        }
        chunks
    };
    Some(batch.whole()?.once(RenderKey(form, kinds), make))
}

pub(super) fn write_row(out: &mut Writer, row: &Notification, kind: EventKind, seq: &Position) {
    out.row(seq, |bytes| {
        use std::io::Write;
        bytes.extend_from_slice(b"{\"db_name\":");
        write_string(bytes, row.name.as_str());
        write!(bytes, ",\"type\":\"{}\",\"seq\":\"{seq}\"}}", kind.as_str())
            .expect("a vector takes all bytes");
    });
}

/// Returns for each row whether a client may stop there with a plain sequence. It may if later rows have no news from before the
/// row, and if no earlier row was dropped.
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
        base::{
            cursor::Knowledge,
            encoding::{Incarnation, Versionstamp},
            event::DbName,
            notification::{Replaced, tests::row},
        },
        front::http::wire_format::CHUNK_BYTES,
    };

    fn at(version: u64) -> Sequence {
        Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
    }

    /// Makes the row of a database with the versions at which it was created, updated, got a design document and was deleted; 0
    /// stands for never.
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

    /// Returns the positions after `rows`.
    fn seqs(rows: &[Arc<Notification>], from: Cursor, next: Cursor, horizon: Sequence) -> Vec<Cursor> {
        let mut rows = Rows::new(rows.to_vec(), from.into(), next, horizon);
        std::iter::from_fn(|| {
            let behind = rows.behind();
            rows.pass();
            behind.map(|position| position.cursor)
        })
        .collect()
    }

    /// Regression: of several new kinds a reader got only one, so `types=deleted` returned nothing for a database that was deleted
    /// and created again.
    #[test]
    fn each_kind_that_is_new_and_wanted_is_delivered_in_the_order_of_events() {
        use EventKind::{Created, DdocUpdated, Deleted, Updated};
        let of = |row: &Notification, since: u64, wanted| {
            let items = items_of(row, &at(since).into(), wanted, None);
            items.into_iter().map(RowEvent::kind).collect::<Vec<_>>()
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
        // Regression: a late update made the row of the deletion news again.
        let updated_late = database(12, [2, 12, 6, 9]);
        assert_eq!((of(&updated_late, 8, usual), of(&updated_late, 9, usual)), (vec![Deleted], vec![]));
        // An earlier database of the name was deleted.
        let mut again = Notification::clone(&database(9, [9, 9, 0, 0]));
        again.replaced = Some(Replaced { instance: again.instance, deleted_at: at(5) });
        assert_eq!(of(&again, 4, usual), [Deleted, Created, Updated]);
        assert_eq!(of(&again, 4, Deleted.into()), [Deleted]);
        assert_eq!(of(&again, 5, usual), [Created, Updated]);
        assert_eq!(items_of(&again, &Cursor::NOTHING, usual, None).len(), 2, "it was never known");
    }

    /// A client reads one row per request, and gets all of them.
    #[test]
    fn a_position_between_two_rows_of_a_database_resumes_between_them() {
        let mut first = Notification::clone(&database(9, [7, 8, 9, 0]));
        first.replaced = Some(Replaced { instance: first.instance, deleted_at: at(5) });
        let (first, second) = (Arc::new(first), database(10, [10, 0, 0, 0]));
        let mut position = Position::from(Cursor::from(at(2)));
        let (mut sent, mut texts) = (Vec::new(), Vec::new());
        while sent.len() < 5 {
            let all = [&first, &second].map(Arc::clone);
            let left = all.into_iter().filter(|row| row.sequence > position.cursor.position()).collect();
            let mut rows = Rows::new(left, position, at(20).into(), Sequence::MIN);
            let mut out = Writer::new(WireFormat::Lines);
            rows.write(Kinds::ALL, &mut out, 1);
            let line = String::from_utf8(out.take().0.to_vec()).unwrap();
            let kind = line.split('"').nth(7).unwrap().to_owned();
            position = rows.position().unwrap();
            assert!(line.contains(&format!("\"seq\":\"{position}\"")), "{line}");
            position = position.to_string().parse().unwrap();
            texts.push(position.to_string());
            sent.push(kind);
        }
        assert_eq!(sent, ["deleted", "created", "updated", "ddoc_updated", "created"]);
        assert!(
            texts.is_sorted() && texts[3] == at(9).to_string() && texts[4] == at(10).to_string(),
            "{texts:?}"
        );
    }

    /// The row moves on while the client is away. The client gets only the events that it has not received.
    #[test]
    fn a_position_between_two_rows_holds_also_when_the_row_has_moved() {
        use EventKind::{Created, DdocUpdated, Updated};
        let before = database(9, [7, 8, 0, 0]);
        let part = Part { sent: RowEvent::Event(Created).bit(), instance: before.instance, at: at(9) };
        let from = Position { cursor: Cursor::from(at(2)).begin(at(9)).at(at(8)), part: Some(part) };
        let kinds = |row: &Notification| {
            let items = items_of(row, &from.cursor, Kinds::ALL, from.part.as_ref());
            items.into_iter().map(RowEvent::kind).collect::<Vec<_>>()
        };
        assert_eq!(kinds(&before), [Updated]);
        assert_eq!(kinds(&database(12, [7, 8, 12, 0])), [Updated, DdocUpdated]);
        let sent = Part { sent: part.sent | RowEvent::Event(Updated).bit(), ..part };
        let items = items_of(&database(12, [7, 12, 0, 0]), &from.cursor, Kinds::ALL, Some(&sent));
        assert_eq!(
            items.into_iter().map(RowEvent::kind).collect::<Vec<_>>(),
            [Updated],
            "it was updated since"
        );
        // Until that row comes, the positions of other rows keep the part.
        let mut other = Notification::clone(&database(11, [11, 0, 0, 0]));
        other.instance.0[0] ^= 1;
        let rows = [Arc::new(other), database(12, [7, 8, 12, 0])].to_vec();
        let mut rows = Rows::new(rows, from, at(20).into(), Sequence::MIN);
        let mut out = Writer::new(WireFormat::Lines);
        rows.write(Kinds::ALL, &mut out, 1);
        assert_eq!(rows.position().unwrap().part, Some(part));
        rows.write(Kinds::ALL, &mut out, 9);
        assert_eq!((out.rows(), rows.position().unwrap()), (3, Cursor::from(at(12)).into()));
    }

    /// Regression: an event that happened again was lost if the client stopped a second time in the middle of the row.
    #[test]
    fn what_has_happened_again_is_delivered_also_after_a_second_stop() {
        use EventKind::{Created, DdocUpdated, Updated};
        let sent = RowEvent::Event(Created).bit() | RowEvent::Event(Updated).bit();
        let row = database(12, [7, 12, 11, 0]);
        let part = Part { sent, instance: row.instance, at: at(9) };
        let mut position = Position { cursor: Cursor::from(at(2)).begin(at(9)).at(at(8)), part: Some(part) };
        let mut kinds = Vec::new();
        // A reader that wants only design documents in between loses nothing either.
        for wanted in [DdocUpdated.into(), Kinds::ALL] {
            let mut rows = Rows::new(vec![Arc::clone(&row)], position, at(20).into(), Sequence::MIN);
            kinds.extend(
                items_of(&row, &position.cursor, wanted, position.part.as_ref())
                    .into_iter()
                    .map(RowEvent::kind),
            );
            rows.write(Kinds::ALL, &mut Writer::new(WireFormat::Lines), 1);
            position = rows.position().unwrap();
        }
        assert_eq!(kinds, [DdocUpdated, Updated]);
        assert_eq!(position, Cursor::from(at(12)).into());
    }

    /// A feed whose databases move, and a client that stops anywhere.
    struct Model {
        dice: fastrand::Rng,
        version: u64,
        rows: Vec<Arc<Notification>>,
        position: Position,
        text: String,
    }

    impl Model {
        /// Writes rows of some databases in one fold.
        fn fold(&mut self) {
            self.version += 1;
            for order in 0..self.dice.u16(1..5) {
                let now = Sequence::new(Incarnation(0), Versionstamp::new(self.version, 0), order);
                let number = self.dice.u8(..6);
                let before =
                    self.rows.iter().position(|row| row.name.as_str().as_bytes()[0] == b'a' + number);
                let before = before.map(|place| self.rows.remove(place));
                let mut row = before.map_or_else(
                    || Notification::clone(&database(1, [0; 4])),
                    |row| Notification::clone(&row),
                );
                row.name = DbName::new(&char::from(b'a' + number).to_string()).unwrap();
                let is_new = row.created_at.is_none() || row.is_deleted() || self.dice.u8(..4) == 0;
                if is_new {
                    let gone = row.deleted_at.unwrap_or(now);
                    row.replaced =
                        row.created_at.map(|_| Replaced { instance: row.instance, deleted_at: gone });
                    row.instance = crate::base::event::DbInstance(self.dice.u128(..).to_be_bytes());
                    (row.created_at, row.updated_at, row.ddoc_updated_at, row.deleted_at) =
                        (Some(now), None, None, None);
                } else if self.dice.u8(..4) == 0 {
                    row.deleted_at = Some(now);
                }
                if !row.is_deleted() {
                    row.updated_at = if self.dice.bool() { Some(now) } else { row.updated_at };
                    row.ddoc_updated_at = if self.dice.bool() { Some(now) } else { row.ddoc_updated_at };
                }
                row.sequence = now;
                self.rows.push(Arc::new(row));
            }
        }

        /// Reads some rows in one request, and continues from the position that they give.
        fn read(&mut self) {
            let from = self.position;
            let mut left: Vec<_> = self
                .rows
                .iter()
                .filter(|row| row.sequence > from.cursor.position())
                .map(Arc::clone)
                .collect();
            let Some(newest) = left.last().map(|row| row.sequence) else { return };
            left.truncate(self.dice.usize(1..8));
            let end = left[left.len() - 1].sequence;
            let next = if end == newest { end.into() } else { from.cursor.begin(newest).at(end) };
            let mut rows = Rows::new(left, from, next, Sequence::MIN);
            let mut out = Writer::new(WireFormat::Lines);
            rows.write(Kinds::ALL, &mut out, self.dice.u64(1..6));
            for line in String::from_utf8(out.take().0.to_vec()).unwrap().lines() {
                let text = line.split('"').nth(11).unwrap();
                assert!(*text > *self.text, "{line} after {}", self.text);
                text.clone_into(&mut self.text);
            }
            self.position = rows.position().unwrap_or(from);
            assert_eq!(self.position.to_string().parse::<Position>().unwrap(), self.position);
        }
    }

    /// Regression: texts of positions did not sort. A client with a part of one database stopped in the middle of another database,
    /// whose row came directly after the row of the position before.
    #[test]
    fn positions_sort_as_texts_wherever_a_client_stops() {
        for seed in [668_212_995_821_201_305].into_iter().chain(0..500) {
            let dice = fastrand::Rng::with_seed(seed);
            let position = Cursor::NOTHING.into();
            let mut model = Model { dice, version: 1, rows: Vec::new(), position, text: String::new() };
            for _ in 0..100 {
                if model.dice.bool() {
                    model.fold();
                } else {
                    model.read();
                }
            }
        }
    }

    #[test]
    fn a_position_says_no_more_than_it_has_to() {
        let (from, end) = (Cursor::from(at(1)), Cursor::from(at(20)));
        let plain = |version| Cursor::from(at(version));
        let anchored = |version| Cursor::resumed(Knowledge::UpTo(at(1)), at(20), at(version));
        let rows = [database(4, [0, 4, 0, 0]), database(7, [3, 7, 0, 0]), database(9, [8, 9, 0, 0])];
        // A client that stops after the first row is still to get the creation at 3.
        assert_eq!(seqs(&rows, from, end, Sequence::MIN), [anchored(4), plain(7), plain(9)]);
        assert_eq!(seqs(&rows, from, anchored(9), Sequence::MIN), [4, 7, 9].map(anchored));
        // Events from before the reading are no news.
        assert_eq!(seqs(&rows, at(3).into(), end, Sequence::MIN)[0], plain(4));
    }

    /// Regression: positions did not take into account that the deletion of a replaced instance is news.
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
    fn rows_below_the_horizon_name_the_end_for_a_reader_that_began_with_nothing() {
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
        let mut rows = Rows::new(all, Cursor::NOTHING.into(), at(200).into(), Sequence::MIN);
        let (mut out, mut chunks, mut written) = (Writer::new(WireFormat::Lines), 0, 0);
        while rows.left() > 0 {
            rows.write(Kinds::ALL, &mut out, u64::MAX);
            let (bytes, rows) = out.take();
            // The last row may pass the limit: it takes six bytes for each byte of the name, and some more.
            assert!(bytes.len() < CHUNK_BYTES + 7_000, "{} bytes", bytes.len());
            (chunks, written) = (chunks + 1, written + rows);
        }
        assert_eq!(written, 99, "it goes on where it was");
        assert!(chunks >= 99 * 6 * 1_024 / (40 << 10), "{chunks} chunks");
    }
}
