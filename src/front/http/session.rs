//! `/_session` lets CouchDB's clients and browsers log in by cookie.

use std::sync::Arc;

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, Method, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
    routing::any,
};
use serde_json::json;

use super::{
    Api, Failure, Inner,
    answer::{at, json as answer_json},
    cookie::{NewCookie, now_ms},
    server::{NamedPage, is_from_elsewhere},
};

impl Api {
    /// Serves `/_session`, where callers with credentials log in by cookie. It refuses log-ins from pages of other origins, unless
    /// [`ServerOptions::cors_origins`](super::ServerOptions::cors_origins) names them.
    pub fn sessions(&self) -> Router {
        self.counted(at(Router::new(), "/_session", any(session)).with_state(Arc::clone(&self.inner)))
    }
}

async fn session(State(inner): State<Arc<Inner>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let answer = match parts.method {
        Method::GET | Method::HEAD => who(&inner, &parts).await,
        Method::POST => log_in(&inner, &parts, body).await,
        Method::DELETE => Ok((json!({ "ok": true }), Some(NewCookie::default()))),
        _ => Err(Failure::method_not_allowed("GET,HEAD,POST,DELETE")),
    };
    let (body, cookie) = match answer {
        Ok(answer) => answer,
        Err(failure) => return failure.into_response(),
    };
    let mut response = answer_json(StatusCode::OK, &body);
    if let Some(cookie) = cookie {
        response.headers_mut().insert(header::SET_COOKIE, cookie.header(&parts.headers));
    }
    response
}

/// The body of an answer, and the cookie that it sets.
type Answer = (serde_json::Value, Option<NewCookie>);

/// Answers with the caller, if there is one, and renews its session. Fails if credentials are wrong.
async fn who(inner: &Inner, parts: &Parts) -> Result<Answer, Failure> {
    let (mut context, mut info) = (json!({ "name": null, "roles": [] }), json!({}));
    info["authentication_handlers"] = json!(["cookie", "default"]);
    let mut renewed = None;
    match inner.options.authorize.authorize(parts).await {
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
        // As in CouchDB: so a program asks whether it has to log in.
        Err(_) if has(parts, "basic", "true") => return Err(Failure::unauthorized("Please login.")),
        Err(_) => {}
    }
    let body = json!({ "ok": true, "userCtx": context, "info": info });
    Ok((body, renewed.map(|(_, cookie)| cookie)))
}

/// Begins a session. Fails with 401 if the name or the secret is wrong, and with 403 if a page of another origin asks, which could
/// have its visitor work under a name of its choice.
async fn log_in(inner: &Inner, parts: &Parts, body: Body) -> Result<Answer, Failure> {
    if has(parts, "next", "") {
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
    let (name, secret) = read(&parts.headers, &body)?;
    let (caller, cookie) = credentials.log_in(&name, &secret, now_ms())?;
    Ok((json!({ "ok": true, "name": name, "roles": caller.roles() }), Some(cookie)))
}

/// Returns whether a request has the parameter `key` with this value; with any value, if it is empty.
fn has(parts: &Parts, key: &str, value: &str) -> bool {
    let query = parts.uri.query().unwrap_or_default();
    form_urlencoded::parse(query.as_bytes())
        .any(|(known, given)| known == key && (value.is_empty() || given == value))
}

/// Reads the name and the secret from a body, which is JSON or a form with CouchDB's words.
fn read(headers: &HeaderMap, body: &[u8]) -> Result<(String, String), Failure> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let (mut name, mut password) = (None, None);
    if kind.starts_with("application/json") {
        let object: serde_json::Value = serde_json::from_slice(body)
            .map_err(|_| Failure::bad_request("Request body must be a JSON object"))?;
        let text = |key: &str| object.get(key).and_then(|value| value.as_str()).map(str::to_owned);
        (name, password) = (text("name").or_else(|| text("username")), text("password"));
    } else {
        for (key, value) in form_urlencoded::parse(body) {
            match &*key {
                "name" | "username" => name = Some(value.into_owned()),
                "password" => password = Some(value.into_owned()),
                _ => {}
            }
        }
    }
    name.zip(password).ok_or_else(|| Failure::bad_request("The body needs a name and a password."))
}
