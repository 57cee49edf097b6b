//! [`Refusals`]: how many requests a listener has refused by the name or the page that they came by, and how many connections for lack
//! of room.
//!
//! A name that was forgotten in the configuration looks to its clients like a broken server, so the log says which one it was;
//! once in a while, as a page that does not give up must not fill the log.

use std::{
    io,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use prometheus_client::metrics::{counter::Counter, family::Family};

use super::Failure;

/// How long the log says nothing more of refusals.
const QUIET: Duration = Duration::from_mins(1);

/// The most characters of a header that are logged.
const SHOWN_MAX: usize = 100;

/// The refusals by what was wrong.
pub(super) type Counts = Family<[(&'static str, &'static str); 1], Counter>;

/// How many requests a listener has refused. Clones count together.
#[derive(Debug, Clone, Default)]
pub(super) struct Refusals {
    /// The refusals by what was wrong.
    pub counts: Counts,
    /// What has happened to requests since the log was told.
    requests: Arc<Mutex<Untold>>,
    /// The same of connections.
    connections: Arc<Mutex<Untold>>,
}

/// What has happened since the log was told.
#[derive(Debug, Default)]
struct Untold {
    /// When that was.
    told: Option<Duration>,
    /// How many were refused since.
    refused: u64,
}

impl Refusals {
    /// Counts that a request with these headers was refused at `now`, and logs it if nothing was logged for a while.
    pub fn add(&self, failure: &Failure, headers: &HeaderMap, now: Duration) {
        let what = if failure.status() == StatusCode::FORBIDDEN { "origin" } else { "host" };
        self.counts.get_or_create(&[("what", what)]).inc();
        let Some(refused) = to_tell(&self.requests, now) else { return };
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

    /// Counts that a connection from `peer` was refused at `now`, because there is no room, and logs it if nothing was logged for
    /// a while.
    pub fn no_room(&self, peer: IpAddr, now: Duration) {
        self.counts.get_or_create(&[("what", "room")]).inc();
        if let Some(refused) = to_tell(&self.connections, now) {
            tracing::warn!(%peer, refused, "connections are refused: there is no room, or none for their address");
        }
    }

    /// Counts that no connection could be accepted at `now`, and logs it if nothing was logged for a while.
    pub fn not_accepted(&self, error: &io::Error, now: Duration) {
        self.counts.get_or_create(&[("what", "accept")]).inc();
        if let Some(refused) = to_tell(&self.connections, now) {
            tracing::warn!(%error, refused, "no connection can be accepted");
        }
    }
}

/// How many refusals the log is to be informed of now; `None` if it was told lately.
fn to_tell(untold: &Mutex<Untold>, now: Duration) -> Option<u64> {
    let mut untold = untold.lock().unwrap_or_else(PoisonError::into_inner);
    untold.refused += 1;
    if untold.told.is_some_and(|told| now.saturating_sub(told) < QUIET) {
        return None;
    }
    untold.told = Some(now);
    Some(std::mem::take(&mut untold.refused))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_is_told_once_in_a_while_and_of_all() {
        let untold = Mutex::default();
        let at = |seconds| to_tell(&untold, Duration::from_secs(seconds));
        assert_eq!(
            [at(0), at(1), at(59), at(60), at(61), at(500)],
            [Some(1), None, None, Some(3), None, Some(2)]
        );
    }
}
