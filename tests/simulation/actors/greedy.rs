//! A greedy task: it keeps reading without ever waiting, like a busy layer whose store answers from memory. The heartbeats and folds of its
//! process must still get their turn.

use notibus::{
    Result,
    store::{Isolation, Transaction},
};

use super::context::ActorContext;
use crate::{guarantee::Guarantee, keyspace::BUS_PREFIX, witness::Witness};

/// The number of consecutive reads. A store that yields to other tasks does so after far fewer reads.
const READS: usize = 1_000;

/// The longest time between two runs, in milliseconds.
const PAUSE_MAX_MS: u64 = 4_000;

/// Reads now and then until the faults end.
pub(super) async fn run(actor: ActorContext) {
    while actor.is_chaos() {
        actor.pause(PAUSE_MAX_MS).await;
        if let Err(error) = actor.store.run(async |tx| read(&actor, &tx).await).await {
            actor.note(|| format!("could not read: {error}"));
        }
    }
}

/// Reads, and judges whether another task of the process got its turn before the last read.
async fn read(actor: &ActorContext, tx: &Transaction) -> Result<()> {
    let other = tokio::spawn(async {});
    let key = [BUS_PREFIX, &foundationdb_tuple::pack(&0_u16)].concat();
    for _ in 0..READS {
        tx.get(&key, Isolation::Snapshot).await?;
    }
    if other.is_finished() {
        actor.shared.witness(Witness::BusyTaskGaveWay);
    } else {
        let reason =
            format!("a task has read {READS} times, and all others of its process have waited for it");
        actor.shared.fail(Guarantee::Live.broken(reason));
    }
    Ok(())
}
