//! Subscribers of a dispatcher: quick and slow ones, durable ones, with filters of all sorts.

use std::{collections::BTreeSet, time::Duration};

use tokio::task::JoinSet;
use tokio_stream::StreamExt;

use super::Place;
use crate::{
    dispatcher::{Dispatcher, Interruption, Since, Subscribe, Subscription},
    encoding::Sequence,
    error::{Error, Result},
    event::{DdocId, EventKind, Kinds},
    simulation::oracle::{GLOBS, SubscriberId, Which, Wish},
};

/// Starts some subscribers of `dispatcher`, and those durable ones again that the process had. Fails if a cursor cannot be opened.
pub(super) async fn start(place: &Place, dispatcher: &Dispatcher, tasks: &mut JoinSet<()>) -> Result<()> {
    for _ in 0..=place.random(3) {
        let wish = draw(place);
        let (after, since) = beginning(place, dispatcher);
        let stream = subscribe(place, dispatcher, &wish)?.since(since).stream();
        // Nothing comes in between.
        let start = after.unwrap_or_else(|| dispatcher.position());
        let id = place.shared.oracle().subscribed(place.issuer, wish.clone(), start);
        place.note(|| format!("has subscriber {id}, from {start} on: {wish:?}"));
        tasks.spawn(run(place.clone(), stream, id));
    }
    let process = place.issuer.process;
    let mut durables = place.shared.oracle().durables_of(process);
    if durables.is_empty() && place.random(2) == 0 {
        durables.push((format!("cursor-{process}"), draw(place)));
    }
    for (name, wish) in durables {
        let cursor = place.bus.cursor(&name)?;
        let (_, since) = beginning(place, dispatcher);
        let subscribe = subscribe(place, dispatcher, &wish)?.since(since);
        let stream = subscribe.durable(&cursor).await?.stream();
        let position = stream.position();
        place.note(|| format!("has {name}, from {position} on: {wish:?}"));
        let durable = (name, wish);
        let id = place.shared.oracle().subscribed_durably(&place.shared, place.issuer, durable, position);
        tasks.spawn(run(place.clone(), stream, id));
    }
    Ok(())
}

/// Where a subscriber begins: now, at the beginning, or where a row once stood.
fn beginning(place: &Place, dispatcher: &Dispatcher) -> (Option<Sequence>, Since) {
    let after = match place.random(4) {
        0 => Some(Sequence::ZERO),
        1 => place.shared.oracle().some_position(place.db.env().random()),
        _ => None,
    };
    // A position can only be known to one who has read so far.
    let after = after.filter(|after| *after <= dispatcher.position());
    (after, after.map_or(Since::Now, Since::After))
}

/// How a subscriber subscribes.
fn subscribe(place: &Place, dispatcher: &Dispatcher, wish: &Wish) -> Result<Subscribe> {
    let mut subscribe = dispatcher.subscribe(wish.filter());
    if wish.asks {
        subscribe = subscribe.with_ddocs();
    }
    if place.random(3) == 0 {
        place.note(|| "has a subscriber that skips".to_owned());
        subscribe = subscribe.skip_when_lagging();
    }
    if place.random(4) == 0 {
        let every_ms = [5, 300, 2_000][place.random(3) as usize];
        place.note(|| format!("has a subscriber that is told every {every_ms} ms"));
        subscribe = subscribe.every(Duration::from_millis(every_ms))?;
    }
    Ok(subscribe)
}

/// Draws what a subscriber wants.
fn draw(place: &Place) -> Wish {
    let which = if place.random(4) == 0 {
        let members =
            (0..=place.random(3)).map(|_| Wish { kinds: draw_kinds(place), ..Wish::of(draw_which(place)) });
        Which::Any(members.collect())
    } else {
        draw_which(place)
    };
    let mut wish = Wish { kinds: draw_kinds(place), ..Wish::of(which) };
    match place.random(4) {
        0 => wish.asks = true,
        1 => {
            let id = |number| DdocId::new(&format!("_design/{number}")).expect("it is short");
            let ids: BTreeSet<_> = (0..=place.random(2)).map(|_| id(place.random(3))).collect();
            wish.kinds |= EventKind::DdocUpdated.into();
            wish.ddocs = Some(ids);
        }
        _ => {}
    }
    wish
}

/// Draws which databases are wanted.
fn draw_which(place: &Place) -> Which {
    let names = &place.shared.plan.names;
    match place.random(7) {
        0 | 1 => Which::All,
        2 => Which::Prefix("shop/"),
        3 => Which::Suffix("/_replicator"),
        4 => Which::Glob(GLOBS[place.random(GLOBS.len() as u64) as usize]),
        _ => Which::Names(names.iter().take(1 + place.random(3) as usize).cloned().collect()),
    }
}

/// Draws which kinds of events are wanted: mostly all.
fn draw_kinds(place: &Place) -> Kinds {
    if place.random(2) == 0 {
        return Kinds::ALL;
    }
    let some: Kinds = EventKind::ALL.into_iter().filter(|_| place.random(2) == 0).collect();
    if some.is_empty() { EventKind::DdocUpdated.into() } else { some }
}

/// Receives until the dispatcher ends, and puts down now and then how far it has come.
async fn run(place: Place, mut stream: Subscription, id: SubscriberId) {
    let slowness_ms = [0, 50, 700, 4_000][place.random(4) as usize];
    let checkpoints = 1 + place.random(4);
    while let Some(given) = stream.next().await {
        place.note(|| match &given {
            Ok(delivery) => format!("subscriber {id} is given {}", delivery.sequence()),
            Err(interruption) => format!("subscriber {id} is interrupted: {interruption}"),
        });
        place.shared.oracle().told(&place.shared, id, &given);
        if matches!(given, Err(Interruption::Failed(_))) || slowness_ms > 0 && place.is_chaos() {
            place.pause(slowness_ms.max(50)).await;
        }
        if place.random(checkpoints) == 0 {
            match stream.checkpoint().await {
                Ok(()) => {}
                Err(error @ Error::CursorLost { .. }) => {
                    place.shared.fail(format!("subscriber {id}, whose cursor nobody takes: {error}"));
                }
                Err(error) => place.note(|| format!("subscriber {id} could not put down: {error}")),
            }
        }
    }
}
