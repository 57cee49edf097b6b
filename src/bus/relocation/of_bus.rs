//! The methods of a [`Bus`] that move it, and the one that raises the incarnation after the whole store was restored from a copy.

use std::io::{Read, Write};

use super::{
    export::{ExportOptions, Exported, export},
    import::import,
};
use crate::{
    base::{
        encoding::Incarnation,
        error::{Error, Result},
    },
    bus::Bus,
    state::{
        history::{Claim, History},
        keys::{Config, EndOfIncarnation, Keys},
        membership::{Silence, forget_nodes},
    },
    store::{Isolation, Store, Transaction},
};

impl Bus {
    /// Writes all data of the bus to `out`, for [`Bus::import`] into another store, and returns a summary. Blocks the thread whenever `out`
    /// blocks.
    ///
    /// Stop producers and roles first, and do not write to this bus afterwards. To find out whether a node is alive, the export watches the
    /// heartbeats for as long as they may pause ([`NodeOptions::expiry`](crate::NodeOptions::expiry)). It also notices a producer that
    /// writes during the export. With [`ExportOptions::while_running`], roles and producers may keep running.
    ///
    /// Fails with [`Error::BusInUse`] if nodes are alive, with [`Error::Invalid`] if it notices a write during the export, and with
    /// [`Error::Io`] if `out` fails.
    pub async fn export(&self, out: &mut impl Write, options: ExportOptions) -> Result<Exported> {
        export(&self.context, out, options).await
    }

    /// Imports the output of [`Bus::export`] into `store`, under `prefix`, and raises the incarnation by one: positions of readers stay
    /// valid, and sort before everything that is written from now on. Open the bus with the same hashing schemes.
    ///
    /// Until the import has ended, opening a bus there fails with [`Error::ImportUnderWay`]. A failed import removes what it wrote. If its
    /// process dies or the future is dropped, the next import does so before it begins.
    ///
    /// Fails with [`Error::Invalid`] if there is data under the prefix, or the export is damaged, with [`Error::BusInUse`] if nodes are
    /// alive under the prefix, and with [`Error::Io`] if `input` fails or ends too early.
    pub async fn import(store: &Store, prefix: &[u8], input: &mut impl Read) -> Result<()> {
        import(store, &Keys::new(prefix)?, input).await
    }

    /// Returns the incarnation of the bus in `store` under `prefix`, without opening the bus.
    ///
    /// Fails with [`Error::Invalid`] if there is no bus.
    pub async fn stored_incarnation(store: &Store, prefix: &[u8]) -> Result<Incarnation> {
        let keys = Keys::new(prefix)?;
        Ok(store.run(async |tx| stored(&tx, &keys).await).await?.incarnation)
    }

    /// Raises the incarnation of the bus in `store` under `prefix` from `from` by one, after an older state of the whole store was
    /// restored: the store is then older than its own rows ([`Error::OlderThanRows`]), and nothing is folded until this is done. Returns
    /// the new incarnation; a retry after a failure does not raise it twice. Readers that had read beyond the copy get [`Error::Expired`].
    ///
    /// Nodes may be alive: the raise removes all nodes, leases and fold marks, so that live nodes commit no more work, and find out with
    /// their next heartbeat that they have to open the bus again. Producers and writers of documents have no lease: stop them.
    ///
    /// Fails with [`Error::Invalid`] if the incarnation is neither `from` nor the one after it. It also fails if the store is later than
    /// all of its rows, unless `force` is set, which is meant for a copy that was restored into a store with later versions. With `force`
    /// it watches the heartbeats of listed nodes for as long as they may pause, and fails with [`Error::BusInUse`] if one is alive.
    pub async fn raise_incarnation(
        store: &Store,
        prefix: &[u8],
        from: Incarnation,
        force: bool,
    ) -> Result<Incarnation> {
        raise(store, &Keys::new(prefix)?, from, force).await
    }
}

/// Reads the configuration of the bus under `keys`. `tx` fails if it changes before the commit.
async fn stored(tx: &Transaction, keys: &Keys) -> Result<Config> {
    let stored = tx.get(&keys.config(), Isolation::Serializable).await?;
    Config::from_bytes(&stored.ok_or_else(|| Config::missing(keys.prefix()))?)
}

/// Raises the incarnation of the bus under `keys`. See [`Bus::raise_incarnation`](crate::Bus::raise_incarnation).
///
/// The same transaction removes nodes, leases and fold marks. So a process that is alive, or was only paused, no longer has a lease: none
/// of its folds, batches or passes commits, and its heartbeat finds that the bus is gone. Rows that readers saw after the last sequence of
/// the old incarnation were not restored. A folder knows which versions it has given out, so readers that had read to the end of the copy
/// stay valid, however many times the copy was opened since.
async fn raise(store: &Store, keys: &Keys, from: Incarnation, force: bool) -> Result<Incarnation> {
    let history = History { store, keys, incarnation: from };
    // On a store that is older than its rows, live nodes do nothing. On any other store they may be working, unless this process alone has
    // the store open and has not used the bus since.
    let is_alone = !force || store.is_unused(keys.prefix());
    let silence = if is_alone { None } else { Some(Silence::of_bus(store, keys).await?) };
    store.run(async |tx| {
        let config = stored(&tx, keys).await?;
        let raised = Config { incarnation: from, ..config }.raised()?;
        if config.incarnation == raised.incarnation {
            return Ok(raised.incarnation);
        }
        if config.incarnation != from {
            let reason = format!("it is {}, not {}", config.incarnation.0, from.0);
            return Err(Error::invalid("incarnation", reason));
        }
        match history.check(&tx, Claim::Rows).await {
            Err(Error::OlderThanRows { .. }) => {}
            Err(error) => return Err(error),
            Ok(last) if !force => {
                let reason = format!(
                    "the store is at {last}, later than all of its rows, as if nothing was restored: raise it with --force \
                     if a copy was restored into a store with later versions and no node has run since"
                );
                return Err(Error::invalid("incarnation", reason));
            }
            Ok(last) => {
                // Readers of the copy itself may have read beyond its last row.
                let openings = history.openings(&tx).await?;
                if !openings.is_empty() {
                    let end = EndOfIncarnation { last, openings };
                    tx.set(&keys.end_of_incarnation(from), &end.to_bytes());
                }
            }
        }
        if let Some(silence) = &silence {
            silence.check(&tx, keys).await?;
        }
        forget_nodes(&tx, keys).await?;
        tx.clear_range(&keys.all_leases());
        tx.clear_range(&keys.all_fold_marks());
        // Results stay: a run with their key that begins from now on finds them. If a run that began earlier finds none, its read version
        // is of the old cluster, and proves nothing.
        tx.set(&keys.runs_swept(), &tx.read_version().await?.to_be_bytes());
        tx.set(&keys.config(), &raised.to_bytes());
        Ok(raised.incarnation)
    })
    .await
}
