//! `--store`: which store to use, and whether it has failed.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    str::FromStr,
    sync::LazyLock,
};

use notibus::{Error, Result, store::Database};
use tokio::sync::watch;

use crate::{deadline::Deadline, failure::Failure, out::notice};

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
    /// Opens the store. The deadline is that of a cluster: a folder is read as long as it takes.
    pub async fn open(&self, deadline: Deadline) -> Result<Database> {
        let db = match self {
            Self::Memory => Database::memory(),
            Self::Dir(path) => Database::open_dir(path)?,
            Self::FoundationDb(path) => cluster(path, deadline).await?,
        };
        OPENED.send_replace(Opened { db: Some(db.clone()), failure: None });
        Ok(db)
    }
}

#[cfg(feature = "foundationdb")]
async fn cluster(file: &Path, Deadline(connect_timeout): Deadline) -> Result<Database> {
    use notibus::store::FoundationDbOptions;
    Database::foundationdb_with(file, &FoundationDbOptions::default().connect_timeout(connect_timeout)).await
}

#[cfg(not(feature = "foundationdb"))]
#[expect(clippy::unused_async, reason = "a program with this feature waits")]
async fn cluster(file: &Path, _: Deadline) -> Result<Database> {
    let reason = "this program was built without the feature `foundationdb`".to_owned();
    Err(Error::Open { path: file.to_owned(), cause: notibus::store::OpenCause::Unusable, reason })
}

/// The store that this process has opened to write to it.
#[derive(Default)]
struct Opened {
    db: Option<Database>,
    /// The failure that it had when it was closed.
    failure: Option<Error>,
}

static OPENED: LazyLock<watch::Sender<Opened>> = LazyLock::new(watch::Sender::default);

/// The error of the opened store, if it takes no more writes.
pub fn failure() -> Option<Error> {
    let opened = OPENED.borrow();
    opened.db.as_ref().map_or_else(|| opened.failure.clone(), Database::failure)
}

/// Completes with [`failure`] once there is one.
pub async fn failed() -> Error {
    let mut opened = OPENED.subscribe();
    let opened = opened.wait_for(|opened| opened.db.is_some()).await.expect("the sender is static");
    let failed = opened.db.as_ref().expect("it was just there").failed();
    drop(opened);
    failed.await
}

/// Gives the opened store up: it is closed with the last other handle.
pub fn close() {
    let failure = failure();
    drop(OPENED.send_replace(Opened { db: None, failure }));
}

/// A folder that did not exist before the command.
pub struct NewFolder {
    path: PathBuf,
    /// The folders above it that did not exist either, the innermost one first.
    parents: Vec<PathBuf>,
}

impl NewFolder {
    /// Removes it. The store in it must be closed.
    pub fn remove(self) {
        if let Err(error) = fs::remove_dir_all(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            notice(&format!("notibus: {} could not be removed: {error}", self.path.display()));
        }
        for parent in self.parents {
            // Something else may be in it by now.
            if fs::remove_dir(parent).is_err() {
                return;
            }
        }
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
            let open = format!("another process has {} open", self.store);
            notice(&format!("notibus: {open}: this is what it has written so far"));
        }
        self.db
    }

    /// The store, if no other process has it open. Else the failure says that `instead` is possible.
    pub fn at_rest(self, instead: &str) -> Result<Database, Failure> {
        if self.is_past {
            return Err(Failure::Failed(format!(
                "{} is open in another process: stop that, or {instead}",
                self.store
            )));
        }
        Ok(self.db)
    }
}

impl Store {
    /// The folder that opening would make.
    pub fn new_folder(&self) -> Option<NewFolder> {
        let Self::Dir(path) = self else { return None };
        let is_missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
        let mut missing = path.ancestors().take_while(is_missing).map(Path::to_owned);
        let path = missing.next()?;
        Some(NewFolder { path, parents: missing.collect() })
    }

    /// Opens the store for reading. A folder needs read permission only, and another process may have it open.
    pub async fn open_to_read(&self, deadline: Deadline) -> Result<Reading, Failure> {
        self.check_exists()?;
        let (db, is_past) = match self {
            Self::Dir(path) => {
                let (db, report) = Database::open_dir_to_read(path)?;
                (db, report.is_open)
            }
            _ => (self.open(deadline).await?, false),
        };
        Ok(Reading { db, is_past, store: self.clone() })
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
