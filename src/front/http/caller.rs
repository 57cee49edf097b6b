//! [`Caller`]: who has asked; [`Grant`]: what they may do.
//!
//! A line of credentials ends with its grant, and without one it is that of an admin:
//!
//! ```text
//! anna:$argon2id$v=19$m=19456,t=2,p=1$…
//! bearer:indexer:sha256:… roles=_db_updates reads=shop/*,logs
//! bearer:scraper:sha256:… roles=_metrics
//! ```
//!
//! Roles are words, as in CouchDB. Those of the server begin with an underscore; what others mean only a layer knows.

use std::{fmt, str::FromStr, sync::Arc};

use axum::http::StatusCode;

use super::Failure;
use crate::base::{
    error::{Error, Result},
    event::DbName,
};

/// What a route needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Right {
    /// Credentials. What of it the caller may see follows from what is asked.
    Known,
    /// To read which databases there are, and what happens to them.
    Updates,
    /// To record events.
    Record,
    /// To see how the node and the bus are.
    Metrics,
    /// To change how the bus is.
    Admin,
}

impl Right {
    /// The role that has it; none but admins where there is none.
    fn role(self) -> Option<&'static str> {
        match self {
            Self::Known | Self::Admin => None,
            Self::Updates => Some("_db_updates"),
            Self::Record => Some("_events"),
            Self::Metrics => Some("_metrics"),
        }
    }
}

/// The role of those who may do everything.
const ADMIN: &str = "_admin";

/// All roles of the server.
const ROLES: [&str; 4] = [ADMIN, "_db_updates", "_events", "_metrics"];

/// What somebody may do: what stands behind a line of credentials.
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
    /// `_admin`: everything; `_db_updates`: which databases there are and what happens to them; `_events`: to record;
    /// `_metrics`: how the node and the bus are; and words of a layer's own.
    pub roles: Vec<String>,
    /// The databases whose changes may be read, unless a layer knows better: names, or what names begin with, with a `*` behind it.
    pub reads: Vec<String>,
}

impl Grant {
    /// That of an admin.
    pub fn admin() -> Self {
        Self { roles: vec![ADMIN.to_owned()], reads: Vec::new() }
    }

    /// Fails with [`Error::Invalid`] if a word could not stand in a line, or is no role of the server although it looks like one.
    pub fn check(&self) -> Result<()> {
        let is_word = |word: &String| !word.is_empty() && !word.contains([',', ' ', '\t', '\n', '\r']);
        if let Some(bad) = self.roles.iter().chain(&self.reads).find(|word| !is_word(word)) {
            return Err(Error::invalid("grant", format!("{bad:?} is empty, or has a comma or a space")));
        }
        if let Some(bad) =
            self.roles.iter().find(|role| role.starts_with('_') && !ROLES.contains(&role.as_str()))
        {
            return Err(Error::invalid(
                "grant",
                format!("{bad:?} is none of the roles {}", ROLES.join(", ")),
            ));
        }
        match self.reads.iter().find(|name| name.trim_end_matches('*').contains('*') || name.ends_with("**"))
        {
            Some(bad) => Err(Error::invalid("grant", format!("{bad:?} has a * that is not at its end"))),
            None => Ok(()),
        }
    }

    /// Whether there is this role.
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

    /// Reads `roles=a,b reads=c,d`, each of them once at most.
    fn from_str(text: &str) -> Result<Self> {
        let mut grant = Self::default();
        for part in text.split_whitespace() {
            let bad = || {
                Error::invalid(
                    "grant",
                    format!("{part:?} is neither roles=… nor reads=…, or stands there twice"),
                )
            };
            let (key, words) = part.split_once('=').ok_or_else(bad)?;
            let place = match key {
                "roles" => &mut grant.roles,
                "reads" => &mut grant.reads,
                _ => return Err(bad()),
            };
            if !place.is_empty() {
                return Err(bad());
            }
            *place = words.split(',').map(str::to_owned).collect();
        }
        grant.check()?;
        Ok(grant)
    }
}

/// Who has asked, by the credentials of the request. It is an extension of requests that were let through.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// The name.
    name: Arc<str>,
    /// What it may do.
    grant: Arc<Grant>,
}

impl Caller {
    /// Who has this name.
    pub fn new(name: impl Into<Arc<str>>, grant: impl Into<Arc<Grant>>) -> Self {
        Self { name: name.into(), grant: grant.into() }
    }

    /// The name; that of a token without one is `bearer`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The roles, those of the server and those that only a layer knows.
    pub fn roles(&self) -> &[String] {
        &self.grant.roles
    }

    /// Whether it may do everything.
    pub fn is_admin(&self) -> bool {
        self.grant.has(ADMIN)
    }

    /// Whether it may read the changes of the database `name`, by its grant alone.
    pub fn may_read(&self, name: &DbName) -> bool {
        let is_meant = |pattern: &String| match pattern.strip_suffix('*') {
            Some(prefix) => name.as_str().starts_with(prefix),
            None => name.as_str() == pattern,
        };
        self.is_admin() || self.grant.reads.iter().any(is_meant)
    }

    /// The name, for those who count by it.
    pub(super) fn shared_name(&self) -> Arc<str> {
        Arc::clone(&self.name)
    }

    /// Fails with 401, in CouchDB's words, if it has no such right.
    pub(super) fn check(&self, right: Right) -> Result<(), Failure> {
        let has = right == Right::Known || right.role().is_some_and(|role| self.grant.has(role));
        if has || self.is_admin() {
            return Ok(());
        }
        Err(match right {
            Right::Record => {
                Failure::new(StatusCode::FORBIDDEN, "forbidden", "You are not allowed to record events.")
            }
            _ => Failure::unauthorized("You are not a server admin."),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(grant: &str) -> Caller {
        Caller::new("a", grant.parse::<Grant>().unwrap())
    }

    #[test]
    fn rights_are_those_of_the_roles() {
        let all = [Right::Known, Right::Updates, Right::Record, Right::Metrics, Right::Admin];
        for (grant, expected) in [
            ("roles=_admin", [true; 5]),
            ("roles=_db_updates,_metrics", [true, true, false, true, false]),
            ("roles=_events", [true, false, true, false, false]),
            ("roles=sales", [true, false, false, false, false]),
            ("reads=a", [true, false, false, false, false]),
        ] {
            assert_eq!(all.map(|right| caller(grant).check(right).is_ok()), expected, "{grant}");
        }
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
