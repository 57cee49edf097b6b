//! How a [`Bus`] is moved: its methods; and the raise of the incarnation, after its whole store was restored from a copy.

use std::io::{Read, Write};

use super::{
    export::{ExportOptions, Exported, export},
    import::import,
};
use crate::{
    base::{
        encoding::{Incarnation, Sequence},
        error::{Error, Result},
    },
    bus::Bus,
    state::{
        history::{Claim, History},
        keys::{Config, Keys},
        membership::{Silence, forget_nodes},
    },
    store::{Isolation, Store, Transaction},
};

impl Bus {
    /// Writes all data of the bus to `out`, for [`Bus::import`] into another store, and returns a summary. It blocks the
    /// thread whenever `out` does.
    ///
    /// Stop producers and roles first, and do not write to this bus afterwards. To find out whether a node lives, it watches the
    /// heartbeats for as long as they may pause ([`NodeOptions::expiry`](crate::NodeOptions::expiry)); it notices a producer that writes
    /// meanwhile. With [`ExportOptions::while_running`] it exports beside them.
    ///
    /// Fails with [`Error::BusInUse`] if nodes live, with [`Error::Invalid`] if it notices a write meanwhile, and with [`Error::Io`]
    /// if `out` fails.
    pub async fn export(&self, out: &mut impl Write, options: ExportOptions) -> Result<Exported> {
        export(&self.context, out, options).await
    }

    /// Imports the output of [`Bus::export`] into `db`, under `prefix`, and raises the incarnation by one: positions of
    /// readers stay valid, and sort before all that is written from now on. Open the bus with the same hashing schemes.
    ///
    /// Until it has ended, opening a bus there fails with [`Error::ImportUnderWay`]. If it fails, it removes what it has written. If
    /// its process dies or the future is dropped, the next import removes that, and begins again.
    ///
    /// Fails with [`Error::Invalid`] if there is data under the prefix, or the export is damaged, with [`Error::BusInUse`]
    /// if nodes live under the prefix, and with [`Error::Io`] if `input` fails or ends too early.
    pub async fn import(store: &Store, prefix: &[u8], input: &mut impl Read) -> Result<()> {
        import(store, &Keys::new(prefix)?, input).await
    }

    /// The incarnation of the bus in `store` under `prefix`, without opening it.
    ///
    /// Fails with [`Error::Invalid`] if there is none.
    pub async fn stored_incarnation(store: &Store, prefix: &[u8]) -> Result<Incarnation> {
        let keys = Keys::new(prefix)?;
        Ok(store.run(async |tx| stored(&tx, &keys).await).await?.incarnation)
    }

    /// Raises the incarnation of the bus in `store` under `prefix` from `from` by one, after an older state of the whole store was restored:
    /// then the store stands before its own rows ([`Error::OlderThanRows`]), and nothing is folded until this is done. Returns the new
    /// incarnation; a retry after a failure does not raise it twice. Readers that had read further than the copy get
    /// [`Error::Expired`].
    ///
    /// Nodes may live: it removes all nodes, leases and fold marks, so that they commit no more work, and find with their next
    /// heartbeat that they have to open the bus again. Producers and writers of documents have no lease: stop them.
    ///
    /// Fails with [`Error::Invalid`] if the incarnation is neither `from` nor the one after it. If the store is later than all of its rows, it
    /// fails as well, unless `force` is set, for a copy that was restored into a store of later versions. Then it watches the
    /// heartbeats of listed nodes for as long as they may pause, and fails with [`Error::BusInUse`] if one lives.
    pub async fn raise_incarnation(
        store: &Store,
        prefix: &[u8],
        from: Incarnation,
        force: bool,
    ) -> Result<Incarnation> {
        raise(store, &Keys::new(prefix)?, from, force).await
    }
}

/// The configuration of the bus under `keys`. `tx` fails if it changes before the commit.
async fn stored(tx: &Transaction, keys: &Keys) -> Result<Config> {
    let stored = tx.get(&keys.config(), Isolation::Serializable).await?;
    Config::from_bytes(&stored.ok_or_else(|| Config::missing(keys.prefix()))?)
}

/// Raises the incarnation of the bus under `keys`. See [`Bus::raise_incarnation`](crate::Bus::raise_incarnation).
///
/// The same transaction removes nodes, leases and fold marks. So a process that lives, or was only paused, has no lease any more: no
/// fold, batch or pass of it commits, and its heartbeat finds that the bus is gone. What readers have seen behind the last sequence of
/// the incarnation before was not restored. A folder knows how far the copy went, and keeps readers that had read to its end.
async fn raise(store: &Store, keys: &Keys, from: Incarnation, force: bool) -> Result<Incarnation> {
    let history = History { store, keys, incarnation: from };
    // Nodes that live beside a store that is older than its rows do nothing. Others do, unless its opening has kept them out.
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
                     where a copy was restored into a store of later versions and no node has run since"
                );
                return Err(Error::invalid("incarnation", reason));
            }
            Ok(_) => {
                // Readers of the copy itself may have known of the time after its last row.
                let known = store.last_before_opening().map(|version| Sequence::last_at(from, version));
                let end = history.end_of(&tx, from).await?.max(known);
                if let Some(end) = end {
                    tx.set(&keys.end_of_incarnation(from), end.as_bytes());
                }
            }
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
