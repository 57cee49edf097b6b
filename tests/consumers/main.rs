//! Consumers: durable work on a feed, on many nodes, under faults. Most tests pause the clock.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod admin;
mod again;
#[path = "../common/mod.rs"]
mod common;
mod cost;
mod deferred;
mod documents;
mod ended;
mod failures;
mod fencing;
mod fixture;
mod interleavings;
mod janitor;
mod news;
mod older_rows;
mod recipes;
mod reporting;
mod reshards;
mod scans;
mod scenario;
mod working;
