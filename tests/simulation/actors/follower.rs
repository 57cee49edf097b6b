//! A follower: reads the feed shard by shard, each shard to its end, and then continues with its successors.

use std::{collections::BTreeSet, time::Duration};

use notibus::{
    Error, Result,
    cursor::Cursor,
    event::Notification,
    feed::{ShardEvent, ShardReader},
};

use super::context::ActorContext;
use crate::shared::Phase;

/// How long the follower waits when there is nothing to read.
const PAUSE: Duration = Duration::from_millis(100);

/// Follows the feed until the end; starts over after `Expired` and similar errors.
pub(super) async fn run(actor: ActorContext) {
    while actor.phase() != Phase::End {
        let id = actor.shared.oracle().followed(actor.issuer);
        if let Err(error) = follow(&actor, id).await {
            actor.note(|| format!("follower {id} begins again: {error}"));
        }
        actor.shared.oracle().unfollowed(id);
        actor.store.env().sleep(PAUSE).await;
    }
}

/// Follows the feed from the very beginning. Fails if the follower has to start over.
async fn follow(actor: &ActorContext, id: u64) -> Result<()> {
    let feed = actor.bus.feed();
    let live = feed.topology_at(Cursor::BEGINNING).await?;
    let limit = 1 + actor.random(10) as usize;
    let mut known: BTreeSet<_> = live.shards.iter().copied().collect();
    let mut readers: Vec<ShardReader<Notification>> = live
        .shards
        .iter()
        .map(|&shard| feed.shard_reader(shard, Cursor::BEGINNING).with_limit(limit))
        .collect();
    while actor.phase() != Phase::End {
        let mut begun = Vec::new();
        let mut is_idle = true;
        for reader in readers.iter_mut().filter(|reader| !reader.is_ended()) {
            match reader.try_next().await {
                Ok(None) => {}
                Ok(Some(ShardEvent::Rows(page))) => {
                    is_idle = false;
                    actor.shared.oracle().followed_rows(&actor.shared, id, &page.rows);
                }
                Ok(Some(ShardEvent::Resharded(resharded))) => {
                    is_idle = false;
                    actor.shared.oracle().followed_over(&actor.shared, id, reader.shard());
                    let cursor = reader.cursor();
                    let new = resharded.successor.shards.into_iter().filter(|shard| known.insert(*shard));
                    begun.extend(new.map(|shard| feed.shard_reader(shard, cursor).with_limit(limit)));
                }
                Err(error @ (Error::Expired { .. } | Error::NoShard { .. })) => return Err(error),
                Err(error) => actor.note(|| format!("follower {id} could not read: {error}")),
            }
        }
        readers.append(&mut begun);
        if is_idle {
            actor.store.env().sleep(PAUSE).await;
        }
    }
    Ok(())
}
