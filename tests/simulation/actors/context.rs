//! [`ActorContext`]: a process, as its actors see it.

use std::{sync::Arc, time::Duration};

use notibus::{Bus, event::DbInstance, store::Store};

use crate::{
    kernel::Issuer,
    shared::{Phase, Shared},
};

/// The interval at which a process polls for a change of phase.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A process, as its actors see it.
#[derive(Clone)]
pub(super) struct ActorContext {
    pub shared: Arc<Shared>,
    pub issuer: Issuer,
    /// The process's handle on the store.
    pub store: Store,
    pub bus: Bus,
}

impl ActorContext {
    pub fn phase(&self) -> Phase {
        self.shared.phase()
    }

    /// Whether faults still strike and actors still begin new work.
    pub fn is_chaos(&self) -> bool {
        self.phase() == Phase::Chaos
    }

    /// Waits until all processes should shut down.
    pub async fn until_the_end(&self) {
        while self.phase() != Phase::End {
            self.store.env().sleep(POLL_INTERVAL).await;
        }
    }

    /// Sleeps for at most `most_ms` milliseconds.
    pub async fn pause(&self, most_ms: u64) {
        let pause = Duration::from_millis(1 + self.random(most_ms));
        self.store.env().sleep(pause).await;
    }

    /// Returns 64 random bits. A new choice can use spare bits of an earlier draw, so that all later draws stay the same.
    pub fn bits(&self) -> u64 {
        self.store.env().random()
    }

    /// Returns a random number below `end`, which must be above 0.
    pub fn random(&self, end: u64) -> u64 {
        self.bits() % end
    }

    /// Returns a new, random instance of a database.
    pub fn instance(&self) -> DbInstance {
        DbInstance((u128::from(self.bits()) << 64 | u128::from(self.bits())).to_be_bytes())
    }

    /// Adds a line to the trace.
    pub fn note(&self, line: impl FnOnce() -> String) {
        let Issuer { process, generation } = self.issuer;
        self.shared.note(|| format!("process {process}.{generation} {}", line()));
    }
}
