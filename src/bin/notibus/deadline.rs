//! `--deadline`: how long a command waits for a store that does not answer.
//!
//! It limits the opening of a store ([`Store::open`](crate::store::Store::open)), each request of
//! [`Opened`](crate::target::Opened), and the work that a command does without them.

use std::{
    io::{self, Read, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use crate::failure::Failure;

/// How long a command waits for a store that does not answer.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(pub Duration);

impl Deadline {
    /// A longer deadline, for work that takes a known time.
    pub fn and(self, time: Duration) -> Self {
        Self(self.0.saturating_add(time))
    }

    /// The result of `work`. If it is not done in time, it is dropped, and the failure names `what`.
    pub async fn of<T, E: Into<Failure>>(
        self,
        what: &str,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, Failure> {
        tokio::select! {
            biased;
            done = work => done.map_err(Into::into),
            () = tokio::time::sleep(self.0) => Err(self.gave_up(what)),
        }
    }

    /// As [`Deadline::of`], for work of any length: the time counts from the last progress.
    pub async fn of_moving<T, E: Into<Failure>>(
        self,
        what: &str,
        moves: &Moves,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, Failure> {
        let stalled = async {
            let mut seen = moves.count();
            loop {
                tokio::time::sleep(self.0).await;
                let now = moves.count();
                if now == seen {
                    return;
                }
                seen = now;
            }
        };
        tokio::select! {
            biased;
            done = work => done.map_err(Into::into),
            () = stalled => Err(self.gave_up(what)),
        }
    }

    /// The failure of `what`, for which the store has taken too long.
    pub fn gave_up(self, what: &str) -> Failure {
        Failure::Failed(format!(
            "gave up {what}, after {}. If the store does not answer, check whether it runs (`fdbcli --exec status`); --deadline \
             allows more",
            humantime::format_duration(self.0)
        ))
    }
}

/// Counts progress.
#[derive(Debug, Clone, Default)]
pub struct Moves(Arc<AtomicU64>);

impl Moves {
    /// Notes progress.
    pub fn step(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Wraps `inner`, so that every read or write counts as progress.
    pub fn of<I>(&self, inner: I) -> Moving<I> {
        Moving { inner, moves: self.clone() }
    }
}

/// A file whose every read or write counts as progress.
#[derive(Debug)]
pub struct Moving<I> {
    inner: I,
    moves: Moves,
}

impl<W: Write> Write for Moving<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.moves.step();
        self.inner.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<R: Read> Read for Moving<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.moves.step();
        self.inner.read(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    fn text(outcome: Result<(), Failure>) -> String {
        match outcome {
            Err(Failure::Failed(reason)) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_does_not_move_is_given_up() {
        let limit = Deadline(Duration::from_secs(10));
        let reason = text(limit.of("reading the nodes", pending::<Result<(), Failure>>()).await);
        assert!(reason.contains("gave up reading the nodes") && reason.contains("10s"), "{reason}");

        let moves = Moves::default();
        let mut file = moves.of(Vec::new());
        let slow = async {
            for _ in 0..5 {
                tokio::time::sleep(Duration::from_secs(9)).await;
                file.write_all(b"row").map_err(|error| Failure::Failed(error.to_string()))?;
            }
            Ok::<_, Failure>(())
        };
        limit.of_moving("exporting", &moves, slow).await.unwrap();
        text(limit.of_moving("exporting", &moves, pending::<Result<(), Failure>>()).await);
    }
}
