//! What stands before a bus: HTTP, and what tests see of its inside. The command is beside, in `src/bin`.

#[cfg(feature = "http")]
pub mod http;
#[cfg(feature = "test-util")]
pub mod test_util;
