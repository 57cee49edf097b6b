//! Raises the incarnation of a bus whose whole store was restored from a copy.

use crate::{
    base::{
        encoding::Incarnation,
        error::{Error, Result},
    },
    state::{
        history::{Asked, History},
        keys::{Config, Keys},
        membership::{Silence, forget_nodes},
    },
    store::{Database, Isolation, Transaction},
};

/// The configuration of the bus under `keys`. `tx` fails if it changes before the commit.
pub(crate) async fn stored(tx: &Transaction, keys: &Keys) -> Result<Config> {
    let stored = tx.get(&keys.config(), Isolation::Serializable).await?;
    Config::from_bytes(&stored.ok_or_else(|| Config::missing(keys.prefix()))?)
}

/// Raises the incarnation of the bus under `keys`. See [`Bus::raise_incarnation`](crate::Bus::raise_incarnation).
///
/// The same transaction removes nodes, leases and fold marks. So a process that lives, or was only paused, has no lease any more: no
/// fold, batch or pass of it commits, and its heartbeat finds that the bus is gone. The last sequence of the incarnation before stays
/// in the table as it is: what readers have seen behind it was not restored.
pub(crate) async fn raise(db: &Database, keys: &Keys, from: Incarnation, force: bool) -> Result<Incarnation> {
    let history = History { db, keys, incarnation: from };
    // Nodes that live beside a store that is older than its rows do nothing. Others do, unless its opening has kept them out.
    let is_alone = !force || db.is_unused(keys.prefix());
    let silence = if is_alone { None } else { Some(Silence::of_bus(db, keys).await?) };
    db.run(async |tx| {
        let config = stored(&tx, keys).await?;
        let raised = Config { incarnation: from, ..config }.raised()?;
        if config.incarnation == raised.incarnation {
            return Ok(raised.incarnation);
        }
        if config.incarnation != from {
            let reason = format!("it is {}, not {}", config.incarnation.0, from.0);
            return Err(Error::invalid("incarnation", reason));
        }
        match history.check(&tx, Asked::Rows).await {
            Err(Error::OlderThanRows { .. }) => {}
            Err(error) => return Err(error),
            Ok(last) if !force => {
                let reason = format!(
                    "the store is at {last}, later than all of its rows, as if nothing was restored: `force` raises it where a \
                     copy was restored into a store of later versions and no node has run since"
                );
                return Err(Error::invalid("incarnation", reason));
            }
            Ok(_) => {}
        }
        if let Some(silence) = &silence {
            silence.check(&tx, keys).await?;
        }
        forget_nodes(&tx, keys).await?;
        tx.clear_range(&keys.all_leases());
        tx.clear_range(&keys.all_fold_marks());
        // Results stay: a run of their key that begins from now on finds them. The versions of the old cluster say nothing about one
        // that began before and finds none.
        tx.set(&keys.runs_swept(), &tx.read_version().await?.to_be_bytes());
        tx.set(&keys.config(), &raised.to_bytes());
        Ok(raised.incarnation)
    })
    .await
}
