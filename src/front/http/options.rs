//! [`ApiOptions`] says who may send requests, and sets the limits of feeds and bodies.

use std::{sync::Arc, time::Duration};

use super::{Authorize, allow_all};
use crate::base::error::{Error, Result};

/// How the routers answer.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ApiOptions {
    /// Who may send requests, and what they may do. Default: [`allow_all`].
    pub authorize: Arc<dyn Authorize>,
    /// The longest `timeout`, which is also its default. Default: 60 s.
    pub timeout_max: Duration,
    /// The shortest `heartbeat`, unless `heartbeat_max` is shorter. Default: 100 ms.
    pub heartbeat_min: Duration,
    /// The longest `heartbeat`. Default: 60 s.
    pub heartbeat_max: Duration,
    /// How many lasting feeds each name may have open; all callers without a name count as one. Default: 10,000.
    pub feeds_per_name_max: usize,
    /// How many feeds may read the store at once, 1 to 10,000, and how many may request documents or leaves (`include_docs`,
    /// `style=all_docs`) from the layer at once; others wait for their turn. So slow documents delay only feeds with documents.
    /// Default: 16.
    pub reads_max: usize,
    /// How long the documents of a page may take before the feed is cut off. Default: 60 s.
    pub doc_reads_limit: Duration,
    /// The most bytes of a request's body, before and after inflating. Default: 1 MiB.
    pub body_len_max: usize,
    /// The most bytes of all bodies together that the server holds; a body beyond that gets 503. The ids of documents that feeds
    /// keep (`_doc_ids`) have as many bytes beside them. Default: 64 MiB.
    pub bodies_len_max: usize,
}

crate::base::macros::setters!(ApiOptions { authorize: Arc<dyn Authorize>, timeout_max: Duration, heartbeat_min: Duration, heartbeat_max: Duration, feeds_per_name_max: usize, reads_max: usize, doc_reads_limit: Duration, body_len_max: usize, bodies_len_max: usize });

impl Default for ApiOptions {
    fn default() -> Self {
        Self {
            authorize: allow_all(),
            timeout_max: Duration::from_mins(1),
            heartbeat_min: Duration::from_millis(100),
            heartbeat_max: Duration::from_mins(1),
            feeds_per_name_max: 10_000,
            reads_max: 16,
            doc_reads_limit: Duration::from_mins(1),
            body_len_max: 1 << 20,
            bodies_len_max: 64 << 20,
        }
    }
}

impl ApiOptions {
    /// The most that [`ApiOptions::reads_max`](field@Self::reads_max) may be.
    pub const READS_MAX: usize = 10_000;

    /// Fails if an option is out of its limits.
    pub(super) fn check(&self) -> Result<()> {
        let invalid = |what, reason| Err(Error::invalid(what, reason));
        if self.heartbeat_max.is_zero() || self.doc_reads_limit.is_zero() || self.feeds_per_name_max == 0 {
            return invalid("heartbeat, limit of the reads of documents, or feeds per name", "it is zero");
        }
        if !(1..=Self::READS_MAX).contains(&self.reads_max) {
            return invalid("reads", "there are 1 to 10,000 at once");
        }
        if self.bodies_len_max < self.body_len_max {
            return invalid("length of bodies", "one would not fit");
        }
        Ok(())
    }
}
