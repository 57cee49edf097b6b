//! The wake protocol of the dispatcher, checked at small sizes. The model checker tries each interleaving that the memory model allows of a
//! tail, some subscribers and what ends them, with at most three preemptions; for one subscriber and one batch, it tries every
//! interleaving. No batch is lost or delivered twice, and no wake is lost: a subscriber that sleeps although something waits for it
//! deadlocks, which the model checker reports.
//!
//! The checked code is `src/roles/dispatcher/log.rs` itself, with the types of the model checker instead of those of the standard
//! library. The ring is only two counters here, because the protocol needs nothing but its beginning and its end. Reading the feed means
//! knowing everything before the beginning of the ring and of the log.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "the protocol is used in part")]

mod sync {
    pub use std::sync::PoisonError;

    pub use loom::sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
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
    /// The number of the first batch in the ring.
    begin: AtomicU64,
    /// The number after the last batch in the ring, which all logs have.
    end: AtomicU64,
}

impl WakeModel {
    fn new() -> Arc<Self> {
        Arc::new(Self { log: Log::new(0), begin: AtomicU64::new(0), end: AtomicU64::new(0) })
    }

    /// Does what the tail does with the batch `number`; `matches` says whether the pattern matches it.
    fn put(&self, number: u64, matches: bool) {
        let mut woken = Vec::new();
        if matches {
            self.log.append(number, [number, 0], 1, number, &mut woken);
        }
        self.end.store(number + 1, Ordering::Release);
        for subscriber in &woken {
            subscriber.waker.wake();
        }
    }

    /// Does what the tail does with the batch `number`, which pushes all before it out of the ring.
    fn put_last(&self, number: u64) {
        let mut woken = Vec::new();
        self.log.append(number, [number, 0], 1, number, &mut woken);
        self.begin.store(number, Ordering::Release);
        self.end.store(number + 1, Ordering::Release);
        self.log.prune(number);
        for subscriber in &woken {
            subscriber.waker.wake();
        }
    }

    /// Does what the tail does when it was away for too long. Returns the number of the next batch.
    fn expire(&self) -> u64 {
        let (next, mut woken) = (self.end.load(Ordering::Acquire) + 1, Vec::new());
        self.log.skip_to(next, &mut woken);
        self.begin.store(next, Ordering::Release);
        self.end.store(next, Ordering::Release);
        for subscriber in &woken {
            subscriber.waker.wake();
        }
        next
    }
}

/// What a subscriber received.
#[derive(Debug, PartialEq, Eq)]
struct Received {
    batches: Vec<u64>,
    /// Whenever nothing waited for it, or it was behind: a position up to which it knew everything, and how many batches it had received
    /// by then.
    known: Vec<(u64, usize)>,
    /// How many times the subscriber was behind, and read the feed.
    behind: usize,
}

/// Receives as `Reader` does, until `enough` batches have arrived or the subscriber is ended.
async fn receive(
    fixture: &WakeModel,
    subscriber: &Arc<SubscriberState>,
    mut batch_number: u64,
    enough: usize,
) -> Received {
    let mut received = Received { batches: Vec::new(), known: Vec::new(), behind: 0 };
    poll_fn(|context| {
        loop {
            if subscriber.is_ended() {
                return Poll::Ready(());
            }
            subscriber.waker.register(context.waker());
            match fixture.log.read_or_wait(batch_number, subscriber) {
                Ok(Entry { number, content, .. }) => {
                    assert_eq!(number, content);
                    batch_number = number + 1;
                    received.batches.push(number);
                    if received.batches.len() >= enough {
                        return Poll::Ready(());
                    }
                    continue;
                }
                Err(Empty::Nothing) => {}
                Err(Empty::Behind) => {
                    let [known, _] = fixture.log.taken_at(subscriber);
                    received.known.push((known, received.batches.len()));
                    batch_number = fixture.begin.load(Ordering::Acquire).max(fixture.log.begin());
                    received.behind += 1;
                    continue;
                }
            }
            let end = fixture.end.load(Ordering::Acquire);
            if !fixture.log.has_entries(batch_number) {
                batch_number = batch_number.max(end);
                // Rows that the subscriber read in the feed are not among the batches.
                if received.behind == 0 {
                    received.known.push((end, received.batches.len()));
                }
            }
            if subscriber.is_ended() {
                continue;
            }
            return Poll::Pending;
        }
    })
    .await;
    received
}

/// Receives `enough` batches from the first one on, as a new subscriber.
fn receive_as_new(fixture: &WakeModel, enough: usize) -> Received {
    block_on(receive(fixture, &Arc::new(SubscriberState::default()), 0, enough))
}

/// Does `work` in another thread.
fn spawn<T: 'static>(
    fixture: &Arc<WakeModel>,
    work: impl FnOnce(&WakeModel) -> T + 'static,
) -> thread::JoinHandle<T> {
    let fixture = Arc::clone(fixture);
    thread::spawn(move || work(&fixture))
}

/// Fails unless every batch before a known position had been delivered by then.
fn check_known(received: &Received, matching: &[u64]) {
    for (known, had) in &received.known {
        let owed = matching.iter().filter(|number| *number < known).count();
        assert!(owed <= *had, "{known} was known after {had} of {matching:?}");
    }
}

/// Tries all interleavings of `model` with at most three needless preemptions of a thread. Bugs in such protocols appear with two, and all
/// interleavings of three threads would take hours.
fn check(model: impl Fn() + Sync + Send + 'static) {
    check_up_to(Some(3), model);
}

fn check_up_to(preemptions: Option<usize>, model: impl Fn() + Sync + Send + 'static) {
    let mut checker = loom::model::Builder::new();
    checker.preemption_bound = preemptions;
    checker.check(model);
}

/// Each interleaving, however many preemptions it has.
#[test]
fn one_batch_reaches_one_subscriber_in_each_interleaving() {
    check_up_to(None, || {
        let fixture = WakeModel::new();
        let tail = spawn(&fixture, |fixture| fixture.put(0, true));
        let received = receive_as_new(&fixture, 1);
        assert_eq!((&received.batches[..], received.behind), (&[0][..], 0));
        check_known(&received, &[0]);
        tail.join().unwrap();
    });
}

/// Whatever was pruned before the subscriber looked, it knows everything before the entry that took it off the list, and no more than that.
#[test]
fn one_that_was_taken_off_the_list_by_a_pruned_entry_knows_what_was_before_it() {
    check(|| {
        let fixture = WakeModel::new();
        let tail = spawn(&fixture, |fixture| {
            fixture.put(0, false);
            fixture.put(1, true);
            fixture.put_last(2);
        });
        let subscriber = Arc::new(SubscriberState::default());
        // Either it receives both batches, or it is behind and reads the first one in the feed.
        let mut received = Received { batches: Vec::new(), known: Vec::new(), behind: 0 };
        let mut batch_number = 0;
        while received.batches.last() != Some(&2) {
            let more = block_on(receive(&fixture, &subscriber, batch_number, 1));
            batch_number = more.batches.last().map_or(batch_number, |number| number + 1);
            let had = received.batches.len();
            if received.behind == 0 {
                received.known.extend(more.known.iter().map(|(known, count)| (*known, had + count)));
            }
            received.batches.extend(more.batches);
            received.behind += more.behind;
        }
        if received.behind == 0 {
            assert_eq!(received.batches, [1, 2]);
        } else {
            assert_eq!(received.batches.iter().filter(|number| **number == 2).count(), 1);
        }
        // The subscriber's known position never includes the batch that it missed.
        check_known(&received, &[1, 2]);
        tail.join().unwrap();
    });
}

/// A laggard that skips continues at the new start of the ring, and misses no wake-up there.
#[test]
fn one_that_is_skipped_ahead_receives_what_comes_next() {
    check(|| {
        let fixture = WakeModel::new();
        let tail = spawn(&fixture, |fixture| {
            fixture.put(0, true);
            let next = fixture.expire();
            fixture.put(next, true);
        });
        let subscriber = Arc::new(SubscriberState::default());
        let first = block_on(receive(&fixture, &subscriber, 0, 1));
        let mut batches = first.batches.clone();
        if batches == [0] {
            let rest = block_on(receive(&fixture, &subscriber, 1, 1));
            assert_eq!(rest.behind, 1, "it was in the ring of before");
            batches.extend(rest.batches);
        }
        assert_eq!(batches.last(), Some(&2));
        assert!(batches.len() == 2 || first.behind > 0);
        tail.join().unwrap();
    });
}

#[test]
fn one_that_is_ended_does_not_sleep_on() {
    check(|| {
        let fixture = WakeModel::new();
        let subscriber = Arc::new(SubscriberState::default());
        let ended = Arc::clone(&subscriber);
        let tail = spawn(&fixture, move |fixture| {
            fixture.put(0, true);
            ended.end();
            ended.waker.wake();
        });
        let received = block_on(receive(&fixture, &subscriber, 0, usize::MAX));
        assert!(received.batches.is_empty() || received.batches == [0]);
        check_known(&received, &[0]);
        tail.join().unwrap();
    });
}

/// A subscriber that only checks whether it must wait, and takes nothing yet, is woken by the next append.
#[test]
fn one_that_only_looks_whether_it_waits_is_woken() {
    check(|| {
        let fixture = WakeModel::new();
        let tail = spawn(&fixture, |fixture| {
            fixture.put(0, true);
            fixture.put(1, true);
        });
        let subscriber = Arc::new(SubscriberState::default());
        for batch_number in 0..2 {
            block_on(poll_fn(|context| {
                subscriber.waker.register(context.waker());
                let waits = fixture.log.wait(batch_number, &subscriber);
                if waits { Poll::Pending } else { Poll::Ready(()) }
            }));
            let entry = fixture.log.read_or_wait(batch_number, &subscriber).unwrap();
            assert_eq!(entry.number, batch_number);
        }
        tail.join().unwrap();
    });
}

#[test]
fn no_batch_and_no_wake_is_lost() {
    check(|| {
        let fixture = WakeModel::new();
        let tail = spawn(&fixture, |fixture| {
            fixture.put(0, true);
            fixture.put(1, true);
        });
        let received = receive_as_new(&fixture, 2);
        assert_eq!(received.batches, [0, 1]);
        check_known(&received, &[0, 1]);
        tail.join().unwrap();
    });
}

#[test]
fn one_that_is_matched_now_and_then_is_never_said_to_know_more_than_it_was_delivered() {
    check(|| {
        let fixture = WakeModel::new();
        let tail = spawn(&fixture, |fixture| {
            fixture.put(0, false);
            fixture.put(1, true);
        });
        let received = receive_as_new(&fixture, 1);
        assert_eq!(received.batches, [1]);
        check_known(&received, &[1]);
        tail.join().unwrap();
    });
}

#[test]
fn all_subscribers_of_a_pattern_are_woken() {
    check(|| {
        let fixture = WakeModel::new();
        let receivers: Vec<_> =
            (0..2).map(|_| spawn(&fixture, |fixture| receive_as_new(fixture, 1).batches)).collect();
        fixture.put(0, true);
        for receiver in receivers {
            assert_eq!(receiver.join().unwrap(), [0]);
        }
    });
}

#[test]
fn one_that_leaves_takes_no_other_off_the_list() {
    check(|| {
        let fixture = WakeModel::new();
        let leaver = Arc::new(SubscriberState::default());
        assert_eq!(fixture.log.read_or_wait(0, &leaver), Err(Empty::Nothing));
        let stayer = spawn(&fixture, |fixture| receive_as_new(fixture, 1).batches);
        let tail = spawn(&fixture, |fixture| fixture.put(0, true));
        fixture.log.leave(&leaver);
        tail.join().unwrap();
        assert_eq!(stayer.join().unwrap(), [0]);
    });
}
