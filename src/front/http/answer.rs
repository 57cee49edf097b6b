//! Routes and answers in CouchDB's form: paths with and without a trailing slash, parameters, and JSON objects on one line. [`Failure`]
//! is an answer that says what went wrong.

use std::{borrow::Cow, collections::BTreeMap, future::ready, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::{FromRequestParts, Path},
    http::{HeaderValue, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
    routing::MethodRouter,
};
use serde::{Serialize, de::DeserializeOwned};

use crate::base::{
    encoding::Sequence,
    error::{Error, StoreError},
};

/// How long a client should pause before it reads everything again.
const RESTART_PAUSE: Duration = Duration::from_secs(1);

/// What a route returns.
pub(super) type Answered = Result<Response, Failure>;

/// Extracts the placeholders of a path. A path that does not match is refused in the same form as any other request.
pub(super) struct PathSegments<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for PathSegments<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let segments = Path::from_request_parts(parts, state).await;
        segments.map(|Path(segments)| Self(segments)).map_err(|error| Failure::bad_request(error.body_text()))
    }
}

/// Creates a router from these routes. Each comes with the methods that it allows, in the form of the `Allow` header. All paths begin with
/// `start`, and each also works with a trailing slash, which CouchDB ignores.
pub(super) fn routes<S: Clone + Send + Sync + 'static, const N: usize>(
    start: &str,
    routes: [(&str, &'static str, MethodRouter<S>); N],
) -> Router<S> {
    routes.into_iter().fold(Router::new(), |router, (path, allow, methods)| {
        let methods = methods.fallback(move || ready(Failure::method_not_allowed(allow)));
        let path = format!("{start}{path}");
        router.route(&format!("{path}/"), methods.clone()).route(&path, methods)
    })
}

/// Creates an answer with `object` as its JSON body.
pub(super) fn json(status: StatusCode, object: &impl Serialize) -> Response {
    let mut body = serde_json::to_vec(object).expect("an answer can be written as JSON");
    body.push(b'\n');
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("must-revalidate"));
    response
}

/// Returns the parameters of a request. Each must be among `known`, and given only once. Names that begin with `_` are allowed: clients add
/// them to bypass caches.
pub(super) fn parameters(
    parts: &Parts,
    known: &[&'static str],
) -> Result<BTreeMap<&'static str, String>, Failure> {
    let mut given = BTreeMap::new();
    for (key, value) in form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes()) {
        if key.starts_with('_') {
            continue;
        }
        let Some(key) = known.iter().find(|known| **known == key) else {
            let reason = match known {
                [] => "This route has no parameters.".to_owned(),
                _ => format!("The parameter {key} is not one of {}.", known.join(", ")),
            };
            return Err(Failure::bad_request(reason));
        };
        if given.insert(*key, value.into_owned()).is_some() {
            return Err(Failure::bad_request(format!("The parameter {key} is given twice.")));
        }
    }
    Ok(given)
}

/// Fails if a web page sent the request, because a browser sends whatever a page asks it to.
pub(super) fn check_page(parts: &Parts) -> Result<(), Failure> {
    if parts.headers.contains_key(header::ORIGIN) {
        return Err(Failure::new(StatusCode::FORBIDDEN, "forbidden", "Web pages may only read."));
    }
    Ok(())
}

/// An answer that says what went wrong: a status and the body `{"error":"…","reason":"…"}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    status: StatusCode,
    /// A machine-readable word for the kind of error.
    error: &'static str,
    /// What is wrong, and what was expected.
    reason: Cow<'static, str>,
    /// The allowed methods, if the method was wrong.
    allow: Option<&'static str>,
    /// How many seconds the client should wait before it tries again, if known.
    retry_after: Option<u64>,
    /// The horizon of the feed, if the client asked for older rows.
    horizon: Option<Sequence>,
    /// Details for the log, which the client must not see.
    secret: Option<String>,
}

/// An extension of an answer that holds details for the log.
#[derive(Debug, Clone)]
pub(super) struct Secret(pub String);

impl Failure {
    /// Creates an answer with this status; `error` is a machine-readable word, and `reason` a human-readable sentence.
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

    /// 404: what was requested does not exist.
    pub fn not_found(reason: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", reason)
    }

    /// 401: the request needs credentials.
    pub(super) fn unauthorized(reason: &'static str) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", reason)
    }

    /// Adds the `Retry-After` header.
    #[must_use]
    pub fn retry_after(self, rest: Duration) -> Self {
        Self { retry_after: Some(rest.as_millis().div_ceil(1_000) as u64), ..self }
    }

    /// 405: the method is wrong. `allow` lists the allowed methods, in the form of the `Allow` header.
    pub(super) fn method_not_allowed(allow: &'static str) -> Self {
        let reason = format!("Only {allow} allowed");
        let failure = Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", reason);
        Self { allow: Some(allow), ..failure }
    }

    /// Returns the status.
    pub fn status(&self) -> StatusCode {
        self.status
    }
}

impl From<Error> for Failure {
    /// Errors that the client can correct get a status of 400 to 499. All others are logged, and get 503 if trying again can help,
    /// otherwise 500.
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
                "No document changes are kept here for this database: its layer has not added them, or it was deleted.",
            ),
            Error::NoShard { .. } | Error::NoConsumer { .. } => Self::not_found(error.to_string()),
            Error::ConsumerInUse { .. } => Self::new(StatusCode::CONFLICT, "conflict", error.to_string()),
            Error::Invalid { .. } | Error::UnknownScheme { .. } => Self::bad_request(error.to_string()),
            Error::Store(failed) if failed.code() == StoreError::NO_ROOM.code() => {
                let reason =
                    "The store's disk is full, and nothing was changed. Try again when there is room.";
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "no_room", reason)
            }
            Error::Store(failed) if failed.code() == StoreError::TRANSACTION_TOO_LARGE.code() => {
                let reason = "This is too much for one transaction, and nothing was changed. Send it in several requests.";
                Self::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", reason)
            }
            Error::OlderThanRows { .. } => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "older_than_rows", error.to_string())
            }
            Error::Store(failed) if failed.is_of_failed_disk() => {
                // The store has already logged the failure.
                let outcome = if failed.is_maybe_committed() {
                    "This request may have been carried out, or not"
                } else {
                    "Nothing was changed"
                };
                let reason = format!(
                    "The store takes no more writes, because its disk is full or failed. {outcome}; what was acknowledged is \
                     kept. Restart the node once the disk is repaired."
                );
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "store_failed", reason)
            }
            Error::Store(_) | Error::RetriesExhausted { .. } | Error::GaveUp { .. } => {
                // The roles have already logged the failure, and at a higher level this line would repeat it for each request.
                tracing::debug!(%error, "the store failed a request");
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
        let mut response = json(self.status, &body);
        if let Some(secret) = self.secret {
            response.extensions_mut().insert(Secret(secret));
        }
        let headers = response.headers_mut();
        if let Some(allow) = self.allow {
            headers.insert(header::ALLOW, HeaderValue::from_static(allow));
        }
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        if self.status == StatusCode::UNAUTHORIZED {
            // With `Basic`, browsers would ask the user for a password; with `Bearer` they do not.
            let scheme = HeaderValue::from_static("Bearer realm=\"notibus\"");
            headers.insert(header::WWW_AUTHENTICATE, scheme);
        }
        response
    }
}
