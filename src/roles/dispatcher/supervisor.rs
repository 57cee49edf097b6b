//! [`Supervisor`]: the task of a listener. It owns the subscription, which survives the listener, so that the next listener
//! continues where the last one was.

use std::{future::poll_fn, panic::AssertUnwindSafe, sync::Arc, task::Poll, time::Duration};

use futures_util::FutureExt;
use tokio::sync::watch;

use super::{
    delivery::{DeliveryBatch, Interruption},
    handle::{Control, ListenerHandle, State},
    listener::{Listener, Next, StopReason, Supervised, Supervision},
    shared::Shared,
    subscription::Source,
};
use crate::base::{
    backoff::{Backoff, Failures},
    cursor::{Cursor, Knowledge},
    error::{Error, panic_text},
};

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

#[derive(Debug, Clone)]
pub(super) struct SupervisionPolicy {
    pub restart: RestartPolicy,
    pub backoff: Backoff,
    pub attempts_max: u32,
    pub in_batches: bool,
    /// Whether it is a plain callback, which continues after a panic instead of being restarted.
    pub is_callback: bool,
}

impl Default for SupervisionPolicy {
    fn default() -> Self {
        let backoff = Backoff { min: Duration::from_millis(100), max: Duration::from_secs(30) };
        let restart = RestartPolicy::Always;
        Self { restart, backoff, attempts_max: 3, in_batches: false, is_callback: false }
    }
}

/// An item that the listener has not finished. A delivery that is passed on alone is a batch of its own.
struct Given {
    item: Result<DeliveryBatch, Interruption>,
    attempts: u32,
}

impl Given {
    fn batch(&self) -> Option<&DeliveryBatch> {
        self.item.as_ref().ok()
    }
}

pub(super) struct Supervisor<F> {
    shared: Arc<Shared>,
    control: Arc<Control>,
    state: watch::Receiver<State>,
    source: Source,
    factory: F,
    terms: SupervisionPolicy,
    given: Option<Given>,
    restarts: u32,
    /// Restarts since it has last finished something.
    in_a_row: Failures,
    /// The reason of its end. If its task is aborted, only this field has it.
    reason: StopReason,
}

impl<L, F> Supervisor<F>
where
    L: Listener,
    F: FnMut() -> L + Send + 'static,
{
    pub fn new(handle: &ListenerHandle, source: Source, factory: F, terms: SupervisionPolicy) -> Self {
        let (shared, control) = (Arc::clone(&source.reader.shared), Arc::clone(&handle.control));
        Self {
            shared,
            state: control.state.subscribe(),
            control,
            source,
            factory,
            terms,
            given: None,
            restarts: 0,
            in_a_row: Failures::default(),
            reason: StopReason::Shutdown,
        }
    }

    pub async fn run(mut self) {
        self.control.task.get_or_init(tokio::task::id);
        self.emit(Supervised::Started);
        self.reason = self.run_sessions().await;
        tracing::debug!(id = %self.control.id, reason = %self.reason, "a listener has ended");
        self.emit(Supervised::Stopped(self.reason.clone()));
    }

    /// Makes one listener after the other, until one ends without a restart.
    async fn run_sessions(&mut self) -> StopReason {
        loop {
            let text = match self.session().await {
                Ok(reason) => return reason,
                Err(text) => text,
            };
            let is_restarted = match self.terms.restart {
                RestartPolicy::Always => true,
                RestartPolicy::Times(times) => self.restarts < times,
                RestartPolicy::Never => false,
            };
            if !is_restarted {
                return StopReason::Panicked(text);
            }
            self.restarts += 1;
            let env = self.shared.context.env().clone();
            let after = self.in_a_row.again(&self.terms.backoff, Duration::ZERO, &env);
            self.shared.context.stats.listener_restarts.add(1);
            self.emit(Supervised::Restarting { restarts: self.restarts, after });
            let (mut pause, shared) = (env.sleep(after), Arc::clone(&self.shared));
            loop {
                if let Some(reason) = self.stop_requested() {
                    return reason;
                }
                tokio::select! {
                    biased;
                    // What waits for it is not delivered any more: its cursor covers that.
                    () = shared.closed() => return StopReason::Shutdown,
                    // The supervisor itself holds the sender, so this does not fail.
                    _ = self.state.changed() => {}
                    () = &mut pause => break,
                }
            }
        }
    }

    fn emit(&self, what: Supervised) {
        // An error says that there is no receiver, which is fine.
        let _ = self.shared.supervision.send(Supervision { id: self.control.id, what });
    }

    fn note_panic(&self, text: &str) {
        let stats = &self.shared.context.stats;
        if self.terms.is_callback { &stats.callback_panics } else { &stats.listener_panics }.add(1);
        let at = self.given.as_ref().and_then(Given::batch).map(|batch| batch.delivery(0).sequence());
        let who = format!("subscriber {}", self.control.id);
        stats.health.panicked(self.shared.context.env(), &who, text);
        self.emit(Supervised::Panicked { text: text.to_owned(), at });
    }

    /// Makes a listener, and calls it until it ends, or panics with this message.
    async fn session(&mut self) -> Result<StopReason, String> {
        let cursor = self.worked_to();
        let made = catch(async {
            let mut listener = (self.factory)();
            let next = listener.init(cursor).await;
            (listener, next)
        });
        let (mut listener, mut next) = made.await.inspect_err(|text| self.note_panic(text))?;
        loop {
            if let Next::Stop(reason) = next {
                if let Err(text) = catch(async { listener.terminate(&reason).await }).await {
                    tracing::error!(panic = text, "a listener has panicked in terminate");
                }
                return Ok(reason);
            }
            next = match self.call(&mut listener).await {
                Ok(next) => next,
                Err(text) => {
                    self.note_panic(&text);
                    self.pass_over();
                    if !self.terms.is_callback {
                        return Err(text);
                    }
                    Next::Continue
                }
            };
        }
    }

    /// Calls the listener with the next delivery or interruption.
    async fn call(&mut self, listener: &mut L) -> Result<Next, String> {
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
                        catch(async { listener.handle_interruption(interruption).await }).await?
                    }
                };
                (self.given, self.in_a_row) = (None, Failures::default());
                return Ok(next);
            }
            let (source, control, in_batches) = (&mut self.source, &self.control, self.terms.in_batches);
            let receive = poll_fn(|context| {
                note_progress(&control.worked_to, source);
                let polled = source.poll_given(context, in_batches);
                match &polled {
                    // The cursor may have moved without an item.
                    Poll::Pending => note_progress(&control.worked_to, source),
                    // One that has to forget what it knew has reached nothing any more, also for those who ask later.
                    Poll::Ready(Some(Err(Interruption::Expired { .. }))) => {
                        control.worked_to.send_replace(Knowledge::Nothing);
                    }
                    Poll::Ready(_) => {}
                }
                polled
            });
            tokio::select! {
                _ = self.state.changed() => {}
                received = catch(receive) => match received {
                    Ok(None) => return Ok(Next::Stop(StopReason::Shutdown)),
                    Ok(Some(Err(Interruption::Failed(Error::BusGone { .. })))) => {
                        return Ok(Next::Stop(StopReason::BusGone));
                    }
                    Ok(Some(item)) => self.given = Some(Given { item, attempts: 0 }),
                    // A predicate of the filter has panicked. It has seen the row, the listener has not, and the next row follows.
                    Err(text) => self.note_panic(&text),
                },
            }
        }
    }

    fn stop_requested(&mut self) -> Option<StopReason> {
        self.state.borrow_and_update().stop.then_some(StopReason::Shutdown)
    }

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
        if let Err(text) = catch(async { self.source.replace_at(filter, cursor) }).await {
            self.note_panic(&text);
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
        let given = self.given.as_ref().and_then(Given::batch);
        given.map_or_else(|| self.source.cursor(), |batch| batch.cursor_after(0))
    }
}

/// Reports up to where everything was worked on, if a caller waits for that.
fn note_progress(worked_to: &watch::Sender<Knowledge>, source: &mut Source) {
    if worked_to.receiver_count() > 0 {
        worked_to.send_replace(source.cursor().knowledge());
    }
}

async fn catch<T>(future: impl Future<Output = T>) -> Result<T, String> {
    AssertUnwindSafe(future).catch_unwind().await.map_err(|panic| panic_text(&*panic).to_owned())
}

impl<F> Drop for Supervisor<F> {
    fn drop(&mut self) {
        self.control.end(std::mem::replace(&mut self.reason, StopReason::Shutdown));
    }
}
