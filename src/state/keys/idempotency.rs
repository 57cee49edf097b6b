//! Family 24: the results of requests that clients may repeat, by the key of each request.

use super::{Keys, family};
use crate::store::KeyRange;

impl Keys {
    /// The result of the request with this digest of its key, recorded in `period`.
    pub fn idempotent(&self, period: u64, digest: &[u8; 16]) -> Vec<u8> {
        self.pack(&(family::IDEMPOTENCY, period, &digest[..]))
    }

    /// All results recorded before `period`.
    pub fn idempotent_before(&self, period: u64) -> KeyRange {
        KeyRange::new(self.pack(&(family::IDEMPOTENCY, 0_u64)), self.pack(&(family::IDEMPOTENCY, period)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes() {
        let keys = Keys::new(b"p").unwrap();
        let key = keys.idempotent(7, &[9; 16]);
        assert_eq!(key[..6], [b'p', 0x15, 24, 0x15, 7, 0x01]);
        assert_eq!((key.len(), key[6], key[22]), (23, 9, 0));
        let old = keys.idempotent_before(7);
        assert!(!old.contains(&key) && old.contains(&keys.idempotent(6, &[9; 16])));
        assert!(old.contains(&keys.idempotent(0, &[0; 16])));
    }
}
