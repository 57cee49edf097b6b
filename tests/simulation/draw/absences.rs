//! [`AbsencePlan`]: the draw of a group whose consumers go away, and that expires.

use std::time::Duration;

use fastrand::Rng;

/// How the consumers of a group come and go, and after how long without one the group is deleted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AbsencePlan {
    /// The expiry of the group.
    pub expiry: Duration,
    /// The longest time for which a consumer stays, in milliseconds.
    pub stay_max_ms: u64,
    /// The longest time for which it is away, in milliseconds.
    pub away_max_ms: u64,
    /// Whether the consumers come back when the faults have ended. Otherwise the group has to expire.
    pub returns: bool,
}

impl AbsencePlan {
    /// A draw.
    pub fn draw(random: &mut Rng) -> Self {
        let expiry_ms = random.u64(300..=3_000);
        Self {
            expiry: Duration::from_millis(expiry_ms),
            stay_max_ms: [200, 1_000, 4_000][random.usize(0..3)],
            away_max_ms: expiry_ms * [1, 3][random.usize(0..2)],
            returns: random.bool(),
        }
    }
}
