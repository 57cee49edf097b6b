//! Family 10: the nodes that live.
//!
//! A row is written by its node alone, at every heartbeat; another node removes it once it has seen no beat for long
//! enough. It must be cheap to read, because every node reads all rows again and again.

use std::{borrow::Cow, collections::BTreeSet, fmt, str::FromStr};

use serde::{Serialize, Serializer};

use super::{CELL, Keys, family};
use crate::{
    encoding::Reader,
    env::Env,
    error::{Error, Result},
    store::KeyRange,
};

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

/// What a node tells of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeRow {
    /// How often it has written the row. Others see by it that the node lives, whatever their clocks say.
    pub beat: u64,
    /// Drawn when the process joined: tells two processes under one id apart, and a process from its former self.
    pub token: [u8; 16],
    /// When it joined, in milliseconds since 1970; for people.
    pub started_ms: u64,
    /// What it does.
    pub roles: BTreeSet<Role>,
}

impl NodeRow {
    /// The stored form: beat (8 bytes), token (16), start (8), number of roles (2), and each role behind its length (2).
    pub fn to_bytes(&self) -> Vec<u8> {
        let count = u16::try_from(self.roles.len()).expect("roles are limited");
        let mut bytes =
            [&self.beat.to_be_bytes()[..], &self.token, &self.started_ms.to_be_bytes(), &count.to_be_bytes()]
                .concat();
        for role in &self.roles {
            let len = u16::try_from(role.0.len()).expect("names of roles are limited");
            bytes.extend_from_slice(&len.to_be_bytes());
            bytes.extend_from_slice(role.0.as_bytes());
        }
        bytes
    }

    /// The row stored as `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("node", bytes);
        let (beat, token, started_ms) = (reader.u64()?, reader.bytes16()?, reader.u64()?);
        let count = reader.u16()?;
        let mut roles = BTreeSet::new();
        for _ in 0..count {
            let role = Role::new(reader.text()?).map_err(|error| reader.corrupt(error.to_string()))?;
            if roles.last().is_some_and(|last| *last >= role) {
                return Err(reader.corrupt("its roles are not in order"));
            }
            roles.insert(role);
        }
        reader.finish()?;
        Ok(Self { beat, token, started_ms, roles })
    }
}

impl Keys {
    /// The key of the row of `node`.
    pub fn node(&self, node: NodeId) -> Vec<u8> {
        self.pack(&(family::NODE, CELL, &node.0[..]))
    }

    /// The rows of all nodes.
    pub fn nodes(&self) -> KeyRange {
        self.range(&(family::NODE, CELL))
    }

    /// Whose row has the key `key`.
    pub fn node_of(&self, key: &[u8]) -> Result<NodeId> {
        let (number, _, id): (u16, String, foundationdb_tuple::Bytes<'_>) = self.unpack("node", key)?;
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
        let row =
            NodeRow { beat: 3, token: [8; 16], started_ms: 258, roles: [Role::NOTIFIER, Role::HTTP].into() };
        let golden = [
            &[0, 0, 0, 0, 0, 0, 0, 3][..],
            &[8; 16],
            &[0, 0, 0, 0, 0, 0, 1, 2],
            &[0, 2],
            b"\x00\x04http",
            b"\x00\x08notifier",
        ]
        .concat();
        assert_eq!(row.to_bytes(), golden);
        assert_eq!(NodeRow::from_bytes(&golden).unwrap(), row);

        let keys = Keys::new(b"p").unwrap();
        let id = NodeId([7; 16]);
        let key = keys.node(id);
        assert_eq!(key, [&b"p\x15\x0a\x02main\x00\x01"[..], &[7; 16], b"\x00"].concat());
        assert_eq!(keys.node_of(&key).unwrap(), id);
        assert!(keys.nodes().contains(&key));
        assert!(keys.node_of(b"p\x15\x0a\x02main\x00\x01\x07\x00").is_err());
    }

    #[test]
    fn contradictory_bytes_are_refused() {
        let head = [0; 32];
        for tail in [
            &b"\x00\x01"[..],
            b"\x00\x00\x00",
            b"\x00\x01\x00\x00",
            b"\x00\x02\x00\x01b\x00\x01a",
            b"\x00\x02\x00\x01a\x00\x01a",
        ] {
            assert!(NodeRow::from_bytes(&[&head[..], tail].concat()).is_err(), "{tail:?}");
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
            let row = NodeRow { beat, token, started_ms, roles };
            prop_assert_eq!(NodeRow::from_bytes(&row.to_bytes()).unwrap(), row);
        }
    }
}
