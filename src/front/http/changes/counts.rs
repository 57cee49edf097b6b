//! [`Counts`] counts the rows after a position, and remembers the count for the next page.
//!
//! The store counts the rows of a database as they are written. So the number of rows after a position is the number of all rows
//! without those before it. A client that reads in pages asks for this number with every page. The counts are remembered until a
//! row is appended, so that a page costs its own rows only, and not all rows before it.

use std::collections::{BTreeMap, HashMap};

use parking_lot::Mutex;

use crate::{
    base::{encoding::Sequence, error::Result, event::DbInstance},
    roles::changes::Change,
    state::{
        feed::{Counted, Feed, KnownMarks, Mark},
        keys::ShardId,
    },
};

/// For how many feeds counts are remembered.
const FEEDS_MAX: usize = 1_000;

/// For how many positions of a feed counts are remembered.
const POSITIONS_MAX: usize = 64;

/// The rows that are counted: those of a database, or of one of its shards.
type Of = (DbInstance, Option<ShardId>);

/// The counts of one feed.
#[derive(Debug)]
struct Memory {
    /// The sequence of the newest row when the rows were counted.
    newest: Sequence,
    /// How many rows come after each position.
    behind: BTreeMap<Sequence, u64>,
}

#[derive(Debug, Default)]
pub(super) struct Counts(Mutex<HashMap<Of, Memory>>);

impl Counts {
    /// Returns how many rows of `feed`, or of its `shard`, come after `position`. Fails as a read does.
    pub async fn pending(&self, feed: &Feed<Change>, of @ (_, shard): Of, position: Sequence) -> Result<u64> {
        let Counted { behind, newest } = feed.behind(shard, position, self.known(of, position)).await?;
        self.remember(of, newest, (position, behind));
        Ok(behind)
    }

    /// Returns the counts for the nearest positions around `position`.
    fn known(&self, of: Of, position: Sequence) -> Option<KnownMarks> {
        let counts = self.0.lock();
        let memory = counts.get(&of)?;
        let mark = |(at, behind): (&Sequence, &u64)| Mark { at: *at, behind: *behind };
        let below = memory.behind.range(..=position).next_back().map(mark);
        let above = memory.behind.range(position..).next().map(mark);
        Some(KnownMarks { newest: memory.newest, below, above })
    }

    fn remember(&self, of: Of, newest: Sequence, (position, behind): (Sequence, u64)) {
        let mut counts = self.0.lock();
        if counts.len() >= FEEDS_MAX && !counts.contains_key(&of) {
            counts.clear();
        }
        let nothing = || Memory { newest, behind: BTreeMap::new() };
        let memory = counts.entry(of).or_insert_with(nothing);
        if memory.newest != newest {
            *memory = nothing();
        }
        if memory.behind.len() >= POSITIONS_MAX {
            // The first position helps every reader that begins there, so the second is removed.
            let second = memory.behind.keys().nth(1).copied();
            second.and_then(|second| memory.behind.remove(&second));
        }
        memory.behind.insert(position, behind);
    }
}
