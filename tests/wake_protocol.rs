//! The wake protocol of the dispatcher, checked at small sizes. The model checker tries each interleaving of a tail, some subscribers
//! and a closing dispatcher with at most three preemptions that the memory model allows. No batch is lost or delivered twice, and no
//! wake is lost: a subscriber that sleeps although something waits for it deadlocks, which the model checker reports.
//!
//! The checked code is `src/roles/dispatcher/log.rs` itself, with the types of the model checker instead of those of the standard
//! library. The ring is only a counter here, because the protocol needs nothing but its end.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "the protocol is used in part")]

mod sync {
    pub use std::sync::PoisonError;

    pub use loom::sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering},
    };

    /// The checker's waker cell, with the interface that the protocol uses.
    #[derive(Default)]
    pub struct AtomicWaker(loom::future::AtomicWaker);

    impl AtomicWaker {
        pub fn new() -> Self {
            Self(loom::future::AtomicWaker::new())
        }

        pub fn register(&self, waker: &std::task::Waker) {
            self.0.register_by_ref(waker);
        }

        pub fn wake(&self) {
            self.0.wake();
        }
    }
}

#[path = "../src/roles/dispatcher/log.rs"]
mod log;

use std::{future::poll_fn, task::Poll};

use loom::{future::block_on, thread};

use self::{
    log::{Empty, Entry, Log, SubscriberState},
    sync::{Arc, AtomicU64, Ordering},
};

/// The part of a dispatcher that the protocol needs.
struct WakeModel {
    /// The log of a pattern. Its entries are the numbers of their batches.
    log: Log<u64>,
    /// The number after the last batch in the ring, which all logs have.
    end: AtomicU64,
}

impl WakeModel {
    fn new() -> Arc<Self> {
        Arc::new(Self { log: Log::new(0), end: AtomicU64::new(0) })
    }

    /// Does what the tail does with the batch `number`; `matches` says whether the pattern matches it.
    fn put(&self, number: u64, matches: bool) {
        let mut woken = Vec::new();
        if matches {
            self.log.append(number, [number, 0], number, &mut woken);
        }
        self.end.store(number + 1, Ordering::Release);
        for subscriber in &woken {
            subscriber.wake();
        }
    }

    /// Closes the dispatcher for `subscriber`.
    fn close(subscriber: &SubscriberState) {
        subscriber.close();
        subscriber.wake();
    }
}

/// The result of a subscriber.
#[derive(Debug, PartialEq, Eq)]
struct Received {
    batches: Vec<u64>,
    /// Whenever nothing waited for it: its position, and how many batches it had received by then.
    known: Vec<(u64, usize)>,
}

/// Receives as `Reader` does, until `enough` batches have come or the subscriber is closed.
async fn receive(
    world: &WakeModel,
    subscriber: &Arc<SubscriberState>,
    mut place: u64,
    enough: usize,
) -> Received {
    let mut received = Received { batches: Vec::new(), known: Vec::new() };
    poll_fn(|context| {
        loop {
            let was_closed = subscriber.is_closed();
            subscriber.register(context.waker());
            match world.log.read_or_wait(place, subscriber) {
                Ok(Entry { number, content, .. }) => {
                    assert_eq!(number, content);
                    place = number + 1;
                    received.batches.push(number);
                    if received.batches.len() >= enough {
                        return Poll::Ready(());
                    }
                    continue;
                }
                Err(Empty::Nothing) => {}
                Err(Empty::Behind) => panic!("nothing was pruned"),
            }
            let end = world.end.load(Ordering::Acquire);
            if !world.log.has_entries(place) {
                place = place.max(end);
                received.known.push((end, received.batches.len()));
            }
            if was_closed {
                return Poll::Ready(());
            }
            if subscriber.is_closed() != was_closed {
                continue;
            }
            return Poll::Pending;
        }
    })
    .await;
    received
}

/// Fails unless every batch before a known position had been delivered by then.
fn check_known(received: &Received, matching: &[u64]) {
    for (known, had) in &received.known {
        let owed = matching.iter().filter(|number| *number < known).count();
        assert!(owed <= *had, "{known} was known after {had} of {matching:?}");
    }
}

/// Tries all interleavings of `model` with at most three needless preemptions of a thread. Bugs of such
/// protocols appear with two, and all interleavings of three threads would take hours.
fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut checker = loom::model::Builder::new();
    checker.preemption_bound = Some(3);
    checker.check(model);
}

#[test]
fn no_batch_and_no_wake_is_lost() {
    check(|| {
        let world = WakeModel::new();
        let tail = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                world.put(0, true);
                world.put(1, true);
            })
        };
        let subscriber = Arc::new(SubscriberState::default());
        let received = block_on(receive(&world, &subscriber, 0, 2));
        assert_eq!(received.batches, [0, 1]);
        check_known(&received, &[0, 1]);
        tail.join().unwrap();
    });
}

#[test]
fn one_that_is_matched_now_and_then_is_never_said_to_know_more_than_it_was_delivered() {
    check(|| {
        let world = WakeModel::new();
        let tail = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                world.put(0, false);
                world.put(1, true);
            })
        };
        let subscriber = Arc::new(SubscriberState::default());
        let received = block_on(receive(&world, &subscriber, 0, 1));
        assert_eq!(received.batches, [1]);
        check_known(&received, &[1]);
        tail.join().unwrap();
    });
}

#[test]
fn all_subscribers_of_a_pattern_are_woken() {
    check(|| {
        let world = WakeModel::new();
        let receivers: Vec<_> = (0..2)
            .map(|_| {
                let world = Arc::clone(&world);
                thread::spawn(move || {
                    let subscriber = Arc::new(SubscriberState::default());
                    block_on(receive(&world, &subscriber, 0, 1)).batches
                })
            })
            .collect();
        world.put(0, true);
        for receiver in receivers {
            assert_eq!(receiver.join().unwrap(), [0]);
        }
    });
}

#[test]
fn what_waits_when_all_ends_is_delivered_and_nobody_sleeps_on() {
    check(|| {
        let world = WakeModel::new();
        let subscriber = Arc::new(SubscriberState::default());
        let tail = {
            let (world, subscriber) = (Arc::clone(&world), Arc::clone(&subscriber));
            thread::spawn(move || {
                world.put(0, true);
                WakeModel::close(&subscriber);
            })
        };
        let received = block_on(receive(&world, &subscriber, 0, usize::MAX));
        assert_eq!(received.batches, [0]);
        check_known(&received, &[0]);
        tail.join().unwrap();
    });
}

#[test]
fn one_that_leaves_takes_no_other_off_the_list() {
    check(|| {
        let world = WakeModel::new();
        let leaver = Arc::new(SubscriberState::default());
        assert_eq!(world.log.read_or_wait(0, &leaver), Err(Empty::Nothing));
        let stayer = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                let subscriber = Arc::new(SubscriberState::default());
                block_on(receive(&world, &subscriber, 0, 1)).batches
            })
        };
        let tail = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.put(0, true))
        };
        world.log.leave(&leaver);
        tail.join().unwrap();
        assert_eq!(stayer.join().unwrap(), [0]);
    });
}
