//! The outside of a bus: HTTP, and access to its internals for tests. The command is in `src/bin`.

#[cfg(feature = "http")]
pub mod http;
#[cfg(feature = "test-util")]
pub mod test_util;
