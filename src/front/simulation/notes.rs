//! [`Notes`]: what a process would tell the oracle, as lines of a file that survives it.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use parking_lot::Mutex;
use serde::{Serialize, de::DeserializeOwned};

use super::issuer::Issuer;

/// The notes of a process in one of its lives.
pub(super) struct Notes {
    file: Mutex<File>,
    /// The newest version that it has read from, or committed at.
    version: AtomicU64,
}

/// The file of the notes of `issuer`.
fn path(folder: &Path, Issuer { process, generation }: Issuer) -> PathBuf {
    folder.join(format!("notes-{process}-{generation}"))
}

/// What `issuer` has noted after the first `from` bytes, each with its version, and up to which byte. What was not written to the end of
/// its line has not happened.
pub(super) fn read<T: DeserializeOwned>(
    folder: &Path,
    issuer: Issuer,
    from: usize,
) -> io::Result<(Vec<(u64, T)>, usize)> {
    let bytes = match fs::read(path(folder, issuer)) {
        // It was killed before its first note, or has just been started.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        read => read?,
    };
    let end = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
    let lines = bytes[from.min(end)..end].split_inclusive(|byte| *byte == b'\n');
    let notes = lines.map(|line| serde_json::from_slice(line).map_err(io::Error::other));
    Ok((notes.collect::<io::Result<_>>()?, end))
}

impl Notes {
    /// No notes yet.
    pub fn create(folder: &Path, issuer: Issuer) -> io::Result<Self> {
        Ok(Self { file: Mutex::new(File::create(path(folder, issuer))?), version: AtomicU64::new(0) })
    }

    /// The process knows what was committed up to `version`.
    pub fn knows(&self, version: u64) {
        self.version.fetch_max(version, Ordering::SeqCst);
    }

    /// Writes what it has `seen` down, before anything that follows from it can happen.
    pub fn write(&self, seen: &impl Serialize) {
        let mut file = self.file.lock();
        let mut line =
            serde_json::to_vec(&(self.version.load(Ordering::SeqCst), seen)).expect("it is plain data");
        line.push(b'\n');
        file.write_all(&line).expect("the folder of the notes has room");
    }
}
