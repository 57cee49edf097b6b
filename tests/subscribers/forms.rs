//! Each of the four forms of receiver delivers, can be paced, and can be replaced.

use std::{collections::VecDeque, time::Duration};

use notibus::{
    Delivery, EventKind, Filter,
    dispatcher::{
        BatchItem, BatchSubscription, CallbackHandle, DeliveryBatch, Item, RestartPolicy, Subscribe,
        SubscriberId, Subscription,
    },
};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio_stream::StreamExt;

use crate::{
    common::{db, within},
    fixture::{SubscriberFixture, calls, kinds, name},
};

/// The name and the news of a delivery.
type Got = (String, Vec<EventKind>);

fn got(delivery: &Delivery) -> Got {
    (name(delivery).to_owned(), kinds(delivery))
}

fn all_of(batch: &DeliveryBatch) -> impl Iterator<Item = Got> {
    (0..batch.len()).map(|index| got(&batch.delivery(index)))
}

#[derive(Debug, Clone, Copy)]
enum ReceiverKind {
    Stream,
    Batches,
    Callback,
    BatchCallback,
}

const RECEIVER_KINDS: [ReceiverKind; 4] =
    [ReceiverKind::Stream, ReceiverKind::Batches, ReceiverKind::Callback, ReceiverKind::BatchCallback];

enum Receiver {
    Stream(Subscription),
    Batches(BatchSubscription, VecDeque<Got>),
    Callback(CallbackHandle, UnboundedReceiver<Got>),
}

impl ReceiverKind {
    fn start(self, subscribe: Subscribe) -> Receiver {
        let (sender, receiver) = unbounded_channel();
        match self {
            Self::Stream => Receiver::Stream(subscribe.stream()),
            Self::Batches => Receiver::Batches(subscribe.batches(), VecDeque::new()),
            Self::Callback => {
                let call = calls(move |item: Item| {
                    sender.send(got(&item.into_delivery().unwrap())).unwrap();
                    async {}
                });
                Receiver::Callback(subscribe.callback(RestartPolicy::default(), call).unwrap(), receiver)
            }
            Self::BatchCallback => {
                let call = calls(move |item: BatchItem| {
                    all_of(&item.into_delivery().unwrap()).for_each(|got| sender.send(got).unwrap());
                    async {}
                });
                Receiver::Callback(
                    subscribe.batch_callback(RestartPolicy::default(), call).unwrap(),
                    receiver,
                )
            }
        }
    }
}

impl Receiver {
    fn id(&self) -> SubscriberId {
        match self {
            Self::Stream(stream) => stream.id(),
            Self::Batches(stream, _) => stream.id(),
            Self::Callback(handle, _) => handle.id(),
        }
    }

    async fn next(&mut self) -> Got {
        match self {
            Self::Stream(stream) => got(&stream.next().await.unwrap().into_delivery().unwrap()),
            Self::Batches(stream, waiting) => {
                if waiting.is_empty() {
                    waiting.extend(all_of(&stream.next().await.unwrap().into_delivery().unwrap()));
                }
                waiting.pop_front().unwrap()
            }
            Self::Callback(_, receiver) => receiver.recv().await.unwrap(),
        }
    }

    /// Whether nothing arrives within `time`.
    async fn is_quiet(&mut self, time: Duration) -> bool {
        tokio::time::timeout(time, self.next()).await.is_err()
    }

    /// Returns a receiver of the same form with another filter, which starts at the cursor of this one. A callback is stopped first.
    async fn replace(self, form: ReceiverKind, fixture: &SubscriberFixture, filter: Filter) -> Self {
        form.start(match self {
            Self::Stream(stream) => stream.replace(filter),
            Self::Batches(stream, _) => stream.replace(filter),
            Self::Callback(handle, _) => {
                fixture.dispatcher.subscribe(filter).since(handle.stop().await.rewound())
            }
        })
    }

    async fn end(self) {
        match self {
            Self::Stream(stream) => drop(stream),
            Self::Batches(stream, _) => drop(stream),
            Self::Callback(handle, _) => drop(handle.stop().await),
        }
    }
}

fn expected(name: &str, kinds: impl Into<Vec<EventKind>>) -> Got {
    (name.to_owned(), kinds.into())
}

#[tokio::test(start_paused = true)]
async fn each_form_is_paced() {
    const PACE: Duration = Duration::from_hours(1);
    for form in RECEIVER_KINDS {
        let fixture = SubscriberFixture::new().await;
        let mut receiver = form.start(fixture.dispatcher.subscribe(Filter::all()).every(PACE).unwrap());
        fixture.event(&db("a", 1), EventKind::Created).await;
        assert_eq!(
            within("the first", receiver.next()).await,
            expected("a", [EventKind::Created]),
            "{form:?}"
        );
        for name in ["a", "b", "a", "a"] {
            fixture.event(&db(name, 1), EventKind::Updated).await;
        }
        assert!(receiver.is_quiet(PACE / 2).await, "{form:?}");
        tokio::time::sleep(PACE / 2).await;
        let round = [within("b", receiver.next()).await, within("a", receiver.next()).await];
        assert_eq!(round, ["b", "a"].map(|name| expected(name, [EventKind::Updated])), "{form:?}");
        assert!(receiver.is_quiet(2 * PACE).await, "{form:?}");
    }
}

/// This also checks that a receiver is removed once it has ended.
#[tokio::test(start_paused = true)]
async fn each_form_can_be_given_another_filter() {
    for form in RECEIVER_KINDS {
        let fixture = SubscriberFixture::new().await;
        let mut receiver = form.start(fixture.dispatcher.subscribe(Filter::name("a").unwrap()));
        fixture.event(&db("a", 1), EventKind::Created).await;
        assert_eq!(within("a", receiver.next()).await, expected("a", [EventKind::Created]), "{form:?}");
        let mut receiver = receiver.replace(form, &fixture, Filter::suffix("b")).await;
        assert_eq!(fixture.dispatcher.subscribers_of(&"a".parse().unwrap()), 0);
        for name in ["a", "b"] {
            fixture.event(&db(name, 1), EventKind::Updated).await;
        }
        assert_eq!(within("b", receiver.next()).await, expected("b", [EventKind::Updated]), "{form:?}");
        assert!(receiver.is_quiet(Duration::from_secs(5)).await, "{form:?}");
        let id = receiver.id();
        receiver.end().await;
        assert!(fixture.dispatcher.unsubscribe(id).is_err(), "{form:?}");
    }
}
