//! The synchronisation types of the wake protocol ([`log`](super::log)). A test replaces them with those of a model checker.

pub(super) use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
};

pub(super) use futures_util::task::AtomicWaker;
