//! Checks that the bus was made by a replay.
//!
//! A replay deletes the living databases of the history, and creates them again. That is right for a bus that an earlier
//! replay has made, and a disaster for one that a layer uses. So a replay that makes a bus leaves a mark in the store, outside of the
//! bus. The mark holds the sequence at which the bus began, so that it is not valid for another bus that is made there later.

use notibus::{
    Bus, BusOptions, Error, Result, Sequence,
    store::{Database, Isolation},
};

use super::args::Args;
use crate::failure::Failure;

/// The key of the mark for the bus under `prefix`.
fn mark(prefix: &str) -> Vec<u8> {
    [b"replay/made/", prefix.as_bytes()].concat()
}

/// The first sequence of the feed; it stays, as the bus has no janitor.
async fn began(bus: &Bus) -> Result<Option<Sequence>> {
    Ok(bus.feed().topology().await?.first().map(|entry| entry.first))
}

/// Makes the bus if there is none; fails if it was not made by a replay, unless the user insists.
pub(super) async fn check(args: &Args, db: &Database) -> Result<(), Failure> {
    let (prefix, mark) = (args.prefix.as_bytes(), mark(&args.prefix));
    match Bus::open_existing(db, prefix).await {
        Ok(_) if args.into_existing => Ok(()),
        Ok(bus) => {
            let made = db.run(async |tx| tx.get(&mark, Isolation::Snapshot).await).await?;
            let began = began(&bus).await?;
            if made.is_some() && made.as_deref() == began.as_ref().map(|began| &began.as_bytes()[..]) {
                return Ok(());
            }
            Err(Failure::BadInput(format!(
                "there is a bus under the prefix {:?} that no replay has made: a replay would delete and create databases of it. Choose \
                 another --prefix, or insist with --into-existing",
                args.prefix
            )))
        }
        Err(Error::Invalid { what: "prefix", .. }) => {
            let options =
                BusOptions::default().prefix(prefix.to_vec()).partitions(args.partitions).shards(args.shards);
            let began = began(&Bus::open(db, options).await?).await?;
            let set = async |tx: notibus::store::Transaction| {
                if let Some(began) = &began {
                    tx.set(&mark, began.as_bytes());
                }
                Ok(())
            };
            Ok(db.run(set).await?)
        }
        Err(error) => Err(error.into()),
    }
}
