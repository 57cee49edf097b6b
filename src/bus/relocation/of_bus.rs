//! How a [`Bus`] is moved: its methods.

use std::io::{Read, Write};

use super::{ExportOptions, Exported, export, import, raise, stored};
#[cfg(doc)]
use crate::base::error::Error;
use crate::{
    base::{encoding::Incarnation, error::Result},
    bus::Bus,
    state::keys::Keys,
    store::Database,
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
    pub async fn import(db: &Database, prefix: &[u8], input: &mut impl Read) -> Result<()> {
        import(db, &Keys::new(prefix)?, input).await
    }

    /// The incarnation of the bus in `db` under `prefix`, without opening it.
    ///
    /// Fails with [`Error::Invalid`] if there is none.
    pub async fn stored_incarnation(db: &Database, prefix: &[u8]) -> Result<Incarnation> {
        let keys = Keys::new(prefix)?;
        Ok(db.run(async |tx| stored(&tx, &keys).await).await?.incarnation)
    }

    /// Raises the incarnation of the bus in `db` under `prefix` from `from` by one, after an older state of the whole store was restored:
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
        db: &Database,
        prefix: &[u8],
        from: Incarnation,
        force: bool,
    ) -> Result<Incarnation> {
        raise(db, &Keys::new(prefix)?, from, force).await
    }
}
