//! [`Wanted`] says which documents a request asks for.

use axum::body::Bytes;
use serde_json::Value;

use super::ids::Ids;
use crate::{
    front::http::{Asked, Caller, Failure, bodies::Bodies, query::Query},
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

/// Returns the documents that `query` and the body of a request ask for. Fails with 400, and with 503 if `bodies` has no room for
/// their ids.
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
        // A filter of the layer decides for each document.
        None | Some(_) => Ok(Wanted::All),
    }
}
