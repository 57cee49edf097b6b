//! Subscribers of a dispatcher: quick and slow ones, with filters of all sorts.

use tokio::task::JoinSet;
use tokio_stream::StreamExt;

use super::Place;
use crate::{
    dispatcher::{Dispatcher, Since},
    encoding::Sequence,
    simulation::oracle::Wish,
};

/// Starts some subscribers of `dispatcher`.
pub(super) fn start(place: &Place, dispatcher: &Dispatcher, tasks: &mut JoinSet<()>) {
    for _ in 0..=place.random(3) {
        let names = &place.shared.plan.names;
        let wish = match place.random(5) {
            0 | 1 => Wish::All,
            2 => Wish::Prefix("shop/".to_owned()),
            3 => Wish::Suffix("/_replicator".to_owned()),
            _ => Wish::Names(names.iter().take(1 + place.random(3) as usize).cloned().collect()),
        };
        // From now on, from the beginning, or from where a row once stood.
        let after = match place.random(4) {
            0 => Some(Sequence::ZERO),
            1 => place.shared.oracle().some_position(place.db.env().random()),
            _ => None,
        };
        // A position can only be known to one who has read so far.
        let after = after.filter(|after| *after <= dispatcher.position());
        let since = after.map_or(Since::Now, Since::After);
        let mut subscribe = dispatcher.subscribe(wish.filter()).since(since);
        if place.random(3) == 0 {
            subscribe = subscribe.skip_when_lagging();
        }
        let mut stream = subscribe.stream();
        // Nothing comes in between.
        let start = after.unwrap_or_else(|| dispatcher.position());
        let id = place.shared.oracle().subscribed(place.issuer, wish, start);
        place.note(|| format!("has subscriber {id}, from {start} on"));
        let slowness_ms = [0, 50, 700, 4_000][place.random(4) as usize];
        let place = place.clone();
        tasks.spawn(async move {
            while let Some(given) = stream.next().await {
                place.note(|| match &given {
                    Ok(delivery) => format!("subscriber {id} is given {}", delivery.sequence()),
                    Err(interruption) => format!("subscriber {id} is interrupted: {interruption}"),
                });
                place.shared.oracle().told(&place.shared, id, &given);
                if given.is_err() || slowness_ms > 0 && place.is_chaos() {
                    place.pause(slowness_ms.max(50)).await;
                }
            }
        });
    }
}
