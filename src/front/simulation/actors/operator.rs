//! An operator: changes the topology under load, and resets, deletes and creates groups.

use super::{documents, place::Place};
use crate::{
    base::{
        cursor::{Cursor, Start},
        error::Result,
        notification::Notification,
    },
    front::simulation::draw::Plan,
    roles::group::{Group, GroupOptions},
};

/// Works until the faults end.
pub(super) async fn run(place: Place) {
    while place.is_chaos() {
        place.pause(place.shared.plan.operate_max_ms).await;
        if let Err(error) = act(&place).await {
            place.note(|| format!("could not operate: {error}"));
        }
    }
    // Create the deleted groups again, whatever has failed.
    for group in &place.shared.plan.groups {
        let Ok(of) = place.bus.group(&group.name) else { continue };
        if let Err(error) = of.create(&group.created_at(group.start)).await {
            place.note(|| format!("could not create a group: {error}"));
        }
    }
}

async fn act(place: &Place) -> Result<()> {
    let Plan { groups, churns_groups, .. } = &place.shared.plan;
    if place.shared.plan.documents.is_some() && place.random(2) == 0 {
        return documents::reshard(place).await;
    }
    let choice = if *churns_groups { 9 } else { place.random(10) };
    if groups.is_empty() || choice < 6 {
        let shards = 1 + place.random(5) as u32;
        place.note(|| format!("reshards to {shards}"));
        place.bus.feed().reshard(shards, None).await?;
        return Ok(());
    }
    let plan = &groups[place.random(groups.len() as u64) as usize];
    let group = place.bus.group(&plan.name)?;
    let start = match place.random(3) {
        0 => Cursor::NOTHING.into(),
        1 => place.bus.feed().horizon().await?.into(),
        _ => Start::Now,
    };
    // What an earlier call has committed is known from now on.
    place.bus.feed().horizon().await?;
    let force = *churns_groups || place.random(2) == 0;
    place.shared.oracle().operates(place.issuer, group.name(), force);
    if choice < 8 {
        place.note(|| format!("resets {} to {start:?}, by force: {force}", plan.name));
        group.reset(start, force).await
    } else {
        place.note(|| format!("deletes {}, by force: {force}, and creates it at {start:?}", plan.name));
        let options = plan.created_at(start);
        if place.random(2) == 0 {
            delete_beside_creation(place, (&group, &options), force).await?;
        } else {
            group.delete(force).await?;
        }
        place.pause(if *churns_groups { 100 } else { 500 }).await;
        group.create(&options).await.map(|_| ())
    }
}

/// Deletes `group`, while somebody else creates it as soon as it is gone: perhaps before the deletion knows whether it has succeeded.
async fn delete_beside_creation(
    place: &Place,
    (group, options): (&Group<Notification>, &GroupOptions),
    force: bool,
) -> Result<()> {
    let creation = async {
        while !matches!(group.create(options).await, Ok(true)) {
            place.pause(20).await;
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
