//! [`Flight`]: a commit under way to the store. It belongs to the world, so that it can outlive its process.

use std::{collections::BTreeMap, sync::Arc, task::Waker};

use bytes::Bytes;
use parking_lot::Mutex;

use super::issuer::Issuer;
use crate::{
    base::{encoding::Versionstamp, error::Result},
    store::{AtomicOp, Backend, Mutation, testing::Inner},
};

/// A commit under way to the store.
pub(super) struct Flight {
    pub engine: Arc<dyn Backend>,
    pub inner: Inner,
    pub mutations: Vec<Mutation>,
    pub issuer: Issuer,
    /// Whether its process has already learned that it failed.
    pub is_late: bool,
    /// Whether it happens even if its process is gone.
    pub is_sure: bool,
    pub state: Mutex<FlightState>,
}

pub(super) enum FlightState {
    Under {
        /// Whether its caller still waits for it.
        is_awaited: bool,
        /// Wakes the caller, if it has waited for longer than a commit takes.
        waker: Option<Waker>,
    },
    Arrived(Option<Result<Option<Versionstamp>>>),
}

/// The keys that a transaction touches, with their values before.
pub(super) type Touched = BTreeMap<Bytes, Option<Bytes>>;

impl Flight {
    /// Whether it goes to `engine`.
    pub fn is_for(&self, engine: &Arc<dyn Backend>) -> bool {
        Arc::ptr_eq(&self.engine, engine)
    }

    /// Adds the keys that get their stamp from its commit at `stamp` to the touched keys.
    pub fn add_stamped(&self, touched: &mut Touched, stamp: Versionstamp) {
        for mutation in &self.mutations {
            if let Mutation::Atomic(AtomicOp::SetVersionstampedKey, key, _) = mutation {
                touched.entry(stamped(key, stamp)).or_insert(None);
            }
        }
    }
}

/// The key or value `operand`, whose last 4 bytes say where its stamp belongs, with `stamp` filled in.
pub(super) fn stamped(operand: &[u8], stamp: Versionstamp) -> Bytes {
    let (key, place) = operand.split_at(operand.len() - 4);
    let place = u32::from_le_bytes(place.try_into().expect("four bytes were split off")) as usize;
    let mut key = key.to_vec();
    key[place..place + stamp.0.len()].copy_from_slice(&stamp.0);
    key.into()
}
