//! The row of a name as it would be if its waiting events were folded now.

use super::{algorithm, drain::Drain};
use crate::{
    base::{error::Result, event::DbName, notification::Notification},
    state::{context::Context, feed::RawFeed, keys::Partition},
    store::Transaction,
};

/// The row that `name` would have if all its waiting events were folded now; `None` if the bus does not know the name.
///
/// It reads by snapshot; a fold in between does not change the result. A caller that decides by it what to record must make sure
/// that no other caller does so at the same time.
pub(crate) async fn row_if_folded(
    context: &Context,
    tx: &Transaction,
    name: &DbName,
) -> Result<Option<Notification>> {
    let partition = Partition::of(name.as_str(), context.config.partitions);
    let feed = RawFeed::notifications(context);
    let (mut drain, row) = tokio::try_join!(
        Drain::of_name(tx, &context.keys, partition, name),
        feed.newest_of(tx, name.as_str().as_bytes()),
    )?;
    let present = row.map(|row| Notification::from_bytes(row.sequence, &row.value)).transpose()?;
    let observed = drain.names.pop().map(|(_, waiting)| waiting.observed).unwrap_or_default();
    let folded = algorithm::fold(name, present.clone(), observed.into_iter().collect(), 0);
    Ok(folded.row.or(present))
}
