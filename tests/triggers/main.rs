//! Triggers: work is gathered, done, tried again, cancelled, and never lost.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../common/mod.rs"]
mod common;
mod expiry;
mod fixture;
mod index;
mod marks;
mod parking;
mod races;
mod replication;
mod structured;
mod tenants;
mod two_hours;
