//! [`Progress`]: how far a replay has come.

use tokio::sync::watch;

use crate::deadline::{Deadline, Moves};

/// How far a replay has come.
#[derive(Clone)]
pub struct Progress {
    /// How long the store may go without an answer.
    pub deadline: Deadline,
    /// Counts its answers.
    pub moves: Moves,
    /// Number of recorded events.
    pub recorded: watch::Sender<u64>,
}
