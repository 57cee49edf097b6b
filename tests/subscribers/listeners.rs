//! Listeners: how they begin, how they are called, and how they end.

use std::{
    array,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::FutureExt;
use notibus::{
    Cursor, Delivery, DispatcherOptions, EventKind, Filter, Sequence,
    cursor::Start,
    dispatcher::{Interruption, Listener, ListenerHandle, Next, StopReason},
};
use tokio::{
    sync::{
        Notify,
        mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    },
    time::Instant,
};

use crate::{
    common::{db, until, within},
    fixture::{SubscriberFixture, commit, forget, kinds, name},
};

/// Does nothing.
pub struct Quiet;

impl Listener for Quiet {
    async fn handle_event(&mut self, _: Delivery) -> Next {
        Next::Continue
    }
}

/// Records the names of delivered databases.
pub struct Recorder(pub Arc<Mutex<Vec<String>>>);

impl Listener for Recorder {
    async fn handle_event(&mut self, delivery: Delivery) -> Next {
        self.0.lock().unwrap().push(name(&delivery).to_owned());
        Next::Continue
    }
}

/// Reports every call, and returns the [`Next`] that the name of the database selects.
pub struct CallReporter(pub UnboundedSender<String>);

impl CallReporter {
    fn next(text: &str) -> Next {
        match text {
            "normal" => Next::Stop(StopReason::Normal),
            "failed" => Next::Stop(StopReason::Failed("no disk".into())),
            "panic" => panic!("as planned"),
            _ => Next::Continue,
        }
    }

    fn report(&self, call: impl Into<String>) {
        let _ = self.0.send(call.into());
    }
}

impl Listener for CallReporter {
    async fn init(&mut self, position: Cursor) -> Next {
        self.report(format!("init {}", !position.knew_nothing()));
        Next::Continue
    }

    async fn handle_event(&mut self, delivery: Delivery) -> Next {
        self.report(format!("event {} {:?}", name(&delivery), kinds(&delivery)));
        Self::next(name(&delivery))
    }

    async fn handle_interruption(&mut self, interruption: Interruption) -> Next {
        match interruption {
            Interruption::Lagged { .. } => self.report("lagged"),
            other => self.report(format!("{other:?}")),
        }
        Next::Continue
    }

    async fn terminate(&mut self, reason: &StopReason) {
        self.report(format!("terminate {reason}"));
    }
}

/// The next reported call.
pub async fn next_call(receiver: &mut UnboundedReceiver<String>) -> String {
    within("a call", receiver.recv()).await.unwrap()
}

/// Makes call reporters, and receives their reports.
pub fn call_reporters() -> (impl FnMut() -> CallReporter + Send + 'static, UnboundedReceiver<String>) {
    let (sender, receiver) = unbounded_channel();
    (move || CallReporter(sender.clone()), receiver)
}

#[tokio::test(start_paused = true)]
async fn a_listener_is_called_with_everything_in_turn() {
    let fixture = SubscriberFixture::new().await;
    let (factory, mut calls) = call_reporters();
    let handle = fixture.dispatcher.subscribe(Filter::all()).listener(factory).start();
    assert_eq!(next_call(&mut calls).await, "init true");
    fixture.event(&db("a", 1), EventKind::Created).await;
    assert_eq!(next_call(&mut calls).await, "event a [Created]");
    assert_eq!(handle.stop().await, StopReason::Shutdown);
    assert_eq!(next_call(&mut calls).await, "terminate shutdown");
    assert!(calls.recv().await.is_none(), "nothing is called after it");
    assert_eq!(fixture.dispatcher.subscribers(), 0);
    assert!(handle.is_finished());
    assert_eq!(handle.stop().await, StopReason::Shutdown, "again");
}

#[tokio::test(start_paused = true)]
async fn a_listener_stops_for_a_reason_of_its_own() {
    for (by, reason) in [("normal", StopReason::Normal), ("failed", StopReason::Failed("no disk".into()))] {
        let fixture = SubscriberFixture::new().await;
        let (factory, mut calls) = call_reporters();
        let handle = fixture.dispatcher.subscribe(Filter::all()).listener(factory).start();
        next_call(&mut calls).await;
        fixture.event(&db(by, 1), EventKind::Created).await;
        assert_eq!(within("its end", handle.finished()).await, reason);
        next_call(&mut calls).await;
        assert_eq!(next_call(&mut calls).await, format!("terminate {reason}"));
        assert_eq!(fixture.dispatcher.subscribers(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_listener_outlives_its_handle() {
    let fixture = SubscriberFixture::new().await;
    let (factory, mut calls) = call_reporters();
    drop(fixture.dispatcher.subscribe(Filter::all()).listener(factory).start());
    next_call(&mut calls).await;
    fixture.event(&db("a", 1), EventKind::Created).await;
    assert_eq!(next_call(&mut calls).await, "event a [Created]");
    fixture.dispatcher.shutdown().await;
    assert_eq!(
        next_call(&mut calls).await,
        "terminate shutdown",
        "its owner is the dispatcher, which waits for it"
    );
}

/// It is subscribed before it is initialised, so that it misses nothing meanwhile.
#[tokio::test(start_paused = true)]
async fn what_happens_during_init_is_not_missed() {
    /// Initialises slowly.
    struct Slow(CallReporter);

    impl Listener for Slow {
        async fn init(&mut self, _: Cursor) -> Next {
            self.0.report("init");
            tokio::time::sleep(Duration::from_mins(1)).await;
            Next::Continue
        }

        async fn handle_event(&mut self, delivery: Delivery) -> Next {
            self.0.handle_event(delivery).await
        }
    }
    let fixture = SubscriberFixture::new().await;
    let (mut factory, mut calls) = call_reporters();
    let listen = fixture.dispatcher.subscribe(Filter::all()).listener(move || Slow(factory()));
    let _handle = listen.start();
    assert_eq!(next_call(&mut calls).await, "init");
    fixture.event(&db("a", 1), EventKind::Created).await;
    assert_eq!(next_call(&mut calls).await, "event a [Created]");
}

#[tokio::test(start_paused = true)]
async fn a_listener_is_informed_of_skipped_rows() {
    let options = DispatcherOptions::default().ring_rows_max(2);
    let fixture = SubscriberFixture::with(options).await;
    let (factory, mut calls) = call_reporters();
    let subscribe = fixture.dispatcher.subscribe(Filter::all()).skip_when_lagging();
    let slow = subscribe.every(Duration::from_mins(1)).unwrap();
    let _handle = slow.listener(factory).start();
    next_call(&mut calls).await;
    for _ in 0..10 {
        fixture.event(&db("a", 1), EventKind::Updated).await;
    }
    assert_eq!(next_call(&mut calls).await, "event a [Updated]");
    assert_eq!(next_call(&mut calls).await, "lagged");
}

/// A listener whose call does not return does not keep a shutdown waiting forever.
#[tokio::test(start_paused = true)]
async fn a_shutdown_aborts_listeners_that_do_not_end() {
    struct Stuck;

    impl Listener for Stuck {
        async fn handle_event(&mut self, _: Delivery) -> Next {
            std::future::pending().await
        }
    }
    let fixture = SubscriberFixture::new().await;
    let handle = fixture.dispatcher.subscribe(Filter::all()).listener(|| Stuck).start();
    fixture.event(&db("a", 1), EventKind::Created).await;
    let began = Instant::now();
    within("the shutdown", fixture.dispatcher.shutdown()).await;
    assert!(began.elapsed() < Duration::from_mins(1));
    assert_eq!(within("its end", handle.finished()).await, StopReason::Shutdown);
}

/// Regression: a listener that panicked on `Lagged` was restarted, and never got it again.
#[tokio::test(start_paused = true)]
async fn an_interruption_that_a_listener_panics_on_is_given_again() {
    /// Panics on its first interruption.
    struct Panics(UnboundedSender<String>, Arc<Mutex<bool>>);

    impl Listener for Panics {
        async fn handle_event(&mut self, _: Delivery) -> Next {
            Next::Continue
        }

        async fn handle_interruption(&mut self, interruption: Interruption) -> Next {
            assert!(std::mem::replace(&mut *self.1.lock().unwrap(), true), "the first");
            self.0.send(format!("{interruption:?}")).unwrap();
            Next::Continue
        }
    }

    for is_replaced in [false, true] {
        let options = DispatcherOptions::default().ring_rows_max(1);
        let fixture = SubscriberFixture::with(options).await;
        let (heard, mut messages) = unbounded_channel();
        let has_panicked = Arc::new(Mutex::new(false));
        let (panicked, factory_panicked) = (Arc::clone(&has_panicked), has_panicked);
        let factory = move || Panics(heard.clone(), Arc::clone(&factory_panicked));
        fixture.events(&["a", "b"], EventKind::Created).await;
        let since = Start::from(fixture.bus.feed().horizon().await.unwrap());
        let subscribe = fixture.dispatcher.subscribe(Filter::all()).since(since).skip_when_lagging();
        let listener = subscribe.listener(factory).start();
        if is_replaced {
            until("the panic", async || *panicked.lock().unwrap()).await;
            listener.replace(Filter::prefix(""));
        }
        assert!(next_call(&mut messages).await.contains("Lagged"));
    }
}

/// Stops itself by its own handle, from within a call.
struct OwnEnd {
    /// Its handle, once it has one.
    handle: Arc<Mutex<Option<ListenerHandle>>>,
    calls: UnboundedSender<String>,
}

impl Listener for OwnEnd {
    async fn handle_event(&mut self, delivery: Delivery) -> Next {
        let handle = self.handle.lock().unwrap().clone().unwrap();
        let reason = handle.stop().await;
        self.calls.send(format!("{} {reason}", name(&delivery))).unwrap();
        Next::Continue
    }

    async fn terminate(&mut self, reason: &StopReason) {
        self.calls.send(format!("terminate {reason}")).unwrap();
    }
}

/// Regression: a listener that stopped itself by its own handle waited for itself forever.
#[tokio::test(start_paused = true)]
async fn a_listener_can_stop_itself_by_its_handle() {
    let fixture = SubscriberFixture::new().await;
    let (calls, mut own_calls) = unbounded_channel();
    let handle = Arc::new(Mutex::new(None));
    let known = Arc::clone(&handle);
    let factory = move || OwnEnd { handle: Arc::clone(&known), calls: calls.clone() };
    let listener = fixture.dispatcher.subscribe(Filter::all()).listener(factory).start();
    *handle.lock().unwrap() = Some(listener.clone());
    fixture.events(&["a", "b"], EventKind::Created).await;
    assert_eq!(next_call(&mut own_calls).await, "a shutdown", "the call goes on");
    assert_eq!(next_call(&mut own_calls).await, "terminate shutdown", "and is the last one");
    assert_eq!(within("its end", listener.finished()).await, StopReason::Shutdown);
    assert_eq!(fixture.dispatcher.subscribers(), 0);
}

/// The same by its name, and for a callback.
#[tokio::test(start_paused = true)]
async fn a_callback_can_stop_itself_by_its_handle() {
    let fixture = SubscriberFixture::new().await;
    let handle: Arc<Mutex<Option<notibus::dispatcher::CallbackHandle>>> = Arc::default();
    let (known, (sender, mut receiver)) = (Arc::clone(&handle), unbounded_channel());
    let callback = fixture.dispatcher.subscribe(Filter::all()).callback(move |delivery| {
        let (own, sender) = (known.lock().unwrap().take().unwrap(), sender.clone());
        async move {
            own.stop().await;
            // The present call returns.
            tokio::time::sleep(Duration::from_secs(1)).await;
            sender.send(name(&delivery.unwrap()).to_owned()).unwrap();
        }
    });
    *handle.lock().unwrap() = Some(callback);
    fixture.events(&["a", "b"], EventKind::Created).await;
    assert_eq!(next_call(&mut receiver).await, "a");
    until("its end", async || fixture.dispatcher.subscribers() == 0).await;
    assert!(receiver.recv().await.is_none(), "it is not called again");
}

/// Ends when it begins.
struct Brief {
    calls: UnboundedSender<&'static str>,
    /// Whether it panics at the end.
    panics: bool,
}

impl Listener for Brief {
    async fn init(&mut self, _: Cursor) -> Next {
        self.calls.send("init").unwrap();
        Next::Stop(StopReason::Failed("enough".into()))
    }

    async fn handle_event(&mut self, _: Delivery) -> Next {
        self.calls.send("event").unwrap();
        Next::Continue
    }

    async fn terminate(&mut self, _: &StopReason) {
        self.calls.send("terminate").unwrap();
        assert!(!self.panics, "as planned");
    }
}

#[tokio::test(start_paused = true)]
async fn a_listener_can_end_at_its_beginning_and_panic_at_its_end() {
    for panics in [false, true] {
        let fixture = SubscriberFixture::new().await;
        let (calls, mut heard) = unbounded_channel();
        let make = move || Brief { calls: calls.clone(), panics };
        let handle = fixture.dispatcher.subscribe(Filter::all()).listener(make).start();
        assert_eq!(within("its end", handle.finished()).await, StopReason::Failed("enough".into()));
        assert_eq!([heard.recv().await, heard.recv().await], [Some("init"), Some("terminate")]);
    }
}

/// Regression: a listener's report of its progress woke its own supervisor. While anybody waited for a position that the listener had
/// not reached, such as one of its next round, the supervisor never rested, and paused time stood still.
#[test]
fn a_listener_rests_while_a_caller_waits_for_it() {
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_all().start_paused(true).build().unwrap().block_on(async {
            let fixture = SubscriberFixture::new().await;
            let subscriber =
                fixture.dispatcher.subscribe(Filter::all()).every(Duration::from_secs(30)).unwrap();
            let listener = subscriber.listener(|| Quiet).start();
            for kind in [EventKind::Created, EventKind::Updated] {
                let sequence = fixture.folded(&db("a", 1), kind).await;
                assert!(listener.reached(sequence).await);
            }
        });
        done.send(()).unwrap();
    });
    // Real time, since that of the other thread stands still when the test fails.
    ended.recv_timeout(Duration::from_mins(1)).expect("the second round has come");
}

/// Waits in its work on `gate`, and when it expires.
struct Slow {
    is_new: bool,
    goes_on: Arc<Notify>,
    has_expired: Arc<Notify>,
    forgets: Arc<Notify>,
}

impl Listener for Slow {
    async fn handle_event(&mut self, delivery: Delivery) -> Next {
        if delivery.notification().name.as_str() == "gate" && !self.is_new {
            self.goes_on.notified().await;
        }
        Next::Continue
    }

    async fn handle_interruption(&mut self, interruption: Interruption) -> Next {
        if let Interruption::Expired { .. } = interruption {
            self.is_new = true;
            self.has_expired.notify_one();
            self.forgets.notified().await;
        }
        Next::Continue
    }
}

/// Regression: a barrier had passed, and nobody waited any more when the listener expired. So the next barrier for the same position passed at
/// once, while the listener forgot everything.
#[tokio::test(start_paused = true)]
async fn no_barrier_passes_at_what_was_forgotten_while_nobody_waited() {
    for is_awaited in [true, false] {
        let options = DispatcherOptions::default().ring_rows_max(1);
        let fixture = SubscriberFixture::with(options).await;
        let known = fixture.event(&db("x", 1), EventKind::Created).await;
        let [goes_on, has_expired, forgets]: [Arc<Notify>; 3] = array::from_fn(|_| Arc::default());
        let slow = {
            let (goes_on, has_expired, forgets) =
                (Arc::clone(&goes_on), Arc::clone(&has_expired), Arc::clone(&forgets));
            move || Slow {
                is_new: false,
                goes_on: Arc::clone(&goes_on),
                has_expired: Arc::clone(&has_expired),
                forgets: Arc::clone(&forgets),
            }
        };
        let handle = fixture.dispatcher.subscribe(Filter::all()).since(known).listener(slow).start();
        fixture.events(&["b"], EventKind::Created).await;
        let version = commit(&fixture.bus, &db("a", 1), EventKind::Created).await;
        let at = fixture.dispatcher.reached(version).await.unwrap();
        assert!(within("the barrier", handle.reached(at)).await);
        fixture.events(&["gate"], EventKind::Created).await;
        fixture.events(&["b"], EventKind::Deleted).await;
        fixture.events(&["c", "d"], EventKind::Created).await;
        forget(&fixture.bus).await;
        let later = handle.clone();
        let waits = is_awaited.then(|| tokio::spawn(async move { later.reached(Sequence::MAX).await }));
        tokio::task::yield_now().await;
        goes_on.notify_one();
        within("the expiry", has_expired.notified()).await;
        // It has to forget everything, and knows nothing until its scan is complete.
        let passed = handle.reached(at).now_or_never();
        assert_eq!(passed, None, "somebody waits: {is_awaited}");
        forgets.notify_one();
        assert!(within("the barrier again", handle.reached(at)).await);
        drop(waits);
    }
}
