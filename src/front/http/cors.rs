//! [`Cors`] says which pages of other origins may use a server through a browser. It has CouchDB's options.

use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};

use crate::base::error::{Error, Result};

/// The headers that pages may read from an answer.
const EXPOSED: &str =
    "content-type, cache-control, accept-ranges, etag, server, x-couch-request-id, retry-after";

/// Which pages of other origins may use a server through a browser, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cors {
    /// The origins, for example `https://app.example`; `*` stands for all.
    pub origins: Vec<String>,
    /// Whether browsers may send credentials. This is not allowed with `*`. Default: no.
    pub credentials: bool,
    /// The methods that pages may use. Default: GET, HEAD, POST and DELETE.
    pub methods: Vec<Method>,
    /// The headers that pages may send. Default: those that CouchDB allows, and a few for caches and feeds.
    pub headers: Vec<HeaderName>,
    /// How long a browser may remember the answer. Default: 10 min.
    pub max_age: Duration,
}

impl Default for Cors {
    /// Allows no origin.
    fn default() -> Self {
        let names = [
            "accept",
            "accept-language",
            "authorization",
            "cache-control",
            "content-length",
            "content-range",
            "content-type",
            "destination",
            "expires",
            "if-match",
            "if-none-match",
            "last-event-id",
            "last-modified",
            "origin",
            "pragma",
            "x-couch-full-commit",
            "x-couch-id",
            "x-couch-persist",
            "x-couch-request-id",
            "x-couchdb-vhost-path",
            "x-couchdb-www-authenticate",
            "x-http-method-override",
            "x-requested-with",
        ];
        Self {
            origins: Vec::new(),
            credentials: false,
            methods: vec![Method::GET, Method::HEAD, Method::POST, Method::DELETE],
            headers: names.map(HeaderName::from_static).to_vec(),
            max_age: Duration::from_mins(10),
        }
    }
}

/// The answer to a request of a page that is allowed.
#[derive(Debug)]
pub(super) struct Allowed {
    headers: Vec<(HeaderName, HeaderValue)>,
    /// Whether this is the preflight request of the browser.
    pub is_preflight: bool,
}

impl Cors {
    /// Fails if an origin could never match, or if every web page could use the credentials of the users who visit it.
    pub(super) fn check(&self) -> Result<()> {
        let is_origin = |origin: &String| {
            let place = origin.split_once("://").map(|(_, place)| place);
            origin == "*" || place.is_some_and(|place| !place.is_empty() && !place.contains(['/', '*', ' ']))
        };
        if let Some(bad) = self.origins.iter().find(|origin| !is_origin(origin)) {
            let reason = format!("{bad:?} is no origin as https://app.example, without a path, and not *");
            return Err(Error::invalid("origin", reason));
        }
        if self.credentials && self.origins.iter().any(|origin| origin == "*") {
            return Err(Error::invalid("origin", "* does not go with credentials: name the origins"));
        }
        Ok(())
    }

    /// Returns what a page may do that sends a request with this method and these headers. Returns `None` if the request comes from
    /// no other origin, or from an origin that is not allowed.
    pub(super) fn asked(&self, method: &Method, headers: &HeaderMap) -> Option<Allowed> {
        let mut origins = headers.get_all(header::ORIGIN).iter();
        let (Some(origin), None) = (origins.next(), origins.next()) else { return None };
        let is_all = self.origins.iter().any(|known| known == "*");
        let is_known =
            || self.origins.iter().any(|known| origin.as_bytes().eq_ignore_ascii_case(known.as_bytes()));
        if !is_all && !is_known() {
            return None;
        }
        let value = |text: &str| HeaderValue::from_str(text).expect("methods, names and numbers are visible");
        let is_preflight =
            *method == Method::OPTIONS && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
        let allowed_origin = if is_all { HeaderValue::from_static("*") } else { origin.clone() };
        let mut allowed = vec![(header::ACCESS_CONTROL_ALLOW_ORIGIN, allowed_origin)];
        if self.credentials {
            allowed.push((header::ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true")));
        }
        if is_preflight {
            let methods: Vec<_> = self.methods.iter().map(Method::as_str).collect();
            let names: Vec<_> = self.headers.iter().map(HeaderName::as_str).collect();
            allowed.extend([
                (header::ACCESS_CONTROL_ALLOW_METHODS, value(&methods.join(", "))),
                (header::ACCESS_CONTROL_ALLOW_HEADERS, value(&names.join(", "))),
                (header::ACCESS_CONTROL_MAX_AGE, self.max_age.as_secs().into()),
            ]);
        } else {
            allowed.push((header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED)));
        }
        Some(Allowed { headers: allowed, is_preflight })
    }
}

impl Allowed {
    /// Adds the headers to those of the answer.
    pub fn allow(self, headers: &mut HeaderMap) {
        for (name, value) in self.headers {
            headers.append(name, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_that_could_never_match_are_refused() {
        let check = |origin: &str, credentials| {
            Cors { origins: vec![origin.to_owned()], credentials, ..Cors::default() }.check()
        };
        assert!(check("https://app.example:8080", true).is_ok() && check("*", false).is_ok());
        for (bad, credentials) in [
            ("app.example", false),
            ("https://app.example/", false),
            ("https://*.example", false),
            ("https://", false),
            ("*", true),
        ] {
            assert!(check(bad, credentials).is_err(), "{bad}");
        }
    }
}
