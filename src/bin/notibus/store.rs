//! `--store`: which store to use.

use std::{path::PathBuf, str::FromStr, sync::LazyLock};

use notibus::{Error, Result, StoreError, store::Database};
use tokio::sync::watch;

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
        let db = match self {
            Self::Memory => Ok(Database::memory()),
            Self::Dir(path) => Database::open_dir(path),
            #[cfg(feature = "foundationdb")]
            Self::FoundationDb(path) => Database::foundationdb(path).await,
            #[cfg(not(feature = "foundationdb"))]
            Self::FoundationDb(path) => Err(Error::Open {
                path: path.clone(),
                reason: "this program was built without the feature `foundationdb`".to_owned(),
            }),
        }?;
        let failed = db.failed();
        tokio::spawn(async { FAILED.send_replace(Some(failed.await)) });
        Ok(db)
    }
}

/// Why a store that was opened takes no more writes.
static FAILED: LazyLock<watch::Sender<Option<Error>>> = LazyLock::new(watch::Sender::default);

/// Whether `error` says that the store takes no more writes.
pub fn is_failure(error: &Error) -> bool {
    error.code() == Some(StoreError::IO_ERROR.code())
}

/// Completes when a store that was opened takes no more writes.
pub async fn failed() -> Error {
    let mut failed = FAILED.subscribe();
    let error = failed.wait_for(Option::is_some).await.expect("the sender is static");
    error.clone().expect("it was just there")
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
