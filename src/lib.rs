//! Notibus.
mod encoding;
mod env;
mod error;
pub mod store;
pub use encoding::{Counters, Incarnation, Sequence, Versionstamp};
pub use env::{Env, Environment};
pub use error::{Error, Result, StoreError};
