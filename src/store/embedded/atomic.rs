//! The results of atomic operations, bit for bit as FoundationDB computes them.

use std::cmp::Ordering;

use bytes::{Bytes, BytesMut};

use crate::{
    base::{
        encoding::{STAMP_LEN, Versionstamp},
        error::StoreError,
    },
    store::AtomicOp,
};

/// The result of `op` on `value`; `None` is a missing key. Versionstamped operations do not depend on the old value:
/// [`stamped`] resolves them.
pub(super) fn apply(op: AtomicOp, value: Option<&Bytes>, operand: &Bytes) -> Option<Bytes> {
    let old = value.filter(|old| !old.is_empty() && !operand.is_empty());
    match op {
        AtomicOp::Add => Some(old.map_or_else(|| operand.clone(), |old| add(old, operand))),
        AtomicOp::Max => Some(match old {
            Some(old) if compare(old, operand).is_gt() => fit(old, operand.len()),
            _ => operand.clone(),
        }),
        // An empty value is the number zero; only a missing value is replaced by the operand.
        AtomicOp::Min => Some(match value.filter(|_| !operand.is_empty()) {
            Some(old) if compare(old, operand).is_lt() => fit(old, operand.len()),
            _ => operand.clone(),
        }),
        AtomicOp::ByteMax => Some(value.filter(|old| *old > operand).unwrap_or(operand).clone()),
        AtomicOp::ByteMin => Some(value.filter(|old| *old < operand).unwrap_or(operand).clone()),
        AtomicOp::CompareAndClear => value.filter(|old| *old != operand).cloned(),
        AtomicOp::SetVersionstampedKey | AtomicOp::SetVersionstampedValue => {
            unreachable!("versionstamped operations are resolved before they are applied")
        }
    }
}

/// The sum of two little-endian numbers, cut to the length of `operand`.
fn add(old: &[u8], operand: &[u8]) -> Bytes {
    let mut total = Vec::with_capacity(operand.len());
    let mut carry = false;
    for at in (0..operand.len()).step_by(WORD_LEN) {
        let (sum, over) = word(old, at).overflowing_add(word(operand, at));
        let (sum, carried) = sum.overflowing_add(carry.into());
        carry = over || carried;
        total.extend_from_slice(&sum.to_le_bytes()[..WORD_LEN.min(operand.len() - at)]);
    }
    total.into()
}

/// The bytes of a word.
const WORD_LEN: usize = size_of::<u64>();

/// The word of a little-endian number that begins at byte `at`, padded with zeros.
fn word(number: &[u8], at: usize) -> u64 {
    let rest = number.get(at..).unwrap_or_default();
    let mut word = [0; WORD_LEN];
    let len = rest.len().min(WORD_LEN);
    word[..len].copy_from_slice(&rest[..len]);
    u64::from_le_bytes(word)
}

/// Compares two little-endian numbers, with `old` cut to the length of `operand`.
fn compare(old: &[u8], operand: &[u8]) -> Ordering {
    (0..operand.len())
        .rev()
        .map(|place| old.get(place).copied().unwrap_or(0).cmp(&operand[place]))
        .find(|order| order.is_ne())
        .unwrap_or(Ordering::Equal)
}

/// `old` cut or extended with zeros to `len` bytes.
fn fit(old: &[u8], len: usize) -> Bytes {
    let mut fitted = vec![0; len];
    let kept = len.min(old.len());
    fitted[..kept].copy_from_slice(&old[..kept]);
    fitted.into()
}

/// The offset of the stamp in `operand`, from its last 4 bytes.
pub(super) fn stamp_place(operand: &[u8]) -> Result<usize, StoreError> {
    let (payload, place) = operand.split_last_chunk::<4>().ok_or(StoreError::CLIENT_INVALID_OPERATION)?;
    let place = usize::try_from(u32::from_le_bytes(*place)).unwrap_or(usize::MAX);
    match place.checked_add(STAMP_LEN) {
        Some(end) if end <= payload.len() => Ok(place),
        _ => Err(StoreError::CLIENT_INVALID_OPERATION),
    }
}

/// `operand` with `stamp` at its offset and without the last 4 bytes. The offset must be valid.
pub(super) fn stamped(operand: &[u8], stamp: Versionstamp) -> Bytes {
    let place = stamp_place(operand).expect("the place was checked when the operation was added");
    let mut bytes = BytesMut::from(&operand[..operand.len() - 4]);
    bytes[place..place + STAMP_LEN].copy_from_slice(&stamp.0);
    bytes.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Applies `op` and returns the bytes.
    fn on(op: AtomicOp, value: Option<&[u8]>, operand: &[u8]) -> Option<Vec<u8>> {
        let value = value.map(Bytes::copy_from_slice);
        apply(op, value.as_ref(), &Bytes::copy_from_slice(operand)).map(|bytes| bytes.to_vec())
    }

    #[test]
    fn add_wraps_cuts_and_extends() {
        assert_eq!(on(AtomicOp::Add, Some(&[255, 255]), &[1, 0]).unwrap(), [0, 0]);
        assert_eq!(on(AtomicOp::Add, Some(&[255]), &[1, 0]).unwrap(), [0, 1]);
        assert_eq!(on(AtomicOp::Add, Some(&[1, 9]), &[1]).unwrap(), [2]);
        assert_eq!(on(AtomicOp::Add, None, &[7]).unwrap(), [7]);
        assert!(on(AtomicOp::Add, Some(&[7]), &[]).unwrap().is_empty());
        // Longer than the words in which the sum is computed.
        let (mut ones, mut one) = ([0xff; 19], [0; 19]);
        one[0] = 1;
        assert_eq!(on(AtomicOp::Add, Some(&ones), &one).unwrap(), [0; 19]);
        ones[18] = 0;
        let mut carried = [0; 19];
        carried[18] = 1;
        assert_eq!(on(AtomicOp::Add, Some(&ones), &one).unwrap(), carried);
        assert_eq!(on(AtomicOp::Add, Some(&ones[..9]), &one).unwrap()[9..], [1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(on(AtomicOp::Add, Some(&ones), &[1, 2]).unwrap(), [0, 2]);
    }

    #[test]
    fn max_and_min_compare_numbers() {
        assert_eq!(on(AtomicOp::Max, Some(&[0, 1]), &[255, 0]).unwrap(), [0, 1]);
        assert_eq!(on(AtomicOp::Min, Some(&[0, 1]), &[255, 0]).unwrap(), [255, 0]);
        assert_eq!(on(AtomicOp::Max, Some(&[9, 9]), &[5]).unwrap(), [9]);
        assert_eq!(on(AtomicOp::Min, None, &[5]).unwrap(), [5]);
        assert_eq!(on(AtomicOp::Min, Some(&[]), &[5]).unwrap(), [0]);
        assert_eq!(on(AtomicOp::Min, Some(&[3]), &[5, 0]).unwrap(), [3, 0]);
    }

    #[test]
    fn byte_max_and_min_compare_bytes() {
        assert_eq!(on(AtomicOp::ByteMax, Some(b"b"), b"ab").unwrap(), b"b");
        assert_eq!(on(AtomicOp::ByteMin, Some(b"b"), b"ab").unwrap(), b"ab");
        assert_eq!(on(AtomicOp::ByteMin, None, b"x").unwrap(), b"x");
    }

    #[test]
    fn compare_and_clear_keeps_what_differs() {
        assert_eq!(on(AtomicOp::CompareAndClear, Some(b"x"), b"x"), None);
        assert_eq!(on(AtomicOp::CompareAndClear, Some(b"x"), b"y").unwrap(), b"x");
        assert_eq!(on(AtomicOp::CompareAndClear, None, b"y"), None);
    }

    #[test]
    fn a_stamp_outside_its_operand_is_refused() {
        for bad in [&b"abc"[..], &[0; 13], &[[0; 10].as_slice(), &[1, 0, 0, 0]].concat(), &[0xff; 20]] {
            assert_eq!(stamp_place(bad), Err(StoreError::CLIENT_INVALID_OPERATION));
        }
        let operand = [b"k".as_slice(), &[0; 10], b"z", &[1, 0, 0, 0]].concat();
        assert_eq!(
            &stamped(&operand, Versionstamp([7; 10]))[..],
            b"k\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07z"
        );
    }
}
