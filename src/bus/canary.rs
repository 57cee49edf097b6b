//! The canary: each node regularly records an event of its own, and waits for its delivery.
//!
//! All nodes share one database for it: `_notibus/canary`. Each time costs one transaction, one fold and one row. Subscribers of
//! everything, `_db_updates` included, see that database updated whenever a node records. Therefore it is off by default.

use std::time::Duration;

use super::Bus;
use crate::{
    base::{
        error::{Error, Result},
        event::{Db, DbInstance},
    },
    roles::dispatcher::Fanout,
};

const NAME: &str = "_notibus/canary";

/// The name of its failure in `ready`.
const WHAT: &str = "delivery of the canary";

/// The least time after which an event counts as lost.
const LIMIT_MIN: Duration = Duration::from_secs(5);

/// Records an event every `interval`, for ever. It counts the time from the commit to the delivery. A lost event keeps the
/// node from being ready until one is delivered.
pub(super) async fn run(bus: Bus, dispatcher: Fanout, interval: Duration) {
    let context = &bus.context;
    let (env, health) = (context.env(), &context.stats.health);
    let limit = interval.max(LIMIT_MIN);
    loop {
        let sent = tokio::select! {
            biased;
            sent = send(&bus, &dispatcher) => sent,
            () = env.sleep(limit) => Err(Error::GaveUp { what: "waiting for the canary", after: limit }),
        };
        match sent {
            Ok(took) => {
                context.stats.deliveries.add(took);
                health.works(WHAT, 0);
            }
            // The dispatcher has ended.
            Err(Error::NoSubscriber { .. }) => return,
            Err(error) => health.failed(env, WHAT, 0, &error),
        }
        env.sleep(interval).await;
    }
}

/// Records one event; returns the time from the commit until its row was delivered here.
async fn send(bus: &Bus, dispatcher: &Fanout) -> Result<Duration> {
    let db = Db::new(NAME.parse().expect("it is a name"), DbInstance([0; 16]));
    let tx = bus.store().begin();
    bus.producer().updated(&tx, &db);
    let committed = tx.commit().await?;
    let began = bus.context.env().now();
    if let Some(committed) = committed {
        dispatcher.reached(committed.versionstamp.version()).await?;
    }
    Ok(bus.context.env().now().saturating_sub(began))
}
