//! A store on a disk of a test's own: [`open_on`].
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

/// A store on a test's disk, as long as it is open.
pub struct DiskStore {
    /// The store.
    pub database: Store,
    engine: Arc<Engine>,
}

impl DiskStore {
    /// The version of the newest recovered commit of the opening that had used `version`; `None` if the folder remembers no such
    /// opening.
    pub fn recovered(&self, version: u64) -> Option<u64> {
        self.engine.history().end_of(version)
    }

    /// Closes a folder without threads in order. No commit succeeds afterwards.
    pub fn close(&self) {
        self.engine.close();
    }
}

impl fmt::Debug for DiskStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskStore").finish_non_exhaustive()
    }
}

/// The path by which errors name the folder.
const PATH: &str = "simulated";

/// Opens the store in the folder that `files` are, for a process with this `env`.
///
/// Fails as [`Store::open_dir`] does.
pub fn open_on(files: Arc<dyn Files>, env: Env, tuning: FolderTuning) -> Result<DiskStore> {
    let engine = Arc::new(Engine::open_on(files, Path::new(PATH), env.clone(), tuning)?);
    let backend = Arc::new(Embedded::new(Arc::clone(&engine)));
    Ok(DiskStore { database: Store::new(backend, env), engine })
}

/// Looks for damage in the folder that `files` are, as [`Store::check_dir`] does.
pub fn check_on(files: &dyn Files) -> Result<FolderReport> {
    Ok(inspect(files, Path::new(PATH))?.report)
}
