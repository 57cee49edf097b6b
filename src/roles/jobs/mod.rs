//! Work that follows a feed: parallel jobs over its shards, and triggers that run jobs for the databases that need them.

mod fence;
mod index_trigger;
mod parallel;
mod replication_trigger;
mod trigger;

pub use self::{
    fence::Fence,
    index_trigger::{IndexBuild, IndexDdocs, index_trigger},
    parallel::{Batch, ParallelJob, ParallelJobOptions, TaskResult},
    replication_trigger::{Scan, ScanReporter, replication_trigger},
    trigger::{ParkedDb, StoredTrigger, Tenants, Trigger, TriggerJob, TriggerOptions},
};
pub use crate::state::trigger_board::TriggerStatus;
