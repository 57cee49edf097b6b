//! [`Bodies`] is the room that the bodies of all requests share.
//!
//! A client may begin to send a body and stop. The server holds the part that came until the time limit of the body ends. So this
//! room has a bound.

use std::{sync::Arc, time::Duration};

use axum::http::StatusCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Failure;

const INFLATED_AT_ONCE_MAX: usize = 2;

/// The room for all bodies together.
#[derive(Debug)]
pub(super) struct Bodies {
    /// One permit for each byte.
    room: Arc<Semaphore>,
    /// The room for what feeds keep of their bodies. It is another one, so that lasting feeds do not hold up other requests.
    kept: Arc<Semaphore>,
    /// Limits how many bodies are inflated at once.
    pub inflating: Arc<Semaphore>,
}

impl Bodies {
    pub fn new(len_max: usize) -> Self {
        let room = || Arc::new(Semaphore::new(len_max.min(Semaphore::MAX_PERMITS)));
        let inflating = Arc::new(Semaphore::new(INFLATED_AT_ONCE_MAX));
        Self { room: room(), kept: room(), inflating }
    }

    /// Takes room for `len` bytes that a feed keeps. Fails with 503 if there is none.
    pub fn keep(&self, len: usize) -> Result<OwnedSemaphorePermit, Failure> {
        take(&self.kept, len, "The server keeps too many ids of documents for its feeds. Try again.")
    }
}

/// Takes `len` permits of `room`. Fails with 503 and `reason` if there are not so many.
fn take(room: &Arc<Semaphore>, len: usize, reason: &'static str) -> Result<OwnedSemaphorePermit, Failure> {
    let full = || {
        let failure = Failure::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", reason);
        failure.retry_after(Duration::from_secs(1))
    };
    let len = u32::try_from(len).map_err(|_| full())?;
    Arc::clone(room).try_acquire_many_owned(len).map_err(|_| full())
}

/// A body, and the room that it takes.
pub(super) struct Held {
    pub bytes: Vec<u8>,
    /// `None` before the first byte.
    pub room: Option<OwnedSemaphorePermit>,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Held {
    /// Takes room and memory for `len` more bytes, of which there are at most `len_max` together. Fails with 503 if there is no room.
    /// What grows by doubling has up to twice the memory of its bytes, so the room is that of the memory.
    pub fn reserve(&mut self, bodies: &Bodies, len: usize, len_max: usize) -> Result<(), Failure> {
        let (needed, capacity) = (self.bytes.len() + len, self.bytes.capacity());
        if needed > capacity {
            let wanted = needed.max((2 * capacity).min(len_max));
            self.grow(bodies, wanted - capacity)?;
            self.bytes.reserve_exact(wanted - self.bytes.len());
        }
        Ok(())
    }

    /// Takes room for `len` more bytes. Fails with 503 if there is none.
    pub fn grow(&mut self, bodies: &Bodies, len: usize) -> Result<(), Failure> {
        let more = take(&bodies.room, len, "The server holds too many bodies of requests. Try again.")?;
        match &mut self.room {
            None => self.room = Some(more),
            Some(room) => room.merge(more),
        }
        Ok(())
    }
}
