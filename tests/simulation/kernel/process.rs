//! [`Process`]: a process of the world, with a runtime of its own that runs only when the world runs it.
//!
//! With a runtime per process, a crash drops all tasks of the process at once, and a pause simply does not run the
//! process. All runtimes share one thread, one after the other.

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
    /// Wakes the process's run when nothing is left to do.
    idle: Arc<Idle>,
}

/// Whether a runtime has nothing left to do.
#[derive(Default)]
struct Idle {
    is_idle: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Process {
    /// A process that runs `main`; `seed` seeds tokio's random numbers.
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

    /// Runs until nothing is left to do before time passes.
    pub fn run(&self) {
        self.idle.is_idle.store(false, Ordering::Relaxed);
        self.runtime.block_on(UntilIdle(&self.idle));
    }

    /// Crashes: drops all tasks at once.
    pub fn crash(self) {
        drop(self.runtime);
    }
}

impl Idle {
    /// The runtime is about to park its thread.
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
