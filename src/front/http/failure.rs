//! [`Failure`] is an answer that says what went wrong, in the form that CouchDB's clients read.

use std::{borrow::Cow, time::Duration};

use axum::{
    body::Body,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};

use crate::base::{encoding::Sequence, error::Error};

/// How long a client should pause before it reads everything again.
const RESTART_PAUSE: Duration = Duration::from_secs(1);

/// An answer that says what went wrong: a status and the body `{"error":"…","reason":"…"}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    status: StatusCode,
    /// A word for programs.
    error: &'static str,
    /// What is wrong, and what would be right.
    reason: Cow<'static, str>,
    /// The allowed methods, if the method was wrong.
    allow: Option<&'static str>,
    /// After how many seconds the client should try again, if that is known.
    retry_after: Option<u64>,
    /// The horizon of the feed, if the client asked for older rows.
    horizon: Option<Sequence>,
    /// What the log says of it and the client is not to see.
    secret: Option<String>,
}

/// Put among the extensions of an answer: what the log is to say of it.
#[derive(Debug, Clone)]
pub(super) struct Secret(pub String);

impl Failure {
    /// Makes an answer with this status; `error` is a word for programs, `reason` a sentence for people.
    pub fn new(status: StatusCode, error: &'static str, reason: impl Into<Cow<'static, str>>) -> Self {
        Self {
            status,
            error,
            reason: reason.into(),
            allow: None,
            retry_after: None,
            horizon: None,
            secret: None,
        }
    }

    /// 400: the server does not understand the request.
    pub fn bad_request(reason: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad_request", reason)
    }

    /// 404: there is no such thing.
    pub fn not_found(reason: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", reason)
    }

    /// 401: the request needs credentials.
    pub(super) fn unauthorized(reason: &'static str) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", reason)
    }

    /// Adds the header that says when to try again.
    #[must_use]
    pub fn retry_after(self, rest: Duration) -> Self {
        Self { retry_after: Some(rest.as_millis().div_ceil(1_000) as u64), ..self }
    }

    /// 405; `allow` lists the allowed methods, as the header of that name does.
    pub(super) fn method_not_allowed(allow: &'static str) -> Self {
        let reason = format!("Only {allow} allowed");
        let failure = Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", reason);
        Self { allow: Some(allow), ..failure }
    }

    /// 404, in CouchDB's words: there is no such database.
    pub(super) fn no_database() -> Self {
        Self::not_found("Database does not exist.")
    }

    /// 403, in CouchDB's words: the caller may not read the database.
    pub(super) fn not_readable() -> Self {
        Self::new(StatusCode::FORBIDDEN, "forbidden", "You are not allowed to access this db.")
    }

    /// Returns the status.
    pub fn status(&self) -> StatusCode {
        self.status
    }
}

impl From<Error> for Failure {
    /// An error that the client can correct gets a status of 400 to 499. All others are logged, and get 503 if trying again can
    /// help, or else 500.
    fn from(error: Error) -> Self {
        match error {
            Error::Expired { horizon } => {
                let reason = format!(
                    "Rows up to {horizon} may have been dropped since. Forget what you know, and read again with since=0."
                );
                let failure = Self::new(StatusCode::GONE, "expired", reason).retry_after(RESTART_PAUSE);
                Self { horizon: Some(horizon), ..failure }
            }
            // A layer's database was just deleted, or the bus knows the database only by its events.
            Error::NoFeed { .. } => Self::not_found(
                "No changes of documents are kept here for this database: its layer has not added them, or it was deleted.",
            ),
            Error::NoShard { .. } | Error::NoConsumer { .. } => Self::not_found(error.to_string()),
            Error::ConsumerInUse { .. } => Self::new(StatusCode::CONFLICT, "conflict", error.to_string()),
            Error::Invalid { .. } | Error::UnknownScheme { .. } => Self::bad_request(error.to_string()),
            Error::Store(failed) if failed.is_of_failed_disk() => {
                // The store has logged it.
                let outcome = if failed.is_maybe_committed() {
                    "This request may have been carried out, or not"
                } else {
                    "Nothing was changed"
                };
                let reason = format!(
                    "The store takes no more writes, because its disk is full or has failed. {outcome}; what was acknowledged is \
                     kept. Restart the node once the disk is mended."
                );
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "store_failed", reason)
            }
            Error::Store(_) | Error::RetriesExhausted { .. } | Error::GaveUp { .. } => {
                // The roles have logged the failure already, and this line would repeat it for each request.
                tracing::debug!(%error, "the store has failed a request");
                let reason = "The store cannot be reached or is overloaded. Try again later.";
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", reason)
            }
            error => {
                let reason = "Something is wrong with the server; its log says what.";
                let failure = Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_server_error", reason);
                Self { secret: Some(error.to_string()), ..failure }
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
        if let Some(secret) = self.secret {
            response.extensions_mut().insert(Secret(secret));
        }
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
            // With `Bearer`, browsers do not ask the user for a password, as they do with `Basic`.
            let scheme = HeaderValue::from_static("Bearer realm=\"notibus\"");
            headers.insert(header::WWW_AUTHENTICATE, scheme);
        }
        response
    }
}
