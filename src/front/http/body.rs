//! Reads the bodies of requests, limits their length and how long they may take, and inflates compressed ones.
//!
//! The length limit also applies after inflating, so that a small body cannot become a large one. All bodies together are limited as well:
//! a client may stop in the middle of a body, and the server then holds the part that it has received until the time limit. Bodies that
//! anybody may send have their own limits, so that strangers take no room from callers with credentials. This module does not compress
//! answers, because compression would hold up feeds.

use std::{io::Read, sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes, HttpBody},
    http::{HeaderMap, StatusCode, header},
};
use flate2::bufread::GzDecoder;
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{Failure, caller::Permission};
use crate::base::env::Env;

const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// The largest body, in bytes, that is accepted without credentials.
const ANONYMOUS_LEN_MAX: usize = 16 << 10;

/// The maximum number of bodies without credentials that are received concurrently.
const ANONYMOUS_AT_ONCE_MAX: usize = 64;

const ANONYMOUS_TIMEOUT: Duration = Duration::from_secs(5);

/// The maximum number of bodies that are inflated concurrently, each on its own thread: a large one keeps a core busy for a while.
const INFLATED_AT_ONCE_MAX: usize = 2;

/// How many bytes of room one permit represents.
const UNIT: usize = 1 << 10;

/// The memory that request bodies may take.
#[derive(Debug)]
pub(super) struct Bodies {
    env: Env,
    /// The maximum size of a body, before and after inflating, in bytes.
    len_max: usize,
    /// The room for the bodies of callers who record or administer.
    room: Arc<Semaphore>,
    /// The room for the bodies of callers who only read. It is separate, so that they keep nobody from recording.
    of_readers: Arc<Semaphore>,
    /// The room for the parts of bodies that feeds keep. It is separate, so that long-lived feeds do not hold up other requests.
    kept: Arc<Semaphore>,
    /// One permit for each body of an unauthenticated caller.
    anonymous: Semaphore,
    inflating: Arc<Semaphore>,
}

impl Bodies {
    /// Makes room for bodies of `len_max` bytes each, and `all_len_max` bytes together.
    pub fn new(env: &Env, len_max: usize, all_len_max: usize) -> Self {
        let room = || Arc::new(Semaphore::new((all_len_max / UNIT).min(Semaphore::MAX_PERMITS)));
        let [anonymous, inflating] = [ANONYMOUS_AT_ONCE_MAX, INFLATED_AT_ONCE_MAX].map(Semaphore::new);
        Self {
            env: env.clone(),
            len_max,
            room: room(),
            of_readers: room(),
            kept: room(),
            anonymous,
            inflating: Arc::new(inflating),
        }
    }

    /// Takes room for `len` bytes that a feed keeps. Fails with 503 if there is no room.
    pub fn keep(&self, len: usize) -> Result<OwnedSemaphorePermit, Failure> {
        take(&self.kept, len)
    }
}

/// Takes room for `len` bytes. Fails with 503 if there is no room.
fn take(room: &Arc<Semaphore>, len: usize) -> Result<OwnedSemaphorePermit, Failure> {
    let units = u32::try_from(len.div_ceil(UNIT)).map_err(|_| full())?;
    Arc::clone(room).try_acquire_many_owned(units).map_err(|_| full())
}

/// Returns the answer to a body for which there is no room.
fn full() -> Failure {
    let reason = "The server holds too many request bodies. Try again.";
    let failure = Failure::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", reason);
    failure.retry_after(Duration::from_secs(1))
}

/// A body, and the room that it takes.
struct Held(Vec<u8>, #[expect(dead_code, reason = "it is dropped with the body")] OwnedSemaphorePermit);

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Bodies {
    /// Reads and inflates the body of a request with these headers. Fails with 413 if it is too long, with 408 if it does not arrive in
    /// time, with 415 if its encoding is unknown, with 400 if it breaks off or does not match its encoding, and with 503 if there is no
    /// room.
    pub async fn receive(
        &self,
        headers: &HeaderMap,
        body: Body,
        permission: Permission,
    ) -> Result<Bytes, Failure> {
        let is_packed = is_packed(headers)?;
        let (all, len_max) = match permission {
            Permission::Record | Permission::Admin => (&self.room, self.len_max),
            Permission::Known => (&self.of_readers, self.len_max),
            // Nothing that they may ask for needs more.
            Permission::Updates | Permission::Metrics => (&self.of_readers, self.len_max.min(1 << 10)),
        };
        // This comes first, so a client that waits for `100 Continue` need not send a body that would be refused.
        let declared = body.size_hint().exact();
        if declared.is_some_and(|len| len > len_max as u64) {
            return Err(too_large(len_max));
        }
        // A body takes room as it arrives: a client that declares a long one and then sends nothing must not keep others out. One without a
        // declared length is reallocated as it grows.
        let (mut room, factor) = (take(all, 0)?, if declared.is_none() { 3 } else { 1 });
        let bytes = self
            .read(body, len_max, BODY_TIMEOUT, |len| {
                room.merge(take(all, (factor * len).saturating_sub(UNIT * room.num_permits()))?);
                Ok(())
            })
            .await?;
        if !is_packed {
            return Ok(Bytes::from_owner(Held(bytes, room)));
        }
        let plain_len = plain_len(&bytes).min(len_max);
        room.merge(take(all, plain_len)?);
        // The permit lives as long as the work, even if the client hangs up.
        let turn = Arc::clone(&self.inflating).acquire_owned().await;
        let inflate = move || inflate(&bytes, plain_len, len_max).map(|plain| (plain, turn));
        let broken = |_| Failure::bad_request("The body cannot be inflated.");
        let (plain, _) = tokio::task::spawn_blocking(inflate).await.map_err(broken)??;
        Ok(Bytes::from_owner(Held(plain, room)))
    }

    /// Reads and inflates a body that anybody may send, such as a log-in. It fails as [`Bodies::receive`] does, but uses none of the room
    /// for other bodies: strangers who start to send a body and then stall could fill that room.
    pub async fn receive_anonymous(&self, headers: &HeaderMap, body: Body) -> Result<Vec<u8>, Failure> {
        let is_packed = is_packed(headers)?;
        let _turn = self.anonymous.try_acquire().map_err(|_| full())?;
        let bytes = self.read(body, ANONYMOUS_LEN_MAX, ANONYMOUS_TIMEOUT, |_| Ok(())).await?;
        if is_packed { inflate(&bytes, ANONYMOUS_LEN_MAX, ANONYMOUS_LEN_MAX) } else { Ok(bytes) }
    }

    /// Receives at most `len_max` bytes within `limit`. Before it keeps another part, it calls `make_room` with the length of all parts.
    async fn read(
        &self,
        mut body: Body,
        len_max: usize,
        limit: Duration,
        mut make_room: impl FnMut(usize) -> Result<(), Failure>,
    ) -> Result<Vec<u8>, Failure> {
        let read = async {
            // A vector that grows by doubling can take up to three times the memory of its bytes while it is moved.
            let declared = body.size_hint().exact().unwrap_or_default();
            let mut bytes = Vec::with_capacity((declared as usize).min(len_max));
            while let Some(frame) = body.frame().await {
                let frame = frame.map_err(|_| Failure::bad_request("The body broke off."))?;
                let Ok(data) = frame.into_data() else { continue };
                if bytes.len() + data.len() > len_max {
                    return Err(too_large(len_max));
                }
                make_room(bytes.len() + data.len())?;
                bytes.extend_from_slice(&data);
            }
            Ok(bytes)
        };
        tokio::select! {
            read = read => read,
            () = self.env.sleep(limit) => {
                let reason = "The body did not arrive in time.";
                Err(Failure::new(StatusCode::REQUEST_TIMEOUT, "timeout", reason))
            }
        }
    }
}

/// Returns whether a body with these headers is compressed. Fails if the encoding is unknown.
fn is_packed(headers: &HeaderMap) -> Result<bool, Failure> {
    let mut encodings = headers.get_all(header::CONTENT_ENCODING).iter();
    let encoding = encodings.next().map_or("identity", |value| value.to_str().unwrap_or_default().trim());
    match encoding.to_ascii_lowercase().as_str() {
        "identity" if encodings.next().is_none() => Ok(false),
        "gzip" | "x-gzip" if encodings.next().is_none() => Ok(true),
        _ => {
            let reason = "The Content-Encoding of a body must be gzip or identity.";
            Err(Failure::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "bad_content_encoding", reason))
        }
    }
}

/// Returns the inflated length according to the trailer of the gzip member (RFC 1952, section 2.3.1).
fn plain_len(packed: &[u8]) -> usize {
    packed.last_chunk().map_or(0, |len| u32::from_le_bytes(*len) as usize)
}

/// Inflates a body of one gzip member to at most `room` bytes, and stops as soon as there are more. An empty member costs as much as a
/// large one, so a small body with thousands of empty ones is refused after the first.
fn inflate(packed: &[u8], room: usize, len_max: usize) -> Result<Vec<u8>, Failure> {
    let (mut plain, mut decoder) = (Vec::with_capacity(room), GzDecoder::new(packed));
    let inflated = decoder.by_ref().take(room as u64 + 1).read_to_end(&mut plain);
    let is_longer = plain.len() > room;
    if is_longer && room == len_max {
        return Err(too_large(len_max));
    }
    if is_longer || inflated.is_err() {
        return Err(Failure::bad_request("The body is not gzip, as its Content-Encoding says."));
    }
    if !decoder.into_inner().is_empty() {
        return Err(Failure::bad_request("The body continues after its gzip member: send it as one member."));
    }
    Ok(plain)
}

fn too_large(len_max: usize) -> Failure {
    let reason = format!("The body has more than {len_max} bytes.");
    Failure::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", reason)
}
