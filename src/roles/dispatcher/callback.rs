//! [`Callback`]: a task that calls a user's function with each item of a subscription, with its [`RestartPolicy`] and [`CallbackHandle`].
//! The subscription survives a panic in the function, so that the next callback gets the same item again.

use std::{
    convert::identity, fmt, future::poll_fn, panic::AssertUnwindSafe, sync::Arc, task::Poll, time::Duration,
};

use futures_util::FutureExt;
use tokio::{sync::watch, task::AbortHandle};

use super::{
    delivery::{BatchItem, Item},
    log::{SubscriberId, SubscriberState},
    reader::Order,
    shared::Shared,
    subscription::Source,
};
use crate::base::{
    backoff::{Backoff, Failures},
    cursor::{Cursor, Knowledge},
    encoding::Sequence,
    error::{Error, Result, panic_text},
};

/// What happens after a callback panics.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RestartPolicy {
    /// The pause before another callback is made. It grows with each further panic, until a callback finishes an item. Default: 100 ms.
    pub pause_min: Duration,
    /// The longest pause. Default: 30 s.
    pub pause_max: Duration,
    /// How many times an item is tried before it is skipped, if the callback panics on it each time. Default: 3.
    pub attempts_max: u32,
}

crate::base::macros::setters!(RestartPolicy { pause_min: Duration, pause_max: Duration, attempts_max: u32 });

impl Default for RestartPolicy {
    fn default() -> Self {
        Self { pause_min: Duration::from_millis(100), pause_max: Duration::from_secs(30), attempts_max: 3 }
    }
}

impl RestartPolicy {
    fn check(&self) -> Result<()> {
        let Self { pause_min, pause_max, attempts_max } = self;
        if pause_min > pause_max {
            return Err(Error::invalid("pause_min", format!("{pause_min:?} is more than {pause_max:?}")));
        }
        if *attempts_max == 0 {
            return Err(Error::invalid("attempts_max", "it is zero: nothing would ever be delivered"));
        }
        Ok(())
    }
}

/// The handle of a callback. Dropping it ends the callback at its next await; [`CallbackHandle::stop`] lets the current call return.
#[must_use = "dropping the handle ends the callback"]
pub struct CallbackHandle {
    state: Arc<SubscriberState>,
    progress: Arc<Progress>,
    task: AbortHandle,
}

#[derive(Default)]
struct Progress {
    /// How far the callback has progressed; updated only while a caller waits for progress.
    worked_to: watch::Sender<Knowledge>,
    /// The cursor of the callback, once it has ended.
    ended: watch::Sender<Option<Cursor>>,
}

impl CallbackHandle {
    /// The id of the subscriber. [`Dispatcher::unsubscribe`](crate::Dispatcher::unsubscribe) ends the callback after the current call.
    pub fn id(&self) -> SubscriberId {
        self.state.id
    }

    /// Waits until the callback has worked on everything up to `at`, a position that
    /// [`Dispatcher::wait_until`](crate::Dispatcher::wait_until) returned. Returns false if the callback ends before that.
    pub async fn wait_until(&self, at: Sequence) -> bool {
        let at = Knowledge::UpTo(at);
        let mut worked_to = self.progress.worked_to.subscribe();
        // The callback reports its progress from now on.
        self.state.waker.wake();
        let waited = worked_to.wait_for(|known| *known >= at || self.is_finished()).await;
        waited.is_ok_and(|known| *known >= at)
    }

    /// Asks the callback to end after the current call, and waits until it has ended. Returns its cursor: a subscription that starts there
    /// misses nothing. With another filter it misses nothing if it starts at [`Cursor::rewound`]. A callback must not wait for its own end;
    /// it can call [`Dispatcher::unsubscribe`](crate::Dispatcher::unsubscribe).
    pub async fn stop(&self) -> Cursor {
        self.state.end();
        self.state.waker.wake();
        self.finished().await
    }

    /// Waits until the callback has ended, for whatever reason, and returns its cursor.
    pub async fn finished(&self) -> Cursor {
        let mut ended = self.progress.ended.subscribe();
        let ended = ended.wait_for(Option::is_some).await.expect("the sender is here");
        ended.expect("it was just there")
    }

    /// Whether the callback has ended.
    pub fn is_finished(&self) -> bool {
        self.progress.ended.borrow().is_some()
    }
}

impl fmt::Debug for CallbackHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallbackHandle").field("id", &self.id()).finish_non_exhaustive()
    }
}

impl Drop for CallbackHandle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// An item that the callback has not finished. A single delivery is a batch of its own.
struct InHand {
    item: BatchItem,
    attempts: u32,
}

/// The task of a callback.
pub(super) struct Callback<F> {
    source: Source,
    progress: Arc<Progress>,
    factory: F,
    policy: RestartPolicy,
    in_batches: bool,
    in_hand: Option<InHand>,
    /// Panics since the callback last finished an item.
    panics: Failures,
}

impl<F, C, R> Callback<F>
where
    F: FnMut() -> C + Send + 'static,
    C: FnMut(BatchItem) -> R + Send + 'static,
    R: Future<Output = ()> + Send + 'static,
{
    pub fn start(
        shared: Arc<Shared>,
        order: Order,
        policy: RestartPolicy,
        in_batches: bool,
        factory: F,
    ) -> Result<CallbackHandle> {
        policy.check()?;
        let source = Source::new(Arc::clone(&shared), order);
        let (state, progress) = (Arc::clone(&source.reader.state), Arc::<Progress>::default());
        let (in_hand, panics) = (None, Failures::default());
        let shown = Arc::clone(&progress);
        let callback = Self { source, progress, factory, policy, in_batches, in_hand, panics };
        let task = tokio::spawn(shared.until_cut_off(callback.run())).abort_handle();
        Ok(CallbackHandle { state, progress: shown, task })
    }

    async fn run(mut self) {
        let mut callback = None;
        while let Some(item) = self.next().await {
            let (factory, in_hand) = (&mut self.factory, &mut self.in_hand);
            let call = async {
                let call = callback.get_or_insert_with(factory);
                if let Some(in_hand) = in_hand {
                    in_hand.attempts += 1;
                }
                call(item).await;
            };
            if let Err(text) = catch(call).await {
                let broken = callback.take();
                // Dropping the broken callback may panic as well.
                drop(catch(async { drop(broken) }).await);
                self.note_panic(&text);
                self.pass_over();
                self.pause().await;
            } else {
                (self.in_hand, self.panics) = (None, Failures::default());
            }
        }
    }

    /// Returns the item in hand, or the next one; `None` once the subscription has ended.
    async fn next(&mut self) -> Option<BatchItem> {
        while self.in_hand.is_none() {
            let (source, progress, in_batches) = (&mut self.source, &self.progress, self.in_batches);
            let receive = poll_fn(|context| {
                progress.note(source);
                let polled = source.poll_next(context, in_batches, identity);
                match &polled {
                    // The cursor may have moved without an item.
                    Poll::Pending => progress.note(source),
                    // An expired subscriber has to forget what it knew. Reset its progress, even for callers that ask later.
                    Poll::Ready(Some(Item::Expired { .. })) => {
                        progress.worked_to.send_replace(Knowledge::Nothing);
                    }
                    Poll::Ready(_) => {}
                }
                polled
            });
            match catch(receive).await {
                Ok(item) => self.in_hand = Some(InHand { item: item?, attempts: 0 }),
                // A predicate of the filter panicked. The row that it judged is skipped, and the next row follows.
                Err(text) => self.note_panic(&text),
            }
        }
        let is_ended = self.source.reader.state.is_ended();
        // The last item, which reports that the bus is gone, is passed on even after the end.
        let is_wanted = |in_hand: &&InHand| !is_ended || matches!(in_hand.item, Item::Failed(_));
        self.in_hand.as_ref().filter(is_wanted).map(|in_hand| in_hand.item.clone())
    }

    fn note_panic(&self, text: &str) {
        let Shared { context, .. } = &*self.source.reader.shared;
        context.stats.callback_panics.add(1);
        let who = format!("subscriber {}", self.source.reader.state.id);
        context.stats.health.panicked(context.env(), &who, text);
    }

    /// Skips the item in hand if the callback has panicked on it as many times as the policy allows.
    fn pass_over(&mut self) {
        let attempts_max = self.policy.attempts_max;
        let skipped = self.in_hand.take_if(|in_hand| in_hand.attempts >= attempts_max);
        let Some(InHand { item, .. }) = skipped else { return };
        let row = match item {
            Item::Delivery(batch) if batch.len() > 1 => {
                // Try each delivery alone, to skip only those on which the callback panics.
                self.source.current = Some(batch);
                return;
            }
            Item::Delivery(batch) => Some(Arc::clone(batch.delivery(0).notification())),
            _ => None,
        };
        let Shared { context, .. } = &*self.source.reader.shared;
        context.stats.callback_skips.add(1);
        let (id, row) = (self.source.reader.state.id, row.map(|row| (row.name.clone(), row.sequence)));
        tracing::error!(subscriber = %id, ?row, "skipped an item that makes the callback panic every time");
    }

    /// Waits before another callback is made, or until the subscription ends.
    async fn pause(&mut self) {
        let env = self.source.reader.shared.context.env().clone();
        let pauses = Backoff { min: self.policy.pause_min, max: self.policy.pause_max };
        let mut pause = env.sleep(self.panics.again(&pauses, Duration::ZERO, &env));
        let state = &self.source.reader.state;
        poll_fn(|context| {
            // Whatever ends the subscriber also wakes it.
            state.waker.register(context.waker());
            if state.is_ended() { Poll::Ready(()) } else { pause.poll_unpin(context) }
        })
        .await;
    }
}

impl Progress {
    /// Reports how far the callback has progressed, if a caller waits for progress.
    fn note(&self, source: &mut Source) {
        if self.worked_to.receiver_count() > 0 {
            self.worked_to.send_replace(source.cursor().knowledge());
        }
    }
}

async fn catch<T>(future: impl Future<Output = T>) -> Result<T, String> {
    AssertUnwindSafe(future).catch_unwind().await.map_err(|panic| panic_text(&*panic).to_owned())
}

impl<F> Drop for Callback<F> {
    fn drop(&mut self) {
        let cursor = match &self.in_hand {
            Some(InHand { item: Item::Delivery(batch), .. }) => batch.cursor_after(0),
            _ => self.source.cursor(),
        };
        self.progress.ended.send_replace(Some(cursor));
        self.progress.worked_to.send_modify(|_| {});
    }
}
