//! For tests of layers: [`Faults`] makes a store fail as a plan says, and [`Trace`] records the operations on a store. For tests of the
//! store itself, [`open_on`] opens it on a disk that the test provides.
//!
//! The first two are wrappers. Each gives a [`Store`](super::Store) that is used like any other and keeps its rows in the wrapped store. So
//! a test can drive a layer through the wrapper and read the result from the wrapped store. Wrappers can be nested.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
//! use notibus::{store::{StoreError, AtomicOp, Store, testing::{CommitFault, Faults, Trace}}};
//!
//! let store = Store::memory();
//! let trace = Trace::new(&store);
//! let faults = Faults::new(&trace.store());
//! // The first commit happens, but its result is unknown to the client.
//! faults.script_commits([CommitFault::After(StoreError::COMMIT_UNKNOWN_RESULT)]);
//!
//! let add_one = 1_u64.to_le_bytes();
//! let db = faults.store();
//! db.run(async |tx| Ok(tx.atomic(AtomicOp::Add, b"visits", &add_one))).await?;
//!
//! // The body ran twice, and was committed twice.
//! assert_eq!(faults.counts().commits, 2);
//! let transactions = trace.take();
//! assert_eq!(transactions.len(), 2);
//! assert!(transactions.iter().all(|tx| tx.mutations().count() == 1 && tx.reads().count() == 0));
//! # Ok(()) }
//! ```

mod disk;
mod faults;
mod operation;
mod trace;
mod wrapper;

pub use disk::{Access, DiskStore, File, Files, FolderTuning, Lock, check_on, open_on};
pub use faults::{CommitFault, Faults, Gate, OperationCounts, WatchFault};
pub use operation::{Attempt, Operation};
pub use trace::Trace;
pub use wrapper::{Commit, DeferredCommit, Failed, Interceptor, Stamp, intercepted};
