//! [`KnownKeys`]: what a task knows about the keys of its shard.

use std::{
    collections::{BTreeMap, HashSet},
    hash::BuildHasher,
    sync::LazyLock,
    time::Duration,
};

use bytes::Bytes;
use foldhash::quality::RandomState;

use crate::base::encoding::Sequence;

/// The maximum number of ids with keys that a task remembers. Beyond it, the task looks up each id until it next reads all keys.
const HASHES_MAX: usize = 100_000;

/// What a task knows about the keys of its shard.
pub(super) struct KnownKeys {
    /// The hashes of ids that may have keys. Other ids have none, unless work on them was just requested again. `None` if there are too
    /// many hashes; then any id may have a key.
    hashes: Option<HashSet<u64>>,
    /// Ids whose keys say only up to where work is finished, with that position. Once the checkpoint has passed it, the key is checked.
    pub finished: BTreeMap<Bytes, Sequence>,
    /// Where the current pass continues; `None` between two passes.
    pub place: Option<Bytes>,
    /// When the current or last pass began.
    pub began: Duration,
    /// The earliest due time among the keys that the pass has read so far.
    pub soonest: Option<Duration>,
    /// When the next pass begins; `None` if there are no keys.
    pub next_pass: Option<Duration>,
}

/// In the default state, no id is known to have a key.
impl Default for KnownKeys {
    fn default() -> Self {
        let hashes = Some(HashSet::new());
        Self {
            hashes,
            finished: BTreeMap::new(),
            place: None,
            began: Duration::ZERO,
            soonest: None,
            next_pass: None,
        }
    }
}

impl KnownKeys {
    /// Notes that `id` has a key.
    pub fn note_key(&mut self, id: &[u8]) {
        if let Some(hashes) = &mut self.hashes {
            hashes.insert(hash_of(id));
            if hashes.len() > HASHES_MAX {
                self.hashes = None;
            }
        }
    }

    /// Whether `id` may have a key.
    pub fn may_have_key(&self, id: &[u8]) -> bool {
        let Some(hashes) = &self.hashes else { return true };
        !hashes.is_empty() && hashes.contains(&hash_of(id))
    }

    /// Returns when there may be deferred ids to work on.
    pub fn next_turn(&self) -> Option<Duration> {
        self.next_pass
    }

    /// Notes that `id` has a key that is due at `at`.
    pub fn note(&mut self, id: &[u8], at: Duration) {
        self.note_key(id);
        self.next_pass = Some(self.next_pass.map_or(at, |next| next.min(at)));
        self.soonest = Some(self.soonest.map_or(at, |soonest| soonest.min(at)));
    }

    /// Notes that the key of `id` says only that everything up to `done` is finished.
    pub fn note_finished(&mut self, id: &Bytes, done: Sequence) {
        self.note_key(id);
        // The first position is kept. Once the checkpoint has passed it, the position of the newest row replaces it.
        self.finished.entry(id.clone()).or_insert(done);
    }

    /// Notes that `id` no longer has a key.
    pub fn was_cleared(&mut self, id: &[u8]) {
        if let Some(hashes) = &mut self.hashes {
            hashes.remove(&hash_of(id));
        }
    }
}

/// Returns the hash of `id` in this process. The hash is seeded, so users, who choose the ids, cannot craft collisions.
pub(super) fn hash_of(id: &[u8]) -> u64 {
    static SEEDED: LazyLock<RandomState> = LazyLock::new(RandomState::default);
    SEEDED.hash_one(id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::encoding::{Incarnation, Versionstamp};

    /// Regression: an id was remembered once for each finished row, so memory grew with events while another id held the checkpoint back.
    #[test]
    fn an_id_that_is_finished_again_is_remembered_once() {
        let (mut known, id) = (KnownKeys::default(), Bytes::from_static(b"a"));
        for version in 1..=3 {
            let done = Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0);
            known.note_finished(&id, done);
        }
        assert_eq!(known.finished.len(), 1);
    }

    #[test]
    fn with_too_many_keys_each_id_may_have_one() {
        let mut known = KnownKeys::default();
        for n in 0..=HASHES_MAX as u64 {
            assert!(!known.may_have_key(b"other"), "{n}");
            known.note(&n.to_be_bytes(), Duration::ZERO);
        }
        assert!(known.may_have_key(b"other"));
        known.was_cleared(&0_u64.to_be_bytes());
        assert!(known.may_have_key(b"other") && known.may_have_key(&0_u64.to_be_bytes()));
    }
}
