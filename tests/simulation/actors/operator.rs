//! An operator: changes the topology under load, and manages consumers.

use notibus::{
    Error, Result,
    consumer::ConsumerHandle,
    cursor::{Cursor, Start},
};

use super::{context::ActorContext, documents};
use crate::draw::ConsumerPlan;

/// Works until the faults end.
pub(super) async fn run(actor: ActorContext) {
    while actor.is_chaos() {
        actor.pause(actor.shared.plan.operate_max_ms).await;
        if let Err(error) = act(&actor).await {
            actor.note(|| format!("could not operate: {error}"));
        }
    }
    // No consumer may stay paused, whatever failed before.
    for plan in &actor.shared.plan.consumers {
        let Ok(handle) = actor.bus.consumer(&plan.name) else { continue };
        while let Err(error) = handle.resume().await {
            actor.note(|| format!("could not resume {}: {error}", plan.name));
            if matches!(error, Error::NoConsumer { .. }) {
                break;
            }
            actor.pause(500).await;
        }
    }
}

async fn act(actor: &ActorContext) -> Result<()> {
    let plan = &actor.shared.plan;
    if plan.churns_consumers {
        return churn(actor, &plan.consumers[actor.random(plan.consumers.len() as u64) as usize]).await;
    }
    if plan.documents.is_some() && actor.random(2) == 0 {
        return documents::reshard(actor).await;
    }
    if !plan.consumers.is_empty() && actor.random(2) == 0 {
        return manage(actor, &plan.consumers[actor.random(plan.consumers.len() as u64) as usize]).await;
    }
    // Reshards several times in a row, so that a reader that has followed one reshard finds the next.
    let times = if actor.random(3) == 0 { 3 } else { 1 };
    for _ in 0..times {
        let shards = 1 + actor.random(5) as u32;
        actor.note(|| format!("reshards to {shards}"));
        actor.bus.feed().reshard(shards, None).await?;
    }
    Ok(())
}

/// Deletes a consumer, and creates it again, possibly before the deletion knows whether it succeeded.
async fn churn(actor: &ActorContext, plan: &ConsumerPlan) -> Result<()> {
    let (handle, start) = (actor.bus.consumer(&plan.name)?, draw_start(actor).await?);
    let settings = plan.settings().start(start);
    actor.shared.oracle().operates(actor.issuer, &plan.name, true);
    actor.note(|| format!("deletes {}, and creates it at {start:?}", plan.name));
    if actor.random(2) == 0 {
        let creation = async {
            while !matches!(handle.create(&settings).await, Ok(true)) {
                actor.pause(20).await;
            }
        };
        let deletion = handle.delete(true);
        tokio::pin!(creation, deletion);
        tokio::select! {
            biased;
            deleted = &mut deletion => return deleted,
            () = &mut creation => {}
        }
        return deletion.await;
    }
    handle.delete(true).await?;
    actor.pause(100).await;
    handle.create(&settings).await.map(drop)
}

/// Performs a random operation on a consumer.
async fn manage(actor: &ActorContext, plan: &ConsumerPlan) -> Result<()> {
    if !plan.is_operated {
        return Ok(());
    }
    let handle = actor.bus.consumer(&plan.name)?;
    match actor.random(16) {
        0..4 => {
            let glob = ["*", "shop/*", "a", "p:*"][actor.random(4) as usize];
            let only_deferred = actor.random(2) == 0;
            let name = &plan.name;
            actor.note(|| format!("asks {name} to do {glob} again; deferred ids only: {only_deferred}"));
            handle.again(glob, only_deferred).await.map(drop)
        }
        4..8 => discard(actor, &handle).await,
        8..12 => {
            actor.note(|| format!("pauses {}", plan.name));
            handle.pause().await?;
            actor.pause(1_000).await;
            handle.resume().await
        }
        choice => {
            let (start, force) = (draw_start(actor).await?, actor.random(2) == 0);
            actor.shared.oracle().operates(actor.issuer, &plan.name, force);
            if choice < 15 {
                actor.note(|| format!("resets {} to {start:?}, by force: {force}", plan.name));
                return handle.reset(start, force).await;
            }
            actor.note(|| format!("deletes {}, by force: {force}", plan.name));
            handle.delete(force).await
        }
    }
}

/// Discards one of the deferred ids.
async fn discard(actor: &ActorContext, handle: &ConsumerHandle) -> Result<()> {
    let deferred = handle.deferred(None, 100).await?;
    let place = actor.random((deferred.len() as u64).max(1)) as usize;
    let Some(of) = deferred.get(place) else { return Ok(()) };
    actor.note(|| format!("discards {:?} of {}", of.id, handle.name()));
    handle.discard(of.id.as_bytes()).await.map(drop)
}

/// Draws a start. Reading the horizon also ensures that everything that an earlier call committed is known from then on.
async fn draw_start(actor: &ActorContext) -> Result<Start> {
    let horizon = actor.bus.feed().horizon().await?;
    Ok(match actor.random(3) {
        0 => Cursor::BEGINNING.into(),
        1 => horizon.into(),
        _ => Start::Now,
    })
}
