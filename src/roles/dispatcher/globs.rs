//! [`Globs`]: the globs of all patterns, compiled into sets.
//!
//! Subscribers with other globs come and go while the tail matches rows, so a new glob must not have all others compiled again. It joins a
//! small set; once that is full, its globs move to a large one.

use std::sync::Arc;

use globset::GlobSet;

use crate::base::filter::build_glob;

/// The maximum number of globs in a large set, because a compiled set has a limited number of states.
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
    /// `None` if globs have been added since the set was compiled.
    set: Option<GlobSet>,
    /// The pattern and the text of each glob in the set; `None` once the pattern is gone.
    globs: Vec<Option<(Arc<P>, Arc<str>)>>,
    /// How many of them are gone.
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
            self.small.set = Some(GlobSet::empty());
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
        // Until it is compiled again, the set still looks for the globs that are gone.
        if self.gone * 2 > self.globs.len() {
            self.globs.retain(Option::is_some);
            (self.set, self.gone) = (None, 0);
        }
    }

    /// Compiles the set, unless it is compiled. Returns false if the globs are too large for one set. Each glob alone is known to compile.
    fn compile(&mut self) -> bool {
        if self.set.is_some() {
            return true;
        }
        self.globs.retain(Option::is_some);
        self.gone = 0;
        let mut builder = GlobSet::builder();
        for (_, glob) in self.globs.iter().flatten() {
            builder.add(build_glob(glob).expect("it was built when its filter was"));
        }
        self.set = match builder.build() {
            Ok(set) => Some(set),
            Err(_) if self.globs.len() > 1 => None,
            Err(error) => {
                let glob = self.globs[0].as_ref().map(|(_, glob)| &**glob);
                tracing::error!(%error, glob, "a glob cannot be compiled, and matches nothing");
                Some(GlobSet::empty())
            }
        };
        self.set.is_some()
    }

    fn matching(&self, name: &str) -> impl Iterator<Item = &Arc<P>> {
        let matched = self.set.iter().flat_map(move |set| set.matches(name));
        matched.filter_map(|index| self.globs[index].as_ref()).map(|(pattern, _)| pattern)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bug: each new glob had all others compiled again, so one client that came and went delayed the tail.
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
}
