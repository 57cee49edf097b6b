//! Subscribers in tasks of the dispatcher: callbacks, and listeners that panic now and then and are made again.

use std::time::Duration;

use tokio::task::JoinSet;

use super::{
    choice,
    place::Place,
    receiver::{self, ReceiverOptions, Source},
};
use crate::{
    base::{cursor::Cursor, error::Result},
    front::simulation::{
        oracle::{Given, Interest, Manner, SubscriberId},
        shared::PLANNED_PANIC,
    },
    roles::dispatcher::{
        CallbackHandle, Delivery, Filter, Interruption, Listener, ListenerHandle, Message, Next,
    },
};

/// The longest pause before a listener that has panicked is made again.
const BACKOFF_MAX: Duration = Duration::from_secs(2);

/// Starts a callback or a listener for `interest`, which is durable if it has a cursor. Fails if the cursor cannot be
/// opened.
pub(super) async fn start(
    place: &Place,
    source: &Source,
    (interest, terms): (Interest, ReceiverOptions),
    cursor: Option<String>,
    tasks: &mut JoinSet<()>,
) -> Result<()> {
    let calls = place.random(2) == 0;
    let keeper = HandleOwner { place: place.clone(), source: source.clone(), calls, interest, terms, cursor };
    if let Some(begun) = keeper.begin().await? {
        tasks.spawn(keeper.run(begun));
    }
    Ok(())
}

enum Handle {
    /// On a callback.
    Callback(CallbackHandle),
    /// On a listener.
    Listener(ListenerHandle<()>),
}

impl Handle {
    /// Replaces the filter.
    fn replace(&self, filter: Filter) {
        match self {
            Self::Callback(handle) => handle.replace(filter),
            Self::Listener(handle) => handle.replace(filter),
        }
    }

    /// Stops it, and waits until it has ended.
    async fn stop(self) {
        match self {
            Self::Callback(handle) => drop(handle.stop().await),
            Self::Listener(handle) => drop(handle.stop().await),
        }
    }
}

/// The owner of a callback or a listener, which keeps its handle.
struct HandleOwner {
    place: Place,
    source: Source,
    /// Whether it starts a callback rather than a listener.
    calls: bool,
    interest: Interest,
    terms: ReceiverOptions,
    /// The cursor, if it is durable.
    cursor: Option<String>,
}

impl HandleOwner {
    /// Subscribes; `None` once the dispatcher has ended.
    async fn begin(&self) -> Result<Option<(Handle, SubscriberId)>> {
        let Self { place, source, calls, interest, terms, cursor } = self;
        let form = if *calls { "a callback" } else { "a listener" };
        let panics = !calls && place.random(2) == 0;
        let manner = Manner { form: form.into(), skips: terms.skips, panics };
        let mut terms = *terms;
        if place.shared.time.is_real() {
            // The tail can move before the receiver has begun.
            terms.start = terms.start.or_else(|| source.position());
        }
        let terms = &terms;
        let subscribe = match cursor {
            None => source.subscribe(interest, terms)?,
            Some(name) => source.subscribe_durably(place, interest, terms, name).await?,
        };
        let Some(subscribe) = subscribe else { return Ok(None) };
        let subscribe = subscribe.save_every(Duration::from_millis(1 + place.random(1_500)))?;
        let now = source.position().unwrap_or(Cursor::NOTHING);
        let mut oracle = place.shared.oracle();
        let id = match cursor {
            None => {
                oracle.subscribed(place.issuer, interest.clone(), manner, terms.start.unwrap_or(now).into())
            }
            Some(name) => {
                let durable = (name.clone(), interest.clone(), manner);
                oracle.subscribed_durably(&place.shared, place.issuer, durable)
            }
        };
        let life = oracle.life(id);
        drop(oracle);
        place.note(|| {
            format!("has {form} as subscriber {id}, durable by {cursor:?}: {interest:?}, {terms:?}")
        });
        let slowness_ms = choice::slowness_ms(place);
        let taker = Taker { place: place.clone(), id, life, slowness_ms, panics };
        if *calls {
            let call = move |item: std::result::Result<Delivery, Interruption>| {
                let mut taker = taker.clone();
                async move {
                    drop(match item {
                        Ok(delivery) => taker.handle_event(delivery).await,
                        Err(interruption) => taker.handle_message(Message::Interrupted(interruption)).await,
                    });
                }
            };
            return Ok(Some((Handle::Callback(subscribe.callback(call)), id)));
        }
        let listen = subscribe.listener(move || taker.clone());
        let listen = listen.backoff(Duration::from_millis(10), BACKOFF_MAX)?;
        let listen = if place.random(2) == 0 { listen.in_batches() } else { listen };
        Ok(Some((Handle::Listener(listen.start()?), id)))
    }

    /// Keeps the handle. Now and then it replaces the filter, or restarts a durable receiver.
    async fn run(mut self, (mut handle, mut id): (Handle, SubscriberId)) {
        let plan = self.place.shared.plan.subscribers;
        while self.place.is_chaos() {
            self.place.pause(2_000).await;
            if plan.replaces && self.place.random(2) == 0 && self.place.is_chaos() {
                self.interest = choice::interest(&self.place);
                let Self { place, interest, .. } = &self;
                place.note(|| format!("subscriber {id} is to want {interest:?}"));
                place.shared.oracle().replaced(&place.shared, id, interest, None);
                handle.replace(interest.filter());
            }
            if plan.restarts && self.cursor.is_some() && self.place.random(2) == 0 && self.place.is_chaos() {
                handle.stop().await;
                let Some(begun) = self.begin_again().await else { return };
                (handle, id) = begun;
            }
        }
        // Dropping the handle of a callback ends it.
        let _kept = handle;
        std::future::pending::<()>().await;
    }

    /// Subscribes again, as soon as that is possible.
    async fn begin_again(&self) -> Option<(Handle, SubscriberId)> {
        loop {
            match self.begin().await {
                Ok(begun) => return begun,
                Err(error) => {
                    self.place.note(|| format!("could not subscribe: {error}"));
                    self.place.pause(300).await;
                }
            }
        }
    }
}

/// Takes deliveries, and panics now and then after one.
#[derive(Clone)]
struct Taker {
    place: Place,
    id: SubscriberId,
    /// The life of the subscriber in which it takes. When a process could not start, its listeners go on until they
    /// have taken the deliveries in hand, beside the listeners of the next attempt.
    life: Option<u64>,
    /// The longest time that it takes over a delivery, in milliseconds.
    slowness_ms: u64,
    /// Whether it panics now and then.
    panics: bool,
}

impl Taker {
    async fn take(&self, given: &Given) -> Next {
        let Self { place, id, life, slowness_ms, panics } = self;
        place.note(|| format!("subscriber {id} {}", receiver::show(given)));
        {
            let mut oracle = place.shared.oracle();
            if oracle.life(*id) != *life {
                return Next::Continue;
            }
            oracle.received(&place.shared, *id, given);
        }
        if *slowness_ms > 0 && place.is_chaos() {
            place.pause(*slowness_ms).await;
        }
        if *panics && place.is_chaos() && place.random(6) == 0 {
            // It unwinds without a message on the terminal.
            std::panic::resume_unwind(Box::new(PLANNED_PANIC));
        }
        Next::Continue
    }
}

impl Listener for Taker {
    type Message = ();

    async fn handle_event(&mut self, delivery: Delivery) -> Next {
        self.take(&receiver::given_row(delivery.as_ref())).await
    }

    async fn handle_message(&mut self, message: Message<()>) -> Next {
        match message {
            Message::Interrupted(interruption) => self.take(&receiver::interrupted(&interruption)).await,
            _ => Next::Continue,
        }
    }
}
