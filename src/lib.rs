//! A transactional notification bus for database-level events.
//!
//! Whoever builds a document database, or any layer of many databases, on FoundationDB has to know when databases are
//! created, deleted, updated or get a new design document. Here producers record events inside the very transaction that
//! causes them; a notifier folds them into a feed in which each database has exactly one row; a dispatcher tells
//! subscribers in the process. Nothing is lost, and nothing is polled while idle but a hint's fallback.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
//! use notibus::{Bus, BusOptions, Db, DbInstance, Filter, store::Database};
//! use tokio_stream::StreamExt;
//!
//! let store = Database::memory();
//! let bus = Bus::open(&store, BusOptions::default()).await?;
//! let notifier = bus.notifier(Default::default()).await?;
//! let dispatcher = bus.dispatcher(Default::default()).await?;
//! let mut updates = dispatcher.subscribe(Filter::suffix("orders")).stream();
//!
//! let producer = bus.producer();
//! let db = Db::new("shop/orders".parse()?, DbInstance::random(store.env()));
//! store.run(async |tx| Ok(producer.created(&tx, &db))).await?;
//!
//! let delivery = updates.next().await.expect("the dispatcher runs").expect("nothing interrupts");
//! assert_eq!(delivery.notification().name.as_str(), "shop/orders");
//! notifier.shutdown().await
//! # }
//! ```
//!
//! The design, layer by layer, is in `ARCHITECTURE.md`.

mod base;
mod bus;
mod front;
mod roles;
mod state;
pub mod store;

#[cfg(feature = "http")]
pub use front::http;
#[cfg(feature = "simulation")]
pub use front::simulation;

#[cfg(feature = "mutations")]
pub use base::bugs::Bug;
pub use base::cursor::{Cursor, Knowledge, Start};
pub use base::encoding::{Counters, Incarnation, Sequence, Tally, Versionstamp};
pub use base::env::{Env, Environment};
pub use base::error::{Error, Result, StoreError};
pub use base::event::{Db, DbInstance, DbName, DdocId, EventKind, Kinds, NAME_LEN_MAX};
pub use base::notification::{News, Notification, Replaced};
pub use bus::{Announced, Bus, BusOptions, Node};
pub use roles::changes::{
    Change, ChangeRow, Changes, ChangesOptions, ChangesPage, ChangesQuery, ChangesTail, ChangesWriter,
    DOC_ID_LEN_MAX, DocId, DocSource, DocSummary, Leaf, PendingSequence, Revision,
};
pub use roles::dispatcher::{
    BatchSubscription, CallbackHandle, CastError, Delivery, DeliveryBatch, DeliveryIter, DeliveryRef,
    Dispatcher, DispatcherOptions, Fanout, Filter, Interruption, Listen, Listener, ListenerHandle, Message,
    Mirror, MirrorView, Missed, Next, Parent, RestartPolicy, StopReason, Subscribe, SubscriberId,
    Subscription, Supervised, Supervision, SupervisionEvents, SuspendedDispatcher,
};
pub use roles::group::{
    CheckpointPolicy, CheckpointState, Checkpointer, CloseReason, Consumer, ConsumerOptions, DeadLetter,
    DeadLetterInfo, FailurePolicy, Group, GroupBatch, GroupOptions, GroupStatus, GroupTrouble, LAG_ROWS_MAX,
    Observer, ObserverResult, Replayed, ShardLag, ShardStatus,
};
pub use roles::janitor::{Janitor, JanitorOptions};
pub use roles::jobs::{
    Batch, Fence, IndexBuild, IndexDdocs, ParallelJob, ParallelJobOptions, ParkedDb, Scan, ScanReporter,
    StoredTrigger, TaskResult, Trigger, TriggerJob, TriggerOptions, TriggerStatus, index_trigger,
    replication_trigger,
};
pub use roles::notifier::{Notifier, NotifierOptions};
pub use roles::producer::{EventTarget, Producer, ProducerOptions, Receipt};
pub use state::feed::{
    Feed, FeedPage, FeedRow, Resharded, ShardEvent, ShardPage, ShardReader, TopologyEntry,
};
pub use state::keys::{CURSOR_NAME_LEN_MAX, GROUP_NAME_LEN_MAX, GroupName, NodeId, Role, ShardId};
pub use state::membership::{BalanceOptions, NodeOptions, NodeStatus};
pub use state::named_cursor::NamedCursor;
pub use state::notification_feed::{ChangedDdocs, NotificationFeed, NotificationPage, NotificationTail};
pub use state::routing::{HashingScheme, SchemeId, Schemes};
pub use state::skipped::SkippedRow;
pub use state::stats::StatsSnapshot;
