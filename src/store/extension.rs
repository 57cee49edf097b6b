//! [`Extension`]: what a layer keeps with a transaction until its commit.

use std::any::Any;

use smallvec::SmallVec;

use super::mutation::Mutation;

/// State of a layer that belongs to one attempt of a transaction: a commit takes it, a reset or a retry drops it. A layer holds
/// back writes this way, to merge them.
pub(crate) trait Extension: Any + Default + Send {
    /// About the bytes that its writes add to the size of the transaction.
    fn size(&self) -> usize;

    /// Gives `write` the writes that were held back.
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

/// The extensions of a transaction, at most one of each type. There are few types.
#[derive(Default)]
pub(super) struct Extensions(SmallVec<[Box<dyn Held>; 2]>);

impl Extensions {
    /// The extension of this type, which is made on its first use.
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
