//! What stands before a bus: HTTP, and the simulation that judges it. The command is beside, in `src/bin`.

#[cfg(feature = "http")]
pub mod http;
#[cfg(feature = "simulation")]
pub mod simulation;
