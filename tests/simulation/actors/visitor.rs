//! Visitors: consumers of groups that expire. They come, stay and go away, perhaps for longer than the expiry.

use std::time::Duration;

use futures_util::future::join_all;
use notibus::{
    Error, Node, Result,
    event::Notification,
    group::{Consumer, Group, GroupName},
};

use super::{consumer, context::ActorContext};
use crate::{
    draw::{AbsencePlan, GroupPlan},
    guarantee::Guarantee,
    shared::Phase,
    witness::Witness,
};

/// The longest pause between two checks of a visitor's group, in milliseconds.
const CHECK_PAUSE_MAX_MS: u64 = 500;

/// Works now and then for those of `groups` that expire, until the end.
pub(super) async fn run(actor: &ActorContext, node: &Node, groups: &[GroupPlan]) {
    let visits = groups.iter().filter_map(|plan| {
        let group = actor.bus.group(&plan.name).expect("the names of groups are short");
        let key = group.name().clone();
        let absences = plan.absences?;
        Some(async move { Visitor { actor, node, plan, absences, group, key }.visit().await })
    });
    join_all(visits).await;
}

/// A consumer that comes and goes.
struct Visitor<'a> {
    actor: &'a ActorContext,
    node: &'a Node,
    plan: &'a GroupPlan,
    absences: AbsencePlan,
    group: Group<Notification>,
    /// Its key among the groups of all feeds, which is its name.
    key: GroupName,
}

impl Visitor<'_> {
    /// Comes and goes until the faults end; then comes once more, if it is to return.
    async fn visit(&self) {
        let busy = self.actor.shared.begin();
        while self.actor.is_chaos() {
            if let Some(consumer) = self.come().await {
                self.stay().await;
                self.go(consumer).await;
            }
            self.actor.pause(self.absences.away_max_ms).await;
        }
        drop(busy);
        let mut consumer = None;
        while self.absences.returns && consumer.is_none() && self.actor.phase() != Phase::End {
            self.actor.pause(CHECK_PAUSE_MAX_MS).await;
            consumer = self.come().await;
        }
        self.actor.until_the_end().await;
        if let Some(consumer) = consumer {
            self.go(consumer).await;
        }
    }

    /// Joins the group, and creates it first if there is none.
    async fn come(&self) -> Option<Consumer> {
        let mut joined = self.ask(self.join()).await;
        if matches!(joined, Err(Error::NoGroup { .. })) {
            joined = match self.create().await {
                Ok(()) => self.ask(self.join()).await,
                Err(error) => Err(error),
            };
        }
        joined.inspect_err(|error| self.actor.note(|| format!("cannot work for {}: {error}", self.key))).ok()
    }

    async fn join(&self) -> Result<Consumer> {
        consumer::join(self.actor, self.node, self.plan, (&self.group, self.key.clone())).await
    }

    /// Stays for a while, and checks the group, which may have expired while the process was paused.
    async fn stay(&self) {
        let env = self.actor.db.env();
        let stay = 1 + self.actor.random(self.absences.stay_max_ms);
        let until = env.now() + Duration::from_millis(stay);
        while self.actor.is_chaos() && env.now() < until {
            self.actor.pause(CHECK_PAUSE_MAX_MS.min(stay)).await;
            let status = self.ask(self.group.status()).await;
            if matches!(status, Err(Error::NoGroup { .. })) {
                let _ = self.create().await;
            }
        }
    }

    async fn create(&self) -> Result<()> {
        self.actor.note(|| format!("finds that {} is gone, and creates it", self.key));
        self.actor.shared.witness(Witness::GroupFoundGone);
        self.group.create(&self.plan.created_at(self.plan.start)).await.map(drop)
    }

    /// Goes away: in order, or, while there are faults, sometimes at once.
    async fn go(&self, consumer: Consumer) {
        if self.actor.is_chaos() && self.actor.random(2) == 0 {
            return;
        }
        if let Err(error) = consumer.shutdown().await {
            self.actor.note(|| format!("a visitor of {} has ended badly: {error}", self.key));
        }
    }

    /// Judges whether `answer` is right about the existence of the group, if that does not change meanwhile.
    async fn ask<T>(&self, answer: impl Future<Output = Result<T>>) -> Result<T> {
        let before = self.actor.shared.oracle().existence(&self.key);
        let answer = answer.await;
        if before == self.actor.shared.oracle().existence(&self.key) {
            let got_no_group = matches!(answer, Err(Error::NoGroup { .. }));
            let is_there = before.is_there();
            if got_no_group && is_there || answer.is_ok() && !is_there {
                let reason = format!(
                    "{} exists: {is_there}, and a consumer got an answer that says so: {}",
                    self.key, !got_no_group
                );
                self.actor.shared.fail(Guarantee::Consistent.broken(reason));
            }
        }
        answer
    }
}
