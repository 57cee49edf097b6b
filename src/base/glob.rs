//! [`GlobSet`]: globs, compiled into one automaton.
//!
//! Subscribers choose the globs, and layers choose the names, so the memory of a set must be bounded whatever they choose. The states of
//! the automaton are therefore made when a name needs them, and are all dropped once they fill the cache.

use globset::GlobBuilder;
use parking_lot::Mutex;
use regex_automata::{
    Anchored, Input, MatchKind,
    hybrid::dfa::{Cache, DFA, OverlappingState},
    nfa::thompson::{self, WhichCaptures},
    util::syntax,
};
use smallvec::SmallVec;

use crate::base::error::{Error, Result};

/// The maximum length of a glob, in bytes.
pub(crate) const GLOB_LEN_MAX: usize = 1_024;

/// The maximum size of a set's compiled globs, in bytes. A single glob always fits.
const COMPILED_LEN_MAX: usize = 1 << 20;

/// The size of a set's cache, in bytes: a fixed part, and the part that each glob adds.
const CACHE_LEN: (usize, usize) = (48 << 10, 16 << 10);

/// Globs, compiled into one automaton.
pub(crate) struct GlobSet {
    dfa: DFA,
    /// `None` until the first name is compared.
    cache: Mutex<Option<Cache>>,
}

impl GlobSet {
    /// Compiles `globs`. Fails with [`Error::Invalid`] if one of them is malformed or too long, or if they are too large for one set.
    pub fn new<'g>(globs: impl IntoIterator<Item = &'g str>) -> Result<Self> {
        let regexes = globs.into_iter().map(regex_of).collect::<Result<Vec<_>>>()?;
        let (cache_len, cache_len_per_glob) = CACHE_LEN;
        let nfa = thompson::Config::new()
            .which_captures(WhichCaptures::None)
            .nfa_size_limit(Some(COMPILED_LEN_MAX));
        let dfa = DFA::config()
            .match_kind(MatchKind::All)
            .cache_capacity(cache_len + cache_len_per_glob * regexes.len())
            .skip_cache_capacity_check(true);
        let built = DFA::builder()
            .syntax(syntax::Config::new().utf8(false).dot_matches_new_line(true))
            .thompson(nfa.utf8(false))
            .configure(dfa)
            .build_many(&regexes);
        let dfa = built.map_err(|error| Error::invalid("glob", error.to_string()))?;
        Ok(Self { dfa, cache: Mutex::default() })
    }

    /// Returns how much memory the set takes, in bytes.
    #[cfg(test)]
    pub fn memory_len(&self) -> usize {
        self.dfa.memory_usage() + self.cache.lock().as_ref().map_or(0, Cache::memory_usage)
    }

    /// Returns the indices of the globs that match `name`.
    pub fn matching(&self, name: &str) -> SmallVec<[usize; 8]> {
        let mut cache = self.cache.lock();
        let cache = cache.get_or_insert_with(|| self.dfa.create_cache());
        let input = Input::new(name).anchored(Anchored::Yes);
        let (mut state, mut found) = (OverlappingState::start(), SmallVec::new());
        loop {
            let search = self.dfa.try_search_overlapping_fwd(cache, &input, &mut state);
            search.expect(
                "the automaton never gives up, because nothing limits how often its cache is cleared",
            );
            let Some(matched) = state.get_match() else { return found };
            found.push(matched.pattern().as_usize());
        }
    }
}

/// Fails with [`Error::Invalid`] if `glob` is too long.
pub(crate) fn check_glob_len(glob: &str) -> Result<()> {
    if glob.len() > GLOB_LEN_MAX {
        return Err(Error::invalid("glob", format!("it is longer than {GLOB_LEN_MAX} bytes")));
    }
    Ok(())
}

/// Converts a glob into a regular expression that matches whole names.
fn regex_of(glob: &str) -> Result<String> {
    check_glob_len(glob)?;
    let built = GlobBuilder::new(glob).literal_separator(false).build();
    Ok(built.map_err(|error| Error::invalid("glob", error.to_string()))?.regex().to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matching_alone(glob: &str, name: &str) -> bool {
        GlobBuilder::new(glob).literal_separator(false).build().unwrap().compile_matcher().is_match(name)
    }

    fn globs() -> impl Strategy<Value = Vec<String>> {
        let part = prop::sample::select(vec![
            "a", "b", ".", "/", "*", "**", "**/", "/**", "?", "[ab]", "[!a]", "{a,b}", "{.,*a}", "\\*", "é",
            "A",
        ]);
        let glob = prop::collection::vec(part, 1..6).prop_map(|parts| parts.concat());
        prop::collection::vec(glob.prop_filter("it is a glob", |glob| regex_of(glob).is_ok()), 0..5)
    }

    proptest! {
        /// Bug: a joined set compared some globs with the last component of a path, so `**/..` did not match `a/..`.
        #[test]
        fn a_set_matches_what_its_globs_match_alone(globs in globs(), name in "[ab./é\n*]{1,6}") {
            let set = GlobSet::new(globs.iter().map(String::as_str)).unwrap();
            let mut matched = set.matching(&name);
            matched.sort_unstable();
            let alone: Vec<_> = (0..globs.len()).filter(|&at| matching_alone(&globs[at], &name)).collect();
            prop_assert_eq!(matched.as_slice(), alone);
        }
    }
}
