//! A store on a disk that a test provides: [`open_on`].
//!
//! A test implements [`Files`] and [`File`], and decides what each operation of the store does to its disk.

use std::{fmt, path::Path, sync::Arc};

pub use crate::store::embedded::{Access, File, Files, FolderTuning, Lock};
use crate::{
    base::{env::Env, error::Result},
    store::{
        FolderReport, Store,
        embedded::{Embedded, Engine, inspect},
    },
};

/// An open store on a disk that a test provides.
pub struct DiskStore {
    /// The store.
    pub database: Store,
    engine: Arc<Engine>,
}

impl DiskStore {
    /// Returns the newest version that was recovered from the opening that used `version`; `None` if the folder remembers no such opening.
    pub fn recovered(&self, version: u64) -> Option<u64> {
        self.engine.history().end_of(version)
    }

    /// Cleanly closes the folder, if the store was opened without threads. No commit succeeds afterwards.
    pub fn close(&self) {
        self.engine.close();
    }
}

impl fmt::Debug for DiskStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskStore").finish_non_exhaustive()
    }
}

/// The path that errors show for the folder.
const PATH: &str = "simulated";

/// Opens the store in the folder behind `files`, for a process with this `env`.
///
/// Fails in the same cases as [`Store::open_dir`].
pub fn open_on(files: Arc<dyn Files>, env: Env, tuning: FolderTuning) -> Result<DiskStore> {
    let engine = Arc::new(Engine::open_on(files, Path::new(PATH), env.clone(), tuning)?);
    let backend = Arc::new(Embedded::new(Arc::clone(&engine)));
    Ok(DiskStore { database: Store::new(backend, env), engine })
}

/// Checks the folder behind `files` for damage, as [`Store::check_dir`] does.
pub fn check_on(files: &dyn Files) -> Result<FolderReport> {
    Ok(inspect(files, Path::new(PATH))?.report)
}
