//! The results of atomic operations, bit for bit as FoundationDB computes them.

use std::cmp::Ordering;

use bytes::{Bytes, BytesMut};
use smallvec::SmallVec;

use crate::{
    base::{
        encoding::{STAMP_LEN, Versionstamp},
        error::StoreError,
    },
    store::AtomicOp,
};

/// The effect of an operation on the value of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Effect {
    /// The value stays, and is not copied, because many small operations may be applied to one large value.
    Keep,
    /// The value becomes this one; `None` stands for a missing key.
    Become(Option<Bytes>),
}

/// Returns the effect of `op` on `value`, which is `None` for a missing key. Versionstamped operations do not depend on the old value:
/// [`stamped`] resolves them.
pub(super) fn apply(op: AtomicOp, value: Option<&[u8]>, operand: &Bytes) -> Effect {
    let old = value.filter(|old| !old.is_empty() && !operand.is_empty());
    let is_kept = match op {
        AtomicOp::ByteMax => value.is_some_and(|old| old > operand),
        AtomicOp::ByteMin => value.is_some_and(|old| old < operand),
        AtomicOp::CompareAndClear => value.is_none_or(|old| old != operand),
        _ => false,
    };
    if is_kept {
        return Effect::Keep;
    }
    Effect::Become(match op {
        AtomicOp::Add => Some(Bytes::copy_from_slice(&add(value.unwrap_or_default(), operand))),
        AtomicOp::Max => Some(match old {
            Some(old) if compare(old, operand).is_gt() => fit(old, operand.len()),
            _ => operand.clone(),
        }),
        // An empty value is the number zero; only a missing value is replaced by the operand.
        AtomicOp::Min => Some(match value.filter(|_| !operand.is_empty()) {
            Some(old) if compare(old, operand).is_lt() => fit(old, operand.len()),
            _ => operand.clone(),
        }),
        AtomicOp::ByteMax | AtomicOp::ByteMin => Some(operand.clone()),
        AtomicOp::CompareAndClear => None,
        AtomicOp::SetVersionstampedKey | AtomicOp::SetVersionstampedValue => {
            unreachable!("versionstamped operations are resolved before they are applied")
        }
    })
}

/// Returns the sum of two little-endian numbers, cut to the length of `operand`. A sum of counters needs no allocation.
pub(super) fn add(old: &[u8], operand: &[u8]) -> SmallVec<[u8; 64]> {
    let mut total = SmallVec::from_slice(operand);
    let (mut rest, mut carry) = (old, false);
    let mut add = |word: u64| {
        let (sum, over) = take_word(&mut rest).overflowing_add(word);
        let (sum, carried) = sum.overflowing_add(carry.into());
        carry = over || carried;
        sum.to_le_bytes()
    };
    let (words, last) = total.as_chunks_mut();
    for word in words {
        *word = add(u64::from_le_bytes(*word));
    }
    if !last.is_empty() {
        let sum = add(take_word(&mut &*last));
        last.copy_from_slice(&sum[..last.len()]);
    }
    total
}

const WORD_LEN: usize = size_of::<u64>();

/// Takes the next word of a little-endian number, padded with zeros.
fn take_word(number: &mut &[u8]) -> u64 {
    if let Some((word, rest)) = number.split_first_chunk() {
        *number = rest;
        return u64::from_le_bytes(*word);
    }
    let mut word = [0; WORD_LEN];
    word[..number.len()].copy_from_slice(number);
    *number = &[];
    u64::from_le_bytes(word)
}

/// Compares two little-endian numbers, with `old` cut to the length of `operand`.
fn compare(old: &[u8], operand: &[u8]) -> Ordering {
    (0..operand.len())
        .rev()
        .map(|offset| old.get(offset).copied().unwrap_or(0).cmp(&operand[offset]))
        .find(|order| order.is_ne())
        .unwrap_or(Ordering::Equal)
}

/// Returns `old`, cut or extended with zeros to `len` bytes.
fn fit(old: &[u8], len: usize) -> Bytes {
    let mut fitted = vec![0; len];
    let kept = len.min(old.len());
    fitted[..kept].copy_from_slice(&old[..kept]);
    fitted.into()
}

/// Reads the offset of the stamp in `operand` from the last 4 bytes.
pub(super) fn stamp_offset(operand: &[u8]) -> Result<usize, StoreError> {
    let (payload, offset) = operand.split_last_chunk::<4>().ok_or(StoreError::CLIENT_INVALID_OPERATION)?;
    let offset = usize::try_from(u32::from_le_bytes(*offset)).unwrap_or(usize::MAX);
    match offset.checked_add(STAMP_LEN) {
        Some(end) if end <= payload.len() => Ok(offset),
        _ => Err(StoreError::CLIENT_INVALID_OPERATION),
    }
}

/// Returns `operand` with `stamp` at its offset and without the last 4 bytes. The offset must be valid.
pub(super) fn stamped(operand: &[u8], stamp: Versionstamp) -> Bytes {
    let offset = stamp_offset(operand).expect("the offset was checked when the operation was added");
    let mut bytes = BytesMut::from(&operand[..operand.len() - 4]);
    bytes[offset..offset + STAMP_LEN].copy_from_slice(&stamp.0);
    bytes.freeze()
}
