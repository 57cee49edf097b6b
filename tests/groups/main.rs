//! Groups: durable consumers of a feed, on many nodes, under faults. Time is paused in most tests.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod admin;
#[path = "../common/mod.rs"]
mod common;
mod concurrent;
mod consuming;
mod cost;
mod documents;
mod doubts;
mod failures;
mod fencing;
mod fixture;
mod janitor;
mod parking;
mod replay;
mod reshards;
mod scenario;
