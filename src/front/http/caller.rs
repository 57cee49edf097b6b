//! [`Caller`] is the sender of a request. [`Grant`] says what a caller may do, and [`OpenFeeds`] counts each caller's long-lived feeds.
//!
//! Roles are words, as in CouchDB. The server's own roles begin with an underscore; only a layer knows the meaning of the others.

use std::{
    collections::HashMap,
    fmt,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::http::StatusCode;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::Failure;
use crate::base::{
    error::{Error, Result},
    event::DbName,
};

/// The permission that a route requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Permission {
    /// The caller must be known. The route itself decides what the caller may see.
    Known,
    /// The caller may see which databases exist, and what happens to them.
    Updates,
    /// The caller may record events.
    Record,
    /// The caller may see the state of the node and the bus.
    Metrics,
    /// The caller may change the bus.
    Admin,
}

impl Permission {
    /// Returns the role that grants this permission, or `None` if only admins, or all callers, have it.
    fn role(self) -> Option<&'static str> {
        match self {
            Self::Known | Self::Admin => None,
            Self::Updates => Some("_db_updates"),
            Self::Record => Some("_events"),
            Self::Metrics => Some("_metrics"),
        }
    }
}

const ADMIN: &str = "_admin";

const ROLES: [&str; 4] = [ADMIN, "_db_updates", "_events", "_metrics"];

/// What a caller may do. A line of credentials may end with a grant.
///
/// ```
/// use notibus::http::Grant;
///
/// let grant: Grant = "roles=_db_updates,sales reads=shop/*,logs".parse()?;
/// assert_eq!(grant.roles, ["_db_updates", "sales"]);
/// assert_eq!(grant.to_string().parse::<Grant>()?, grant);
/// assert!("roles=_amdin".parse::<Grant>().is_err());
/// # Ok::<(), notibus::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Grant {
    /// The roles: `_admin` may do everything; `_db_updates` may see which databases exist and what happens to them; `_events` may record
    /// events; `_metrics` may see the state of the node and the bus. A layer may have roles of its own.
    pub roles: Vec<String>,
    /// The databases whose changes the caller may read, unless a layer decides otherwise: names, or prefixes of names followed by `*`.
    pub reads: Vec<String>,
}

impl Grant {
    /// Returns the grant of an admin.
    pub fn admin() -> Self {
        Self { roles: vec![ADMIN.to_owned()], reads: Vec::new() }
    }

    /// Fails with [`Error::Invalid`] if a word cannot be part of a line, or if a role begins with an underscore but is not one of the
    /// server's.
    pub fn check(&self) -> Result<()> {
        let bad = |word: &str, reason: &str| Err(Error::invalid("grant", format!("{word:?} {reason}")));
        for word in self.roles.iter().chain(&self.reads) {
            if word.is_empty() || word.contains([',', ' ', '\t', '\n', '\r']) {
                return bad(word, "is empty, or has a comma or a space");
            }
        }
        for role in &self.roles {
            if role.starts_with('_') && !ROLES.contains(&role.as_str()) {
                return bad(role, &format!("is not one of the roles {}", ROLES.join(", ")));
            }
        }
        match self.reads.iter().find(|name| name.strip_suffix('*').unwrap_or(name).contains('*')) {
            Some(name) => bad(name, "has a * that is not at its end"),
            None => Ok(()),
        }
    }

    fn has(&self, role: &str) -> bool {
        self.roles.iter().any(|known| known == role)
    }
}

impl fmt::Display for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut space = "";
        for (key, words) in [("roles", &self.roles), ("reads", &self.reads)] {
            if !words.is_empty() {
                write!(f, "{space}{key}={}", words.join(","))?;
                space = " ";
            }
        }
        Ok(())
    }
}

impl FromStr for Grant {
    type Err = Error;

    /// Reads `roles=a,b reads=c,d`. Each part may appear at most once.
    fn from_str(text: &str) -> Result<Self> {
        let mut grant = Self::default();
        for part in text.split_whitespace() {
            let (key, words) = part.split_once('=').unwrap_or((part, ""));
            let place = match key {
                "roles" if grant.roles.is_empty() => &mut grant.roles,
                "reads" if grant.reads.is_empty() => &mut grant.reads,
                _ => {
                    let reason = format!("{part:?} is neither roles=… nor reads=…, or is given twice");
                    return Err(Error::invalid("grant", reason));
                }
            };
            *place = words.split(',').map(str::to_owned).collect();
        }
        grant.check()?;
        Ok(grant)
    }
}

/// The sender of a request. Each admitted request has its caller among its extensions.
#[derive(Debug, Clone)]
pub struct Caller {
    name: Arc<str>,
    grant: Arc<Grant>,
    /// A channel that is closed once the caller is no longer known.
    valid: Option<watch::Receiver<()>>,
}

impl Caller {
    /// Creates a caller with this name and this grant. The name is empty if the caller has none.
    pub fn new(name: impl Into<Arc<str>>, grant: impl Into<Arc<Grant>>) -> Self {
        Self { name: name.into(), grant: grant.into(), valid: None }
    }

    /// Ends the feeds of the caller once the sender of `valid` is dropped.
    #[must_use]
    pub fn valid_while(self, valid: watch::Receiver<()>) -> Self {
        Self { valid: Some(valid), ..self }
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the roles: those of the server, and those that only a layer knows.
    pub fn roles(&self) -> &[String] {
        &self.grant.roles
    }

    /// Returns whether the caller may do everything.
    pub fn is_admin(&self) -> bool {
        self.grant.has(ADMIN)
    }

    /// Returns whether the grant alone allows the caller to read the changes of the database `name`.
    pub fn may_read(&self, name: &DbName) -> bool {
        let is_meant = |pattern: &String| match pattern.strip_suffix('*') {
            Some(prefix) => name.as_str().starts_with(prefix),
            None => name.as_str() == pattern,
        };
        self.is_admin() || self.grant.reads.iter().any(is_meant)
    }

    /// Returns whether the caller is no longer known.
    pub(super) fn is_gone(&self) -> bool {
        self.valid.as_ref().is_some_and(|valid| valid.has_changed().is_err())
    }

    /// Completes once the caller is no longer known.
    pub(super) async fn gone(&mut self) {
        match &mut self.valid {
            Some(valid) => while valid.changed().await.is_ok() {},
            None => std::future::pending().await,
        }
    }

    /// Fails with CouchDB's messages unless the caller has this permission.
    pub(super) fn check(&self, permission: Permission) -> Result<(), Failure> {
        let has =
            permission == Permission::Known || permission.role().is_some_and(|role| self.grant.has(role));
        if has || self.is_admin() {
            return Ok(());
        }
        Err(match permission {
            Permission::Record => {
                Failure::new(StatusCode::FORBIDDEN, "forbidden", "You are not allowed to record events.")
            }
            Permission::Updates => Failure::unauthorized("You need the role `_db_updates`."),
            Permission::Metrics => Failure::unauthorized("You need the role `_metrics`."),
            Permission::Known | Permission::Admin => Failure::unauthorized("You are not a server admin."),
        })
    }
}

/// What each name has open: the number of its long-lived feeds, or the length of their globs.
#[derive(Debug, Default)]
pub(super) struct OpenFeeds(Mutex<HashMap<Arc<str>, Arc<AtomicUsize>>>);

/// A feed's share of its caller's limit. Dropping the permit frees the share.
#[derive(Debug)]
pub(super) struct FeedPermit {
    open: Arc<AtomicUsize>,
    share: usize,
}

impl OpenFeeds {
    /// Reserves the `share` of a feed for `name`, which may have at most `most` of `what` open. Fails with 429 if too little is left.
    pub fn enter(&self, name: &str, share: usize, most: usize, what: &str) -> Result<FeedPermit, Failure> {
        let mut names = self.0.lock();
        names.retain(|_, open| open.load(Ordering::Relaxed) > 0);
        let open = Arc::clone(names.entry(name.into()).or_default());
        let count = open.load(Ordering::Relaxed);
        if count + share > most {
            let reason = format!("You have {count} open {what}, and may have {most}.");
            return Err(Failure::new(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", reason));
        }
        open.fetch_add(share, Ordering::Relaxed);
        Ok(FeedPermit { open, share })
    }

    /// Returns the sum over all names.
    pub fn count(&self) -> usize {
        self.0.lock().values().map(|open| open.load(Ordering::Relaxed)).sum()
    }
}

impl Drop for FeedPermit {
    fn drop(&mut self) {
        self.open.fetch_sub(self.share, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(grant: &str) -> Caller {
        Caller::new("a", grant.parse::<Grant>().unwrap())
    }

    #[test]
    fn databases_are_named_or_begin_so() {
        for (grant, expected) in [
            ("roles=_admin", [true, true, true]),
            ("reads=shop/a", [true, false, false]),
            ("reads=shop/*", [true, true, false]),
            ("reads=logs,shop/b", [false, true, true]),
            ("reads=*", [true, true, true]),
            ("roles=_db_updates", [false, false, false]),
        ] {
            let reads =
                ["shop/a", "shop/b", "logs"].map(|name| caller(grant).may_read(&DbName::new(name).unwrap()));
            assert_eq!(reads, expected, "{grant}");
        }
    }

    #[test]
    fn bad_grants_are_refused() {
        for bad in [
            "roles",
            "roles=",
            "roles=a,,b",
            "roles=_b",
            "roles=a roles=b",
            "reads=a*b",
            "reads=a**",
            "writes=a",
        ] {
            assert!(bad.parse::<Grant>().is_err(), "{bad}");
        }
    }
}
