//! [`Filter`]: which databases, and which kinds of events, a subscriber wants.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use smallvec::SmallVec;

use crate::base::{
    cursor::Cursor,
    error::{Error, Result},
    event::{DbName, DdocId, EventKind, Kinds},
    glob::{GLOB_LEN_MAX, GlobSet, check_glob_len},
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
/// let auth = builds.clone().ddocs(["_design/auth".parse()?])?;
/// let both = Filter::any([one, replicators])?;
/// assert!(Filter::glob("a[").is_err());
/// # Ok::<(), notibus::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Filter {
    pub(crate) names: Names,
    kinds: Kinds,
    /// The wanted design documents; `None` for all.
    pub(crate) ddocs: Option<Arc<BTreeSet<DdocId>>>,
}

/// Writes a human-readable description of what the filter lets through.
impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.names {
            Names::All => f.write_str("all names")?,
            Names::One(name) => write!(f, "{name}")?,
            Names::Exact(names) => list(f, names.iter())?,
            Names::Affix(Atom { by: MatchedBy::Suffix, text }) => write!(f, "*{text}")?,
            Names::Affix(atom) => write!(f, "{}*", atom.text)?,
            Names::Glob(glob) => f.write_str(&glob.pattern)?,
            Names::Predicate(_) => f.write_str("names that a function wants")?,
            Names::Any(set) => list(f, set.filters.iter())?,
        }
        if self.kinds != Kinds::ALL {
            f.write_str(": ")?;
            list(f, self.kinds.iter())?;
        }
        if let Some(ddocs) = &self.ddocs {
            f.write_str(" of ")?;
            list(f, ddocs.iter())?;
        }
        Ok(())
    }
}

fn list<T: fmt::Display>(f: &mut fmt::Formatter<'_>, items: impl Iterator<Item = T>) -> fmt::Result {
    for (place, item) in items.enumerate() {
        write!(f, "{}{item}", if place == 0 { "" } else { ", " })?;
    }
    Ok(())
}

/// One part of a pattern: a text, and how names must match it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Atom {
    pub by: MatchedBy,
    /// A name, the beginning or end of names, or a valid glob.
    pub text: Arc<str>,
}

impl Atom {
    fn exact(name: &DbName) -> Self {
        Self { by: MatchedBy::Exact, text: name.shared() }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum MatchedBy {
    Exact,
    Prefix,
    Suffix,
    Glob,
}

/// The key of a pattern. Subscribers with equal keys share a pattern.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PatternKey {
    /// The pattern matches a name if one of these atoms does, or if there are no atoms. The atoms are sorted and distinct.
    pub atoms: SmallVec<[Atom; 1]>,
    pub kinds: Kinds,
}

/// A compiled glob.
pub(crate) struct GlobMatcher {
    pattern: Box<str>,
    compiled: GlobSet,
}

impl GlobMatcher {
    /// Compiles `pattern`, with the syntax and the limits of [`Filter::glob`].
    pub fn new(pattern: &str) -> Result<Self> {
        Ok(Self { pattern: pattern.into(), compiled: GlobSet::new([pattern])? })
    }

    pub fn is_match(&self, name: &str) -> bool {
        !self.compiled.matching(name).is_empty()
    }
}

/// The tags of encoded filters. The hashes of filters are stored, so the tags never change.
mod tag {
    pub const ALL: u8 = 0;
    pub const EXACT: u8 = 1;
    pub const PREFIX: u8 = 2;
    pub const SUFFIX: u8 = 3;
    pub const GLOB: u8 = 4;
    pub const PREDICATE: u8 = 5;
    pub const ANY: u8 = 6;
}

fn encode_len(bytes: &mut Vec<u8>, len: usize) {
    bytes.extend_from_slice(&(len as u32).to_be_bytes());
}

fn encode_text(bytes: &mut Vec<u8>, text: &str) {
    encode_len(bytes, text.len());
    bytes.extend_from_slice(text.as_bytes());
}

fn encode_texts<'a>(bytes: &mut Vec<u8>, texts: impl ExactSizeIterator<Item = &'a str>) {
    encode_len(bytes, texts.len());
    for text in texts {
        encode_text(bytes, text);
    }
}

type Predicate = dyn Fn(&Notification) -> bool + Send + Sync;

#[derive(Clone)]
pub(crate) enum Names {
    All,
    /// One name, without an allocation of its own, because there are many such filters.
    One(DbName),
    Exact(Arc<[DbName]>),
    Affix(Atom),
    Glob(Arc<GlobMatcher>),
    Predicate(Arc<Predicate>),
    Any(Arc<Set>),
}

/// A set of filters. Filters for exact names are looked up by name, so that only the filters that may want a row are checked for it.
pub(crate) struct Set {
    filters: Arc<[Filter]>,
    places: BTreeMap<DbName, Vec<usize>>,
    others: Vec<usize>,
    /// All names, if all filters are for exact names.
    exact: Option<Arc<[DbName]>>,
}

impl Set {
    fn new(filters: Arc<[Filter]>) -> Self {
        let mut places: BTreeMap<DbName, Vec<usize>> = BTreeMap::new();
        let mut others = Vec::new();
        for (place, filter) in filters.iter().enumerate() {
            let Some(exact) = filter.exact() else {
                others.push(place);
                continue;
            };
            for name in exact {
                places.entry(name.clone()).or_default().push(place);
            }
        }
        let exact = others.is_empty().then(|| places.keys().cloned().collect());
        Self { filters, places, others, exact }
    }

    /// Returns the indices of the filters that want news of one of `kinds` in a row.
    pub fn wanting_of(&self, kinds: Kinds, row: &Notification, since: &Cursor) -> Vec<usize> {
        let wants = |place: &usize| self.filters[*place].wanted_news(row, since).intersects(kinds);
        let mut places: Vec<_> = self.wanting(row, since).filter(wants).collect();
        places.sort_unstable();
        places
    }

    /// Returns the indices of the filters that want news in a row, for a subscriber that knows everything up to `since`.
    pub fn wanting(&self, row: &Notification, since: &Cursor) -> impl Iterator<Item = usize> {
        let named = self.places.get(row.name.as_str()).map_or(&[][..], Vec::as_slice);
        named.iter().chain(&self.others).copied().filter(move |&place| self.filters[place].passes(row, since))
    }
}

impl Filter {
    /// The maximum length of a glob, in bytes.
    pub const GLOB_LEN_MAX: usize = GLOB_LEN_MAX;

    fn of(names: Names) -> Self {
        Self { names, kinds: Kinds::ALL, ddocs: None }
    }

    /// Wants every database.
    pub fn all() -> Self {
        Self::of(Names::All)
    }

    /// Wants the database `name`.
    pub fn name(name: &str) -> Result<Self> {
        Ok(Self::of(Names::One(DbName::new(name)?)))
    }

    /// Wants the databases in `names`, which must not be empty.
    pub fn names(names: impl IntoIterator<Item = DbName>) -> Result<Self> {
        let names: BTreeSet<_> = names.into_iter().collect();
        if names.is_empty() {
            return Err(Error::invalid("filter", "it has no name, so it would never match"));
        }
        let names: Arc<[_]> = names.into_iter().collect();
        Ok(Self::of(if let [name] = &*names { Names::One(name.clone()) } else { Names::Exact(names) }))
    }

    /// Wants databases whose names start with `prefix`.
    pub fn prefix(prefix: impl Into<String>) -> Self {
        Self::of(Names::Affix(Atom { by: MatchedBy::Prefix, text: prefix.into().into() }))
    }

    /// Wants databases whose names end with `suffix`, such as `/_replicator`.
    pub fn suffix(suffix: impl Into<String>) -> Self {
        Self::of(Names::Affix(Atom { by: MatchedBy::Suffix, text: suffix.into().into() }))
    }

    /// Wants databases whose names match the glob `pattern`: `?` is any byte, `*` any number of bytes (`/` included), `[ab]` one of the
    /// bytes in brackets, `{a,b}` one of the alternatives. Names are compared byte by byte, and a character that is not ASCII has several.
    ///
    /// Fails with [`Error::Invalid`] if the pattern is malformed, too large to be compiled, or longer than 1,024 bytes.
    pub fn glob(pattern: &str) -> Result<Self> {
        let is_text = |text: &&str| !text.contains(['*', '?', '[', ']', '{', '}', '\\']);
        // Check the length even of globs that need no matcher.
        check_glob_len(pattern)?;
        if pattern == "*" {
            return Ok(Self::all());
        }
        // Turn simple globs into filters that need no matcher to find their subscribers.
        if let Some(prefix) = pattern.strip_suffix('*').filter(is_text) {
            return Ok(Self::prefix(prefix));
        }
        if let Some(suffix) = pattern.strip_prefix('*').filter(is_text) {
            return Ok(Self::suffix(suffix));
        }
        if let Some(name) = Some(pattern).filter(is_text).and_then(|name| DbName::new(name).ok()) {
            return Ok(Self::of(Names::One(name)));
        }
        Ok(Self::of(Names::Glob(Arc::new(GlobMatcher::new(pattern)?))))
    }

    /// Wants rows for which `predicate` is true. The predicate runs for every row of the feed, so it should be fast; it must not block.
    pub fn predicate(predicate: impl Fn(&Notification) -> bool + Send + Sync + 'static) -> Self {
        Self::of(Names::Predicate(Arc::new(predicate)))
    }

    /// Wants the databases that any of `filters` wants. There must be at least one filter. Unless one of them is a predicate or wants
    /// everything, an event of a database that none of them matches costs nothing, however many filters there are. A database that several
    /// filters want is delivered once, and [`Delivery::wanted_by`](crate::Delivery::wanted_by) names the filters.
    ///
    /// Fails with [`Error::Invalid`] if there is no filter, or if one of them names design documents: name them for the whole set.
    pub fn any(filters: impl IntoIterator<Item = Self>) -> Result<Self> {
        let filters: Arc<[_]> = filters.into_iter().collect();
        if filters.is_empty() {
            return Err(Error::invalid("filter", "the set is empty, so it would never match"));
        }
        if filters.iter().any(|filter| filter.ddocs.is_some()) {
            let reason = "a filter in the set names design documents; name them for the whole set";
            return Err(Error::invalid("filter", reason));
        }
        Ok(Self::of(Names::Any(Arc::new(Set::new(filters)))))
    }

    /// Returns the length of the glob, if the filter compares names with one. No other comparison costs as much.
    #[cfg(feature = "http")]
    pub(crate) fn glob_len(&self) -> Option<usize> {
        if let Names::Glob(glob) = &self.names { Some(glob.pattern.len()) } else { None }
    }

    /// Restricts the filter to rows with news of one of `kinds`, which must not be empty. The news still has all kinds that happened.
    pub fn kinds(self, kinds: Kinds) -> Result<Self> {
        if kinds.is_empty() {
            return Err(Error::invalid("filter", "it has no kind, so it would never match"));
        }
        Ok(Self { kinds, ..self }).and_then(Self::checked)
    }

    /// Restricts the filter to design documents with these `ids`, which must not be empty. The filter wants other kinds of events as
    /// before. A change recorded without the id of its design document may concern any of them, so it is delivered.
    ///
    /// Each delivery with changed design documents costs a read, as with
    /// [`Subscribe::with_ddocs`](crate::dispatcher::Subscribe::with_ddocs), which this implies.
    pub fn ddocs(self, ids: impl IntoIterator<Item = DdocId>) -> Result<Self> {
        let ids: BTreeSet<_> = ids.into_iter().collect();
        if ids.is_empty() {
            return Err(Error::invalid("filter", "it has no design document; leave the ids out to want all"));
        }
        Self { ddocs: Some(Arc::new(ids)), ..self }.checked()
    }

    fn checked(self) -> Result<Self> {
        if self.ddocs.is_some() && !self.kinds.contains(EventKind::DdocUpdated) {
            let reason = "it names design documents, but their kind of event is not wanted";
            return Err(Error::invalid("filter", reason));
        }
        Ok(self)
    }

    /// Whether a row has news for a subscriber that knows everything up to `since`. The ids of design documents are not checked.
    pub(crate) fn passes(&self, row: &Notification, since: &Cursor) -> bool {
        self.matches(row, since) && (self.kinds == Kinds::ALL || self.wanted_news(row, since) != Kinds::NONE)
    }

    pub(crate) fn matches(&self, row: &Notification, since: &Cursor) -> bool {
        let name = row.name.as_str();
        match &self.names {
            Names::All => true,
            Names::One(wanted) => wanted.as_str() == name,
            Names::Exact(names) => names.binary_search_by(|known| known.as_str().cmp(name)).is_ok(),
            Names::Affix(Atom { by: MatchedBy::Suffix, text }) => name.ends_with(&**text),
            Names::Affix(Atom { text, .. }) => name.starts_with(&**text),
            Names::Glob(glob) => glob.is_match(name),
            Names::Predicate(predicate) => predicate(row),
            Names::Any(set) => set.wanting(row, since).next().is_some(),
        }
    }

    /// Returns the wanted exact names, sorted; `None` if the filter selects databases in another way.
    pub(crate) fn exact(&self) -> Option<&[DbName]> {
        match &self.names {
            Names::One(name) => Some(std::slice::from_ref(name)),
            Names::Exact(names) => Some(names),
            Names::Any(set) => set.exact.as_deref(),
            _ => None,
        }
    }

    /// Whether the filter wants every row.
    pub(crate) fn is_all(&self) -> bool {
        matches!(self.names, Names::All) && self.kinds == Kinds::ALL && self.ddocs.is_none()
    }

    /// Whether a row needs no further check. With `by_pattern`, the pattern of the filter has already matched the row.
    pub(crate) fn passes_all(&self, by_pattern: bool) -> bool {
        let passes_names = match self.names {
            Names::All => true,
            Names::Predicate(_) | Names::Any(_) => false,
            _ => by_pattern,
        };
        passes_names && self.kinds == Kinds::ALL
    }

    /// Returns a hash of the filter, which consumers store: the XXH3 of its [encoding](Self::encode). All predicates have the same hash.
    pub(crate) fn hash(&self) -> u64 {
        let mut bytes = Vec::new();
        self.encode(&mut bytes);
        xxhash_rust::xxh3::xxh3_64(&bytes)
    }

    /// Appends the encoding of the filter. Hashes of it are stored, so it never changes: a tag for the names, followed by the texts or the
    /// filters of the set; the kinds (1 byte); 1 and the ids of design documents if the filter names any, else 0. Texts, lists and sets
    /// begin with their length (4 bytes, big-endian).
    fn encode(&self, bytes: &mut Vec<u8>) {
        match &self.names {
            Names::All => bytes.push(tag::ALL),
            Names::One(name) => {
                bytes.push(tag::EXACT);
                encode_texts(bytes, std::iter::once(name.as_str()));
            }
            Names::Exact(names) => {
                bytes.push(tag::EXACT);
                encode_texts(bytes, names.iter().map(DbName::as_str));
            }
            Names::Affix(Atom { by, text }) => {
                bytes.push(if *by == MatchedBy::Suffix { tag::SUFFIX } else { tag::PREFIX });
                encode_text(bytes, text);
            }
            Names::Glob(glob) => {
                bytes.push(tag::GLOB);
                encode_text(bytes, &glob.pattern);
            }
            Names::Predicate(_) => bytes.push(tag::PREDICATE),
            Names::Any(set) => {
                bytes.push(tag::ANY);
                encode_len(bytes, set.filters.len());
                for filter in &*set.filters {
                    filter.encode(bytes);
                }
            }
        }
        bytes.push(self.kinds.bits());
        bytes.push(u8::from(self.ddocs.is_some()));
        if let Some(ddocs) = &self.ddocs {
            encode_texts(bytes, ddocs.iter().map(DdocId::as_str));
        }
    }

    /// Returns the key of the pattern that finds candidate rows. It matches every row if the filter wants all names or has a predicate.
    pub(crate) fn key(&self) -> PatternKey {
        let mut atoms = BTreeSet::new();
        if self.collect_atoms(&mut atoms) {
            PatternKey { atoms: atoms.into_iter().collect(), kinds: self.kinds }
        } else {
            PatternKey { atoms: SmallVec::new(), kinds: Kinds::ALL }
        }
    }

    /// Adds the atoms of the filter's names to `atoms`; returns false if the filter has no atoms.
    fn collect_atoms(&self, atoms: &mut BTreeSet<Atom>) -> bool {
        match &self.names {
            Names::All | Names::Predicate(_) => return false,
            Names::Any(set) => return set.filters.iter().all(|filter| filter.collect_atoms(atoms)),
            Names::One(name) => atoms.extend([Atom::exact(name)]),
            Names::Exact(names) => atoms.extend(names.iter().map(Atom::exact)),
            Names::Affix(atom) => atoms.extend([atom.clone()]),
            Names::Glob(glob) => {
                atoms.extend([Atom { by: MatchedBy::Glob, text: glob.pattern.clone().into() }]);
            }
        }
        true
    }

    /// Whether a row has news of a wanted kind other than changed design documents.
    pub(crate) fn wants_besides_ddocs(&self, row: &Notification, since: &Cursor) -> bool {
        self.wanted_news(row, since).iter().any(|kind| kind != EventKind::DdocUpdated)
    }

    /// Returns the kinds of news in `row` that this filter wants. The filter's names must match the row. A set wants the kinds that the set
    /// allows and that one of its matching filters wants.
    fn wanted_news(&self, row: &Notification, since: &Cursor) -> Kinds {
        let news = match self.set() {
            None => row.news_since(*since).kinds(),
            Some(set) => set
                .wanting(row, since)
                .fold(Kinds::NONE, |all, place| all | set.filters[place].wanted_news(row, since)),
        };
        news.iter().filter(|kind| self.kinds.contains(*kind)).collect()
    }

    pub(crate) fn wants_all_kinds(&self) -> bool {
        self.kinds == Kinds::ALL && self.members().iter().all(Self::wants_all_kinds)
    }

    /// Returns the set and the kinds that it allows, if the filter is a set.
    pub(crate) fn set_and_kinds(&self) -> Option<(Arc<Set>, Kinds)> {
        Some((Arc::clone(self.set()?), self.kinds))
    }

    pub(crate) fn has_predicate(&self) -> bool {
        matches!(self.names, Names::Predicate(_)) || self.members().iter().any(Self::has_predicate)
    }

    fn set(&self) -> Option<&Arc<Set>> {
        if let Names::Any(set) = &self.names { Some(set) } else { None }
    }

    fn members(&self) -> &[Self] {
        self.set().map_or(&[], |set| &set.filters)
    }
}

impl fmt::Debug for Set {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.filters.fmt(f)
    }
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("All"),
            Self::One(name) => f.debug_tuple("One").field(name).finish(),
            Self::Exact(names) => f.debug_tuple("Exact").field(names).finish(),
            Self::Affix(Atom { by, text }) => f.debug_tuple(&format!("{by:?}")).field(text).finish(),
            Self::Glob(glob) => f.debug_tuple("Glob").field(&glob.pattern).finish(),
            Self::Predicate(_) => f.write_str("Predicate"),
            Self::Any(set) => f.debug_tuple("Any").field(set).finish(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Consumers store the hash, so if the encoding changed, all their members would be refused.
    #[test]
    fn golden_bytes() {
        let encoded = |filter: &Filter| {
            let mut bytes = Vec::new();
            filter.encode(&mut bytes);
            bytes
        };
        let all_kinds = Kinds::ALL.bits();
        let names = Filter::names(["b", "a"].map(|name| name.parse().unwrap())).unwrap();
        assert_eq!(encoded(&Filter::all()), [0, all_kinds, 0]);
        assert_eq!(encoded(&names), [1, 0, 0, 0, 2, 0, 0, 0, 1, b'a', 0, 0, 0, 1, b'b', all_kinds, 0]);
        assert_eq!(encoded(&Filter::prefix("p")), [2, 0, 0, 0, 1, b'p', all_kinds, 0]);
        assert_eq!(encoded(&Filter::suffix("s")), [3, 0, 0, 0, 1, b's', all_kinds, 0]);
        assert_eq!(encoded(&Filter::glob("?").unwrap()), [4, 0, 0, 0, 1, b'?', all_kinds, 0]);
        assert_eq!(encoded(&Filter::predicate(|_| true)), [5, all_kinds, 0]);
        let set = Filter::any([Filter::all(), Filter::prefix("")]).unwrap();
        let set = set.kinds(EventKind::DdocUpdated.into()).unwrap();
        let set = set.ddocs(["_design/d".parse().unwrap()]).unwrap();
        let kind = Kinds::from(EventKind::DdocUpdated).bits();
        let mut expected = vec![6, 0, 0, 0, 2, 0, all_kinds, 0, 2, 0, 0, 0, 0, all_kinds, 0];
        expected.extend([kind, 1, 0, 0, 0, 1, 0, 0, 0, 9]);
        expected.extend(b"_design/d");
        assert_eq!(encoded(&set), expected);
        assert_eq!(all_kinds, 15);
        assert_eq!(Filter::all().hash(), xxhash_rust::xxh3::xxh3_64(&[0, 15, 0]));
    }

    #[test]
    fn a_glob_that_is_a_simpler_filter_becomes_one() {
        for (pattern, simpler) in [
            ("*", Some(Filter::all())),
            ("shop/*", Some(Filter::prefix("shop/"))),
            ("*/orders", Some(Filter::suffix("/orders"))),
            ("shop", Some(Filter::name("shop").unwrap())),
            ("sh?p", None),
            ("*a*", None),
            ("a**", None),
            ("{a,b}*", None),
            ("[ab]", None),
            (r"a\*", None),
            ("", None),
        ] {
            let filter = Filter::glob(pattern).unwrap();
            assert_eq!(matches!(filter.names, Names::Glob(_)), simpler.is_none(), "{pattern}");
            assert_eq!(filter.hash(), simpler.unwrap_or_else(|| filter.clone()).hash(), "{pattern}");
        }
    }

    /// Regression: the length of a glob was checked only if it needed a matcher.
    #[test]
    fn no_glob_is_too_long() {
        let text = "a".repeat(GLOB_LEN_MAX);
        assert!(Filter::glob(&text).is_ok());
        for glob in [format!("{text}*"), format!("*{text}"), format!("*{text}*"), format!("{text}a")] {
            assert!(Filter::glob(&glob).is_err(), "{} bytes", glob.len());
        }
    }
}
