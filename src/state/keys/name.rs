//! Family 17: a conflict key for each database name. It has no value.

use super::{Keys, family};
use crate::{
    base::event::DbName,
    store::{KeyRange, key_after},
};

impl Keys {
    /// The conflict key of transactions that decide which instance `name` means: transactions that rely on the answer have the key in their
    /// read-conflict sets, and those that change the answer have it in their write-conflict sets.
    pub fn name(&self, name: &DbName) -> KeyRange {
        let begin = self.pack(&(family::NAME, name.as_str()));
        let end = key_after(&begin);
        KeyRange { begin: begin.into(), end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes() {
        let keys = Keys::new(b"p").unwrap();
        let range = keys.name(&DbName::new("db").unwrap());
        assert_eq!(&range.begin[..], [b'p', 0x15, 17, 0x02, b'd', b'b', 0]);
        assert!(range.contains(&range.begin));
        assert!(!range.contains(&keys.name(&DbName::new("db2").unwrap()).begin));
    }
}
