//! [`Refusals`] counts the requests that a listener refused because of their `Host` or their page, and the connections that it
//! refused for lack of room.
//!
//! If a name is missing in the configuration, the server seems broken to its clients. So the log shows which name was refused, now and
//! then: a page that retries forever must not fill it.

use std::{io, net::IpAddr, sync::Arc, time::Duration};

use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use prometheus_client::metrics::{counter::Counter, family::Family};

use super::Failure;
use crate::base::log_throttle::LogThrottle;

/// The most characters of a header that the log shows.
const SHOWN_MAX: usize = 100;

/// The refusals by their cause.
pub(super) type Counts = Family<[(&'static str, &'static str); 1], Counter>;

/// Counts the refusals of a listener. Clones share their counts.
#[derive(Debug, Clone, Default)]
pub(super) struct Refusals {
    /// The refusals by their cause.
    pub counts: Counts,
    log: Arc<LogThrottle>,
}

impl Refusals {
    /// Counts a request with these headers that was refused at `now`. Logs it unless it was logged lately.
    pub fn add(&self, failure: &Failure, headers: &HeaderMap, now: Duration) {
        let what = if failure.status() == StatusCode::FORBIDDEN { "origin" } else { "host" };
        self.counts.get_or_create(&[("what", what)]).inc();
        let Some(unsaid) = self.log.is_due(now, format!("refused {what}")) else { return };
        let shown = |name: HeaderName| {
            let value = headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()));
            value.map(|value| value.chars().take(SHOWN_MAX).collect::<String>())
        };
        tracing::warn!(
            host = ?shown(header::HOST),
            origin = ?shown(header::ORIGIN),
            unsaid,
            "requests for names that this server does not have, or from pages of others, are refused"
        );
    }

    /// Counts a connection from `peer` that was refused at `now`: because the server `is_full`, or else because its address has too
    /// many. Logs it unless it was logged lately.
    pub fn no_room(&self, peer: IpAddr, is_full: bool, now: Duration) {
        self.counts.get_or_create(&[("what", "room")]).inc();
        let limit = if is_full { "connections_max" } else { "connections_per_address_max" };
        if let Some(unsaid) = self.log.is_due(now, limit.to_owned()) {
            tracing::warn!(%peer, limit, unsaid, "connections beyond a limit are refused");
        }
    }

    /// Counts a failure to accept connections at `now`. Logs it unless it was logged lately.
    pub fn not_accepted(&self, error: &io::Error, now: Duration) {
        self.counts.get_or_create(&[("what", "accept")]).inc();
        if let Some(unsaid) = self.log.is_due(now, "accept".to_owned()) {
            tracing::warn!(%error, unsaid, "no connection can be accepted");
        }
    }
}
