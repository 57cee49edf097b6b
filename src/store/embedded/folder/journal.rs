//! [`Journal`]: what was committed since a snapshot, one record for each group.
//!
//! # Invariants
//!
//! 1. A record is written only once all before it are on disk. So a broken record that has a whole one behind it was whole once: it
//!    is damaged. A broken one with nothing behind it is what a power failure has left of a group that was not answered.
//! 2. Behind the last group stands a [`Kind::Synced`] record, which is not waited for and which the next group takes the place of.
//!    With it, damage to the last group is known as such.
//! 3. A journal has its name once its first record is on disk. The first record of the next one says how long it is.

use std::{io, path::Path};

use super::{
    files::{File, Files, read_all, replace, write_all},
    record::{self, Kind},
};

/// The name of journal `number`.
pub(super) fn name(number: u64) -> String {
    format!("journal-{number:016}")
}

/// What the checksums of journal `number` depend on.
pub(super) fn seed(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x6a6f_7572_6e61_6c00
}

/// A journal that is written to.
pub(super) struct Journal {
    file: Box<dyn File>,
    pub number: u64,
    /// Where the next record goes.
    pub end: u64,
    /// Space for a record.
    buffer: Vec<u8>,
    /// Whether nothing may be added any more.
    is_sealed: bool,
}

impl Journal {
    /// A new one, behind a journal of length `previous_len` that ends with `version`.
    pub fn create(
        files: &dyn Files,
        folder: &Path,
        number: u64,
        version: u64,
        previous_len: u64,
    ) -> io::Result<Self> {
        let mut buffer = Vec::new();
        record::append(&mut buffer, (seed(number), 0), Kind::Journal, version, |out| {
            out.extend_from_slice(&previous_len.to_be_bytes());
        });
        let (file, ()) = replace(files, folder, &name(number), |file| write_all(file, 0, &buffer))?;
        Ok(Self { file, number, end: buffer.len() as u64, buffer, is_sealed: false })
    }

    /// The one in `file`, whose last whole record stands from `begin` to `end`. What is behind is cut off.
    ///
    /// That record may never have been synced, as its process was killed; or its sync may have failed, after which the system takes
    /// for written what it could not write. So it is written once more, and is on disk before anything follows it.
    pub fn resume(mut file: Box<dyn File>, number: u64, (begin, end): (u64, u64)) -> io::Result<Self> {
        let mut last = vec![0; (end - begin) as usize];
        if read_all(&mut *file, begin, &mut last)? < last.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        write_all(&mut *file, begin, &last)?;
        file.cut(end)?;
        Ok(Self { file, number, end, buffer: Vec::new(), is_sealed: false })
    }

    /// Adds a record, and waits until it is on disk, if `is_synced`. After an error nothing may be added any more.
    pub fn append(
        &mut self,
        kind: Kind,
        version: u64,
        is_synced: bool,
        payload: impl FnOnce(&mut Vec<u8>),
    ) -> io::Result<()> {
        if self.is_sealed {
            return Err(io::Error::other("another journal may have begun, and cannot be used"));
        }
        self.buffer.clear();
        record::append(&mut self.buffer, (seed(self.number), self.end), kind, version, payload);
        write_all(&mut *self.file, self.end, &self.buffer)?;
        if is_synced {
            self.file.sync()?;
        }
        self.end += self.buffer.len() as u64;
        self.buffer.clear();
        record::append(&mut self.buffer, (seed(self.number), self.end), Kind::Synced, version, |_| {});
        // It is not needed for anything but to know damage; the next record takes its place, however much of it is there.
        if let Err(error) = write_all(&mut *self.file, self.end, &self.buffer) {
            tracing::debug!(%error, "the end of the journal was not marked");
        }
        Ok(())
    }

    /// Nothing is added any more.
    pub fn seal(&mut self) {
        self.is_sealed = true;
    }
}
