//! The owners of keys in the store of a world, and how keys are shown in the trace.

use std::collections::BTreeMap;

use bytes::Bytes;
use foundationdb_tuple::Element;

use crate::app;

pub const BUS_PREFIX: &[u8] = b"bus";

pub type Rows = BTreeMap<Bytes, Bytes>;

/// Formats a key for readers of the trace.
pub fn show_key(key: &[u8]) -> String {
    let owners = [("bus", BUS_PREFIX), ("app", app::PREFIX)];
    let mut parts = owners.into_iter().filter_map(|(owner, prefix)| Some((owner, key.strip_prefix(prefix)?)));
    let Some((owner, rest)) = parts.next() else {
        return format!("{:?}", Bytes::copy_from_slice(key));
    };
    // The ends of ranges are not tuples.
    for rest in [rest, rest.strip_suffix(b"\0").unwrap_or(rest)] {
        if let Ok(elements) = foundationdb_tuple::unpack::<Vec<Element<'_>>>(rest) {
            return format!("{owner}{elements:?}");
        }
    }
    format!("{owner}+{:?}", Bytes::copy_from_slice(rest))
}
