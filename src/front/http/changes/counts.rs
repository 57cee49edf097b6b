//! [`Counts`]: how many rows stand behind a position, remembered for anyone who asks for the next page.
//!
//! The rows of a database are counted as they are written, so what stands behind a position is all rows but those before it. A
//! client that reads in pages asks so at each of them: what was found is remembered as long as nothing is appended, so that a page
//! costs its own rows, and not all before it.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Mutex, PoisonError},
};

use crate::{
    base::{encoding::Sequence, error::Result, event::DbInstance},
    roles::changes::Change,
    state::{
        feed::{Counted, Feed, Known, Mark},
        keys::ShardId,
    },
};

/// Of how many feeds it is remembered what was counted.
const FEEDS_MAX: usize = 1_000;

/// For how many positions of a feed.
const POSITIONS_MAX: usize = 64;

/// Which rows are counted: those of a database, or of one shard of it.
type Of = (DbInstance, Option<ShardId>);

/// What was counted of a feed.
#[derive(Debug)]
struct Memory {
    /// The sequence of the newest row then.
    newest: Sequence,
    /// How many rows stand behind a position.
    behind: BTreeMap<Sequence, u64>,
}

/// What was counted.
#[derive(Debug, Default)]
pub(super) struct Counts(Mutex<HashMap<Of, Memory>>);

impl Counts {
    /// How many rows of `feed`, or of its `shard`, stand behind `position`. Fails as a read does.
    pub async fn pending(&self, feed: &Feed<Change>, of @ (_, shard): Of, position: Sequence) -> Result<u64> {
        let Counted { behind, newest } = feed.behind(shard, position, self.known(of, position)).await?;
        self.remember(of, newest, (position, behind));
        Ok(behind)
    }

    /// What is known of the places around `position`.
    fn known(&self, of: Of, position: Sequence) -> Option<Known> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let memory = counts.get(&of)?;
        let mark = |(at, behind): (&Sequence, &u64)| Mark { at: *at, behind: *behind };
        let below = memory.behind.range(..=position).next_back().map(mark);
        let above = memory.behind.range(position..).next().map(mark);
        Some(Known { newest: memory.newest, below, above })
    }

    /// Remembers a count.
    fn remember(&self, of: Of, newest: Sequence, (position, behind): (Sequence, u64)) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.len() >= FEEDS_MAX && !counts.contains_key(&of) {
            counts.clear();
        }
        let nothing = || Memory { newest, behind: BTreeMap::new() };
        let memory = counts.entry(of).or_insert_with(nothing);
        if memory.newest != newest {
            *memory = nothing();
        }
        if memory.behind.len() >= POSITIONS_MAX {
            // The first one is of use to anyone who begins.
            let second = memory.behind.keys().nth(1).copied();
            second.and_then(|second| memory.behind.remove(&second));
        }
        memory.behind.insert(position, behind);
    }
}
