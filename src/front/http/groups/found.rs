//! Which group a request is about.

use axum::http::request::Parts;

use crate::{
    front::http::{
        Failure, Inner,
        manage::{check_reads, instance_of, parameters},
    },
    roles::group::Group,
};

/// How many dead letters, or parked ids, are listed at once.
pub(super) const PAGE_ROWS: usize = 1_000;

/// The group `name` of the feed that is called so.
pub(super) fn find(inner: &Inner, name: &str, feed: Option<&str>) -> Result<Group<()>, Failure> {
    Ok(inner.bus.any_group(instance_of(feed)?, name)?)
}

/// The group `name` of a request to look at it, which there has to be, and where to begin.
pub(super) async fn looked_at(
    inner: &Inner,
    name: &str,
    parts: &Parts,
) -> Result<(Group<()>, Option<String>), Failure> {
    check_reads(parts)?;
    let mut given = parameters(parts, &["feed", "after"])?;
    let group = find(inner, name, given.get("feed").map(String::as_str))?;
    group.status().await?;
    Ok((group, given.remove("after")))
}
