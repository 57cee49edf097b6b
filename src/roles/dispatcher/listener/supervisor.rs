//! [`Supervisor`]: the task of a listener. It owns the subscription, which outlives the listener, so that another one made in
//! its place goes on where it was.

use std::{future::poll_fn, panic::AssertUnwindSafe, pin::Pin, sync::Arc, task::Poll, time::Duration};

use futures_util::{
    FutureExt,
    future::{BoxFuture, OptionFuture},
};
use tokio::sync::{mpsc, watch};
use tokio_stream::Stream;

use super::{
    Listener, ListenerHandle, Message, Next, RestartPolicy, StopReason, Supervised, Supervision,
    handle::Control,
};
use crate::{
    base::{
        cursor::{Cursor, Knowledge},
        encoding::Sequence,
        error::{Error, panic_text},
    },
    roles::dispatcher::{Delivery, DeliveryBatch, Filter, Interruption, Shared, Subscription},
    store::RetryPolicy,
};

/// How long a subscriber is not asked for more after the feed could not be read.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

/// How a listener is treated.
#[derive(Debug, Clone)]
pub(super) struct Terms {
    /// Whether it is made again after a panic.
    pub restart: RestartPolicy,
    /// The pauses before that.
    pub backoff: RetryPolicy,
    /// How often it is given a delivery that it panics on.
    pub attempts_max: u32,
    /// Whether it is given batches.
    pub in_batches: bool,
    /// Whether it is a plain callback, which goes on after a panic as it is.
    pub is_callback: bool,
}

impl Default for Terms {
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

/// What a listener is given at once.
#[derive(Clone)]
enum Given {
    /// A delivery.
    One(Delivery),
    /// A batch.
    Batch(DeliveryBatch),
}

impl Given {
    /// Where a subscriber stands that has worked on nothing of it.
    fn cursor_before(&self) -> Cursor {
        match self {
            Self::One(delivery) => delivery.cursor_before(),
            Self::Batch(batch) => batch.cursor_after(0),
        }
    }

    /// Whether it was worked on, if `next` is what the listener said after it. One that stops within a batch may have left some
    /// of it, and one that has failed could not work on it.
    fn is_worked_on(&self, next: &Next) -> bool {
        match (next, self) {
            (Next::Stop(StopReason::Failed(_)), _) => false,
            (Next::Stop(_), Self::Batch(batch)) => batch.len() == 1,
            _ => true,
        }
    }

    /// The first of it.
    fn first(&self) -> Delivery {
        match self {
            Self::One(delivery) => delivery.clone(),
            Self::Batch(batch) => batch.delivery(0),
        }
    }
}

/// Something has panicked: what it says.
struct Panicked(String);

/// How a session with a listener has ended.
enum Ended {
    /// It is to end.
    Stopped(StopReason),
    /// It has panicked.
    Panicked(String),
}

/// What the supervisor waits for.
enum Event<M> {
    /// It is to end.
    Stop(StopReason),
    /// A message; `None` once all who could send one are gone.
    Message(Option<Message<M>>),
    /// Something of the subscription; `None` at its end, an error if the predicate of its filter has panicked.
    Received(Result<Option<Result<Given, Interruption>>, Panicked>),
    /// It is to want something else.
    Replaced,
    /// Somebody waits until it has worked on something.
    Awaited,
    /// Nothing has come for as long as it said.
    Timeout,
    /// The subscription may be asked again.
    Paused,
}

/// What makes a supervisor stop waiting, besides what the listener is given.
struct Timers {
    /// Completes when nothing has come for as long as the listener said.
    timeout: Option<BoxFuture<'static, ()>>,
    /// Completes when the subscription may be asked again, after the feed could not be read.
    pause: Option<BoxFuture<'static, ()>>,
}

/// The task of a listener.
pub(super) struct Supervisor<L: Listener, F> {
    /// The dispatcher.
    shared: Arc<Shared>,
    /// Who it is, and what it is told.
    control: Arc<Control>,
    /// Whether it is to end.
    stop: watch::Receiver<bool>,
    /// Whether its parent has ended.
    ending: watch::Receiver<bool>,
    /// What it is to want.
    filter: watch::Receiver<Option<Filter>>,
    /// The last position that somebody waits for it to have worked on.
    awaited: watch::Receiver<Sequence>,
    /// What the listener is given.
    subscription: Subscription,
    /// The messages; `None` once nobody can send one.
    inbox: Option<mpsc::Receiver<Message<L::Message>>>,
    /// Makes the listener.
    factory: F,
    /// How it is treated.
    terms: Terms,
    /// What it was given and has not finished, and how often it was given that.
    in_hand: Option<(Given, u32)>,
    /// A batch that it has panicked on too often, and how much of it was given to it again by itself.
    apart: Option<(DeliveryBatch, usize)>,
    /// The interruption that it has not finished, and how often it was given that.
    interrupted: Option<(Interruption, u32)>,
    /// How often it was made again.
    restarts: u32,
    /// How often it was made again since it has last worked on something.
    in_a_row: u32,
}

impl<L, F> Supervisor<L, F>
where
    L: Listener,
    F: FnMut() -> L + Send + 'static,
{
    /// A supervisor of what `factory` makes, until its parent ends.
    pub fn new(
        handle: &ListenerHandle<L::Message>,
        subscription: Subscription,
        inbox: mpsc::Receiver<Message<L::Message>>,
        factory: F,
        terms: Terms,
        ending: watch::Receiver<bool>,
    ) -> Self {
        let control = Arc::clone(&handle.control);
        Self {
            shared: Arc::clone(subscription.shared()),
            stop: control.stop.subscribe(),
            ending,
            filter: control.filter.subscribe(),
            awaited: control.awaited.subscribe(),
            control,
            subscription,
            inbox: Some(inbox),
            factory,
            terms,
            in_hand: None,
            apart: None,
            interrupted: None,
            restarts: 0,
            in_a_row: 0,
        }
    }

    /// Runs the listener until it ends.
    pub async fn run(mut self) {
        // Also if this task is aborted: who waits for the end is not to wait for ever.
        let _last = Last { shared: Arc::clone(&self.shared), control: Arc::clone(&self.control) };
        if let Some(task) = tokio::task::try_id() {
            self.control.task.get_or_init(|| task);
        }
        self.tell(Supervised::Started);
        let reason = self.run_sessions().await;
        // An interruption in hand is to be told again.
        if reason != StopReason::CursorLost && self.interrupted.is_none() {
            self.save().await;
        }
        tracing::debug!(id = %self.control.id, name = ?self.control.name, %reason, "a listener has ended");
        self.tell(Supervised::Stopped(reason.clone()));
        self.control.ended.send_replace(Some(reason));
    }

    /// Makes the listener again and again, until it ends.
    async fn run_sessions(&mut self) -> StopReason {
        loop {
            let text = match self.session().await {
                Ended::Stopped(reason) => return reason,
                Ended::Panicked(text) => text,
            };
            if !self.terms.restart.allows(self.restarts) {
                return StopReason::Panicked(text);
            }
            (self.in_a_row, self.restarts) = (self.in_a_row + 1, self.restarts + 1);
            let env = self.shared.context.env().clone();
            let after = self.terms.backoff.backoff(self.in_a_row, &env);
            self.shared.context.stats.listener_restarts.add(1);
            self.tell(Supervised::Restarting { restarts: self.restarts, after });
            tokio::select! {
                reason = told_to_stop(&mut self.stop, &mut self.ending) => return reason,
                () = env.sleep(after) => {}
            }
        }
    }

    /// Tells whoever listens what has become of the listener.
    fn tell(&self, what: Supervised) {
        let Control { id, name, .. } = &*self.control;
        self.shared.events.send(Supervision { id: *id, name: name.clone(), what });
    }

    /// Notes a panic.
    fn note_panic(&self, text: &str) {
        let stats = &self.shared.context.stats;
        if self.terms.is_callback { &stats.callback_panics } else { &stats.listener_panics }.add(1);
        let at = self.in_hand.as_ref().map(|(given, _)| given.first().sequence());
        tracing::error!(id = %self.control.id, name = ?self.control.name, ?at, panic = text, "a subscriber has panicked");
        self.tell(Supervised::Panicked { text: text.to_owned(), at });
    }

    /// Makes a listener, and gives it what comes, until it ends or panics.
    async fn session(&mut self) -> Ended {
        // What is in hand was returned, and not worked on.
        let cursor = self.subscription.cursor();
        let given = self.in_hand.as_ref().map(|(given, _)| given.first().since());
        let apart = self.apart.as_ref().map(|(batch, _)| batch.delivery(0).since());
        let cursor = given.into_iter().chain(apart).fold(cursor, Cursor::min);
        let made = catch(async {
            let mut listener = (self.factory)();
            let next = listener.init(cursor).await;
            (listener, next)
        });
        let (mut listener, mut next) = match made.await {
            Ok(made) => made,
            Err(Panicked(text)) => {
                self.note_panic(&text);
                return Ended::Panicked(text);
            }
        };
        let mut timers = Timers { timeout: None, pause: None };
        loop {
            timers.timeout = match next {
                Next::Continue => None,
                Next::ContinueFor(limit) => Some(self.shared.context.env().sleep(limit)),
                Next::Stop(reason) => return terminate(listener, reason).await,
            };
            next = match self.call(&mut listener, &mut timers).await {
                Ok(next) => next,
                Err(Panicked(text)) => {
                    self.note_panic(&text);
                    self.pass_over();
                    if !self.terms.is_callback {
                        return Ended::Panicked(text);
                    }
                    Next::Continue
                }
            };
        }
    }

    /// Calls the listener with what comes next.
    async fn call(&mut self, listener: &mut L, timers: &mut Timers) -> Result<Next, Panicked> {
        loop {
            if let Some(reason) = is_told_to_stop(&self.stop, &self.ending) {
                return Ok(Next::Stop(reason));
            }
            if self.filter.borrow().is_some() {
                self.replace().await;
            }
            if self.in_hand.is_none()
                && let Some((batch, given)) = &mut self.apart
            {
                self.in_hand = Some((Given::Batch(batch.single(*given)), 0));
                *given += 1;
                if *given == batch.len() {
                    self.apart = None;
                }
            }
            if let Some((given, attempts)) = &mut self.in_hand {
                *attempts += 1;
                let next = match given.clone() {
                    Given::One(delivery) => catch(async { listener.handle_event(delivery).await }).await?,
                    Given::Batch(batch) => catch(async { listener.handle_batch(batch).await }).await?,
                };
                if given.is_worked_on(&next) {
                    self.finish_delivery();
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
                Event::Stop(reason) => return Ok(Next::Stop(reason)),
                Event::Received(Ok(None)) => return Ok(Next::Stop(StopReason::Shutdown)),
                Event::Received(Ok(Some(Ok(given)))) => self.in_hand = Some((given, 0)),
                Event::Received(Ok(Some(Err(Interruption::Failed(error @ Error::CursorLost { .. }))))) => {
                    tracing::warn!(id = %self.control.id, %error, "a listener ends");
                    return Ok(Next::Stop(StopReason::CursorLost));
                }
                Event::Received(Ok(Some(Err(interruption)))) => {
                    if matches!(interruption, Interruption::Failed(_)) {
                        timers.pause = Some(self.shared.context.env().sleep(FAILURE_PAUSE));
                    }
                    self.interrupted = Some((interruption, 0));
                }
                // A predicate of the filter. It has seen the row then, and the listener has not: it goes on with the next.
                Event::Received(Err(Panicked(text))) => self.note_panic(&text),
                Event::Message(Some(message)) => {
                    return catch(async { listener.handle_message(message).await }).await;
                }
                Event::Message(None) => self.inbox = None,
                Event::Timeout => {
                    timers.timeout = None;
                    return catch(async { listener.timeout().await }).await;
                }
                Event::Replaced => self.replace().await,
                Event::Paused => timers.pause = None,
                Event::Awaited => {}
            }
        }
    }

    /// What comes next. Cancel safe.
    async fn event(&mut self, timers: &mut Timers) -> Event<L::Message> {
        let inbox = self.inbox.as_mut().map(mpsc::Receiver::recv);
        let is_paused = timers.pause.is_some();
        let (subscription, in_batches) = (&mut self.subscription, self.terms.in_batches);
        let (awaited, worked_to) = (*self.awaited.borrow(), *self.control.worked_to.borrow());
        let receive = poll_fn(|context| {
            let polled = if in_batches {
                subscription.poll_batch(context).map(|batch| batch.map(|batch| batch.map(Given::Batch)))
            } else {
                let next = Pin::new(&mut *subscription).poll_next(context);
                next.map(|delivery| delivery.map(|delivery| delivery.map(Given::One)))
            };
            // It may have come further without anything to deliver.
            let progress = Knowledge::UpTo(worked_to.max(Sequence::MIN));
            if polled.is_pending() && awaited > worked_to && subscription.cursor().knowledge() > progress {
                return Poll::Ready(Event::Awaited);
            }
            polled.map(|received| Event::Received(Ok(received)))
        });
        tokio::select! {
            reason = told_to_stop(&mut self.stop, &mut self.ending) => Event::Stop(reason),
            _ = self.filter.wait_for(Option::is_some) => Event::Replaced,
            Ok(()) = self.awaited.changed() => Event::Awaited,
            Some(message) = OptionFuture::from(inbox) => Event::Message(message),
            received = catch(receive), if !is_paused => {
                received.unwrap_or_else(|panicked| Event::Received(Err(panicked)))
            }
            Some(()) = OptionFuture::from(timers.timeout.as_mut()) => Event::Timeout,
            Some(()) = OptionFuture::from(timers.pause.as_mut()) => Event::Paused,
        }
    }

    /// Has the subscription want something else.
    async fn replace(&mut self) {
        let Some(filter) = self.control.filter.send_replace(None) else { return };
        // What is in hand was wanted by the filter of before.
        let cursor = self.worked_to();
        (self.in_hand, self.apart) = (None, None);
        if let Err(Panicked(text)) = catch(async { self.subscription.replace_at(filter, cursor) }).await {
            self.note_panic(&text);
        }
    }

    /// Says up to where it has worked on everything, if somebody waits for it to have come further than was said.
    fn note_progress(&mut self) {
        let worked_to = &self.control.worked_to;
        if *self.control.awaited.borrow() > *worked_to.borrow()
            && let Knowledge::UpTo(known) = self.subscription.cursor().knowledge()
        {
            worked_to.send_replace(known);
        }
    }

    /// The delivery in hand was worked on, or is passed over.
    fn finish_delivery(&mut self) {
        (self.in_hand, self.in_a_row) = (None, 0);
    }

    /// Passes over the delivery in hand, or the interruption, if the listener has panicked on it as often as it may.
    fn pass_over(&mut self) {
        let attempts_max = self.terms.attempts_max;
        self.interrupted.take_if(|(_, attempts)| *attempts >= attempts_max);
        if let Some((given, _)) = self.in_hand.take_if(|(_, attempts)| *attempts >= attempts_max) {
            match given {
                // Only those that it cannot bear are passed over.
                Given::Batch(batch) if batch.len() > 1 => self.apart = Some((batch, 0)),
                given => {
                    let first = given.first();
                    let row = first.notification();
                    self.tell(Supervised::PassedOver { name: row.name.clone(), sequence: row.sequence });
                }
            }
            let in_a_row = self.in_a_row;
            self.finish_delivery();
            // It has worked on nothing.
            self.in_a_row = in_a_row;
        }
    }

    /// Up to where everything was worked on: before what is in hand.
    fn worked_to(&mut self) -> Cursor {
        let in_hand = self.in_hand.as_ref().map(|(given, _)| given.cursor_before());
        let apart = self.apart.as_ref().map(|(batch, given)| batch.cursor_after(*given));
        in_hand.into_iter().chain(apart).fold(self.subscription.cursor(), Cursor::min)
    }

    /// Saves what was worked on.
    async fn save(&mut self) {
        let cursor = self.worked_to();
        if let Err(error) = self.subscription.checkpoint_at(cursor).await {
            let context = &self.shared.context;
            context.stats.health.complain(context.env(), "saving of a listener's cursor", &error);
        }
    }
}

/// Has `listener` terminate.
async fn terminate(mut listener: impl Listener, reason: StopReason) -> Ended {
    if let Err(Panicked(text)) = catch(async { listener.terminate(&reason).await }).await {
        tracing::error!(panic = text, "a listener has panicked when it terminated");
    }
    Ended::Stopped(reason)
}

/// Why a listener is told to end, if it is.
fn is_told_to_stop(stop: &watch::Receiver<bool>, ending: &watch::Receiver<bool>) -> Option<StopReason> {
    if *stop.borrow() {
        return Some(StopReason::Shutdown);
    }
    // An error says that the parent was dropped.
    (*ending.borrow() || ending.has_changed().is_err()).then_some(StopReason::ParentEnded)
}

/// Completes when a listener is told to end.
async fn told_to_stop(stop: &mut watch::Receiver<bool>, ending: &mut watch::Receiver<bool>) -> StopReason {
    tokio::select! {
        // What tells it is held by the supervisor.
        _ = stop.wait_for(|stop| *stop) => StopReason::Shutdown,
        _ = ending.wait_for(|ended| *ended) => StopReason::ParentEnded,
    }
}

/// Completes with `future`, or with what its panic says.
async fn catch<T>(future: impl Future<Output = T>) -> Result<T, Panicked> {
    AssertUnwindSafe(future).catch_unwind().await.map_err(|panic| Panicked(panic_text(&*panic).to_owned()))
}

/// What is done once a listener has ended, however.
struct Last {
    /// The dispatcher.
    shared: Arc<Shared>,
    /// Who it was.
    control: Arc<Control>,
}

impl Drop for Last {
    fn drop(&mut self) {
        if let Some(name) = &self.control.name {
            self.shared.listeners.unlist(name, self.control.id);
        }
        self.control.parent.end();
        self.control.ended.send_if_modified(|reason| {
            let is_aborted = reason.is_none();
            reason.get_or_insert(StopReason::Shutdown);
            is_aborted
        });
    }
}
