//! Which group a request is about.

use axum::{
    http::{StatusCode, request::Parts},
    response::Response,
};
use serde::Serialize;
use serde_json::json;

use crate::{
    front::http::{
        Failure, Inner,
        answer::json as answer,
        manage::{instance_of, reads},
    },
    roles::group::Group,
};

/// How many dead letters, or parked ids, are listed at once.
pub(super) const PAGE_ROWS: usize = 1_000;

/// The group `name` of the feed that is called so.
pub(super) fn find(inner: &Inner, name: &str, feed: Option<&str>) -> Result<Group<()>, Failure> {
    Ok(inner.bus.any_group(instance_of(feed)?, name)?)
}

/// The group `name` of the feed that is called so, which there has to be.
pub(super) async fn find_existing(
    inner: &Inner,
    name: &str,
    feed: Option<&str>,
) -> Result<Group<()>, Failure> {
    let group = find(inner, name, feed)?;
    group.status().await?;
    Ok(group)
}

/// The group `name` of a request for a list, which there has to be, and where the list begins.
pub(super) async fn listed_after(
    inner: &Inner,
    name: &str,
    parts: &Parts,
) -> Result<(Group<()>, Option<String>), Failure> {
    let mut given = reads(parts, &["feed", "after"])?;
    let group = find_existing(inner, name, given.get("feed").map(String::as_str)).await?;
    Ok((group, given.remove("after")))
}

/// A page of a list, and after what the next one begins: `position` tells that of the last element.
pub(super) fn page<'a, T: Serialize, P: Serialize>(
    list: &str,
    page: &'a [T],
    position: impl Fn(&'a T) -> P,
) -> Response {
    let next = page.last().filter(|_| page.len() == PAGE_ROWS).map(position);
    answer(StatusCode::OK, &json!({ list: page, "next": next }))
}
