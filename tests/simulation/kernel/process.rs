//! [`Process`]: a process of the world. It has its own runtime, which runs only when the world runs it.
//!
//! With a runtime per process, a crash drops all tasks of the process at once, and a paused process is simply not run. All runtimes share
//! one thread and take turns.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
};

use parking_lot::Mutex;
use tokio::runtime::{Builder, Runtime};

pub struct Process {
    runtime: Runtime,
    /// Wakes [`Process::run`] when nothing is left to do.
    idle: Arc<Idle>,
}

/// Shows whether a runtime has nothing left to do.
#[derive(Default)]
struct Idle {
    is_idle: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Process {
    /// Starts a process that runs `main`; `seed` seeds tokio's random numbers.
    pub fn start(seed: u64, main: impl Future<Output = ()> + Send + 'static) -> Self {
        let idle = Arc::new(Idle::default());
        let parked = Arc::clone(&idle);
        let mut builder = Builder::new_current_thread();
        builder.on_thread_park(move || parked.park());
        #[cfg(tokio_unstable)]
        builder.rng_seed(tokio::runtime::RngSeed::from_bytes(&seed.to_le_bytes()));
        #[cfg(not(tokio_unstable))]
        let _ = seed;
        let runtime = builder.build().expect("a runtime without drivers needs nothing of the system");
        runtime.spawn(main);
        Self { runtime, idle }
    }

    /// Runs until there is nothing left to do without waiting for time to pass.
    pub fn run(&self) {
        self.idle.is_idle.store(false, Ordering::Relaxed);
        self.runtime.block_on(UntilIdle(&self.idle));
    }

    /// Crashes the process: drops all of its tasks at once.
    pub fn crash(self) {
        drop(self.runtime);
    }
}

impl Idle {
    /// Called when the runtime is about to park its thread.
    fn park(&self) {
        self.is_idle.store(true, Ordering::Relaxed);
        if let Some(waker) = self.waker.lock().take() {
            waker.wake();
        }
    }
}

/// Completes when the runtime has nothing left to do.
struct UntilIdle<'a>(&'a Idle);

impl Future for UntilIdle<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.0.is_idle.load(Ordering::Relaxed) {
            return Poll::Ready(());
        }
        *self.0.waker.lock() = Some(context.waker().clone());
        Poll::Pending
    }
}
