//! What the oracle knows about each reader, each consumer and each feed of documents.

pub(super) mod consumer;
pub(super) mod documents;
pub(super) mod subscriber;
