//! `--store`: which store to use.

use std::{fmt, path::PathBuf, str::FromStr, sync::LazyLock};

use notibus::{
    Error, Result,
    store::{Database, StoreError},
};
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
                cause: notibus::store::OpenCause::Unusable,
                reason: "this program was built without the feature `foundationdb`".to_owned(),
            }),
        }?;
        let failed = db.failed();
        tokio::spawn(async { FAILED.send_replace(Some(failed.await)) });
        Ok(db)
    }
}

/// A store that was opened for reading.
pub struct Reading {
    /// The store.
    pub db: Database,
    /// Whether another process has it open, so that this is a copy of the past.
    is_past: bool,
    store: Store,
}

impl Reading {
    /// The store. Prints a notice if it is a copy of the past.
    pub fn now(self) -> Database {
        if self.is_past {
            eprintln!("notibus: another process has {} open: this is what it has written so far", self.store);
        }
        self.db
    }

    /// The store, if no other process has it open.
    pub fn at_rest(self) -> Result<Database, Failure> {
        if self.is_past {
            return Err(Failure::BadInput(format!(
                "{} is open in another process: stop it first",
                self.store
            )));
        }
        Ok(self.db)
    }
}

impl Store {
    /// Opens the store for reading. A folder needs read permission only, and another process may have it open.
    pub async fn open_to_read(&self) -> Result<Reading, Failure> {
        self.check_exists()?;
        let (db, is_past) = match self {
            Self::Dir(path) => {
                let (db, report) = Database::open_dir_to_read(path)?;
                (db, report.is_open)
            }
            _ => (self.open().await?, false),
        };
        Ok(Reading { db, is_past, store: self.clone() })
    }

    /// Opens the readable part of a damaged folder.
    pub fn salvage(&self) -> Result<Database, Failure> {
        self.check_exists()?;
        let Self::Dir(path) = self else {
            return Err(Failure::BadInput("only what is in a folder can be salvaged".to_owned()));
        };
        let (db, report) = Database::salvage_dir(path)?;
        for damage in &report.damages {
            eprintln!("notibus: damaged: {damage}");
        }
        Ok(db)
    }
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory"),
            Self::Dir(path) | Self::FoundationDb(path) => path.display().fmt(f),
        }
    }
}

/// The failure of a store that takes no more writes.
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
    /// Fails if there is no store. For commands that only read, because opening a folder creates one.
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
    fn stores_are_parsed() {
        assert_eq!("memory".parse(), Ok(Store::Memory));
        assert_eq!("dir:a:b".parse(), Ok(Store::Dir("a:b".into())));
        assert_eq!("fdb:c".parse(), Ok(Store::FoundationDb("c".into())));
        for bad in ["", "dir:", "dir", "fdb:", "disk:x", "memory:x"] {
            assert!(bad.parse::<Store>().is_err(), "{bad}");
        }
    }
}
