//! [`Patterns`]: the distinct patterns of all subscribers, and which of them a row matches.
//!
//! Subscribers with equal patterns share one. The cost of finding the patterns that match a name depends on the name, not on the number of
//! patterns: exact names are looked up, prefixes and suffixes are looked up once per length in use, and globs are compiled into sets
//! ([`Globs`]).

use std::{
    collections::BTreeMap,
    hash::BuildHasher,
    sync::{
        Arc, Weak,
        atomic::{AtomicU32, Ordering},
    },
};

use hashbrown::HashTable;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::{
    delivery::{Batch, Indices, Matched},
    globs::Globs,
    log::Log,
    newest::Newest,
};
use crate::base::{
    event::Kinds,
    filter::{Atom, Filter, MatchedBy, PatternKey},
};

/// The names and kinds of events that some subscribers want.
pub(super) struct Pattern {
    key: PatternKey,
    pub log: Log<Matched>,
    /// How many subscribers have the pattern; changed only under the lock of the patterns.
    subscribers: AtomicU32,
    /// The index of this pattern in the result of [`Patterns::matches`] for the last batch that it matched.
    index: AtomicU32,
}

/// Finds patterns by the texts of their atoms. All atoms are of one kind, such as exact names or prefixes.
#[derive(Default)]
struct ByText {
    /// An entry for each atom. The text stays in the pattern and is not copied, because there are many patterns with a single name.
    atoms: HashTable<(Arc<Pattern>, u32)>,
    /// Callers choose the texts, so the hashes are seeded.
    hashes: foldhash::fast::RandomState,
    /// The number of atoms of each length in bytes.
    lengths: BTreeMap<usize, usize>,
}

fn text((pattern, atom): &(Arc<Pattern>, u32)) -> &str {
    &pattern.key.atoms[*atom as usize].text
}

impl ByText {
    /// Returns the patterns with the text `wanted`, in any order.
    #[inline]
    fn find(&self, wanted: &str) -> impl Iterator<Item = &Arc<Pattern>> {
        let hash = if self.atoms.is_empty() { 0 } else { self.hashes.hash_one(wanted) };
        let atoms = self.atoms.iter_hash(hash).filter(move |atom| text(atom) == wanted);
        atoms.map(|(pattern, _)| pattern)
    }

    /// Does the same as [`ByText::find`], but in a fixed order, so that a run can be replayed.
    #[inline]
    fn get(&self, wanted: &str) -> SmallVec<[&Arc<Pattern>; 1]> {
        let mut found = SmallVec::new();
        // Usually there is one pattern or none, for which a loop is faster than `collect`.
        for pattern in self.find(wanted) {
            found.push(pattern);
        }
        if found.len() > 1 {
            found.sort_unstable_by_key(|pattern: &&Arc<Pattern>| &pattern.key);
        }
        found
    }

    fn insert(&mut self, pattern: &Arc<Pattern>, atom: u32) {
        let Self { atoms, hashes, lengths } = self;
        let entry = (Arc::clone(pattern), atom);
        *lengths.entry(text(&entry).len()).or_default() += 1;
        atoms.insert_unique(hashes.hash_one(text(&entry)), entry, |entry| hashes.hash_one(text(entry)));
    }

    fn remove(&mut self, pattern: &Arc<Pattern>, of: &str) {
        let is_it = |atom: &(Arc<Pattern>, u32)| Arc::ptr_eq(&atom.0, pattern) && text(atom) == of;
        let found = self.atoms.find_entry(self.hashes.hash_one(of), is_it);
        found.unwrap_or_else(|_| unreachable!("it was added")).remove();
        let count = self.lengths.get_mut(&of.len()).expect("it was counted");
        *count -= 1;
        if *count == 0 {
            self.lengths.remove(&of.len());
        }
    }
}

pub(super) struct Patterns {
    /// The pattern that matches everything. It is never removed, so its log has all batches of the ring.
    pub everything: Arc<Pattern>,
    /// The other patterns, by [`MatchedBy`].
    by: [ByText; 4],
    /// The globs, compiled.
    globs: Globs<Pattern>,
    /// The indexes of patterns whose subscribers take rounds, or took some. They are kept outside the patterns, most of which have none.
    newest: BTreeMap<PatternKey, Weak<Mutex<Newest>>>,
}

impl Patterns {
    pub fn new() -> Self {
        let everything = Pattern::new(Filter::all().key(), 0);
        Self { everything, by: Default::default(), globs: Globs::default(), newest: BTreeMap::new() }
    }

    /// Returns the pattern `key`, if a subscriber has it.
    fn get(&self, key: &PatternKey) -> Option<&Arc<Pattern>> {
        // Only the pattern that matches everything has no atom.
        let Some(Atom { by, text }) = key.atoms.first() else { return Some(&self.everything) };
        self.by[*by as usize].find(text).find(|pattern| pattern.key == *key)
    }

    /// Returns all patterns, in a fixed order, so that a run can be replayed.
    pub fn all(&self) -> Vec<&Arc<Pattern>> {
        let found = self.by.iter().flat_map(|of| of.atoms.iter().map(|(pattern, _)| pattern));
        let mut all: Vec<_> = found.chain([&self.everything]).collect();
        all.sort_unstable_by_key(|pattern| &pattern.key);
        // A pattern with several atoms is found once for each.
        all.dedup_by_key(|pattern| &pattern.key);
        all
    }

    /// Adds a subscriber to the pattern `key`. A new pattern is matched from batch number `begin` on.
    pub fn join(&mut self, key: PatternKey, begin: u64) -> Arc<Pattern> {
        if let Some(pattern) = self.get(&key) {
            pattern.subscribers.fetch_add(1, Ordering::Relaxed);
            return Arc::clone(pattern);
        }
        let pattern = Pattern::new(key, begin);
        for (index, Atom { by, text }) in (0..).zip(&pattern.key.atoms) {
            self.by[*by as usize].insert(&pattern, index);
            if *by == MatchedBy::Glob {
                self.globs.add(&pattern, text);
            }
        }
        pattern
    }

    pub fn leave(&mut self, pattern: &Arc<Pattern>) {
        if pattern.subscribers.fetch_sub(1, Ordering::Relaxed) > 1 {
            return;
        }
        for Atom { by, text } in &pattern.key.atoms {
            self.by[*by as usize].remove(pattern, text);
        }
        if pattern.key.atoms.iter().any(|atom| atom.by == MatchedBy::Glob) {
            self.globs.remove(pattern);
        }
        self.newest.remove(&pattern.key);
    }

    /// Returns the index of the newest rows of `pattern`. All its subscribers that take rounds share it.
    pub fn newest(&mut self, pattern: &Pattern) -> Arc<Mutex<Newest>> {
        let shared = self.newest.get(&pattern.key).and_then(Weak::upgrade);
        shared.unwrap_or_else(|| {
            let newest = Arc::default();
            self.newest.insert(pattern.key.clone(), Arc::downgrade(&newest));
            newest
        })
    }

    pub fn subscribers_of(&self, name: &str) -> usize {
        let patterns = self.by[MatchedBy::Exact as usize].find(name);
        patterns.map(|pattern| pattern.subscribers.load(Ordering::Relaxed) as usize).sum()
    }

    /// Finds the patterns that the rows of `batch` match, except the one that matches everything, and the matching rows of each.
    pub fn matches(&mut self, batch: &Batch) -> Vec<(Arc<Pattern>, Indices)> {
        let mut found = Vec::new();
        if self.by.iter().all(|of| of.atoms.is_empty()) {
            return found;
        }
        self.globs.compile();
        let [exact, prefixes, suffixes, _] = &self.by;
        let [prefix_lengths, suffix_lengths] =
            [prefixes, suffixes].map(|affixes| affixes.lengths.keys().copied().collect::<Vec<_>>());
        for (index, row) in (0..).zip(&batch.rows) {
            let name = row.name.as_str();
            let mut kinds = None;
            let mut add = |pattern: &Arc<Pattern>| {
                let wanted = pattern.key.kinds;
                let passes = wanted == Kinds::ALL
                    || wanted.intersects(*kinds.get_or_insert_with(|| row.news_since(batch.since).kinds()));
                if passes {
                    pattern.add_row(index, &mut found);
                }
            };
            exact.get(name).into_iter().for_each(&mut add);
            let fits = |length: &&usize| **length <= name.len();
            for &length in prefix_lengths.iter().take_while(fits) {
                name.get(..length).into_iter().flat_map(|text| prefixes.get(text)).for_each(&mut add);
            }
            for &length in suffix_lengths.iter().take_while(fits) {
                let text = name.get(name.len() - length..);
                text.into_iter().flat_map(|text| suffixes.get(text)).for_each(&mut add);
            }
            self.globs.matching(name).for_each(&mut add);
        }
        found
    }
}

impl Pattern {
    fn new(key: PatternKey, begin: u64) -> Arc<Self> {
        let (subscribers, index) = (AtomicU32::new(1), AtomicU32::new(0));
        Arc::new(Self { key, log: Log::new(begin), subscribers, index })
    }

    fn add_row(self: &Arc<Self>, row: u32, found: &mut Vec<(Arc<Self>, Indices)>) {
        let mut index = self.index.load(Ordering::Relaxed) as usize;
        if found.get(index).is_none_or(|(known, _)| !Arc::ptr_eq(known, self)) {
            index = found.len();
            self.index.store(index as u32, Ordering::Relaxed);
            found.push((Arc::clone(self), Indices::new()));
        }
        let rows = &mut found[index].1;
        // A row may match a pattern through several atoms.
        if rows.last() != Some(&row) {
            rows.push(row);
        }
    }
}
