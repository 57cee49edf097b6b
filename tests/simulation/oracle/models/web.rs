//! [`WebClient`]: what the oracle knows of a client of `_db_updates`.

use std::collections::BTreeSet;

use notibus::event::{DbName, EventKind, Kinds, Sequence};

use crate::{
    kernel::ProcessId,
    oracle::{account::Account, given::Start},
};

pub(crate) type WebClientId = u64;

/// A client of `_db_updates`.
#[derive(Debug)]
pub(crate) struct WebClient {
    /// The process at which it is, and its number there.
    pub slot: (ProcessId, u32),
    pub kinds: Kinds,
    pub account: Account,
    /// The position from which it resumes.
    pub since: String,
    /// Everything up to here was certainly sent to it.
    pub surely: Start,
    /// The rows that it was sent in answer to the present request.
    pub sent: BTreeSet<(Sequence, DbName, EventKind)>,
}
