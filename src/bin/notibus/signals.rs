//! Signals to stop: the first one asks for an end in order, the second one ends the process at once.

use tokio::sync::watch;

use crate::Failure;

/// The exit code of a process that was told twice, as shells report an interrupt.
const EXIT_INTERRUPTED: i32 = 130;

/// Listens from now on. The first interrupt or request to terminate is informed by what is returned.
pub fn stopped() -> Result<Stopped, Failure> {
    let mut signals = Signals::listen()?;
    let (told, first) = watch::channel(false);
    tokio::spawn(async move {
        signals.next().await;
        told.send_replace(true);
        signals.next().await;
        eprintln!("notibus: asked to stop again: ended at once; what it held expires by itself");
        end_at_once();
    });
    Ok(Stopped(first))
}

/// Whether the process was asked to stop.
#[derive(Clone)]
pub struct Stopped(watch::Receiver<bool>);

impl Stopped {
    /// Waits until it was.
    pub async fn wait(&mut self) {
        // The sender is dropped only with the runtime, before the second signal.
        let _ = self.0.wait_for(|told| *told).await;
    }
}

/// What tells a process to stop.
#[cfg(unix)]
struct Signals {
    /// From a terminal.
    interrupt: tokio::signal::unix::Signal,
    /// From whoever looks after processes.
    terminate: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    /// Takes the signals away from their defaults.
    fn listen() -> Result<Self, Failure> {
        use tokio::signal::unix::{SignalKind, signal};
        let listen = |kind| signal(kind).map_err(|error| Failure::Failed(format!("signals: {error}")));
        Ok(Self { interrupt: listen(SignalKind::interrupt())?, terminate: listen(SignalKind::terminate())? })
    }

    /// Waits for the next one.
    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// What tells a process to stop.
#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    /// Nothing to prepare.
    #[expect(clippy::unnecessary_wraps, reason = "on Unix it can fail")]
    fn listen() -> Result<Self, Failure> {
        Ok(Self)
    }

    /// Waits for the next one.
    async fn next(&mut self) {
        drop(tokio::signal::ctrl_c().await);
    }
}

/// Ends the process without any of what is done at an orderly exit: the client library of a cluster crashes if it is torn down while
/// its network runs, and stopping that may be what hangs.
#[cfg(unix)]
#[expect(unsafe_code, reason = "the standard library has no exit without handlers")]
fn end_at_once() -> ! {
    // SAFETY: it returns to nobody, touches no memory, and may be called by any thread at any time.
    unsafe { libc::_exit(EXIT_INTERRUPTED) }
}

/// Ends the process.
#[cfg(not(unix))]
fn end_at_once() -> ! {
    std::process::exit(EXIT_INTERRUPTED)
}
