//! Problems as CouchDB tells them.

use axum::{
    Json,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde_json::json;

use super::super::problem::Problem;

impl Problem {
    /// How CouchDB tells it: a status, an error and a reason.
    pub fn told(&self) -> (StatusCode, &str, String) {
        let told = |status, error, reason: &str| (status, error, reason.to_owned());
        match self {
            Self::NoDatabase => told(StatusCode::NOT_FOUND, "not_found", "Database does not exist."),
            Self::Missing(why) => told(StatusCode::NOT_FOUND, "not_found", why),
            Self::Conflict => told(StatusCode::CONFLICT, "conflict", "Document update conflict."),
            Self::DatabaseExists => {
                let reason = "The database could not be created, the file already exists.";
                told(StatusCode::PRECONDITION_FAILED, "file_exists", reason)
            }
            Self::BadName(name) => {
                let reason = format!(
                    "Name: '{name}'. Only lowercase characters (a-z), digits (0-9), and any of the characters _, $, (, ), +, -, and / are allowed. Must begin with a letter."
                );
                (StatusCode::BAD_REQUEST, "illegal_database_name", reason)
            }
            Self::BadDocument(reason) => told(StatusCode::BAD_REQUEST, "doc_validation", reason),
            Self::BadRequest(reason) => told(StatusCode::BAD_REQUEST, "bad_request", reason),
            Self::TooLarge(id) => told(StatusCode::PAYLOAD_TOO_LARGE, "document_too_large", id),
            Self::Unsupported(what) => told(StatusCode::NOT_IMPLEMENTED, "not_implemented", what),
            Self::Store(notibus::Error::Invalid { reason, .. }) => {
                told(StatusCode::BAD_REQUEST, "bad_request", reason)
            }
            Self::Store(error) => {
                (StatusCode::INTERNAL_SERVER_ERROR, "internal_server_error", error.to_string())
            }
            Self::Corrupt(reason) => told(StatusCode::INTERNAL_SERVER_ERROR, "internal_server_error", reason),
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let (status, error, reason) = self.told();
        (status, Json(json!({ "error": error, "reason": reason }))).into_response()
    }
}
