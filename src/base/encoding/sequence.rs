//! Reading a [`Sequence`] from bytes and text.

use std::str::FromStr;

use crate::base::{
    error::{Error, Result},
    sequence::{SEQUENCE_LEN, Sequence},
    text::serde_as_text,
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
                _ => return Err(fail("has a character that is no hexadecimal digit")),
            }
        }
        Ok(Self::from_array(bytes))
    }
}

serde_as_text!(Sequence);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::base::sequence::{Incarnation, Versionstamp};

    fn sequences() -> impl Strategy<Value = Sequence> {
        (any::<u8>(), any::<u64>(), any::<u16>(), any::<u16>())
            .prop_map(|(i, v, b, o)| Sequence::new(Incarnation(i), Versionstamp::new(v, b), o))
    }

    #[test]
    fn golden_bytes() {
        let sequence =
            Sequence::new(Incarnation(2), Versionstamp::new(0x0102_0304_0506_0708, 0x090a), 0x0b0c);
        assert_eq!(sequence.as_bytes(), &[2, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
        assert_eq!(sequence.to_string(), "020102030405060708090a0b0c");
    }

    #[test]
    fn bad_text_is_refused_with_the_reason() {
        for text in [
            "",
            "0",
            "now",
            "zz0102030405060708090a0b0c",
            "020102030405060708090a0b0c0d",
            "0201020304050607é090a0b0",
        ] {
            assert!(
                matches!(text.parse::<Sequence>(), Err(Error::Invalid { what: "sequence", .. })),
                "{text}"
            );
        }
        assert!(Sequence::from_bytes(&[0; 12]).is_err());
    }

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

    proptest! {
        #[test]
        fn round_trips(sequence in sequences()) {
            prop_assert_eq!(Sequence::from_bytes(sequence.as_bytes()).unwrap(), sequence);
            prop_assert_eq!(sequence.to_string().parse::<Sequence>().unwrap(), sequence);
            prop_assert_eq!(
                Sequence::new(sequence.incarnation(), sequence.versionstamp(), sequence.order()),
                sequence
            );
            let json = serde_json::to_string(&sequence).unwrap();
            prop_assert_eq!(serde_json::from_str::<Sequence>(&json).unwrap(), sequence);
        }

        #[test]
        fn bytes_text_and_time_sort_alike(a in sequences(), b in sequences()) {
            let parts = |s: Sequence| (s.incarnation(), s.versionstamp().version(), s.versionstamp(), s.order());
            prop_assert_eq!(a.cmp(&b), parts(a).cmp(&parts(b)));
            prop_assert_eq!(a.cmp(&b), a.as_bytes().cmp(b.as_bytes()));
            prop_assert_eq!(a.cmp(&b), a.to_string().cmp(&b.to_string()));
        }
    }
}
