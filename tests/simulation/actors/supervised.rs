//! Subscribers in tasks of the dispatcher: callbacks, and listeners that panic now and then and are made again, in each form that there
//! is: delivery by delivery, in batches, and with a `handle_batch` of their own.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use futures_util::FutureExt;
use notibus::{
    Result,
    cursor::Cursor,
    dispatcher::{
        CallbackHandle, Delivery, DeliveryBatch, Filter, Interruption, Listener, ListenerHandle, Next,
        Subscribe,
    },
    event::Sequence,
};
use parking_lot::Mutex;
use tokio::task::JoinSet;

use super::{
    choice,
    context::ActorContext,
    receiver::{self, ReceiverOptions, Source, Sources},
};
use crate::{
    oracle::{Given, Interest, Manner, SubscriberId},
    shared::PLANNED_PANIC,
    witness::Witness,
};

/// The longest pause before a listener that has panicked is made again.
const BACKOFF_MAX: Duration = Duration::from_secs(2);

/// How long a receiver waits at a barrier: while no notifier lives, nothing is folded.
const BARRIER_MAX: Duration = Duration::from_secs(2);

/// Starts a callback or a listener for `interest`, which is durable if it has a cursor. Fails if the cursor cannot be
/// opened.
pub(super) async fn start(
    actor: &ActorContext,
    sources: &Sources,
    (interest, terms): (Interest, ReceiverOptions),
    cursor: Option<String>,
    tasks: &mut JoinSet<()>,
) -> Result<()> {
    let bits = actor.bits();
    let calls = bits.is_multiple_of(2).then_some((bits >> 32).is_multiple_of(2));
    let (actor, sources) = (actor.clone(), sources.clone());
    let mut owner =
        HandleOwner { source: sources.main.clone(), actor, sources, calls, interest, terms, cursor };
    if let Some(begun) = owner.begin().await? {
        tasks.spawn(owner.run(begun));
    }
    Ok(())
}

enum Handle {
    Callback(CallbackHandle),
    Listener(ListenerHandle),
}

impl Handle {
    fn replace(&self, filter: Filter) {
        match self {
            Self::Callback(handle) => handle.replace(filter),
            Self::Listener(handle) => handle.replace(filter),
        }
    }

    /// The handle on the listener; a callback has one, too.
    fn listener(&self) -> &ListenerHandle {
        match self {
            Self::Callback(handle) => handle,
            Self::Listener(handle) => handle,
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

/// The barrier that a receiver has passed last, and its handle.
type Passed = Arc<Mutex<Option<(ListenerHandle, Sequence)>>>;

/// A receiver that has begun.
struct Begun {
    handle: Handle,
    id: SubscriberId,
    passed: Passed,
}

/// The owner of a callback or a listener, which keeps its handle.
struct HandleOwner {
    actor: ActorContext,
    sources: Sources,
    /// The dispatcher to which it has subscribed last.
    source: Source,
    /// Whether its callback is called for batches; `None` if it starts a listener.
    calls: Option<bool>,
    interest: Interest,
    terms: ReceiverOptions,
    /// The cursor, if it is durable.
    cursor: Option<String>,
}

impl HandleOwner {
    /// Subscribes; `None` once the dispatcher has ended.
    async fn begin(&mut self) -> Result<Option<Begun>> {
        if self.cursor.is_some() {
            self.source = self.sources.any(&self.actor).clone();
        }
        let Self { actor, source, calls, interest, terms, cursor, .. } = &*self;
        let form = match calls {
            Some(true) => "a callback of batches",
            Some(false) => "a callback",
            None => "a listener",
        };
        let panics = calls.is_none() && actor.random(2) == 0;
        let manner = Manner { form: form.into(), skips: terms.skips, panics };
        let subscribe = match cursor {
            None => source.subscribe(interest, terms)?,
            Some(name) => source.subscribe_durably(actor, interest, terms, name).await?,
        };
        let Some(subscribe) = subscribe else { return Ok(None) };
        let subscribe = subscribe.save_every(Duration::from_millis(1 + actor.random(1_500)))?;
        let now = source.position().unwrap_or(Cursor::NOTHING);
        let mut oracle = actor.shared.oracle();
        let id = match cursor {
            None => {
                oracle.subscribed(actor.issuer, interest.clone(), manner, terms.start.unwrap_or(now).into())
            }
            Some(name) => {
                let durable = (name.clone(), interest.clone(), manner);
                oracle.subscribed_durably(&actor.shared, actor.issuer, durable)
            }
        };
        let life = oracle.life(id);
        drop(oracle);
        actor.note(|| {
            format!("has {form} as subscriber {id}, durable by {cursor:?}: {interest:?}, {terms:?}")
        });
        let slowness_ms = choice::slowness_ms(actor);
        let passed = Arc::default();
        let taker =
            Taker { actor: actor.clone(), id, life, passed: Arc::clone(&passed), slowness_ms, panics };
        let handle = match calls {
            Some(in_batches) => Handle::Callback(call(subscribe, taker, *in_batches)),
            None => Handle::Listener(listen(subscribe, taker)?),
        };
        Ok(Some(Begun { handle, id, passed }))
    }

    /// Keeps the handle. Now and then it waits at a barrier, replaces the filter, or restarts a durable receiver.
    async fn run(mut self, mut begun: Begun) {
        let plan = self.actor.shared.plan.subscribers;
        let mut rounds = 0_u64;
        while self.actor.is_chaos() {
            self.actor.pause(2_000).await;
            rounds += 1;
            if rounds.is_multiple_of(2) {
                self.wait_at_barrier(&begun).await;
            }
            if plan.replaces && self.actor.random(2) == 0 && self.actor.is_chaos() {
                self.interest = choice::interest(&self.actor);
                let Self { actor, interest, .. } = &self;
                let Begun { handle, id, .. } = &begun;
                actor.note(|| format!("subscriber {id} is to want {interest:?}"));
                actor.shared.oracle().replaced(&actor.shared, *id, interest, None);
                handle.replace(interest.filter());
            }
            if plan.restarts && self.cursor.is_some() && self.actor.random(2) == 0 && self.actor.is_chaos() {
                begun.handle.stop().await;
                let Some(next) = self.begin_again().await else { return };
                begun = next;
            }
        }
        // Dropping the handle of a callback ends it.
        let _kept = begun;
        std::future::pending::<()>().await;
    }

    /// Waits at a barrier: behind it, the receiver has everything that was recorded before.
    async fn wait_at_barrier(&self, Begun { handle, id, passed }: &Begun) {
        let Self { actor, source, .. } = self;
        let recorded = actor.shared.oracle().recorded_so_far();
        let wait = async {
            let version = actor.db.begin().read_version().await.ok()?;
            let at = source.reached(actor, version).await?;
            handle.listener().reached(at).await.then_some(at)
        };
        let at = tokio::select! {
            biased;
            Some(at) = wait => at,
            () = actor.db.env().sleep(BARRIER_MAX) => return,
        };
        actor.note(|| format!("subscriber {id} has passed a barrier at {at}"));
        actor.shared.witness(Witness::BarrierPassed);
        let mut oracle = actor.shared.oracle();
        oracle.passed_barrier(&actor.shared, &recorded, at);
        oracle.stands(&actor.shared, *id, Cursor::from(at).into());
        *passed.lock() = Some((handle.listener().clone(), at));
    }

    /// Subscribes again, as soon as that is possible.
    async fn begin_again(&mut self) -> Option<Begun> {
        loop {
            match self.begin().await {
                Ok(begun) => return begun,
                Err(error) => {
                    self.actor.note(|| format!("could not subscribe: {error}"));
                    self.actor.pause(300).await;
                }
            }
        }
    }
}

/// Receives through a callback.
fn call(subscribe: Subscribe, taker: Taker, in_batches: bool) -> CallbackHandle {
    if in_batches {
        return subscribe.batch_callback(move |item: std::result::Result<DeliveryBatch, Interruption>| {
            let mut taker = taker.clone();
            async move {
                match item {
                    Ok(batch) => drop(taker.take_batch(&batch, Witness::BatchCalledBack).await),
                    Err(interruption) => taker.interrupted(interruption).await,
                }
            }
        });
    }
    subscribe.callback(move |item: std::result::Result<Delivery, Interruption>| {
        let mut taker = taker.clone();
        async move {
            match item {
                Ok(delivery) => drop(taker.handle_event(delivery).await),
                Err(interruption) => taker.interrupted(interruption).await,
            }
        }
    })
}

/// Receives through a listener, of one of the three forms.
fn listen(subscribe: Subscribe, taker: Taker) -> Result<ListenerHandle> {
    let bits = taker.actor.bits();
    let (in_batches, has_own) = (bits.is_multiple_of(2), (bits >> 32).is_multiple_of(2));
    let backoff = Duration::from_millis(10);
    if in_batches && has_own {
        let listen = subscribe.listener(move || BatchTaker(taker.clone()));
        return Ok(listen.backoff(backoff, BACKOFF_MAX)?.in_batches().start());
    }
    let listen = subscribe.listener(move || taker.clone()).backoff(backoff, BACKOFF_MAX)?;
    Ok(if in_batches { listen.in_batches() } else { listen }.start())
}

/// Takes deliveries, and panics now and then after one.
#[derive(Clone)]
struct Taker {
    actor: ActorContext,
    id: SubscriberId,
    /// The life of the subscriber in which it takes. When a process could not start, its listeners go on until they
    /// have taken the deliveries in hand, beside the listeners of the next attempt.
    life: Option<u64>,
    passed: Passed,
    /// The longest time that it takes over a delivery, in milliseconds.
    slowness_ms: u64,
    /// Whether it panics now and then.
    panics: bool,
}

impl Taker {
    async fn take(&self, given: &Given) -> Next {
        if self.receive(given) {
            self.work(true).await;
        }
        Next::Continue
    }

    /// Takes a whole batch at once, which is `what` if there are several deliveries in it.
    async fn take_batch(&self, batch: &DeliveryBatch, what: Witness) -> Next {
        if batch.len() > 1 {
            self.actor.shared.witness(what);
        }
        let mut is_own = true;
        for delivery in batch {
            is_own &= self.receive(&receiver::given_row(delivery));
        }
        if is_own {
            // If a name comes twice in the batch, its older row would come again after the newer one.
            let names: BTreeSet<_> = batch.iter().map(|delivery| &delivery.notification().name).collect();
            self.work(names.len() == batch.len()).await;
        }
        Next::Continue
    }

    async fn interrupted(&mut self, interruption: Interruption) {
        drop(self.handle_interruption(interruption).await);
    }

    /// Has the oracle judge what it is given. Returns whether it is still the receiver of this life.
    fn receive(&self, given: &Given) -> bool {
        let Self { actor, id, life, .. } = self;
        actor.note(|| format!("subscriber {id} {}", receiver::show(given)));
        let mut oracle = actor.shared.oracle();
        if oracle.life(*id) != *life {
            return false;
        }
        oracle.received(&actor.shared, *id, given);
        if matches!(given, Given::Expired { .. })
            && let Some((handle, at)) = &*self.passed.lock()
            && handle.reached(*at).now_or_never() == Some(true)
        {
            oracle.passed_after_expiry(&actor.shared, *id, *at);
        }
        true
    }

    /// Takes its time, and panics now and then, if it may.
    async fn work(&self, may_panic: bool) {
        let Self { actor, slowness_ms, panics, .. } = self;
        if *slowness_ms > 0 && actor.is_chaos() {
            actor.pause(*slowness_ms).await;
        }
        if *panics && actor.is_chaos() && actor.random(6) == 0 && may_panic {
            // It unwinds without a message on the terminal.
            std::panic::resume_unwind(Box::new(PLANNED_PANIC));
        }
    }
}

/// A listener that takes batches by its own `handle_batch`.
struct BatchTaker(Taker);

impl Listener for BatchTaker {
    async fn handle_event(&mut self, delivery: Delivery) -> Next {
        self.0.handle_event(delivery).await
    }

    async fn handle_batch(&mut self, batch: DeliveryBatch) -> Next {
        self.0.take_batch(&batch, Witness::BatchHandled).await
    }

    async fn handle_interruption(&mut self, interruption: Interruption) -> Next {
        self.0.handle_interruption(interruption).await
    }
}

impl Listener for Taker {
    async fn handle_event(&mut self, delivery: Delivery) -> Next {
        self.take(&receiver::given_row(delivery.as_ref())).await
    }

    async fn handle_interruption(&mut self, interruption: Interruption) -> Next {
        self.take(&receiver::interrupted(&interruption)).await
    }
}
