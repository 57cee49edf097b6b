//! Families 11 and 14: who owns a resource, who asks for it, and how often any of that has changed.
//!
//! A request stands in a key of its own beside the lease: work on the resource has the lease in its read-conflict set, and
//! must not fail because somebody asks.
//!
//! The count of changes tells a node with one read that nothing has changed, whatever the number of pools and resources.

use super::{CELL, Keys, NodeId, family};
use crate::{
    encoding::Reader,
    error::{Error, Result},
    store::KeyRange,
};

/// The last element of a key: what the row says of the resource.
mod part {
    pub const LEASE: u16 = 0;
    pub const REQUEST: u16 = 1;
}

/// Who owns a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner {
    /// The node.
    pub node: NodeId,
    /// Drawn for the acquisition, so that the owner knows its own lease again after an unknown result.
    pub token: [u8; 16],
}

/// Who owns a resource, and how often it has been acquired.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Lease {
    /// Raised at every acquisition, never lowered.
    pub epoch: u64,
    /// The owner; `None` after it has released the resource.
    pub owner: Option<Owner>,
}

impl Lease {
    /// The stored form: epoch (8 bytes), and the owner's node (16) and token (16) if there is one.
    pub fn to_bytes(self) -> Vec<u8> {
        let mut bytes = self.epoch.to_be_bytes().to_vec();
        if let Some(Owner { node, token }) = self.owner {
            bytes.extend_from_slice(&node.0);
            bytes.extend_from_slice(&token);
        }
        bytes
    }

    /// The lease stored as `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("lease", bytes);
        let epoch = reader.u64()?;
        let owner = if bytes.len() > 8 {
            Some(Owner { node: NodeId(reader.bytes16()?), token: reader.bytes16()? })
        } else {
            None
        };
        reader.finish()?;
        Ok(Self { epoch, owner })
    }
}

/// A node asks the owner of a resource for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Request {
    /// Who asks.
    pub node: NodeId,
    /// The epoch of the lease at that time. When another acquisition has raised it, the request is void.
    pub epoch: u64,
}

impl Request {
    /// The stored form: node (16 bytes), epoch (8).
    pub fn to_bytes(self) -> Vec<u8> {
        [&self.node.0[..], &self.epoch.to_be_bytes()].concat()
    }

    /// The request stored as `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("lease request", bytes);
        let request = Self { node: NodeId(reader.bytes16()?), epoch: reader.u64()? };
        reader.finish()?;
        Ok(request)
    }
}

/// What a row of the family says of a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeaseRow {
    /// Who owns it.
    Lease(Lease),
    /// Who asks for it.
    Request(Request),
}

impl Keys {
    /// The key of the lease of `resource` of `pool`.
    pub fn lease(&self, pool: &str, resource: u64) -> Vec<u8> {
        self.pack(&(family::LEASE, CELL, pool, resource, part::LEASE))
    }

    /// The key of the request for `resource` of `pool`.
    pub fn lease_request(&self, pool: &str, resource: u64) -> Vec<u8> {
        self.pack(&(family::LEASE, CELL, pool, resource, part::REQUEST))
    }

    /// The key of the count of changes: 8 bytes, little-endian. Every transaction adds to it that changes leases, requests, the
    /// resources of a pool or the roles of a node.
    pub fn lease_changes(&self) -> Vec<u8> {
        self.pack(&(family::LEASE_CHANGES, CELL))
    }

    /// All leases of `pool`, and the requests for them.
    pub fn leases(&self, pool: &str) -> KeyRange {
        self.range(&(family::LEASE, CELL, pool))
    }

    /// The leases of all pools, and the requests for them.
    pub fn all_leases(&self) -> KeyRange {
        self.range(&(family::LEASE, CELL))
    }

    /// The pool, the resource and what is said of it, of a stored row.
    pub fn lease_row(&self, key: &[u8], value: &[u8]) -> Result<(String, u64, LeaseRow)> {
        let (number, _, pool, resource, part): (u16, String, String, u64, u16) = self.unpack("lease", key)?;
        let row = match part {
            part::LEASE if number == family::LEASE => LeaseRow::Lease(Lease::from_bytes(value)?),
            part::REQUEST if number == family::LEASE => LeaseRow::Request(Request::from_bytes(value)?),
            _ => return Err(Error::corrupt("lease", "its key is not that of a lease")),
        };
        Ok((pool, resource, row))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OWNER: Owner = Owner { node: NodeId([7; 16]), token: [9; 16] };

    #[test]
    fn golden_bytes() {
        let held = Lease { epoch: 2, owner: Some(OWNER) };
        assert_eq!(held.to_bytes(), [&[0, 0, 0, 0, 0, 0, 0, 2][..], &[7; 16], &[9; 16]].concat());
        let free = Lease { epoch: 2, owner: None };
        assert_eq!(free.to_bytes(), [0, 0, 0, 0, 0, 0, 0, 2]);
        let request = Request { node: NodeId([7; 16]), epoch: 2 };
        assert_eq!(request.to_bytes(), [&[7; 16][..], &[0, 0, 0, 0, 0, 0, 0, 2]].concat());

        let keys = Keys::new(b"p").unwrap();
        let (key, asked) = (keys.lease("partition", 3), keys.lease_request("partition", 3));
        assert_eq!(key, b"p\x15\x0b\x02main\x00\x02partition\x00\x15\x03\x14");
        assert_eq!(asked, b"p\x15\x0b\x02main\x00\x02partition\x00\x15\x03\x15\x01");
        for (key, value, row) in [
            (&key, held.to_bytes(), LeaseRow::Lease(held)),
            (&key, free.to_bytes(), LeaseRow::Lease(free)),
            (&asked, request.to_bytes(), LeaseRow::Request(request)),
        ] {
            assert_eq!(keys.lease_row(key, &value).unwrap(), ("partition".to_owned(), 3, row));
            assert!(keys.leases("partition").contains(key) && keys.all_leases().contains(key));
            assert!(!keys.leases("part").contains(key));
        }
        assert_eq!(keys.lease_changes(), b"p\x15\x0e\x02main\x00");
    }

    #[test]
    fn contradictory_bytes_are_refused() {
        for len in [0, 7, 9, 24, 39, 41] {
            assert!(Lease::from_bytes(&vec![0; len]).is_err(), "{len}");
        }
        assert!(Request::from_bytes(&[0; 23]).is_err() && Request::from_bytes(&[0; 25]).is_err());
        let keys = Keys::new(b"p").unwrap();
        assert!(keys.lease_row(b"p\x15\x0b\x02main\x00\x02x\x00\x15\x03\x15\x02", &[0; 8]).is_err());
        assert!(keys.lease_row(b"p\x15\x0a\x02main\x00\x02x\x00\x15\x03\x14", &[0; 8]).is_err());
    }

    proptest! {
        #[test]
        fn rows_come_back_as_they_were(epoch: u64, node: [u8; 16], token: [u8; 16], owned: bool, number: u64) {
            let owner = owned.then_some(Owner { node: NodeId(node), token });
            let lease = Lease { epoch, owner };
            prop_assert_eq!(Lease::from_bytes(&lease.to_bytes()).unwrap(), lease);
            let request = Request { node: NodeId(node), epoch };
            prop_assert_eq!(Request::from_bytes(&request.to_bytes()).unwrap(), request);
            let keys = Keys::new(b"p").unwrap();
            let (pool, resource, _) = keys.lease_row(&keys.lease("x", number), &lease.to_bytes()).unwrap();
            prop_assert_eq!((&pool[..], resource), ("x", number));
        }
    }
}
