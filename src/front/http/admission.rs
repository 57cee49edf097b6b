//! [`Admission`]: how many feeds each client has, and may have.

use std::sync::Arc;

use std::net::IpAddr;

use axum::http::{Extensions, StatusCode};

use super::{
    Caller, Failure,
    tally::{self, Tally},
};

/// The address of the client, which a server puts into a request's extensions. Feeds of requests without one are
/// counted together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer(pub IpAddr);

/// Who counts as one client: a name with credentials, or else an address.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Client {
    /// A name.
    Named(Arc<str>),
    /// An address, if it is known.
    At(Option<IpAddr>),
}

/// How many feeds each client has.
#[derive(Debug)]
pub(super) struct Admission {
    /// The clients that have feeds, and how many.
    clients: Arc<Tally<Client>>,
    /// The most feeds of one client.
    feeds_max: usize,
}

/// A place among the feeds of a client, until it is dropped.
pub(super) type Place = tally::Place<Client>;

impl Admission {
    /// Lets each client have `feeds_max` feeds.
    pub fn new(feeds_max: usize) -> Arc<Self> {
        Arc::new(Self { clients: Tally::new(), feeds_max })
    }

    /// A place for a feed of the client of these extensions. Fails with 429 if there is none left.
    pub fn enter(&self, extensions: &Extensions) -> Result<Place, Failure> {
        let named = extensions.get::<Caller>().map(|caller| Client::Named(caller.shared_name()));
        let client = named.unwrap_or_else(|| Client::At(extensions.get::<Peer>().map(|peer| peer.0)));
        self.clients.enter(client, self.feeds_max).map_err(|feeds| {
            let reason = format!("You have {feeds} feeds open, and may have no more.");
            Failure::new(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", reason)
        })
    }

    /// How many feeds there are.
    pub fn feeds(&self) -> usize {
        self.clients.total()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::front::http::Grant;

    #[test]
    fn places_are_counted_by_client_and_given_back() {
        let admission = Admission::new(2);
        let anna = || {
            let mut extensions = Extensions::new();
            extensions.insert(Caller::new("anna", Grant::admin()));
            extensions
        };
        let first = admission.enter(&anna()).unwrap();
        let _second = admission.enter(&anna()).unwrap();
        let failure = admission.enter(&anna()).unwrap_err();
        assert_eq!(failure.status(), StatusCode::TOO_MANY_REQUESTS);
        let _other = admission.enter(&Extensions::new()).unwrap();
        drop(first);
        let _third = admission.enter(&anna()).unwrap();
        assert_eq!(admission.feeds(), 3);
    }
}
