//! Databases, and the kinds of events that happen to them.

use std::{borrow::Borrow, fmt, ops::BitOr, ops::BitOrAssign, str::FromStr, sync::Arc};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::base::{
    encoding::Counters,
    env::Env,
    error::{Error, Result},
    macros::serde_as_text,
};

/// Fails unless `text` has from 1 to [`DbName::LEN_MAX`] bytes.
fn check_len(what: &'static str, text: &str) -> Result<()> {
    match text.len() {
        0 => Err(Error::invalid(what, "it is empty")),
        len if len > DbName::LEN_MAX => {
            Err(Error::invalid(what, format!("it has {len} bytes, at most {} are allowed", DbName::LEN_MAX)))
        }
        _ => Ok(()),
    }
}

/// The name of a database: UTF-8, 1 to 1,024 bytes. Clones are cheap.
///
/// ```
/// use notibus::DbName;
///
/// let name: DbName = "shop/orders".parse()?;
/// assert_eq!(name.as_str(), "shop/orders");
/// assert!(DbName::new("").is_err());
/// # Ok::<(), notibus::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DbName(Arc<str>);

impl DbName {
    /// The maximum length of a name, in bytes. Names are part of keys, where escaping can double their length, and keys must stay below the
    /// store's limit.
    pub const LEN_MAX: usize = 1_024;

    /// Creates a name. Fails if `name` is empty or too long.
    pub fn new(name: &str) -> Result<Self> {
        check_len("database name", name)?;
        Ok(Self(name.into()))
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the text without copying it.
    pub(crate) fn shared(&self) -> Arc<str> {
        Arc::clone(&self.0)
    }
}

impl FromStr for DbName {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::new(name)
    }
}

impl Borrow<str> for DbName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for DbName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for DbName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

serde_as_text!(DbName);

/// The id of a design document: UTF-8, 1 to 1,024 bytes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DdocId(Arc<str>);

impl DdocId {
    /// The maximum length of an id, in bytes: the same as for a name, and for the same reason.
    pub const LEN_MAX: usize = DbName::LEN_MAX;

    /// Creates an id. Fails if `id` is empty or too long.
    pub fn new(id: &str) -> Result<Self> {
        check_len("design document id", id)?;
        Ok(Self(id.into()))
    }

    /// Returns the id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for DdocId {
    type Err = Error;

    fn from_str(id: &str) -> Result<Self> {
        Self::new(id)
    }
}

impl fmt::Display for DdocId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

serde_as_text!(DdocId);

/// Identifies one life of a database, from its creation to its deletion: 16 bytes, new at each creation. As text, 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DbInstance(pub [u8; 16]);

impl DbInstance {
    /// Creates an instance for a database that is being created: 128 random bits.
    #[expect(clippy::new_without_default, reason = "a default would be the same each time")]
    pub fn new() -> Self {
        Self::random(&Env::system())
    }

    /// Does the same as [`DbInstance::new`], with random bits from `env`.
    pub(crate) fn random(env: &Env) -> Self {
        let bits = u128::from(env.random()) << 64 | u128::from(env.random());
        Self(bits.to_be_bytes())
    }
}

impl FromStr for DbInstance {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(Error::invalid(
                "database instance",
                format!("{text:?} is not 32 hexadecimal digits"),
            ));
        }
        let bits = u128::from_str_radix(text, 16).expect("it was checked to be 32 hexadecimal digits");
        Ok(Self(bits.to_be_bytes()))
    }
}

impl fmt::Display for DbInstance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for DbInstance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

serde_as_text!(DbInstance);

/// A database: a name, and the instance that distinguishes it from other databases with that name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Db {
    /// The name of the database.
    #[serde(rename = "db")]
    pub name: DbName,
    /// Identifies this database among all that have had the name.
    pub instance: DbInstance,
}

impl Db {
    /// Returns the database `name` as created with `instance`.
    pub fn new(name: DbName, instance: DbInstance) -> Self {
        Self { name, instance }
    }
}

/// A kind of event. The numbers are the indices of the lanes and of the bits in stored rows; they never change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EventKind {
    /// The database was created.
    Created = 0,
    /// The database was deleted.
    Deleted = 1,
    /// Something other than a design document changed in the database.
    Updated = 2,
    /// A design document was written or deleted.
    DdocUpdated = 3,
}

impl EventKind {
    /// All kinds, in the order in which they happen to a database.
    pub const ALL: [Self; 4] = [Self::Created, Self::Updated, Self::DdocUpdated, Self::Deleted];

    /// Returns the name of the kind in JSON and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Deleted => "deleted",
            Self::Updated => "updated",
            Self::DdocUpdated => "ddoc_updated",
        }
    }

    /// Returns counters with one event of this kind.
    pub fn once(self) -> Counters {
        let mut lanes = [0; 4];
        lanes[self as usize] = 1;
        Counters::from_lanes(lanes)
    }
}

impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for EventKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let kind = Self::ALL.into_iter().find(|kind| kind.as_str() == text);
        kind.ok_or_else(|| {
            let known = Self::ALL.map(Self::as_str).join(", ");
            Error::invalid("kind of event", format!("{text:?} is none of {known}"))
        })
    }
}

serde_as_text!(EventKind);

/// A set of kinds of events.
///
/// ```
/// use notibus::{EventKind, Kinds};
///
/// let kinds = Kinds::from(EventKind::Updated) | EventKind::Created.into();
/// assert!(kinds.contains(EventKind::Created) && !kinds.contains(EventKind::Deleted));
/// assert_eq!(kinds.iter().collect::<Vec<_>>(), [EventKind::Created, EventKind::Updated]);
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Kinds(u8);

impl Kinds {
    /// No kind.
    pub const NONE: Self = Self(0);
    /// Every kind.
    pub const ALL: Self = Self(0b1111);

    /// Decodes the set that is stored as `bits`. Fails if a bit stands for no kind.
    pub(crate) fn from_bits(bits: u8) -> Result<Self> {
        if bits & !Self::ALL.0 == 0 {
            Ok(Self(bits))
        } else {
            Err(Error::corrupt("kinds", format!("bits {bits:#b} stand for no kinds")))
        }
    }

    /// Returns the bits to store.
    pub(crate) fn bits(self) -> u8 {
        self.0
    }

    /// Whether `kind` is in the set.
    pub fn contains(self, kind: EventKind) -> bool {
        self.0 & (1 << kind as u8) != 0
    }

    /// Whether the two sets have a kind in common.
    pub fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Whether the set is empty.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the kinds in the set, in the order in which they happen to a database.
    pub fn iter(self) -> impl Iterator<Item = EventKind> {
        EventKind::ALL.into_iter().filter(move |&kind| self.contains(kind))
    }

    /// Returns the kinds with at least one event in `counters`.
    pub(crate) fn counted(counters: &Counters) -> Self {
        let lanes = counters.lanes();
        EventKind::ALL.into_iter().filter(|&kind| lanes[kind as usize] > 0).collect()
    }
}

impl From<EventKind> for Kinds {
    fn from(kind: EventKind) -> Self {
        Self(1 << kind as u8)
    }
}

impl BitOr for Kinds {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOrAssign for Kinds {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

impl FromIterator<EventKind> for Kinds {
    fn from_iter<I: IntoIterator<Item = EventKind>>(kinds: I) -> Self {
        kinds.into_iter().fold(Self::NONE, |set, kind| set | kind.into())
    }
}

impl fmt::Debug for Kinds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter().map(EventKind::as_str)).finish()
    }
}

impl<'de> Deserialize<'de> for Kinds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Vec::<EventKind>::deserialize(deserializer)?.into_iter().collect())
    }
}

impl Serialize for Kinds {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_and_lanes_are_golden() {
        let bits: Vec<_> = EventKind::ALL.map(|kind| (Kinds::from(kind).bits(), kind.once().lanes())).into();
        assert_eq!(bits, [(1, [1, 0, 0, 0]), (4, [0, 0, 1, 0]), (8, [0, 0, 0, 1]), (2, [0, 1, 0, 0])]);
        assert!(Kinds::from_bits(16).is_err());
        assert_eq!(Kinds::from_bits(15).unwrap(), Kinds::ALL);
    }
}
