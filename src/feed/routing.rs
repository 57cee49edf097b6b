//! Routing: which shard an id goes to. A scheme has a stable number, which the topology stores.

use xxhash_rust::xxh3::xxh3_64;

use crate::error::{Error, Result};

/// The default scheme: jump consistent hashing of the id's XXH3 hash.
pub(crate) const SCHEME_JUMP: u16 = 1;

/// The place, below `shards`, of `id` under the scheme of that number.
pub(crate) fn route(scheme: u16, id: &[u8], shards: usize) -> Result<usize> {
    match scheme {
        SCHEME_JUMP => Ok(jump(xxh3_64(id), shards)),
        _ => Err(Error::corrupt("topology", format!("scheme {scheme} is unknown"))),
    }
}

/// Jump consistent hashing (Lamping and Veach 2014): spreads keys evenly over `buckets`, and moves only 1/n of them when
/// bucket number n is added.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "the algorithm is defined on doubles of positive values below 2^53"
)]
fn jump(mut key: u64, buckets: usize) -> usize {
    let mut bucket = 0;
    let mut next = 0;
    while next < buckets {
        bucket = next;
        key = key.wrapping_mul(2_862_933_555_777_941_757).wrapping_add(1);
        next = ((bucket + 1) as f64 * ((1_u64 << 31) as f64 / ((key >> 33) + 1) as f64)) as usize;
    }
    bucket
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_of_an_id_never_changes() {
        let places =
            ["a", "shop/orders", "_replicator", "ü"].map(|id| route(SCHEME_JUMP, id.as_bytes(), 16).unwrap());
        assert_eq!(places, [14, 0, 5, 1]);
        assert!(route(0, b"a", 16).is_err());
    }

    /// The values that other implementations of the algorithm give.
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
        let place = |id: u32, shards| route(SCHEME_JUMP, &id.to_be_bytes(), shards).unwrap();
        let mut counts = [0; 8];
        let mut moved = 0;
        for id in 0..8_000 {
            counts[place(id, 8)] += 1;
            moved += u32::from(place(id, 8) != place(id, 9));
        }
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
        assert!((700..1100).contains(&moved), "{moved} of 8,000 moved to the ninth shard");
    }
}
