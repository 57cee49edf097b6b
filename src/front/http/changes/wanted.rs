//! [`Wanted`] says which documents a request asks for.

use axum::body::Bytes;
use serde_json::Value;
use tokio::sync::OwnedSemaphorePermit;

use crate::{
    front::http::{Caller, ChangesRequest, Failure, body::Bodies, query::Query},
    roles::changes::DocId,
};

/// The documents that a request asks for.
pub(super) enum Wanted {
    All,
    Design,
    Ids(Ids),
}

impl Wanted {
    /// Returns whether the request asks for the document with this id.
    pub fn has(&self, id: &DocId) -> bool {
        match self {
            Self::All => true,
            Self::Design => id.is_design(),
            Self::Ids(ids) => ids.has(id.as_str()),
        }
    }
}

/// Returns the part of `query` that only the layer can answer; `None` if there is none. `conflicts` and `attachments` have no effect
/// without documents.
pub(super) fn asked(query: &Query, body: &Bytes, caller: &Caller) -> Option<ChangesRequest> {
    let filter = query.filter.clone().filter(|filter| !["_doc_ids", "_design"].contains(&&**filter));
    let conflicts = query.include_docs && query.conflicts;
    let attachments = query.include_docs && query.attachments;
    let parameters = if filter.is_some() { query.rest.clone() } else { Vec::new() };
    let (body, caller) = (body.clone(), caller.clone());
    (filter.is_some() || conflicts || attachments).then_some(ChangesRequest {
        filter,
        parameters,
        body,
        conflicts,
        attachments,
        caller,
    })
}

/// Returns the documents that `query` and the body of a request ask for. Fails with 400 if they are malformed, and with 503 if `bodies` has
/// no room for the ids.
pub(super) fn wanted(query: &Query, body: &[u8], bodies: &Bodies) -> Result<Wanted, Failure> {
    let body = match body.trim_ascii() {
        b"" => None,
        body => match serde_json::from_slice(body) {
            Ok(Value::Object(object)) => Some(object),
            Ok(_) => return Err(Failure::bad_request("Request body must be a JSON object")),
            Err(_) => return Err(Failure::bad_request("invalid UTF-8 JSON")),
        },
    };
    match query.filter.as_deref() {
        Some("_design") => Ok(Wanted::Design),
        Some("_doc_ids") => {
            let posted = body.and_then(|mut object| object.remove("doc_ids"));
            let asked = || query.doc_ids.as_deref().and_then(|text| serde_json::from_str(text).ok());
            let ids = posted.or_else(asked);
            let ids = ids
                .as_ref()
                .and_then(Value::as_array)
                .and_then(|ids| ids.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
            let ids = ids.ok_or_else(|| {
                Failure::bad_request("`doc_ids` filter parameter is not a list of doc ids.")
            })?;
            Ids::new(ids, bodies).map(Wanted::Ids)
        }
        // The layer's filter, if there is one, decides about each document later.
        None | Some(_) => Ok(Wanted::All),
    }
}

/// The ids of the documents in a feed. A client may name as many ids as fit into a body, and open many such feeds. So the ids take little
/// more memory than their text, and the memory for the ids of all feeds is bounded.
pub(super) struct Ids {
    /// All ids, sorted and concatenated.
    text: String,
    /// The place of each id in the text.
    places: Vec<(u32, u32)>,
    _room: OwnedSemaphorePermit,
}

impl Ids {
    /// Stores `ids`. Fails with 503 if there is no room for them.
    pub fn new(mut ids: Vec<&str>, bodies: &Bodies) -> Result<Self, Failure> {
        ids.sort_unstable();
        ids.dedup();
        let text = ids.concat();
        let mut end = 0;
        let place = |id: &&str| {
            let begin = end;
            // A body is far shorter than 4 GB.
            end += id.len() as u32;
            (begin, end)
        };
        let places: Vec<_> = ids.iter().map(place).collect();
        let room = bodies.keep(text.len() + size_of_val(&places[..]))?;
        Ok(Self { text, places, _room: room })
    }

    /// Returns whether `id` is one of the ids.
    pub fn has(&self, id: &str) -> bool {
        let at = |&(begin, end): &(u32, u32)| &self.text[begin as usize..end as usize];
        self.places.binary_search_by(|place| at(place).cmp(id)).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_known_and_their_memory_is_bounded() {
        let bodies = Bodies::new(&crate::base::env::Env::system(), 0, 2 << 10);
        let ids = Ids::new(vec!["b", "", "ab", "a", "ü", "b"], &bodies).unwrap();
        for (id, is_known) in
            [("", true), ("a", true), ("ab", true), ("b", true), ("ü", true), ("aba", false), ("c", false)]
        {
            assert_eq!(ids.has(id), is_known, "{id}");
        }
        // This id needs both permits of 1 KiB, and the other 5 ids hold one of them.
        let long = "x".repeat(1_100);
        assert!(Ids::new(vec![&long], &bodies).is_err());
        drop(ids);
        assert!(Ids::new(vec![&long], &bodies).is_ok());
        assert!(!Ids::new(Vec::new(), &bodies).unwrap().has(""));
    }
}
