//! Subscribers of a dispatcher: fast and slow ones, with filters of all sorts, that stop, resume and replace their filters.

use std::time::Duration;

use notibus::{Cursor, Kinds, Result, Sequence};
use tokio::task::JoinSet;

use super::{
    called, choice,
    context::ActorContext,
    mirrored::Mirrored,
    receiver::{self, ReceiverOptions, Source, Sources, Stream},
};
use crate::{
    oracle::{Given, GivenRow, Interest, Manner, SubscriberId},
    witness::Witness,
};

const MANY: u64 = 200;

/// The longest absence of a subscriber, in milliseconds.
const ABSENCE_MAX_MS: u64 = 8_000;

/// Starts several subscribers of the dispatchers in `sources`, and perhaps a mirror.
pub(super) fn start(
    actor: &ActorContext,
    sources: &Sources,
    tasks: &mut JoinSet<()>,
) -> Result<Option<Mirrored>> {
    let source = &sources.main;
    let is_callback =
        |actor: &ActorContext| actor.shared.plan.subscribers.has_callbacks && actor.random(2) == 0;
    let bits = actor.bits();
    let mut number = 1 + bits % 3;
    if actor.shared.plan.sizes.has_many_subscribers {
        number += MANY;
        actor.shared.witness(Witness::ManySubscribers);
    }
    for _ in 0..number {
        let interest = choice::interest(actor);
        let terms = terms(actor, source);
        if is_callback(actor) {
            called::start(actor, source, interest, terms, tasks)?;
            continue;
        }
        let Some(subscribe) = source.subscribe(&interest, &terms)? else { return Ok(None) };
        let mut stream = Stream::new(subscribe, actor.random(3) == 0);
        let start = terms.start.unwrap_or_else(|| stream.cursor());
        let id =
            actor.shared.oracle().subscribed(actor.issuer, interest.clone(), manner(&terms), start.into());
        actor.note(|| format!("has subscriber {id}, from {start:?} on: {interest:?}, {terms:?}"));
        let (slowness_ms, plan) = (choice::slowness_ms(actor), &actor.shared.plan);
        let keeps_all = plan.dispatcher.ring_rows_max == 1_000 && !plan.subscribers.restarts;
        let (has_ring, waits) = (keeps_all && terms.every.is_none(), None);
        let (actor, sources) = (actor.clone(), sources.clone());
        tasks.spawn(Taker { actor, sources, id, interest, slowness_ms, has_ring, waits }.run(stream));
    }
    if actor.shared.plan.subscribers.has_callbacks {
        Mirrored::start(actor, source, bits, tasks)
    } else {
        Ok(None)
    }
}

/// Returns how a subscriber with these options receives its deliveries: through a stream.
fn manner(terms: &ReceiverOptions) -> Manner {
    Manner { form: "a stream".into(), skips: terms.skips, panics: false }
}

/// Draws the options of a subscription.
fn terms(actor: &ActorContext, source: &Source) -> ReceiverOptions {
    let plan = &actor.shared.plan.subscribers;
    let start = match actor.random(4) {
        0 => Some(Cursor::BEGINNING),
        1 => actor.shared.oracle().some_position(actor.store.env().random()).map(Cursor::from),
        2 if plan.wants_deletions || actor.shared.plan.churns_names => Some(Cursor::BEGINNING),
        _ => None,
    };
    // A subscriber can know a position only if the tail has read that far.
    let start = start.filter(|start| source.position().is_some_and(|position| *start <= position));
    let paces = if plan.is_slow { [300, 1_000, 3_000] } else { [5, 300, 2_000] };
    let has_rounds = actor.random(if plan.is_slow { 2 } else { 4 }) == 0;
    let every = has_rounds.then(|| Duration::from_millis(paces[actor.random(3) as usize]));
    ReceiverOptions { start, skips: actor.random(3) == 0, every }
}

/// A receiver that takes the deliveries of a stream.
struct Taker {
    actor: ActorContext,
    sources: Sources,
    id: SubscriberId,
    interest: Interest,
    /// The longest time that the taker spends on a delivery, in milliseconds.
    slowness_ms: u64,
    /// Whether all rows for the taker stay in the ring, and the taker has no rounds of its own.
    has_ring: bool,
    /// The state when the taker last let rows wait in the ring: its own position, the position of the tail, and the end of the feed.
    waits: Option<[Sequence; 3]>,
}

impl Taker {
    /// Receives until the dispatcher ends.
    async fn run(mut self, stream: Stream) {
        let mut stream = Some(stream);
        while let Some(present) = stream.take() {
            stream = self.take_some(present).await;
        }
    }

    /// Receives until the dispatcher ends, or until the taker stops and resumes with another stream, which is returned.
    async fn take_some(&mut self, mut stream: Stream) -> Option<Stream> {
        let plan = self.actor.shared.plan.subscribers;
        loop {
            let Self { actor, sources, id, interest, has_ring, waits, .. } = self;
            let pause = actor.store.env().sleep(Duration::from_millis(200 + actor.random(1_500)));
            let mut has_expired = false;
            // Without a delivery the taker asks for its cursor, so that the position of a subscriber with a narrow filter advances too.
            let received = tokio::select! {
                received = stream.next() => Some(received?),
                () = pause => None,
            };
            match received {
                None => {
                    actor.shared.oracle().stands(&actor.shared, *id, stream.cursor().into());
                }
                Some(received) => {
                    let waits = waits.take();
                    for given in &received {
                        if waits.is_some_and(|waits| is_coalesced(given, interest, waits)) {
                            actor.shared.witness(Witness::CoalescedInRing);
                        }
                        actor.note(|| format!("subscriber {id} {}", receiver::show(given)));
                        actor.shared.oracle().received(&actor.shared, *id, given);
                        has_expired |= matches!(given, Given::Expired { .. });
                    }
                    let has_failed = matches!(received[..], [Given::Failed]);
                    if has_failed || self.slowness_ms > 0 && actor.is_chaos() {
                        if *has_ring && let Some(tail) = sources.main.position() {
                            let (cursor, end) = (stream.cursor(), actor.shared.oracle().end_of_feed());
                            let is_on_ring = cursor == cursor.position().into();
                            self.waits = is_on_ring.then(|| [cursor.position(), tail.position(), end]);
                        }
                        actor.pause(self.slowness_ms.max(50)).await;
                    }
                }
            }
            if plan.replaces && self.actor.is_chaos() && self.actor.random(6) == 0 {
                stream = self.replace(stream);
            }
            // A subscriber that has just expired is stopped more often, before it has received anything.
            let often = if has_expired { 2 } else { 6 };
            if plan.restarts && self.actor.is_chaos() && self.actor.random(often) == 0 {
                let away_ms = if has_expired { 1 } else { self.draw_absence_ms() };
                return self.restart(stream, away_ms).await;
            }
        }
    }

    fn replace(&mut self, mut stream: Stream) -> Stream {
        (self.interest, self.waits) = (choice::interest(&self.actor), None);
        let Self { actor, id, interest, .. } = self;
        let position = stream.cursor();
        actor.note(|| format!("subscriber {id} wants at {position:?} {interest:?}"));
        actor.shared.oracle().replaced(&actor.shared, *id, interest, position.into());
        stream.replace(interest.filter())
    }

    /// Draws the longest absence of the subscriber, in milliseconds: sometimes longer than tombstones are kept.
    fn draw_absence_ms(&self) -> u64 {
        if self.actor.random(4) == 0 { ABSENCE_MAX_MS } else { self.slowness_ms.max(200) }
    }

    /// Stops, and resumes some time later from the cursor of the stream.
    async fn restart(&self, mut stream: Stream, away_ms: u64) -> Option<Stream> {
        let Self { actor, sources, id, interest, .. } = self;
        let source = sources.any(actor);
        let position = stream.cursor();
        drop(stream);
        actor.pause(away_ms).await;
        let terms = ReceiverOptions { start: Some(position), ..terms(actor, source) };
        let stream = Stream::new(source.subscribe(interest, &terms).ok()??, actor.random(3) == 0);
        actor.note(|| format!("subscriber {id} goes on at {position:?}: {terms:?}"));
        actor.shared.oracle().resumed(&actor.shared, *id, manner(&terms), position.into());
        Some(stream)
    }
}

/// Whether a row replaces an older one that was waiting in the ring when the taker paused, as the newest row of its database.
fn is_coalesced(given: &Given, interest: &Interest, [known, tail, end]: [Sequence; 3]) -> bool {
    let Given::Row(GivenRow { row, .. }) = given else { return false };
    let waited = row.previous.is_some_and(|previous| known < previous && previous <= tail);
    waited && row.sequence > end && interest.kinds_of(&row.name) == Kinds::ALL
}
