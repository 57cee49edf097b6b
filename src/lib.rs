//! A transactional notification bus for database-level events.
//!
//! A document database, or any other layer with many databases on FoundationDB, needs to know when databases are created, deleted, updated
//! or get a new design document. With this crate, producers record events in the same transaction that causes them; a notifier folds the
//! events into a feed in which each database has exactly one row; a dispatcher delivers the rows to subscribers in the process. No event is
//! lost, and an idle bus polls only as a fallback for lost hints.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
//! use notibus::{Bus, BusOptions, Db, DbInstance, Filter, StartOptions, store::Store};
//! use tokio_stream::StreamExt;
//!
//! let store = Store::memory();
//! let bus = Bus::open(&store, BusOptions::default()).await?;
//! let running = bus.start(StartOptions::default()).await?;
//! let updates = running.dispatcher().subscribe(Filter::suffix("orders"));
//! let mut updates = updates.deliveries(|trouble| eprintln!("{trouble}"));
//!
//! let producer = bus.producer();
//! let db = Db::new("shop/orders".parse()?, DbInstance::new());
//! store.run(async |tx| Ok(producer.created(&tx, &db))).await?;
//!
//! let delivery = updates.next().await.expect("the dispatcher runs");
//! assert_eq!(delivery.notification().name.as_str(), "shop/orders");
//! running.shutdown().await
//! # }
//! ```
//!
//! # Which receiver do I want?
//!
//! | I want | receiver | guarantee | cost |
//! |---|---|---|---|
//! | events while the process runs | a stream, batches or a callback of a [`dispatcher`] | the news that it wants, or `Lagged`; nothing after a crash | memory only |
//! | to resume after a restart | a [`consumer`] | at least once; exactly once in the transaction of the effect | leases and checkpoints by shard |
//! | a cache that reads its own writes | a [`Mirror`](dispatcher::Mirror) | as new as the version that you ask for | the existing databases in memory |
//! | to share work among nodes | a member of a [`consumer`] on each | the same | the same |
//! | to build or replicate per database | the recipes of a [`consumer`] | every change leads to a later run | leases and checkpoints by shard, and a key per failing database |
//! | to process all documents of a database | a parallel job of a [`consumer`], on its [`changes`] | each document at least once | a read of its feed |
//!
//! `ARCHITECTURE.md` describes the design, layer by layer.

// On docs.rs the pages say which feature an item needs, which requires a nightly compiler.
#![cfg_attr(docsrs, feature(doc_cfg))]

/// Also runs, as doc tests, the programs in pages that do not document a module.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../docs/guide/recipes.md")]
    struct Recipes;
    #[doc = include_str!("../docs/guide/repair.md")]
    struct Repair;
}

mod base;
mod bus;
mod front;
mod roles;
mod state;
pub mod store;

#[cfg(feature = "http")]
pub use front::http;
#[cfg(feature = "test-util")]
pub use front::test_util;

pub use base::{
    cursor::Cursor,
    encoding::Sequence,
    error::{Error, Result},
    event::{Db, DbInstance, DbName, EventKind, Kinds},
    notification::Notification,
};
pub use bus::{
    Bus, BusOptions, Node,
    running::{NodeHandle, StartOptions},
};
pub use roles::{
    consumer::Consumer,
    dispatcher::{Delivery, Dispatcher, DispatcherOptions, Filter},
    janitor::{Janitor, JanitorOptions},
    notifier::{Notifier, NotifierOptions},
    producer::Producer,
};
pub use state::{exactly_once::CommittedOnce, membership::NodeOptions};

#[doc = include_str!("../docs/guide/subscribers.md")]
pub mod dispatcher {
    pub use crate::roles::{
        dispatcher::{
            BatchItem, BatchSubscription, CallbackHandle, Deliveries, Delivery, DeliveryBatch, DeliveryIter,
            DeliveryRef, Dispatcher, DispatcherOptions, Filter, Item, RestartPolicy, Subscribe, SubscriberId,
            Subscription, Trouble,
        },
        mirror::{Mirror, MirrorView},
    };
}

#[doc = include_str!("../docs/guide/consumers.md")]
pub mod consumer {
    pub use crate::{
        roles::consumer::{
            Batch, CloseReason, CommitState, ConsumedRow, Consumer, ConsumerBuilder, ConsumerHandle,
            ConsumerLag, ConsumerOptions, ConsumerSettings, ConsumerShard, ConsumerStatus, DbHandler,
            DeferredId, DeletedDb, FailurePolicy, FencingToken, Handler, HandlerResult, Index, IndexBuild,
            IndexDdocs, ParallelBatch, ParallelJob, ParallelJobOptions, Replicate, Run, Scan, Work, index,
            replicate,
        },
        state::{failing::ShardFailure, keys::ConsumerName},
    };
}

#[doc = include_str!("../docs/guide/changes.md")]
pub mod changes {
    pub use crate::roles::changes::{
        Change, ChangeRow, Changes, ChangesOptions, ChangesPage, ChangesQuery, ChangesTail, ChangesWriter,
        DocId, DocSource, DocSummary, Leaf, PendingSequence, Revision,
    };
}

#[doc = include_str!("../docs/guide/feeds.md")]
pub mod feed {
    pub use crate::state::{
        feed::{Feed, FeedPage, FeedRow, Resharded, ShardEvent, ShardPage, ShardReader, TopologyEntry},
        keys::ShardId,
        notification_feed::{ChangedDdocs, NotificationFeed, NotificationPage, NotificationTail},
        routing::{HashingScheme, SchemeId, Schemes},
        skipped::SkippedRow,
    };
}

#[doc = include_str!("../docs/guide/cursors.md")]
pub mod cursor {
    pub use crate::base::cursor::{Cursor, Knowledge, Start};
}

#[doc = include_str!("../docs/guide/events.md")]
pub mod event {
    pub use crate::base::{
        encoding::{Counters, Incarnation, Sequence, Tally, Versionstamp},
        event::{Db, DbInstance, DbName, DdocId, EventKind, Kinds},
        notification::{News, Notification, Replaced},
    };
}

#[doc = include_str!("../docs/guide/producers.md")]
pub mod producer {
    pub use crate::roles::producer::{EventTarget, Producer, ProducerOptions, Receipt};
}

#[doc = include_str!("../docs/guide/relocation.md")]
pub mod relocation {
    pub use crate::bus::{ExportOptions, Exported};
}

#[doc = include_str!("../docs/guide/nodes.md")]
pub mod node {
    pub use crate::{
        bus::{
            Node,
            running::{NodeHandle, StartOptions},
            snapshot::Unanswered,
            status::{BusStatus, ConsumerReport, FeedStatus},
        },
        roles::notifier::{Backlog, PartitionBacklog},
        state::{
            keys::{NodeId, Role},
            membership::{BalanceOptions, NodeOptions, NodeStatus, RoleGuard},
            stats::StatsSnapshot,
        },
    };
}
