//! [`Hosts`] says by which names clients may address a server.
//!
//! Any page can make a browser send requests to any address, even to a server that only the browser's own machine can reach. The
//! browser marks a foreign page by `Origin`. But the owner of a page's host name can point that name to 127.0.0.1. Then the page
//! seems to come from the server itself, and may read its answers (DNS rebinding). Such a page still has to send its own host name
//! in `Host`.
//!
//! This does not protect against programs on the machine, because they can send any header. Use credentials against them.

use std::net::IpAddr;

use axum::http::{HeaderMap, StatusCode, Uri, header, uri::Authority};

use super::Failure;
use crate::base::error::{Error, Result};

/// By which names clients may address a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hosts {
    /// All names. Use this if requests need credentials, or if another server stands in front.
    Any,
    /// Addresses of this machine, `localhost`, and these names or addresses, on any port. Pages from elsewhere are refused. Use
    /// this for an open server on a loopback address. A request without `Host` does not come from a browser, so it may pass.
    Local(Vec<String>),
}

impl Default for Hosts {
    /// Allows this machine only.
    fn default() -> Self {
        Self::Local(Vec::new())
    }
}

impl Hosts {
    /// Fails if a name could never match.
    pub(super) fn check_names(&self) -> Result<()> {
        let Self::Local(names) = self else { return Ok(()) };
        let is_name = |name: &String| {
            let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
            address(name).is_some() || !name.is_empty() && name.bytes().all(is_part)
        };
        match names.iter().find(|name| !is_name(name)) {
            None => Ok(()),
            Some(bad) => {
                let reason =
                    format!("{bad:?} is no name or address alone: leave out scheme, port, path and wildcard");
                Err(Error::invalid("host", reason))
            }
        }
    }

    /// Fails with 400, in CouchDB's words, if the request names another host. Fails with 403 if it comes from a page of another
    /// origin that is not allowed.
    pub(super) fn check(&self, uri: &Uri, headers: &HeaderMap, is_allowed_page: bool) -> Result<(), Failure> {
        let Self::Local(names) = self else { return Ok(()) };
        let hosts = || headers.get_all(header::HOST).iter();
        // No client sends an authority with `@`, and the part before it is not a host.
        let is_right =
            |authority: &Authority| !authority.as_str().contains('@') && is_local(authority.host(), names);
        let asked = hosts().map(|host| host.to_str().ok()?.parse().ok());
        if !asked.chain(uri.authority().cloned().map(Some)).all(|host| host.as_ref().is_some_and(is_right)) {
            return Err(Failure::bad_request("Invalid host header"));
        }
        if is_allowed_page || is_from_here(headers) {
            return Ok(());
        }
        let reason = "A web page from elsewhere may not use this server.";
        Err(Failure::new(StatusCode::FORBIDDEN, "forbidden", reason))
    }
}

/// Marks, in the extensions of a request, that it comes from a page of another origin that may not log in.
#[derive(Debug, Clone, Copy)]
pub(super) struct ForeignPage;

/// Returns whether a request with these headers comes from a page of this server, or from no page.
pub(super) fn is_from_here(headers: &HeaderMap) -> bool {
    let is_same = |origin: &str| {
        let place = origin.split_once("://").map(|(_, place)| place);
        place.is_some_and(|place| {
            let mut hosts = headers.get_all(header::HOST).iter();
            hosts.any(|host| host.as_bytes().eq_ignore_ascii_case(place.as_bytes()))
        })
    };
    // Pages omit `Origin` from some requests, but then the browser says where the page comes from.
    let mut sites = headers.get_all("sec-fetch-site").iter();
    let mut origins = headers.get_all(header::ORIGIN).iter();
    sites.all(|site| site == "same-origin" || site == "none")
        && origins.all(|origin| origin.to_str().is_ok_and(is_same))
}

/// Returns whether `host` stands for this machine, or is one of `names`.
fn is_local(host: &str, names: &[String]) -> bool {
    let asked = address(host);
    asked.is_some_and(|asked| asked.is_loopback())
        || host.eq_ignore_ascii_case("localhost")
        || names
            .iter()
            .any(|name| name.eq_ignore_ascii_case(host) || asked.is_some() && address(name) == asked)
}

/// Parses `host` as an address. IPv6 addresses may have brackets.
fn address(host: &str) -> Option<IpAddr> {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    bare.unwrap_or(host).parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(hosts: &Hosts, uri: &str, lines: &[(header::HeaderName, &str)]) -> u16 {
        let headers = lines.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect();
        hosts
            .check(&uri.parse().unwrap(), &headers, false)
            .map_or_else(|failure| failure.status().as_u16(), |()| 200)
    }

    #[test]
    fn only_names_of_this_machine_are_answered() {
        let hosts = Hosts::Local(["db.example", "2001:db8::1"].map(str::to_owned).to_vec());
        for (host, expected) in [
            ("localhost", 200),
            ("LocalHost:5985", 200),
            ("127.0.0.1:5985", 200),
            ("127.1.2.3", 200),
            ("[::1]:5985", 200),
            ("DB.example:80", 200),
            ("[2001:db8:0::1]:80", 200),
            ("evil.example:5985", 400),
            ("localhost.evil.example", 400),
            ("127.0.0.1.evil.example", 400),
            ("192.168.0.1", 400),
            ("[::2]", 400),
            ("", 400),
            ("a b", 400),
            ("x@localhost", 400),
            ("evil.example@localhost:80", 400),
        ] {
            assert_eq!(status(&hosts, "/", &[(header::HOST, host)]), expected, "{host}");
            assert_eq!(status(&Hosts::Any, "/", &[(header::HOST, host)]), 200);
        }
        assert_eq!(status(&hosts, "/", &[]), 200);
        let two = [(header::HOST, "localhost"), (header::HOST, "evil.example")];
        assert_eq!(status(&hosts, "/", &two), 400);
        assert_eq!(status(&hosts, "http://evil.example/", &two[..1]), 400);
    }

    #[test]
    fn pages_from_elsewhere_are_not_answered() {
        let hosts = Hosts::Local(Vec::new());
        for (origin, expected) in [
            ("http://localhost:5985", 200),
            ("http://LOCALHOST:5985", 200),
            ("http://localhost:3000", 403),
            ("http://127.0.0.1:5985", 403),
            ("https://evil.example", 403),
            ("null", 403),
            ("", 403),
        ] {
            let lines = [(header::HOST, "localhost:5985"), (header::ORIGIN, origin)];
            assert_eq!(status(&hosts, "/", &lines), expected, "{origin}");
            assert_eq!(status(&Hosts::Any, "/", &lines), 200);
        }
        assert_eq!(status(&hosts, "/", &[(header::ORIGIN, "http://localhost")]), 403);
        // Regression: a page from elsewhere could load an image or a script from the server, because such requests have no origin.
        let site = header::HeaderName::from_static("sec-fetch-site");
        for (value, expected) in
            [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)]
        {
            let lines = [(header::HOST, "localhost"), (site.clone(), value)];
            assert_eq!(status(&hosts, "/", &lines), expected, "{value}");
        }
    }
}
