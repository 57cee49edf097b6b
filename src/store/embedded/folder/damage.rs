//! [`Damage`]: bytes of a folder that have changed on the disk.

use std::{fmt, io};

/// A place in a file whose bytes have changed since they were written.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Damage {
    /// The name of the file in the folder.
    pub file: String,
    /// The offset in the file, in bytes.
    pub offset: u64,
    /// What is wrong there.
    pub what: String,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at byte {}: {}", self.file, self.offset, self.what)
    }
}

/// What to do with bytes that the disk cannot read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BadSectors {
    Fail,
    /// Go on behind them, as behind other damage.
    Pass,
}

/// Whether a read fails because of the medium: `EIO`.
pub(super) fn is_bad_sector(error: &io::Error) -> bool {
    error.raw_os_error() == Some(5)
}
