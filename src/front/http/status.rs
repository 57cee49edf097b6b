//! `/_notibus/health`, `/_notibus/status` and `/_notibus/metrics` describe the state of the node and the bus. `/_notibus/` is a
//! page that shows it.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use serde_json::{Value, json};

use super::{
    Api, Failure, Inner,
    answer::{self, at},
    caller::Permission,
    metrics,
    refusals::Refusals,
};
use crate::base::{error::Result, tasks::within};

/// How old the figures of the bus may be that metrics have: they cost some reads.
const FRESH_FOR: Duration = Duration::from_secs(5);

/// How long it may take to count the rows that the tail has not read.
const UNDELIVERED_MAX: Duration = Duration::from_secs(2);

impl Api {
    /// Serves the state of the node and the bus: `/_notibus/health/live` and `/_notibus/health/ready` for everyone,
    /// `/_notibus/status` and `/_notibus/metrics` for admins and for callers with the role `_metrics`. The page `/_notibus/` shows
    /// what its reader may request.
    pub fn status(&self) -> Router {
        let open = at(Router::new(), "/_notibus/health/live", get(health));
        let open = at(open, "/_notibus/health/ready", get(ready));
        let open = at(open, "/_notibus/health", get(ready));
        let admin = at(Router::new(), "/_notibus/status", get(status));
        let admin = at(admin, "/_notibus/metrics", get(scrape));
        // The page itself contains no data. It requests all data with the rights of its reader.
        let open = at(open, "/_notibus", get(page));
        let [open, admin] = [open, admin].map(|router| {
            router.method_not_allowed_fallback(method_not_allowed).with_state(Arc::clone(&self.inner))
        });
        self.counted(open).merge(self.guarded(admin, Permission::Metrics))
    }
}

impl Api {
    /// Serves `/`, where CouchDB's clients read which server this is. It is for servers without a layer; a layer has its own `/`.
    pub fn welcome(&self) -> Router {
        self.counted(Router::new().route("/", get(welcome)).method_not_allowed_fallback(method_not_allowed))
            .fallback(async || Failure::not_found("missing"))
    }
}

/// Answers the first request of CouchDB's clients.
async fn welcome() -> Response {
    let version = env!("CARGO_PKG_VERSION");
    let vendor = json!({ "name": "Notibus" });
    answer::json(StatusCode::OK, &json!({ "couchdb": "Welcome", "version": version, "vendor": vendor }))
}

async fn method_not_allowed() -> Failure {
    Failure::method_not_allowed("GET,HEAD")
}

/// Makes a 503 with the part that does not work and a cause for programs and a reason for people.
fn unavailable(part: &str, cause: &str, reason: &str) -> Response {
    let answer_body = json!({ "status": "unavailable", "part": part, "cause": cause, "reason": reason });
    answer::json(StatusCode::SERVICE_UNAVAILABLE, &answer_body)
}

/// Answers 200 unless only a restart of the process can help: the store takes no more writes, or the bus that the process has opened
/// no longer exists.
async fn health(State(inner): State<Arc<Inner>>) -> Response {
    match inner.bus.permanent_failure() {
        None => match inner.bus.trouble_of_history() {
            None => answer::json(StatusCode::OK, &json!({ "status": "ok" })),
            Some(older) => {
                let (cause, reason) = (older.cause(), older.to_string());
                answer::json(StatusCode::OK, &json!({ "status": "ok", "cause": cause, "reason": reason }))
            }
        },
        Some(unready) => unavailable(unready.part(), unready.cause(), &unready.to_string()),
    }
}

/// Answers 200 if an event that is recorded now would be delivered: the node can read what its work needs, a living notifier owns
/// each partition, no event was seen to wait for long, the tail stands where the feed ends, and the node is not shutting down.
async fn ready(State(inner): State<Arc<Inner>>) -> Response {
    // First: a node whose bus is gone closes its dispatcher, and says why.
    if let Some(unready) = inner.bus.permanent_failure() {
        return unavailable(unready.part(), unready.cause(), &unready.to_string());
    }
    if inner.is_closing() {
        return unavailable("node", "closing", "The node is being shut down.");
    }
    match Box::pin(inner.bus.readiness(&inner.dispatcher)).await {
        Ok(()) => answer::json(StatusCode::OK, &json!({ "status": "ok" })),
        Err(unready) => unavailable(unready.part(), unready.cause(), &unready.to_string()),
    }
}

async fn status(State(inner): State<Arc<Inner>>) -> Response {
    match read(&inner).await {
        Ok(status) => answer::json(StatusCode::OK, &status),
        Err(error) => Failure::from(error).into_response(),
    }
}

/// Reads the whole state of the bus, as far as the store answers.
async fn read(inner: &Inner) -> Result<Value> {
    let Inner { bus, feed, dispatcher, .. } = inner;
    let tailed = dispatcher.position();
    let undelivered = within(inner.env(), UNDELIVERED_MAX, "counting rows", feed.pending(tailed));
    let (status, undelivered) = tokio::join!(bus.status(), undelivered);
    let status = status?;
    let mut answer_body = serde_json::to_value(&status).expect("a status can be written as JSON");
    let tail_lag_ms = status.feed.map(|feed| dispatcher.lag(feed.now).as_millis() as u64);
    answer_body["lag"] = json!({
        "is_drained": status.backlog.map(|backlog| backlog.rows == 0),
        "tailed_seq": tailed,
        "undelivered_rows": undelivered.ok(),
        "tail_lag_ms": tail_lag_ms,
    });
    answer_body["http"] =
        json!({ "feeds": inner.admission.feeds(), "subscribers": dispatcher.subscribers() });
    Ok(answer_body)
}

/// Answers with the page that shows the state live.
async fn page() -> Response {
    let mut response = Response::new(Body::from(include_str!("live.html")));
    let policy = "default-src 'none'; connect-src 'self'; img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
                  base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

/// Answers with the counts for Prometheus.
async fn scrape(State(inner): State<Arc<Inner>>, request: Request) -> Response {
    let (parts, _) = request.into_parts();
    let refusals = parts.extensions.get::<Refusals>();
    let snapshot = inner.bus.snapshot(FRESH_FOR).await;
    for (part, error) in &snapshot.unanswered {
        inner.feed.context.stats.health.complain(inner.env(), part, error);
    }
    let mut response = Response::new(Body::from(metrics::encode(&inner, refusals, &snapshot)));
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}
