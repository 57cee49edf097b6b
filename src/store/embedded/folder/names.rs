//! [`Names`]: the files of a folder, by their names.

use std::{io, path::Path};

use super::files::{Files, UNFINISHED};

/// The files of a folder.
#[derive(Default)]
pub(super) struct Names {
    /// The numbers of its journals, in order.
    pub journals: Vec<u64>,
    /// The numbers of its snapshots, in order.
    pub snapshots: Vec<u64>,
    /// Files that were never finished.
    pub unfinished: Vec<String>,
}

impl Names {
    pub fn of(files: &dyn Files, folder: &Path) -> io::Result<Self> {
        let mut found = Self::default();
        for name in files.list(folder)? {
            let number =
                |prefix| name.strip_prefix(prefix).and_then(|digits: &str| digits.parse::<u64>().ok());
            if let Some(number) = number("journal-") {
                found.journals.push(number);
            } else if let Some(number) = number("snapshot-") {
                found.snapshots.push(number);
            } else if name.ends_with(UNFINISHED) {
                found.unfinished.push(name);
            }
        }
        found.journals.sort_unstable();
        found.snapshots.sort_unstable();
        Ok(found)
    }
}
