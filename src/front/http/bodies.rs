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
    /// Limits how many bodies are inflated at once.
    pub inflating: Arc<Semaphore>,
}

impl Bodies {
    pub fn new(len_max: usize) -> Self {
        let room = Arc::new(Semaphore::new(len_max.min(Semaphore::MAX_PERMITS)));
        Self { room, inflating: Arc::new(Semaphore::new(INFLATED_AT_ONCE_MAX)) }
    }
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
    /// Takes room for `len` more bytes. Fails with 503 if there is none.
    pub fn grow(&mut self, bodies: &Bodies, len: usize) -> Result<(), Failure> {
        let full = || {
            let reason = "The server holds too many bodies of requests. Try again.";
            let failure = Failure::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", reason);
            failure.retry_after(Duration::from_secs(1))
        };
        let len = u32::try_from(len).map_err(|_| full())?;
        let more = Arc::clone(&bodies.room).try_acquire_many_owned(len).map_err(|_| full())?;
        match &mut self.room {
            None => self.room = Some(more),
            Some(room) => room.merge(more),
        }
        Ok(())
    }
}
