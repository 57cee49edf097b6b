//! [`Names`]: the files of a folder, by their names.

use std::io;

use super::{
    files::{Files, UNFINISHED},
    journal, snapshot,
};

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
    /// The files of the store. Others may be there: only a name that the store gives is one of its files.
    pub fn of(files: &dyn Files) -> io::Result<Self> {
        let mut found = Self::default();
        for name in files.list()? {
            let number = |named: fn(u64) -> String| {
                let digits = name.rsplit('-').next().and_then(|digits| digits.parse::<u64>().ok());
                digits.filter(|number| *number <= NUMBER_MAX && named(*number) == name)
            };
            if let Some(number) = number(journal::name) {
                found.journals.push(number);
            } else if let Some(number) = number(snapshot::name) {
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

/// The greatest number of a file: it has 16 digits.
const NUMBER_MAX: u64 = 9_999_999_999_999_999;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::testing::SimulatedDisk;

    #[test]
    fn only_names_of_the_store_are_its_files() {
        let disk = SimulatedDisk::new(64);
        for name in
            ["journal-0000000000000007", "journal-7", "journal-99999999999", "journal-00000000000000007"]
        {
            disk.write(name, b"");
        }
        assert_eq!(Names::of(&disk).unwrap().journals, [7]);
    }
}
