//! [`Extension`]: what a layer keeps with a transaction until its commit.

use std::any::Any;

use smallvec::SmallVec;

use super::Mutation;

/// State of a layer that belongs to one attempt at a transaction: the commit consumes it, and a reset or a retry drops it. A layer uses it
/// to hold back writes and merge them.
pub(crate) trait Extension: Any + Default + Send {
    /// Returns roughly how many bytes the held-back writes add to the size of the transaction.
    fn size(&self) -> usize;

    /// Calls `write` with each write that was held back.
    fn into_writes(self, write: &mut dyn FnMut(Mutation));
}

/// An extension of any type.
trait Held: Any + Send {
    fn size(&self) -> usize;
    fn into_writes(self: Box<Self>, write: &mut dyn FnMut(Mutation));
}

impl<E: Extension> Held for E {
    fn size(&self) -> usize {
        Extension::size(self)
    }

    fn into_writes(self: Box<Self>, write: &mut dyn FnMut(Mutation)) {
        Extension::into_writes(*self, write);
    }
}

/// The extensions of a transaction, at most one of each type. Only a few types exist, so a linear search is enough.
#[derive(Default)]
pub(super) struct Extensions(SmallVec<[Box<dyn Held>; 2]>);

impl Extensions {
    /// Returns the extension of this type, which is created on first use.
    pub fn get<E: Extension>(&mut self) -> &mut E {
        let known = self.0.iter().position(|held| (&**held as &dyn Any).is::<E>());
        let index = known.unwrap_or_else(|| {
            self.0.push(Box::<E>::default());
            self.0.len() - 1
        });
        let found = &mut *self.0[index] as &mut dyn Any;
        found.downcast_mut().expect("it was found by its type")
    }

    pub fn size(&self) -> usize {
        self.0.iter().map(|held| held.size()).sum()
    }

    pub fn into_writes(self, mut write: impl FnMut(Mutation)) {
        for held in self.0 {
            held.into_writes(&mut write);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use fastrand::Rng;

    use super::*;
    use crate::{
        base::error::StoreError,
        store::{AtomicOp, Isolation, KeyRange, Store},
    };

    type Model = BTreeMap<Vec<u8>, Vec<u8>>;

    /// A test extension: numbers to add to keys at the commit.
    #[derive(Default)]
    struct Sums(BTreeMap<Vec<u8>, u64>);

    impl Extension for Sums {
        fn size(&self) -> usize {
            0
        }

        fn into_writes(self, write: &mut dyn FnMut(Mutation)) {
            for (key, sum) in self.0 {
                let operand = [&sum.to_le_bytes()[..], &[0; 32]].concat();
                write(Mutation::Atomic(AtomicOp::Add, key.into(), operand.into()));
            }
        }
    }

    /// Adds `n` to the number in the first 9 bytes of a value, which are enough for any sum.
    fn add(model: &mut Model, key: Vec<u8>, n: u64) {
        let value = model.entry(key).or_insert_with(|| vec![0; 40]);
        let (low, _) = value.split_at_mut(9);
        let mut wide = [0; 16];
        wide[..9].copy_from_slice(low);
        low.copy_from_slice(&(u128::from_le_bytes(wide) + u128::from(n)).to_le_bytes()[..9]);
    }

    /// The writes that an extension holds back are applied once, after all others, and are forgotten with the transaction.
    #[tokio::test]
    async fn what_is_held_back_comes_last_and_is_forgotten_with_its_transaction() {
        for seed in 0..60 {
            let random = &mut Rng::with_seed(seed);
            let store = Store::memory();
            let mut model = Model::new();
            for _ in 0..8 {
                let tx = store.begin();
                let keys = random.u16(1..300);
                let mut next = model.clone();
                let mut added = BTreeMap::<Vec<u8>, u64>::new();
                for _ in 0..random.usize(0..600) {
                    let key = random.u16(0..keys).to_be_bytes().to_vec();
                    match random.u8(0..12) {
                        0 => {
                            tx.set(&key, &[9; 40]);
                            next.insert(key, vec![9; 40]);
                        }
                        1 => {
                            tx.clear(&key);
                            next.remove(&key);
                        }
                        2 => {
                            let mut one = [0; 40];
                            one[0] = 1;
                            tx.atomic(AtomicOp::Add, &key, &one);
                            add(&mut next, key, 1);
                        }
                        3 => {
                            let found = tx.get(&key, Isolation::Snapshot).await.unwrap();
                            assert_eq!(found.as_deref(), next.get(&key).map(|v| &v[..]));
                        }
                        4 if random.u8(0..20) == 0 => {
                            tx.reset();
                            (next, added) = (model.clone(), BTreeMap::new());
                        }
                        5 if random.u8(0..20) == 0 => {
                            let pause = Box::pin(std::future::ready(()));
                            tx.recover(StoreError::NOT_COMMITTED.into(), pause).await.unwrap();
                            (next, added) = (model.clone(), BTreeMap::new());
                        }
                        _ => {
                            let n = random.u64(1..1 << 32);
                            tx.extension(|sums: &mut Sums| *sums.0.entry(key.clone()).or_default() += n);
                            *added.entry(key).or_default() += n;
                        }
                    }
                }
                if random.u8(0..5) == 0 {
                    tx.cancel();
                    assert!(tx.commit().await.is_err());
                    continue;
                }
                tx.commit().await.unwrap();
                for (key, n) in added {
                    add(&mut next, key, n);
                }
                model = next;
                let tx = store.begin();
                let rows = tx.all_rows(KeyRange::prefix(""), Isolation::Snapshot).await.unwrap();
                let rows: Model = rows.into_iter().map(|(k, v)| (k.to_vec(), v.to_vec())).collect();
                assert_eq!(rows, model, "seed {seed}");
            }
        }
    }
}
