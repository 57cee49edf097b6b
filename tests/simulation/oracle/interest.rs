//! [`Interest`]: what a subscriber wants, as the oracle understands it. It can build a filter, but never calls one.

use std::{borrow::Cow, collections::BTreeSet, fmt};

use notibus::{
    dispatcher::Filter,
    event::{DbName, DdocId, EventKind, Kinds},
};

/// A glob pattern, with a function that matches the same names.
#[derive(Clone, Copy)]
pub(crate) struct Glob {
    pattern: &'static str,
    matches: fn(&str) -> bool,
}

impl fmt::Debug for Glob {
    /// Leaves out the address of the function, because it differs between processes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.pattern)
    }
}

pub(crate) const GLOBS: [Glob; 4] = [
    Glob {
        pattern: "{_replicator,*/_replicator}",
        matches: |name| name == "_replicator" || name.ends_with("/_replicator"),
    },
    Glob {
        pattern: "shop/?",
        matches: |name| name.strip_prefix("shop/").is_some_and(|rest| rest.chars().count() == 1),
    },
    Glob { pattern: "[a-c]", matches: |name| ["a", "b", "c"].contains(&name) },
    Glob { pattern: "*b", matches: |name| name.ends_with('b') },
];

/// A predicate: a pure function of a database's name.
#[derive(Clone, Copy)]
pub(crate) struct Predicate {
    title: &'static str,
    matches: fn(&str) -> bool,
}

impl fmt::Debug for Predicate {
    /// Leaves out the address of the function, because it differs between processes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.title)
    }
}

pub(crate) const PREDICATES: [Predicate; 2] = [
    Predicate { title: "of one letter", matches: |name| name.len() == 1 },
    Predicate { title: "not b", matches: |name| !name.ends_with('b') },
];

/// The databases that are wanted.
#[derive(Debug, Clone)]
pub(crate) enum Which {
    All,
    Names(Vec<DbName>),
    Prefix(Cow<'static, str>),
    Suffix(Cow<'static, str>),
    Glob(Glob),
    Predicate(Predicate),
    Any(Vec<Interest>),
}

#[derive(Debug, Clone)]
pub(crate) struct Interest {
    pub which: Which,
    pub kinds: Kinds,
    /// The design documents that are wanted; all of them if `None`.
    pub ddocs: Option<BTreeSet<DdocId>>,
    /// Whether the subscriber asks for the ids of changed design documents, even though it wants all of them.
    pub asks: bool,
}

impl Interest {
    /// Returns an interest in all kinds of events of these databases.
    pub fn of(which: Which) -> Self {
        Self { which, kinds: Kinds::ALL, ddocs: None, asks: false }
    }

    pub fn is_exact(&self) -> bool {
        match &self.which {
            Which::Names(_) => true,
            Which::Any(interests) => interests.iter().all(Self::is_exact),
            _ => false,
        }
    }

    /// Returns the kinds of events that are wanted for the database `name`.
    pub fn kinds_of(&self, name: &DbName) -> Kinds {
        let all = |is: bool| if is { Kinds::ALL } else { Kinds::NONE };
        let here = match &self.which {
            Which::All => Kinds::ALL,
            Which::Names(names) => all(names.contains(name)),
            Which::Prefix(prefix) => all(name.as_str().starts_with(&**prefix)),
            Which::Suffix(suffix) => all(name.as_str().ends_with(&**suffix)),
            Which::Glob(glob) => all((glob.matches)(name.as_str())),
            Which::Predicate(predicate) => all((predicate.matches)(name.as_str())),
            Which::Any(interests) => {
                interests.iter().flat_map(|interest| kinds(interest.kinds_of(name))).collect()
            }
        };
        here.iter().filter(|kind| self.kinds.contains(*kind)).collect()
    }

    /// Whether the deliveries name the changed design documents.
    pub fn names_ddocs(&self) -> bool {
        self.asks || self.ddocs.is_some()
    }

    /// Whether a change to the design document `id`, or to one without an id, is wanted in a database for which such changes are wanted.
    pub fn wants_ddoc(&self, id: Option<&DdocId>) -> bool {
        match (&self.ddocs, id) {
            (Some(wanted), Some(id)) => wanted.contains(id),
            _ => true,
        }
    }

    /// Returns the indices of the interests that want one of `news` for the database `name`.
    pub fn wanted_by(&self, name: &DbName, news: Kinds) -> Vec<usize> {
        let Which::Any(interests) = &self.which else { return vec![0] };
        let wants = |interest: &Self| {
            interest.kinds_of(name).iter().any(|kind| self.kinds.contains(kind) && news.contains(kind))
        };
        (0..).zip(interests).filter(|(_, interest)| wants(interest)).map(|(place, _)| place).collect()
    }

    /// Builds the filter for this interest.
    pub fn filter(&self) -> Filter {
        const SOUND: &str = "what is drawn is a sound filter";
        let filter = match &self.which {
            Which::All => Filter::all(),
            Which::Names(names) => Filter::names(names.iter().cloned()).expect(SOUND),
            Which::Prefix(prefix) => Filter::prefix(&**prefix),
            Which::Suffix(suffix) => Filter::suffix(&**suffix),
            Which::Glob(glob) => Filter::glob(glob.pattern).expect(SOUND),
            Which::Predicate(Predicate { matches, .. }) => {
                let matches = *matches;
                Filter::predicate(move |row| matches(row.name.as_str()))
            }
            Which::Any(interests) => Filter::any(interests.iter().map(Self::filter)).expect(SOUND),
        };
        let filter = if self.kinds == Kinds::ALL { filter } else { filter.kinds(self.kinds).expect(SOUND) };
        match &self.ddocs {
            None => filter,
            Some(ids) => filter.ddocs(ids.iter().cloned()).expect(SOUND),
        }
    }
}

fn kinds(kinds: Kinds) -> Vec<EventKind> {
    kinds.iter().collect()
}

pub mod tests {
    use super::*;

    pub fn a_set_wants_what_one_of_it_does_and_the_whole_allows() {
        let (name, other) = (DbName::new("shop/b").unwrap(), DbName::new("x").unwrap());
        let only = |which, kind: EventKind| Interest { kinds: kind.into(), ..Interest::of(which) };
        let set = Which::Any(vec![
            only(Which::Names(vec![name.clone()]), EventKind::Created),
            only(Which::Glob(GLOBS[3]), EventKind::Updated),
            only(Which::Prefix("y".into()), EventKind::Deleted),
        ]);
        let both = Kinds::from(EventKind::Created) | EventKind::Updated.into();
        assert_eq!(Interest::of(set.clone()).kinds_of(&name), both);
        assert_eq!(Interest::of(set.clone()).wanted_by(&name, EventKind::Updated.into()), [1]);
        assert_eq!(only(set.clone(), EventKind::Updated).kinds_of(&name), EventKind::Updated.into());
        assert_eq!(Interest::of(set).kinds_of(&other), Kinds::NONE);
    }
}
