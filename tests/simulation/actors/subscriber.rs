//! Subscribers of a dispatcher: quick and slow ones, durable ones, with filters of all sorts, that stop, resume and
//! replace their filters.

use std::time::Duration;

use notibus::{Error, Result, cursor::Cursor};
use tokio::task::JoinSet;

use super::{
    choice,
    context::ActorContext,
    mirrored::Mirrored,
    receiver::{self, ReceiverOptions, Source, Sources, Stream},
    supervised,
};
use crate::{
    guarantee::Guarantee,
    oracle::{Given, Interest, Manner, SubscriberId},
    witness::Witness,
};

const MANY: u64 = 200;

/// The longest absence of a subscriber, in milliseconds.
const ABSENCE_MAX_MS: u64 = 8_000;

/// Starts some subscribers of the dispatchers of `sources`, and the durable ones that the process had before; and perhaps a mirror. Fails if a
/// cursor cannot be opened.
pub(super) async fn start(
    actor: &ActorContext,
    sources: Sources,
    tasks: &mut JoinSet<()>,
) -> Result<Option<Mirrored>> {
    let source = &sources.main;
    let is_supervised =
        |actor: &ActorContext| actor.shared.plan.subscribers.supervised && actor.random(2) == 0;
    let bits = actor.bits();
    let mut number = 1 + bits % 3;
    if actor.shared.plan.sizes.has_many_subscribers {
        number += MANY;
        actor.shared.witness(Witness::ManySubscribers);
    }
    for _ in 0..number {
        let interest = choice::interest(actor);
        let terms = terms(actor, source);
        if is_supervised(actor) {
            supervised::start(actor, &sources, (interest, terms), None, tasks).await?;
            continue;
        }
        let Some(subscribe) = source.subscribe(&interest, &terms)? else { return Ok(None) };
        let mut stream = Stream::new(subscribe, actor.random(3) == 0);
        let start = terms.start.unwrap_or_else(|| stream.cursor());
        let id =
            actor.shared.oracle().subscribed(actor.issuer, interest.clone(), manner(&terms), start.into());
        actor.note(|| format!("has subscriber {id}, from {start:?} on: {interest:?}, {terms:?}"));
        let taker = Taker::new(actor, &sources, (id, interest, None));
        tasks.spawn(taker.run(stream));
    }
    let process = actor.issuer.process;
    let mut durables = actor.shared.oracle().durables_of(process);
    if durables.is_empty() {
        let cursors = if actor.shared.plan.subscribers.restarts { 2 } else { actor.random(2) };
        durables.extend(
            (0..cursors).map(|number| (format!("cursor-{process}-{number}"), choice::interest(actor))),
        );
    }
    for (name, interest) in durables {
        let terms = terms(actor, source);
        if is_supervised(actor) {
            supervised::start(actor, &sources, (interest, terms), Some(name), tasks).await?;
        } else if let Some((stream, id)) =
            subscribe_durably(actor, sources.any(actor), &interest, &terms, &name).await?
        {
            let taker = Taker::new(actor, &sources, (id, interest, Some(name)));
            tasks.spawn(taker.run(stream));
        }
    }
    if actor.shared.plan.subscribers.supervised {
        Mirrored::start(actor, source, bits, tasks)
    } else {
        Ok(None)
    }
}

/// Opens the cursor `name`, and receives from there by a stream; `None` once the dispatcher has ended.
async fn subscribe_durably(
    actor: &ActorContext,
    source: &Source,
    interest: &Interest,
    terms: &ReceiverOptions,
    name: &str,
) -> Result<Option<(Stream, SubscriberId)>> {
    // Sometimes one that wants to begin with nothing again comes before, and is stopped before it gets anything: what is saved stays.
    if actor.is_chaos()
        && actor.random(4) == 0
        && let Some(subscribe) = source.subscribe_durably(actor, interest, terms, name).await?
    {
        let saved = Stream::new(subscribe.since(Cursor::NOTHING), false).checkpoint().await;
        actor.note(|| format!("{name} was not to begin with nothing: {saved:?}"));
        if let Err(error @ Error::CursorLost { .. }) = saved {
            actor.shared.fail(Guarantee::Resumable.broken(format!("nobody else takes {name}: {error}")));
        }
    }
    let Some(subscribe) = source.subscribe_durably(actor, interest, terms, name).await? else {
        return Ok(None);
    };
    let mut stream = Stream::new(subscribe, actor.random(3) == 0);
    let start = stream.cursor();
    actor.note(|| format!("has {name}, from {start:?} on: {interest:?}, {terms:?}"));
    let durable = (name.to_owned(), interest.clone(), manner(terms));
    let mut oracle = actor.shared.oracle();
    let id = oracle.subscribed_durably(&actor.shared, actor.issuer, durable);
    // While no row waits for it, its cursor is the end of the ring.
    oracle.stands(&actor.shared, id, start.into());
    Ok(Some((stream, id)))
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
    /// Its cursor, if it is durable.
    cursor: Option<String>,
    /// The longest time that it takes over a delivery, in milliseconds.
    slowness_ms: u64,
    /// It saves its cursor after one of so many deliveries.
    checkpoints: u64,
}

impl Taker {
    fn new(
        actor: &ActorContext,
        sources: &Sources,
        (id, interest, cursor): (SubscriberId, Interest, Option<String>),
    ) -> Self {
        let (slowness_ms, checkpoints) = (choice::slowness_ms(actor), 1 + actor.random(4));
        Self {
            actor: actor.clone(),
            sources: sources.clone(),
            id,
            interest,
            cursor,
            slowness_ms,
            checkpoints,
        }
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
            if actor.random(self.checkpoints) == 0 {
                self.checkpoint(&mut stream).await;
            }
            if plan.replaces && self.actor.is_chaos() && self.actor.random(6) == 0 {
                self.replace(&mut stream);
            }
            // One that has just expired is stopped more often, before it has saved anything.
            let often = if has_expired { 2 } else { 6 };
            if plan.restarts && self.actor.is_chaos() && self.actor.random(often) == 0 {
                let away_ms = if has_expired { 1 } else { self.draw_absence_ms() };
                return self.restart(stream, away_ms).await;
            }
        }
    }

    /// Saves its cursor.
    async fn checkpoint(&self, stream: &mut Stream) {
        let Self { actor, id, .. } = self;
        match stream.checkpoint().await {
            Ok(()) => {}
            Err(error @ Error::CursorLost { .. }) => {
                let reason = format!("subscriber {id}, whose cursor nobody takes: {error}");
                actor.shared.fail(Guarantee::Resumable.broken(reason));
            }
            Err(error) => actor.note(|| format!("subscriber {id} could not save its position: {error}")),
        }
    }

    fn replace(&mut self, stream: &mut Stream) {
        self.interest = choice::interest(&self.actor);
        let Self { actor, id, interest, .. } = self;
        let position = Some(stream.cursor());
        actor.note(|| format!("subscriber {id} wants at {position:?} {interest:?}"));
        actor.shared.oracle().replaced(&actor.shared, *id, interest, position.map(Into::into));
        stream.replace(interest.filter());
    }

    /// How long it stays away at most, in milliseconds: sometimes for longer than tombstones are kept.
    fn draw_absence_ms(&self) -> u64 {
        if self.actor.random(4) == 0 { ABSENCE_MAX_MS } else { self.slowness_ms.max(200) }
    }

    /// Stops, and resumes some time later: from its named cursor, or from the cursor of the stream.
    async fn restart(&mut self, mut stream: Stream, away_ms: u64) -> Option<Stream> {
        let Self { actor, sources, id, interest, cursor, .. } = &*self;
        let source = &sources.main;
        let position = stream.cursor();
        drop(stream);
        actor.pause(away_ms).await;
        let terms = ReceiverOptions { start: Some(position), ..terms(actor, source) };
        let Some(cursor) = cursor else {
            let stream = Stream::new(source.subscribe(interest, &terms).ok()??, actor.random(3) == 0);
            actor.note(|| format!("subscriber {id} goes on at {position:?}: {terms:?}"));
            let mut oracle = actor.shared.oracle();
            oracle.resumed(&actor.shared, (actor.issuer, *id), manner(&terms), position.into());
            return Some(stream);
        };
        loop {
            match subscribe_durably(actor, sources.any(actor), interest, &terms, cursor).await {
                Ok(begun) => return begun.map(|(stream, _)| stream),
                Err(error) => {
                    actor.note(|| format!("{cursor} could not be opened: {error}"));
                    actor.pause(300).await;
                }
            }
        }
    }
}
