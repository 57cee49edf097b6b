//! Another bus in the same store, under a prefix that begins with the same bytes: neither may touch the other's keys.

use std::time::Duration;

use super::context::ActorContext;
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        error::Result,
        event::{Db, DbInstance, DbName},
    },
    bus::{Bus, BusOptions},
    front::simulation::{
        app, guarantee::Guarantee, keyspace::OTHER_BUS_PREFIX, shared::Phase, witness::Witness,
    },
    roles::notifier::NotifierOptions,
    state::membership::NodeOptions,
    store::{AtomicOp, Isolation},
};

/// The longest pause between two transactions, in milliseconds.
const THINK_MAX_MS: u64 = 1_000;

/// How often it polls at the end whether everything was folded.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Runs a notifier and a producer of the other bus until the end, and then checks that each event was counted once.
pub(super) async fn run(actor: ActorContext) {
    loop {
        match live(&actor).await {
            Ok(()) => return,
            Err(error) => actor.note(|| format!("the other bus has failed: {error}")),
        }
        actor.pause(300).await;
    }
}

/// [`run`], until something fails.
async fn live(actor: &ActorContext) -> Result<()> {
    let options =
        BusOptions { prefix: OTHER_BUS_PREFIX.to_vec(), partitions: 2, shards: 1, ..BusOptions::default() };
    let bus = Bus::open(&actor.db, options).await?;
    let node = bus.node(NodeOptions { id: None, ..actor.shared.plan.node.clone() }).await?;
    let notifier = node.notifier(NotifierOptions { ..actor.shared.plan.notifier.clone() }).await?;
    let producer = bus.producer();
    let name = actor.shared.plan.names[0].clone();
    // The database is older than the bus, which adopts it.
    let db = Db::new(name.clone(), DbInstance([7; 16]));
    while actor.shared.phase() == Phase::Chaos {
        actor.pause(THINK_MAX_MS).await;
        let recorded = actor.db.run(async |tx| {
            tx.atomic(AtomicOp::Add, &app::tally(&name), &1_u64.to_le_bytes());
            producer.updated(&tx, &db);
            Ok(())
        });
        if let Err(error) = recorded.await {
            actor.note(|| format!("could not record in the other bus: {error}"));
        }
    }
    while actor.shared.phase() != Phase::End {
        actor.db.env().sleep(POLL_INTERVAL).await;
    }
    while !bus.is_drained().await? {
        actor.db.env().sleep(POLL_INTERVAL).await;
    }
    audit(actor, &bus, &name).await?;
    notifier.shutdown().await?;
    node.shutdown().await
}

async fn audit(actor: &ActorContext, bus: &Bus, name: &DbName) -> Result<()> {
    let key = app::tally(name);
    let recorded = actor.db.run(async |tx| tx.get(&key, Isolation::Snapshot).await).await?;
    let recorded = recorded.map_or(0, |bytes| {
        let mut number = [0; 8];
        number[..bytes.len().min(8)].copy_from_slice(&bytes[..bytes.len().min(8)]);
        u64::from_le_bytes(number)
    });
    let rows = bus.feed().page(Cursor::NOTHING, 10).await?.rows;
    let counted: u64 = rows.iter().map(|row| row.totals.updated).sum();
    if recorded != counted || rows.iter().any(|row| row.sequence == Sequence::MIN) {
        let reason = format!("in the other bus {recorded} events were recorded, and {counted} counted");
        actor.shared.fail(Guarantee::FoldedOnce.broken(reason));
    }
    if counted > 0 {
        actor.shared.witness(Witness::OtherBusFolded);
    }
    Ok(())
}
