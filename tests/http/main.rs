//! The outside of the bus over HTTP: what clients get, byte by byte.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod client;
#[path = "../common/mod.rs"]
mod common;
mod framing;
mod world;
