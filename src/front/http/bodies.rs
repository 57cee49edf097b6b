//! [`Bodies`] is the room that the bodies of all requests share.
//!
//! A client may begin to send a body and stop. The server holds the part that came until the time limit of the body ends. So this
//! room has a bound.

use std::{sync::Arc, time::Duration};

use axum::http::StatusCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Failure;

const INFLATED_AT_ONCE_MAX: usize = 2;

/// How many bytes a piece of a body has at most, unless as many come at once.
const PIECE_LEN_MAX: usize = 64 << 10;

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

/// A body that arrives in pieces. A single vector that grows by doubling would take up to three times the memory of its bytes while
/// it is moved, and the allocator would keep the smaller ones.
pub(super) struct Coming {
    pieces: Vec<Vec<u8>>,
    len: usize,
    /// `None` before the first byte.
    room: Option<OwnedSemaphorePermit>,
}

impl Coming {
    pub fn new() -> Self {
        Self { pieces: Vec::new(), len: 0, room: None }
    }

    /// Returns how many bytes have come.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Adds `data`, and takes room for the memory that it needs. Fails with 503 if there is none.
    pub fn add(&mut self, bodies: &Bodies, data: &[u8]) -> Result<(), Failure> {
        let last = self.pieces.last_mut();
        let fitting = last.as_ref().map_or(0, |last| (last.capacity() - last.len()).min(data.len()));
        let (fits, rest) = data.split_at(fitting);
        if let Some(last) = last {
            last.extend_from_slice(fits);
        }
        if !rest.is_empty() {
            // A small body takes little, and a large one has few pieces.
            let capacity = rest.len().max(self.len.min(PIECE_LEN_MAX));
            take_more(&mut self.room, bodies, capacity)?;
            let mut piece = Vec::with_capacity(capacity);
            piece.extend_from_slice(rest);
            self.pieces.push(piece);
        }
        self.len += data.len();
        Ok(())
    }

    /// Puts the pieces together. It frees each one that it has copied.
    pub fn whole(mut self) -> Held {
        if self.pieces.len() < 2 {
            return Held { bytes: self.pieces.pop().unwrap_or_default(), _room: self.room };
        }
        let mut bytes = Vec::with_capacity(self.len);
        for piece in self.pieces {
            bytes.extend_from_slice(&piece);
        }
        Held { bytes, _room: self.room }
    }
}

/// A body, and the room that it takes.
pub(super) struct Held {
    bytes: Vec<u8>,
    /// `None` for an empty body. It is dropped with the body.
    _room: Option<OwnedSemaphorePermit>,
}

impl Held {
    /// Takes room for a body that is there already. Fails with 503 if there is none.
    pub fn new(bodies: &Bodies, bytes: Vec<u8>) -> Result<Self, Failure> {
        let mut room = None;
        take_more(&mut room, bodies, bytes.capacity())?;
        Ok(Self { bytes, _room: room })
    }
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Adds room for `len` more bytes to `room`. Fails with 503 if there is none.
fn take_more(room: &mut Option<OwnedSemaphorePermit>, bodies: &Bodies, len: usize) -> Result<(), Failure> {
    let more = take(&bodies.room, len, "The server holds too many bodies of requests. Try again.")?;
    match room {
        None => *room = Some(more),
        Some(room) => room.merge(more),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_in_pieces_takes_room_for_its_memory_and_comes_out_whole() {
        let bodies = Bodies::new(1 << 20);
        for piece in [1, 7, 1_000, PIECE_LEN_MAX, 3 * PIECE_LEN_MAX] {
            let body: Vec<_> = (0..500_000_usize).map(|place| (place % 251) as u8).collect();
            let mut coming = Coming::new();
            for data in body.chunks(piece) {
                coming.add(&bodies, data).unwrap();
                let memory: usize = coming.pieces.iter().map(Vec::capacity).sum();
                let taken = (1 << 20) - bodies.room.available_permits();
                assert_eq!((coming.len(), taken), (coming.pieces.iter().map(Vec::len).sum(), memory));
                assert!(memory <= 2 * coming.len().min(PIECE_LEN_MAX) + coming.len());
            }
            assert!(coming.whole().as_ref() == body);
            assert_eq!(bodies.room.available_permits(), 1 << 20, "it gives the room back");
        }
    }
}
