//! [`Admission`] counts and limits the feeds of each client.

use std::{
    net::{IpAddr, Ipv6Addr},
    sync::Arc,
};

use axum::http::{Extensions, StatusCode};

use super::{
    Caller, Failure,
    tally::{self, Tally},
};

/// The address of the client, which a server puts into the extensions of a request. All requests without one count as one client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer(pub IpAddr);

/// One client: a name with credentials, or an address.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Client {
    Named(Arc<str>),
    /// `None` if the address is not known; for IPv6, the network.
    At(Option<IpAddr>),
}

/// Counts the feeds of each client.
#[derive(Debug)]
pub(super) struct Admission {
    clients: Arc<Tally<Client>>,
    feeds_max: usize,
}

/// A feed's place among the feeds of its client. Dropping it gives the place back.
pub(super) type FeedPermit = tally::FeedPermit<Client>;

impl Admission {
    pub fn new(feeds_max: usize) -> Arc<Self> {
        Arc::new(Self { clients: Tally::new(), feeds_max })
    }

    /// Takes a place for a feed of the client that sent a request with these extensions. Fails with 429 if the client has none
    /// left.
    pub fn enter(&self, extensions: &Extensions) -> Result<FeedPermit, Failure> {
        let named = extensions.get::<Caller>().map(|caller| Client::Named(caller.shared_name()));
        let client =
            named.unwrap_or_else(|| Client::At(extensions.get::<Peer>().map(|peer| network(peer.0))));
        self.clients.enter(client, self.feeds_max).map_err(|feeds| {
            let reason = format!("You have {feeds} feeds open, and may have no more.");
            Failure::new(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", reason)
        })
    }

    /// Returns how many feeds there are.
    pub fn feeds(&self) -> usize {
        self.clients.total()
    }
}

/// Returns the network of `address`: one subscriber of a provider can use all addresses of a network, so they count as one.
pub(super) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        address @ IpAddr::V4(_) => address,
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

    #[test]
    fn addresses_that_one_can_choose_from_are_one() {
        let of = |text: &str| network(text.parse().unwrap());
        assert_eq!(of("2001:db8:1:2:3::4"), of("2001:db8:1:2:ffff::1"));
        assert_ne!(of("2001:db8:1:2::"), of("2001:db8:1:3::"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }
}
