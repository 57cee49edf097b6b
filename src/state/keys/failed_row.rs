//! The end of the stored rows of groups whose work has failed: how often it was tried, when last, why it failed, and of which row of the
//! feed.

use bytes::Bytes;

use super::cut;
use crate::base::{encoding::Reader, error::Result};

/// Attempts (4 bytes), time (8), the error's text behind its length (2), and the row. A text that is too long is cut.
pub(super) fn to_bytes(attempts: u32, at_ms: u64, error: &str, row: &[u8]) -> Vec<u8> {
    let error = cut(error);
    let len = u16::try_from(error.len()).expect("it was cut");
    [&attempts.to_be_bytes()[..], &at_ms.to_be_bytes(), &len.to_be_bytes(), error.as_bytes(), row].concat()
}

/// What [`to_bytes`] has written: all of `bytes` behind the first `head`, up to which `reader` has read them.
pub(super) fn read(mut reader: Reader<'_>, bytes: &Bytes, head: usize) -> Result<(u32, u64, String, Bytes)> {
    let (attempts, at_ms, error) = (reader.u32()?, reader.u64()?, reader.text()?.to_owned());
    let row = bytes.slice(head + 4 + 8 + 2 + error.len()..);
    Ok((attempts, at_ms, error, row))
}
