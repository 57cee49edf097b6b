//! Mutations: the writes of a transaction to keys.

use bytes::Bytes;

/// An operation that the store applies to whatever a key holds when the transaction commits. It reads nothing and
/// conflicts with nothing. Operations on one key apply in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AtomicOp {
    /// Adds little-endian numbers of the operand's length: a longer value is cut to it, a shorter or missing one
    /// extended with zeros, and the sum wraps.
    Add,
    /// Keeps the greater of value and operand, compared as little-endian numbers of the operand's length.
    Max,
    /// Keeps the smaller of value and operand, compared as little-endian numbers of the operand's length. A missing
    /// value becomes the operand.
    Min,
    /// Keeps the greater of value and operand, compared byte by byte. A missing value becomes the operand.
    ByteMax,
    /// Keeps the smaller of value and operand, compared byte by byte. A missing value becomes the operand.
    ByteMin,
    /// Removes the key if its value equals the operand.
    CompareAndClear,
    /// Sets a key in which the versionstamp replaces 10 bytes. The last 4 bytes of the given key are the offset of
    /// the stamp, little-endian, and are cut off. The operand is the value.
    SetVersionstampedKey,
    /// Sets a value in which the versionstamp replaces 10 bytes. The last 4 bytes of the operand are the offset of
    /// the stamp, little-endian, and are cut off.
    SetVersionstampedValue,
}

/// One write of a transaction, with everything it needs to be applied later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Mutation {
    /// Sets `key` to `value`.
    Set(Bytes, Bytes),
    /// Removes `key`.
    Clear(Bytes),
    /// Removes the keys from `begin` up to but not including `end`.
    ClearRange(Bytes, Bytes),
    /// Applies the operation to `key` with the operand.
    Atomic(AtomicOp, Bytes, Bytes),
}

/// The bytes that a store counts for a write of `operand_len` bytes to a key of `key_len` bytes.
pub(crate) fn write_len(key_len: usize, operand_len: usize) -> usize {
    /// What a store counts for a write and its conflict range besides their bytes.
    const OVERHEAD: usize = 64;
    OVERHEAD + 3 * key_len + operand_len
}
