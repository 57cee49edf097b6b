//! Nodes: how they share work while they join, leave, die, and wake up after they were presumed dead. Most tests pause the clock.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod assignment;
#[path = "../common/mod.rs"]
mod common;
mod deaths;
#[path = "../disk/mod.rs"]
mod disk;
mod fencing;
mod fixture;
mod gone;
mod heartbeats;
mod many_roles;
mod outage;
mod roles;
mod sharing;
mod work;
