//! [`DeliveryOrder`]: in which order a subscriber is delivered the rows of each database.

use std::collections::{BTreeMap, BTreeSet};

use notibus::event::{DbName, Sequence};

use crate::{guarantee::Guarantee, oracle::commit::Verdict};

/// The rows that a subscriber was delivered since it began, resumed, expired or had its filter replaced, whichever was last.
#[derive(Debug, Default)]
pub(crate) struct DeliveryOrder {
    /// The row of each database that came last.
    last: BTreeMap<DbName, Sequence>,
    rows: BTreeSet<Sequence>,
}

impl DeliveryOrder {
    /// Takes the row of `name` at `at`. Fails unless it is newer than the one before, or a subscriber that `panics` was delivered the
    /// same row already: it gets its batch again from the first row on, also if the batch has a newer row of the name.
    pub fn take(&mut self, name: &DbName, at: Sequence, panics: bool) -> Verdict {
        let is_again = !self.rows.insert(at) && panics;
        match self.last.insert(name.clone(), at) {
            Some(last) if last >= at && !is_again => {
                let guarantee = if last > at { Guarantee::Ordered } else { Guarantee::Unique };
                guarantee.fails(format!("it was informed of {name:?} at {at} after {last}"))
            }
            _ => Ok(()),
        }
    }

    /// Whether the row at `at` was the last one of `name`.
    pub fn is_last(&self, name: &DbName, at: Sequence) -> bool {
        self.last.get(name) == Some(&at)
    }

    /// From now on any row can come again.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

pub mod tests {
    use super::*;
    use notibus::event::{Incarnation, Versionstamp};

    fn at(version: u64) -> Sequence {
        Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
    }

    /// What the last of these rows of one name breaks.
    fn broken(versions: &[u64], panics: bool) -> Option<Guarantee> {
        let (name, mut order) = (DbName::new("a").unwrap(), DeliveryOrder::default());
        let taken = versions.iter().map(|version| order.take(&name, at(*version), panics)).last().unwrap();
        taken.err().map(|broken| broken.guarantee)
    }

    /// Regression: a batch had two rows of a name, and a listener has panicked on the second one. That the first one came again was called
    /// a breach of the order.
    pub fn a_batch_comes_again_from_its_first_row_on_after_a_panic() {
        assert_eq!(broken(&[1, 3, 1], true), None);
        assert_eq!(broken(&[1, 3, 1, 3], true), None);
        assert_eq!(broken(&[1, 3, 2], true), Some(Guarantee::Ordered));
        assert_eq!(broken(&[1, 3, 1], false), Some(Guarantee::Ordered));
        assert_eq!(broken(&[1, 1], false), Some(Guarantee::Unique));
    }
}
