//! [`Supervisor`]: the task of a listener. It owns the subscription, which survives the listener, so that the next listener
//! continues where the last one was.

use std::{future::poll_fn, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures_util::{
    FutureExt,
    future::{BoxFuture, OptionFuture},
};
use tokio::sync::{mpsc, watch};

use super::{
    delivery::{DeliveryBatch, Interruption},
    handle::{Control, ListenerHandle, State},
    listener::{Listener, Message, Next, StopReason},
    shared::Shared,
    subscription::Source,
    supervision::{Supervised, Supervision},
};
use crate::{
    base::{
        cursor::Cursor,
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

/// An item that the listener has not finished. A delivery that is passed on alone is a batch of its own.
struct Given {
    item: Result<DeliveryBatch, Interruption>,
    attempts: u32,
}

impl Given {
    /// Whether it counts as worked on after the listener has returned `next`. A listener that stops within a batch may have left a part
    /// of it; one that has failed could not work on it.
    fn is_worked_on(&self, next: &Next) -> bool {
        match (&self.item, next) {
            (Ok(_), Next::Stop(StopReason::Failed(_))) => false,
            (Ok(batch), Next::Stop(_)) => batch.len() == 1,
            _ => true,
        }
    }

    /// The cursor before it, if it is a delivery.
    fn cursor(&self) -> Option<Cursor> {
        self.item.as_ref().ok().map(|batch| batch.cursor_after(0))
    }
}

/// A panic, with its message.
struct Panicked(String);

/// The task of a listener.
pub(super) struct Supervisor<L: Listener, F> {
    shared: Arc<Shared>,
    control: Arc<Control>,
    state: watch::Receiver<State>,
    /// Reports the end of the parent.
    ending: watch::Receiver<bool>,
    source: Source,
    /// The messages; `None` once all senders are gone.
    inbox: Option<mpsc::Receiver<Message<L::Message>>>,
    factory: F,
    terms: SupervisionPolicy,
    given: Option<Given>,
    restarts: u32,
    /// Restarts since it has last finished something.
    in_a_row: u32,
    /// The pause after a failed read of the feed.
    pause: Option<BoxFuture<'static, ()>>,
    /// Why it ends. If its task is aborted, nobody else says so.
    reason: StopReason,
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
        ending: watch::Receiver<bool>,
    ) -> Self {
        let (shared, control) = (Arc::clone(&source.reader.shared), Arc::clone(&handle.control));
        Self {
            shared,
            state: control.state.subscribe(),
            control,
            ending,
            source,
            inbox: Some(inbox),
            factory,
            terms,
            given: None,
            restarts: 0,
            in_a_row: 0,
            pause: None,
            reason: StopReason::Shutdown,
        }
    }

    /// Runs the listener until it ends.
    pub async fn run(mut self) {
        if let Some(task) = tokio::task::try_id() {
            self.control.task.get_or_init(|| task);
        }
        self.emit(Supervised::Started);
        self.reason = self.run_sessions().await;
        // If it was not saved, an unfinished interruption comes again.
        let is_interrupted = self.given.as_ref().is_some_and(|given| given.item.is_err());
        if self.reason != StopReason::CursorLost && !is_interrupted {
            let cursor = self.worked_to();
            if let Err(error) = self.source.checkpoint_at(cursor).await {
                let context = &self.shared.context;
                context.stats.health.complain(context.env(), "saving of a listener's cursor", &error);
            }
        }
        tracing::debug!(id = %self.control.id, name = ?self.control.name, reason = %self.reason, "a listener has ended");
        self.emit(Supervised::Stopped(self.reason.clone()));
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
                    () = commanded(&mut self.state, &mut self.ending) => {}
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
        let batch = self.given.as_ref().and_then(|given| given.item.as_ref().ok());
        let at = batch.map(|batch| batch.delivery(0).sequence());
        tracing::error!(id = %self.control.id, name = ?self.control.name, ?at, panic = text, "a subscriber has panicked");
        self.emit(Supervised::Panicked { text: text.clone(), at });
    }

    /// Makes a listener, and calls it until it ends or panics.
    async fn session(&mut self) -> Result<StopReason, Panicked> {
        let cursor = self.worked_to();
        let made = catch(async {
            let mut listener = (self.factory)();
            let next = listener.init(cursor).await;
            (listener, next)
        });
        let (mut listener, mut next) = made.await.inspect_err(|panicked| self.note_panic(panicked))?;
        loop {
            let timeout = match next {
                Next::Continue => None,
                Next::ContinueFor(limit) => Some(self.shared.context.env().sleep(limit)),
                Next::Stop(reason) => return Ok(terminate(listener, reason).await),
            };
            next = match self.call(&mut listener, timeout).await {
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

    /// Calls the listener with the next delivery, interruption, message, or the `timeout` that it has set.
    async fn call(
        &mut self,
        listener: &mut L,
        mut timeout: Option<BoxFuture<'static, ()>>,
    ) -> Result<Next, Panicked> {
        loop {
            if let Some(reason) = self.stop_requested() {
                return Ok(Next::Stop(reason));
            }
            self.replace().await;
            if let Some(given) = &mut self.given {
                given.attempts += 1;
                let next = match given.item.clone() {
                    Ok(batch) if self.terms.in_batches => {
                        catch(async { listener.handle_batch(batch).await }).await?
                    }
                    Ok(batch) => catch(async { listener.handle_event(batch.into_first()).await }).await?,
                    Err(interruption) => {
                        let message = Message::Interrupted(interruption);
                        catch(async { listener.handle_message(message).await }).await?
                    }
                };
                if given.is_worked_on(&next) {
                    (self.given, self.in_a_row) = (None, 0);
                }
                return Ok(next);
            }
            let (source, state, in_batches) = (&mut self.source, &self.control.state, self.terms.in_batches);
            let receive = poll_fn(|context| {
                note_progress(state, source);
                let polled = source.poll_given(context, in_batches);
                if polled.is_pending() {
                    // The cursor may have moved without an item.
                    note_progress(state, source);
                }
                polled
            });
            tokio::select! {
                () = commanded(&mut self.state, &mut self.ending) => {}
                // `None` once all senders are gone, and then never again.
                Some(message) = OptionFuture::from(self.inbox.as_mut().map(mpsc::Receiver::recv)) => match message {
                    Some(message) => return catch(async { listener.handle_message(message).await }).await,
                    None => self.inbox = None,
                },
                received = catch(receive), if self.pause.is_none() => match received {
                    Ok(None) => return Ok(Next::Stop(StopReason::Shutdown)),
                    Ok(Some(item)) => {
                        if let Err(Interruption::Failed(error)) = &item {
                            if matches!(error, Error::CursorLost { .. }) {
                                tracing::warn!(id = %self.control.id, %error, "a listener has lost its cursor and ends");
                                return Ok(Next::Stop(StopReason::CursorLost));
                            }
                            self.pause = Some(self.shared.context.env().sleep(FAILURE_PAUSE));
                        }
                        self.given = Some(Given { item, attempts: 0 });
                    }
                    // A predicate of the filter has panicked. It has seen the row, the listener has not, and the next row follows.
                    Err(panicked) => self.note_panic(&panicked),
                },
                Some(()) = OptionFuture::from(timeout.as_mut()) => {
                    return catch(async { listener.timeout().await }).await;
                }
                Some(()) = OptionFuture::from(self.pause.as_mut()) => self.pause = None,
            }
        }
    }

    /// The reason to end, if it was asked to.
    fn stop_requested(&mut self) -> Option<StopReason> {
        if self.state.borrow_and_update().stop {
            return Some(StopReason::Shutdown);
        }
        // An error says that the parent was dropped.
        let is_ended = *self.ending.borrow() || self.ending.has_changed().is_err();
        is_ended.then_some(StopReason::ParentEnded)
    }

    /// Replaces the filter, if a command says so.
    async fn replace(&mut self) {
        let mut taken = None;
        self.control.state.send_if_modified(|state| {
            taken = state.filter.take();
            false
        });
        let Some(filter) = taken else { return };
        // The old filter wanted the delivery in hand; an interruption does not depend on it.
        let cursor = self.worked_to();
        self.given.take_if(|given| given.item.is_ok());
        if let Err(panicked) = catch(async { self.source.replace_at(filter, cursor) }).await {
            self.note_panic(&panicked);
        }
    }

    /// Skips the item in hand if the listener has panicked on it as often as allowed.
    fn pass_over(&mut self) {
        let attempts_max = self.terms.attempts_max;
        let given = self.given.take_if(|given| given.attempts >= attempts_max);
        let Some(Given { item: Ok(batch), .. }) = given else { return };
        if batch.len() > 1 {
            // Tries each delivery alone, to skip only those on which the listener panics.
            self.source.current = Some(batch);
            return;
        }
        let row = Arc::clone(batch.delivery(0).notification());
        self.emit(Supervised::PassedOver { name: row.name.clone(), sequence: row.sequence });
    }

    /// The cursor before the delivery in hand.
    fn worked_to(&mut self) -> Cursor {
        let given = self.given.as_ref().and_then(Given::cursor);
        given.unwrap_or_else(|| self.source.cursor())
    }
}

/// Completes when a command comes, or the parent has ended.
async fn commanded(state: &mut watch::Receiver<State>, ending: &mut watch::Receiver<bool>) {
    tokio::select! {
        // The supervisor itself holds the sender, so this does not fail.
        _ = state.changed() => {}
        _ = ending.wait_for(|is_ended| *is_ended) => {}
    }
}

/// Reports up to where everything was worked on, if a caller waits for more than was reported.
fn note_progress(state: &watch::Sender<State>, source: &mut Source) {
    let State { awaited, worked_to, .. } = *state.borrow();
    if awaited <= worked_to {
        return;
    }
    let known = source.cursor().knowledge();
    // A report wakes the supervisor itself, too, so only news are reported.
    if known > worked_to {
        state.send_modify(|state| state.worked_to = known);
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

impl<L: Listener, F> Drop for Supervisor<L, F> {
    fn drop(&mut self) {
        if let Some(name) = &self.control.name {
            self.shared.listeners.unlist(name, self.control.id);
        }
        self.control.end(std::mem::replace(&mut self.reason, StopReason::Shutdown));
    }
}
