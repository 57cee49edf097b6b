//! Values that programs keep (names, instances, sequences, cursors and ranges) as bytes, text and JSON; and the properties of errors.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fmt;

use notibus::{
    Cursor, Db, DbInstance, DbName, Error, EventKind, Kinds, Sequence,
    event::{DdocId, Incarnation, Versionstamp},
    store::{KeyRange, StoreError},
};
use proptest::{option, prelude::*};
use serde::{Deserialize, Serialize};

/// A program reads back exactly what it has kept. Regression: ids could be written, but not read back.
#[test]
fn what_is_kept_is_read_again() {
    fn check<T: Serialize + for<'de> Deserialize<'de> + PartialEq + fmt::Debug>(value: &T, text: &str) {
        assert_eq!(serde_json::to_string(value).unwrap(), text);
        assert_eq!(&serde_json::from_str::<T>(text).unwrap(), value);
    }
    let db = Db::new("a/\u{e4}".parse().unwrap(), DbInstance([1; 16]));
    check(&db, &format!("{{\"db\":\"a/\u{e4}\",\"instance\":\"{}\"}}", "01".repeat(16)));
    check(&DdocId::new("_design/a\n").unwrap(), "\"_design/a\\n\"");
    check(&EventKind::DdocUpdated, "\"ddoc_updated\"");
    check(&(Kinds::from(EventKind::Created) | EventKind::Deleted.into()), "[\"created\",\"deleted\"]");
    for kind in EventKind::ALL {
        assert_eq!(kind.to_string().parse::<EventKind>().unwrap(), kind);
    }
    assert!(serde_json::from_str::<DbName>("\"\"").is_err(), "it has to be a name");
    assert!(serde_json::from_str::<EventKind>("\"gone\"").is_err());
    assert_ne!(DbInstance::new(), DbInstance::new());
}

#[test]
fn names_have_limits() {
    assert!(DbName::new(&"x".repeat(DbName::LEN_MAX)).is_ok());
    for bad in [String::new(), "x".repeat(DbName::LEN_MAX + 1)] {
        assert!(matches!(DbName::new(&bad), Err(Error::Invalid { what: "database name", .. })));
        assert!(matches!(DdocId::new(&bad), Err(Error::Invalid { what: "design document id", .. })));
    }
}

#[test]
fn an_instance_is_read_as_it_is_written() {
    let text = "000102030405060708090a0b0c0d0eff";
    let instance: DbInstance = text.parse().unwrap();
    assert_eq!((instance.0[1], instance.0[15]), (1, 0xff));
    assert_eq!(instance.to_string(), text);
    for bad in ["", &text[1..], &format!("{text}0"), &format!("+{}", &text[1..]), &text.replace('f', "g")] {
        assert!(matches!(bad.parse::<DbInstance>(), Err(Error::Invalid { .. })), "{bad:?}");
    }
}

fn sequences() -> impl Strategy<Value = Sequence> {
    (any::<u8>(), any::<u64>(), any::<u16>(), any::<u16>())
        .prop_map(|(i, v, b, o)| Sequence::new(Incarnation(i), Versionstamp::new(v, b), o))
}

#[test]
fn the_bytes_of_a_sequence_are_golden() {
    let sequence = Sequence::new(Incarnation(2), Versionstamp::new(0x0102_0304_0506_0708, 0x090a), 0x0b0c);
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
        assert!(matches!(text.parse::<Sequence>(), Err(Error::Invalid { what: "sequence", .. })), "{text}");
    }
    assert!(Sequence::from_bytes(&[0; 12]).is_err());
}

proptest! {
    #[test]
    fn sequences_come_back_as_they_were(sequence in sequences()) {
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

fn at(version: u64) -> Sequence {
    Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
}

/// Returns the cursor of a reader in the middle of a reading, at `after`, whose last page was read at `readable`. The reader began with
/// `known`, or with nothing at 1.
fn middle(after: u64, readable: u64, known: Option<Sequence>) -> Cursor {
    let first = known.map_or_else(|| format!("{}-0", at(1)), |known| known.to_string());
    format!("{}-{}-{first}", at(after), at(readable)).parse().unwrap()
}

fn cursors() -> impl Strategy<Value = Cursor> {
    (option::of(any::<u32>()), option::of(any::<u32>()), 1_u32..).prop_map(|(known, began, more)| {
        let known = known.map(u64::from);
        let after = known.unwrap_or(0) + u64::from(more);
        let known = known.map(at);
        match began {
            Some(began) => middle(after, after.max(began.into()), known),
            None => known.map_or(Cursor::BEGINNING, Cursor::from),
        }
    })
}

#[test]
fn bytes_and_texts_of_a_cursor_are_golden() {
    let digits = |version: u64| at(version).to_string();
    let bytes = |parts: &[u64]| parts.iter().flat_map(|part| *at(*part).as_bytes()).collect::<Vec<_>>();
    for (cursor, tag, parts, text) in [
        (Cursor::BEGINNING, 0, &[][..], "0".to_owned()),
        (at(4).into(), 1, &[4], digits(4)),
        (middle(4, 9, None), 2, &[1, 9, 4], format!("{}-{}-{}-0", digits(4), digits(9), digits(1))),
        (middle(4, 9, Some(at(1))), 3, &[1, 9, 4], format!("{}-{}-{}", digits(4), digits(9), digits(1))),
    ] {
        assert_eq!(cursor.to_bytes(), [&[tag][..], &bytes(parts)].concat());
        assert_eq!(cursor.to_string(), text);
    }
}

#[test]
fn contradictions_are_refused() {
    let one = at(1);
    for bad in [
        String::new(),
        "1".into(),
        "00".into(),
        "-".into(),
        "0-0".into(),
        format!("{one}-"),
        format!("{one}-x"),
        format!("{one}-{one}"),
        format!("{one}-0"),
        format!("{one}-{one}-0"),
        format!("{one}-{one}-{}", at(2)),
        format!("{}-{one}-{one}", at(2)),
        format!("{}-{one}-{one}-0", at(2)),
        format!("{one}-{one}-{}-0", at(2)),
        format!("{one}-{one}-{one}"),
        format!("{one}-{one}-{one}-{one}"),
        format!("{one} "),
        "é".repeat(13),
    ] {
        assert!(matches!(bad.parse::<Cursor>(), Err(Error::Invalid { what: "cursor", .. })), "{bad}");
    }
    let began = middle(4, 9, Some(one)).to_bytes();
    for bad in [
        &[][..],
        &[4],
        &[0, 0],
        &began[1..],
        &began[..began.len() - 1],
        &[&began[..], &[0]].concat(),
        &[&[3][..], at(9).as_bytes(), at(9).as_bytes(), at(9).as_bytes()].concat(),
    ] {
        assert!(matches!(Cursor::from_bytes(bad), Err(Error::Corrupt { .. })), "{bad:?}");
    }
}

#[test]
fn texts_of_one_reading_sort_as_their_positions_do() {
    let texts =
        [Cursor::BEGINNING, middle(2, 9, None), at(3).into(), middle(4, 5, Some(at(1))), at(5).into()]
            .map(|cursor| cursor.to_string());
    assert!(texts.is_sorted(), "{texts:?}");
}

proptest! {
    #[test]
    fn cursors_come_back_as_they_were(cursor in cursors()) {
        prop_assert_eq!(Cursor::from_bytes(&cursor.to_bytes()).unwrap(), cursor);
        prop_assert_eq!(cursor.to_string().parse::<Cursor>().unwrap(), cursor);
    }

    #[test]
    fn no_text_and_no_bytes_make_it_panic(text in "\\PC*", bytes: Vec<u8>) {
        drop(text.parse::<Cursor>());
        drop(Cursor::from_bytes(&bytes));
    }
}

#[test]
fn a_prefix_range_ends_after_its_last_key() {
    assert_eq!(KeyRange::prefix("ab"), KeyRange::new("ab", "ac"));
    assert_eq!(KeyRange::prefix(&b"a\xff"[..]), KeyRange::new(&b"a\xff"[..], "b"));
    assert_eq!(KeyRange::prefix(&b"\xff"[..]).end, &b"\xff"[..]);
    assert_eq!(KeyRange::prefix(""), KeyRange::new("", &b"\xff"[..]));
}

#[test]
fn a_single_key_contains_just_itself() {
    let range = KeyRange::key(b"k");
    assert!(range.contains(b"k") && !range.contains(b"k\0") && !range.contains(b"j"));
}

#[test]
fn retryable_and_maybe_committed_follow_foundationdb() {
    for (error, retryable, maybe) in [
        (StoreError::NOT_COMMITTED, true, false),
        (StoreError::COMMIT_UNKNOWN_RESULT, true, true),
        (StoreError::TRANSACTION_TOO_OLD, true, false),
        (StoreError::TRANSACTION_TIMED_OUT, false, true),
        (StoreError::CLUSTER_VERSION_CHANGED, true, true),
        (StoreError::KEY_TOO_LARGE, false, false),
    ] {
        assert_eq!((error.is_retryable(), error.is_maybe_committed()), (retryable, maybe), "{error}");
    }
}
