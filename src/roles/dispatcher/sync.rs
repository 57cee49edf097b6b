//! What the wake protocol ([`log`](super::log)) is made of. A test puts the types of a model checker in their place.

pub(super) use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering},
};

pub(super) use futures_util::task::AtomicWaker;
