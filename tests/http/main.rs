//! Tests the bus over HTTP: what clients receive, byte by byte.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod access;
mod bodies;
mod changes;
mod client;
#[path = "../common/mod.rs"]
mod common;
#[path = "../disk/mod.rs"]
mod disk;
mod durations;
mod events;
mod fixture;
mod framing;
mod fuzz;
mod idle;
mod layer;
mod limits;
mod live;
mod manage;
mod pending;
#[cfg(unix)]
mod proxy;
mod query;
mod resume;
mod sessions;
mod slow_bodies;
mod spans;
mod status;
