//! [`Batch`]: rows of `_db_updates` that are new to a reader, and how they look.

use std::sync::{Arc, Mutex, PoisonError};

use axum::body::Bytes;

use super::{
    form::{Form, Writer, write_string},
    seq::Seq,
};
use crate::{
    encoding::Sequence,
    event::{EventKind, Kinds},
    feed::Cursor,
    notification::Notification,
};

/// What a row says to a reader that knows everything up to `since` and wants these kinds of events: one of them, or nothing.
///
/// A database has one row, which says what matters most of what is new: that it is deleted; or else that it was created; or that
/// it was updated. A new design document is an update to those who do not ask for it by name.
pub(super) fn kind_of(row: &Notification, since: Sequence, wanted: Kinds) -> Option<EventKind> {
    let is_new = |at: Option<Sequence>| at > Some(since);
    if row.is_deleted() {
        // What comes for a database after its deletion is counted in its row, but is no second deletion.
        let is_told = is_new(row.deleted_at) && wanted.contains(EventKind::Deleted);
        return is_told.then_some(EventKind::Deleted);
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

/// Some rows in order, for a reader that knows everything up to `since`.
#[derive(Debug)]
pub(super) struct Batch {
    /// The rows.
    rows: Vec<Arc<Notification>>,
    /// What a client is told to be its position after each of them.
    seqs: Vec<Seq>,
    /// Every reader of the batch knew this.
    pub since: Sequence,
    /// Where it ends.
    pub to: Sequence,
    /// How it looks to those who have read everything before it and nothing of it; made when it is first asked for.
    looks: Mutex<Vec<(Wish, Arc<Look>)>>,
}

/// How rows are to look, and which kinds of events are wanted.
type Wish = (Form, Kinds);

/// How a batch looks in one form, to those who want some kinds of events.
#[derive(Debug)]
pub(super) struct Look {
    /// All rows that are wanted.
    pub bytes: Bytes,
    /// How many they are.
    pub rows: u64,
}

/// What a reader knew of a batch when it began to read it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reading {
    /// When it began, everything up to here was known.
    pub since: Sequence,
    /// What could be read when it began.
    pub began: Sequence,
    /// Rows up to here may have been dropped.
    pub horizon: Sequence,
    /// Whether the batch is all that there was to read.
    pub is_complete: bool,
}

impl Batch {
    /// A batch that ends at `to`.
    pub fn new(rows: Vec<Arc<Notification>>, to: Sequence, reading: Reading) -> Self {
        let seqs = seqs(&rows, reading);
        Self { rows, seqs, since: reading.since, to, looks: Mutex::default() }
    }

    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// The sequence of the last row; zero if there is none.
    pub fn last(&self) -> Sequence {
        self.rows.last().map_or(Sequence::ZERO, |row| row.sequence)
    }

    /// The first row after `position`.
    pub fn place_after(&self, position: Sequence) -> usize {
        self.rows.partition_point(|row| row.sequence <= position)
    }

    /// What a client is told to be its position after the row at `place`.
    pub fn seq(&self, place: usize) -> Seq {
        self.seqs[place]
    }

    /// Writes the rows from `place` on that have something new for a reader that knows everything up to `since` and wants
    /// `kinds`, at most `limit`. Returns the place behind the last one that was looked at.
    pub fn write(
        &self,
        mut place: usize,
        since: Sequence,
        kinds: Kinds,
        out: &mut Writer,
        limit: u64,
    ) -> usize {
        let before = out.rows();
        while place < self.rows.len() && out.rows() - before < limit {
            let (row, seq) = (&self.rows[place], self.seqs[place]);
            if let Some(kind) = kind_of(row, since, kinds) {
                write_row(out, row, kind, &seq);
            }
            place += 1;
        }
        place
    }

    /// How it looks to a reader of everything before it. All who ask for the same share it.
    pub fn look(&self, form: Form, kinds: Kinds) -> Arc<Look> {
        let mut looks = self.looks.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, look)) = looks.iter().find(|(key, _)| *key == (form, kinds)) {
            return Arc::clone(look);
        }
        let mut out = Writer::new(form);
        self.write(0, self.since, kinds, &mut out, u64::MAX);
        let (bytes, rows) = out.take();
        let look = Arc::new(Look { bytes, rows });
        looks.push(((form, kinds), Arc::clone(&look)));
        look
    }
}

/// Writes a row.
pub(super) fn write_row(out: &mut Writer, row: &Notification, kind: EventKind, seq: &Seq) {
    out.row(seq, |bytes| {
        use std::io::Write;
        bytes.extend_from_slice(b"{\"db_name\":");
        write_string(bytes, row.name.as_str());
        write!(bytes, ",\"type\":\"{}\",\"seq\":\"{seq}\"}}", kind.as_str())
            .expect("a vector takes all bytes");
    });
}

/// The position after each row, as a client is told. Just a sequence if it may stop there: then nothing is new in later rows
/// that happened before, and nothing before was dropped.
fn seqs(rows: &[Arc<Notification>], reading: Reading) -> Vec<Seq> {
    let Reading { since, began, horizon, is_complete } = reading;
    // The oldest news of all later rows.
    let mut oldest = if is_complete { Sequence::MAX } else { Sequence::ZERO };
    let mut seqs: Vec<_> = rows
        .iter()
        .rev()
        .map(|row| {
            let at = row.sequence;
            let is_plain = at < oldest && (since > Sequence::ZERO || at >= horizon);
            let news = [row.created_at, row.updated_at, row.ddoc_updated_at, row.deleted_at];
            let first = news.into_iter().flatten().filter(|&at| at > since).min();
            oldest = oldest.min(first.unwrap_or(at));
            if is_plain { Seq::plain(at) } else { Seq::of(&Cursor::resumed(since, began, at)) }
        })
        .collect();
    seqs.reverse();
    seqs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        encoding::{Incarnation, Versionstamp},
        notification::tests::row,
    };

    fn at(version: u64) -> Sequence {
        Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
    }

    /// A row of a database that was created, updated and got a design document then, 0 for never.
    fn database(version: u64, [created, updated, ddoc, deleted]: [u64; 4]) -> Arc<Notification> {
        let when = |version| (version > 0).then(|| at(version));
        Arc::new(Notification {
            created_at: when(created),
            updated_at: when(updated),
            ddoc_updated_at: when(ddoc),
            deleted_at: when(deleted),
            ..row(at(version))
        })
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
            assert_eq!(kind_of(&row, at(since), wanted), expected, "{since} {wanted:?}");
        }
        let deleted = database(9, [2, 6, 6, 9]);
        assert_eq!(kind_of(&deleted, Sequence::ZERO, usual), Some(Deleted));
        assert_eq!(kind_of(&deleted, at(5), Kinds::from_iter([Created, Updated])), None);
        // It was once told again for an update that came late.
        let updated_late = database(12, [2, 12, 6, 9]);
        assert_eq!(kind_of(&updated_late, at(8), usual), Some(Deleted));
        assert_eq!(kind_of(&updated_late, at(9), usual), None);
    }

    #[test]
    fn a_position_says_no_more_than_it_has_to() {
        let began = at(20);
        let reading = Reading { since: at(1), began, horizon: Sequence::ZERO, is_complete: true };
        let rows = [database(4, [0, 4, 0, 0]), database(7, [3, 7, 0, 0]), database(9, [8, 9, 0, 0])];
        let anchored = |version| Seq::of(&Cursor::resumed(at(1), began, at(version)));
        // Who stops after the first row has to be told of the creation at 3.
        assert_eq!(seqs(&rows, reading), [anchored(4), Seq::plain(at(7)), Seq::plain(at(9))]);
        let cut = Reading { is_complete: false, ..reading };
        assert_eq!(seqs(&rows, cut), [4, 7, 9].map(anchored));
        // What was known before the reading is no news.
        let later = Reading { since: at(3), ..reading };
        assert_eq!(seqs(&rows, later)[0], Seq::plain(at(4)));
    }

    #[test]
    fn who_began_at_zero_is_told_so_below_the_horizon() {
        let reading = Reading { since: Sequence::ZERO, began: at(20), horizon: at(5), is_complete: true };
        let rows = [database(4, [4, 0, 0, 0]), database(6, [6, 0, 0, 0])];
        let [below, above] = seqs(&rows, reading)[..] else { panic!() };
        assert_eq!(above, Seq::plain(at(6)));
        assert_eq!(below.to_string(), format!("{}-{}", at(4), at(20)));
    }
}
