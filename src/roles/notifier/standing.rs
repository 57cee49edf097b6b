//! What a name stands for, as a transaction sees it: its row, and what waits to be folded into it.

use super::{algorithm, drain::Drain};
use crate::{
    base::{error::Result, event::DbName, notification::Notification},
    state::{context::Context, feed::RawFeed, keys::Partition},
    store::Transaction,
};

/// The row that `name` would have if all that waits were folded now; `None` if nothing is known of it.
///
/// It is read by snapshot, and a fold in between changes nothing of it. Whoever decides by it what to record makes sure that
/// nobody else does so at the same time.
pub(crate) async fn standing(
    context: &Context,
    tx: &Transaction,
    name: &DbName,
) -> Result<Option<Notification>> {
    let partition = Partition::of(name.as_str(), context.config.partitions);
    let feed = RawFeed::notifications(context);
    let (drain, topology) =
        tokio::join!(Drain::of_name(tx, &context.keys, partition, name), feed.topology(tx));
    let (mut drain, topology) = (drain?, topology?);
    let row = feed.newest_of(tx, &topology, name.as_str().as_bytes()).await?;
    let present = row.map(|row| Notification::from_bytes(row.sequence, &row.value)).transpose()?;
    let observed = drain.names.pop().map(|(_, waiting)| waiting.observed).unwrap_or_default();
    let folded = algorithm::fold(name, present.clone(), observed.into_iter().collect(), 0);
    Ok(folded.row.or(present))
}
