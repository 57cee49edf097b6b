//! Family 11: who owns a resource.

use super::{Keys, Partition, family};
use crate::{encoding::Reader, error::Result};

/// Who owns a resource, and how often it has been acquired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lease {
    /// Raised at every acquisition, never lowered.
    pub epoch: u64,
    /// A number drawn by the owner; `None` after it has released the resource.
    pub owner: Option<[u8; 16]>,
}

impl Lease {
    /// The stored form: epoch (8 bytes), and the owner (16) if there is one.
    pub fn to_bytes(self) -> Vec<u8> {
        [&self.epoch.to_be_bytes()[..], self.owner.as_ref().map_or(&[], |owner| &owner[..])].concat()
    }

    /// The lease stored as `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("lease", bytes);
        let epoch = reader.u64()?;
        let owner = if bytes.len() > 8 { Some(reader.bytes16()?) } else { None };
        reader.finish()?;
        Ok(Self { epoch, owner })
    }
}

impl Keys {
    /// The key of the lease of the notifier's work on `partition`.
    pub fn partition_lease(&self, partition: Partition) -> Vec<u8> {
        self.pack(&(family::LEASE, "partition", partition.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes() {
        let held = Lease { epoch: 2, owner: Some([7; 16]) };
        assert_eq!(held.to_bytes(), [&[0, 0, 0, 0, 0, 0, 0, 2][..], &[7; 16]].concat());
        let free = Lease { epoch: 2, owner: None };
        assert_eq!(free.to_bytes(), [0, 0, 0, 0, 0, 0, 0, 2]);
        for lease in [held, free] {
            assert_eq!(Lease::from_bytes(&lease.to_bytes()).unwrap(), lease);
        }
        assert!(Lease::from_bytes(&[0; 9]).is_err());
        let key = Keys::new(b"p").unwrap().partition_lease(Partition(3));
        assert_eq!(key, b"p\x15\x0b\x02partition\x00\x15\x03");
    }
}
