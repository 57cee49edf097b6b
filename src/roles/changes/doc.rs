//! The rows of a changes feed: documents and their revisions.

use std::{borrow::Cow, fmt, str::FromStr, sync::Arc};

use serde::Serialize;

use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
        macros::serde_as_text,
    },
    state::feed::FeedRow,
};

/// The format of stored rows.
const FORMAT: u16 = 1;

/// The format of a row with a first revision whose document already had a row: the revision in that row was purged.
const FORMAT_PURGED: u16 = 2;

/// The id of a document: UTF-8, 1 to 8,192 bytes, where a zero byte counts as two. Clones are cheap.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DocId(Arc<str>);

impl DocId {
    /// The maximum length of an id, in bytes.
    pub const LEN_MAX: usize = 8_192;

    /// Checks `id`. Fails if it is empty or too long.
    pub fn new(id: &str) -> Result<Self> {
        // In keys, a zero byte takes two bytes.
        let len = id.len() + id.matches('\0').count();
        if (1..=Self::LEN_MAX).contains(&len) {
            return Ok(Self(id.into()));
        }
        let reason = format!("it has {len} bytes, not 1 to {}", Self::LEN_MAX);
        Err(Error::invalid("document id", reason))
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether this is the id of a design document.
    pub fn is_design(&self) -> bool {
        self.0.starts_with("_design/")
    }
}

impl fmt::Display for DocId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for DocId {
    type Err = Error;

    fn from_str(id: &str) -> Result<Self> {
        Self::new(id)
    }
}

serde_as_text!(DocId);

/// A revision of a document. As text: the position, `-`, and the hash in 32 hexadecimal digits.
///
/// ```
/// use notibus::changes::Revision;
///
/// let revision: Revision = "2-7051cbe5c8faecd085a3fa619e6e6337".parse()?;
/// assert_eq!(revision.position, 2);
/// assert_eq!(revision.to_string(), "2-7051cbe5c8faecd085a3fa619e6e6337");
/// assert!("2-7051".parse::<Revision>().is_err());
/// # Ok::<(), notibus::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision {
    /// The number of edits that led to the revision; 1 for the first.
    pub position: u64,
    /// Distinguishes revisions with the same position.
    pub hash: [u8; 16],
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:032x}", self.position, u128::from_be_bytes(self.hash))
    }
}

impl FromStr for Revision {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parse = || {
            let (position, hash) = text.split_once('-')?;
            let digits =
                |text: &str, digit: fn(&u8) -> bool| !text.is_empty() && text.bytes().all(|b| digit(&b));
            let is_text = digits(position, u8::is_ascii_digit) && digits(hash, u8::is_ascii_hexdigit);
            let position =
                position.parse().ok().filter(|&position| position > 0 && is_text && hash.len() == 32)?;
            Some(Self { position, hash: u128::from_str_radix(hash, 16).ok()?.to_be_bytes() })
        };
        parse().ok_or_else(|| Error::invalid("revision", format!("{text:?} is not N-32 hexadecimal digits")))
    }
}

serde_as_text!(Revision);

/// A document after an edit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DocSummary {
    /// The id of the document.
    pub id: DocId,
    /// The winning revision.
    pub revision: Revision,
    /// The number of leaves, at least 1. If it is 1, the winning revision is the only leaf.
    pub branches: u32,
    /// Whether the winning revision is a deletion. If so, every leaf is a deletion.
    pub is_deleted: bool,
}

impl DocSummary {
    /// Fails if no document can have these values.
    pub(super) fn check(&self) -> Result<()> {
        if self.revision.position == 0 || self.branches == 0 {
            let reason = format!("revision {} with {} branches is impossible", self.revision, self.branches);
            return Err(Error::invalid("document", reason));
        }
        Ok(())
    }

    /// Returns the stored form, a tuple: sequence format, document id, revision position, revision hash, branch count, whether it is not
    /// deleted (CouchDB RFC 003). `replaces` says whether the document had a row before.
    pub(crate) fn to_bytes(&self, replaces: bool) -> Vec<u8> {
        let hash = foundationdb_tuple::Bytes::from(&self.revision.hash[..]);
        let format = if replaces && self.is_first_edit() { FORMAT_PURGED } else { FORMAT };
        let Self { id, revision, branches, is_deleted } = self;
        foundationdb_tuple::pack(&(format, id.as_str(), revision.position, hash, *branches, !is_deleted))
    }

    /// Whether the revision is the only one that the document has ever had, apart from purged ones.
    fn is_first_edit(&self) -> bool {
        self.revision.position == 1 && self.branches == 1
    }
}

/// A row of a changes feed: a document and the sequence of its last edit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Change {
    /// The position of the row in the feed.
    #[serde(rename = "seq")]
    pub sequence: Sequence,
    /// A summary of the document after its last edit.
    #[serde(flatten)]
    pub doc: DocSummary,
}

impl Change {
    /// Decodes a row as [`FeedRow::from_stored`] does, and returns whether the document had a row before.
    pub(crate) fn decode(sequence: Sequence, bytes: &[u8]) -> Result<(Self, bool)> {
        let corrupt = |reason: String| Error::corrupt("change", reason);
        let (format, id, position, hash, branches, lives): (
            u16,
            Cow<'_, str>,
            u64,
            foundationdb_tuple::Bytes<'_>,
            u32,
            bool,
        ) = foundationdb_tuple::unpack(bytes).map_err(|error| corrupt(error.to_string()))?;
        if ![FORMAT, FORMAT_PURGED].contains(&format) {
            return Err(corrupt(format!("format {format} is unknown")));
        }
        let id = DocId::new(&id).map_err(|error| corrupt(error.to_string()))?;
        let hash = (*hash).try_into().map_err(|_| corrupt(format!("a hash of {} bytes", hash.len())))?;
        let doc = DocSummary { id, revision: Revision { position, hash }, branches, is_deleted: !lives };
        doc.check().map_err(|error| corrupt(error.to_string()))?;
        let replaces = format == FORMAT_PURGED || !doc.is_first_edit();
        Ok((Self { sequence, doc }, replaces))
    }
}

impl FeedRow for Change {
    fn from_stored(sequence: Sequence, bytes: &[u8]) -> Result<Self> {
        Self::decode(sequence, bytes).map(|(row, _)| row)
    }

    fn sequence(&self) -> Sequence {
        self.sequence
    }

    fn id(&self) -> &[u8] {
        self.doc.id.as_str().as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn doc(id: &str, position: u64, branches: u32, is_deleted: bool) -> DocSummary {
        let revision = Revision { position, hash: [7; 16] };
        DocSummary { id: DocId::new(id).unwrap(), revision, branches, is_deleted }
    }

    #[test]
    fn golden_bytes() {
        let expected = [&[0x15, 1, 0x02, b'x', 0, 0x15, 3, 0x01][..], &[7; 16], &[0, 0x15, 2, 0x27]].concat();
        assert_eq!(doc("x", 3, 2, false).to_bytes(true), expected);
    }

    #[test]
    fn ids_and_revisions_are_their_text() {
        let doc = doc("_design/x", 3, 1, false);
        assert_eq!("_design/x".parse::<DocId>().unwrap(), doc.id);
        assert!("".parse::<DocId>().is_err());
        let kept = serde_json::to_string(&(&doc.id, doc.revision)).unwrap();
        assert_eq!(kept, r#"["_design/x","3-07070707070707070707070707070707"]"#);
        assert_eq!(serde_json::from_str::<(DocId, Revision)>(&kept).unwrap(), (doc.id, doc.revision));
    }

    #[test]
    fn contradictory_bytes_are_refused() {
        let good = doc("x", 3, 2, false).to_bytes(true);
        let read = |bytes: &[u8]| Change::from_stored(Sequence::MIN, bytes);
        assert!(read(&good).is_ok());
        assert!(read(&good[..good.len() - 1]).is_err());
        assert!(read(&[&good[..], &[0x27]].concat()).is_err());
        for bad in [doc("x", 0, 1, false), doc("x", 1, 0, false)] {
            assert!(bad.check().is_err() && read(&bad.to_bytes(true)).is_err());
        }
        let mut unknown = good;
        unknown[1] = 3;
        assert!(read(&unknown).is_err());
    }

    #[test]
    fn bad_revisions_and_ids_are_refused() {
        let hash = "0".repeat(32);
        for bad in [
            "",
            "1",
            "-",
            &format!("0-{hash}"),
            &format!("+1-{hash}"),
            &format!("1-{hash}0"),
            &format!("1-+{}", &hash[1..]),
        ] {
            assert!(bad.parse::<Revision>().is_err(), "{bad}");
        }
        assert!(DocId::new("").is_err() && DocId::new(&"x".repeat(DocId::LEN_MAX + 1)).is_err());
    }

    proptest! {
        #[test]
        fn round_trips(id in "\\PC{1,40}", position in 1..4u64, branches in 1..3u32, is_deleted: bool, has_row: bool, hash: [u8; 16]) {
            let doc = DocSummary { revision: Revision { position, hash }, ..doc(&id, 1, branches, is_deleted) };
            let (read, replaces) = Change::decode(Sequence::MAX, &doc.to_bytes(has_row)).unwrap();
            prop_assert_eq!(&read.doc, &doc);
            prop_assert_eq!(replaces, has_row || !doc.is_first_edit());
            prop_assert_eq!(doc.revision.to_string().parse::<Revision>().unwrap(), doc.revision);
        }
    }
}
