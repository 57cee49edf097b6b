//! `--store`: which store to use, and whether it failed.

use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

#[cfg(not(feature = "foundationdb"))]
use notibus::Error;
use notibus::{Result, store::Store};
use parking_lot::Mutex;

use crate::terminal::{Failure, notice};

/// Which store to use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreAddress {
    /// In memory, and gone when the process ends.
    Memory,
    /// In a folder.
    Dir(PathBuf),
    /// The cluster in this cluster file.
    FoundationDb(PathBuf),
}

impl StoreAddress {
    /// Opens the store for writing. A cluster has to answer within `timeout`; reading a folder may take as long as it needs.
    pub async fn open(&self, timeout: Duration) -> Result<Store> {
        let db = match self {
            Self::Memory => Store::memory(),
            Self::Dir(path) => Store::open_dir(path)?,
            Self::FoundationDb(path) => cluster(path, timeout).await?,
        };
        *OPENED.lock() = Some(db.clone());
        Ok(db)
    }
}

#[cfg(feature = "foundationdb")]
async fn cluster(file: &Path, timeout: Duration) -> Result<Store> {
    use notibus::store::FoundationDbOptions;
    Store::foundationdb_with(file, &FoundationDbOptions::default().connect_timeout(timeout)).await
}

#[cfg(not(feature = "foundationdb"))]
#[expect(clippy::unused_async, reason = "a program with this feature waits")]
async fn cluster(file: &Path, _: Duration) -> Result<Store> {
    let reason = "this program was built without the feature `foundationdb`".to_owned();
    Err(Error::Open { path: file.to_owned(), cause: notibus::store::OpenCause::Unusable, reason })
}

/// Where a bus is, for commands that work on a whole store.
#[derive(Debug, clap::Args)]
pub struct At {
    /// The store: "dir:FOLDER" or "fdb:FILE".
    #[arg(long, env = "NOTIBUS_STORE")]
    pub store: StoreAddress,
    /// The prefix of the bus's keys.
    #[arg(long, env = "NOTIBUS_PREFIX", default_value = "notibus")]
    pub prefix: String,
}

/// The store that this process opened for writing.
static OPENED: Mutex<Option<Store>> = Mutex::new(None);

/// Returns `failure`, or says that the store takes no more writes if that is the cause. The error from the commit that hit the failing disk
/// says only that the commit may have happened.
pub fn explained(failure: Failure) -> Failure {
    let Some(error) = OPENED.lock().as_ref().and_then(Store::failure) else { return failure };
    let reason = format!(
        "the store takes no more writes: {error}. What was acknowledged is in its folder: repair the disk, or make room, and start again"
    );
    match failure {
        Failure::BadInput(ended) | Failure::Failed(ended) if ended != error.to_string() => {
            Failure::StoreFailed(reason).and(&format!("the command ended with: {ended}"))
        }
        _ => Failure::StoreFailed(reason),
    }
}

/// Drops this handle of the opened store, which is closed when the last other handle is dropped.
pub fn close() {
    drop(OPENED.lock().take());
}

impl StoreAddress {
    /// Opens the store for reading. A folder needs only read permission. If another process has it open, the rows may be out of date, and a
    /// notice says so; with `instead` this fails, and says what can be done instead.
    pub async fn open_to_read(&self, timeout: Duration, instead: Option<&str>) -> Result<Store, Failure> {
        self.check_exists()?;
        let Self::Dir(path) = self else { return Ok(self.open(timeout).await?) };
        let (db, report) = Store::open_dir_to_read(path)?;
        match instead {
            _ if !report.is_open => {}
            None => notice(&format!(
                "notibus: another process has {self} open: this shows what it has written so far"
            )),
            Some(instead) => {
                let reason = format!("{self} is open in another process: stop that process, or {instead}");
                return Err(Failure::Failed(reason));
            }
        }
        Ok(db)
    }

    /// Fails if there is no store. Commands that must not create a store call this, because opening a folder creates one.
    pub fn check_exists(&self) -> Result<(), Failure> {
        match self {
            Self::Dir(path) if is_empty(path) => Err(Failure::BadInput(format!(
                "there is no store at {}; `serve` and `import` create one",
                path.display()
            ))),
            _ => Ok(()),
        }
    }
}

/// Whether there is nothing at `path`, such as in the place of a disk that is not mounted.
fn is_empty(path: &Path) -> bool {
    !path.exists() || path.read_dir().is_ok_and(|mut entries| entries.next().is_none())
}

impl fmt::Display for StoreAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory"),
            Self::Dir(path) | Self::FoundationDb(path) => path.display().fmt(f),
        }
    }
}

impl FromStr for StoreAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "memory" => Ok(Self::Memory),
            Some(("dir", path)) if !path.is_empty() => Ok(Self::Dir(path.into())),
            Some(("fdb", path)) if !path.is_empty() => Ok(Self::FoundationDb(path.into())),
            _ => Err(format!("{text:?} is none of \"memory\", \"dir:FOLDER\" and \"fdb:FILE\"")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_are_parsed() {
        assert_eq!("memory".parse(), Ok(StoreAddress::Memory));
        assert_eq!("dir:a:b".parse(), Ok(StoreAddress::Dir("a:b".into())));
        assert_eq!("fdb:c".parse(), Ok(StoreAddress::FoundationDb("c".into())));
        for bad in ["", "dir:", "dir", "fdb:", "disk:x", "memory:x"] {
            assert!(bad.parse::<StoreAddress>().is_err(), "{bad}");
        }
    }
}
