//! [`Counts`]: how many rows stand behind a position, without counting all of them for each page.
//!
//! Nothing in the store says how many rows are behind a position: rows move to the end when their documents are edited, so a
//! writer would have to take one from a count for each. It would have to be a count of the row's neighbourhood, in each
//! transaction that edits; writers are not made to pay for what only readers of single pages ask. So rows are counted,
//! and what was counted is remembered as long as nothing is appended. The first page of a database costs a count of all its rows, and
//! so does the next one after each edit; all others cost their own rows.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Mutex, PoisonError},
};

use crate::{
    base::{encoding::Sequence, error::Result, event::DbInstance},
    roles::changes::Change,
    state::{feed::Feed, keys::ShardId},
};

/// Of how many feeds it is remembered what was counted.
const FEEDS_MAX: usize = 1_000;

/// For how many positions of a feed.
const POSITIONS_MAX: usize = 64;

/// Which rows are counted: those of a database, or of one shard of it.
type Of = (DbInstance, Option<ShardId>);

/// What was counted of a feed.
#[derive(Debug)]
struct Known {
    /// The sequence of the newest row then.
    last: Sequence,
    /// How many rows stand behind a position.
    behind: BTreeMap<Sequence, u64>,
}

/// What was counted.
#[derive(Debug, Default)]
pub(super) struct Counts(Mutex<HashMap<Of, Known>>);

impl Counts {
    /// How many rows of `feed`, or of its `shard`, stand behind `position`. Fails as a read does.
    pub async fn pending(
        &self,
        feed: &Feed<Change>,
        (instance, shard): Of,
        position: Sequence,
    ) -> Result<u64> {
        let of = (instance, shard);
        let last = newest(feed).await?;
        let count = match self.nearest(of, last, position) {
            Some((at, behind)) if at == position => return Ok(behind),
            Some((at, behind)) => {
                let between = feed.count_between(shard, at, position).await?;
                // What was edited meanwhile may have left what was counted.
                if newest(feed).await? != last {
                    return feed.count_between(shard, position, Sequence::MAX).await;
                }
                behind.saturating_sub(between)
            }
            None => feed.count_between(shard, position, Sequence::MAX).await?,
        };
        if newest(feed).await? == last {
            self.remember(of, last, (position, count));
        }
        Ok(count)
    }

    /// What is known of the nearest position at `position` or before it, if the newest row is still at `last`.
    fn nearest(&self, of: Of, last: Sequence, position: Sequence) -> Option<(Sequence, u64)> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = counts.get(&of).filter(|known| known.last == last)?;
        known.behind.range(..=position).next_back().map(|(at, behind)| (*at, *behind))
    }

    /// Remembers a count.
    fn remember(&self, of: Of, last: Sequence, (position, behind): (Sequence, u64)) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.len() >= FEEDS_MAX && !counts.contains_key(&of) {
            counts.clear();
        }
        let nothing = || Known { last, behind: BTreeMap::new() };
        let known = counts.entry(of).or_insert_with(nothing);
        if known.last != last {
            *known = nothing();
        }
        if known.behind.len() >= POSITIONS_MAX {
            // The first one is of use to whoever comes anew.
            let second = known.behind.keys().nth(1).copied();
            second.and_then(|second| known.behind.remove(&second));
        }
        known.behind.insert(position, behind);
    }
}

/// The sequence of the newest row; the smallest one if there is none.
async fn newest(feed: &Feed<Change>) -> Result<Sequence> {
    Ok(feed.last_sequence().await?.unwrap_or(Sequence::MIN))
}
