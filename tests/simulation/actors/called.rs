//! Subscribers that run in tasks of the dispatcher: callbacks, for deliveries or batches, that sometimes panic and are then created again.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use futures_util::{FutureExt, future::BoxFuture};
use notibus::{
    Result,
    cursor::Cursor,
    dispatcher::{BatchItem, CallbackHandle, Item, RestartPolicy, Subscribe},
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

/// The longest pause before a callback that panicked is created again.
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// How long a receiver waits at a barrier. There is a limit because nothing is folded while no notifier is alive.
const BARRIER_MAX: Duration = Duration::from_secs(2);

/// Starts a callback for `interest`.
pub(super) fn start(
    actor: &ActorContext,
    source: &Source,
    interest: Interest,
    terms: ReceiverOptions,
    tasks: &mut JoinSet<()>,
) -> Result<()> {
    let in_batches = actor.bits().is_multiple_of(2);
    let form = if in_batches { "a callback of batches" } else { "a callback" };
    let panics = actor.random(2) == 0;
    let manner = Manner { form: form.into(), skips: terms.skips, panics };
    let Some(subscribe) = source.subscribe(&interest, &terms)? else { return Ok(()) };
    let start = terms.start.unwrap_or(source.position().unwrap_or(Cursor::BEGINNING));
    let id = actor.shared.oracle().subscribed(actor.issuer, interest.clone(), manner, start.into());
    actor.note(|| format!("has {form} as subscriber {id}: {interest:?}, {terms:?}"));
    let (slowness_ms, passed) = (choice::slowness_ms(actor), Passed::default());
    let taker = Taker { actor: actor.clone(), id, passed, slowness_ms, panics };
    let handle = call(subscribe, taker.clone(), in_batches)?;
    let owner = HandleOwner { source: source.clone(), interest, terms, in_batches, handle, taker };
    tasks.spawn(owner.run());
    Ok(())
}

/// The last barrier that a receiver passed, with the receiver's handle.
type Passed = Arc<Mutex<Option<(Arc<CallbackHandle>, Sequence)>>>;

/// The owner of a callback, which keeps the callback's handle.
struct HandleOwner {
    source: Source,
    interest: Interest,
    terms: ReceiverOptions,
    in_batches: bool,
    handle: Arc<CallbackHandle>,
    taker: Taker,
}

impl HandleOwner {
    /// Keeps the handle. Now and then the owner waits at a barrier, or replaces the filter.
    async fn run(mut self) {
        let actor = self.taker.actor.clone();
        let mut rounds = 0_u64;
        while actor.is_chaos() {
            actor.pause(2_000).await;
            rounds += 1;
            if rounds.is_multiple_of(2) {
                self.wait_at_barrier().await;
            }
            let replaces = actor.shared.plan.subscribers.replaces;
            if replaces && actor.random(2) == 0 && actor.is_chaos() {
                self.replace().await;
            }
        }
        // Dropping the handle ends the callback.
        std::future::pending::<()>().await;
    }

    /// Ends the callback, and starts another one with another filter from where the first one ended.
    async fn replace(&mut self) {
        let Taker { actor, id, passed, .. } = &self.taker;
        *passed.lock() = None;
        let cursor = self.handle.stop().await;
        self.interest = choice::interest(actor);
        let interest = &self.interest;
        actor.note(|| format!("subscriber {id} wants at {cursor:?} {interest:?}"));
        actor.shared.oracle().replaced(&actor.shared, *id, interest, cursor.into());
        let terms = ReceiverOptions { start: Some(cursor.rewound()), ..self.terms };
        if let Ok(Some(subscribe)) = self.source.subscribe(interest, &terms)
            && let Ok(handle) = call(subscribe, self.taker.clone(), self.in_batches)
        {
            self.handle = handle;
        }
    }

    /// Waits at a barrier. A receiver that passes it must have everything that was recorded before the wait.
    async fn wait_at_barrier(&self) {
        let (Self { source, handle, .. }, Taker { actor, id, passed, .. }) = (self, &self.taker);
        let recorded = actor.shared.oracle().recorded_so_far();
        let wait = async {
            let version = actor.store.begin().read_version().await.ok()?;
            let at = source.reached(actor, version).await?;
            handle.wait_until(at).await.then_some(at)
        };
        let at = tokio::select! {
            biased;
            Some(at) = wait => at,
            () = actor.store.env().sleep(BARRIER_MAX) => return,
        };
        actor.note(|| format!("subscriber {id} has passed a barrier at {at}"));
        actor.shared.witness(Witness::BarrierPassed);
        let mut oracle = actor.shared.oracle();
        oracle.passed_barrier(&actor.shared, &recorded, at);
        oracle.stands(&actor.shared, *id, Cursor::from(at).into());
        *passed.lock() = Some((Arc::clone(handle), at));
    }
}

/// Starts a callback that passes its deliveries to `taker`.
fn call(subscribe: Subscribe, taker: Taker, in_batches: bool) -> Result<Arc<CallbackHandle>> {
    let policy = RestartPolicy::default().pause_min(Duration::from_millis(10)).pause_max(PAUSE_MAX);
    let handle = if in_batches {
        subscribe.batch_callback(policy, move || {
            let taker = taker.clone();
            move |item: BatchItem| -> BoxFuture<'static, ()> {
                let taker = taker.clone();
                async move { taker.take(receiver::given(item, receiver::given_batch)).await }.boxed()
            }
        })
    } else {
        subscribe.callback(policy, move || {
            let taker = taker.clone();
            move |item: Item| -> BoxFuture<'static, ()> {
                let taker = taker.clone();
                async move { taker.take(receiver::given(item, receiver::given_alone)).await }.boxed()
            }
        })
    };
    handle.map(Arc::new)
}

/// Takes deliveries, and sometimes panics after one.
#[derive(Clone)]
struct Taker {
    actor: ActorContext,
    id: SubscriberId,
    passed: Passed,
    /// The longest time that the taker spends on a delivery, in milliseconds.
    slowness_ms: u64,
    /// Whether the taker panics now and then.
    panics: bool,
}

impl Taker {
    /// Takes an item: a delivery, or a whole batch at once.
    async fn take(&self, item: Vec<Given>) {
        if item.len() > 1 {
            self.actor.shared.witness(Witness::BatchCalledBack);
        }
        for given in &item {
            self.receive(given);
        }
        // If a name is in the batch twice, a repeated batch would deliver its older row after the newer one, so no panic is allowed.
        let name = |given| if let Given::Row(given) = given { Some(given.row.name.clone()) } else { None };
        let (count, names) = (item.len(), item.into_iter().map(name).collect::<BTreeSet<_>>());
        self.work(names.len() == count).await;
    }

    /// Has the oracle judge what the callback received.
    fn receive(&self, given: &Given) {
        let Self { actor, id, .. } = self;
        actor.note(|| format!("subscriber {id} {}", receiver::show(given)));
        let mut oracle = actor.shared.oracle();
        oracle.received(&actor.shared, *id, given);
        if matches!(given, Given::Expired { .. })
            && let Some((handle, at)) = &*self.passed.lock()
            && handle.wait_until(*at).now_or_never() == Some(true)
        {
            oracle.passed_after_expiry(&actor.shared, *id, *at);
        }
    }

    /// Spends time on an item, and sometimes panics, if it may.
    async fn work(&self, may_panic: bool) {
        let Self { actor, slowness_ms, panics, .. } = self;
        if *slowness_ms > 0 && actor.is_chaos() {
            actor.pause(*slowness_ms).await;
        }
        if *panics && actor.is_chaos() && actor.random(6) == 0 && may_panic {
            // This unwinds without printing a message to the terminal.
            std::panic::resume_unwind(Box::new(PLANNED_PANIC));
        }
    }
}
