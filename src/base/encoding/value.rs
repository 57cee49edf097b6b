//! Reading and writing values: a strict cursor over bytes, and the operand form of versionstamped keys and values.

use byteorder::{BigEndian, ByteOrder};

use super::{STAMP_LEN, Sequence};
use crate::base::error::{Error, Result};

/// A cursor over a stored value. Every read checks the length; [`Reader::finish`] fails if bytes are left over.
pub(crate) struct Reader<'a> {
    /// The name of the value, for error messages.
    what: &'static str,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Returns a reader of `bytes`. Errors call the value `what`.
    pub fn new(what: &'static str, bytes: &'a [u8]) -> Self {
        Self { what, rest: bytes }
    }

    /// Returns an error that says why the value cannot be decoded.
    pub fn corrupt(&self, reason: impl Into<String>) -> Error {
        Error::corrupt(self.what, reason)
    }

    /// Reads the next `len` bytes.
    pub fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(len).ok_or_else(|| {
            self.corrupt(format!("{} bytes are left, but {len} are needed", self.rest.len()))
        })?;
        self.rest = rest;
        Ok(taken)
    }

    /// Reads the next byte.
    pub fn u8(&mut self) -> Result<u8> {
        Ok(self.take(1)?[0])
    }

    /// Reads the next 2 bytes, big-endian.
    pub fn u16(&mut self) -> Result<u16> {
        self.take(2).map(BigEndian::read_u16)
    }

    /// Reads the next 4 bytes, big-endian.
    pub fn u32(&mut self) -> Result<u32> {
        self.take(4).map(BigEndian::read_u32)
    }

    /// Reads the next 8 bytes, big-endian.
    pub fn u64(&mut self) -> Result<u64> {
        self.take(8).map(BigEndian::read_u64)
    }

    /// Reads the next 16 bytes.
    pub fn bytes16(&mut self) -> Result<[u8; 16]> {
        Ok(self.take(16)?.try_into().expect("16 bytes were taken"))
    }

    /// Reads the next 13 bytes as a sequence.
    pub fn sequence(&mut self) -> Result<Sequence> {
        Sequence::from_bytes(self.take(Sequence::MIN.as_bytes().len())?)
    }

    /// Reads a text: its length (2 bytes), then its UTF-8 bytes.
    pub fn text(&mut self) -> Result<&'a str> {
        let len = self.u16()?;
        let bytes = self.take(len.into())?;
        std::str::from_utf8(bytes).map_err(|_| self.corrupt("text that is not UTF-8"))
    }

    /// Whether no bytes are left.
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// Fails if bytes are left.
    pub fn finish(self) -> Result<()> {
        if self.is_empty() {
            Ok(())
        } else {
            Err(self.corrupt(format!("{} bytes too many", self.rest.len())))
        }
    }
}

/// Returns the operand of `SET_VERSIONSTAMPED_*`: `before`, room for the stamp, `after`, and the offset of the stamp as 4 bytes,
/// little-endian.
pub(crate) fn versionstamped(before: &[u8], after: &[u8]) -> Vec<u8> {
    let mut operand = Vec::with_capacity(before.len() + STAMP_LEN + after.len() + 4);
    operand.extend_from_slice(before);
    operand.extend_from_slice(&[0; STAMP_LEN]);
    operand.extend_from_slice(after);
    let place = u32::try_from(before.len()).expect("keys and values are far below 4 GiB");
    operand.extend_from_slice(&place.to_le_bytes());
    operand
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_exact() {
        let mut reader = Reader::new("test", &[1, 0, 2, b'h', b'i', 9]);
        assert_eq!(reader.u8().unwrap(), 1);
        assert_eq!(reader.text().unwrap(), "hi");
        assert!(reader.u16().is_err());
        assert!(reader.finish().is_err(), "a byte is left");
    }

    #[test]
    fn the_operand_names_the_place_of_the_stamp() {
        let operand = versionstamped(b"ab", b"c");
        assert_eq!(&operand[..2], b"ab");
        assert_eq!(&operand[12..13], b"c");
        assert_eq!(&operand[13..], &[2, 0, 0, 0]);
    }
}
