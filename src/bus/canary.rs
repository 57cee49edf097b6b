//! The canary: each node records an event of its own, and waits until it has come through the whole path.
//!
//! It is one transaction, one fold and one row, of the one database that all nodes share: `_notibus/canary`. So subscribers of everything
//! see that database updated as often as all nodes together record, and it is in `_db_updates`. That is why it has to be asked for.

use std::time::Duration;

use super::Bus;
use crate::{
    base::{
        error::{Error, Result},
        event::{Db, DbInstance},
    },
    roles::dispatcher::Subscriptions,
};

/// The name of its database.
const NAME: &str = "_notibus/canary";

/// What fails if it does not come back, as `ready` tells it.
const WHAT: &str = "delivery of the canary";

/// How long one may take at least before it counts as lost.
const LIMIT_MIN: Duration = Duration::from_secs(5);

/// Records an event every `interval`, for ever. The time from its commit to its delivery is counted; one that is not delivered keeps the
/// node from being ready until one is.
pub(super) async fn run(bus: Bus, dispatcher: Subscriptions, interval: Duration) {
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

/// Records one event; returns how long it took from the commit until its row was handed out here.
async fn send(bus: &Bus, dispatcher: &Subscriptions) -> Result<Duration> {
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
