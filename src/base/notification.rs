//! [`Notification`]: the one row that a database has in the feed.
//!
//! A reader may come late and see only the newest row, so the row says when each kind of event last happened. From this and from its own
//! cursor a reader derives exactly what is new to it ([`Notification::news_since`]), so coalescing loses nothing.

use serde::Serialize;

use crate::base::{
    cursor::Cursor,
    encoding::{Counters, Reader, Sequence, Versionstamp},
    error::Result,
    event::{Db, DbInstance, DbName, EventKind, Kinds},
};

/// The format of stored rows.
const FORMAT: u8 = 1;

/// The position of a row that is not committed yet. The commit replaces it with the row's own sequence.
pub(crate) const DRAFT: Sequence = Sequence::MAX;

/// The newest row of a database.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
// The order of the fields puts everything that each delivery reads into one cache line.
#[repr(C)]
pub struct Notification {
    /// The position of the row in the feed.
    #[serde(rename = "seq")]
    pub sequence: Sequence,
    /// The position of the previous row of the name, which this row replaced; `None` if there was none.
    #[serde(skip)]
    pub previous: Option<Sequence>,
    /// The name of the database.
    #[serde(rename = "db")]
    pub name: DbName,
    /// The instance of the database that this row describes.
    pub instance: DbInstance,
    /// What happened to the name since its previous row.
    pub kinds: Kinds,
    /// How many events of each kind were recorded for the instance since it was created.
    pub totals: Counters,
    /// When the instance was created; `None` for a database that is older than the bus.
    pub created_at: Option<Sequence>,
    /// When the database was last updated, other than by a design document.
    pub updated_at: Option<Sequence>,
    /// When a design document was last written or deleted.
    pub ddoc_updated_at: Option<Sequence>,
    /// When the instance was deleted; `None` while it is alive.
    pub deleted_at: Option<Sequence>,
    /// The instance that had the name before: the last one, if there were several between two rows. A reader that knew any of them gets
    /// `deleted` for this one, so key what you store by name, not by instance.
    pub replaced: Option<Replaced>,
    /// The newest transaction that recorded an event, if producers record versionstamps.
    #[serde(skip)]
    pub versionstamp: Option<Versionstamp>,
    /// When the row was written, in milliseconds since 1970 on the notifier's clock: for lag figures only.
    pub written_ms: u64,
}

/// The instance that last had the name before the current one took it. A reader that knew the name gets `deleted` for this instance,
/// whichever instance it knew, so key what you store by name, not by instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Replaced {
    /// The instance.
    pub instance: DbInstance,
    /// When it was deleted.
    pub deleted_at: Sequence,
}

/// The part of a row that is news to a reader. A reader that knew the name gets `deleted`, whichever instance it knew, so key what you
/// store by name, not by instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct News {
    instance: DbInstance,
    /// The earlier instance, if its deletion is news.
    replaced: Option<DbInstance>,
    /// The news about the row's instance.
    kinds: Kinds,
}

impl News {
    /// Returns the kinds of events that are news, including those of the earlier instance.
    pub fn kinds(&self) -> Kinds {
        if self.replaced.is_some() { self.kinds | EventKind::Deleted.into() } else { self.kinds }
    }

    /// Returns the news in the order in which it happened: the deletion of the earlier instance, then the news about the row's instance. A
    /// `deleted` means that the name was deleted, even if the reader knew an instance other than the one that comes with it.
    pub fn iter(&self) -> impl Iterator<Item = (DbInstance, EventKind)> {
        let before = self.replaced.map(|instance| (instance, EventKind::Deleted));
        let instance = self.instance;
        before.into_iter().chain(self.kinds.iter().map(move |kind| (instance, kind)))
    }
}

impl Notification {
    /// Returns the database of the row.
    pub fn db(&self) -> Db {
        Db::new(self.name.clone(), self.instance)
    }

    /// Whether the database is deleted, which makes the row a tombstone.
    pub fn is_deleted(&self) -> bool {
        self.deleted_at.is_some()
    }

    /// Returns the news for a reader at `cursor`.
    ///
    /// A name has one living instance: if a new one was created, all earlier ones are gone. A reader that may have known the name gets one
    /// deletion, for the last earlier instance, whichever instance it knew.
    pub fn news_since(&self, cursor: impl Into<Cursor>) -> News {
        let cursor = cursor.into();
        let kinds = [
            (EventKind::Created, self.created_at),
            (EventKind::Updated, self.updated_at),
            (EventKind::DdocUpdated, self.ddoc_updated_at),
            (EventKind::Deleted, self.deleted_at),
        ];
        News {
            instance: self.instance,
            replaced: self
                .replaced
                .filter(|replaced| cursor.is_news_of_replaced(replaced.deleted_at))
                .map(|replaced| replaced.instance),
            kinds: kinds
                .into_iter()
                .filter(|(_, at)| at.is_some_and(|at| cursor.is_news(at)))
                .map(|(kind, _)| kind)
                .collect(),
        }
    }

    /// Returns the stored form. A position that equals the row's own is stored as a marker, so that a draft, which has no sequence before
    /// its commit, has the same bytes as the row that it becomes.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(160 + self.name.as_str().len());
        bytes.push(FORMAT);
        let name = self.name.as_str().as_bytes();
        bytes.extend_from_slice(
            &u16::try_from(name.len()).expect("names are at most 1,024 bytes").to_be_bytes(),
        );
        bytes.extend_from_slice(name);
        bytes.extend_from_slice(&self.instance.0);
        bytes.push(self.kinds.bits());
        for lane in self.totals.lanes() {
            bytes.extend_from_slice(&lane.to_be_bytes());
        }
        for at in [self.created_at, self.updated_at, self.ddoc_updated_at, self.deleted_at, self.previous] {
            self.put_position(&mut bytes, at);
        }
        self.put_position(&mut bytes, self.replaced.map(|replaced| replaced.deleted_at));
        if let Some(replaced) = self.replaced {
            bytes.extend_from_slice(&replaced.instance.0);
        }
        bytes.push(u8::from(self.versionstamp.is_some()));
        bytes.extend_from_slice(self.versionstamp.as_ref().map_or(&[], |stamp| &stamp.0[..]));
        bytes.extend_from_slice(&self.written_ms.to_be_bytes());
        bytes
    }

    /// Appends a position: 0 for none, 1 for the row's own, 2 and the sequence for any other.
    fn put_position(&self, bytes: &mut Vec<u8>, at: Option<Sequence>) {
        match at {
            None => bytes.push(0),
            Some(at) if at == self.sequence => bytes.push(1),
            Some(at) => {
                bytes.push(2);
                bytes.extend_from_slice(at.as_bytes());
            }
        }
    }

    /// Decodes the row that is stored as `bytes` at `sequence`.
    pub(crate) fn from_bytes(sequence: Sequence, bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("notification", bytes);
        match reader.u8()? {
            FORMAT => {}
            format => return Err(reader.corrupt(format!("format {format} is unknown"))),
        }
        let name = DbName::new(reader.text()?).map_err(|error| reader.corrupt(error.to_string()))?;
        let instance = DbInstance(reader.bytes16()?);
        let kinds = Kinds::from_bits(reader.u8()?)?;
        let totals = Counters::from_lanes([reader.u64()?, reader.u64()?, reader.u64()?, reader.u64()?]);
        let mut positions = [None; 6];
        for at in &mut positions {
            *at = position(&mut reader, sequence)?;
        }
        let [created_at, updated_at, ddoc_updated_at, deleted_at, previous, replaced_at] = positions;
        let replaced = match replaced_at {
            None => None,
            Some(deleted_at) => Some(Replaced { instance: DbInstance(reader.bytes16()?), deleted_at }),
        };
        let versionstamp = match reader.u8()? {
            0 => None,
            1 => Some(Versionstamp(reader.take(10)?.try_into().expect("10 bytes were taken"))),
            tag => return Err(reader.corrupt(format!("versionstamp tag {tag} is unknown"))),
        };
        let written_ms = reader.u64()?;
        let row = Self {
            sequence,
            previous,
            name,
            instance,
            kinds,
            totals,
            created_at,
            updated_at,
            ddoc_updated_at,
            deleted_at,
            replaced,
            versionstamp,
            written_ms,
        };
        reader.finish()?;
        Ok(row)
    }
}

/// Reads the next position stored in the row at `sequence`.
fn position(reader: &mut Reader<'_>, sequence: Sequence) -> Result<Option<Sequence>> {
    match reader.u8()? {
        0 => Ok(None),
        1 => Ok(Some(sequence)),
        2 => match reader.sequence()? {
            at if at < sequence => Ok(Some(at)),
            at => Err(reader.corrupt(format!("it refers to {at}, which is not before its own position"))),
        },
        tag => Err(reader.corrupt(format!("position tag {tag} is unknown"))),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::{option, prelude::*};

    use super::*;
    use crate::base::encoding::Incarnation;

    fn at(version: u64) -> Sequence {
        Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
    }

    pub(crate) fn row(sequence: Sequence) -> Notification {
        Notification {
            sequence,
            name: DbName::new("db").unwrap(),
            instance: DbInstance([7; 16]),
            kinds: EventKind::Updated.into(),
            totals: Counters { created: 1, updated: 3, ddoc_updated: 1, deleted: 0 },
            created_at: Some(at(10)),
            updated_at: Some(sequence),
            ddoc_updated_at: Some(at(20)),
            deleted_at: None,
            replaced: Some(Replaced { instance: DbInstance([6; 16]), deleted_at: at(5) }),
            previous: Some(at(20)),
            versionstamp: None,
            written_ms: 1,
        }
    }

    #[test]
    fn each_cursor_gets_exactly_its_news() {
        let row = row(at(30));
        let news = |cursor| row.news_since(cursor).iter().collect::<Vec<_>>();
        let (old, new) = (DbInstance([6; 16]), DbInstance([7; 16]));
        assert_eq!(news(at(30)), []);
        assert_eq!(news(at(20)), [(new, EventKind::Updated)]);
        assert_eq!(news(at(10)), [(new, EventKind::Updated), (new, EventKind::DdocUpdated)]);
        assert_eq!(news(at(9))[0], (new, EventKind::Created));
        assert_eq!(news(at(4))[..2], [(old, EventKind::Deleted), (new, EventKind::Created)]);
        assert_eq!(
            row.news_since(Cursor::BEGINNING).iter().next(),
            Some((new, EventKind::Created)),
            "no old one was known"
        );
        assert!(row.news_since(at(4)).kinds().contains(EventKind::Deleted));
        assert!(!row.news_since(at(5)).kinds().contains(EventKind::Deleted));
    }

    #[test]
    fn golden_bytes() {
        let mut expected = vec![1, 0, 2, b'd', b'b'];
        expected.extend([7; 16]);
        expected.push(4);
        for lane in [1_u64, 0, 3, 1] {
            expected.extend(lane.to_be_bytes());
        }
        expected.push(2);
        expected.extend(at(10).as_bytes());
        expected.push(1);
        expected.push(2);
        expected.extend(at(20).as_bytes());
        expected.push(0);
        expected.push(2);
        expected.extend(at(20).as_bytes());
        expected.push(2);
        expected.extend(at(5).as_bytes());
        expected.extend([6; 16]);
        expected.push(0);
        expected.extend(1_u64.to_be_bytes());
        assert_eq!(row(at(30)).to_bytes(), expected);
    }

    #[test]
    fn a_draft_becomes_the_row_at_its_sequence() {
        assert_eq!(Notification::from_bytes(at(30), &row(DRAFT).to_bytes()).unwrap(), row(at(30)));
    }

    #[test]
    fn contradictory_bytes_are_refused() {
        let good = row(at(30)).to_bytes();
        assert!(Notification::from_bytes(at(30), &good[..good.len() - 1]).is_err());
        assert!(Notification::from_bytes(at(30), &[&good[..], &[0]].concat()).is_err());
        assert!(Notification::from_bytes(at(15), &good).is_err(), "it knows of what came after it");
        let mut unknown = good;
        unknown[0] = 2;
        assert!(Notification::from_bytes(at(30), &unknown).is_err());
    }

    proptest! {
        #[test]
        fn round_trips(
            name in "\\PC{1,20}",
            kinds in 0..16_u8,
            totals in any::<[u32; 4]>(),
            positions in any::<[Option<u16>; 5]>(),
            replaced in option::of((any::<[u8; 16]>(), any::<u16>())),
            stamp in option::of(any::<[u8; 10]>()),
            written_ms in any::<u64>(),
        ) {
            let sequence = at(1 << 16);
            let position = |place: usize| positions[place].map(|version| if version % 3 == 0 { sequence } else { at(version.into()) });
            let row = Notification {
                sequence,
                name: DbName::new(&name).unwrap(),
                instance: DbInstance([1; 16]),
                kinds: Kinds::from_bits(kinds).unwrap(),
                totals: Counters::from_lanes(totals.map(|lane| u64::from(lane) + 1)),
                created_at: position(0),
                updated_at: position(1),
                ddoc_updated_at: position(2),
                deleted_at: position(3),
                replaced: replaced.map(|(instance, version)| Replaced { instance: DbInstance(instance), deleted_at: at(version.into()) }),
                previous: position(4),
                versionstamp: stamp.map(Versionstamp),
                written_ms,
            };
            prop_assert_eq!(Notification::from_bytes(sequence, &row.to_bytes()).unwrap(), row);
        }
    }
}
