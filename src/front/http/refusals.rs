//! [`Refusals`] counts the requests that a listener refused because of their `Host` or their page, and the connections that it
//! refused for lack of room.
//!
//! If a name is missing in the configuration, the server seems broken to its clients. So the log shows which name was refused. It
//! does so once in a while, because a page that retries forever must not fill the log.

use std::{io, net::IpAddr, sync::Arc, time::Duration};

use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use parking_lot::Mutex;
use prometheus_client::metrics::{counter::Counter, family::Family};

use super::Failure;

/// The shortest time between two lines of the log about refusals.
const QUIET: Duration = Duration::from_mins(1);

/// The most characters of a header that the log shows.
const SHOWN_MAX: usize = 100;

/// The refusals by their cause.
pub(super) type Counts = Family<[(&'static str, &'static str); 1], Counter>;

/// Counts the refusals of a listener. Clones share their counts.
#[derive(Debug, Clone, Default)]
pub(super) struct Refusals {
    /// The refusals by their cause.
    pub counts: Counts,
    /// The refused requests that the log does not show yet.
    requests: Arc<Mutex<Unlogged>>,
    /// The refused connections that the log does not show yet.
    connections: Arc<Mutex<Unlogged>>,
}

/// Refusals since the last line of the log about them.
#[derive(Debug, Default)]
struct Unlogged {
    /// The time of the last line.
    logged: Option<Duration>,
    /// How many were refused since then.
    refused: u64,
}

impl Refusals {
    /// Counts a request with these headers that was refused at `now`. Logs it if the last line is old enough.
    pub fn add(&self, failure: &Failure, headers: &HeaderMap, now: Duration) {
        let what = if failure.status() == StatusCode::FORBIDDEN { "origin" } else { "host" };
        self.counts.get_or_create(&[("what", what)]).inc();
        let Some(refused) = to_log(&self.requests, now) else { return };
        let shown = |name: HeaderName| {
            let value = headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()));
            value.map(|value| value.chars().take(SHOWN_MAX).collect::<String>())
        };
        tracing::warn!(
            host = ?shown(header::HOST),
            origin = ?shown(header::ORIGIN),
            refused,
            "requests for names that this server does not have, or from pages of others, are refused"
        );
    }

    /// Counts a connection from `peer` that was refused at `now`: because the server `is_full`, or else because its address has too
    /// many. Logs it if the last line is old enough.
    pub fn no_room(&self, peer: IpAddr, is_full: bool, now: Duration) {
        self.counts.get_or_create(&[("what", "room")]).inc();
        let limit = if is_full { "connections_max" } else { "connections_per_address_max" };
        if let Some(refused) = to_log(&self.connections, now) {
            tracing::warn!(%peer, limit, refused, "connections beyond a limit are refused");
        }
    }

    /// Counts a failure to accept connections at `now`. Logs it if the last line is old enough.
    pub fn not_accepted(&self, error: &io::Error, now: Duration) {
        self.counts.get_or_create(&[("what", "accept")]).inc();
        if let Some(refused) = to_log(&self.connections, now) {
            tracing::warn!(%error, refused, "no connection can be accepted");
        }
    }
}

/// Counts a refusal. Returns how many refusals to log now; `None` if the last line is not old enough.
fn to_log(unlogged: &Mutex<Unlogged>, now: Duration) -> Option<u64> {
    let mut unlogged = unlogged.lock();
    unlogged.refused += 1;
    if unlogged.logged.is_some_and(|logged| now.saturating_sub(logged) < QUIET) {
        return None;
    }
    unlogged.logged = Some(now);
    Some(std::mem::take(&mut unlogged.refused))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_gets_a_line_once_in_a_while_that_counts_all() {
        let unlogged = Mutex::default();
        let at = |seconds| to_log(&unlogged, Duration::from_secs(seconds));
        assert_eq!(
            [at(0), at(1), at(59), at(60), at(61), at(500)],
            [Some(1), None, None, Some(3), None, Some(2)]
        );
    }
}
