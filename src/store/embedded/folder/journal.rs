//! [`Journal`]: the commits since a snapshot, one record for each group; and snapshots: all rows at one version, so that earlier journals
//! can be removed.
//!
//! # Invariants
//!
//! 1. A record is written only after all earlier ones are on disk. So a broken record that is followed by a whole one was once whole: it is
//!    damaged. A broken record with nothing after it is what is left of a group that had not been answered when the power failed.
//! 2. The last group is followed by a [`Kind::Synced`] record, which makes damage to the group visible. No commit waits for that record,
//!    and the next group overwrites it.
//! 3. A journal gets its name once its first record is on disk. That record gives the length of the previous journal.
//! 4. A snapshot gets its name once it is whole and on disk, so any broken part of it is damage.

use std::{
    io,
    sync::atomic::{AtomicBool, Ordering},
};

use super::{
    files::{File, Files, is_no_room, read_all, replace, write_all},
    history::History,
    layout::{journal_name, snapshot_name},
    record::{self, Kind},
};
use crate::store::embedded::rows::Rows;

/// Returns the seed for the checksums of journal `number`.
pub(super) fn journal_seed(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x6a6f_7572_6e61_6c00
}

/// Returns the seed for the checksums of snapshot `number`.
pub(super) fn snapshot_seed(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x736e_6170_7368_6f74
}

/// A record of a snapshot's rows ends once its payload has this many bytes.
const ROWS_LEN: usize = 64 * 1_024;

/// Why a record was not written.
#[derive(Debug)]
pub(in crate::store::embedded) enum Unwritten {
    /// There was no room for the record, and nothing of it is left. Another attempt may succeed.
    NoRoom(io::Error),
    /// The record may or may not be on disk. No other record may follow it.
    Failed(io::Error),
}

impl From<io::Error> for Unwritten {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

/// The journal that new commits are written to.
pub(super) struct Journal {
    file: Box<dyn File>,
    pub number: u64,
    /// The offset of the next record.
    pub end: u64,
    buffer: Vec<u8>,
    /// Whether the journal has a record besides its first one.
    pub has_records: bool,
    /// Whether no more records may be added.
    is_sealed: bool,
}

impl Journal {
    /// Creates the journal that follows one of length `previous_len`, which ends with `version`.
    pub fn create(files: &dyn Files, number: u64, version: u64, previous_len: u64) -> io::Result<Self> {
        let mut buffer = Vec::new();
        record::append(&mut buffer, (journal_seed(number), 0), Kind::Journal, version, |out| {
            out.extend_from_slice(&previous_len.to_be_bytes());
        });
        let (file, ()) = replace(files, &journal_name(number), |file| write_all(file, 0, &buffer))?;
        Ok(Self { file, number, end: buffer.len() as u64, buffer, has_records: false, is_sealed: false })
    }

    /// Opens the journal in `file`, whose last whole record extends from `begin` to `end`. Anything after that record is cut off.
    ///
    /// That record may never have been synced, because its process was killed. Or its sync failed, after which the system may treat lost
    /// pages as written. So the record is written again, and is on disk before another record follows.
    pub fn resume(mut file: Box<dyn File>, number: u64, (begin, end): (u64, u64)) -> io::Result<Self> {
        let mut last = vec![0; (end - begin) as usize];
        if read_all(&mut *file, begin, &mut last)? < last.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        write_all(&mut *file, begin, &last)?;
        file.cut(end)?;
        Ok(Self { file, number, end, buffer: Vec::new(), has_records: true, is_sealed: false })
    }

    /// Adds a record, and waits until it is on disk.
    pub fn append(
        &mut self,
        kind: Kind,
        version: u64,
        payload: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), Unwritten> {
        if self.is_sealed {
            return Err(io::Error::other("the next journal may already exist, and cannot be used").into());
        }
        self.buffer.clear();
        record::append(&mut self.buffer, (journal_seed(self.number), self.end), kind, version, payload);
        match write_all(&mut *self.file, self.end, &self.buffer) {
            Err(error) if is_no_room(&error) => {
                // A partial record does not count, but the room that it takes is needed.
                self.file.cut(self.end)?;
                self.mark(version);
                return Err(Unwritten::NoRoom(error));
            }
            written => written?,
        }
        self.file.sync()?;
        self.end += self.buffer.len() as u64;
        self.has_records = true;
        self.mark(version);
        Ok(())
    }

    /// Marks the end, to make damage detectable. The next record overwrites the mark, even if only a part of the mark was written.
    fn mark(&mut self, version: u64) {
        self.buffer.clear();
        record::append(
            &mut self.buffer,
            (journal_seed(self.number), self.end),
            Kind::Synced,
            version,
            |_| {},
        );
        if let Err(error) = write_all(&mut *self.file, self.end, &self.buffer) {
            tracing::debug!(%error, "could not mark the end of the journal");
        }
    }

    /// Whether the file of the journal still has a name.
    pub fn has_name(&mut self) -> io::Result<bool> {
        self.file.has_name()
    }

    /// Refuses all further records.
    pub fn seal(&mut self) {
        self.is_sealed = true;
    }
}

/// Writes snapshot `number`: `root` at `version`. Returns the file and its length. Fails soon after `is_abandoned` is set.
pub(super) fn write_snapshot(
    files: &dyn Files,
    number: u64,
    (root, version): (&Rows, u64),
    history: &History,
    is_abandoned: &AtomicBool,
) -> io::Result<(Box<dyn File>, u64)> {
    let (seed, mut at, mut record) = (snapshot_seed(number), 0, Vec::new());
    replace(files, &snapshot_name(number), |file| {
        let mut write = |kind, payload: &dyn Fn(&mut Vec<u8>)| {
            if is_abandoned.load(Ordering::Relaxed) {
                return Err(io::Error::other("the store was dropped, or failed, meanwhile"));
            }
            record.clear();
            record::append(&mut record, (seed, at), kind, version, payload);
            write_all(file, at, &record)?;
            at += record.len() as u64;
            Ok::<_, io::Error>(at)
        };
        write(Kind::Snapshot, &|out| history.append_to(out))?;
        let (mut rows, mut count, mut total) = (Vec::new(), 0_u32, 0_u64);
        let mut write_rows = |rows: &mut Vec<u8>, count: &mut u32| {
            write(Kind::Rows, &|out| {
                out.extend_from_slice(&count.to_be_bytes());
                out.extend_from_slice(rows);
            })?;
            rows.clear();
            *count = 0;
            Ok::<_, io::Error>(())
        };
        for (key, value) in root.iter() {
            record::append_row(&mut rows, key, Some(value));
            (count, total) = (count + 1, total + 1);
            if rows.len() >= ROWS_LEN {
                write_rows(&mut rows, &mut count)?;
            }
        }
        if count > 0 {
            write_rows(&mut rows, &mut count)?;
        }
        write(Kind::End, &|out| out.extend_from_slice(&total.to_be_bytes()))
    })
}
