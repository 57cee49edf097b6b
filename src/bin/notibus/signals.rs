//! Signals to stop: the first one asks for an end in order, the second one ends the process at once.

use tokio::sync::watch;

use crate::{failure::Failure, out};

/// The exit code after a second signal, as shells report an interrupt.
const EXIT_INTERRUPTED: i32 = 130;

/// Listens from now on. The first signal completes the returned value; the second one ends the process.
pub fn stopped() -> Result<Stopped, Failure> {
    let mut signals = Signals::listen()?;
    let (stop, first) = watch::channel(false);
    tokio::spawn(async move {
        signals.next().await;
        stop.send_replace(true);
        signals.next().await;
        out::notice("notibus: asked to stop again: ended at once; its leases expire by themselves");
        end_at_once(EXIT_INTERRUPTED);
    });
    Ok(Stopped(first))
}

/// Whether the process was asked to stop.
#[derive(Clone)]
pub struct Stopped(watch::Receiver<bool>);

impl Stopped {
    /// Waits until the process is asked to stop.
    pub async fn wait(&mut self) {
        // The sender is dropped only with the runtime, before the second signal.
        let _ = self.0.wait_for(|stop| *stop).await;
    }
}

/// The signals that stop a process.
#[cfg(unix)]
struct Signals {
    /// Sent by a terminal.
    interrupt: tokio::signal::unix::Signal,
    /// Sent by a process supervisor.
    terminate: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    /// Replaces the default handling of the signals.
    fn listen() -> Result<Self, Failure> {
        use tokio::signal::unix::{SignalKind, signal};
        let listen = |kind| signal(kind).map_err(|error| Failure::Failed(format!("signals: {error}")));
        Ok(Self { interrupt: listen(SignalKind::interrupt())?, terminate: listen(SignalKind::terminate())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// The signals that stop a process.
#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    /// Does nothing.
    #[expect(clippy::unnecessary_wraps, reason = "on Unix it can fail")]
    fn listen() -> Result<Self, Failure> {
        Ok(Self)
    }

    async fn next(&mut self) {
        drop(tokio::signal::ctrl_c().await);
    }
}

/// Ends the process with `code`, and without exit handlers: the client library of a cluster crashes if it is torn down while
/// its network thread runs, and stopping that thread may be what hangs.
#[cfg(unix)]
#[expect(unsafe_code, reason = "the standard library has no exit without handlers")]
pub fn end_at_once(code: i32) -> ! {
    // SAFETY: it does not return, touches no memory, and may be called by any thread at any time.
    unsafe { libc::_exit(code) }
}

/// Ends the process with `code`.
#[cfg(not(unix))]
pub fn end_at_once(code: i32) -> ! {
    std::process::exit(code)
}
