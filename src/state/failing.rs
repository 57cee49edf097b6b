//! [`Failing`]: the last failure in each shard that members of this process work on.
//!
//! Nobody has to clear a failure. It counts only while the member still works under the same lease, and while the shard's checkpoint is
//! before the row that failed. The code that builds a status reads the lease and the checkpoint from the store in any case.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use serde::Serialize;

use crate::{
    base::encoding::Sequence,
    state::keys::{ConsumerName, ShardId},
};

/// How many failures are kept. When there are more, the oldest one is forgotten.
const FAILURES_MAX: usize = 10_000;

/// Why a shard makes no progress: the work on its next rows fails, and is tried again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ShardFailure {
    /// The id whose work fails; `None` for a batch of several rows.
    pub id: Option<String>,
    /// How many times the work has failed.
    pub attempts: u32,
    /// The error of the last failure.
    pub error: String,
    /// When the work last failed, in milliseconds since 1970.
    pub at_ms: u64,
}

/// A failure, and the facts that decide whether it still matters.
#[derive(Debug)]
struct Noted {
    /// The epoch of the lease.
    epoch: u64,
    /// The last row that failed.
    last: Sequence,
    failure: ShardFailure,
}

/// The last failure in each shard of each consumer.
#[derive(Debug, Default)]
pub(crate) struct Failing(Mutex<BTreeMap<(ConsumerName, ShardId), Noted>>);

impl Failing {
    /// Notes that the work on the shard's rows up to `last` failed, under the lease with this epoch.
    pub fn note(
        &self,
        (consumer, shard, epoch): (&ConsumerName, ShardId, u64),
        last: Sequence,
        failure: ShardFailure,
    ) {
        let mut failures = self.0.lock();
        failures.insert((consumer.clone(), shard), Noted { epoch, last, failure });
        if failures.len() > FAILURES_MAX {
            let oldest = failures.iter().min_by_key(|(_, noted)| noted.failure.at_ms);
            let oldest = oldest.map(|(place, _)| place.clone()).expect("there are many");
            failures.remove(&oldest);
        }
    }

    /// Returns why the shard makes no progress, if it is at `checkpoint` under the lease with this epoch.
    pub fn of(
        &self,
        (consumer, shard, epoch): (&ConsumerName, ShardId, u64),
        checkpoint: Sequence,
    ) -> Option<ShardFailure> {
        let failures = self.0.lock();
        let noted = failures.get(&(consumer.clone(), shard))?;
        (noted.epoch == epoch && checkpoint < noted.last).then(|| noted.failure.clone())
    }
}
