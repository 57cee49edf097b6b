//! `/_session` lets CouchDB's clients and browsers log in by cookie.

use std::sync::Arc;

use axum::{
    Router,
    body::Body,
    extract::State,
    http::{HeaderMap, StatusCode, header, request::Parts},
    response::Response,
    routing::get,
};
use serde::{
    Deserialize,
    de::value::{self, MapDeserializer},
};
use serde_json::{Value, json};

use super::{
    Api, Failure,
    answer::{Answered, json as json_answer, routes},
    api::Shared,
    cookie::{NewCookie, now_ms},
    server::{NamedPage, is_from_elsewhere},
};

impl Api {
    /// Serves `/_session`, where callers with credentials log in by cookie. The route refuses log-ins from pages of other origins, unless
    /// [`ServerOptions::cors_origins`](super::ServerOptions::cors_origins) names them.
    pub fn sessions(&self) -> Router {
        let methods = get(who).post(log_in).delete(log_out);
        let routed = routes("/_session", [("", "GET,HEAD,POST,DELETE", methods)]);
        self.counted(routed.with_state(Arc::clone(&self.inner)))
    }
}

/// Creates an answer that sets this cookie, if there is one.
fn answer(request: &HeaderMap, body: &Value, cookie: Option<NewCookie>) -> Response {
    let mut response = json_answer(StatusCode::OK, body);
    if let Some(cookie) = cookie {
        response.headers_mut().insert(header::SET_COOKIE, cookie.header(request));
    }
    response
}

/// Makes the client forget its cookie.
async fn log_out(headers: HeaderMap) -> Response {
    answer(&headers, &json!({ "ok": true }), Some(NewCookie::default()))
}

/// Answers with the caller, if there is one, and renews its session. Fails if the given credentials are wrong.
async fn who(State(inner): Shared, parts: Parts) -> Answered {
    let (mut context, mut info) = (json!({ "name": null, "roles": [] }), json!({}));
    info["authentication_handlers"] = json!(["cookie", "default"]);
    let mut renewed = None;
    match inner.options.authorize.authorize(&parts).await {
        Ok(caller) => {
            let credentials = inner.options.authorize.credentials();
            if !parts.headers.contains_key(header::AUTHORIZATION) {
                renewed = credentials.and_then(|known| known.session(&parts.headers, now_ms()));
            }
            info["authenticated"] = if renewed.is_some() { "cookie" } else { "default" }.into();
            context["name"] = Some(caller.name()).filter(|name| !name.is_empty()).into();
            context["roles"] = caller.roles().into();
        }
        Err(failure) if parts.headers.contains_key(header::AUTHORIZATION) => return Err(failure),
        // As in CouchDB, programs use this parameter to ask whether they have to log in.
        Err(_) if has(&parts, "basic", "true") => return Err(Failure::unauthorized("Please login.")),
        Err(_) => {}
    }
    let body = json!({ "ok": true, "userCtx": context, "info": info });
    Ok(answer(&parts.headers, &body, renewed.map(|(_, cookie)| cookie)))
}

/// Begins a session. Fails with 401 if the name or the secret is wrong, and with 403 if a page of another origin sends the request: such a
/// page could log its visitor in under a name that it chooses.
async fn log_in(State(inner): Shared, parts: Parts, body: Body) -> Answered {
    if has(&parts, "next", "") {
        return Err(Failure::bad_request("`next` is not supported: this server does not redirect."));
    }
    if is_from_elsewhere(&parts.headers) && parts.extensions.get::<NamedPage>().is_none() {
        let reason = "A web page of another origin may not log in here.";
        return Err(Failure::new(StatusCode::FORBIDDEN, "forbidden", reason));
    }
    let Some(credentials) = inner.options.authorize.credentials() else {
        return Err(Failure::unauthorized("This server has no credentials: leave out the log-in."));
    };
    let body = inner.bodies.receive_anonymous(&parts.headers, body).await?;
    let LogIn { name, password } = read(&parts.headers, &body)?;
    let (caller, cookie) = credentials.log_in(&name, &password, now_ms())?;
    let body = json!({ "ok": true, "name": name, "roles": caller.roles() });
    Ok(answer(&parts.headers, &body, Some(cookie)))
}

/// Returns whether a request has the parameter `key` with this `value`, or with any value if `value` is empty.
fn has(parts: &Parts, key: &str, value: &str) -> bool {
    let query = parts.uri.query().unwrap_or_default();
    form_urlencoded::parse(query.as_bytes())
        .any(|(known, given)| known == key && (value.is_empty() || given == value))
}

/// The name and password that a client logs in with, in fields named as in CouchDB.
#[derive(Deserialize)]
struct LogIn {
    #[serde(alias = "username")]
    name: String,
    password: String,
}

/// Reads the body of a log-in, which is JSON or a form.
fn read(headers: &HeaderMap, body: &[u8]) -> Result<LogIn, Failure> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let log_in = if kind.starts_with("application/json") {
        serde_json::from_slice(body).ok()
    } else {
        let fields = MapDeserializer::<_, value::Error>::new(form_urlencoded::parse(body));
        LogIn::deserialize(fields).ok()
    };
    log_in.ok_or_else(|| Failure::bad_request("The body needs a name and a password."))
}
