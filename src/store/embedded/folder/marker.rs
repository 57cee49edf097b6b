//! The small files of a folder: the marker that tells its format, the lock, and the note that it was closed in order.

use std::{io, path::Path};

use super::files::{self, Files, read_text, replace, write_all};
use crate::base::error::{Error, OpenCause};

/// The file by which a store's folder is recognised.
pub(super) const MARKER: &str = "NOTIBUS_STORE";

/// The file that is locked by the process that has the folder open.
pub(super) const LOCK: &str = "NOTIBUS_LOCK";

/// The file with the version of a store that was closed in order. It does not exist while the store is open.
pub(super) const CLOSED: &str = "NOTIBUS_CLOSED";

/// The content of the marker: the format of the folder.
pub(super) const FORMAT: &str = "2\n";

/// The content of the marker until the folder has its first files. An empty marker, left by a crash, means the same.
pub(super) const FORMAT_UNFINISHED: &str = "2 unfinished\n";

/// The state of a folder's marker.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Marker {
    /// The folder is empty.
    Missing,
    /// The folder is being created.
    Unfinished,
    /// It holds a store.
    Finished,
}

/// Why a folder cannot be opened.
#[derive(Debug)]
pub(super) struct Refusal {
    cause: OpenCause,
    reason: String,
}

impl Refusal {
    /// The folder is no place for a store.
    pub fn unusable(reason: impl Into<String>) -> Self {
        Self { cause: OpenCause::Unusable, reason: reason.into() }
    }

    pub fn damaged(reason: impl Into<String>) -> Self {
        Self { cause: OpenCause::Damaged, reason: format!("damaged: {}", reason.into()) }
    }

    pub fn in_use(reason: impl Into<String>) -> Self {
        Self { cause: OpenCause::InUse, reason: reason.into() }
    }

    /// The error of the folder `path`.
    pub fn of(self, path: &Path) -> Error {
        Error::Open { path: path.to_owned(), cause: self.cause, reason: self.reason }
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self { cause: OpenCause::from(&error), reason: explain(&error) }
    }
}

/// Reads the marker of a folder.
pub(super) fn check_marker(files: &dyn Files, path: &Path) -> Result<Marker, Refusal> {
    match read_text(files, &path.join(MARKER))?.as_deref() {
        Some(FORMAT) => Ok(Marker::Finished),
        Some("" | FORMAT_UNFINISHED) => Ok(Marker::Unfinished),
        Some(format) => {
            let (found, known) = (format.trim(), FORMAT.trim());
            Err(Refusal::unusable(format!(
                "its format is {found:?}, this program knows {known:?}; export it with the program that has written it"
            )))
        }
        None => {
            let unfinished = format!("{MARKER}{}", files::UNFINISHED);
            if files.list(path)?.iter().any(|name| *name != LOCK && *name != unfinished) {
                return Err(Refusal::unusable("it holds files but no store; name an empty folder"));
            }
            Ok(Marker::Missing)
        }
    }
}

/// Writes a small file of the folder so that it is there as a whole, or as it was before.
pub(super) fn write_text(files: &dyn Files, path: &Path, name: &str, text: &str) -> io::Result<()> {
    replace(files, path, name, |file| write_all(file, 0, text.as_bytes())).map(drop)
}

/// What an error of the disk means to a user who opens a folder.
pub(super) fn explain(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::PermissionDenied => format!(
            "this user may not read and write its files; give it the right to, or be their owner ({error})"
        ),
        io::ErrorKind::ReadOnlyFilesystem => format!("it is on a read-only file system ({error})"),
        io::ErrorKind::StorageFull => format!("its disk is full; make room ({error})"),
        // Errors of the operating system are no damage: too many open files, a failing disk.
        _ => format!("it cannot be read or written ({error})"),
    }
}
