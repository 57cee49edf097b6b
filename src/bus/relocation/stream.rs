//! The bytes of an export: its tags, and a hash of all that goes through.

use std::{
    io::{Read, Write},
    sync::Arc,
};

use xxhash_rust::xxh3::Xxh3Default;

use crate::base::error::{Error, Result};

/// What an export begins with.
pub(super) const MAGIC: &[u8] = b"notibus export\n";

/// The format of an export.
pub(super) const FORMAT: u16 = 2;

/// The tag of the end.
pub(super) const END: u8 = 0;

/// The tag of a row.
pub(super) const ROW: u8 = 1;

/// A failure of reading or writing an export.
pub(super) fn io(error: std::io::Error) -> Error {
    Error::Io { what: "export", source: Arc::new(error) }
}

/// Hashes what goes through it.
pub(super) struct Hashed<T> {
    /// Where it comes from, or goes to.
    pub inner: T,
    /// The hash of all bytes so far.
    pub hash: Xxh3Default,
}

impl<T> Hashed<T> {
    /// Nothing has gone through yet.
    pub fn new(inner: T) -> Self {
        Self { inner, hash: Xxh3Default::new() }
    }
}

impl<W: Write> Hashed<W> {
    /// Writes `bytes`.
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
    /// The next `len` bytes.
    pub fn take(&mut self, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.inner.read_exact(&mut bytes).map_err(io)?;
        self.hash.update(&bytes);
        Ok(bytes)
    }

    /// The next bytes, whose length stands before them and is at most `max`.
    pub fn take_sized(&mut self, max: usize) -> Result<Vec<u8>> {
        let len = u32::from_be_bytes(self.take(4)?.try_into().expect("4 bytes were taken")) as usize;
        if len > max {
            return Err(Error::invalid("export", format!("it is damaged: a key or value of {len} bytes")));
        }
        self.take(len)
    }
}
