//! [`RelocationPlan`]: the draw of a move of the bus to another store.

use std::time::Duration;

use fastrand::Rng;

/// How a bus moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::front::simulation) enum Way {
    /// It is exported, and imported into an empty store; the layer copies its own rows.
    Export,
    /// The whole store is copied, as by a backup and a restore, and the incarnation of the bus is raised.
    Raise,
}

/// The move of a bus to another store.
#[derive(Debug, Clone, Copy)]
pub(in crate::front::simulation) struct RelocationPlan {
    pub way: Way,
    /// When it begins.
    pub at: Duration,
    /// By how much the versions of the new store are behind those of the old one.
    pub behind: Duration,
    /// Whether damaged exports are tried first.
    pub is_damaged: bool,
    /// Whether processes are opened at the new place before it is over.
    pub is_hasty: bool,
}

impl RelocationPlan {
    /// The draw of a world in which faults strike for so long.
    pub fn draw(random: &mut Rng, chaos: Duration) -> Self {
        Self {
            way: if random.u32(0..4) == 0 { Way::Raise } else { Way::Export },
            at: chaos * random.u32(20..=80) / 100,
            behind: [Duration::ZERO, Duration::from_secs(20), Duration::from_hours(1)][random.usize(0..3)],
            is_damaged: random.bool(),
            is_hasty: random.bool(),
        }
    }
}
