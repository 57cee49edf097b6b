//! [`WebClient`]: what the oracle knows of a client of `_db_updates`.

use std::collections::BTreeSet;

use crate::{
    base::{
        encoding::Sequence,
        event::{DbName, EventKind, Kinds},
    },
    front::simulation::{
        issuer::ProcessId,
        oracle::{account::Account, given::Start},
    },
};

pub(in crate::front::simulation) type WebClientId = u64;

/// A client of `_db_updates`.
#[derive(Debug)]
pub(in crate::front::simulation::oracle) struct WebClient {
    /// The process at which it is, and its number there.
    pub slot: (ProcessId, u32),
    /// Whether a request of it is under way.
    pub is_asking: bool,
    pub kinds: Kinds,
    pub account: Account,
    /// The position from which it resumes.
    pub since: String,
    /// Everything up to here was certainly sent to it.
    pub surely: Start,
    /// The rows that it was sent in answer to the present request.
    pub sent: BTreeSet<(Sequence, DbName, EventKind)>,
}
