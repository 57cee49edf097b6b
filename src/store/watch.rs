//! [`Watch`]: a hint that a key has changed.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use futures_util::future::BoxFuture;

use crate::base::error::Result;

/// Completes when the value of a key is no longer the one that the watching transaction saw.
///
/// A watch is armed when its transaction commits. It fails with the error of a failed commit, and with
/// `operation_cancelled` (1101) if there never is a commit; also, as late as this, with `too_many_watches` (1032). It
/// may fire late, without a change, or not at all when the value changes back in between: rescan after it fires, and
/// keep a poll as a fallback. Dropping it disarms it. Setting a watch is a serializable read of the key, so set none
/// in a transaction that writes.
#[must_use = "a watch that is dropped is disarmed"]
pub struct Watch(BoxFuture<'static, Result<()>>);

impl Watch {
    /// A watch that fires with `future`, or fails with it: for what stands between a store and its users.
    pub fn new(future: impl Future<Output = Result<()>> + Send + 'static) -> Self {
        Self(Box::pin(future))
    }
}

impl Future for Watch {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(context)
    }
}
