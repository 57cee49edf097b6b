//! The choices of a subscriber: what it wants, and how slow it is.

use std::collections::BTreeSet;

use notibus::event::{DdocId, EventKind, Kinds};

use super::context::ActorContext;
use crate::oracle::{GLOBS, Interest, PREDICATES, Which};

/// Draws the interest of a subscriber.
pub(super) fn interest(actor: &ActorContext) -> Interest {
    if actor.shared.plan.subscribers.wants_deletions && actor.random(4) > 0 {
        return Interest { kinds: EventKind::Deleted.into(), ..Interest::of(which_databases(actor)) };
    }
    let which = if actor.random(4) == 0 {
        let members = (0..=actor.random(3))
            .map(|_| Interest { kinds: some_kinds(actor), ..Interest::of(which_databases(actor)) });
        Which::Any(members.collect())
    } else {
        which_databases(actor)
    };
    let mut interest = Interest { kinds: some_kinds(actor), ..Interest::of(which) };
    // Once a filter is replaced, the oracle no longer knows which design documents were delivered.
    if actor.shared.plan.subscribers.replaces {
        return interest;
    }
    match actor.random(4) {
        0 => interest.asks = true,
        1 => {
            let id = |number| DdocId::new(&format!("_design/{number}")).expect("it is short");
            let ids: BTreeSet<_> = (0..=actor.random(2)).map(|_| id(actor.random(3))).collect();
            interest.kinds |= EventKind::DdocUpdated.into();
            interest.ddocs = Some(ids);
        }
        _ => {}
    }
    interest
}

/// Chooses, by random `bits`, what a mirror shows: all kinds of events, and no predicate.
pub(super) fn mirrored(actor: &ActorContext, bits: u64) -> Interest {
    Interest::of(match bits % 3 {
        0 => Which::All,
        1 => Which::Prefix("shop/".into()),
        _ => Which::Names(actor.shared.plan.names.iter().take(2).cloned().collect()),
    })
}

/// Draws which databases are wanted.
fn which_databases(actor: &ActorContext) -> Which {
    let names = &actor.shared.plan.names;
    match actor.random(8) {
        0 | 1 => Which::All,
        2 => Which::Prefix("shop/".into()),
        3 => Which::Suffix("/_replicator".into()),
        4 => Which::Glob(GLOBS[actor.random(GLOBS.len() as u64) as usize]),
        5 => Which::Predicate(PREDICATES[actor.random(PREDICATES.len() as u64) as usize]),
        _ => Which::Names(names.iter().take(1 + actor.random(3) as usize).cloned().collect()),
    }
}

/// Draws which kinds of events are wanted: often all of them.
fn some_kinds(actor: &ActorContext) -> Kinds {
    if actor.random(2) == 0 {
        return Kinds::ALL;
    }
    let some: Kinds = EventKind::ALL.into_iter().filter(|_| actor.random(2) == 0).collect();
    if some.is_empty() { EventKind::DdocUpdated.into() } else { some }
}

/// Draws the longest time that a receiver spends on a delivery, in milliseconds.
pub(super) fn slowness_ms(actor: &ActorContext) -> u64 {
    let choices =
        if actor.shared.plan.subscribers.is_slow { [50, 300, 700, 4_000] } else { [0, 50, 700, 4_000] };
    choices[actor.random(4) as usize]
}
