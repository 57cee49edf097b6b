//! Family 26: the table of incarnations, with the last sequence known to exist in each.

use super::{Keys, family, feed::sequence_operand};
use crate::base::encoding::Incarnation;

impl Keys {
    /// The key of the last sequence of `incarnation`.
    pub fn end_of_incarnation(&self, incarnation: Incarnation) -> Vec<u8> {
        self.pack(&(family::INCARNATION, u16::from(incarnation.0)))
    }
}

/// The value, as the operand of `SET_VERSIONSTAMPED_VALUE`: behind all rows of the transaction that writes it.
pub(crate) fn end_operand(incarnation: Incarnation) -> Vec<u8> {
    sequence_operand(incarnation, u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes() {
        let keys = Keys::new(b"p").unwrap();
        assert_eq!(keys.end_of_incarnation(Incarnation(3)), [b'p', 0x15, 26, 0x15, 3]);
        let operand = end_operand(Incarnation(3));
        assert_eq!((operand[0], &operand[11..13]), (3, &[0xff; 2][..]));
    }
}
