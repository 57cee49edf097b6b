//! [`Authorize`] says who sends a request.

use std::{fmt, sync::Arc};

use axum::http::request::Parts;
use futures_util::future::{BoxFuture, ready};

use super::{Caller, Credentials, Failure, Grant};

/// Says who sends a request, and what they may do. A layer with accounts of its own implements it, or trusts what a proxy in front says.
///
/// ```
/// use std::{future::ready, sync::Arc};
///
/// use futures_util::future::BoxFuture;
/// use notibus::http::{ApiOptions, Authorize, Caller, Failure, Grant, axum::http::{StatusCode, request::Parts}};
///
/// /// Trusts a proxy, which alone can reach the server, and sets a header.
/// #[derive(Debug)]
/// struct Proxy;
///
/// impl Authorize for Proxy {
///     fn authorize<'a>(&'a self, request: &'a Parts) -> BoxFuture<'a, Result<Caller, Failure>> {
///         let user = request.headers.get("x-user").and_then(|user| user.to_str().ok());
///         let refused = Failure::new(StatusCode::UNAUTHORIZED, "unauthorized", "The proxy names nobody.");
///         Box::pin(ready(user.map(|user| Caller::new(user, Grant::admin())).ok_or(refused)))
///     }
/// }
///
/// let options = ApiOptions::default().authorize(Arc::new(Proxy));
/// ```
pub trait Authorize: fmt::Debug + Send + Sync + 'static {
    /// Returns who sent `request`. Fails with the answer that refuses it: 401 asks for credentials.
    fn authorize<'a>(&'a self, request: &'a Parts) -> BoxFuture<'a, Result<Caller, Failure>>;

    /// Returns the credentials with which callers log in at `/_session`. Default: none, so nobody can.
    fn credentials(&self) -> Option<&Credentials> {
        None
    }
}

/// Lets everyone who reaches the server be its admin. [`ServerOptions::hosts`](super::ServerOptions::hosts) keeps out web pages that
/// would reach it through a browser.
#[derive(Debug)]
struct AllowAll;

impl Authorize for AllowAll {
    fn authorize<'a>(&'a self, _: &'a Parts) -> BoxFuture<'a, Result<Caller, Failure>> {
        Box::pin(ready(Ok(Caller::new("", Grant::admin()))))
    }
}

/// Returns what lets everyone who reaches the server be its admin, under no name.
pub fn allow_all() -> Arc<dyn Authorize> {
    Arc::new(AllowAll)
}

impl Authorize for Credentials {
    fn authorize<'a>(&'a self, request: &'a Parts) -> BoxFuture<'a, Result<Caller, Failure>> {
        Box::pin(ready(self.check(&request.headers, super::cookie::now_ms())))
    }

    fn credentials(&self) -> Option<&Credentials> {
        Some(self)
    }
}
