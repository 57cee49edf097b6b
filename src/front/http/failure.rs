//! [`Failure`]: an answer that says what went wrong, as CouchDB's clients read it.

use std::{borrow::Cow, time::Duration};

use axum::{
    body::Body,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};

use crate::base::{encoding::Sequence, error::Error};

/// How long a client may pause before it reads everything again.
const RESTART_PAUSE: Duration = Duration::from_secs(1);

/// An answer that says what went wrong: a status, and the body `{"error":"…","reason":"…"}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The status.
    status: StatusCode,
    /// A word for programs.
    error: &'static str,
    /// What is wrong and what would be right.
    reason: Cow<'static, str>,
    /// The methods that are allowed, if it was the method.
    allow: Option<&'static str>,
    /// After how many seconds it is worth to ask again, if it is known.
    retry_after: Option<u64>,
    /// Up to where rows may have been dropped, if that is why.
    horizon: Option<Sequence>,
}

impl Failure {
    /// An answer with this status; `error` is a word for programs, `reason` a sentence for people.
    pub fn new(status: StatusCode, error: &'static str, reason: impl Into<Cow<'static, str>>) -> Self {
        Self { status, error, reason: reason.into(), allow: None, retry_after: None, horizon: None }
    }

    /// 400: the request cannot be understood.
    pub fn bad_request(reason: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad_request", reason)
    }

    /// 404: there is no such thing.
    pub fn not_found(reason: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", reason)
    }

    /// 401: nobody knows who asks.
    pub(super) fn unauthorized(reason: &'static str) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", reason)
    }

    /// The same, with the header that says when to ask again.
    #[must_use]
    pub fn retry_after(self, rest: Duration) -> Self {
        Self { retry_after: Some(rest.as_millis().div_ceil(1_000) as u64), ..self }
    }

    /// 405; `allow` are the methods that there are, as in the header of that name.
    pub(super) fn method_not_allowed(allow: &'static str) -> Self {
        let reason = format!("Only {allow} allowed");
        let failure = Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", reason);
        Self { allow: Some(allow), ..failure }
    }

    /// 404 of a database, in CouchDB's words.
    pub(super) fn no_database() -> Self {
        Self::not_found("Database does not exist.")
    }

    /// 403 of who may not read a database, in CouchDB's words.
    pub(super) fn not_readable() -> Self {
        Self::new(StatusCode::FORBIDDEN, "forbidden", "You are not allowed to access this db.")
    }

    /// The status.
    pub fn status(&self) -> StatusCode {
        self.status
    }
}

impl From<Error> for Failure {
    /// What the caller can mend gets a status of 400 to 499; the rest is logged, and 500 or, if trying again can help, 503.
    fn from(error: Error) -> Self {
        match error {
            Error::Expired { horizon } => {
                let reason = format!(
                    "Rows up to {horizon} may have been dropped since. Forget what you know, and read again with since=0."
                );
                let failure = Self::new(StatusCode::GONE, "expired", reason).retry_after(RESTART_PAUSE);
                Self { horizon: Some(horizon), ..failure }
            }
            // A layer's database that was just deleted, or one that is known by its events alone.
            Error::NoFeed { .. } => {
                Self::not_found("No changes of documents are kept here for this database.")
            }
            Error::NoShard { .. } => Self::not_found(format!("{error}")),
            Error::Invalid { .. } | Error::UnknownScheme { .. } => Self::bad_request(error.to_string()),
            Error::Store(_) | Error::RetriesExhausted { .. } | Error::GaveUp { .. } => {
                // What the roles meet is in the log already, and this would be there for each request.
                tracing::debug!(%error, "the store has failed a request");
                let reason = "The store cannot be reached or is overloaded. Try again later.";
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", reason)
            }
            error => {
                tracing::error!(%error, "a request has failed");
                let reason = "Something is wrong with the server; its log says what.";
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_server_error", reason)
            }
        }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut body = serde_json::json!({ "error": self.error, "reason": self.reason });
        if let Some(horizon) = self.horizon {
            (body["horizon"], body["restart_since"]) = (horizon.to_string().into(), "0".into());
        }
        let mut response = Response::new(Body::from(format!("{body}\n")));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("must-revalidate"));
        if let Some(allow) = self.allow {
            headers.insert(header::ALLOW, HeaderValue::from_static(allow));
        }
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        if self.status == StatusCode::UNAUTHORIZED {
            // Browsers ask nobody for a password by it, as they do where Basic is named.
            let scheme = HeaderValue::from_static("Bearer realm=\"notibus\"");
            headers.insert(header::WWW_AUTHENTICATE, scheme);
        }
        response
    }
}
