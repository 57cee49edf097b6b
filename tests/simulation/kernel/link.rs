//! [`Link`]: the connection of a process to the store: a network that delays, loses and lies.
//!
//! The link decides the fate of reads and watches; [`commits`](super::commits) decides that of commits.

use std::{
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use futures_util::{FutureExt, future::BoxFuture};
use notibus::{
    Result,
    store::{
        Env, Store, StoreError, Watch,
        testing::{Commit, Failed, Interceptor, Operation, Stamp},
    },
};

use super::{
    Issuer,
    commits::send,
    time::{Clock, Time},
};
use crate::{keyspace::show_key, shared::Shared, witness::Fault};

/// The connection of a process to the store.
pub struct Link {
    pub shared: Arc<Shared>,
    pub issuer: Issuer,
    /// The store behind the network.
    pub engine: Arc<Store>,
    /// An environment with true time.
    pub env: Env,
}

impl Link {
    /// Connects `issuer` to `engine`.
    pub fn new(shared: Arc<Shared>, issuer: Issuer, engine: Arc<Store>) -> Self {
        let env = Arc::new(Clock::exact(&shared.time, issuer.process)).env();
        Self { shared, issuer, engine, env }
    }

    /// Draws how long a step of the network takes.
    pub fn latency(&self) -> Duration {
        let longest = self.shared.plan.latency_us;
        if longest == 0 { Duration::ZERO } else { Duration::from_micros(self.shared.draw(1..=longest)) }
    }

    /// Draws how long a slow operation takes.
    pub fn slowness(&self) -> Duration {
        Duration::from_millis(self.shared.draw(1..=self.shared.plan.slow_ms))
    }

    /// Draws the fault of a read, if one strikes, and the delay of the read.
    pub fn read_fault(&self) -> (Option<StoreError>, Duration) {
        let shared = &self.shared;
        shared.may_crash(self.issuer);
        let mut pause = self.latency();
        if shared.strikes(Fault::SlowRead) {
            pause += self.slowness();
        }
        let error = if shared.strikes(Fault::ReadTooOld) {
            Some(StoreError::TRANSACTION_TOO_OLD)
        } else if shared.strikes(Fault::ReadBehind) {
            let codes = [StoreError::FUTURE_VERSION, StoreError::PROCESS_BEHIND, StoreError::DATABASE_LOCKED];
            Some(codes[shared.draw(0..=2) as usize].clone())
        } else if shared.strikes(Fault::ReadTimedOut) {
            Some(StoreError::TRANSACTION_TIMED_OUT)
        } else {
            None
        };
        (error, pause)
    }

    /// Adds a line to the trace.
    pub fn note(&self, line: impl FnOnce() -> String) {
        let Issuer { process, generation } = self.issuer;
        self.shared.note(|| format!("process {process}.{generation} {}", line()));
    }

    /// Returns the watch, which may now have a fault.
    pub fn disturb(self: &Arc<Self>, watch: Watch) -> Watch {
        let shared = &self.shared;
        if shared.strikes(Fault::WatchDropped) {
            return Watch::new(std::future::pending());
        }
        let early = if shared.strikes(Fault::WatchSpurious) {
            Some(Ok(()))
        } else if shared.strikes(Fault::WatchFailed) {
            Some(Err(StoreError::TOO_MANY_WATCHES))
        } else {
            None
        };
        if let Some(result) = early {
            let (pause, env) = (self.slowness(), self.env.clone());
            return Watch::new(async move {
                env.sleep(pause).await;
                Ok(result?)
            });
        }
        let delay = if shared.strikes(Fault::WatchLate) { self.slowness() } else { self.latency() };
        let link = Arc::clone(self);
        Watch::new(async move {
            let fired = Crossing { watch, time: link.shared.time.clone(), process: link.issuer.process };
            fired.await?;
            link.env.sleep(delay).await;
            Ok(())
        })
    }
}

/// A watch of the engine that makes a process run when it fires.
struct Crossing {
    watch: Watch,
    time: Time,
    process: usize,
}

/// Wakes a task of another process, and makes that process run.
struct CrossingWaker {
    task: Waker,
    time: Time,
    process: usize,
}

impl Wake for CrossingWaker {
    fn wake(self: Arc<Self>) {
        self.time.make_runnable(self.process);
        self.task.wake_by_ref();
    }
}

impl Future for Crossing {
    type Output = Result<()>;

    fn poll(mut self: std::pin::Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let waker =
            CrossingWaker { task: context.waker().clone(), time: self.time.clone(), process: self.process };
        let waker = Waker::from(Arc::new(waker));
        self.watch.poll_unpin(&mut Context::from_waker(&waker))
    }
}

impl Interceptor for Link {
    /// Lets a read happen after a delay, unless a fault strikes. After a failed read, all later operations of the attempt fail.
    fn before_read(&self, operation: &Operation, failed: &Failed) -> Option<BoxFuture<'static, Result<()>>> {
        let is_watch = matches!(operation, Operation::Watch { .. });
        let is_refused = is_watch && self.shared.strikes(Fault::WatchRefused);
        let (fault, pause) = self.read_fault();
        self.note(|| match &fault {
            None => show(operation),
            Some(error) => format!("{} -> {error}", show(operation)),
        });
        let (env, failed) = (self.env.clone(), Arc::clone(failed));
        Some(Box::pin(async move {
            if !pause.is_zero() {
                env.sleep(pause).await;
            }
            let mut failed = failed.lock();
            if failed.is_none() {
                *failed = fault;
            }
            match &*failed {
                Some(error) => Err(error.clone().into()),
                None if is_refused => Err(StoreError::TOO_MANY_WATCHES.into()),
                None => Ok(()),
            }
        }))
    }

    fn watch(
        self: &Arc<Self>,
        _: &[u8],
        set: BoxFuture<'static, Result<Watch>>,
    ) -> BoxFuture<'static, Result<Watch>> {
        let link = Arc::clone(self);
        Box::pin(async move {
            let watch = set.await?;
            Ok(link.disturb(watch))
        })
    }

    fn commit(self: &Arc<Self>, commit: Commit<'_>) -> BoxFuture<'static, Stamp> {
        if !commit.attempt.writes() {
            // A client decides a commit without writes by itself.
            return commit.happen();
        }
        if commit.attempt.operations.iter().any(|done| matches!(done, Operation::Watch { .. })) {
            self.shared.fail("a watch was set in a transaction that writes".to_owned());
        }
        send(self, commit)
    }
}

/// Formats a read for the trace.
fn show(operation: &Operation) -> String {
    match operation {
        Operation::Get { key, .. } => format!("reads {}", show_key(key)),
        Operation::GetRange { range, .. } => format!("reads from {}", show_key(&range.begin)),
        Operation::Watch { key } => format!("watches {}", show_key(key)),
        _ => "reads the version".to_owned(),
    }
}
