//! `--store`: which store to use.

use std::{path::PathBuf, str::FromStr};

use notibus::{Result, store::Database};

use crate::Failure;

/// Which store to use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Store {
    /// In memory; gone when the process ends.
    Memory,
    /// In a folder.
    Dir(PathBuf),
    /// The cluster of a cluster file.
    FoundationDb(PathBuf),
}

impl Store {
    /// Opens the store.
    #[cfg_attr(
        not(feature = "foundationdb"),
        expect(clippy::unused_async, reason = "only a cluster is waited for")
    )]
    pub async fn open(&self) -> Result<Database> {
        match self {
            Self::Memory => Ok(Database::memory()),
            Self::Dir(path) => Database::open_dir(path),
            #[cfg(feature = "foundationdb")]
            Self::FoundationDb(path) => Database::foundationdb(path).await,
            #[cfg(not(feature = "foundationdb"))]
            Self::FoundationDb(path) => Err(notibus::Error::Open {
                path: path.clone(),
                reason: "this program was built without the feature `foundationdb`".to_owned(),
            }),
        }
    }
}

impl Store {
    /// Fails if there is no store, for commands that only read: opening a folder makes one.
    pub fn check_exists(&self) -> Result<(), Failure> {
        match self {
            Self::Dir(path) if !path.exists() => {
                Err(Failure::BadInput(format!("there is no store at {}", path.display())))
            }
            _ => Ok(()),
        }
    }
}

impl FromStr for Store {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "memory" => Ok(Self::Memory),
            Some(("dir", path)) if !path.is_empty() => Ok(Self::Dir(path.into())),
            Some(("fdb", path)) if !path.is_empty() => Ok(Self::FoundationDb(path.into())),
            _ => Err(format!("{text:?} is none of \"memory\", \"dir:PATH\" and \"fdb:CLUSTER_FILE\"")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_are_told_apart() {
        assert_eq!("memory".parse(), Ok(Store::Memory));
        assert_eq!("dir:a:b".parse(), Ok(Store::Dir("a:b".into())));
        assert_eq!("fdb:c".parse(), Ok(Store::FoundationDb("c".into())));
        for bad in ["", "dir:", "dir", "fdb:", "disk:x", "memory:x"] {
            assert!(bad.parse::<Store>().is_err(), "{bad}");
        }
    }
}
