//! [`Supervisor`]: the task of a listener. It owns the subscription, which survives the listener, so that the next listener
//! continues where the last one was.

use std::{
    future::{pending, poll_fn},
    panic::AssertUnwindSafe,
    sync::Arc,
    task::Poll,
    time::Duration,
};

use futures_util::{
    FutureExt,
    future::{BoxFuture, OptionFuture},
};
use tokio::sync::{mpsc, watch};

use super::{
    delivery::{Delivery, Interruption},
    listener::{
        Control, Listener, ListenerHandle, Message, Next, Orders, StopReason, Supervised, Supervision,
    },
    shared::Shared,
    subscription::{GivenItem, Source},
};
use crate::{
    base::{
        cursor::{Cursor, Knowledge},
        encoding::Sequence,
        error::{Error, panic_text},
    },
    store::RetryPolicy,
};

/// Pause after a failed read of the feed.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

/// Whether a listener that has panicked is restarted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RestartPolicy {
    /// After every panic.
    #[default]
    Always,
    /// So many times in all.
    Times(u32),
    /// Never: the first panic ends it.
    Never,
}

impl RestartPolicy {
    /// Whether a listener may be restarted again after `restarts` restarts.
    pub(super) fn allows(self, restarts: u32) -> bool {
        match self {
            Self::Always => true,
            Self::Times(times) => restarts < times,
            Self::Never => false,
        }
    }
}

/// How a listener is run.
#[derive(Debug, Clone)]
pub(super) struct SupervisionPolicy {
    pub restart: RestartPolicy,
    pub backoff: RetryPolicy,
    /// How often a delivery on which it panics is tried.
    pub attempts_max: u32,
    pub in_batches: bool,
    /// Whether it is a plain callback, which continues after a panic instead of being restarted.
    pub is_callback: bool,
}

impl Default for SupervisionPolicy {
    fn default() -> Self {
        Self {
            restart: RestartPolicy::Always,
            backoff: RetryPolicy {
                attempts_max: None,
                elapsed_max: None,
                backoff_min: Duration::from_millis(100),
                backoff_max: Duration::from_secs(30),
            },
            attempts_max: 3,
            in_batches: false,
            is_callback: false,
        }
    }
}

/// A delivery that the listener has not finished.
struct Given {
    /// The delivery, or the first one of a batch that is passed on as a whole.
    delivery: Delivery,
    is_whole: bool,
    attempts: u32,
}

impl Given {
    /// Whether it counts as worked on after the listener has returned `next`. A listener that stops within a batch may have left a part
    /// of it; one that has failed could not work on it.
    fn is_worked_on(&self, next: &Next) -> bool {
        match next {
            Next::Stop(StopReason::Failed(_)) => false,
            Next::Stop(_) => !self.is_whole || self.delivery.batch().len() == 1,
            _ => true,
        }
    }
}

/// A panic, with its message.
struct Panicked(String);

/// What ends a wait of the supervisor.
enum Event<M> {
    /// A command has come, the parent has ended, or the cursor has moved while a caller waits for that.
    Command,
    /// A message; `None` once all senders are gone.
    Message(Option<Message<M>>),
    /// An item of the subscription; an error if the predicate of its filter has panicked.
    Received(Result<GivenItem, Panicked>),
    /// Nothing has come for the time that the listener set.
    Timeout,
    /// The pause after a failed read is over.
    Paused,
}

/// The timers that can end a wait.
struct Timers {
    /// The time that the listener has set.
    timeout: Option<BoxFuture<'static, ()>>,
    /// The pause after a failed read of the feed.
    pause: Option<BoxFuture<'static, ()>>,
}

/// The task of a listener.
pub(super) struct Supervisor<L: Listener, F> {
    shared: Arc<Shared>,
    control: Arc<Control>,
    orders: watch::Receiver<Orders>,
    /// Reports the end of the parent, if there is one.
    ending: Option<watch::Receiver<bool>>,
    source: Source,
    /// The messages; `None` once all senders are gone.
    inbox: Option<mpsc::Receiver<Message<L::Message>>>,
    factory: F,
    terms: SupervisionPolicy,
    given: Option<Given>,
    /// The interruption that it has not finished, and how often it was tried.
    interrupted: Option<(Interruption, u32)>,
    restarts: u32,
    /// Restarts since it has last finished something.
    in_a_row: u32,
}

impl<L, F> Supervisor<L, F>
where
    L: Listener,
    F: FnMut() -> L + Send + 'static,
{
    /// A supervisor of the listeners that `factory` makes, until `ending` reports the end of the parent.
    pub fn new(
        handle: &ListenerHandle<L::Message>,
        source: Source,
        inbox: mpsc::Receiver<Message<L::Message>>,
        factory: F,
        terms: SupervisionPolicy,
        ending: Option<watch::Receiver<bool>>,
    ) -> Self {
        let (shared, control) = (Arc::clone(source.shared()), Arc::clone(&handle.control));
        Self {
            shared,
            orders: control.orders.subscribe(),
            control,
            ending,
            source,
            inbox: Some(inbox),
            factory,
            terms,
            given: None,
            interrupted: None,
            restarts: 0,
            in_a_row: 0,
        }
    }

    /// Runs the listener until it ends.
    pub async fn run(mut self) {
        // `Last` also runs if this task is aborted, so that no caller waits for its end for ever.
        let (shared, control) = (Arc::clone(&self.shared), Arc::clone(&self.control));
        let mut last = Last { shared, control, reason: StopReason::Shutdown };
        if let Some(task) = tokio::task::try_id() {
            self.control.task.get_or_init(|| task);
        }
        self.emit(Supervised::Started);
        let reason = self.run_sessions().await;
        // If it was not saved, an unfinished interruption comes again.
        if reason != StopReason::CursorLost && self.interrupted.is_none() {
            self.save().await;
        }
        tracing::debug!(id = %self.control.id, name = ?self.control.name, %reason, "a listener has ended");
        self.emit(Supervised::Stopped(reason.clone()));
        last.reason = reason;
    }

    /// Makes one listener after the other, until one ends without a restart.
    async fn run_sessions(&mut self) -> StopReason {
        loop {
            let text = match self.session().await {
                Ok(reason) => return reason,
                Err(Panicked(text)) => text,
            };
            if !self.terms.restart.allows(self.restarts) {
                return StopReason::Panicked(text);
            }
            (self.in_a_row, self.restarts) = (self.in_a_row + 1, self.restarts + 1);
            let env = self.shared.context.env().clone();
            let after = self.terms.backoff.backoff(self.in_a_row, &env);
            self.shared.context.stats.listener_restarts.add(1);
            self.emit(Supervised::Restarting { restarts: self.restarts, after });
            let mut pause = env.sleep(after);
            loop {
                if let Some(reason) = self.stop_requested() {
                    return reason;
                }
                tokio::select! {
                    () = commanded(&mut self.orders, &mut self.ending) => {}
                    () = &mut pause => break,
                }
            }
        }
    }

    /// Publishes a supervision event.
    fn emit(&self, what: Supervised) {
        let Control { id, name, .. } = &*self.control;
        // An error says that there is no receiver, which is fine.
        let _ = self.shared.supervision.send(Supervision { id: *id, name: name.clone(), what });
    }

    /// Counts, logs and publishes a panic.
    fn note_panic(&self, Panicked(text): &Panicked) {
        let stats = &self.shared.context.stats;
        if self.terms.is_callback { &stats.callback_panics } else { &stats.listener_panics }.add(1);
        let at = self.given.as_ref().map(|given| given.delivery.sequence());
        tracing::error!(id = %self.control.id, name = ?self.control.name, ?at, panic = text, "a subscriber has panicked");
        self.emit(Supervised::Panicked { text: text.clone(), at });
    }

    /// Makes a listener, and calls it until it ends or panics.
    async fn session(&mut self) -> Result<StopReason, Panicked> {
        // The delivery in hand was returned, but not worked on.
        let cursor = self.given.as_ref().map(|given| given.delivery.since());
        let cursor = cursor.into_iter().fold(self.source.cursor(), Cursor::min);
        let made = catch(async {
            let mut listener = (self.factory)();
            let next = listener.init(cursor).await;
            (listener, next)
        });
        let (mut listener, mut next) = made.await.inspect_err(|panicked| self.note_panic(panicked))?;
        let mut timers = Timers { timeout: None, pause: None };
        loop {
            timers.timeout = match next {
                Next::Continue => None,
                Next::ContinueFor(limit) => Some(self.shared.context.env().sleep(limit)),
                Next::Stop(reason) => return Ok(terminate(listener, reason).await),
            };
            next = match self.call(&mut listener, &mut timers).await {
                Ok(next) => next,
                Err(panicked) => {
                    self.note_panic(&panicked);
                    self.pass_over();
                    if !self.terms.is_callback {
                        return Err(panicked);
                    }
                    Next::Continue
                }
            };
        }
    }

    /// Calls the listener with the next delivery, interruption, message or timeout.
    async fn call(&mut self, listener: &mut L, timers: &mut Timers) -> Result<Next, Panicked> {
        loop {
            if let Some(reason) = self.stop_requested() {
                return Ok(Next::Stop(reason));
            }
            self.replace().await;
            if let Some(given) = &mut self.given {
                given.attempts += 1;
                let delivery = given.delivery.clone();
                let next = match (given.is_whole, self.terms.in_batches) {
                    (true, _) => catch(async { listener.handle_batch(delivery.batch()).await }).await?,
                    // One delivery of a batch on which it has panicked.
                    (false, true) => catch(async { listener.handle_batch(delivery.alone()).await }).await?,
                    (false, false) => catch(async { listener.handle_event(delivery).await }).await?,
                };
                if given.is_worked_on(&next) {
                    (self.given, self.in_a_row) = (None, 0);
                }
                return Ok(next);
            }
            if let Some((interruption, attempts)) = &mut self.interrupted {
                *attempts += 1;
                let message = Message::Interrupted(interruption.clone());
                let next = catch(async { listener.handle_message(message).await }).await?;
                self.interrupted = None;
                return Ok(next);
            }
            self.note_progress();
            match self.event(timers).await {
                Event::Command => {}
                Event::Received(Ok(None)) => return Ok(Next::Stop(StopReason::Shutdown)),
                Event::Received(Ok(Some(Ok((delivery, is_whole))))) => {
                    self.given = Some(Given { delivery, is_whole, attempts: 0 });
                }
                Event::Received(Ok(Some(Err(Interruption::Failed(error @ Error::CursorLost { .. }))))) => {
                    tracing::warn!(id = %self.control.id, %error, "a listener has lost its cursor and ends");
                    return Ok(Next::Stop(StopReason::CursorLost));
                }
                Event::Received(Ok(Some(Err(interruption)))) => {
                    if matches!(interruption, Interruption::Failed(_)) {
                        timers.pause = Some(self.shared.context.env().sleep(FAILURE_PAUSE));
                    }
                    self.interrupted = Some((interruption, 0));
                }
                // A predicate of the filter has panicked. It has seen the row, the listener has not, and the next row follows.
                Event::Received(Err(panicked)) => self.note_panic(&panicked),
                Event::Message(Some(message)) => {
                    return catch(async { listener.handle_message(message).await }).await;
                }
                Event::Message(None) => self.inbox = None,
                Event::Timeout => {
                    timers.timeout = None;
                    return catch(async { listener.timeout().await }).await;
                }
                Event::Paused => timers.pause = None,
            }
        }
    }

    /// Waits for the next event. Cancel safe.
    async fn event(&mut self, timers: &mut Timers) -> Event<L::Message> {
        let inbox = self.inbox.as_mut().map(mpsc::Receiver::recv);
        let is_paused = timers.pause.is_some();
        let (source, in_batches) = (&mut self.source, self.terms.in_batches);
        let (awaited, worked_to) =
            (self.control.orders.borrow().awaited, self.control.report.borrow().worked_to);
        let receive = poll_fn(|context| {
            let polled = source.poll_given(context, in_batches);
            // The cursor may have moved without a delivery.
            if polled.is_pending() && awaited > worked_to && known(source.cursor()) > worked_to {
                return Poll::Ready(Event::Command);
            }
            polled.map(|received| Event::Received(Ok(received)))
        });
        tokio::select! {
            () = commanded(&mut self.orders, &mut self.ending) => Event::Command,
            Some(message) = OptionFuture::from(inbox) => Event::Message(message),
            received = catch(receive), if !is_paused => {
                received.unwrap_or_else(|panicked| Event::Received(Err(panicked)))
            }
            Some(()) = OptionFuture::from(timers.timeout.as_mut()) => Event::Timeout,
            Some(()) = OptionFuture::from(timers.pause.as_mut()) => Event::Paused,
        }
    }

    /// The reason to end, if it was asked to.
    fn stop_requested(&mut self) -> Option<StopReason> {
        if self.orders.borrow_and_update().stop {
            return Some(StopReason::Shutdown);
        }
        // An error says that the parent was dropped.
        let ended = |parent: &watch::Receiver<bool>| *parent.borrow() || parent.has_changed().is_err();
        self.ending.as_ref().is_some_and(ended).then_some(StopReason::ParentEnded)
    }

    /// Replaces the filter, if a command says so.
    async fn replace(&mut self) {
        if self.control.orders.borrow().filter.is_none() {
            return;
        }
        let mut taken = None;
        self.control.orders.send_if_modified(|orders| {
            taken = orders.filter.take();
            false
        });
        let Some(filter) = taken else { return };
        // The old filter wanted the delivery in hand.
        let cursor = self.worked_to();
        self.given = None;
        if let Err(panicked) = catch(async { self.source.replace_at(filter, cursor) }).await {
            self.note_panic(&panicked);
        }
    }

    /// Reports progress, if a caller waits for more than was reported.
    fn note_progress(&mut self) {
        let awaited = self.control.orders.borrow().awaited;
        if awaited > self.control.report.borrow().worked_to
            && let Some(worked_to) = known(self.source.cursor())
        {
            self.control.report.send_modify(|report| report.worked_to = Some(worked_to));
        }
    }

    /// Skips the delivery or the interruption in hand if the listener has panicked on it as often as allowed.
    fn pass_over(&mut self) {
        let attempts_max = self.terms.attempts_max;
        self.interrupted.take_if(|(_, attempts)| *attempts >= attempts_max);
        let Some(given) = self.given.take_if(|given| given.attempts >= attempts_max) else { return };
        let batch = given.delivery.batch();
        if given.is_whole && batch.len() > 1 {
            // Tries each delivery alone, to skip only those on which the listener panics.
            return self.source.give_apart(batch);
        }
        let row = given.delivery.notification();
        self.emit(Supervised::PassedOver { name: row.name.clone(), sequence: row.sequence });
    }

    /// The cursor before the delivery in hand.
    fn worked_to(&mut self) -> Cursor {
        let given = self.given.as_ref().map(|given| given.delivery.cursor_before());
        given.unwrap_or_else(|| self.source.cursor())
    }

    /// Saves the cursor before the delivery in hand.
    async fn save(&mut self) {
        let cursor = self.worked_to();
        if let Err(error) = self.source.checkpoint_at(cursor).await {
            let context = &self.shared.context;
            context.stats.health.complain(context.env(), "saving of a listener's cursor", &error);
        }
    }
}

/// Completes when a command comes, or the parent has ended.
async fn commanded(orders: &mut watch::Receiver<Orders>, ending: &mut Option<watch::Receiver<bool>>) {
    let ended = async {
        match ending {
            Some(ending) => drop(ending.wait_for(|ended| *ended).await),
            None => pending().await,
        }
    };
    tokio::select! {
        // The supervisor itself holds the sender, so this does not fail.
        _ = orders.changed() => {}
        () = ended => {}
    }
}

/// The sequence up to which a reader at `cursor` knows everything.
fn known(cursor: Cursor) -> Option<Sequence> {
    match cursor.knowledge() {
        Knowledge::UpTo(known) => Some(known),
        Knowledge::Nothing => None,
    }
}

async fn terminate(mut listener: impl Listener, reason: StopReason) -> StopReason {
    if let Err(Panicked(text)) = catch(async { listener.terminate(&reason).await }).await {
        tracing::error!(panic = text, "a listener has panicked in terminate");
    }
    reason
}

/// Completes with `future`, or with the message of its panic.
async fn catch<T>(future: impl Future<Output = T>) -> Result<T, Panicked> {
    AssertUnwindSafe(future).catch_unwind().await.map_err(|panic| Panicked(panic_text(&*panic).to_owned()))
}

/// Cleans up when the supervisor ends in any way.
struct Last {
    shared: Arc<Shared>,
    control: Arc<Control>,
    reason: StopReason,
}

impl Drop for Last {
    fn drop(&mut self) {
        if let Some(name) = &self.control.name {
            self.shared.listeners.unlist(name, self.control.id);
        }
        self.control.end(std::mem::replace(&mut self.reason, StopReason::Shutdown));
    }
}
