//! [`Document`]: a document as stored; and [`Edit`]: a client's edit of it.
//!
//! A document has a single branch of revisions. A revision has a number and a hash of its content and its parent. An edit names the
//! revision that it is based on. If that is not the current one, another edit came first: a conflict.

use notibus::{
    Sequence,
    changes::{DocId, Revision},
};
use serde_json::{Map, Value};

use super::problem::Problem;

/// The maximum length of an id in bytes, so that it fits into a key whatever its characters.
const ID_LEN_MAX: usize = 4_096;

/// The maximum length of a document's JSON in bytes, so that it fits into a value after the sequence.
const JSON_LEN_MAX: usize = 99_000;

/// The length of a row before the JSON: the sequence of the last edit.
pub const SEQUENCE_LEN: usize = 13;

/// Parses the id of a document. Ids that start with an underscore are reserved for the server, except for design documents.
pub fn doc_id(text: &str) -> Result<DocId, Problem> {
    let bad = |reason: &str| Err(Problem::BadDocument(reason.to_owned()));
    match text {
        "" | "_design/" => bad("Document id must not be empty"),
        _ if text.len() > ID_LEN_MAX => bad("Document id is too long"),
        _ if text.starts_with('_') && !text.starts_with("_design/") => {
            bad("Only reserved document ids may start with underscore.")
        }
        _ => Ok(DocId::new(text)?),
    }
}

/// A document as it is stored.
#[derive(Debug, Clone)]
pub struct Document {
    /// The sequence of the last edit, which the next edit must pass to the changes feed.
    pub edited: Sequence,
    /// The revision of the document.
    pub revision: Revision,
    /// Whether the document is deleted.
    pub is_deleted: bool,
    /// The document as a JSON object, with `_id`, `_rev`, and `_deleted` if it is deleted.
    pub json: Vec<u8>,
}

impl Document {
    /// Decodes a row of the store.
    pub fn from_stored(bytes: &[u8]) -> Result<Self, Problem> {
        let (edited, json) = bytes.split_at_checked(SEQUENCE_LEN).ok_or(Problem::corrupt("too short"))?;
        let object: Map<String, Value> = serde_json::from_slice(json).map_err(Problem::corrupt)?;
        let revision = object.get("_rev").and_then(Value::as_str).unwrap_or_default().parse()?;
        let is_deleted = object.contains_key("_deleted");
        Ok(Self { edited: Sequence::from_bytes(edited)?, revision, is_deleted, json: json.to_vec() })
    }
}

/// A client's edit of a document.
#[derive(Debug, Clone)]
pub struct Edit {
    /// The id of the document.
    pub id: DocId,
    /// The revision that the client read.
    pub based_on: Option<Revision>,
    /// Whether the edit deletes the document.
    pub is_deleted: bool,
    /// The new content of the document.
    pub fields: Map<String, Value>,
}

impl Edit {
    /// Parses an edit in CouchDB's format. The `_id` in the JSON is used if `id` is `None`.
    pub fn from_json(value: Value, id: Option<&str>) -> Result<Self, Problem> {
        let Value::Object(mut fields) = value else {
            return Err(Problem::BadRequest("Document must be a JSON object".to_owned()));
        };
        let text = |value: Option<Value>| value.and_then(|value| value.as_str().map(str::to_owned));
        let own = text(fields.remove("_id"));
        let id = doc_id(id.or(own.as_deref()).unwrap_or_default())?;
        let based_on = text(fields.remove("_rev")).map(|text| revision(&text)).transpose()?;
        let is_deleted = fields.remove("_deleted") == Some(Value::Bool(true));
        match fields.keys().find(|name| name.starts_with('_')) {
            Some(name) => Err(Problem::BadDocument(format!("Bad special document member: {name}"))),
            None => Ok(Self { id, based_on, is_deleted, fields }),
        }
    }

    /// Makes an edit that deletes a document.
    pub fn deletion(id: DocId, based_on: Option<Revision>) -> Self {
        Self { id, based_on, is_deleted: true, fields: Map::new() }
    }

    /// Applies the edit to `present`. Returns the next revision, and the document's JSON.
    pub fn apply(&self, present: Option<&Document>) -> Result<(Revision, Vec<u8>), Problem> {
        let position = match present {
            None if self.is_deleted => return Err(Problem::Missing("missing".into())),
            Some(present) if present.is_deleted && self.is_deleted => {
                return Err(Problem::Missing("deleted".into()));
            }
            // A deleted document can be written again, even without naming its revision.
            Some(present) if present.is_deleted && self.based_on.is_none() => present.revision.position,
            Some(present) if self.based_on == Some(present.revision) => present.revision.position,
            None if self.based_on.is_none() => 0,
            _ => return Err(Problem::Conflict),
        };
        let parent = present.map(|present| present.revision.to_string()).unwrap_or_default();
        let content =
            serde_json::to_vec(&(&parent, self.is_deleted, &self.fields)).map_err(Problem::corrupt)?;
        // The same edit of the same revision results in the same new revision, on every server.
        let hash = xxhash_rust::xxh3::xxh3_128(&content).to_be_bytes();
        let revision = Revision { position: position + 1, hash };
        let mut object = self.fields.clone();
        object.insert("_id".to_owned(), self.id.as_str().into());
        object.insert("_rev".to_owned(), revision.to_string().into());
        if self.is_deleted {
            object.insert("_deleted".to_owned(), true.into());
        }
        let json = serde_json::to_vec(&object).map_err(Problem::corrupt)?;
        if json.len() > JSON_LEN_MAX {
            return Err(Problem::TooLarge(self.id.to_string()));
        }
        Ok((revision, json))
    }
}

/// Parses a revision in a request.
pub fn revision(text: &str) -> Result<Revision, Problem> {
    text.parse().map_err(|_| Problem::BadRequest("Invalid rev format".to_owned()))
}
