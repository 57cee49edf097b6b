//! [`Ids`] remembers the ids of documents that a feed has.
//!
//! A client may name as many ids as fit into a body, and open many such feeds. So the ids take little more memory than their text,
//! and those of all feeds together have a bound.

use tokio::sync::OwnedSemaphorePermit;

use crate::front::http::{Failure, bodies::Bodies};

pub(super) struct Ids {
    /// All ids in order, one behind the other.
    text: String,
    /// The place of each id in the text.
    places: Vec<(u32, u32)>,
    _room: OwnedSemaphorePermit,
}

impl Ids {
    /// Remembers `ids`. Fails with 503 if there is no room for them.
    pub fn new(mut ids: Vec<&str>, bodies: &Bodies) -> Result<Self, Failure> {
        ids.sort_unstable();
        ids.dedup();
        let text = ids.concat();
        let mut end = 0;
        let place = |id: &&str| {
            let begin = end;
            // A body is far shorter than 4 GB.
            end += id.len() as u32;
            (begin, end)
        };
        let places: Vec<_> = ids.iter().map(place).collect();
        let room = bodies.keep(text.len() + size_of_val(&places[..]))?;
        Ok(Self { text, places, _room: room })
    }

    /// Returns whether `id` is one of them.
    pub fn has(&self, id: &str) -> bool {
        let at = |&(begin, end): &(u32, u32)| &self.text[begin as usize..end as usize];
        self.places.binary_search_by(|place| at(place).cmp(id)).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_known_and_their_memory_is_bounded() {
        let bodies = Bodies::new(100);
        let ids = Ids::new(vec!["b", "", "ab", "a", "ü", "b"], &bodies).unwrap();
        for (id, is_known) in
            [("", true), ("a", true), ("ab", true), ("b", true), ("ü", true), ("aba", false), ("c", false)]
        {
            assert_eq!(ids.has(id), is_known, "{id}");
        }
        // Beside 6 bytes of text and the places of 5 ids, this one does not fit.
        let long = "x".repeat(50);
        assert!(Ids::new(vec![&long], &bodies).is_err());
        drop(ids);
        assert!(Ids::new(vec![&long], &bodies).is_ok());
        assert!(!Ids::new(Vec::new(), &bodies).unwrap().has(""));
    }
}
