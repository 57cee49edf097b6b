//! Whose keys are whose in the store of a world, and keys for readers of the trace.

use std::{collections::BTreeMap, fmt::Write};

use bytes::Bytes;
use foundationdb_tuple::Element;

use super::app;
use crate::store::Mutation;

/// The value of an undecodable row, and the end of the key of one among the counters.
pub(super) const BROKEN: &[u8] = b"broken";

pub(super) const BUS_PREFIX: &[u8] = b"bus";

/// The prefix of all keys of another bus in the store: it begins with the same bytes.
pub(super) const OTHER_BUS_PREFIX: &[u8] = b"bus2";

pub(super) type Rows = BTreeMap<Bytes, Bytes>;

/// Mutations for readers of the trace.
pub(super) fn show_all(mutations: &[Mutation]) -> String {
    let mut text = String::from("{");
    for mutation in mutations {
        let (what, key) = match mutation {
            Mutation::Set(key, _) => ("set ", key),
            Mutation::Clear(key) => ("clear ", key),
            Mutation::ClearRange(begin, _) => ("clear from ", begin),
            Mutation::Atomic(_, key, _) => ("atomic ", key),
        };
        write!(text, " {what}{}", show_key(key)).expect("writing to a string cannot fail");
    }
    text + " }"
}

/// A key for readers of the trace.
pub(super) fn show_key(key: &[u8]) -> String {
    let owners = [("other", OTHER_BUS_PREFIX), ("bus", BUS_PREFIX), ("app", app::PREFIX)];
    let mut parts = owners.into_iter().filter_map(|(owner, prefix)| Some((owner, key.strip_prefix(prefix)?)));
    let Some((owner, rest)) = parts.next() else {
        return format!("{:?}", Bytes::copy_from_slice(key));
    };
    // The ends of ranges are no tuples.
    for rest in [rest, rest.strip_suffix(b"\0").unwrap_or(rest)] {
        if let Ok(elements) = foundationdb_tuple::unpack::<Vec<Element<'_>>>(rest) {
            return format!("{owner}{elements:?}");
        }
    }
    format!("{owner}+{:?}", Bytes::copy_from_slice(rest))
}
