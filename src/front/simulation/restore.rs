//! What happens when an older copy of the folder takes its place, after a world is over.
//!
//! The copy was made while the folder was in use, so its nodes look alive. The opening knows better: it removes them at
//! once. And a reader of what happened since the copy learns that it has expired, also when the store has gone on.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{
    guarantee::{Broken, Guarantee},
    keyspace::BUS_PREFIX,
    process::Process,
};
use crate::{
    base::{
        encoding::Sequence,
        env::Env,
        error::{Error, Result},
    },
    bus::Bus,
    store::{Backend, Database},
};

/// What was found of a copy.
pub(super) enum Restored {
    /// It was made before there was a bus, or nothing has happened since.
    Nothing,
    Well,
    Wrong(Broken),
}

/// Judges `copy`, which was made at version `copied_at` of the folder behind `before`. `seed` seeds its process.
pub(super) fn judge(
    (before, copy): (Arc<dyn Backend>, Arc<dyn Backend>),
    copied_at: u64,
    env: &Env,
    seed: u64,
) -> Restored {
    let (before, copy) = (Database::over(before, env.clone()), Database::over(copy, env.clone()));
    let found = Arc::new(Mutex::new(None));
    let finds = Arc::clone(&found);
    let main = async move {
        let restored = restored(&before, &copy, copied_at).await;
        *finds.lock() = Some(restored);
    };
    let process = Process::start(seed, main);
    process.run();
    process.crash();
    let failed = |reason: String| Restored::Wrong(Guarantee::Durable.broken(reason));
    match found.lock().take() {
        Some(Ok(restored)) => restored,
        Some(Err(error)) => failed(format!("a copy of the folder was opened: {error}")),
        None => failed("a copy of the folder was opened, and did not answer at once".to_owned()),
    }
}

async fn restored(before: &Database, copy: &Database, copied_at: u64) -> Result<Restored> {
    let lost = Bus::open_existing(before, BUS_PREFIX).await?.feed().now().await?;
    let bus = match Bus::open_existing(copy, BUS_PREFIX).await {
        Ok(bus) => bus,
        Err(Error::Invalid { .. }) => return Ok(Restored::Nothing),
        Err(error) => return Err(error),
    };
    if lost.versionstamp().version() <= copied_at {
        return Ok(Restored::Nothing);
    }
    let nodes = bus.nodes().await?.len();
    if nodes > 0 {
        let reason = format!("{nodes} nodes of dead processes were there after the folder was opened again");
        return Ok(Restored::Wrong(Guarantee::Live.broken(reason)));
    }
    for _ in 0..2 {
        if let Some(silent) = reads(&bus, lost).await? {
            return Ok(Restored::Wrong(Guarantee::ExpiredNotSilent.broken(silent)));
        }
        copy.run(async |tx| {
            tx.set(b"later", b"");
            Ok(())
        })
        .await?;
    }
    Ok(Restored::Well)
}

/// What a reader at `lost` gets instead of `Expired`.
async fn reads(bus: &Bus, lost: Sequence) -> Result<Option<String>> {
    match bus.feed().page(lost, 10).await {
        Err(Error::Expired { .. }) => Ok(None),
        Ok(page) => Ok(Some(format!(
            "a reader at {lost}, which the copy of the folder has never given out, got {} rows",
            page.rows.len()
        ))),
        Err(error) => Err(error),
    }
}
