//! The records that the files of a folder consist of.
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | checksum of the payload |
//! | 8..12 | [`MAGIC`] |
//! | 12 | [`Kind`] |
//! | 13..16 | zero |
//! | 16..24 | length of the payload, padded to a multiple of 8 |
//! | 24..32 | version |
//! | 32..40 | checksum of the 32 bytes before |
//! | 40.. | payload, padded with zeros |
//!
//! Numbers are big-endian, and records begin at multiples of 8. Both checksums depend on the file and on the offset of the record, so
//! neither a value that looks like a record nor a record in the wrong place is mistaken for one.

use std::{collections::BTreeMap, io};

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{
    files::{File, read_all},
    layout::{BadSectors, is_bad_sector},
};
use crate::base::{encoding::Reader, error::Result};

/// The bytes before a payload.
pub(super) const HEADER_LEN: usize = 40;

/// Marks the beginning of the part of a header that describes the record.
const MAGIC: [u8; 4] = *b"nRec";

/// Records begin at multiples of this.
const ALIGNMENT: u64 = 8;

/// How many bytes of a file are read at once, unless a record needs more.
const WINDOW_LEN: u64 = 256 * 1_024;

/// The unit in which the bytes around a bad sector are read.
const SECTOR_LEN: u64 = 4_096;

/// The value length that stands for a removed row.
const REMOVED: u32 = u32::MAX;

/// The kind of a record. The numbers are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The first record of a journal. Its payload is the length of the previous journal.
    Journal = 1,
    /// The folder was opened, and versions continue from this one.
    Opening = 2,
    /// A group of commits. Its payload is the changed rows.
    Commit = 3,
    /// Everything before this record is on disk. The next record overwrites it.
    Synced = 4,
    /// The first record of a snapshot. Its payload is the history.
    Snapshot = 5,
    Rows = 6,
    /// The last record of a snapshot. Its payload is the number of rows.
    End = 7,
}

impl Kind {
    /// Returns the kind that is stored as `number`.
    fn of(number: u8) -> Option<Self> {
        use Kind::{Commit, End, Journal, Opening, Rows, Snapshot, Synced};
        [Journal, Opening, Commit, Synced, Snapshot, Rows, End].into_iter().find(|kind| *kind as u8 == number)
    }
}

/// Appends to `out` the record with `payload` for offset `at` of the file with `seed`.
pub(super) fn append(
    out: &mut Vec<u8>,
    (seed, at): (u64, u64),
    kind: Kind,
    version: u64,
    payload: impl FnOnce(&mut Vec<u8>),
) {
    let (start, seed) = (out.len(), seed ^ at);
    out.resize(start + HEADER_LEN, 0);
    payload(out);
    let len = (out.len() - start).next_multiple_of(ALIGNMENT as usize);
    out.resize(start + len, 0);
    let (header, payload) = out[start..].split_at_mut(HEADER_LEN);
    header[..8].copy_from_slice(&xxh3_64_with_seed(payload, seed).to_be_bytes());
    header[8..12].copy_from_slice(&MAGIC);
    header[12] = kind as u8;
    header[16..24].copy_from_slice(&(payload.len() as u64).to_be_bytes());
    header[24..32].copy_from_slice(&version.to_be_bytes());
    let checksum = xxh3_64_with_seed(&header[..32], seed);
    header[32..].copy_from_slice(&checksum.to_be_bytes());
}

/// Appends a row to a payload. A `value` of `None` means that the row was removed.
pub(super) fn append_row(out: &mut Vec<u8>, key: &[u8], value: Option<&[u8]>) {
    let len = |bytes: &[u8]| u32::try_from(bytes.len()).expect("keys and values have limits far below");
    out.extend_from_slice(&len(key).to_be_bytes());
    out.extend_from_slice(&value.map_or(REMOVED, len).to_be_bytes());
    out.extend_from_slice(key);
    out.extend_from_slice(value.unwrap_or_default());
}

/// A row of a payload: its key, and its value unless it was removed.
type PayloadRow<'a> = (&'a [u8], Option<&'a [u8]>);

/// Decodes the rows of a payload, which begins with their count.
pub(super) fn rows(payload: &[u8]) -> Result<Vec<PayloadRow<'_>>> {
    let mut reader = Reader::new("record", payload);
    let count = reader.u32()?;
    let mut rows = Vec::new();
    for _ in 0..count {
        let (key_len, value_len) = (reader.u32()?, reader.u32()?);
        let key = reader.take(key_len as usize)?;
        let value = match value_len {
            REMOVED => None,
            len => Some(reader.take(len as usize)?),
        };
        rows.push((key, value));
    }
    Ok(rows)
}

#[derive(Debug)]
pub(super) struct Record {
    pub kind: Kind,
    pub version: u64,
    /// The payload, including its padding.
    pub payload: Vec<u8>,
    pub end: u64,
}

/// A file that is read record by record.
pub(super) struct Records {
    file: Box<dyn File>,
    len: u64,
    seed: u64,
    /// The offset in the file at which the bytes in memory begin.
    start: u64,
    bytes: Vec<u8>,
    bad_sectors: BadSectors,
    /// The ranges that the disk could not read: the end of each, by its beginning.
    unreadable: BTreeMap<u64, u64>,
}

impl Records {
    /// Opens the records of `file`, whose checksums depend on `seed`.
    pub fn new(mut file: Box<dyn File>, seed: u64, bad_sectors: BadSectors) -> io::Result<Self> {
        let len = file.len()?;
        Ok(Self { file, len, seed, start: 0, bytes: Vec::new(), bad_sectors, unreadable: BTreeMap::new() })
    }

    /// Returns the ranges that the disk could not read so far, in order.
    pub fn unreadable(&self) -> Vec<(u64, u64)> {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for (&begin, &end) in &self.unreadable {
            match ranges.last_mut() {
                Some(last) if last.1 >= begin => last.1 = last.1.max(end),
                _ => ranges.push((begin, end)),
            }
        }
        ranges
    }

    /// Returns the length of the file.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Reads the record at the offset `at`; `None` if there is no whole record there.
    pub fn read(&mut self, at: u64) -> io::Result<Option<Record>> {
        let seed = self.seed ^ at;
        let Some(header) = self.bytes(at, HEADER_LEN as u64)? else { return Ok(None) };
        let header: [u8; HEADER_LEN] = header.try_into().expect("this many were asked for");
        let number = |at: usize| u64::from_be_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        if header[8..12] != MAGIC || xxh3_64_with_seed(&header[..32], seed) != number(32) {
            return Ok(None);
        }
        let (Some(kind), checksum, len, version) = (Kind::of(header[12]), number(0), number(16), number(24))
        else {
            return Ok(None);
        };
        let begin = at + HEADER_LEN as u64;
        let Some(payload) = self.bytes(begin, len)? else { return Ok(None) };
        if xxh3_64_with_seed(payload, seed) != checksum {
            return Ok(None);
        }
        Ok(Some(Record { kind, version, payload: payload.to_vec(), end: begin + len }))
    }

    /// Finds the first whole record at or after `at`, and returns its offset.
    pub fn find(&mut self, at: u64) -> io::Result<Option<u64>> {
        let mut at = at.next_multiple_of(ALIGNMENT);
        while let Some(header) = self.bytes(at, HEADER_LEN as u64)? {
            if header[8..12] == MAGIC && self.read(at)?.is_some() {
                return Ok(Some(at));
            }
            at += ALIGNMENT;
        }
        Ok(None)
    }

    /// Returns `len` bytes at `at`; `None` if the file ends before that.
    fn bytes(&mut self, at: u64, len: u64) -> io::Result<Option<&[u8]>> {
        if at > self.len || len > self.len - at {
            return Ok(None);
        }
        let end = self.start + self.bytes.len() as u64;
        if at < self.start || at + len > end {
            self.bytes.resize(len.max(WINDOW_LEN).min(self.len - at) as usize, 0);
            self.start = at;
            let read = match read_all(&mut *self.file, at, &mut self.bytes) {
                Err(error) if self.bad_sectors == BadSectors::Pass && is_bad_sector(&error) => {
                    self.read_sectors(at)?
                }
                read => read?,
            };
            self.bytes.truncate(read);
            if (read as u64) < len {
                // Another process cut the file meanwhile.
                return Ok(None);
            }
        }
        let from = (at - self.start) as usize;
        Ok(Some(&self.bytes[from..from + len as usize]))
    }

    /// Fills the bytes in memory from `at`, sector by sector, with zeros for the sectors that the disk cannot read. A record with such
    /// zeros does not count as whole, because its checksum is wrong. Returns the number of bytes.
    fn read_sectors(&mut self, at: u64) -> io::Result<usize> {
        let end = at + self.bytes.len() as u64;
        let mut from = at;
        while from < end {
            let to = (from + 1).next_multiple_of(SECTOR_LEN).min(end);
            let sector = &mut self.bytes[(from - at) as usize..(to - at) as usize];
            match read_all(&mut *self.file, from, sector) {
                Ok(read) if (read as u64) < to - from => return Ok((from - at) as usize + read),
                Ok(_) => {}
                Err(error) if is_bad_sector(&error) => {
                    sector.fill(0);
                    let known = self.unreadable.entry(from).or_default();
                    *known = to.max(*known);
                }
                Err(error) => return Err(error),
            }
            from = to;
        }
        Ok((end - at) as usize)
    }
}
