//! Listeners: how they begin, how they are called, and how they end.

use std::{
    array,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::FutureExt;
use notibus::{
    Cursor, Delivery, DispatcherOptions, Error, EventKind, Filter, Sequence,
    cursor::Start,
    dispatcher::{CastError, Interruption, Listener, ListenerHandle, Message, Next, Parent, StopReason},
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
    type Message = ();

    async fn handle_event(&mut self, _: Delivery) -> Next {
        Next::Continue
    }
}

/// Records the names of delivered databases.
pub struct Recorder(pub Arc<Mutex<Vec<String>>>);

impl Listener for Recorder {
    type Message = ();

    async fn handle_event(&mut self, delivery: Delivery) -> Next {
        self.0.lock().unwrap().push(name(&delivery).to_owned());
        Next::Continue
    }
}

/// Reports every call, and returns the [`Next`] that the name of the database, or the message, selects.
pub struct CallReporter(pub UnboundedSender<String>);

impl CallReporter {
    fn next(text: &str) -> Next {
        match text {
            "normal" => Next::Stop(StopReason::Normal),
            "failed" => Next::Stop(StopReason::Failed("no disk".into())),
            "wait" => Next::ContinueFor(Duration::from_secs(5)),
            "panic" => panic!("as planned"),
            _ => Next::Continue,
        }
    }

    fn report(&self, call: impl Into<String>) {
        let _ = self.0.send(call.into());
    }
}

impl Listener for CallReporter {
    type Message = &'static str;

    async fn init(&mut self, position: Cursor) -> Next {
        self.report(format!("init {}", !position.knew_nothing()));
        Next::Continue
    }

    async fn handle_event(&mut self, delivery: Delivery) -> Next {
        self.report(format!("event {} {:?}", name(&delivery), kinds(&delivery)));
        Self::next(name(&delivery))
    }

    async fn handle_message(&mut self, message: Message<&'static str>) -> Next {
        match message {
            Message::Cast(text) => {
                self.report(format!("cast {text}"));
                Self::next(text)
            }
            Message::Info(any) => {
                let text = any.downcast_ref::<&str>().copied().unwrap_or("unknown");
                self.report(format!("info {text}"));
                Self::next(text)
            }
            Message::Interrupted(Interruption::Lagged { .. }) => {
                self.report("lagged");
                Next::Continue
            }
            other => {
                self.report(format!("{other:?}"));
                Next::Continue
            }
        }
    }

    async fn timeout(&mut self) -> Next {
        self.report("timeout");
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
    let handle = fixture.dispatcher.subscribe(Filter::all()).listener(factory).start().unwrap();
    assert_eq!(next_call(&mut calls).await, "init true");
    fixture.event(&db("a", 1), EventKind::Created).await;
    assert_eq!(next_call(&mut calls).await, "event a [Created]");
    handle.cast("hello").await.unwrap();
    assert_eq!(next_call(&mut calls).await, "cast hello");
    handle.try_cast("again").unwrap();
    assert_eq!(next_call(&mut calls).await, "cast again");
    assert!(handle.info("news").await && handle.info(42).await);
    assert_eq!([next_call(&mut calls).await, next_call(&mut calls).await], ["info news", "info unknown"]);
    assert_eq!(handle.stop().await, StopReason::Shutdown);
    assert_eq!(next_call(&mut calls).await, "terminate shutdown");
    assert!(calls.recv().await.is_none(), "nothing is called after it");
    assert_eq!(fixture.dispatcher.subscribers(), 0);
    assert!(matches!(handle.cast("late").await, Err(CastError::Ended("late"))));
    assert!(matches!(handle.try_cast("late"), Err(CastError::Ended("late"))));
    assert!(!handle.info("late").await && handle.is_finished());
    assert_eq!(handle.stop().await, StopReason::Shutdown, "again");
}

#[tokio::test(start_paused = true)]
async fn a_listener_stops_for_a_reason_of_its_own() {
    for (by, reason) in [("normal", StopReason::Normal), ("failed", StopReason::Failed("no disk".into()))] {
        for by_message in [false, true] {
            let fixture = SubscriberFixture::new().await;
            let (factory, mut calls) = call_reporters();
            let handle = fixture.dispatcher.subscribe(Filter::all()).listener(factory).start().unwrap();
            next_call(&mut calls).await;
            if by_message {
                handle.cast(by).await.unwrap();
            } else {
                fixture.event(&db(by, 1), EventKind::Created).await;
            }
            assert_eq!(within("its end", handle.finished()).await, reason);
            next_call(&mut calls).await;
            assert_eq!(next_call(&mut calls).await, format!("terminate {reason}"));
            assert_eq!(fixture.dispatcher.subscribers(), 0);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_timeout_comes_if_nothing_else_does_and_once() {
    let fixture = SubscriberFixture::new().await;
    let (factory, mut calls) = call_reporters();
    let handle = fixture.dispatcher.subscribe(Filter::all()).listener(factory).start().unwrap();
    next_call(&mut calls).await;
    handle.cast("wait").await.unwrap();
    next_call(&mut calls).await;
    let began = Instant::now();
    assert_eq!(next_call(&mut calls).await, "timeout");
    assert_eq!(began.elapsed().as_secs(), 5);
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert!(calls.try_recv().is_err(), "once");
    // A message in between ends the wait.
    handle.cast("wait").await.unwrap();
    next_call(&mut calls).await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    fixture.event(&db("a", 1), EventKind::Created).await;
    assert_eq!(next_call(&mut calls).await, "event a [Created]");
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert!(calls.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn a_linked_listener_ends_when_its_parent_drops_or_ends() {
    let fixture = SubscriberFixture::new().await;
    let subscribe = || fixture.dispatcher.subscribe(Filter::all());
    let ended = async |handle: &ListenerHandle<()>| within("its end", handle.finished()).await;
    let parent = Parent::new();
    let child = subscribe().listener(|| Quiet).start_linked(&parent).unwrap();
    let other = parent.clone();
    drop(parent);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!child.is_finished(), "a clone is left");
    drop(other);
    assert_eq!(ended(&child).await, StopReason::ParentEnded);
    // A listener can be the parent of another one: when it ends, or its handle is dropped.
    for drops in [false, true] {
        let parent = subscribe().listener(|| Quiet).start().unwrap();
        let child = subscribe().listener(|| Quiet).start_linked(parent.parent()).unwrap();
        let grandchild = subscribe().listener(|| Quiet).start_linked(child.parent()).unwrap();
        if drops {
            drop(parent);
        } else {
            parent.stop().await;
        }
        assert_eq!(ended(&child).await, StopReason::ParentEnded);
        assert_eq!(ended(&grandchild).await, StopReason::ParentEnded);
    }
}

#[tokio::test(start_paused = true)]
async fn a_listener_that_is_not_linked_outlives_its_handle() {
    let fixture = SubscriberFixture::new().await;
    let (factory, mut calls) = call_reporters();
    drop(fixture.dispatcher.subscribe(Filter::all()).listener(factory).start().unwrap());
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

#[tokio::test(start_paused = true)]
async fn a_name_is_for_one_listener_at_a_time() {
    let fixture = SubscriberFixture::new().await;
    let dispatcher = &fixture.dispatcher;
    let (factory, mut calls) = call_reporters();
    let named = |factory| dispatcher.subscribe(Filter::all()).listener(factory).named("cache").unwrap();
    let first = named(factory).start().unwrap();
    assert_eq!(first.name(), Some("cache"));
    next_call(&mut calls).await;
    let (again, _) = call_reporters();
    let refused = dispatcher.subscribe(Filter::all()).listener(again).named("cache").unwrap().start();
    assert!(matches!(refused, Err(Error::Invalid { what: "listener name", .. })), "{refused:?}");
    assert_eq!(dispatcher.subscribers(), 1, "the second one was not registered");
    let found = dispatcher.listener::<&'static str>("cache").unwrap();
    assert_eq!(found.id(), first.id());
    found.cast("by name").await.unwrap();
    assert_eq!(next_call(&mut calls).await, "cast by name");
    assert_eq!(dispatcher.stop_listener("cache").await.unwrap(), StopReason::Shutdown);
    assert_eq!(next_call(&mut calls).await, "terminate shutdown");
    until("the name to be free", async || dispatcher.listener::<&'static str>("cache").is_err()).await;
    let (factory, mut calls) = call_reporters();
    let second = dispatcher.subscribe(Filter::all()).listener(factory).named("cache").unwrap();
    let second = second.start().unwrap();
    next_call(&mut calls).await;
    assert_ne!(second.id(), first.id());
}

/// It is subscribed before it is initialised, so that it misses nothing meanwhile.
#[tokio::test(start_paused = true)]
async fn what_happens_during_init_is_not_missed() {
    /// Initialises slowly.
    struct Slow(CallReporter);

    impl Listener for Slow {
        type Message = ();

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
    let _handle = listen.start().unwrap();
    assert_eq!(next_call(&mut calls).await, "init");
    fixture.event(&db("a", 1), EventKind::Created).await;
    assert_eq!(next_call(&mut calls).await, "event a [Created]");
}

/// Its mailbox is bounded: a sender of too many messages has to wait, or gets an error.
#[tokio::test(start_paused = true)]
async fn senders_learn_of_a_full_mailbox() {
    let fixture = SubscriberFixture::new().await;
    let (factory, mut calls) = call_reporters();
    let listen = fixture.dispatcher.subscribe(Filter::all()).listener(factory);
    let handle = listen.messages_max(2).unwrap().start().unwrap();
    // It has had no turn yet.
    handle.try_cast("1").unwrap();
    handle.try_cast("2").unwrap();
    assert!(matches!(handle.try_cast("3"), Err(CastError::Full("3"))));
    handle.cast("4").await.unwrap();
    let all = [
        next_call(&mut calls).await,
        next_call(&mut calls).await,
        next_call(&mut calls).await,
        next_call(&mut calls).await,
    ];
    assert_eq!(all, ["init true", "cast 1", "cast 2", "cast 4"]);
}

#[tokio::test(start_paused = true)]
async fn a_listener_is_informed_of_skipped_rows() {
    let options = DispatcherOptions::default().ring_rows_max(2);
    let fixture = SubscriberFixture::with(options).await;
    let (factory, mut calls) = call_reporters();
    let subscribe = fixture.dispatcher.subscribe(Filter::all()).skip_when_lagging();
    let slow = subscribe.every(Duration::from_mins(1)).unwrap();
    let _handle = slow.listener(factory).start().unwrap();
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
        type Message = ();

        async fn handle_event(&mut self, _: Delivery) -> Next {
            std::future::pending().await
        }
    }
    let fixture = SubscriberFixture::new().await;
    let handle = fixture.dispatcher.subscribe(Filter::all()).listener(|| Stuck).start().unwrap();
    fixture.event(&db("a", 1), EventKind::Created).await;
    let began = Instant::now();
    within("the shutdown", fixture.dispatcher.shutdown()).await;
    assert!(began.elapsed() < Duration::from_mins(1));
    assert_eq!(within("its end", handle.finished()).await, StopReason::Shutdown);
}

/// Regression: if the handle on a listener was found after all others were dropped, listeners that were linked through it did not end
/// with it.
#[tokio::test(start_paused = true)]
async fn a_child_of_a_listener_that_was_found_by_its_name_ends_with_it() {
    let fixture = SubscriberFixture::new().await;
    let listen = || fixture.dispatcher.subscribe(Filter::all()).listener(|| Quiet);
    drop(listen().named("parent").unwrap().start().unwrap());
    let found = fixture.dispatcher.listener::<()>("parent").unwrap();
    let child = listen().start_linked(found.parent()).unwrap();
    found.stop().await;
    assert_eq!(within("its end", child.finished()).await, StopReason::ParentEnded);
}

/// Regression: a listener that panicked on `Lagged` was restarted, and never got it again.
#[tokio::test(start_paused = true)]
async fn an_interruption_that_a_listener_panics_on_is_given_again() {
    /// Panics on its first message.
    struct Panics(UnboundedSender<String>, Arc<Mutex<bool>>);

    impl Listener for Panics {
        type Message = ();

        async fn handle_event(&mut self, _: Delivery) -> Next {
            Next::Continue
        }

        async fn handle_message(&mut self, message: Message<()>) -> Next {
            assert!(std::mem::replace(&mut *self.1.lock().unwrap(), true), "the first");
            self.0.send(format!("{message:?}")).unwrap();
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
        let listener = subscribe.listener(factory).start().unwrap();
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
    handle: Arc<Mutex<Option<ListenerHandle<()>>>>,
    calls: UnboundedSender<String>,
}

impl Listener for OwnEnd {
    type Message = ();

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
    let listener = fixture.dispatcher.subscribe(Filter::all()).listener(factory).start().unwrap();
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

/// Reports every call, and returns the scripted [`Next`].
struct Scripted {
    calls: UnboundedSender<&'static str>,
    /// Returned when it begins.
    begins: Next,
    /// Returned after a timeout, the last one first.
    timeouts: Vec<Next>,
    /// Whether it panics at the end.
    panics: bool,
}

impl Listener for Scripted {
    type Message = ();

    async fn init(&mut self, _: Cursor) -> Next {
        self.calls.send("init").unwrap();
        self.begins.clone()
    }

    async fn handle_event(&mut self, _: Delivery) -> Next {
        self.calls.send("event").unwrap();
        Next::ContinueFor(Duration::from_secs(7))
    }

    async fn timeout(&mut self) -> Next {
        self.calls.send("timeout").unwrap();
        self.timeouts.pop().unwrap()
    }

    async fn terminate(&mut self, _: &StopReason) {
        self.calls.send("terminate").unwrap();
        assert!(!self.panics, "as planned");
    }
}

/// Each call can return what is wanted next, even the first one and a timeout.
#[tokio::test(start_paused = true)]
async fn every_call_says_what_is_wanted_next() {
    let fixture = SubscriberFixture::new().await;
    let start = |begins: Next, timeouts: Vec<Next>, panics| {
        let (calls, heard) = unbounded_channel();
        let make = move || Scripted {
            calls: calls.clone(),
            begins: begins.clone(),
            timeouts: timeouts.clone(),
            panics,
        };
        (fixture.dispatcher.subscribe(Filter::all()).listener(make).start().unwrap(), heard)
    };
    let stop = Next::Stop(StopReason::Failed("enough".into()));
    let wait = |seconds| Next::ContinueFor(Duration::from_secs(seconds));
    // It ends even if it panics in `terminate`.
    for panics in [false, true] {
        let (handle, mut heard) = start(stop.clone(), Vec::new(), panics);
        assert_eq!(within("its end", handle.finished()).await, StopReason::Failed("enough".into()));
        assert_eq!([heard.recv().await, heard.recv().await], [Some("init"), Some("terminate")]);
    }
    let (handle, mut heard) = start(wait(3), vec![stop, wait(5)], false);
    let began = Instant::now();
    let mut times = Vec::new();
    for _ in 0..4 {
        times.push((within("a call", heard.recv()).await.unwrap(), began.elapsed().as_secs()));
    }
    assert_eq!(within("its end", handle.finished()).await, StopReason::Failed("enough".into()));
    assert_eq!(times, [("init", 0), ("timeout", 3), ("timeout", 8), ("terminate", 8)]);
    let (_handle, mut heard) = start(Next::Continue, vec![Next::Continue], false);
    assert_eq!(heard.recv().await, Some("init"));
    fixture.event(&db("a", 1), EventKind::Created).await;
    assert_eq!(within("an event", heard.recv()).await, Some("event"));
    let began = Instant::now();
    assert_eq!(within("a timeout", heard.recv()).await, Some("timeout"));
    assert!((6.5..7.5).contains(&began.elapsed().as_secs_f64()), "{:?}", began.elapsed());
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
            let listener = subscriber.listener(|| Quiet).start().unwrap();
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
    type Message = ();

    async fn handle_event(&mut self, delivery: Delivery) -> Next {
        if delivery.notification().name.as_str() == "gate" && !self.is_new {
            self.goes_on.notified().await;
        }
        Next::Continue
    }

    async fn handle_message(&mut self, message: Message<()>) -> Next {
        if let Message::Interrupted(Interruption::Expired { .. }) = message {
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
        let handle = fixture.dispatcher.subscribe(Filter::all()).since(known).listener(slow).start().unwrap();
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
