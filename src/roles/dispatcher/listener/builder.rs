//! [`Listen`]: a listener in the making.

use std::{
    fmt,
    sync::{Arc, OnceLock},
    time::Duration,
};

use tokio::{
    sync::{mpsc, watch},
    task::AbortHandle,
};

use super::{
    Listener, ListenerHandle, Parent,
    handle::Control,
    supervisor::{Supervisor, Terms},
};
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
    },
    roles::dispatcher::{Subscribe, Subscription},
    store::RetryPolicy,
};

/// The most messages that may wait for a listener.
const MESSAGES_MAX: usize = 1_000_000;

/// Whether a listener that has panicked is made again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RestartPolicy {
    /// As often as it panics.
    #[default]
    Always,
    /// So many times.
    Times(u32),
    /// Never: it ends with its first panic.
    Never,
}

impl RestartPolicy {
    /// Whether a listener that was made again `restarts` times may be once more.
    pub(super) fn allows(self, restarts: u32) -> bool {
        match self {
            Self::Always => true,
            Self::Times(times) => restarts < times,
            Self::Never => false,
        }
    }
}

/// A listener in the making.
#[must_use = "start it"]
pub struct Listen<L, F> {
    /// What it subscribes to.
    subscribe: Subscribe,
    /// Makes it.
    factory: F,
    /// Its name, if it has one.
    name: Option<Arc<str>>,
    /// How it is treated.
    terms: Terms,
    /// The most messages that wait for it.
    messages_max: usize,
    /// What is made.
    listener: std::marker::PhantomData<fn() -> L>,
}

impl<L, F> Listen<L, F>
where
    L: Listener,
    F: FnMut() -> L + Send + 'static,
{
    /// One with defaults.
    pub(in crate::roles::dispatcher) fn new(subscribe: Subscribe, factory: F) -> Self {
        let listener = std::marker::PhantomData;
        Self { subscribe, factory, name: None, terms: Terms::default(), messages_max: 1_024, listener }
    }

    /// Gives it a name, by which others find it ([`Dispatcher::listener`](crate::Dispatcher::listener)). Fails if it is empty;
    /// whether another listener has it shows when it is started.
    pub fn named(self, name: &str) -> Result<Self> {
        if name.is_empty() {
            return Err(Error::invalid("listener name", "it is empty; leave it out to have none"));
        }
        Ok(Self { name: Some(name.into()), ..self })
    }

    /// Whether it is made again after a panic. Default: always.
    pub fn restart(mut self, policy: RestartPolicy) -> Self {
        self.terms.restart = policy;
        self
    }

    /// The pause before it is made again: `min`, and longer each time, up to `max`, until it has worked on something. Default:
    /// 100 ms up to 30 s. Fails if `min` is greater than `max`.
    pub fn backoff(mut self, min: Duration, max: Duration) -> Result<Self> {
        if min > max {
            return Err(Error::invalid("back-off", format!("at least {min:?} is more than at most {max:?}")));
        }
        self.terms.backoff = RetryPolicy { backoff_min: min, backoff_max: max, ..self.terms.backoff };
        Ok(self)
    }

    /// How often it is given a delivery that it panics on, before that is passed over. Default: 3. Fails if it is zero.
    pub fn attempts(mut self, attempts: u32) -> Result<Self> {
        if attempts == 0 {
            return Err(Error::invalid("attempts", "it is zero: nothing would ever be delivered"));
        }
        self.terms.attempts_max = attempts;
        Ok(self)
    }

    /// The most messages that wait for it, 1 to 1,000,000: who sends more has to wait. Default: 1,024. Fails if it is out of these
    /// limits.
    pub fn messages_max(self, messages_max: usize) -> Result<Self> {
        if messages_max == 0 {
            return Err(Error::invalid("messages", "their capacity is zero: none could ever be sent"));
        }
        if messages_max > MESSAGES_MAX {
            return Err(Error::invalid("messages", format!("{messages_max} are more than {MESSAGES_MAX}")));
        }
        Ok(Self { messages_max, ..self })
    }

    /// Has it given batches ([`Listener::handle_batch`]) instead of one delivery at a time. A batch on which it panics is given to
    /// it again as a whole, a few times, and then delivery by delivery, each as a batch of its own: only those that it cannot bear
    /// are passed over.
    pub fn in_batches(mut self) -> Self {
        self.terms.in_batches = true;
        self
    }

    /// Starts it. It ends when it is told to, says so itself, or with its dispatcher.
    ///
    /// Fails with [`Error::Invalid`] if another listener has its name.
    pub fn start(self) -> Result<ListenerHandle<L::Message>> {
        let never = Parent::new();
        // Kept for as long as the listener runs, and so never dropped before.
        self.start_with(never.ending(), Some(never)).map(|(handle, _)| handle)
    }

    /// Starts it, linked to `parent`: it also ends when that does.
    pub fn start_linked(self, parent: &Parent) -> Result<ListenerHandle<L::Message>> {
        self.start_with(parent.ending(), None).map(|(handle, _)| handle)
    }

    /// Starts it. `kept` lives as long as it runs.
    fn start_with(
        self,
        ending: watch::Receiver<bool>,
        kept: Option<Parent>,
    ) -> Result<(ListenerHandle<L::Message>, AbortHandle)> {
        let Self { subscribe, factory, name, terms, messages_max, .. } = self;
        let shared = Arc::clone(&subscribe.shared);
        let subscription = Subscription::new(subscribe);
        let (messages, inbox) = mpsc::channel(messages_max);
        let parent = Parent::new();
        let control = Arc::new(Control {
            id: subscription.id(),
            name: name.clone(),
            stop: watch::Sender::new(false),
            filter: watch::Sender::new(None),
            awaited: watch::Sender::new(Sequence::MIN),
            worked_to: watch::Sender::new(Sequence::MIN),
            ended: watch::Sender::new(None),
            parent: parent.downgrade(),
            task: OnceLock::new(),
        });
        let handle = ListenerHandle { control, messages, parent };
        if let Some(name) = &name {
            shared.listeners.list(name, &handle)?;
        }
        let supervisor = Supervisor::new(&handle, subscription, inbox, factory, terms, ending);
        let task = shared.listeners.spawn(async move {
            supervisor.run().await;
            drop(kept);
        });
        Ok((handle, task))
    }

    /// Starts it as a plain callback: it is not made again, and goes on with the next delivery after a panic.
    pub(in crate::roles::dispatcher) fn start_callback(
        mut self,
    ) -> (ListenerHandle<L::Message>, AbortHandle) {
        (self.terms.is_callback, self.terms.attempts_max) = (true, 1);
        let never = Parent::new();
        self.start_with(never.ending(), Some(never)).expect("it has no name that could be taken")
    }
}

impl<L, F> fmt::Debug for Listen<L, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { subscribe, name, terms, .. } = self;
        f.debug_struct("Listen")
            .field("subscribe", subscribe)
            .field("name", name)
            .field("terms", terms)
            .finish_non_exhaustive()
    }
}
