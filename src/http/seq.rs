//! [`Seq`]: what clients get as `seq`, and give back as `since`.
//!
//! A client keeps one text and nothing else, so the text has to say all that a reader has to remember ([`Cursor`]). Mostly
//! that is a sequence. But what is new in the rows of a feed counts from where the reading began, and a client may stop in the
//! middle of it:
//!
//! ```text
//! sequence   1          2          3
//!            a created  b created  a updated        since=0&limit=1 gives b
//!            (superseded)  row of b   row of a      since=2 has to give "a created", not "a updated"
//! ```
//!
//! So where a row that is still to come has news from before the position, the text says in addition where and when the
//! reading began: `POSITION-BEGAN-SINCE`, or `POSITION-BEGAN` if it began at zero. It sorts as its position does.
//!
//! The same tells a reader from zero, which has read half of what there is, from one that was away for too long: the first one
//! stands below the horizon, too, and misses nothing.

use std::{fmt, str::FromStr};

use crate::{
    encoding::Sequence,
    error::{Error, Result},
    feed::Cursor,
};

/// How many characters a sequence has.
const SEQUENCE_CHARS: usize = 26;

/// Where a client stands, as it is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seq {
    /// Everything up to here was told.
    after: Sequence,
    /// What could be read when the reading began, and what was known then; `None` if it makes no difference.
    anchor: Option<(Sequence, Sequence)>,
}

impl Seq {
    /// The position of a client that has been told everything up to `after`.
    pub fn plain(after: Sequence) -> Self {
        Self { after, anchor: None }
    }

    /// The position of a client that has been told what `cursor` has read.
    pub fn of(cursor: &Cursor) -> Self {
        let anchor = cursor.began().map(|began| (began, cursor.since()));
        Self { after: cursor.position(), anchor: anchor.filter(|&(_, since)| since < cursor.position()) }
    }

    /// Where to read on.
    pub fn cursor(self) -> Cursor {
        match self.anchor {
            Some((began, since)) => Cursor::resumed(since, began, self.after),
            None => self.after.into(),
        }
    }
}

impl fmt::Display for Seq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.anchor {
            None => write!(f, "{}", self.after),
            Some((began, Sequence::ZERO)) => write!(f, "{}-{began}", self.after),
            Some((began, since)) => write!(f, "{}-{began}-{since}", self.after),
        }
    }
}

impl FromStr for Seq {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let malformed = || Error::invalid("sequence", "it is none that this server has given");
        let mut parts = text.split('-').map(|part| match part.len() {
            SEQUENCE_CHARS => part.parse::<Sequence>(),
            _ => Err(malformed()),
        });
        let after = parts.next().ok_or_else(malformed)??;
        let began = parts.next().transpose()?;
        let since = parts.next().transpose()?;
        let anchor = began.map(|began| (began, since.unwrap_or(Sequence::ZERO)));
        if parts.next().is_some() || anchor.is_some_and(|(began, since)| since > after || since > began) {
            return Err(malformed());
        }
        Ok(Self { after, anchor })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::encoding::{Incarnation, Versionstamp};

    fn at(version: u64) -> Sequence {
        Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
    }

    #[test]
    fn texts_sort_as_positions_do() {
        let texts = [
            Seq::plain(at(1)),
            Seq { after: at(2), anchor: Some((at(9), Sequence::ZERO)) },
            Seq::plain(at(3)),
            Seq { after: at(4), anchor: Some((at(5), at(1))) },
            Seq::plain(at(5)),
        ]
        .map(|seq| seq.to_string());
        assert!(texts.is_sorted(), "{texts:?}");
    }

    #[test]
    fn malformed_ones_are_refused() {
        let one = at(1);
        for bad in [
            String::new(),
            "1".into(),
            "-".into(),
            format!("{one}-"),
            format!("{one}-x"),
            format!("{one}-{one}-{}", at(2)),
            format!("{one}-{one}-{one}-{one}"),
            format!("{one} "),
            "é".repeat(13),
        ] {
            assert!(bad.parse::<Seq>().is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn round_trips(since: u32, more: u32, began: u32, is_plain: bool) {
            let (since, after, began) = (at(since.into()), at(u64::from(since) + u64::from(more)), at(u64::from(since) + u64::from(began)));
            let seq = if is_plain { Seq::plain(after) } else { Seq { after, anchor: Some((began, since)) } };
            prop_assert_eq!(seq.to_string().parse::<Seq>().unwrap(), seq);
            prop_assert_eq!(seq.cursor().position(), after);
        }

        #[test]
        fn no_text_makes_it_panic(text in "\\PC*") {
            drop(text.parse::<Seq>());
        }
    }
}
