//! [`Gate`]: holds a commit until a test lets it go on.

use tokio::sync::watch;

/// Holds commits, so that a test can script how transactions interleave. Clones are the same gate.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::store::{Database, Isolation, testing::{CommitFault, Faults, Gate}};
///
/// let store = Database::memory();
/// let faults = Faults::new(&store);
/// let gate = Gate::default();
/// faults.script_commits([CommitFault::Hold(gate.clone())]);
///
/// let slow = tokio::spawn(async move {
///     let tx = faults.database().begin();
///     tx.get(b"k", Isolation::Serializable).await?;
///     tx.set(b"k", b"slow");
///     tx.commit().await
/// });
/// gate.reached().await;
/// store.run(async |tx| Ok(tx.set(b"k", b"fast"))).await?;
/// gate.open();
/// assert_eq!(slow.await.unwrap().unwrap_err().code(), Some(1020));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Gate(watch::Sender<State>);

#[derive(Debug, Clone, Copy, Default)]
struct State {
    reached: usize,
    /// Whether it lets them through.
    is_open: bool,
}

impl Default for Gate {
    fn default() -> Self {
        Self(watch::Sender::new(State::default()))
    }
}

impl Gate {
    /// Completes when a commit has reached the gate; at once if one has before.
    pub async fn reached(&self) {
        self.until(|state| state.reached > 0).await;
    }

    /// Lets all waiting and later commits through.
    pub fn open(&self) {
        self.0.send_modify(|state| state.is_open = true);
    }

    /// Reaches the gate, and waits until it is open.
    pub(super) async fn pass(&self) {
        self.0.send_modify(|state| state.reached += 1);
        self.until(|state| state.is_open).await;
    }

    /// Completes when `holds` is true.
    async fn until(&self, holds: impl Fn(&State) -> bool) {
        self.0.subscribe().wait_for(|state| holds(state)).await.expect("the gate itself keeps the sender");
    }
}
