//! The small files of a folder: the marker that tells its format, the lock, and the note that it was closed in order.

use std::{io, path::Path};

use super::files::{self, Files, read_text, replace, write_all};

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

/// Reads the marker of a folder.
pub(super) fn check_marker(files: &dyn Files, path: &Path) -> Result<Marker, String> {
    let io = |error: io::Error| explain(&error);
    match read_text(files, &path.join(MARKER)).map_err(io)?.as_deref() {
        Some(FORMAT) => Ok(Marker::Finished),
        Some("" | FORMAT_UNFINISHED) => Ok(Marker::Unfinished),
        Some(format) => {
            let (found, known) = (format.trim(), FORMAT.trim());
            Err(format!(
                "its format is {found:?}, this program knows {known:?}; export it with the program that has written it"
            ))
        }
        None => {
            let unfinished = format!("{MARKER}{}", files::UNFINISHED);
            if files.list(path).map_err(io)?.iter().any(|name| *name != LOCK && *name != unfinished) {
                return Err("it holds files but no store; name an empty folder".to_owned());
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
