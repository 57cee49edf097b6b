//! [`Files`]: the only way for a store to reach its disk.
//!
//! Tests and simulations use a disk that fails, fills up, or loses power. The store uses only these operations. It relies on these rules:
//! synced bytes survive a power failure, any part of the other bytes may survive, and a rename replaces a file completely or not at all.

use std::io;
#[cfg(unix)]
use std::{
    fs::{self, TryLockError},
    io::{Read, Seek, SeekFrom, Write},
    os::{fd::AsFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
};

#[cfg(unix)]
use rustix::fs::{AtFlags, Mode, OFlags};

/// An open folder. Its files are reached through its handle, so they stay the same even if another folder takes its place.
pub trait Files: Send + Sync + 'static {
    /// Returns the names of the entries.
    fn list(&self) -> io::Result<Vec<String>>;
    /// Opens a file.
    fn open(&self, name: &str, access: Access) -> io::Result<Box<dyn File>>;
    /// Renames a file, replacing any file that has the new name.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Waits until the names of the files in the folder are on disk.
    fn sync(&self) -> io::Result<()>;
    /// Waits until the names of the folder itself and of its parent folders are on disk.
    fn sync_parents(&self) -> io::Result<()>;
    /// Locks the folder until the lock is dropped; `None` if another holder has locked it. The lock is on the folder itself, which nobody
    /// can replace underneath the lock.
    fn lock(&self) -> io::Result<Option<Lock>>;
    /// Whether anybody has locked the folder.
    fn is_locked(&self) -> io::Result<bool>;
    /// Whether the path still leads to this folder. It no longer does once the folder has been moved, removed, or replaced.
    fn is_in_place(&self) -> io::Result<bool>;
}

/// A lock that is held until it is dropped.
pub type Lock = Box<dyn Send + Sync>;

/// What a file is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read an existing file.
    Read,
    /// Read and write an existing file.
    Write,
    /// Create the file, or empty it. Only its owner may read it.
    Create,
}

/// An open file.
#[allow(clippy::len_without_is_empty, reason = "nobody asks whether a file is empty")]
pub trait File: Send {
    /// Returns the length, in bytes.
    fn len(&mut self) -> io::Result<u64>;
    /// Reads bytes at `at` into `buffer`. May read fewer bytes than requested, and reads none at the end of the file.
    fn read_at(&mut self, at: u64, buffer: &mut [u8]) -> io::Result<usize>;
    /// Writes `bytes`, or some of them, at `at`. Returns how many bytes were written.
    fn write_at(&mut self, at: u64, bytes: &[u8]) -> io::Result<usize>;
    /// Cuts the file to `len` bytes, and waits until its new length is on disk.
    fn cut(&mut self, len: u64) -> io::Result<()>;
    /// Waits until all writes are on disk.
    fn sync(&mut self) -> io::Result<()>;
    /// Whether the file still has a name; writes to a removed file are lost.
    fn has_name(&mut self) -> io::Result<bool>;
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

/// Fills `buffer` with the bytes at `at`, as far as the file reaches, and returns how many were read.
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

/// Reads the text of a small file; `None` if there is no such file.
pub(super) fn read_text(files: &dyn Files, name: &str) -> io::Result<Option<String>> {
    let mut file = match files.open(name, Access::Read) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = vec![0; 4_096];
    let len = read_all(&mut *file, 0, &mut bytes)?;
    bytes.truncate(len);
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}

/// The suffix of a file's name until the file is complete.
pub(super) const UNFINISHED: &str = ".new";

/// Creates the file `name` with what `write` puts into it. After a power failure the file is either complete or as it was before.
pub(super) fn replace<T>(
    files: &dyn Files,
    name: &str,
    write: impl FnOnce(&mut dyn File) -> io::Result<T>,
) -> io::Result<(Box<dyn File>, T)> {
    let unfinished = format!("{name}{UNFINISHED}");
    let make = || {
        let mut file = files.open(&unfinished, Access::Create)?;
        let written = write(&mut *file)?;
        file.sync()?;
        files.rename(&unfinished, name)?;
        files.sync()?;
        Ok((file, written))
    };
    // Free the room that the unfinished file takes up, because commits need it.
    make().inspect_err(|_: &io::Error| drop(files.remove(&unfinished)))
}

/// Whether `error` says that the disk is full.
pub(super) fn is_no_room(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// A folder of the operating system.
#[cfg(unix)]
pub(super) struct SystemFolder {
    handle: fs::File,
    path: PathBuf,
}

#[cfg(unix)]
impl SystemFolder {
    /// Opens the folder `path`, which must exist.
    pub fn open(path: &Path) -> io::Result<Self> {
        // The path must stay valid if the program changes its working directory.
        let path = std::path::absolute(path)?;
        Ok(Self { handle: opened(rustix::fs::CWD, &path)?, path })
    }

    /// Opens the folder `path`, and creates it with its parents if it does not exist. Only its owner may enter it.
    pub fn make(path: &Path) -> io::Result<Self> {
        let mut builder = fs::DirBuilder::new();
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.recursive(true).create(path)?;
        Self::open(path)
    }
}

/// Opens a handle to the folder `path`, relative to `at`.
#[cfg(unix)]
fn opened(at: impl AsFd, path: &Path) -> io::Result<fs::File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(at, path, flags, Mode::empty())?.into())
}

#[cfg(unix)]
impl Files for SystemFolder {
    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.handle)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        Ok(names)
    }

    fn open(&self, name: &str, access: Access) -> io::Result<Box<dyn File>> {
        let flags = match access {
            Access::Read => OFlags::RDONLY,
            Access::Write => OFlags::RDWR,
            Access::Create => OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC,
        };
        let file = rustix::fs::openat(&self.handle, name, flags | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR)?;
        Ok(Box::new(fs::File::from(file)))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(rustix::fs::renameat(&self.handle, from, &self.handle, to)?)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.handle, name, AtFlags::empty())?)
    }

    fn sync(&self) -> io::Result<()> {
        self.handle.sync_all()
    }

    fn sync_parents(&self) -> io::Result<()> {
        for parent in self.path.ancestors().skip(1) {
            match opened(rustix::fs::CWD, parent).and_then(|parent| parent.sync_all()) {
                // Parents that this user may not open are not ours to sync.
                Err(error) if error.kind() != io::ErrorKind::PermissionDenied => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    fn lock(&self) -> io::Result<Option<Lock>> {
        // A lock belongs to one opening of the folder, so each lock needs its own handle.
        let handle = opened(&self.handle, Path::new("."))?;
        match handle.try_lock() {
            Ok(()) => Ok(Some(Box::new(handle))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    fn is_locked(&self) -> io::Result<bool> {
        match opened(&self.handle, Path::new("."))?.try_lock_shared() {
            Ok(()) => Ok(false),
            Err(TryLockError::WouldBlock) => Ok(true),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    fn is_in_place(&self) -> io::Result<bool> {
        let there = match fs::metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            there => there?,
        };
        let own = self.handle.metadata()?;
        Ok((there.dev(), there.ino()) == (own.dev(), own.ino()))
    }
}

#[cfg(unix)]
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

    fn has_name(&mut self) -> io::Result<bool> {
        Ok(self.metadata()?.nlink() > 0)
    }
}
