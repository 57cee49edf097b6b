//! [`ApiOptions`]: limits of feeds and bodies, and who may ask.

use std::time::Duration;

use super::Access;
use crate::{
    base::error::{Error, Result},
    roles::changes::LOOK_INTERVAL,
};

/// The most feeds that may read the store at once.
const READS_MAX: usize = 10_000;

/// How the routers answer.
#[derive(Debug, Clone)]
pub struct ApiOptions {
    /// Who may ask. Default: everyone who reaches the server. A layer with accounts of its own puts them in front.
    pub access: Access,
    /// The most of `timeout`, and what it is by default. Default: 60 s.
    pub timeout_max: Duration,
    /// The least of `heartbeat`, unless that is over the most. Default: 100 ms.
    pub heartbeat_min: Duration,
    /// The most of `heartbeat`. Default: 60 s.
    pub heartbeat_max: Duration,
    /// How many feeds each client may have open: a name with credentials, or else an address. Default: 10,000.
    pub feeds_per_client_max: usize,
    /// How many feeds read the store at once, 1 to 10,000; others wait for their turn. Default: 16.
    pub reads_max: usize,
    /// How many feeds ask the layer at once for documents or leaves (`include_docs`, `style=all_docs`), 1 to 10,000; others that
    /// do so wait for their turn. They hold none of [`ApiOptions::reads_max`] meanwhile, so slow documents delay only each other.
    /// Default: 16.
    pub doc_reads_max: usize,
    /// How long the documents of a page may take, before the feed is cut off. Default: 60 s.
    pub doc_reads_limit: Duration,
    /// Whether there is `_db_updates` at all. If not, it answers as CouchDB does without its database `_global_changes`. Default:
    /// yes.
    pub keeps_db_updates: bool,
    /// After how long a live feed of `_changes` looks at the store at the latest although no notification has told it to: of
    /// changes that were removed without a word, or edits of a database that the bus holds for replaced, none does. Those of one
    /// database share what was found. Default: 5 min.
    pub look_interval: Duration,
    /// For how long a proxy may keep the answer to a `longpoll` of `_db_updates` that names a sequence as `since`, so that it asks once
    /// for all who wait there and hold the same. An answer that is a little old is no wrong one: it goes on from its `last_seq`. Only
    /// with [`Access::Open`], where all may read the same. Default: not at all.
    pub longpoll_max_age: Option<Duration>,
    /// The longest body of a request, in bytes, also after inflating. Default: 1 MiB.
    pub body_len_max: usize,
    /// The most bytes of all bodies together that have come and are not worked off; another one gets 503. Default: 64 MiB.
    pub bodies_len_max: usize,
}

impl Default for ApiOptions {
    fn default() -> Self {
        Self {
            access: Access::Open,
            timeout_max: Duration::from_mins(1),
            heartbeat_min: Duration::from_millis(100),
            heartbeat_max: Duration::from_mins(1),
            feeds_per_client_max: 10_000,
            reads_max: 16,
            doc_reads_max: 16,
            doc_reads_limit: Duration::from_mins(1),
            keeps_db_updates: true,
            look_interval: LOOK_INTERVAL,
            longpoll_max_age: None,
            body_len_max: 1 << 20,
            bodies_len_max: 64 << 20,
        }
    }
}

impl ApiOptions {
    /// Fails if an option is out of its limits.
    pub(super) fn check(&self) -> Result<()> {
        let zero = |what| Err(Error::invalid(what, "it is zero"));
        match self {
            Self { heartbeat_max: Duration::ZERO, .. } => zero("heartbeat"),
            Self { look_interval: Duration::ZERO, .. } => zero("look interval"),
            Self { feeds_per_client_max: 0, .. } => zero("feeds per client"),
            Self { doc_reads_limit: Duration::ZERO, .. } => zero("limit of the reads of documents"),
            Self { reads_max, doc_reads_max, .. }
                if [reads_max, doc_reads_max].iter().any(|max| !(1..=READS_MAX).contains(*max)) =>
            {
                let reason = format!("{reads_max} and {doc_reads_max} at once are not 1 to {READS_MAX}");
                Err(Error::invalid("reads", reason))
            }
            Self { longpoll_max_age: Some(_), access: Access::Credentials(_), .. } => {
                let reason = "a proxy would show its answers to those who have no credentials";
                Err(Error::invalid("age of long-polls", reason))
            }
            Self { body_len_max, bodies_len_max, .. } if bodies_len_max < body_len_max => {
                Err(Error::invalid("length of bodies", "one would not fit"))
            }
            _ => Ok(()),
        }
    }
}
