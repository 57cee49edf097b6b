//! The documents of a database over HTTP.

use std::{collections::HashMap, fmt::Display};

use axum::{
    Json,
    body::Bytes,
    extract::{Query, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use notibus::changes::{DocId, Revision};
use serde_json::{Value, json};

use super::super::{
    document::{Document, Edit, doc_id, revision},
    problem::Problem,
};
use super::{Answer, PathSegments, Shared, database};

/// The parameters of a request.
type Params = Query<HashMap<String, String>>;

/// Parses a body as JSON.
fn parse(body: &[u8]) -> Result<Value, Problem> {
    serde_json::from_slice(body).map_err(|_| Problem::BadRequest("invalid UTF-8 JSON".to_owned()))
}

/// Writes a document. The server chooses the id if the document has none.
pub async fn add(State(couch): Shared, path: PathSegments, body: Bytes) -> Answer {
    let edit = edit_of(parse(&body)?)?;
    Ok(answer(StatusCode::CREATED, &edit, couch.edit(&database(&path)?, &edit).await?))
}

/// Returns the newest revision of a document.
pub async fn read(State(couch): Shared, path: PathSegments, params: Params) -> Answer {
    let found = couch.document(&database(&path)?, &document(&path)?).await?;
    let document = found.ok_or(Problem::Missing("missing".into()))?;
    match params.get("rev") {
        // Only the newest revision is kept.
        Some(rev) if revision(rev)? != document.revision => return Err(Problem::Missing("missing".into())),
        None if document.is_deleted => return Err(Problem::Missing("deleted".into())),
        _ => {}
    }
    let tag = format!("\"{}\"", document.revision);
    Ok(([(header::CONTENT_TYPE, "application/json".to_owned()), (header::ETAG, tag)], document.json)
        .into_response())
}

/// Writes a document.
pub async fn write(
    State(couch): Shared,
    path: PathSegments,
    params: Params,
    headers: HeaderMap,
    body: Bytes,
) -> Answer {
    let mut edit = Edit::from_json(parse(&body)?, Some(document(&path)?.as_str()))?;
    edit.based_on = based_on(&params, &headers)?.or(edit.based_on);
    Ok(answer(StatusCode::CREATED, &edit, couch.edit(&database(&path)?, &edit).await?))
}

/// Deletes a document.
pub async fn erase(State(couch): Shared, path: PathSegments, params: Params, headers: HeaderMap) -> Answer {
    let edit = Edit::deletion(document(&path)?, based_on(&params, &headers)?);
    Ok(answer(StatusCode::OK, &edit, couch.edit(&database(&path)?, &edit).await?))
}

/// Makes many edits, each of which succeeds or fails by itself.
pub async fn bulk(State(couch): Shared, path: PathSegments, body: Bytes) -> Answer {
    let mut request = parse(&body)?;
    if request["new_edits"] == false {
        return Err(Problem::Unsupported("revisions that were made elsewhere".into()));
    }
    let Some(Value::Array(docs)) = request.get_mut("docs").map(Value::take) else {
        return Err(Problem::BadRequest("POST body must include `docs` parameter.".to_owned()));
    };
    let edits: Vec<_> = docs.into_iter().map(edit_of).collect::<Result<_, _>>()?;
    let results = couch.edit_many(&database(&path)?, &edits).await?;
    let row = |(edit, result): (&Edit, Result<Revision, Problem>)| match result {
        Ok(rev) => json!({ "ok": true, "id": edit.id, "rev": rev }),
        Err(problem) => {
            let (_, error, reason) = problem.as_answer();
            json!({ "id": edit.id, "error": error, "reason": reason })
        }
    };
    let rows: Vec<_> = edits.iter().zip(results).map(row).collect();
    Ok((StatusCode::CREATED, Json(rows)).into_response())
}

/// Lists the documents whose ids are in `keys` of the body, or those between `startkey` and `endkey` that are not deleted.
pub async fn list(State(couch): Shared, path: PathSegments, params: Params, body: Bytes) -> Answer {
    let name = database(&path)?;
    let with_docs = params.get("include_docs").is_some_and(|value| value == "true");
    let request = if body.is_empty() { Value::Null } else { parse(&body)? };
    let rows = if let Some(keys) = request["keys"].as_array() {
        let ids: Vec<_> = keys.iter().map(|key| doc_id(key.as_str().unwrap_or_default()).ok()).collect();
        let found = couch.documents(&name, &ids).await?;
        let missing = |key: &Value| Ok(json!({ "key": key, "error": "not_found" }));
        let row = |(key, document): (_, &Option<_>)| {
            document.as_ref().map_or_else(|| missing(key), |document| row(document, with_docs))
        };
        keys.iter().zip(&found).map(row).collect::<Result<Vec<_>, _>>()?
    } else {
        let (from, to) = (key(&params, ["startkey", "start_key"])?, key(&params, ["endkey", "end_key"])?);
        let limit = params.get("limit").map_or(Ok(usize::MAX), |text| text.parse()).map_err(bad)?;
        let found = couch.documents_between(&name, from.as_deref(), to.as_deref(), limit).await?;
        found.iter().map(|document| row(document, with_docs)).collect::<Result<_, _>>()?
    };
    let total = couch.info(&name).await?.living;
    Ok(Json(json!({ "total_rows": total, "offset": null, "rows": rows })).into_response())
}

/// Parses a parameter that is a JSON key and has one of two names.
fn key(params: &Params, names: [&str; 2]) -> Result<Option<String>, Problem> {
    let text = names.iter().find_map(|name| params.get(*name));
    text.map(|text| serde_json::from_str(text).map_err(bad)).transpose()
}

/// Makes a row of `_all_docs`.
fn row(document: &Document, with_docs: bool) -> Result<Value, Problem> {
    let object: Value = serde_json::from_slice(&document.json).map_err(Problem::corrupt)?;
    let id = &object["_id"];
    let mut row = json!({ "id": id, "key": id, "value": { "rev": document.revision } });
    if document.is_deleted {
        row["value"]["deleted"] = true.into();
    }
    if with_docs {
        row["doc"] = if document.is_deleted { Value::Null } else { object };
    }
    Ok(row)
}

/// Parses an edit. The server chooses the id if the document has none.
fn edit_of(doc: Value) -> Result<Edit, Problem> {
    let id = if doc["_id"].is_null() { Some(notibus::DbInstance::new().to_string()) } else { None };
    Edit::from_json(doc, id.as_deref())
}

/// Makes the answer to a successful edit.
fn answer(status: StatusCode, edit: &Edit, rev: Revision) -> Response {
    let tag = [(header::ETAG, format!("\"{rev}\""))];
    (status, tag, Json(json!({ "ok": true, "id": edit.id, "rev": rev }))).into_response()
}

/// Parses the revision that a request names.
fn based_on(params: &Params, headers: &HeaderMap) -> Result<Option<Revision>, Problem> {
    let header = headers.get(header::IF_MATCH).and_then(|value| value.to_str().ok());
    let text = params.get("rev").map(String::as_str).or(header);
    text.map(|text| revision(text.trim_matches('"'))).transpose()
}

/// Parses the document id in a path.
fn document(path: &PathSegments) -> Result<DocId, Problem> {
    match path.get("design") {
        Some(name) => doc_id(&format!("_design/{name}")),
        None => doc_id(&path["id"]),
    }
}

/// Converts the error for an invalid parameter.
fn bad(error: impl Display) -> Problem {
    Problem::BadRequest(error.to_string())
}
