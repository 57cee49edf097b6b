//! Answers to failed requests, in CouchDB's format.

use axum::{
    Json,
    body::to_bytes,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::json;

use super::super::problem::Problem;

impl Problem {
    /// Returns CouchDB's answer: a status, an error and a reason.
    pub fn as_answer(&self) -> (StatusCode, &str, String) {
        let answer = |status, error, reason: &str| (status, error, reason.to_owned());
        match self {
            Self::NoDatabase => answer(StatusCode::NOT_FOUND, "not_found", "Database does not exist."),
            Self::Missing(why) => answer(StatusCode::NOT_FOUND, "not_found", why),
            Self::Conflict => answer(StatusCode::CONFLICT, "conflict", "Document update conflict."),
            Self::DatabaseExists => {
                let reason = "The database could not be created, the file already exists.";
                answer(StatusCode::PRECONDITION_FAILED, "file_exists", reason)
            }
            Self::BadName(name) => {
                let reason = format!(
                    "Name: '{name}'. Only lowercase characters (a-z), digits (0-9), and any of the characters _, $, (, ), +, -, and / are allowed. Must begin with a letter."
                );
                (StatusCode::BAD_REQUEST, "illegal_database_name", reason)
            }
            Self::BadDocument(reason) => answer(StatusCode::BAD_REQUEST, "doc_validation", reason),
            Self::BadRequest(reason) => answer(StatusCode::BAD_REQUEST, "bad_request", reason),
            Self::TooLarge(id) => answer(StatusCode::PAYLOAD_TOO_LARGE, "document_too_large", id),
            Self::Unsupported(what) => answer(StatusCode::NOT_IMPLEMENTED, "not_implemented", what),
            Self::Store(notibus::Error::Invalid { reason, .. }) => {
                answer(StatusCode::BAD_REQUEST, "bad_request", reason)
            }
            Self::Store(error) => {
                (StatusCode::INTERNAL_SERVER_ERROR, "internal_server_error", error.to_string())
            }
            Self::Corrupt(reason) => {
                answer(StatusCode::INTERNAL_SERVER_ERROR, "internal_server_error", reason)
            }
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let (status, error, reason) = self.as_answer();
        (status, Json(json!({ "error": error, "reason": reason }))).into_response()
    }
}

/// Gives axum's own refusals of a path, a method or a body the same format as all other problems.
pub async fn as_problem(response: Response) -> Response {
    let (parts, body) = response.into_parts();
    let is_json = parts.headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind == "application/json");
    if is_json || !parts.status.is_client_error() {
        return Response::from_parts(parts, body);
    }
    let allow = parts.headers.get(header::ALLOW).cloned();
    let (error, reason) = match &allow {
        Some(allow) => ("method_not_allowed", format!("Only {} allowed", allow.to_str().unwrap_or_default())),
        None if parts.status == StatusCode::PAYLOAD_TOO_LARGE => {
            ("too_large", "the request entity is too large".to_owned())
        }
        None => {
            let text = to_bytes(body, 1_024).await.unwrap_or_default();
            ("bad_request", String::from_utf8_lossy(&text).into_owned())
        }
    };
    let mut response = (parts.status, Json(json!({ "error": error, "reason": reason }))).into_response();
    response.headers_mut().extend(allow.map(|allow| (header::ALLOW, allow)));
    response
}
