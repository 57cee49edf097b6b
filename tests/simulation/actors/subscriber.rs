//! Subscribers of a dispatcher: quick and slow ones, with filters of all sorts, that stop, resume and replace their filters.

use std::time::Duration;

use notibus::{Result, cursor::Cursor};
use tokio::task::JoinSet;

use super::{
    called, choice,
    context::ActorContext,
    mirrored::Mirrored,
    receiver::{self, ReceiverOptions, Source, Sources, Stream},
};
use crate::{
    oracle::{Given, Interest, Manner, SubscriberId},
    witness::Witness,
};

const MANY: u64 = 200;

/// The longest absence of a subscriber, in milliseconds.
const ABSENCE_MAX_MS: u64 = 8_000;

/// Starts some subscribers of the dispatchers of `sources`, and perhaps a mirror.
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
        let taker = Taker::new(actor, sources, id, interest);
        tasks.spawn(taker.run(stream));
    }
    if actor.shared.plan.subscribers.has_callbacks {
        Mirrored::start(actor, source, bits, tasks)
    } else {
        Ok(None)
    }
}

/// How a subscriber with these options receives by a stream.
fn manner(terms: &ReceiverOptions) -> Manner {
    Manner { form: "a stream".into(), skips: terms.skips, panics: false }
}

/// Draws the options of a subscription.
fn terms(actor: &ActorContext, source: &Source) -> ReceiverOptions {
    let plan = &actor.shared.plan.subscribers;
    let start = match actor.random(4) {
        0 => Some(Cursor::NOTHING),
        1 => actor.shared.oracle().some_position(actor.db.env().random()).map(Cursor::from),
        2 if plan.wants_deletions || actor.shared.plan.churns_names => Some(Cursor::NOTHING),
        _ => None,
    };
    // A reader can know a position only if the tail has read so far.
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
    /// The longest time that it takes over a delivery, in milliseconds.
    slowness_ms: u64,
}

impl Taker {
    fn new(actor: &ActorContext, sources: &Sources, id: SubscriberId, interest: Interest) -> Self {
        let slowness_ms = choice::slowness_ms(actor);
        Self { actor: actor.clone(), sources: sources.clone(), id, interest, slowness_ms }
    }

    /// Receives until the dispatcher ends.
    async fn run(mut self, stream: Stream) {
        let mut stream = Some(stream);
        while let Some(present) = stream.take() {
            stream = self.take_some(present).await;
        }
    }

    /// Receives until the dispatcher ends, or until the taker stops and resumes with another stream, which is
    /// returned.
    async fn take_some(&mut self, mut stream: Stream) -> Option<Stream> {
        let plan = self.actor.shared.plan.subscribers;
        loop {
            let Self { actor, id, .. } = &*self;
            let pause = actor.db.env().sleep(Duration::from_millis(200 + actor.random(1_500)));
            let mut has_expired = false;
            // Without a delivery it asks for its cursor, so that one with a narrow filter moves on as well.
            let received = tokio::select! {
                received = stream.next() => Some(received?),
                () = pause => None,
            };
            match received {
                None => {
                    actor.shared.oracle().stands(&actor.shared, *id, stream.cursor().into());
                }
                Some(received) => {
                    for given in &received {
                        actor.note(|| format!("subscriber {id} {}", receiver::show(given)));
                        actor.shared.oracle().received(&actor.shared, *id, given);
                        has_expired |= matches!(given, Given::Expired { .. });
                    }
                    let has_failed = matches!(received[..], [Given::Failed]);
                    if has_failed || self.slowness_ms > 0 && actor.is_chaos() {
                        actor.pause(self.slowness_ms.max(50)).await;
                    }
                }
            }
            if plan.replaces && self.actor.is_chaos() && self.actor.random(6) == 0 {
                stream = self.replace(stream);
            }
            // One that has just expired is stopped more often, before it has received anything.
            let often = if has_expired { 2 } else { 6 };
            if plan.restarts && self.actor.is_chaos() && self.actor.random(often) == 0 {
                let away_ms = if has_expired { 1 } else { self.draw_absence_ms() };
                return self.restart(stream, away_ms).await;
            }
        }
    }

    fn replace(&mut self, mut stream: Stream) -> Stream {
        self.interest = choice::interest(&self.actor);
        let Self { actor, id, interest, .. } = self;
        let position = stream.cursor();
        actor.note(|| format!("subscriber {id} wants at {position:?} {interest:?}"));
        actor.shared.oracle().replaced(&actor.shared, *id, interest, position.into());
        stream.replace(interest.filter())
    }

    /// How long it stays away at most, in milliseconds: sometimes for longer than tombstones are kept.
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
