//! [`Signals`]: the signals that ask a process to end.

use std::io;

/// The signals that ask a process to end.
#[cfg(unix)]
pub(super) struct Signals {
    /// Sent by a terminal.
    interrupt: tokio::signal::unix::Signal,
    /// Sent by a process supervisor.
    terminate: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    /// Replaces the default handling of the signals.
    pub fn listen() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// The signals that ask a process to end.
#[cfg(not(unix))]
pub(super) struct Signals;

#[cfg(not(unix))]
impl Signals {
    /// Does nothing.
    #[expect(clippy::unnecessary_wraps, reason = "on Unix it can fail")]
    pub fn listen() -> io::Result<Self> {
        Ok(Self)
    }

    pub async fn next(&mut self) {
        drop(tokio::signal::ctrl_c().await);
    }
}
