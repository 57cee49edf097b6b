//! Snapshots: all rows at one version, so that earlier journals can be removed.
//!
//! A snapshot has its name once it is whole and on disk; so any broken part of it is damage.

use std::{
    io,
    sync::atomic::{AtomicBool, Ordering},
};

use super::{
    files::{File, Files, replace, write_all},
    history::History,
    record::{self, Kind},
};
use crate::store::embedded::rows::Rows;

/// The payload length at which a record of rows ends, in bytes.
const RECORD_LEN: usize = 64 * 1_024;

/// The name of snapshot `number`, which has the rows of all journals before journal `number`.
pub(super) fn name(number: u64) -> String {
    format!("snapshot-{number:016}")
}

/// The seed of the checksums of snapshot `number`.
pub(super) fn seed(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x736e_6170_7368_6f74
}

/// Writes snapshot `number`: `root` at `version`. Returns it and its length. Fails soon after it `is_abandoned`.
pub(super) fn write(
    files: &dyn Files,
    number: u64,
    (root, version): (&Rows, u64),
    history: &History,
    is_abandoned: &AtomicBool,
) -> io::Result<(Box<dyn File>, u64)> {
    let (seed, mut at, mut record) = (seed(number), 0, Vec::new());
    replace(files, &name(number), |file| {
        let mut write = |kind, payload: &dyn Fn(&mut Vec<u8>)| {
            if is_abandoned.load(Ordering::Relaxed) {
                return Err(io::Error::other("the store was dropped, or has failed, meanwhile"));
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
            if rows.len() >= RECORD_LEN {
                write_rows(&mut rows, &mut count)?;
            }
        }
        if count > 0 {
            write_rows(&mut rows, &mut count)?;
        }
        write(Kind::End, &|out| out.extend_from_slice(&total.to_be_bytes()))
    })
}
