//! [`ApiOptions`] sets the limits of feeds and bodies, and says who may send requests.

use std::time::Duration;

use super::Access;
use crate::base::error::{Error, Result};

/// How the routers answer.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ApiOptions {
    /// Who may send requests. Default: everyone who reaches the server. A layer with its own accounts checks them before the
    /// routers.
    pub access: Access,
    /// The longest `timeout`, which is also its default. Default: 60 s.
    pub timeout_max: Duration,
    /// The shortest `heartbeat`, unless `heartbeat_max` is shorter. Default: 100 ms.
    pub heartbeat_min: Duration,
    /// The longest `heartbeat`. Default: 60 s.
    pub heartbeat_max: Duration,
    /// How many feeds each client may have open. A client is a name with credentials, or else an address. Default: 10,000.
    pub feeds_per_client_max: usize,
    /// How many feeds may read the store at once, 1 to 10,000; others wait for their turn. Default: 16.
    pub reads_max: usize,
    /// How many feeds may request documents or leaves (`include_docs`, `style=all_docs`) from the layer at once, 1 to 10,000;
    /// others wait for their turn. Meanwhile they take nothing of [`ApiOptions::reads_max`], so slow documents delay only feeds
    /// with documents. Default: 16.
    pub doc_reads_max: usize,
    /// How long the documents of a page may take before the feed is cut off. Default: 60 s.
    pub doc_reads_limit: Duration,
    /// Whether there is `_db_updates`. Without it, the route answers as CouchDB does without its database `_global_changes`.
    /// Default: yes.
    pub keeps_db_updates: bool,
    /// How long a proxy may cache the answer to a `longpoll` of `_db_updates` with a sequence as `since`. So the proxy sends one
    /// request for all clients that wait at the same position. A slightly old answer is still right, because the client continues
    /// from its `last_seq`. This needs [`Access::Open`], where all clients may read the same. Default: not at all.
    pub longpoll_max_age: Option<Duration>,
    /// The most bytes of a request's body, before and after inflating. Default: 1 MiB.
    pub body_len_max: usize,
    /// The most bytes of all bodies together that the server holds; a body beyond that gets 503. The ids of documents that feeds
    /// keep (`_doc_ids`) have as many bytes beside them. Default: 64 MiB.
    pub bodies_len_max: usize,
}

crate::base::macros::setters!(ApiOptions { access: Access, timeout_max: Duration, heartbeat_min: Duration, heartbeat_max: Duration, feeds_per_client_max: usize, reads_max: usize, doc_reads_max: usize, doc_reads_limit: Duration, keeps_db_updates: bool, longpoll_max_age: Option<Duration>, body_len_max: usize, bodies_len_max: usize });

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
            longpoll_max_age: None,
            body_len_max: 1 << 20,
            bodies_len_max: 64 << 20,
        }
    }
}

impl ApiOptions {
    /// The most that [`ApiOptions::reads_max`](field@Self::reads_max) and
    /// [`ApiOptions::doc_reads_max`](field@Self::doc_reads_max) may be.
    pub const READS_MAX: usize = 10_000;

    /// Fails if an option is out of its limits.
    pub(super) fn check(&self) -> Result<()> {
        let zero = |what| Err(Error::invalid(what, "it is zero"));
        match self {
            Self { heartbeat_max: Duration::ZERO, .. } => zero("heartbeat"),
            Self { feeds_per_client_max: 0, .. } => zero("feeds per client"),
            Self { doc_reads_limit: Duration::ZERO, .. } => zero("limit of the reads of documents"),
            Self { reads_max, doc_reads_max, .. }
                if [reads_max, doc_reads_max].iter().any(|max| !(1..=Self::READS_MAX).contains(*max)) =>
            {
                let reason =
                    format!("{reads_max} and {doc_reads_max} at once are not 1 to {}", Self::READS_MAX);
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
