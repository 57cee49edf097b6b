//! Family 10: the nodes that live, and what they do.
//!
//! A node's row is written by the node alone, at every heartbeat; another node removes it once it has seen no beat for long
//! enough. It must be small, because every node reads all rows again and again; so the roles, which can be many and seldom
//! change, stand in a key of their own. A change of them is counted as one of leases is.

use std::{borrow::Cow, collections::BTreeSet, fmt, str::FromStr};

use serde::{Serialize, Serializer};

use super::{CELL, Keys, family};
use crate::{
    encoding::Reader,
    env::Env,
    error::{Error, Result},
    store::KeyRange,
};

/// The second element of a key, after the cell: what the row says of the node.
mod part {
    pub const BEAT: u16 = 0;
    pub const ROLES: u16 = 1;
}

/// The longest role, in bytes.
const ROLE_LEN_MAX: usize = 256;

/// Which node: 16 bytes that no other process has at the same time. As text, 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub [u8; 16]);

impl NodeId {
    /// A new one from 128 random bits of `env`.
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

impl Serialize for NodeId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// What a node does. Work is divided among the nodes that have the role for it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct Role(Cow<'static, str>);

impl Role {
    /// Folds counters into the feed.
    pub const NOTIFIER: Self = Self(Cow::Borrowed("notifier"));
    /// Tells subscribers in the process.
    pub const DISPATCHER: Self = Self(Cow::Borrowed("dispatcher"));
    /// Removes what has expired.
    pub const JANITOR: Self = Self(Cow::Borrowed("janitor"));
    /// Serves feeds over HTTP.
    pub const HTTP: Self = Self(Cow::Borrowed("http"));

    /// A role of another name, of 1 to 256 bytes.
    pub fn new(name: impl Into<String>) -> Result<Self> {
        let name = name.into();
        if name.is_empty() || name.len() > ROLE_LEN_MAX {
            return Err(Error::invalid(
                "role",
                format!("its name has {} bytes, 1 to {ROLE_LEN_MAX} are allowed", name.len()),
            ));
        }
        Ok(Self(name.into()))
    }

    /// Its name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a node tells of itself, but for its roles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeRow {
    /// How often it has written the row. Others see by it that the node lives, whatever their clocks say.
    pub beat: u64,
    /// Drawn when the process joined: tells two processes under one id apart, and a process from its former self.
    pub token: [u8; 16],
    /// When it joined, in milliseconds since 1970; for people.
    pub started_ms: u64,
}

impl NodeRow {
    /// The stored form: beat (8 bytes), token (16), start (8).
    pub fn to_bytes(self) -> Vec<u8> {
        [&self.beat.to_be_bytes()[..], &self.token, &self.started_ms.to_be_bytes()].concat()
    }

    /// The row stored as `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("node", bytes);
        let row = Self { beat: reader.u64()?, token: reader.bytes16()?, started_ms: reader.u64()? };
        reader.finish()?;
        Ok(row)
    }
}

/// The roles of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Roles(pub BTreeSet<Role>);

impl Roles {
    /// The stored form: each role behind its length (2 bytes).
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for role in &self.0 {
            let len = u16::try_from(role.0.len()).expect("names of roles are limited");
            bytes.extend_from_slice(&len.to_be_bytes());
            bytes.extend_from_slice(role.0.as_bytes());
        }
        bytes
    }

    /// The roles stored as `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("roles", bytes);
        let mut roles = BTreeSet::new();
        while !reader.is_empty() {
            let role = Role::new(reader.text()?).map_err(|error| reader.corrupt(error.to_string()))?;
            if roles.last().is_some_and(|last| *last >= role) {
                return Err(reader.corrupt("they are not in order"));
            }
            roles.insert(role);
        }
        Ok(Self(roles))
    }
}

impl Keys {
    /// The key of the row of `node`.
    pub fn node(&self, node: NodeId) -> Vec<u8> {
        self.pack(&(family::NODE, CELL, part::BEAT, &node.0[..]))
    }

    /// The rows of all nodes.
    pub fn nodes(&self) -> KeyRange {
        self.range(&(family::NODE, CELL, part::BEAT))
    }

    /// The key of the roles of `node`.
    pub fn roles(&self, node: NodeId) -> Vec<u8> {
        self.pack(&(family::NODE, CELL, part::ROLES, &node.0[..]))
    }

    /// The roles of all nodes. There may be some of a node that is gone, which mean nothing.
    pub fn all_roles(&self) -> KeyRange {
        self.range(&(family::NODE, CELL, part::ROLES))
    }

    /// Whose row, or roles, have the key `key`.
    pub fn node_of(&self, key: &[u8]) -> Result<NodeId> {
        let (number, _, _, id): (u16, String, u16, foundationdb_tuple::Bytes<'_>) =
            self.unpack("node", key)?;
        match id[..].try_into() {
            Ok(id) if number == family::NODE => Ok(NodeId(id)),
            _ => Err(Error::corrupt("node", "its key is not that of a node")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn golden_bytes() {
        let row = NodeRow { beat: 3, token: [8; 16], started_ms: 258 };
        let golden = [&[0, 0, 0, 0, 0, 0, 0, 3][..], &[8; 16], &[0, 0, 0, 0, 0, 0, 1, 2]].concat();
        assert_eq!(row.to_bytes(), golden);
        assert_eq!(NodeRow::from_bytes(&golden).unwrap(), row);
        let roles = Roles([Role::NOTIFIER, Role::HTTP].into());
        let golden = b"\x00\x04http\x00\x08notifier";
        assert_eq!(roles.to_bytes(), golden);
        assert_eq!(Roles::from_bytes(golden).unwrap(), roles);

        let keys = Keys::new(b"p").unwrap();
        let id = NodeId([7; 16]);
        let key = keys.node(id);
        assert_eq!(key, [&b"p\x15\x0a\x02main\x00\x14\x01"[..], &[7; 16], b"\x00"].concat());
        assert!(keys.nodes().contains(&key) && !keys.all_roles().contains(&key));
        let key_of_roles = keys.roles(id);
        assert_eq!(key_of_roles, [&b"p\x15\x0a\x02main\x00\x15\x01\x01"[..], &[7; 16], b"\x00"].concat());
        assert!(keys.all_roles().contains(&key_of_roles) && !keys.nodes().contains(&key_of_roles));
        for key in [key, key_of_roles] {
            assert_eq!(keys.node_of(&key).unwrap(), id);
        }
        assert!(keys.node_of(b"p\x15\x0a\x02main\x00\x14\x01\x07\x00").is_err());
    }

    #[test]
    fn contradictory_bytes_are_refused() {
        assert!(NodeRow::from_bytes(&[0; 31]).is_err() && NodeRow::from_bytes(&[0; 33]).is_err());
        for bytes in [&b"\x00"[..], b"\x00\x00", b"\x00\x02a", b"\x00\x01b\x00\x01a", b"\x00\x01a\x00\x01a"] {
            assert!(Roles::from_bytes(bytes).is_err(), "{bytes:?}");
        }
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
        fn rows_come_back_as_they_were(
            beat: u64, token: [u8; 16], started_ms: u64,
            roles in proptest::collection::btree_set("[a-z/]{1,20}", 0..5),
        ) {
            let roles = roles.into_iter().map(|role| Role::new(role).unwrap()).collect();
            let row = NodeRow { beat, token, started_ms };
            prop_assert_eq!(NodeRow::from_bytes(&row.to_bytes()).unwrap(), row);
            let roles = Roles(roles);
            prop_assert_eq!(Roles::from_bytes(&roles.to_bytes()).unwrap(), roles);
        }
    }
}
