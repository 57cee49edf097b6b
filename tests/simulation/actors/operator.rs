//! An operator: changes the topology under load, and resets, deletes and creates groups.

use notibus::{
    Result,
    cursor::{Cursor, Start},
    event::Notification,
    group::{Group, GroupOptions},
};

use super::{context::ActorContext, documents, worker};
use crate::draw::WorldPlan;

/// Works until the faults end.
pub(super) async fn run(actor: ActorContext) {
    while actor.is_chaos() {
        actor.pause(actor.shared.plan.operate_max_ms).await;
        if let Err(error) = act(&actor).await {
            actor.note(|| format!("could not operate: {error}"));
        }
    }
    worker::resume(&actor).await;
    // Create the deleted groups again, whatever has failed.
    for group in &actor.shared.plan.groups {
        let Ok(of) = actor.bus.group(&group.name) else { continue };
        if let Err(error) = of.create(&group.created_at(group.start)).await {
            actor.note(|| format!("could not create a group: {error}"));
        }
    }
}

async fn act(actor: &ActorContext) -> Result<()> {
    let WorldPlan { groups, churns_groups, .. } = &actor.shared.plan;
    if actor.shared.plan.documents.is_some() && actor.random(2) == 0 {
        return documents::reshard(actor).await;
    }
    if !actor.shared.plan.consumers.is_empty() && actor.random(2) == 0 {
        return worker::operate(actor).await;
    }
    let choice = if *churns_groups { 9 } else { actor.random(10) };
    if groups.is_empty() || choice < 6 {
        let shards = 1 + actor.random(5) as u32;
        actor.note(|| format!("reshards to {shards}"));
        actor.bus.feed().reshard(shards, None).await?;
        return Ok(());
    }
    let plan = &groups[actor.random(groups.len() as u64) as usize];
    let group = actor.bus.group(&plan.name)?;
    let start = match actor.random(3) {
        0 => Cursor::NOTHING.into(),
        1 => actor.bus.feed().horizon().await?.into(),
        _ => Start::Now,
    };
    // What an earlier call has committed is known from now on.
    actor.bus.feed().horizon().await?;
    let force = *churns_groups || actor.random(2) == 0;
    actor.shared.oracle().operates(actor.issuer, group.name(), force);
    if choice < 8 {
        actor.note(|| format!("resets {} to {start:?}, by force: {force}", plan.name));
        group.reset(start, force).await
    } else {
        actor.note(|| format!("deletes {}, by force: {force}, and creates it at {start:?}", plan.name));
        let options = plan.created_at(start);
        if actor.random(2) == 0 {
            delete_beside_creation(actor, (&group, &options), force).await?;
        } else {
            group.delete(force).await?;
        }
        actor.pause(if *churns_groups { 100 } else { 500 }).await;
        group.create(&options).await.map(|_| ())
    }
}

/// Deletes `group`, while somebody else creates it as soon as it is gone: perhaps before the deletion knows whether it has succeeded.
async fn delete_beside_creation(
    actor: &ActorContext,
    (group, options): (&Group<Notification>, &GroupOptions),
    force: bool,
) -> Result<()> {
    let creation = async {
        while !matches!(group.create(options).await, Ok(true)) {
            actor.pause(20).await;
        }
    };
    let deletion = group.delete(force);
    tokio::pin!(creation, deletion);
    tokio::select! {
        biased;
        deleted = &mut deletion => return deleted,
        () = &mut creation => {}
    }
    deletion.await
}
