//! Leases: who may work on a resource.
//!
//! Every acquisition raises the epoch. A transaction that works on the resource calls [`check`], which puts the lease into
//! its read-conflict set: a former owner that does not know yet that it has lost the lease cannot commit.

use crate::{
    env::Env,
    error::{Error, Result},
    keys::Lease,
    store::{Database, Isolation, Transaction},
};

/// A lease that is held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    /// The key of the lease.
    key: Vec<u8>,
    /// What is leased, for messages.
    resource: String,
    /// The epoch of the acquisition.
    pub epoch: u64,
    /// Drawn at the acquisition, so that an owner knows its own lease again after an unknown result.
    owner: [u8; 16],
}

impl Held {
    /// Takes the lease at `key`, whoever holds it. `also` runs in the same transaction, with the new epoch.
    pub async fn acquire(
        db: &Database,
        key: Vec<u8>,
        resource: String,
        also: impl Fn(&Transaction, u64),
    ) -> Result<Self> {
        let owner = draw(db.env());
        let epoch = db
            .run(async |tx| {
                let found = read(&tx, &key).await?;
                if let Some(lease) = found.filter(|lease| lease.owner == Some(owner)) {
                    // The first attempt was committed although its result was unknown.
                    return Ok(lease.epoch);
                }
                let epoch = found.map_or(0, |lease| lease.epoch) + 1;
                tx.set(&key, &Lease { epoch, owner: Some(owner) }.to_bytes());
                also(&tx, epoch);
                Ok(epoch)
            })
            .await?;
        Ok(Self { key, resource, epoch, owner })
    }

    /// Fails with [`Error::LeaseLost`] if the lease is not held any more, and makes `tx` fail if it is lost before the
    /// commit.
    pub async fn check(&self, tx: &Transaction) -> Result<()> {
        match read(tx, &self.key).await? {
            Some(lease) if lease.owner == Some(self.owner) && lease.epoch == self.epoch => Ok(()),
            found => Err(Error::LeaseLost {
                resource: self.resource.clone(),
                held: self.epoch,
                found: found.map_or(0, |lease| lease.epoch),
            }),
        }
    }

    /// Gives the lease back, if it is still held. The epoch stays.
    pub async fn release(&self, db: &Database) -> Result<()> {
        db.run(async |tx| match self.check(&tx).await {
            Ok(()) => {
                tx.set(&self.key, &Lease { epoch: self.epoch, owner: None }.to_bytes());
                Ok(())
            }
            Err(Error::LeaseLost { .. }) => Ok(()),
            Err(error) => Err(error),
        })
        .await
    }
}

/// The lease at `key`, read so that its change makes `tx` fail.
async fn read(tx: &Transaction, key: &[u8]) -> Result<Option<Lease>> {
    tx.get(key, Isolation::Serializable).await?.map(|value| Lease::from_bytes(&value)).transpose()
}

/// 16 random bytes.
fn draw(env: &Env) -> [u8; 16] {
    let bits = u128::from(env.random()) << 64 | u128::from(env.random());
    bits.to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn acquire(db: &Database) -> Held {
        Held::acquire(db, b"lease".to_vec(), "work".to_owned(), |_, _| {}).await.unwrap()
    }

    #[tokio::test]
    async fn the_newest_owner_holds_it_and_epochs_only_grow() {
        let db = Database::memory();
        let first = acquire(&db).await;
        let second = acquire(&db).await;
        assert_eq!((first.epoch, second.epoch), (1, 2));
        let lost = db.run(async |tx| first.check(&tx).await).await.unwrap_err();
        assert!(matches!(lost, Error::LeaseLost { held: 1, found: 2, .. }), "{lost}");

        first.release(&db).await.unwrap();
        db.run(async |tx| second.check(&tx).await).await.unwrap();
        second.release(&db).await.unwrap();
        assert_eq!(acquire(&db).await.epoch, 3, "a released lease keeps its epoch");
    }

    #[tokio::test]
    async fn work_that_was_checked_before_the_lease_was_lost_cannot_commit() {
        let db = Database::memory();
        let first = acquire(&db).await;
        let tx = db.begin();
        first.check(&tx).await.unwrap();
        tx.set(b"work", b"done");
        acquire(&db).await;
        assert_eq!(tx.commit().await.unwrap_err().code(), Some(1020));
    }
}
