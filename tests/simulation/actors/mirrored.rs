//! A mirror: at each barrier, it must show the databases as they were then, and never one that did not exist.

use std::{sync::Arc, time::Duration};

use notibus::{Result, dispatcher::Mirror, event::Sequence};
use tokio::task::JoinSet;

use super::{choice, context::ActorContext, receiver::Source};
use crate::{guarantee::Guarantee, oracle::Interest, witness::Witness};

/// The pause between two barriers, and the time limit of a barrier while faults strike.
const PAUSE: Duration = Duration::from_secs(1);

/// The time limit of a barrier once everything is at rest.
const REST_MAX: Duration = Duration::from_mins(1);

/// A mirror in a process, and what it mirrors.
#[derive(Clone)]
pub(super) struct Mirrored {
    actor: ActorContext,
    mirror: Arc<Mirror>,
    interest: Interest,
}

impl Mirrored {
    /// Starts a mirror if `bits` say so, and has the oracle judge it now and then.
    pub fn start(
        actor: &ActorContext,
        source: &Source,
        bits: u64,
        tasks: &mut JoinSet<()>,
    ) -> Result<Option<Self>> {
        if (bits >> 32) & 1 == 0 {
            return Ok(None);
        }
        let interest = choice::mirrored(actor, bits >> 33);
        let Some(mirror) = source.mirror(&interest)? else { return Ok(None) };
        actor.note(|| format!("has a mirror of {interest:?}"));
        let mirrored = Self { actor: actor.clone(), mirror: Arc::new(mirror), interest };
        tasks.spawn(mirrored.clone().run());
        Ok(Some(mirrored))
    }

    /// Judges the mirror again and again.
    async fn run(self) {
        loop {
            self.actor.store.env().sleep(PAUSE).await;
            // If the barrier was not passed, the mirror may be behind, but must still show only what existed.
            let at = self.reached(PAUSE).await.unwrap_or(Sequence::MIN);
            self.judge(at);
        }
    }

    /// Waits at a barrier for at most `limit`. Returns the position up to which the mirror shows everything.
    async fn reached(&self, limit: Duration) -> Option<Sequence> {
        let Self { actor, mirror, .. } = self;
        let recorded = actor.shared.oracle().recorded_so_far();
        let reached = async {
            let version = actor.store.begin().read_version().await?;
            mirror.wait_until(version).await
        };
        let at = tokio::select! {
            biased;
            reached = reached => reached.ok()?,
            () = actor.store.env().sleep(limit) => return None,
        };
        actor.shared.oracle().passed_barrier(&actor.shared, &recorded, at);
        Some(at)
    }

    /// Judges what the mirror shows now, and whether that includes everything up to `at`.
    fn judge(&self, at: Sequence) {
        let Self { actor, mirror, interest } = self;
        let Ok(view) = mirror.view() else { return };
        if let Err(broken) = actor.shared.oracle().judge_mirror(interest, view.values(), at) {
            actor.shared.fail(broken.about(format!("a mirror of {interest:?}")));
        }
    }

    /// Judges the mirror once everything is at rest.
    pub async fn judge_at_rest(&self) {
        let Self { actor, mirror, .. } = self;
        if self.reached(REST_MAX).await.is_none() {
            let reason = "a mirror does not come to its end after everything has come to rest";
            return actor.shared.fail(Guarantee::Live.broken(reason));
        }
        self.judge(Sequence::MAX);
        if mirror.view().is_ok_and(|view| !view.is_empty()) {
            actor.shared.witness(Witness::MirrorAtRest);
        }
    }
}
