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
    Access, Api, Failure, Inner, Peer,
    access::Caught,
    answer::{at, json as answer_json},
    cookie::set_cookie,
    socket::during_check,
};

impl Api {
    /// Serves `/_session`, where callers with passwords log in by cookie.
    pub fn sessions(&self) -> Router {
        self.counted(at(Router::new(), "/_session", any(session)).with_state(Arc::clone(&self.inner)))
    }
}

async fn session(State(inner): State<Arc<Inner>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let answer = match parts.method {
        Method::GET | Method::HEAD => who(&inner, &parts).await,
        Method::POST => log_in(&inner, &parts, body).await,
        Method::DELETE => {
            let mut response = answer_json(StatusCode::OK, &json!({ "ok": true }));
            response
                .headers_mut()
                .insert(header::SET_COOKIE, set_cookie("", &parts.headers, inner.env().wall_ms()));
            Ok(response)
        }
        _ => Err(Failure::method_not_allowed("GET,HEAD,POST,DELETE")),
    };
    answer.unwrap_or_else(IntoResponse::into_response)
}

/// Answers with the caller, if there is one. Fails if credentials are wrong.
async fn who(inner: &Inner, parts: &Parts) -> Result<Response, Failure> {
    let (name, roles, by) = match &inner.options.access {
        Access::Open => (None, vec!["_admin".to_owned()], "default"),
        Access::Credentials(credentials) => {
            let is_known = parts.headers.contains_key(header::AUTHORIZATION);
            let peer = parts.extensions.get::<Peer>().copied();
            let check = credentials.check(&parts.headers, peer, inner.env());
            match during_check(&parts.extensions, check).await {
                Ok(Caught { caller, session }) => {
                    let by = if session.is_some() { "cookie" } else { "default" };
                    (Some(caller.name().to_owned()), caller.roles().to_vec(), by)
                }
                Err(failure) if is_known => return Err(failure),
                // As in CouchDB: so a program asks whether it has to log in.
                Err(_) if has(parts, "basic", "true") => return Err(Failure::unauthorized("Please login.")),
                Err(_) => (None, Vec::new(), ""),
            }
        }
    };
    let mut info = json!({ "authentication_handlers": ["cookie", "default"] });
    if !by.is_empty() {
        info["authenticated"] = by.into();
    }
    let context = json!({ "name": name, "roles": roles });
    Ok(answer_json(StatusCode::OK, &json!({ "ok": true, "userCtx": context, "info": info })))
}

/// Begins a session. Fails with 401 if the name or the password is wrong.
async fn log_in(inner: &Inner, parts: &Parts, body: Body) -> Result<Response, Failure> {
    if has(parts, "next", "") {
        return Err(Failure::bad_request("This server sends nobody elsewhere: leave out `next`."));
    }
    let body = inner.body(&parts.headers, body).await?;
    let (name, password) = read(&parts.headers, &body)?;
    // The check may have to wait, and other requests need the room.
    drop(body);
    let Access::Credentials(credentials) = &inner.options.access else {
        return Err(Failure::unauthorized("This server is open and has no accounts: leave out the log-in."));
    };
    let peer = parts.extensions.get::<Peer>().copied();
    let check = credentials.begin_session(&name, &password, peer, inner.env());
    let (caller, value) = during_check(&parts.extensions, check).await?;
    let mut response =
        answer_json(StatusCode::OK, &json!({ "ok": true, "name": name, "roles": caller.roles() }));
    response
        .headers_mut()
        .insert(header::SET_COOKIE, set_cookie(&value, &parts.headers, inner.env().wall_ms()));
    Ok(response)
}

/// Returns whether a request has the parameter `key` with this value; with any value, if it is empty.
fn has(parts: &Parts, key: &str, value: &str) -> bool {
    let query = parts.uri.query().unwrap_or_default();
    form_urlencoded::parse(query.as_bytes())
        .any(|(known, given)| known == key && (value.is_empty() || given == value))
}

/// Reads the name and the password from a body, which is JSON or a form.
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
