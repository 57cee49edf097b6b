//! [`Patterns`]: the distinct patterns of all subscribers, and which of them a row matches.
//!
//! Subscribers with equal patterns share one. The cost of finding the patterns of a name depends on the name, not on their number:
//! exact names are looked up; prefixes and suffixes are looked up, too, once per length in use; globs are compiled into sets.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU32, Ordering},
    },
};

use dashmap::{DashMap, Entry};
use globset::GlobSet;
use smallvec::SmallVec;

use super::{
    batch::{Batch, Indices, Matched},
    log::Log,
};
use crate::base::event::{DbName, Kinds};
use crate::base::filter::{Atom, PatternKey, build_glob};

/// The names and kinds of events that some subscribers want.
pub(super) struct Pattern {
    key: PatternKey,
    pub log: Log<Matched>,
    /// Its index among the patterns of the batch that it matched last.
    index: AtomicU32,
}

/// The most globs of one set, because a compiled set has a limited number of states.
const GLOBS_PER_SET: usize = 1_000;

/// Patterns with the same key; mostly one.
type Few = SmallVec<[Arc<Pattern>; 1]>;

/// Patterns by key. Callers choose the names, so the hashes are seeded.
type By<K> = DashMap<K, Few, foldhash::fast::RandomState>;

/// Prefixes or suffixes, by their text.
#[derive(Default)]
struct Affixes {
    by_text: By<Arc<str>>,
    /// Number of texts of each length in bytes.
    lengths: RwLock<BTreeMap<usize, usize>>,
}

/// Globs, compiled into sets when the next row is matched.
#[derive(Default)]
struct Globs {
    by_text: BTreeMap<Arc<str>, Few>,
    /// The compiled sets; `None` if the globs have changed since.
    compiled: Option<Arc<[CompiledGlobs]>>,
}

/// Some globs, compiled as one set.
struct CompiledGlobs {
    set: GlobSet,
    /// The patterns of each glob, in the order of the set.
    patterns: Vec<Few>,
}

impl CompiledGlobs {
    /// Compiles `globs` into as few sets as possible and appends them to `sets`. Each glob alone is known to compile.
    fn compile(globs: &[(&Arc<str>, &Few)], sets: &mut Vec<Self>) {
        let mut builder = GlobSet::builder();
        for (text, _) in globs {
            builder.add(build_glob(text).expect("each was built when its filter was"));
        }
        match builder.build() {
            Ok(set) => {
                let patterns = globs.iter().map(|(_, few)| (*few).clone()).collect();
                sets.push(Self { set, patterns });
            }
            // Together they are too large for one set.
            Err(_) if globs.len() > 1 => {
                let (one, other) = globs.split_at(globs.len() / 2);
                Self::compile(one, sets);
                Self::compile(other, sets);
            }
            Err(error) => {
                tracing::error!(%error, glob = %globs[0].0, "a glob cannot be compiled, and matches nothing");
            }
        }
    }
}

#[derive(Default)]
pub(super) struct Patterns {
    /// All patterns, and how many subscribers have each.
    all: DashMap<PatternKey, (Arc<Pattern>, usize)>,
    exact: By<DbName>,
    prefixes: Affixes,
    suffixes: Affixes,
    globs: RwLock<Globs>,
}

/// The patterns that a batch matches, and by which rows.
#[derive(Default)]
pub(super) struct Matches {
    pub patterns: Vec<Arc<Pattern>>,
    /// For each pattern the indices of the matching rows.
    pub rows: Vec<Indices>,
}

impl Patterns {
    /// Adds a subscriber to the pattern `key`. A new pattern is matched from batch number `begin` on. No batch may be matched
    /// meanwhile.
    pub fn join(&self, key: &PatternKey, begin: u64) -> Arc<Pattern> {
        match self.all.entry(key.clone()) {
            Entry::Occupied(mut entry) => {
                entry.get_mut().1 += 1;
                Arc::clone(&entry.get().0)
            }
            Entry::Vacant(entry) => {
                let (log, index) = (Log::new(begin), AtomicU32::new(0));
                let pattern = Arc::new(Pattern { key: key.clone(), log, index });
                // The lock of the entry keeps others from adding or removing the same pattern.
                for atom in &*key.atoms {
                    self.add(atom, &pattern);
                }
                entry.insert((Arc::clone(&pattern), 1));
                pattern
            }
        }
    }

    /// Removes a subscriber from `pattern`.
    pub fn leave(&self, pattern: &Arc<Pattern>) {
        if let Entry::Occupied(mut entry) = self.all.entry(pattern.key.clone()) {
            entry.get_mut().1 -= 1;
            if entry.get().1 == 0 {
                for atom in &*pattern.key.atoms {
                    self.remove(atom, pattern);
                }
                entry.remove();
            }
        }
    }

    /// Number of subscribers whose pattern names `name` exactly.
    pub fn subscribers_of(&self, name: &str) -> usize {
        let patterns = self.exact.get(name).map(|patterns| patterns.clone()).unwrap_or_default();
        let of = |pattern: &Arc<Pattern>| self.all.get(&pattern.key).map_or(0, |shared| shared.1);
        patterns.iter().map(of).sum()
    }

    /// All patterns, in a deterministic order.
    pub fn all(&self) -> Vec<Arc<Pattern>> {
        let mut all: Vec<_> = self.all.iter().map(|shared| Arc::clone(&shared.0)).collect();
        all.sort_by(|a, b| (&a.key.atoms, a.key.kinds.bits()).cmp(&(&b.key.atoms, b.key.kinds.bits())));
        all
    }

    /// Makes `pattern` findable by `atom`.
    fn add(&self, atom: &Atom, pattern: &Arc<Pattern>) {
        let pattern = Arc::clone(pattern);
        match atom {
            Atom::Exact(name) => self.exact.entry(name.clone()).or_default().push(pattern),
            Atom::Prefix(text) => self.prefixes.add(text, pattern),
            Atom::Suffix(text) => self.suffixes.add(text, pattern),
            Atom::Glob(text) => {
                let mut globs = self.globs.write().unwrap_or_else(PoisonError::into_inner);
                globs.by_text.entry(Arc::clone(text)).or_default().push(pattern);
                globs.compiled = None;
            }
        }
    }

    /// Undoes [`Patterns::add`].
    fn remove(&self, atom: &Atom, pattern: &Arc<Pattern>) {
        let without = |patterns: &mut Few| {
            patterns.retain(|known| !Arc::ptr_eq(known, pattern));
            patterns.is_empty()
        };
        match atom {
            Atom::Exact(name) => drop(self.exact.remove_if_mut(name, |_, patterns| without(patterns))),
            Atom::Prefix(text) => self.prefixes.remove(text, without),
            Atom::Suffix(text) => self.suffixes.remove(text, without),
            Atom::Glob(text) => {
                let mut globs = self.globs.write().unwrap_or_else(PoisonError::into_inner);
                if globs.by_text.get_mut(text).is_some_and(without) {
                    globs.by_text.remove(text);
                }
                globs.compiled = None;
            }
        }
    }

    /// Finds the patterns that the rows of `batch` match. For one caller at a time.
    pub fn matches(&self, batch: &Batch) -> Matches {
        let mut found = Matches::default();
        if self.all.is_empty() {
            return found;
        }
        let has_exact = !self.exact.is_empty();
        let (prefixes, suffixes) = (self.prefixes.lengths(), self.suffixes.lengths());
        let globs = self.compiled_globs();
        for (index, row) in (0..).zip(&batch.rows) {
            let name = row.name.as_str();
            let mut kinds = None;
            let mut add = |patterns: &[Arc<Pattern>]| {
                for pattern in patterns {
                    let wanted = pattern.key.kinds;
                    let passes = wanted == Kinds::ALL
                        || wanted
                            .intersects(*kinds.get_or_insert_with(|| row.news_since(batch.since).kinds()));
                    if passes {
                        found.add(pattern, index);
                    }
                }
            };
            if has_exact && let Some(patterns) = self.exact.get(name) {
                add(&patterns);
            }
            let fits = |length: &&usize| **length <= name.len();
            for &length in prefixes.iter().take_while(fits) {
                self.prefixes.find(name.get(..length), &mut add);
            }
            for &length in suffixes.iter().take_while(fits) {
                self.suffixes.find(name.get(name.len() - length..), &mut add);
            }
            for globs in &*globs {
                for index in globs.set.matches(name) {
                    add(&globs.patterns[index]);
                }
            }
        }
        found
    }

    fn compiled_globs(&self) -> Arc<[CompiledGlobs]> {
        let mut globs = self.globs.write().unwrap_or_else(PoisonError::into_inner);
        let Globs { by_text, compiled } = &mut *globs;
        let compiled = compiled.get_or_insert_with(|| {
            let mut sets = Vec::new();
            let globs: Vec<_> = by_text.iter().collect();
            for some in globs.chunks(GLOBS_PER_SET) {
                CompiledGlobs::compile(some, &mut sets);
            }
            sets.into()
        });
        Arc::clone(compiled)
    }
}

impl Matches {
    fn add(&mut self, pattern: &Arc<Pattern>, row: u32) {
        let mut index = pattern.index.load(Ordering::Relaxed);
        if self.patterns.get(index as usize).is_none_or(|known| !Arc::ptr_eq(known, pattern)) {
            index = self.patterns.len() as u32;
            pattern.index.store(index, Ordering::Relaxed);
            self.patterns.push(Arc::clone(pattern));
            self.rows.push(Indices::new());
        }
        let rows = &mut self.rows[index as usize];
        // A row may match a pattern by several atoms.
        if rows.last() != Some(&row) {
            rows.push(row);
        }
    }
}

impl Affixes {
    fn add(&self, text: &Arc<str>, pattern: Arc<Pattern>) {
        let mut lengths = self.lengths.write().unwrap_or_else(PoisonError::into_inner);
        let mut patterns = self.by_text.entry(Arc::clone(text)).or_default();
        if patterns.is_empty() {
            *lengths.entry(text.len()).or_default() += 1;
        }
        patterns.push(pattern);
    }

    /// Removes a pattern of `text` by `without`, which returns whether no other pattern has the text.
    fn remove(&self, text: &Arc<str>, without: impl FnOnce(&mut Few) -> bool) {
        let mut lengths = self.lengths.write().unwrap_or_else(PoisonError::into_inner);
        if self.by_text.remove_if_mut(text, |_, patterns| without(patterns)).is_some()
            && let Some(count) = lengths.get_mut(&text.len())
        {
            *count -= 1;
            if *count == 0 {
                lengths.remove(&text.len());
            }
        }
    }

    /// Adds the patterns of `text`.
    fn find(&self, text: Option<&str>, add: &mut impl FnMut(&[Arc<Pattern>])) {
        if let Some(patterns) = text.and_then(|text| self.by_text.get(text)) {
            add(&patterns);
        }
    }

    /// The lengths in use, shortest first.
    fn lengths(&self) -> Vec<usize> {
        self.lengths.read().unwrap_or_else(PoisonError::into_inner).keys().copied().collect()
    }
}
