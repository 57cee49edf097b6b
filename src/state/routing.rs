//! Routes ids to shards. A hashing scheme has a stable number, which is stored in the topology of a feed.

use std::{collections::BTreeMap, fmt, sync::Arc};

use xxhash_rust::xxh3::xxh3_64;

use crate::base::error::{Error, Result};

/// The stored number of a hashing scheme. Its meaning never changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
pub struct SchemeId(pub u16);

impl SchemeId {
    /// Jump consistent hashing of the XXH3 hash of the whole id.
    pub const ID: Self = Self(1);

    /// The same hashing, but of the partition key. For a document of a partitioned database, `partition:rest`, this is the part before the
    /// first `:`. Ids without a `:`, and ids of design documents, are hashed as a whole. All documents of a partition are in one shard.
    pub const PARTITION_KEY: Self = Self(2);

    /// The scheme of a topology entry that cannot be decoded: its rows can be read in order, but no id can be found there.
    pub const UNREADABLE: Self = Self(0);

    /// The first number that is free for custom schemes.
    pub const FIRST_CUSTOM: Self = Self(1_024);
}

/// Routes ids to shards.
pub trait HashingScheme: fmt::Debug + Send + Sync + 'static {
    /// Returns the index of `id` among `shards` shards, counted from 0. The index must depend on nothing else and never change, because
    /// rows are found by it. An index that is not below `shards` makes the operation fail.
    fn place(&self, id: &[u8], shards: u32) -> u32;
}

/// The hashing schemes that a process knows, by number.
///
/// ```
/// use notibus::{feed::{HashingScheme, SchemeId, Schemes}};
///
/// /// Keeps the documents of a year together.
/// #[derive(Debug)]
/// struct Year;
///
/// impl HashingScheme for Year {
///     fn place(&self, id: &[u8], shards: u32) -> u32 {
///         id.iter().take(4).fold(0, |sum: u32, &digit| sum * 10 + u32::from(digit % 10)) % shards
///     }
/// }
///
/// let schemes = Schemes::default().with(SchemeId::FIRST_CUSTOM, Year)?;
/// assert!(schemes.with(SchemeId::ID, Year).is_err(), "the numbers below 1,024 are kept");
/// # Ok::<(), notibus::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Schemes(BTreeMap<SchemeId, Arc<dyn HashingScheme>>);

impl Default for Schemes {
    fn default() -> Self {
        let id: Arc<dyn HashingScheme> = Arc::new(Id);
        Self([(SchemeId::ID, id), (SchemeId::PARTITION_KEY, Arc::new(PartitionKey))].into())
    }
}

impl Schemes {
    /// Adds `scheme` under `id`, which must be [`SchemeId::FIRST_CUSTOM`] or higher, and not in use.
    pub fn with(mut self, id: SchemeId, scheme: impl HashingScheme) -> Result<Self> {
        if id < SchemeId::FIRST_CUSTOM {
            let reason = format!("{} is below {}", id.0, SchemeId::FIRST_CUSTOM.0);
            return Err(Error::invalid("hashing scheme", reason));
        }
        match self.0.insert(id, Arc::new(scheme)) {
            None => Ok(self),
            Some(_) => Err(Error::invalid("hashing scheme", format!("{} is registered twice", id.0))),
        }
    }

    fn get(&self, id: SchemeId) -> Result<&dyn HashingScheme> {
        self.0.get(&id).map(|scheme| &**scheme).ok_or(Error::UnknownScheme { scheme: id.0 })
    }

    /// Fails unless there is a scheme with the number `id`.
    pub(crate) fn check(&self, id: SchemeId) -> Result<()> {
        self.get(id).map(|_| ())
    }

    /// Returns the index of `id`, below `shards`, under the scheme with the number `scheme`.
    pub(crate) fn place(&self, scheme: SchemeId, id: &[u8], shards: u32) -> Result<u32> {
        match self.get(scheme)?.place(id, shards) {
            place if place < shards => Ok(place),
            place => {
                let reason = format!("scheme {} returned place {place} of {shards}", scheme.0);
                Err(Error::invalid("hashing scheme", reason))
            }
        }
    }
}

/// The hashing of [`SchemeId::ID`].
#[derive(Debug)]
struct Id;

impl HashingScheme for Id {
    fn place(&self, id: &[u8], shards: u32) -> u32 {
        jump(xxh3_64(id), shards)
    }
}

/// The hashing of [`SchemeId::PARTITION_KEY`].
#[derive(Debug)]
struct PartitionKey;

impl HashingScheme for PartitionKey {
    fn place(&self, id: &[u8], shards: u32) -> u32 {
        jump(xxh3_64(partition_key(id)), shards)
    }
}

/// Returns the part of the id that all documents of one partition share.
fn partition_key(id: &[u8]) -> &[u8] {
    if id.starts_with(b"_design/") {
        return id;
    }
    id.iter().position(|&byte| byte == b':').map_or(id, |end| &id[..end])
}

/// Jump consistent hashing (Lamping and Veach 2014): spreads keys evenly over `buckets`, and moves only 1/n of them
/// when bucket number n is added.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "the algorithm is defined on doubles of positive values below 2^53"
)]
fn jump(mut key: u64, buckets: u32) -> u32 {
    let mut bucket = 0;
    let mut next = 0_u64;
    while next < u64::from(buckets) {
        bucket = next as u32;
        key = key.wrapping_mul(2_862_933_555_777_941_757).wrapping_add(1);
        next = ((next + 1) as f64 * ((1_u64 << 31) as f64 / ((key >> 33) + 1) as f64)) as u64;
    }
    bucket
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(scheme: SchemeId, id: &str, shards: u32) -> u32 {
        Schemes::default().place(scheme, id.as_bytes(), shards).unwrap()
    }

    #[test]
    fn the_place_of_an_id_never_changes() {
        let places = ["a", "shop/orders", "_replicator", "ü"].map(|id| place(SchemeId::ID, id, 16));
        assert_eq!(places, [14, 0, 5, 1]);
        let unknown = Schemes::default().place(SchemeId(0), b"a", 16).unwrap_err();
        assert!(matches!(unknown, Error::UnknownScheme { scheme: 0 }));
    }

    #[test]
    fn a_partition_is_in_one_shard_and_design_documents_go_by_their_id() {
        let of = |id| place(SchemeId::PARTITION_KEY, id, 1_000);
        assert_eq!(of("sensor-1:a"), of("sensor-1:b:c"));
        assert_eq!(of("sensor-1:a"), of("sensor-1"));
        assert_ne!(of("sensor-1:a"), of("sensor-2:a"));
        assert_eq!(of("_design/x:y"), place(SchemeId::ID, "_design/x:y", 1_000));
        assert_ne!(of("_design/x:y"), of("_design/x:z"));
        assert_eq!(of(":a"), of(""), "an empty partition is one, too");
    }

    #[test]
    fn a_scheme_that_leaves_the_shards_is_refused() {
        #[derive(Debug)]
        struct Outside;
        impl HashingScheme for Outside {
            fn place(&self, _id: &[u8], shards: u32) -> u32 {
                shards
            }
        }
        let schemes = Schemes::default().with(SchemeId(5_000), Outside).unwrap();
        assert!(schemes.place(SchemeId(5_000), b"a", 4).is_err());
        assert!(schemes.with(SchemeId(5_000), Outside).is_err(), "it is registered already");
    }

    /// Compares the results with those of other implementations of the algorithm.
    #[test]
    fn jumps_as_others_do() {
        let first: Vec<_> = (0..10).map(|key| jump(key, 100)).collect();
        assert_eq!(first, [0, 55, 62, 8, 45, 59, 86, 97, 82, 59]);
        let large = [10_863_919_174_838_991, 2_016_238_256_797_177_309, 1_673_758_223_894_951_030];
        assert_eq!(large.map(|key| jump(key, 11)), [6, 3, 5]);
        assert_eq!([2, 2_201, 2_202].map(|key| jump(key, 100_001)), [80_343, 22_152, 15_018]);
    }

    #[test]
    fn ids_spread_evenly_and_few_move() {
        let place = |id: u32, shards| Id.place(&id.to_be_bytes(), shards);
        let mut counts = [0; 8];
        let mut moved = 0;
        for id in 0..8_000 {
            counts[place(id, 8) as usize] += 1;
            moved += u32::from(place(id, 8) != place(id, 9));
        }
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
        assert!((700..1100).contains(&moved), "{moved} of 8,000 moved to the ninth shard");
    }
}
