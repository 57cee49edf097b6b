//! [`ApiOptions`] says who may send requests, and sets the limits for feeds and bodies. [`Authorize`] says who sent a request.

use std::{fmt, sync::Arc, time::Duration};

use axum::http::request::Parts;
use futures_util::future::{BoxFuture, ready};

use super::{Caller, Credentials, Failure, Grant, cookie::now_ms};
use crate::base::error::{Error, Result};

/// The options of the routers: who may use them, and their limits.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ApiOptions {
    /// Who may send requests, and what they may do. Default: [`allow_all`].
    pub authorize: Arc<dyn Authorize>,
    /// The maximum `timeout` of a feed, which also applies if a client gives none. Default: 60 s.
    pub timeout_max: Duration,
    /// The maximum `heartbeat` interval. Default: 60 s.
    pub heartbeat_max: Duration,
    /// How many long-lived feeds each name may have open; all callers without a name share this number. Default: 10,000.
    pub feeds_per_name_max: usize,
    /// How long the documents of a page may take before the feed is cut off. Default: 60 s.
    pub doc_reads_limit: Duration,
    /// The maximum size of a request's body, before and after inflating, in bytes; 1 KiB where callers only read. Default: 1 MiB.
    pub body_len_max: usize,
    /// The maximum size of all bodies that the server holds from callers who record or administer, in bytes; a body beyond that gets 503.
    /// The bodies of all others may take as many bytes again, and so may the document ids that feeds keep (`_doc_ids`). Default: 64 MiB.
    pub bodies_len_max: usize,
}

crate::base::macros::setters!(ApiOptions { authorize: Arc<dyn Authorize>, timeout_max: Duration, heartbeat_max: Duration, feeds_per_name_max: usize, doc_reads_limit: Duration, body_len_max: usize, bodies_len_max: usize });

impl Default for ApiOptions {
    fn default() -> Self {
        Self {
            authorize: allow_all(),
            timeout_max: Duration::from_mins(1),
            heartbeat_max: Duration::from_mins(1),
            feeds_per_name_max: 10_000,
            doc_reads_limit: Duration::from_mins(1),
            body_len_max: 1 << 20,
            bodies_len_max: 64 << 20,
        }
    }
}

impl ApiOptions {
    /// Fails with [`Error::Invalid`] if an option is outside its limits, as [`Api::start`](super::Api::start) does.
    pub fn check(&self) -> Result<()> {
        let invalid = |what, reason| Err(Error::invalid(what, reason));
        if self.heartbeat_max.is_zero() || self.doc_reads_limit.is_zero() || self.feeds_per_name_max == 0 {
            return invalid("heartbeat, time limit of document reads, or feeds per name", "it is zero");
        }
        if self.bodies_len_max < self.body_len_max {
            return invalid("length of bodies", "a single body would not fit");
        }
        Ok(())
    }
}

/// Says who sent a request, and what they may do. A layer with its own accounts implements this trait, or trusts a proxy in front.
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
    /// Returns who sent `request`. Fails with the answer that refuses the request: 401 asks for credentials.
    fn authorize<'a>(&'a self, request: &'a Parts) -> BoxFuture<'a, Result<Caller, Failure>>;

    /// Returns the credentials with which callers log in at `/_session`. Default: none, so nobody can.
    fn credentials(&self) -> Option<&Credentials> {
        None
    }
}

/// Treats everyone who reaches the server as an admin. [`ServerOptions::hosts`](super::ServerOptions::hosts) keeps out web pages that would
/// reach the server through a browser.
#[derive(Debug)]
struct AllowAll;

impl Authorize for AllowAll {
    fn authorize<'a>(&'a self, _: &'a Parts) -> BoxFuture<'a, Result<Caller, Failure>> {
        Box::pin(ready(Ok(Caller::new("", Grant::admin()))))
    }
}

/// Returns an [`Authorize`] that treats everyone who reaches the server as an admin without a name.
pub fn allow_all() -> Arc<dyn Authorize> {
    Arc::new(AllowAll)
}

impl Authorize for Credentials {
    fn authorize<'a>(&'a self, request: &'a Parts) -> BoxFuture<'a, Result<Caller, Failure>> {
        Box::pin(ready(self.check(&request.headers, now_ms())))
    }

    fn credentials(&self) -> Option<&Credentials> {
        Some(self)
    }
}
