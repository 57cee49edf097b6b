//! Work that follows a feed: parallel jobs over its shards.

mod parallel;

pub use parallel::{Batch, ParallelJob, ParallelJobOptions, TaskResult};
