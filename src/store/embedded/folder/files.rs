//! [`Files`]: the one way from a store to its disk.
//!
//! Tests and simulations use a disk that fails, fills up, or loses its power. The store uses only these operations. It relies on
//! this: synced bytes survive a power failure, and any part of the other bytes may survive. A rename replaces a file at once or not
//! at all.

use std::{
    fs::{self, OpenOptions, TryLockError},
    io::{self, Read, Seek, SeekFrom, Write},
    path::Path,
};

pub(crate) trait Files: Send + Sync + 'static {
    /// Creates a folder that only its owner may enter, with its parents, if it does not exist.
    fn make_folder(&self, path: &Path) -> io::Result<()>;
    /// Whether there is a file, and no folder, at `path`.
    fn is_file(&self, path: &Path) -> bool;
    /// The names of the entries of a folder.
    fn list(&self, folder: &Path) -> io::Result<Vec<String>>;
    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn File>>;
    /// Renames a file, and replaces a file that has the new name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Waits until the names of a folder are on disk.
    fn sync_folder(&self, folder: &Path) -> io::Result<()>;
    /// Locks the file `path`, which is created if it does not exist, until the lock is dropped. `None` if another
    /// holder has it.
    fn lock(&self, path: &Path) -> io::Result<Option<Lock>>;
    /// Whether the file `path` is locked. It need not exist.
    fn is_locked(&self, path: &Path) -> io::Result<bool>;
}

/// A lock, until it is dropped.
pub(crate) type Lock = Box<dyn Send + Sync>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Read an existing file.
    Read,
    /// Read and write an existing file.
    Write,
    /// Create or empty the file. Only its owner may read it.
    Create,
}

pub(crate) trait File: Send {
    /// Its length, in bytes.
    fn len(&mut self) -> io::Result<u64>;
    /// Reads bytes at `at` into `buffer`. It may read fewer bytes than asked for; it reads none at the end.
    fn read_at(&mut self, at: u64, buffer: &mut [u8]) -> io::Result<usize>;
    /// Writes `bytes`, or some of them, at `at`, and returns how many.
    fn write_at(&mut self, at: u64, bytes: &[u8]) -> io::Result<usize>;
    /// Cuts it to `len`, and waits until that is on disk.
    fn cut(&mut self, len: u64) -> io::Result<()>;
    /// Waits until all writes are on disk.
    fn sync(&mut self) -> io::Result<()>;
}

pub(super) fn write_all(file: &mut dyn File, mut at: u64, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.write_at(at, bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => {
                at += written as u64;
                bytes = &bytes[written..];
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Fills `buffer` from `at` as far as the file goes, and returns the number of bytes.
pub(super) fn read_all(file: &mut dyn File, at: u64, buffer: &mut [u8]) -> io::Result<usize> {
    let mut read = 0;
    while read < buffer.len() {
        match file.read_at(at + read as u64, &mut buffer[read..]) {
            Ok(0) => break,
            Ok(more) => read += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(read)
}

/// The text of a small file; `None` if there is no such file.
pub(super) fn read_text(files: &dyn Files, path: &Path) -> io::Result<Option<String>> {
    let mut file = match files.open(path, Access::Read) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = vec![0; 4_096];
    let len = read_all(&mut *file, 0, &mut bytes)?;
    bytes.truncate(len);
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}

/// The suffix of a file's name until the file is whole.
pub(super) const UNFINISHED: &str = ".new";

/// Creates the file `name` of `folder` by `write`: after a power failure it is there as a whole, or as it was before.
pub(super) fn replace<T>(
    files: &dyn Files,
    folder: &Path,
    name: &str,
    write: impl FnOnce(&mut dyn File) -> io::Result<T>,
) -> io::Result<(Box<dyn File>, T)> {
    let unfinished = folder.join(format!("{name}{UNFINISHED}"));
    let make = || {
        let mut file = files.open(&unfinished, Access::Create)?;
        let written = write(&mut *file)?;
        file.sync()?;
        files.rename(&unfinished, &folder.join(name))?;
        files.sync_folder(folder)?;
        Ok((file, written))
    };
    // Free the room that it has taken, which commits need.
    make().inspect_err(|_: &io::Error| drop(files.remove(&unfinished)))
}

/// The disk of the operating system.
pub(crate) struct SystemFiles;

impl Files for SystemFiles {
    fn make_folder(&self, path: &Path) -> io::Result<()> {
        let mut builder = fs::DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.recursive(true).create(path)
    }

    fn is_file(&self, path: &Path) -> bool {
        path.exists() && !path.is_dir()
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<String>> {
        let names = fs::read_dir(folder)?;
        names.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn File>> {
        let mut options = OpenOptions::new();
        options.read(true);
        match access {
            Access::Read => {}
            Access::Write => _ = options.read(true).write(true),
            Access::Create => _ = owned(&mut options).truncate(true),
        }
        Ok(Box::new(options.open(path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        fs::File::open(folder)?.sync_all()
    }

    fn lock(&self, path: &Path) -> io::Result<Option<Lock>> {
        let mut options = OpenOptions::new();
        let file = owned(options.read(true)).truncate(false).open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Box::new(file))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    fn is_locked(&self, path: &Path) -> io::Result<bool> {
        let file = match fs::File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        match file.try_lock_shared() {
            Ok(()) => Ok(false),
            Err(TryLockError::WouldBlock) => Ok(true),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

/// Options to create a file that only its owner may read and write.
fn owned(options: &mut OpenOptions) -> &mut OpenOptions {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(options, 0o600);
    options.write(true).create(true)
}

impl File for fs::File {
    fn len(&mut self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_at(&mut self, at: u64, buffer: &mut [u8]) -> io::Result<usize> {
        self.seek(SeekFrom::Start(at))?;
        self.read(buffer)
    }

    fn write_at(&mut self, at: u64, bytes: &[u8]) -> io::Result<usize> {
        self.seek(SeekFrom::Start(at))?;
        self.write(bytes)
    }

    fn cut(&mut self, len: u64) -> io::Result<()> {
        self.set_len(len)?;
        self.sync_all()
    }

    fn sync(&mut self) -> io::Result<()> {
        self.sync_data()
    }
}
