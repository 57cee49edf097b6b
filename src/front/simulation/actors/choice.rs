//! The choices of a subscriber: what it wants, and how slow it is.

use std::collections::BTreeSet;

use super::place::Place;
use crate::{
    base::event::{DdocId, EventKind, Kinds},
    front::simulation::oracle::{GLOBS, Interest, PREDICATES, Which},
};

/// Draws the interest of a subscriber.
pub(super) fn interest(place: &Place) -> Interest {
    if place.shared.plan.subscribers.wants_deletions && place.random(4) > 0 {
        return Interest { kinds: EventKind::Deleted.into(), ..Interest::of(which_databases(place)) };
    }
    let which = if place.random(4) == 0 {
        let members = (0..=place.random(3))
            .map(|_| Interest { kinds: some_kinds(place), ..Interest::of(which_databases(place)) });
        Which::Any(members.collect())
    } else {
        which_databases(place)
    };
    let mut interest = Interest { kinds: some_kinds(place), ..Interest::of(which) };
    // After a replacement of the filter the oracle does not know which design documents were delivered.
    if place.shared.plan.subscribers.replaces {
        return interest;
    }
    match place.random(4) {
        0 => interest.asks = true,
        1 => {
            let id = |number| DdocId::new(&format!("_design/{number}")).expect("it is short");
            let ids: BTreeSet<_> = (0..=place.random(2)).map(|_| id(place.random(3))).collect();
            interest.kinds |= EventKind::DdocUpdated.into();
            interest.ddocs = Some(ids);
        }
        _ => {}
    }
    interest
}

/// What a mirror shows, by random `bits`: all kinds of events, and no predicate.
pub(super) fn mirrored(place: &Place, bits: u64) -> Interest {
    Interest::of(match bits % 3 {
        0 => Which::All,
        1 => Which::Prefix("shop/".into()),
        _ => Which::Names(place.shared.plan.names.iter().take(2).cloned().collect()),
    })
}

/// Draws the wanted databases.
fn which_databases(place: &Place) -> Which {
    let names = &place.shared.plan.names;
    match place.random(8) {
        0 | 1 => Which::All,
        2 => Which::Prefix("shop/".into()),
        3 => Which::Suffix("/_replicator".into()),
        4 => Which::Glob(GLOBS[place.random(GLOBS.len() as u64) as usize]),
        5 => Which::Predicate(PREDICATES[place.random(PREDICATES.len() as u64) as usize]),
        _ => Which::Names(names.iter().take(1 + place.random(3) as usize).cloned().collect()),
    }
}

/// Draws the wanted kinds of events: mostly all.
fn some_kinds(place: &Place) -> Kinds {
    if place.random(2) == 0 {
        return Kinds::ALL;
    }
    let some: Kinds = EventKind::ALL.into_iter().filter(|_| place.random(2) == 0).collect();
    if some.is_empty() { EventKind::DdocUpdated.into() } else { some }
}

/// Draws the longest time that a receiver takes over a delivery, in milliseconds.
pub(super) fn slowness_ms(place: &Place) -> u64 {
    let choices =
        if place.shared.plan.subscribers.is_slow { [50, 300, 700, 4_000] } else { [0, 50, 700, 4_000] };
    choices[place.random(4) as usize]
}
