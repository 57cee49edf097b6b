//! [`Listen`]: a builder that starts a listener.

use std::{fmt, marker::PhantomData, sync::Arc, time::Duration};

use tokio::{sync::mpsc, task::AbortHandle};

use super::{
    handle::{ListenerHandle, Parent},
    listener::Listener,
    options::Order,
    shared::Shared,
    subscription::Source,
    supervisor::{RestartPolicy, SupervisionPolicy, Supervisor},
};
use crate::{
    base::error::{Error, Result},
    store::RetryPolicy,
};

/// The most messages that may wait for a listener.
const MESSAGES_MAX: usize = 1_000_000;

/// Starts a listener, with the options that its methods set.
#[must_use = "start it"]
pub struct Listen<L, F> {
    shared: Arc<Shared>,
    order: Order,
    factory: F,
    name: Option<Arc<str>>,
    terms: SupervisionPolicy,
    messages_max: usize,
    listener: PhantomData<fn() -> L>,
}

impl<L, F> Listen<L, F>
where
    L: Listener,
    F: FnMut() -> L + Send + 'static,
{
    pub(super) fn new(shared: Arc<Shared>, order: Order, factory: F) -> Self {
        let (terms, listener) = (SupervisionPolicy::default(), PhantomData);
        Self { shared, order, factory, name: None, terms, messages_max: 1_024, listener }
    }

    /// Gives the listener a name, by which [`Dispatcher::listener`](crate::Dispatcher::listener) finds it. Fails if the name is empty.
    /// If another listener has the name, starting it fails.
    pub fn named(self, name: &str) -> Result<Self> {
        if name.is_empty() {
            return Err(Error::invalid("listener name", "it is empty; leave it out to have none"));
        }
        Ok(Self { name: Some(name.into()), ..self })
    }

    /// Whether the listener is restarted after a panic. Default: always.
    pub fn restart(mut self, policy: RestartPolicy) -> Self {
        self.terms.restart = policy;
        self
    }

    /// The pause before a restart: `min` at first, longer after each further panic, up to `max`; a delivery that succeeds resets it.
    /// Default: 100 ms up to 30 s. Fails if `min` is greater than `max`.
    pub fn backoff(mut self, min: Duration, max: Duration) -> Result<Self> {
        if min > max {
            return Err(Error::invalid("back-off", format!("at least {min:?} is more than at most {max:?}")));
        }
        self.terms.backoff = RetryPolicy { backoff_min: min, backoff_max: max, ..self.terms.backoff };
        Ok(self)
    }

    /// How often a delivery on which the listener panics is tried before it is skipped. Default: 3. Fails if it is zero.
    pub fn attempts(mut self, attempts: u32) -> Result<Self> {
        if attempts == 0 {
            return Err(Error::invalid("attempts", "it is zero: nothing would ever be delivered"));
        }
        self.terms.attempts_max = attempts;
        Ok(self)
    }

    /// The most messages that wait for the listener, 1 to 1,000,000; a sender of more has to wait. Default: 1,024. Fails if it is out of these
    /// limits.
    pub fn messages_max(self, messages_max: usize) -> Result<Self> {
        if !(1..=MESSAGES_MAX).contains(&messages_max) {
            return Err(Error::invalid("messages", format!("{messages_max} is not 1 to {MESSAGES_MAX}")));
        }
        Ok(Self { messages_max, ..self })
    }

    /// Passes the listener batches ([`Listener::handle_batch`]) instead of one delivery at a time. A batch on which it panics is tried again as a
    /// whole a few times, and then delivery by delivery, each as a batch of its own, so that only the deliveries on which it panics are
    /// skipped.
    pub fn in_batches(mut self) -> Self {
        self.terms.in_batches = true;
        self
    }

    /// Starts the listener. It ends when it is stopped, returns [`Next::Stop`](super::Next::Stop), or its dispatcher ends.
    ///
    /// Fails with [`Error::Invalid`] if another listener has its name.
    pub fn start(self) -> Result<ListenerHandle<L::Message>> {
        self.start_with(None).map(|(handle, _)| handle)
    }

    /// Starts the listener, linked to `parent`: it also ends when the parent ends.
    pub fn start_linked(self, parent: &Parent) -> Result<ListenerHandle<L::Message>> {
        self.start_with(Some(parent)).map(|(handle, _)| handle)
    }

    /// Starts it as a plain callback: it is not restarted, and continues with the next delivery after a panic.
    pub(super) fn start_callback(mut self) -> (ListenerHandle<L::Message>, AbortHandle) {
        (self.terms.is_callback, self.terms.attempts_max) = (true, 1);
        self.start_with(None).expect("it has no name that could be taken")
    }

    fn start_with(self, parent: Option<&Parent>) -> Result<(ListenerHandle<L::Message>, AbortHandle)> {
        let Self { shared, order, factory, name, terms, messages_max, .. } = self;
        let ending = parent.unwrap_or(&shared.listeners.parent).ending();
        let source = Source::new(Arc::clone(&shared), order);
        let (messages, inbox) = mpsc::channel(messages_max);
        let handle = ListenerHandle::new(source.reader.id, name, messages);
        if let Some(name) = &handle.control.name {
            shared.listeners.list(name, &handle)?;
        }
        let supervisor = Supervisor::new(&handle, source, inbox, factory, terms, ending);
        let task = shared.listeners.spawn(supervisor.run());
        Ok((handle, task))
    }
}

impl<L, F> fmt::Debug for Listen<L, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { order, name, terms, .. } = self;
        let debug = &mut f.debug_struct("Listen");
        debug.field("filter", &order.filter).field("name", name).field("terms", terms).finish_non_exhaustive()
    }
}
