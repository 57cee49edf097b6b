//! The checks of methods, parameters and bodies that the routes of the administration share.

use std::collections::BTreeMap;

use axum::{
    extract::Request,
    http::{Method, StatusCode, header, request::Parts},
};
use serde::{Deserialize, de::DeserializeOwned};

use super::{Caller, Failure, Inner, caller::Permission};
use crate::base::event::DbInstance;

/// How to spread a feed.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ReshardRequest {
    pub shards: u32,
    /// The number of the scheme that routes ids to them; `None` keeps the present one.
    pub scheme: Option<u16>,
}

/// Fails unless the request only reads.
pub(super) fn check_reads(parts: &Parts) -> Result<(), Failure> {
    match parts.method {
        Method::GET | Method::HEAD => Ok(()),
        _ => Err(Failure::method_not_allowed("GET,HEAD")),
    }
}

/// Fails unless an admin's program has sent the request as a POST. A page must not: a browser sends what any page asks for, even to
/// a server that only this machine can reach.
pub(super) fn check_changes(parts: &Parts) -> Result<(), Failure> {
    if parts.method != Method::POST {
        return Err(Failure::method_not_allowed("POST"));
    }
    check_page(parts)?;
    parts.extensions.get::<Caller>().map_or(Ok(()), |caller| caller.check(Permission::Admin))
}

/// Fails if a web page sends the request.
pub(super) fn check_page(parts: &Parts) -> Result<(), Failure> {
    if parts.headers.contains_key(header::ORIGIN) {
        let reason = "Web pages may only read.";
        return Err(Failure::new(StatusCode::FORBIDDEN, "forbidden", reason));
    }
    Ok(())
}

/// The parameters of a request, each of which has to be among `known`, and there once. Names that begin with `_` are allowed:
/// clients add them to bypass caches.
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
                [] => "There are no parameters here.".to_owned(),
                _ => format!("The parameter {key} is none of {}.", known.join(", ")),
            };
            return Err(Failure::bad_request(reason));
        };
        if given.insert(*key, value.into_owned()).is_some() {
            return Err(Failure::bad_request(format!("The parameter {key} is given twice.")));
        }
    }
    Ok(given)
}

/// The parameters of a request that only reads, each of which has to be among `known`.
pub(super) fn reads(
    parts: &Parts,
    known: &[&'static str],
) -> Result<BTreeMap<&'static str, String>, Failure> {
    check_reads(parts)?;
    parameters(parts, known)
}

/// The body of a request to change something, as `example` shows it; the default if it is empty.
pub(super) async fn posted<T: DeserializeOwned + Default>(
    inner: &Inner,
    request: Request,
    example: &str,
) -> Result<T, Failure> {
    let (parts, body) = request.into_parts();
    check_changes(&parts)?;
    parameters(&parts, &[])?;
    let body = inner.body(&parts.headers, body).await?;
    if body.is_empty() {
        return Ok(T::default());
    }
    serde_json::from_slice(&body)
        .map_err(|error| Failure::bad_request(format!("The body has to be as {example}: {error}")))
}

/// Returns the database whose documents the feed has; `None` for `notifications`, the default.
pub(super) fn instance_of(feed: Option<&str>) -> Result<Option<DbInstance>, Failure> {
    match feed {
        None | Some("notifications") => Ok(None),
        Some(instance) => Ok(Some(instance.parse()?)),
    }
}
