//! Waking subscribers. Their wakers are their own, and may panic: that must cost nobody else anything.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    task::Waker,
};

use crate::error::panic_text;

/// Wakes somebody; whether that went well.
pub(super) fn guarded(wake: impl FnOnce()) -> bool {
    let woken = catch_unwind(AssertUnwindSafe(wake));
    if let Err(panic) = &woken {
        tracing::error!(panic = panic_text(&**panic), "the waker of a subscriber has panicked");
    }
    woken.is_ok()
}

/// Wakes all of them, whatever the wakers of some do.
pub(super) fn all(wakers: impl IntoIterator<Item = Waker>) {
    for waker in wakers {
        guarded(|| waker.wake());
    }
}
