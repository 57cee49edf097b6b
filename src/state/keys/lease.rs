//! Families 11 and 14: the owners of resources, and the versions of pools.
//!
//! A single read of the common version shows a node that nothing has changed, whatever the number of nodes, pools and resources. Each
//! change also moves the version of its pool, so that the members of other pools need not read anything. The versions are versionstamps,
//! not counts, so that one blind write moves them.
//!
//! The version of a pool is stored in one of a fixed number of slots, chosen by the role of its members. So pools come and go with
//! their consumers without leaving keys behind, and a change of a node's roles finds the versions of their pools.

use xxhash_rust::xxh3::xxh3_64;

use super::{CELL, ConsumerName, Keys, NodeId, Role, family, polled};
use crate::{
    base::{
        encoding::Reader,
        error::{Error, Result},
    },
    store::KeyRange,
};

/// How many slots the versions of all pools share. The number is fixed, because nodes must agree on it.
const SLOTS: u64 = 4_096;

/// Returns the slot that holds the version of the pool of `role`; a few pools share a slot.
pub(crate) fn slot_of_pool(role: &Role) -> u16 {
    (xxh3_64(role.as_str().as_bytes()) % SLOTS) as u16
}

/// Returns the role of the nodes that divide `pool`.
pub(crate) fn role_of_pool(pool: &str) -> Role {
    let consumer = pool.strip_prefix("consumer/").and_then(|name| ConsumerName::new(name).ok());
    match (pool, consumer) {
        ("partition", _) => Role::NOTIFIER,
        (_, Some(consumer)) => consumer.role(),
        _ => Role::new(pool).expect("only consumers have long names"),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner {
    pub node: NodeId,
    /// A random id of this acquisition, by which the owner recognises its lease after an unknown result.
    pub token: [u8; 16],
}

/// The owner of a resource, and the number of acquisitions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Lease {
    /// Raised at every acquisition, and never lowered.
    pub epoch: u64,
    /// The owner; `None` once it has released the resource.
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

impl Keys {
    /// The key of the lease of `resource` in `pool`.
    pub fn lease(&self, pool: &str, resource: u64) -> Vec<u8> {
        self.pack(&(family::LEASE, CELL, pool, resource))
    }

    /// All leases of `pool`.
    pub fn leases(&self, pool: &str) -> KeyRange {
        self.range(&(family::LEASE, CELL, pool))
    }

    /// The leases of all pools.
    pub fn all_leases(&self) -> KeyRange {
        self.range(&(family::LEASE, CELL))
    }

    /// Decodes the pool, the resource and the lease of a stored row.
    pub fn lease_row(&self, key: &[u8], value: &[u8]) -> Result<(String, u64, Lease)> {
        let row = self.unpack("lease", key).and_then(|(number, _, pool, resource): (u16, String, _, _)| {
            if number != family::LEASE {
                return Err(Error::corrupt("lease", "its key is not that of a lease"));
            }
            Ok((pool, resource, Lease::from_bytes(value)?))
        });
        row.map_err(|error| error.at(key))
    }

    /// The key of the common version. Every transaction that moves another version moves it.
    pub fn common_version(&self) -> Vec<u8> {
        self.pack(&(family::POLLED, CELL, polled::COMMON))
    }

    /// The key that holds the version of the pools in `slot`. Every transaction that changes the leases, resources or members of such a
    /// pool, or what the members may own, moves the version.
    pub fn pool_version(&self, slot: u16) -> Vec<u8> {
        self.pack(&(family::POLLED, CELL, polled::POOL, slot))
    }

    /// The versions of all pools.
    pub fn pool_versions(&self) -> KeyRange {
        self.range(&(family::POLLED, CELL, polled::POOL))
    }

    /// Decodes the slot in the key of a pool version.
    pub fn slot_of(&self, key: &[u8]) -> Result<u16> {
        let (_, _, _, slot): (u16, String, u16, u16) = self.unpack("version", key)?;
        Ok(slot)
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

        let keys = Keys::new(b"p").unwrap();
        let key = keys.lease("partition", 3);
        assert_eq!(key, b"p\x15\x0b\x02main\x00\x02partition\x00\x15\x03");
        for lease in [held, free] {
            let row = keys.lease_row(&key, &lease.to_bytes()).unwrap();
            assert_eq!(row, ("partition".to_owned(), 3, lease));
        }
        assert!(keys.leases("partition").contains(&key) && keys.all_leases().contains(&key));
        assert!(!keys.leases("part").contains(&key));
        assert_eq!(keys.common_version(), b"p\x15\x0e\x02main\x00\x15\x05");
        let version = keys.pool_version(slot_of_pool(&Role::NOTIFIER));
        assert_eq!(version, b"p\x15\x0e\x02main\x00\x15\x03\x16\x04\x4e", "{version:02x?}");
        assert!(
            keys.pool_versions().contains(&version) && !keys.pool_versions().contains(&keys.common_version())
        );
        assert_eq!(keys.slot_of(&version).unwrap(), 0x044e);
    }

    #[test]
    fn members_of_a_pool_have_its_role() {
        let (short, long) = (ConsumerName::new("m").unwrap(), ConsumerName::new(&"m".repeat(256)).unwrap());
        for (pool, role) in [
            ("partition".to_owned(), Role::NOTIFIER),
            ("janitor".to_owned(), Role::JANITOR),
            (short.pool(), short.role()),
            (long.pool(), long.role()),
        ] {
            assert_eq!(role_of_pool(&pool), role);
        }
    }

    #[test]
    fn contradictory_bytes_are_refused() {
        for len in [0, 7, 9, 24, 39, 41] {
            assert!(Lease::from_bytes(&vec![0; len]).is_err(), "{len}");
        }
        let keys = Keys::new(b"p").unwrap();
        assert!(keys.lease_row(b"p\x15\x0b\x02main\x00\x02x\x00\x15\x03\x14", &[0; 8]).is_err());
        assert!(keys.lease_row(b"p\x15\x0a\x02main\x00\x02x\x00\x15\x03", &[0; 8]).is_err());
    }

    proptest! {
        #[test]
        fn rows_come_back_as_they_were(epoch: u64, node: [u8; 16], token: [u8; 16], owned: bool, number: u64) {
            let owner = owned.then_some(Owner { node: NodeId(node), token });
            let lease = Lease { epoch, owner };
            prop_assert_eq!(Lease::from_bytes(&lease.to_bytes()).unwrap(), lease);
            let keys = Keys::new(b"p").unwrap();
            let (pool, resource, _) = keys.lease_row(&keys.lease("x", number), &lease.to_bytes()).unwrap();
            prop_assert_eq!((&pool[..], resource), ("x", number));
        }
    }
}
