//! The bytes of an export: its tags, and the hash over them.

use std::{
    io::{Read, Write},
    sync::Arc,
};

use xxhash_rust::xxh3::Xxh3Default;

use crate::base::error::{Error, Result};

/// The first bytes of an export.
pub(super) const MAGIC: &[u8] = b"notibus export\n";

pub(super) const FORMAT: u16 = 3;

pub(super) const END: u8 = 0;

pub(super) const ROW: u8 = 1;

/// Wraps a failure of reading or writing an export.
pub(super) fn io(error: std::io::Error) -> Error {
    if error.kind() == std::io::ErrorKind::UnexpectedEof {
        return Error::invalid("export", "it ends early: copy it again, or export the bus once more");
    }
    Error::Io { what: "export", source: Arc::new(error) }
}

/// Hashes all bytes that are read or written.
pub(super) struct Hashed<T> {
    pub inner: T,
    pub hash: Xxh3Default,
}

impl<T> Hashed<T> {
    pub fn new(inner: T) -> Self {
        Self { inner, hash: Xxh3Default::new() }
    }
}

impl<W: Write> Hashed<W> {
    pub fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.inner.write_all(bytes).map_err(io)
    }

    /// Writes the length of `bytes`, and `bytes`.
    pub fn put_sized(&mut self, bytes: &[u8]) -> Result<()> {
        let len = u32::try_from(bytes.len()).expect("keys and values are far below 4 GiB");
        self.put(&len.to_be_bytes())?;
        self.put(bytes)
    }
}

impl<R: Read> Hashed<R> {
    /// Reads the next `len` bytes.
    pub fn take(&mut self, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.inner.read_exact(&mut bytes).map_err(io)?;
        self.hash.update(&bytes);
        Ok(bytes)
    }

    /// Reads bytes after their length, which is at most `max`.
    pub fn take_sized(&mut self, max: usize) -> Result<Vec<u8>> {
        let len = u32::from_be_bytes(self.take(4)?.try_into().expect("4 bytes were taken")) as usize;
        if len > max {
            return Err(Error::invalid("export", format!("it is damaged: a key or value of {len} bytes")));
        }
        self.take(len)
    }
}
