//! Reading a [`Sequence`] from bytes and text.

use std::str::FromStr;

use crate::base::{
    error::{Error, Result},
    macros::serde_as_text,
    sequence::{SEQUENCE_LEN, Sequence},
};

impl Sequence {
    /// Decodes a sequence from its 13 bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let bytes = bytes.try_into().map_err(|_| {
            Error::corrupt("sequence", format!("{} bytes instead of {SEQUENCE_LEN}", bytes.len()))
        })?;
        Ok(Self::from_array(bytes))
    }
}

impl FromStr for Sequence {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let fail = |reason: &str| Error::invalid("sequence", format!("{text:?} {reason}"));
        if text.len() != 2 * SEQUENCE_LEN {
            return Err(fail("is not 26 hexadecimal digits"));
        }
        let mut bytes = [0; SEQUENCE_LEN];
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let digit = |c: u8| (c as char).to_digit(16).map(|d| d as u8);
            match (digit(pair[0]), digit(pair[1])) {
                (Some(high), Some(low)) => *byte = high << 4 | low,
                _ => return Err(fail("has a character that is not a hexadecimal digit")),
            }
        }
        Ok(Self::from_array(bytes))
    }
}

serde_as_text!(Sequence);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::sequence::{Incarnation, Versionstamp};

    #[test]
    fn nothing_is_between_a_position_and_the_one_before() {
        let at = |version, order| Sequence::new(Incarnation(1), Versionstamp::new(version, 0), order);
        assert_eq!(at(7, 3).before(), at(7, 2));
        assert_eq!(
            at(7, 0).before(),
            Sequence::new(Incarnation(1), Versionstamp::new(6, u16::MAX), u16::MAX)
        );
        assert_eq!(Sequence::MIN.before(), Sequence::MIN);
    }
}
