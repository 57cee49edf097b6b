//! A store's folder: rows mirrored to `fjall`, and the files that say what the folder is.
//!
//! A journal that ends early looks the same after a crash, which may cut what was never acknowledged, and after damage,
//! which may cut more. So a store that is closed in order notes its version; when it is opened again, commits that are
//! missing are missed.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::core::{Root, Staged};
#[cfg(feature = "simulation")]
use super::power::{Power, Step};
use crate::{
    bugs::{Bug, is_on},
    encoding::Reader,
    error::{Error, Result},
};
use bytes::Bytes;
use fjall::{KeyspaceCreateOptions, PersistMode};

/// The file that tells a store's folder from others.
const MARKER: &str = "NOTIBUS_STORE";

/// The file that notes the version of a store that was closed in order. It is gone while the store is open.
const CLOSED: &str = "NOTIBUS_CLOSED";

/// What the marker says: the format of the folder.
const FORMAT: &str = "1\n";

/// What the marker says until the folder has a version. An empty marker, left by a crash, says the same.
const FORMAT_UNFINISHED: &str = "1 unfinished\n";

/// The row of the store's own data: its version. It sorts before all others. A finished folder without it has lost rows.
const META_KEY: &[u8] = &[0];

/// Precedes each key in the folder, where an empty key cannot be stored.
const ROW_TAG: u8 = 1;

/// The rows of a folder.
pub(super) struct Disk {
    /// The folder's database.
    database: fjall::Database,
    /// Its only keyspace.
    rows: fjall::Keyspace,
    /// The folder.
    path: PathBuf,
    /// What decides in a simulation how far commits come.
    #[cfg(feature = "simulation")]
    power: Option<std::sync::Arc<dyn Power>>,
}

/// What was found in a folder.
pub(super) struct Opened {
    /// For the thread that commits.
    pub disk: Disk,
    /// All rows.
    pub root: Root,
    /// The version of the newest commit.
    pub version: u64,
}

impl Disk {
    /// Opens the folder, and makes it if it does not exist.
    pub fn open(path: &Path) -> Result<Opened> {
        let fail = |reason: String| Error::Open { path: path.to_owned(), reason };
        let is_unfinished = prepare(path).map_err(&fail)?;
        let database = fjall::Database::builder(path).open().map_err(|error| fail(explain(&error)))?;
        let rows = database
            .keyspace("rows", KeyspaceCreateOptions::default)
            .map_err(|error| fail(explain(&error)))?;

        let mut root = Root::new();
        let mut version = None;
        for row in rows.iter() {
            let (key, value) = row.into_inner().map_err(|error| fail(explain(&error)))?;
            match key.split_first() {
                Some((&ROW_TAG, key)) => {
                    root.insert(Bytes::copy_from_slice(key), Bytes::copy_from_slice(&value));
                }
                _ if &key[..] == META_KEY => {
                    let mut reader = Reader::new("store version", &value);
                    version = Some(reader.u64().map_err(|error| fail(error.to_string()))?);
                    reader.finish().map_err(|error| fail(error.to_string()))?;
                }
                _ => {
                    return Err(fail(format!("damaged: it has a row under the unknown key {key:?}")));
                }
            }
        }
        if version.is_none() && !(is_unfinished && root.is_empty()) {
            let reason = "damaged: it has lost its version, and maybe rows; restore it from a copy";
            return Err(fail(reason.to_owned()));
        }
        let disk = Self {
            database,
            rows,
            path: path.to_owned(),
            #[cfg(feature = "simulation")]
            power: None,
        };
        let opened = Opened { disk, root, version: version.unwrap_or(0) };
        take_closed(path, opened.version).map_err(&fail)?;
        if is_unfinished {
            let finished = opened.disk.write_version(opened.version);
            finished.map_err(|error| fail(explain(&error)))?;
            mark(path, FORMAT).map_err(&fail)?;
        }
        Ok(opened)
    }

    /// It with `power`, which is asked before each step of a commit, and decides what a sync is worth.
    #[cfg(feature = "simulation")]
    pub fn with_power(self, power: std::sync::Arc<dyn Power>) -> Self {
        Self { power: Some(power), ..self }
    }

    /// Writes the version alone, and waits until it is on disk.
    fn write_version(&self, version: u64) -> Result<(), fjall::Error> {
        self.rows.insert(META_KEY, version.to_be_bytes())?;
        self.database.persist(PersistMode::SyncAll)
    }

    /// Notes that the store is closed in order at `version`.
    pub fn close(&self, version: u64) -> std::io::Result<()> {
        write(&self.path, CLOSED, &version.to_string())
    }

    /// Writes what a group has changed, all or nothing, and waits until it is on disk.
    pub fn persist(&self, staged: &Staged) -> Result<(), fjall::Error> {
        let mode = if is_on(Bug::CommitNotSynced) { PersistMode::Buffer } else { PersistMode::SyncData };
        #[cfg(feature = "simulation")]
        if let Some(power) = &self.power {
            power.step(Step::Write)?;
            self.write(staged, PersistMode::Buffer)?;
            power.step(Step::Sync)?;
            return if mode == PersistMode::Buffer { Ok(()) } else { Ok(power.step(Step::Answer)?) };
        }
        self.write(staged, mode)
    }

    /// Writes what a group has changed, all or nothing, and goes as far with it as `mode` says. Between write and sync nobody
    /// else may come in, who would have to report that the sync has failed.
    fn write(&self, staged: &Staged, mode: PersistMode) -> Result<(), fjall::Error> {
        let mut batch = self.database.batch().durability(Some(mode));
        let mut keys: Vec<&Bytes> = staged.keys().collect();
        keys.sort_unstable();
        keys.dedup();
        for key in keys {
            let mut stored_key = Vec::with_capacity(key.len() + 1);
            stored_key.push(ROW_TAG);
            stored_key.extend_from_slice(key);
            match staged.root.get(key) {
                Some(value) => batch.insert(&self.rows, stored_key, &value[..]),
                None => batch.remove(&self.rows, stored_key),
            }
        }
        batch.insert(&self.rows, META_KEY, staged.version.to_be_bytes());
        batch.commit()
    }
}

/// Makes the folder if it does not exist; refuses one that holds anything but a store. True if it has yet to get a
/// version.
fn prepare(path: &Path) -> Result<bool, String> {
    let io = |error: std::io::Error| error.to_string();
    if path.exists() && !path.is_dir() {
        return Err("it is a file; name a folder".to_owned());
    }
    make_folder(path).map_err(io)?;
    match fs::read_to_string(path.join(MARKER)) {
        Ok(format) if format == FORMAT => Ok(false),
        Ok(format) if format.is_empty() || format == FORMAT_UNFINISHED => Ok(true),
        Ok(format) => {
            Err(format!("its format is {:?}, this program knows {:?}", format.trim(), FORMAT.trim()))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            if fs::read_dir(path).map_err(io)?.next().is_some() {
                return Err("it holds files but no store; name an empty folder".to_owned());
            }
            mark(path, FORMAT_UNFINISHED).map(|()| true)
        }
        Err(error) => Err(io(error)),
    }
}

/// Writes the marker.
fn mark(path: &Path, format: &str) -> Result<(), String> {
    write(path, MARKER, format).map_err(|error| error.to_string())
}

/// Writes a small file of the folder so that it outlives a crash.
fn write(path: &Path, name: &str, text: &str) -> std::io::Result<()> {
    let file = path.join(name);
    fs::write(&file, text)?;
    fs::File::open(&file)?.sync_all()?;
    fs::File::open(path)?.sync_all()
}

/// Compares the version with the one noted when the store was closed in order, if it was, and takes the note away.
fn take_closed(path: &Path, version: u64) -> Result<(), String> {
    let file = path.join(CLOSED);
    match fs::read_to_string(&file) {
        Ok(noted) if noted.parse() == Ok(version) => fs::remove_file(&file)
            .and_then(|()| fs::File::open(path)?.sync_all())
            .map_err(|error| error.to_string()),
        Ok(noted) => Err(format!(
            "damaged: it was closed at version {noted:?}, but has commits up to {version} only; restore it from a copy"
        )),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

/// What an error of the folder's database means to whoever opens it.
fn explain(error: &fjall::Error) -> String {
    if matches!(error, fjall::Error::Locked) {
        return "it is open in another process, or by another handle of this one".to_owned();
    }
    let mut causes = std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source());
    let io = causes.find_map(|cause| cause.downcast_ref::<std::io::Error>());
    match io.map(|error| (error.kind(), error.raw_os_error())) {
        Some((std::io::ErrorKind::PermissionDenied, _)) => {
            format!(
                "this user may not read and write its files; give it the right to, or be their owner ({error})"
            )
        }
        Some((std::io::ErrorKind::ReadOnlyFilesystem, _)) => {
            format!("it is on a read-only file system ({error})")
        }
        Some((std::io::ErrorKind::StorageFull, _)) => format!("its disk is full; make room ({error})"),
        // What the operating system refuses is no damage: too many open files, a failing disk.
        Some((_, Some(_))) => format!("it cannot be read ({error})"),
        _ => format!("it cannot be read and is probably damaged; restore it from a copy ({error})"),
    }
}

/// Makes the folder `path`, which only its owner may enter.
fn make_folder(path: &Path) -> std::io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(path)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    /// Once, whatever was wrong was called damage, to be restored from a copy.
    #[test]
    fn damage_is_said_of_damage_only() {
        for (code, said) in [(13, "may not read"), (30, "read-only"), (28, "full"), (24, "cannot be read (")]
        {
            let reason = explain(&fjall::Error::Io(io::Error::from_raw_os_error(code)));
            assert!(reason.contains(said) && !reason.contains("damaged"), "{reason}");
        }
        let reason = explain(&fjall::Error::Io(io::Error::new(io::ErrorKind::InvalidData, "checksum")));
        assert!(reason.contains("damaged"), "{reason}");
    }

    #[cfg(unix)]
    #[test]
    fn nobody_else_may_enter_a_folder() {
        use std::os::unix::fs::PermissionsExt;
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("store");
        drop(Disk::open(&folder).unwrap());
        assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);
    }
}
