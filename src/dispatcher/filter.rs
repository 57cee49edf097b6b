//! [`Filter`]: which databases, and which kinds of events, a subscriber wants.

use std::{collections::BTreeSet, fmt, sync::Arc};

use globset::{GlobBuilder, GlobMatcher};

use crate::{
    error::{Error, Result},
    event::{DbName, Kinds},
    notification::Notification,
};

/// Which databases, and which kinds of events, a subscriber wants.
///
/// ```
/// use notibus::{EventKind, Filter};
///
/// let one = Filter::name("orders")?;
/// let replicators = Filter::glob("{_replicator,*/_replicator}")?;
/// let builds = Filter::all().kinds(EventKind::DdocUpdated.into())?;
/// assert!(Filter::glob("a[").is_err());
/// # Ok::<(), notibus::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Filter {
    /// Which databases.
    pub(super) names: Names,
    /// Which kinds of events.
    kinds: Kinds,
}

/// A subscriber's own test of a row.
type Predicate = dyn Fn(&Notification) -> bool + Send + Sync;

/// Which databases a subscriber wants.
#[derive(Clone)]
pub(super) enum Names {
    /// Every one.
    All,
    /// These.
    Exact(BTreeSet<DbName>),
    /// Those that start so.
    Prefix(String),
    /// Those that end so.
    Suffix(String),
    /// Those that look so.
    Glob(Box<GlobMatcher>),
    /// Those that pass.
    Predicate(Arc<Predicate>),
}

impl Filter {
    /// A filter by names, for all kinds.
    fn of(names: Names) -> Self {
        Self { names, kinds: Kinds::ALL }
    }

    /// Every database.
    pub fn all() -> Self {
        Self::of(Names::All)
    }

    /// The database `name`.
    pub fn name(name: &str) -> Result<Self> {
        Ok(Self::of(Names::Exact([DbName::new(name)?].into())))
    }

    /// The databases `names`; at least one.
    pub fn names(names: impl IntoIterator<Item = DbName>) -> Result<Self> {
        let names: BTreeSet<_> = names.into_iter().collect();
        if names.is_empty() {
            return Err(Error::invalid("filter", "it has no name, so it would never match"));
        }
        Ok(Self::of(Names::Exact(names)))
    }

    /// Databases whose name starts with `prefix`.
    pub fn prefix(prefix: impl Into<String>) -> Self {
        Self::of(Names::Prefix(prefix.into()))
    }

    /// Databases whose name ends with `suffix`, such as `/_replicator`.
    pub fn suffix(suffix: impl Into<String>) -> Self {
        Self::of(Names::Suffix(suffix.into()))
    }

    /// Databases whose name matches the glob `pattern`: `?` is any character, `*` any number of them (`/` included),
    /// `[ab]` one of these, `{a,b}` either.
    pub fn glob(pattern: &str) -> Result<Self> {
        let glob = GlobBuilder::new(pattern)
            .literal_separator(false)
            .build()
            .map_err(|error| Error::invalid("glob", error.to_string()))?;
        Ok(Self::of(Names::Glob(Box::new(glob.compile_matcher()))))
    }

    /// Rows for which `predicate` is true. It runs for every row of the feed, so it should be quick; it must not block.
    pub fn predicate(predicate: impl Fn(&Notification) -> bool + Send + Sync + 'static) -> Self {
        Self::of(Names::Predicate(Arc::new(predicate)))
    }

    /// Only these kinds of events; at least one.
    pub fn kinds(self, kinds: Kinds) -> Result<Self> {
        if kinds.is_empty() {
            return Err(Error::invalid("filter", "it has no kind, so it would never match"));
        }
        Ok(Self { kinds, ..self })
    }

    /// Whether a row matches.
    pub(super) fn matches(&self, row: &Notification) -> bool {
        let name = row.name.as_str();
        match &self.names {
            Names::All => true,
            Names::Exact(names) => names.contains(name),
            Names::Prefix(prefix) => name.starts_with(prefix),
            Names::Suffix(suffix) => name.ends_with(suffix),
            Names::Glob(glob) => glob.is_match(name),
            Names::Predicate(predicate) => predicate(row),
        }
    }

    /// Whether `kinds` has one that is wanted.
    pub(super) fn wants(&self, kinds: Kinds) -> bool {
        self.kinds == Kinds::ALL || self.kinds.intersects(kinds)
    }
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("All"),
            Self::Exact(names) => f.debug_tuple("Exact").field(names).finish(),
            Self::Prefix(prefix) => f.debug_tuple("Prefix").field(prefix).finish(),
            Self::Suffix(suffix) => f.debug_tuple("Suffix").field(suffix).finish(),
            Self::Glob(glob) => f.debug_tuple("Glob").field(&glob.glob().glob()).finish(),
            Self::Predicate(_) => f.write_str("Predicate"),
        }
    }
}
