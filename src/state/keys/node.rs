//! Families 10 and 14: the live nodes and their roles.
//!
//! Only the node itself writes its row, at every heartbeat. Another node removes the row once it has seen no heartbeat for as long as the
//! expiry in the row. A role has one key by role, so that the nodes that divide its work are read in one range, and one key by node, so
//! that code that removes a node finds its roles. Both exist only as long as the node's row, because a node with a role counts as alive.

use std::{borrow::Cow, fmt, str::FromStr, time::Duration};

use foundationdb_tuple::Bytes;
use serde::Serialize;

use super::{CELL, Keys, family, polled};
use crate::{
    base::{
        encoding::Reader,
        env::Env,
        error::{Error, Result},
        macros::serde_as_text,
    },
    store::KeyRange,
};

/// The numbers after the cell in keys of family 10. They are stored and never change; 0 was used before.
mod part {
    /// The roles of a node, by node.
    pub const ROLE_OF_NODE: u16 = 1;
    /// The nodes of a role, by role.
    pub const NODE_OF_ROLE: u16 = 2;
}

/// The id of a node: 16 bytes that no other process has at the same time. As text, 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub [u8; 16]);

impl NodeId {
    /// Creates an id from 128 random bits of `env`.
    pub fn random(env: &Env) -> Self {
        let bits = u128::from(env.random()) << 64 | u128::from(env.random());
        Self(bits.to_be_bytes())
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for NodeId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        match u128::from_str_radix(text, 16) {
            Ok(bits) if is_hex => Ok(Self(bits.to_be_bytes())),
            _ => Err(Error::invalid("node id", format!("{text:?} is not 32 hexadecimal digits"))),
        }
    }
}

serde_as_text!(NodeId);

/// A kind of work that nodes do. Work is divided among the nodes that have its role.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct Role(Cow<'static, str>);

impl Role {
    /// Folds counters into the feed.
    pub const NOTIFIER: Self = Self(Cow::Borrowed("notifier"));
    /// Delivers to subscribers in the process.
    pub const DISPATCHER: Self = Self(Cow::Borrowed("dispatcher"));
    /// Removes what has expired.
    pub const JANITOR: Self = Self(Cow::Borrowed("janitor"));
    /// Serves feeds over HTTP.
    pub const HTTP: Self = Self(Cow::Borrowed("http"));

    /// The maximum length of a role's name, in bytes.
    pub const NAME_LEN_MAX: usize = 256;

    /// Creates a role with another name, of 1 to 256 bytes.
    pub fn new(name: impl Into<String>) -> Result<Self> {
        let name = name.into();
        if name.is_empty() || name.len() > Self::NAME_LEN_MAX {
            return Err(Error::invalid(
                "role",
                format!("its name has {} bytes, 1 to {} are allowed", name.len(), Self::NAME_LEN_MAX),
            ));
        }
        Ok(Self(name.into()))
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether nodes with this role divide its work.
    pub(crate) fn shares_work(&self) -> bool {
        *self == Self::NOTIFIER
            || *self == Self::JANITOR
            || self.0.starts_with("consumer:")
            || self.0.starts_with("consumer-by-hash:")
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeRow {
    /// How many times the node has written the row. As this number grows, others see that the node is alive, whatever their clocks show.
    pub beat: u64,
    /// Drawn at random when the process joined: distinguishes two processes with the same id, and two memberships of one process.
    pub token: [u8; 16],
    /// When the node joined, in milliseconds since 1970; for display only.
    pub started_ms: u64,
    /// The number of milliseconds without a heartbeat after which the node counts as dead; `u64::MAX` means never.
    pub expiry_ms: u64,
}

impl NodeRow {
    /// The token of a row whose node was found dead, while its roles are removed page by page. If the node is alive, it joins again.
    pub const CONDEMNED: [u8; 16] = [0; 16];

    /// The stored form: beat (8 bytes), token (16), start (8), expiry (8).
    pub fn to_bytes(self) -> Vec<u8> {
        let (beat, started) = (self.beat.to_be_bytes(), self.started_ms.to_be_bytes());
        [&beat[..], &self.token, &started, &self.expiry_ms.to_be_bytes()].concat()
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("node", bytes);
        let row = Self {
            beat: reader.u64()?,
            token: reader.bytes16()?,
            started_ms: reader.u64()?,
            expiry_ms: reader.u64()?,
        };
        reader.finish()?;
        Ok(row)
    }

    /// Returns how long the node may go without a heartbeat before it counts as dead.
    pub fn expiry(&self) -> Duration {
        if self.expiry_ms == u64::MAX { Duration::MAX } else { Duration::from_millis(self.expiry_ms) }
    }
}

/// Decodes how many resources a node may own in a role: 4 bytes; `u32::MAX` means as many as there are.
pub(crate) fn role_max(value: &[u8]) -> Result<u32> {
    let bytes = value.try_into();
    bytes
        .map(u32::from_be_bytes)
        .map_err(|_| Error::corrupt("role", format!("{} bytes instead of 4", value.len())))
}

impl Keys {
    /// The key of the row of `node`.
    pub fn node(&self, node: NodeId) -> Vec<u8> {
        self.pack(&(family::POLLED, CELL, polled::NODE, &node.0[..]))
    }

    /// The rows of all nodes.
    pub fn nodes(&self) -> KeyRange {
        self.range(&(family::POLLED, CELL, polled::NODE))
    }

    /// The keys of a role of a node: by node, and by role. Both have the same value, [`role_max`].
    pub fn role(&self, node: NodeId, role: &Role) -> [Vec<u8>; 2] {
        let role = role.as_str();
        [
            self.pack(&(family::ROLE, CELL, part::ROLE_OF_NODE, &node.0[..], role)),
            self.pack(&(family::ROLE, CELL, part::NODE_OF_ROLE, role, &node.0[..])),
        ]
    }

    /// The roles of `node`.
    pub fn roles_of(&self, node: NodeId) -> KeyRange {
        self.range(&(family::ROLE, CELL, part::ROLE_OF_NODE, &node.0[..]))
    }

    /// The roles of all nodes, by node.
    pub fn all_roles(&self) -> KeyRange {
        self.range(&(family::ROLE, CELL, part::ROLE_OF_NODE))
    }

    /// The nodes that have `role`.
    pub fn nodes_with(&self, role: &Role) -> KeyRange {
        self.range(&(family::ROLE, CELL, part::NODE_OF_ROLE, role.as_str()))
    }

    /// All rows and roles of all nodes.
    pub fn all_of_nodes(&self) -> [KeyRange; 2] {
        [self.nodes(), self.range(&(family::ROLE, CELL))]
    }

    /// Returns the node whose row is stored under `key`.
    pub fn node_of(&self, key: &[u8]) -> Result<NodeId> {
        let (number, _, part, id): (u16, String, u16, Bytes<'_>) = self.unpack("node", key)?;
        match id[..].try_into() {
            Ok(id) if (number, part) == (family::POLLED, polled::NODE) => Ok(NodeId(id)),
            _ => Err(Error::corrupt("node", "its key is not that of a node")),
        }
    }

    /// Returns the node and the role from `key`, a role's key by node.
    pub fn role_of_node(&self, key: &[u8]) -> Result<(NodeId, Role)> {
        let (number, _, part, id, role): (u16, String, u16, Bytes<'_>, String) = self.unpack("role", key)?;
        match id[..].try_into() {
            Ok(id) if (number, part) == (family::ROLE, part::ROLE_OF_NODE) => {
                Ok((NodeId(id), Role::new(role)?))
            }
            _ => Err(Error::corrupt("role", "its key is not that of a role")),
        }
    }

    /// Returns the node from `key`, a role's key by role.
    pub fn node_of_role(&self, key: &[u8]) -> Result<NodeId> {
        let (number, _, part, _, id): (u16, String, u16, String, Bytes<'_>) = self.unpack("role", key)?;
        match id[..].try_into() {
            Ok(id) if (number, part) == (family::ROLE, part::NODE_OF_ROLE) => Ok(NodeId(id)),
            _ => Err(Error::corrupt("role", "its key is not that of a role")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn golden_bytes() {
        let row = NodeRow { beat: 3, token: [8; 16], started_ms: 258, expiry_ms: 10_000 };
        let golden = [
            &[0, 0, 0, 0, 0, 0, 0, 3][..],
            &[8; 16],
            &[0, 0, 0, 0, 0, 0, 1, 2],
            &[0, 0, 0, 0, 0, 0, 0x27, 0x10],
        ];
        assert_eq!(row.to_bytes(), golden.concat());
        assert_eq!(NodeRow::from_bytes(&golden.concat()).unwrap(), row);

        let keys = Keys::new(b"p").unwrap();
        let id = NodeId([7; 16]);
        let key = keys.node(id);
        assert_eq!(key, [&b"p\x15\x0e\x02main\x00\x15\x04\x01"[..], &[7; 16], b"\x00"].concat());
        assert_eq!(keys.node_of(&key).unwrap(), id);
        let [by_node, by_role] = keys.role(id, &Role::HTTP);
        let golden = [&b"p\x15\x0a\x02main\x00\x15\x01\x01"[..], &[7; 16], b"\x00\x02http\x00"].concat();
        assert_eq!(by_node, golden);
        let golden = [&b"p\x15\x0a\x02main\x00\x15\x02\x02http\x00\x01"[..], &[7; 16], b"\x00"].concat();
        assert_eq!(by_role, golden);
        assert_eq!(keys.role_of_node(&by_node).unwrap(), (id, Role::HTTP));
        assert_eq!(keys.node_of_role(&by_role).unwrap(), id);
        assert!(keys.nodes().contains(&key) && !keys.nodes().contains(&by_node));
        assert!(keys.all_roles().contains(&by_node) && keys.roles_of(id).contains(&by_node));
        assert!(keys.nodes_with(&Role::HTTP).contains(&by_role) && !keys.all_roles().contains(&by_role));
        let is_of_nodes = |key: &&Vec<u8>| keys.all_of_nodes().iter().any(|range| range.contains(key));
        assert!([&key, &by_node, &by_role].iter().all(is_of_nodes));
    }

    #[test]
    fn contradictory_bytes_are_refused() {
        assert!(NodeRow::from_bytes(&[0; 39]).is_err() && NodeRow::from_bytes(&[0; 41]).is_err());
        assert!(role_max(&[0; 3]).is_err() && role_max(&[0; 5]).is_err());
        let keys = Keys::new(b"p").unwrap();
        let [by_node, by_role] = keys.role(NodeId([7; 16]), &Role::HTTP);
        for key in [by_node.clone(), by_role.clone(), b"p\x15\x0e\x02main\x00\x15\x04\x01\x07\x00".to_vec()] {
            assert!(keys.node_of(&key).is_err());
        }
        assert!(keys.role_of_node(&by_role).is_err() && keys.node_of_role(&by_node).is_err());
    }

    #[test]
    fn ids_are_32_hexadecimal_digits() {
        let id = NodeId([0xab; 16]);
        assert_eq!(id.to_string().parse::<NodeId>().unwrap(), id);
        for bad in ["", "ab", "+babababababababababababababababa", &"g".repeat(32), &"a".repeat(33)] {
            assert!(bad.parse::<NodeId>().is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn rows_come_back_as_they_were(beat: u64, token: [u8; 16], started_ms: u64, expiry_ms: u64, max: u32) {
            let row = NodeRow { beat, token, started_ms, expiry_ms };
            prop_assert_eq!(NodeRow::from_bytes(&row.to_bytes()).unwrap(), row);
            prop_assert_eq!(role_max(&max.to_be_bytes()).unwrap(), max);
        }
    }
}
