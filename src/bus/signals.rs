//! [`Signals`]: what asks a process to end.

use std::io;

/// What asks a process to end.
#[cfg(unix)]
pub(super) struct Signals {
    /// From a terminal.
    interrupt: tokio::signal::unix::Signal,
    /// From a supervisor of processes.
    terminate: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    /// Takes the signals away from their defaults.
    pub fn listen() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// Waits for the next one.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// What asks a process to end.
#[cfg(not(unix))]
pub(super) struct Signals;

#[cfg(not(unix))]
impl Signals {
    /// Nothing to prepare.
    #[expect(clippy::unnecessary_wraps, reason = "on Unix it can fail")]
    pub fn listen() -> io::Result<Self> {
        Ok(Self)
    }

    /// Waits for the next one.
    pub async fn next(&mut self) {
        drop(tokio::signal::ctrl_c().await);
    }
}
