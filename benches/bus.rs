//! The whole bus in memory and in a folder: events per second, and the time from commit to delivery, with and without pauses between folds.
//! On a cluster, `cargo bench --bench foundationdb -- whole` prints the same.

#![allow(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

#[path = "shared/whole.rs"]
mod whole;

use notibus::store::Store;
use tokio::runtime::Runtime;
use whole::Case;

#[cfg(feature = "cli")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    let runtime = Runtime::new().unwrap();
    for case in Case::all() {
        runtime.block_on(async {
            whole::print("memory", &Store::memory(), case).await;
            let folder = tempfile::tempdir().unwrap();
            let store = Store::open_dir(folder.path()).unwrap();
            whole::print("folder", &store, case).await;
        });
    }
}
