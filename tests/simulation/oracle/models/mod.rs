//! What the oracle knows of each reader, each consumer and each feed of documents.

pub(super) mod consumer;
pub(super) mod delivery_order;
pub(super) mod documents;
pub(super) mod follower;
pub(super) mod subscriber;
#[cfg(feature = "http")]
pub(super) mod web;
