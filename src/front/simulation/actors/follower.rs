//! A follower: reads the feed shard by shard, each to its end, and goes on with the successors.

use std::{collections::BTreeSet, time::Duration};

use super::place::Place;
use crate::{
    base::{
        cursor::Cursor,
        error::{Error, Result},
        notification::Notification,
    },
    front::simulation::shared::Phase,
    state::feed::{ShardEvent, ShardReader},
};

/// How long it waits when there was nothing to read.
const PAUSE: Duration = Duration::from_millis(100);

/// Follows until the end; begins again after `Expired` and the like.
pub(super) async fn run(place: Place) {
    while place.phase() != Phase::End {
        let id = place.shared.oracle().followed(place.issuer);
        if let Err(error) = follow(&place, id).await {
            place.note(|| format!("follower {id} begins again: {error}"));
        }
        place.shared.oracle().unfollowed(id);
        place.db.env().sleep(PAUSE).await;
    }
}

/// Follows from the very beginning. Fails if it has to begin again.
async fn follow(place: &Place, id: u64) -> Result<()> {
    let feed = place.bus.feed();
    let live = feed.topology_at(Cursor::NOTHING).await?;
    let limit = 1 + place.random(10) as usize;
    let mut known: BTreeSet<_> = live.shards.iter().copied().collect();
    let mut readers: Vec<ShardReader<Notification>> = live
        .shards
        .iter()
        .map(|&shard| feed.shard_reader(shard, Cursor::NOTHING).with_limit(limit))
        .collect();
    while place.phase() != Phase::End {
        let mut begun = Vec::new();
        let mut is_idle = true;
        for reader in readers.iter_mut().filter(|reader| !reader.is_ended()) {
            match reader.try_next().await {
                Ok(None) => {}
                Ok(Some(ShardEvent::Rows(page))) => {
                    is_idle = false;
                    place.shared.oracle().followed_rows(&place.shared, id, &page.rows);
                }
                Ok(Some(ShardEvent::Resharded(resharded))) => {
                    is_idle = false;
                    place.shared.oracle().followed_over(&place.shared, id, reader.shard());
                    let cursor = reader.cursor();
                    let new = resharded.successor.shards.into_iter().filter(|shard| known.insert(*shard));
                    begun.extend(new.map(|shard| feed.shard_reader(shard, cursor).with_limit(limit)));
                }
                Err(error @ (Error::Expired { .. } | Error::NoShard { .. })) => return Err(error),
                Err(error) => place.note(|| format!("follower {id} could not read: {error}")),
            }
        }
        readers.append(&mut begun);
        if is_idle {
            place.db.env().sleep(PAUSE).await;
        }
    }
    Ok(())
}
