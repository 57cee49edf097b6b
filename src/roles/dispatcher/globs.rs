//! [`Globs`]: the globs of all patterns, compiled into sets.
//!
//! Subscribers come and go with their globs while the tail matches rows, so a new glob must not cause all others to be compiled again. It
//! joins a small set; once that is full, its globs move to a large one.

use std::sync::Arc;

use crate::base::glob::GlobSet;

/// The maximum number of globs in a large set. Fewer fit if they are large.
const GLOBS_PER_SET: usize = 1_000;

/// The maximum number of globs in the small set.
const SMALL_MAX: usize = 32;

/// The globs of all patterns `P`.
pub(super) struct Globs<P> {
    /// The globs that were added last.
    small: Compiled<P>,
    large: Vec<Compiled<P>>,
}

/// A set of globs.
struct Compiled<P> {
    /// `None` if there are no globs, or if some have been added since the set was compiled.
    set: Option<GlobSet>,
    /// The pattern and the text of each glob in the set; `None` once the pattern is gone.
    globs: Vec<Option<(Arc<P>, Arc<str>)>>,
    /// How many globs of the set are gone.
    gone: usize,
}

impl<P> Default for Globs<P> {
    fn default() -> Self {
        Self { small: Compiled::new(Vec::new()), large: Vec::new() }
    }
}

impl<P> Globs<P> {
    /// Adds a glob of `pattern`.
    pub fn add(&mut self, pattern: &Arc<P>, glob: &Arc<str>) {
        self.small.globs.push(Some((Arc::clone(pattern), Arc::clone(glob))));
        self.small.set = None;
    }

    /// Removes all globs of `pattern`.
    pub fn remove(&mut self, pattern: &Arc<P>) {
        self.small.remove(pattern);
        self.large.retain_mut(|large| {
            large.remove(pattern);
            !large.globs.is_empty()
        });
    }

    /// Compiles the sets that have changed.
    pub fn compile(&mut self) {
        if self.small.globs.len() > SMALL_MAX || !self.small.compile() {
            for glob in std::mem::take(&mut self.small.globs) {
                match self.large.last_mut().filter(|last| last.globs.len() < GLOBS_PER_SET) {
                    Some(last) => {
                        last.globs.push(glob);
                        last.set = None;
                    }
                    None => self.large.push(Compiled::new(vec![glob])),
                }
            }
            self.small.set = None;
        }
        let mut at = 0;
        while let Some(large) = self.large.get_mut(at) {
            if large.compile() {
                at += 1;
            } else {
                // Together the globs are too large for one set.
                let other = large.globs.split_off(large.globs.len() / 2);
                self.large.insert(at + 1, Compiled::new(other));
            }
        }
    }

    /// Returns the patterns of the globs that match `name`. [`Globs::compile`] must have been called since the last change.
    pub fn matching(&self, name: &str) -> impl Iterator<Item = &Arc<P>> {
        std::iter::once(&self.small).chain(&self.large).flat_map(move |some| some.matching(name))
    }
}

impl<P> Compiled<P> {
    fn new(globs: Vec<Option<(Arc<P>, Arc<str>)>>) -> Self {
        Self { set: None, globs, gone: 0 }
    }

    fn remove(&mut self, pattern: &Arc<P>) {
        for glob in &mut self.globs {
            let taken = glob.take_if(|(of, _)| Arc::ptr_eq(of, pattern));
            self.gone += usize::from(taken.is_some());
        }
        // Until the set is compiled again, it still looks for the globs that are gone.
        if self.gone * 2 > self.globs.len() {
            self.globs.retain(Option::is_some);
            (self.set, self.gone) = (None, 0);
        }
    }

    /// Compiles the set, unless it is compiled. Returns false if the globs are too large for one set.
    fn compile(&mut self) -> bool {
        if self.set.is_none() {
            self.globs.retain(Option::is_some);
            self.gone = 0;
            let globs = self.globs.iter().flatten().map(|(_, glob)| &**glob);
            self.set = GlobSet::new(globs).ok().filter(|_| !self.globs.is_empty());
            assert!(self.set.is_some() || self.globs.len() != 1, "each glob was compiled with its filter");
        }
        self.set.is_some() || self.globs.is_empty()
    }

    fn matching(&self, name: &str) -> impl Iterator<Item = &Arc<P>> {
        let matched = self.set.iter().flat_map(move |set| set.matching(name));
        matched.filter_map(|index| self.globs[index].as_ref()).map(|(pattern, _)| pattern)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bug: each new glob caused all others to be compiled again, so one client that came and went delayed the tail.
    #[test]
    fn a_new_glob_has_few_others_compiled_again() {
        let patterns: Vec<_> = (0..3_032).map(Arc::new).collect();
        let add = |globs: &mut Globs<usize>, n: usize| globs.add(&patterns[n], &format!("*{n}?").into());
        let mut globs = Globs::default();
        (0..3_000).for_each(|n| add(&mut globs, n));
        globs.compile();
        assert_eq!(globs.large.iter().map(|large| large.globs.len()).collect::<Vec<_>>(), [1_000; 3]);
        assert_eq!(globs.matching("db1234x").count(), 4, "those of 4, 34, 234 and 1234");
        for n in 3_000..3_032 {
            add(&mut globs, n);
            assert!(globs.large.iter().all(|large| large.set.is_some()));
            globs.compile();
        }
        assert_eq!((globs.small.globs.len(), globs.large.len()), (32, 3));
        assert_eq!(globs.matching("db3031x").count(), 3, "those of 1, 31 and 3031");
        globs.remove(&patterns[34]);
        assert!(globs.large.iter().all(|large| large.set.is_some()));
        assert_eq!(globs.matching("db1234x").count(), 3);
        for pattern in &patterns {
            globs.remove(pattern);
        }
        globs.compile();
        assert!(globs.large.is_empty());
    }

    /// A glob with many alternatives, each of which may begin anywhere.
    fn wide(n: usize) -> Arc<str> {
        let letter = |at: usize| char::from(b"customernad-/0123"[at % 17]);
        let alternative = |m: usize| {
            let (from, to) = (letter(n * n * 7 + m * m * 5 + m), letter(n * 31 / 7 + m * 11 / 3));
            format!("*{from}{}{to}*Z{n}", "?".repeat(3 + (n * 13 / 5 + m * 17 / 3) % 10))
        };
        format!("{{{}}}", (0..24).map(alternative).collect::<Vec<_>>().join(",")).into()
    }

    /// Regression: once compared with some names, 300 such globs took a gigabyte, so subscribers could get the process killed.
    #[test]
    fn the_memory_of_globs_is_bounded_whatever_they_and_the_names_are() {
        let mut globs = Globs::default();
        (0..100).for_each(|n| globs.add(&Arc::new(n), &wide(n)));
        globs.compile();
        for n in 0..20 {
            assert_eq!(globs.matching(&format!("customers/tenant-{n:04}/orders-{}", n % 7)).count(), 0);
        }
        let sets: Vec<_> = globs.large.iter().flat_map(|large| &large.set).map(GlobSet::memory_len).collect();
        assert!(sets.iter().sum::<usize>() < 4 << 20, "{sets:?}");
    }
}
