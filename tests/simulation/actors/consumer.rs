//! Consumers of groups, with observers that work exactly once, or at least once, and fail.

use std::{error::Error as StdError, sync::Arc};

use notibus::{
    Error, Node, Result,
    event::{DbInstance, Sequence},
    feed::{Feed, FeedRow, ShardId},
    group::{
        CheckpointPolicy, Checkpointer, CloseReason, Consumer, Group, GroupBatch, GroupName, Observer,
        ObserverResult,
    },
};

use super::context::ActorContext;
use crate::{
    app,
    draw::{GroupPlan, Saving},
    oracle::group_key,
    witness::{Fault, Witness},
};

pub(super) async fn start(actor: &ActorContext, node: &Node, plan: &GroupPlan) -> Result<Consumer> {
    start_of(actor, node, plan, &actor.bus.feed(), None).await
}

pub(super) async fn start_of<R: FeedRow>(
    actor: &ActorContext,
    node: &Node,
    plan: &GroupPlan,
    feed: &Feed<R>,
    instance: Option<DbInstance>,
) -> Result<Consumer> {
    let group = feed.group(&plan.name)?;
    group.create(&plan.created_at(plan.start)).await?;
    join(actor, node, plan, (&group, group_key(instance, group.name()))).await
}

/// Joins `group`, whose key among the groups of all feeds is `key`. It does not create it.
pub(super) async fn join<R: FeedRow>(
    actor: &ActorContext,
    node: &Node,
    plan: &GroupPlan,
    (group, key): (&Group<R>, GroupName),
) -> Result<Consumer> {
    let (actor, plan) = (actor.clone(), Arc::new(plan.clone()));
    let options = plan.options.clone();
    let factory = move |shard| Worker {
        actor: actor.clone(),
        plan: Arc::clone(&plan),
        key: key.clone(),
        shard,
        generation: 0,
        unsaved: None,
    };
    node.consumer(group, factory, options).await
}

struct Worker {
    actor: ActorContext,
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
        self.generation = self.actor.shared.oracle().generation(&self.key);
        self.actor.note(|| format!("opens shard {} of {} at {position}", self.shard, self.key));
    }

    async fn batch(&mut self, batch: GroupBatch<R>) -> ObserverResult {
        let Self { actor, plan, .. } = self;
        actor.note(|| format!("is given {} rows of {}, up to {}", batch.rows.len(), plan.name, batch.to));
        actor.pause(plan.batch_max_ms).await;
        if actor.shared.strikes(Fault::ObserverPanic) {
            // It unwinds without a message on the terminal.
            std::panic::resume_unwind(Box::new("an observer of a simulation panics"));
        }
        if actor.shared.strikes(Fault::ObserverError) {
            return Err("an observer of a simulation fails".into());
        }
        let is_unworkable = |row: &R| plan.unworkable.iter().any(|name| name.as_str().as_bytes() == row.id());
        if batch.rows.iter().any(|row| is_unworkable(row)) {
            return Err("an observer of a simulation fails with this database forever".into());
        }
        match plan.saving {
            Saving::ExactlyOnce => self.work_once(&batch).await?,
            Saving::AtLeastOnce => self.work(&batch).await?,
        }
        if self.actor.shared.strikes(Fault::ObserverError) {
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
        let (actor, name) = (&self.actor, &self.key);
        let done = actor.db.run(async |tx| {
            if batch.checkpoint_in(&tx).await?.is_done() {
                actor.shared.witness(Witness::CheckpointFoundDone);
                return Ok(());
            }
            for row in &batch.rows {
                tx.set(&app::effect(name, row.sequence()), b"");
            }
            Ok(())
        });
        let done = done.await;
        if let Err(Error::PartlyDone { .. }) = &done {
            actor.shared.witness(Witness::CheckpointPartlyDone);
        }
        Ok(done?)
    }

    /// Works first, and saves the checkpoint then, or some batches later.
    async fn work<R: FeedRow>(
        &mut self,
        batch: &GroupBatch<R>,
    ) -> Result<(), Box<dyn StdError + Send + Sync>> {
        let rows: Vec<_> = batch.rows.iter().map(|row| row.sequence()).collect();
        self.actor.shared.oracle().observed(&self.key, self.generation, &rows);
        if self.plan.options.checkpoint == CheckpointPolicy::Explicit {
            self.unsaved = Some(batch.checkpointer());
            if self.actor.random(self.plan.saves_every) == 0 {
                if self.actor.shared.plan.doubts_last && self.actor.is_chaos() && self.actor.random(2) == 0 {
                    self.save_apart();
                } else {
                    self.save().await?;
                }
            }
        }
        Ok(())
    }

    /// Saves all batches that are not saved yet in a task of its own, which may come late, and after others. It counts as failed.
    fn save_apart(&self) {
        let Some(checkpointer) = self.unsaved.clone() else { return };
        let actor = self.actor.clone();
        tokio::spawn(async move {
            actor.pause(200).await;
            let saved = checkpointer.checkpoint().await;
            actor.note(|| format!("has saved apart: {saved:?}"));
        });
    }

    /// Saves all batches that are not saved yet.
    async fn save(&mut self) -> Result<()> {
        match self.unsaved.take() {
            Some(checkpointer) => checkpointer.checkpoint().await,
            None => Ok(()),
        }
    }
}
