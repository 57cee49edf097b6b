//! [`Process`]: a process of the world, with a runtime of its own that runs only when the world runs it.
//!
//! With a runtime per process, a crash drops all tasks of the process at once, and a pause simply does not run the
//! process. All runtimes share one thread, one after the other; or each has threads of its own, which a pause holds up.

use std::{
    cell::RefCell,
    num::NonZeroUsize,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
};

use parking_lot::{Condvar, Mutex};
use tokio::runtime::{Builder, Runtime};
use tracing::dispatcher::{self, DefaultGuard};

/// Whether runs can be replayed: only this cfg makes tokio's own random numbers depend on the seed.
pub(super) const IS_REPLAYABLE: bool = cfg!(tokio_unstable);

pub(super) struct Process {
    runtime: Runtime,
    /// Wakes the process's run when nothing is left to do.
    idle: Arc<Idle>,
    /// Its own threads, if it has any.
    threads: Option<Threads>,
}

struct Threads {
    count: NonZeroUsize,
    /// Holds them up while the process is paused.
    gate: Arc<Gate>,
}

/// A gate that holds threads up while it is shut.
#[derive(Default)]
struct Gate {
    is_shut: Mutex<bool>,
    opens: Condvar,
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
        Self { runtime, idle, threads: None }
    }

    /// A process that runs `main` on so many threads of its own. What they log goes where this thread's log goes.
    pub fn start_threads(count: NonZeroUsize, main: impl Future<Output = ()> + Send + 'static) -> Self {
        thread_local! {
            static LOG: RefCell<Option<DefaultGuard>> = const { RefCell::new(None) };
        }
        let log = dispatcher::get_default(Clone::clone);
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(count.get());
        builder.on_thread_start(move || LOG.set(Some(dispatcher::set_default(&log))));
        builder.on_thread_stop(|| LOG.set(None));
        let runtime = builder.build().expect("the system has room for some more threads");
        runtime.spawn(main);
        let threads = Threads { count, gate: Arc::default() };
        Self { runtime, idle: Arc::default(), threads: Some(threads) }
    }

    /// Holds its own threads up, each when its present task waits.
    pub fn pause(&self) {
        let Some(Threads { count, gate }) = &self.threads else { return };
        *gate.is_shut.lock() = true;
        for _ in 0..count.get() {
            let gate = Arc::clone(gate);
            self.runtime.spawn(async move { gate.pass() });
        }
    }

    /// Lets its own threads go on.
    pub fn resume(&self) {
        if let Some(Threads { gate, .. }) = &self.threads {
            *gate.is_shut.lock() = false;
            gate.opens.notify_all();
        }
    }

    /// Runs until nothing is left to do before time passes.
    pub fn run(&self) {
        self.idle.is_idle.store(false, Ordering::Relaxed);
        self.runtime.block_on(UntilIdle(&self.idle));
    }

    /// Crashes: drops all tasks at once; with threads, each task where it waits next.
    pub fn crash(self) {
        self.resume();
        drop(self.runtime);
    }
}

impl Gate {
    /// Blocks the thread while the gate is shut.
    fn pass(&self) {
        self.opens.wait_while(&mut self.is_shut.lock(), |is_shut| *is_shut);
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
