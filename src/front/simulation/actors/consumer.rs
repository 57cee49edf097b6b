//! Consumers of groups, with observers that work exactly once, or at least once, and fail.

use std::{error::Error as StdError, sync::Arc};

use super::place::Place;
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
    },
    bus::Node,
    front::simulation::{
        app,
        draw::{GroupPlan, Work},
        oracle::group_key,
        witness::{Fault, Witness},
    },
    roles::group::{
        CheckpointPolicy, Checkpointer, CloseReason, Consumer, Group, GroupBatch, Observer, ObserverResult,
    },
    state::{
        feed::{Feed, FeedRow},
        keys::{GroupName, ShardId},
    },
};

pub(super) async fn start(place: &Place, node: &Node, plan: &GroupPlan) -> Result<Consumer> {
    start_of(place, node, plan, &place.bus.feed()).await
}

pub(super) async fn start_of<R: FeedRow>(
    place: &Place,
    node: &Node,
    plan: &GroupPlan,
    feed: &Feed<R>,
) -> Result<Consumer> {
    let group = feed.group(&plan.name)?;
    group.create(&plan.created_at(plan.start)).await?;
    let key = group_key(feed.id.bytes(), group.name()).expect("the names of groups are short");
    join(place, node, plan, (&group, key)).await
}

/// Joins `group`, whose key among the groups of all feeds is `key`. It does not create it.
pub(super) async fn join<R: FeedRow>(
    place: &Place,
    node: &Node,
    plan: &GroupPlan,
    (group, key): (&Group<R>, GroupName),
) -> Result<Consumer> {
    let (place, plan) = (place.clone(), Arc::new(plan.clone()));
    let options = plan.options.clone();
    let factory = move |shard| Worker {
        place: place.clone(),
        plan: Arc::clone(&plan),
        key: key.clone(),
        shard,
        generation: 0,
        unsaved: None,
    };
    node.consumer(group, factory, options).await
}

struct Worker {
    place: Place,
    plan: Arc<GroupPlan>,
    /// The group, by its key among the groups of all feeds.
    key: GroupName,
    shard: ShardId,
    /// The number of the group's last reset, which marks its work.
    generation: u64,
    /// The checkpoint of the last batch, if it is not saved yet.
    unsaved: Option<Checkpointer>,
}

impl<R: FeedRow> Observer<R> for Worker {
    async fn opened(&mut self, _: ShardId, position: Sequence) {
        self.generation = self.place.shared.oracle().generation(&self.key);
        self.place.note(|| format!("opens shard {} of {} at {position}", self.shard, self.key));
    }

    async fn batch(&mut self, batch: GroupBatch<R>) -> ObserverResult {
        let Self { place, plan, .. } = self;
        place.note(|| format!("is given {} rows of {}, up to {}", batch.rows.len(), plan.name, batch.to));
        place.pause(plan.batch_max_ms).await;
        if place.shared.strikes(Fault::ObserverPanic) {
            // It unwinds without a message on the terminal.
            std::panic::resume_unwind(Box::new("an observer of a simulation panics"));
        }
        if place.shared.strikes(Fault::ObserverError) {
            return Err("an observer of a simulation fails".into());
        }
        let is_unworkable = |row: &R| plan.unworkable.iter().any(|name| name.as_str().as_bytes() == row.id());
        if batch.rows.iter().any(|row| is_unworkable(row)) {
            return Err("an observer of a simulation fails with this database for ever".into());
        }
        match plan.work {
            Work::ExactlyOnce => self.work_once(&batch).await?,
            Work::AtLeastOnce => self.work(&batch).await?,
        }
        if self.place.shared.strikes(Fault::ObserverError) {
            return Err("an observer of a simulation fails after its work".into());
        }
        Ok(())
    }

    async fn closed(&mut self, _: CloseReason) {
        // If the save fails, the rows come again.
        let _ = self.save().await;
    }
}

impl Worker {
    /// Works in one transaction with the checkpoint.
    async fn work_once<R: FeedRow>(
        &self,
        batch: &GroupBatch<R>,
    ) -> Result<(), Box<dyn StdError + Send + Sync>> {
        let (place, name) = (&self.place, &self.key);
        let done = place.db.run(async |tx| {
            if batch.checkpoint_in(&tx).await?.is_done() {
                place.shared.witness(Witness::CheckpointFoundDone);
                return Ok(());
            }
            for row in &batch.rows {
                tx.set(&app::effect(name, row.sequence()), b"");
            }
            Ok(())
        });
        let done = done.await;
        if let Err(Error::PartlyDone { .. }) = &done {
            place.shared.witness(Witness::CheckpointPartlyDone);
        }
        Ok(done?)
    }

    /// Works first, and saves the checkpoint then, or some batches later.
    async fn work<R: FeedRow>(
        &mut self,
        batch: &GroupBatch<R>,
    ) -> Result<(), Box<dyn StdError + Send + Sync>> {
        let rows: Vec<_> = batch.rows.iter().map(|row| row.sequence()).collect();
        self.place.shared.oracle().observed(&self.key, self.generation, &rows);
        if self.plan.options.checkpoint == CheckpointPolicy::Explicit {
            self.unsaved = Some(batch.checkpointer());
            if self.place.random(self.plan.saves_every) == 0 {
                self.save().await?;
            }
        }
        Ok(())
    }

    /// Saves all batches that are not saved yet.
    async fn save(&mut self) -> Result<()> {
        match self.unsaved.take() {
            Some(checkpointer) => checkpointer.checkpoint().await,
            None => Ok(()),
        }
    }
}
