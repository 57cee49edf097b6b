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
    receiver::{self, ReceiverOptions, Source},
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

/// Starts a callback or a listener for `interest`.
pub(super) fn start(
    actor: &ActorContext,
    source: &Source,
    interest: Interest,
    terms: ReceiverOptions,
    tasks: &mut JoinSet<()>,
) -> Result<()> {
    let bits = actor.bits();
    let calls = bits.is_multiple_of(2).then_some((bits >> 32).is_multiple_of(2));
    let form = match calls {
        Some(true) => "a callback of batches",
        Some(false) => "a callback",
        None => "a listener",
    };
    let panics = calls.is_none() && actor.random(2) == 0;
    let manner = Manner { form: form.into(), skips: terms.skips, panics };
    let Some(subscribe) = source.subscribe(&interest, &terms)? else { return Ok(()) };
    let start = terms.start.unwrap_or(source.position().unwrap_or(Cursor::NOTHING));
    let id = actor.shared.oracle().subscribed(actor.issuer, interest.clone(), manner, start.into());
    actor.note(|| format!("has {form} as subscriber {id}: {interest:?}, {terms:?}"));
    let slowness_ms = choice::slowness_ms(actor);
    let passed = Passed::default();
    let taker = Taker { actor: actor.clone(), id, passed: Arc::clone(&passed), slowness_ms, panics };
    let handle = match calls {
        Some(in_batches) => Handle::Callback(call(subscribe, taker, in_batches)),
        None => Handle::Listener(listen(subscribe, taker)?),
    };
    let owner = HandleOwner { actor: actor.clone(), source: source.clone(), interest, handle, id, passed };
    tasks.spawn(owner.run());
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
}

/// The barrier that a receiver has passed last, and its handle.
type Passed = Arc<Mutex<Option<(ListenerHandle, Sequence)>>>;

/// The owner of a callback or a listener, which keeps its handle.
struct HandleOwner {
    actor: ActorContext,
    source: Source,
    interest: Interest,
    handle: Handle,
    id: SubscriberId,
    passed: Passed,
}

impl HandleOwner {
    /// Keeps the handle. Now and then it waits at a barrier, or replaces the filter.
    async fn run(mut self) {
        let mut rounds = 0_u64;
        while self.actor.is_chaos() {
            self.actor.pause(2_000).await;
            rounds += 1;
            if rounds.is_multiple_of(2) {
                self.wait_at_barrier().await;
            }
            let replaces = self.actor.shared.plan.subscribers.replaces;
            if replaces && self.actor.random(2) == 0 && self.actor.is_chaos() {
                self.interest = choice::interest(&self.actor);
                let Self { actor, interest, handle, id, .. } = &self;
                actor.note(|| format!("subscriber {id} is to want {interest:?}"));
                actor.shared.oracle().replaced(&actor.shared, *id, interest, None);
                handle.replace(interest.filter());
            }
        }
        // Dropping the handle of a callback ends it.
        std::future::pending::<()>().await;
    }

    /// Waits at a barrier: behind it, the receiver has everything that was recorded before.
    async fn wait_at_barrier(&self) {
        let Self { actor, source, handle, id, passed, .. } = self;
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
    passed: Passed,
    /// The longest time that it takes over a delivery, in milliseconds.
    slowness_ms: u64,
    /// Whether it panics now and then.
    panics: bool,
}

impl Taker {
    async fn take(&self, given: &Given) -> Next {
        self.receive(given);
        self.work(true).await;
        Next::Continue
    }

    /// Takes a whole batch at once, which is `what` if there are several deliveries in it.
    async fn take_batch(&self, batch: &DeliveryBatch, what: Witness) -> Next {
        if batch.len() > 1 {
            self.actor.shared.witness(what);
        }
        for delivery in batch {
            self.receive(&receiver::given_row(delivery));
        }
        // If a name comes twice in the batch, its older row would come again after the newer one.
        let names: BTreeSet<_> = batch.iter().map(|delivery| &delivery.notification().name).collect();
        self.work(names.len() == batch.len()).await;
        Next::Continue
    }

    async fn interrupted(&mut self, interruption: Interruption) {
        drop(self.handle_interruption(interruption).await);
    }

    /// Has the oracle judge what it is given.
    fn receive(&self, given: &Given) {
        let Self { actor, id, .. } = self;
        actor.note(|| format!("subscriber {id} {}", receiver::show(given)));
        let mut oracle = actor.shared.oracle();
        oracle.received(&actor.shared, *id, given);
        if matches!(given, Given::Expired { .. })
            && let Some((handle, at)) = &*self.passed.lock()
            && handle.reached(*at).now_or_never() == Some(true)
        {
            oracle.passed_after_expiry(&actor.shared, *id, *at);
        }
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
