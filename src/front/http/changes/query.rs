//! [`Wanted`] says which documents a request asks for.

use std::collections::HashSet;

use axum::body::Bytes;
use serde_json::Value;

use crate::{
    front::http::{Asked, Caller, Failure, query::Query},
    roles::changes::DocId,
};

/// The documents that a request asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Wanted {
    All,
    Design,
    /// The documents with these ids.
    Ids(HashSet<String>),
}

impl Wanted {
    /// Returns whether the request asks for the document with this id.
    pub fn has(&self, id: &DocId) -> bool {
        match self {
            Self::All => true,
            Self::Design => id.is_design(),
            Self::Ids(ids) => ids.contains(id.as_str()),
        }
    }
}

/// Returns the part of `query` that only the layer can answer; `None` if there is none. `conflicts` and `attachments` mean nothing
/// without documents.
pub(super) fn asked(query: &Query, body: &Bytes, caller: Option<&Caller>) -> Option<Asked> {
    let filter = query.filter.clone().filter(|filter| !["_doc_ids", "_design"].contains(&&**filter));
    let conflicts = query.include_docs && query.conflicts;
    let attachments = query.include_docs && query.attachments;
    let parameters = if filter.is_some() { query.rest.clone() } else { Vec::new() };
    let (body, caller) = (body.clone(), caller.cloned());
    (filter.is_some() || conflicts || attachments).then_some(Asked {
        filter,
        parameters,
        body,
        conflicts,
        attachments,
        caller,
    })
}

/// Returns the documents that `query` and the body of a request ask for. Fails with 400.
pub(super) fn wanted(query: &Query, body: &[u8]) -> Result<Wanted, Failure> {
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
            let ids = posted.or_else(asked).as_ref().and_then(Value::as_array).and_then(|ids| {
                ids.iter().map(|id| id.as_str().map(str::to_owned)).collect::<Option<HashSet<_>>>()
            });
            ids.map(Wanted::Ids)
                .ok_or_else(|| Failure::bad_request("`doc_ids` has to be an array of document ids."))
        }
        // A filter of the layer decides for each document.
        None | Some(_) => Ok(Wanted::All),
    }
}
