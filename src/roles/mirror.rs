//! [`Mirror`]: the newest row of every database, by name, in memory and kept up to date.

use std::{fmt, sync::Arc};

use imbl::OrdMap;
use tokio::sync::watch;

use super::dispatcher::{
    Delivery, DeliveryBatch, Dispatcher, Filter, Interruption, Listener, ListenerHandle, Next,
};
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        error::{Error, Result},
        event::DbName,
        notification::Notification,
    },
    state::context::Context,
};

/// Living databases by name, as they were at one time.
///
/// A clone is cheap, and does not change any more.
pub type MirrorView = OrdMap<DbName, Arc<Notification>>;

/// The newest row of every living database that a filter matches, by name, kept up to date by one writer. Reading it costs no
/// I/O and never waits. Dropping it stops the updates.
///
/// It fills until its first scan is complete ([`Mirror::synced`]). If it was cut off for so long that it may have missed deletions, it
/// is filled again in the background; the old view stays until that is complete.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::{Bus, BusOptions, Db, DbInstance, Filter, Roles, store::Database};
///
/// let store = Database::memory();
/// let bus = Bus::open(&store, BusOptions::default()).await?;
/// let running = bus.start(Roles::default()).await?;
/// let mirror = running.dispatcher().mirror(Filter::all())?;
///
/// let db = Db::new("orders".parse()?, DbInstance::new());
/// let producer = bus.producer();
/// let created = bus.run_exactly_once(None, async |tx| Ok(producer.created(&tx, &db))).await?;
/// mirror.reached(created.committed.versionstamp.version()).await?;
/// assert!(mirror.get(&db.name).is_some(), "it reads what was written before");
/// running.shutdown().await
/// # }
/// ```
#[must_use = "dropping it ends it"]
pub struct Mirror {
    content: watch::Sender<Content>,
    dispatcher: Dispatcher,
    listener: ListenerHandle,
}

/// What a mirror shows.
#[derive(Default)]
struct Content {
    view: MirrorView,
    synced: Option<Sequence>,
}

impl Dispatcher {
    /// Starts a mirror of the living databases that `filter` matches. Fails with [`Error::Invalid`] if the filter does not want all
    /// kinds of events, or has a predicate.
    pub fn mirror(&self, filter: Filter) -> Result<Mirror> {
        if !filter.wants_all_kinds() {
            let reason = "a mirror needs all kinds of events: narrow the names only";
            return Err(Error::invalid("filter", reason));
        }
        if filter.has_predicate() {
            let reason = "a mirror cannot know when a row passes a predicate no more: mirror by names, and ask the view";
            return Err(Error::invalid("filter", reason));
        }
        let shown = watch::Sender::<Content>::default();
        let written = shown.clone();
        let dispatcher = self.subscriptions();
        let context = Arc::clone(dispatcher.context());
        let listener = dispatcher
            .subscribe(filter)
            .since(Cursor::NOTHING)
            .listener(move || Writer { context: Arc::clone(&context), content: written.clone(), aside: None })
            .in_batches()
            .start();
        Ok(Mirror { content: shown, dispatcher, listener })
    }
}

impl Mirror {
    /// The newest row of the database `name`; `None` if there is no such database, or the first scan has not reached it.
    pub fn get(&self, name: &DbName) -> Option<Arc<Notification>> {
        self.content.borrow().view.get(name).cloned()
    }

    /// All living databases, as they are now.
    pub fn view(&self) -> MirrorView {
        self.content.borrow().view.clone()
    }

    /// Waits until the first scan is complete. Fails with [`Error::NoSubscriber`] if the dispatcher ends before.
    pub async fn synced(&self) -> Result<Sequence> {
        let mut content = self.content.subscribe();
        tokio::select! {
            biased;
            Ok(content) = content.wait_for(|content| content.synced.is_some()) => {
                Ok(content.synced.expect("it was just there"))
            }
            _ = self.listener.finished() => Err(self.ended()),
        }
    }

    /// Waits until it shows everything that was committed at the version `version` or before. Fails as
    /// [`Dispatcher::reached`] does.
    pub async fn reached(&self, version: u64) -> Result<Sequence> {
        let at = self.dispatcher.reached(version).await?;
        if self.listener.reached(at).await { Ok(at) } else { Err(self.ended()) }
    }

    fn ended(&self) -> Error {
        Error::NoSubscriber { subscriber: self.listener.id().to_string() }
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        self.listener.request_stop();
    }
}

impl fmt::Debug for Mirror {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mirror").field("databases", &self.view().len()).finish_non_exhaustive()
    }
}

/// Keeps a mirror up to date.
struct Writer {
    context: Arc<Context>,
    content: watch::Sender<Content>,
    /// The view that is filled again after the listener has expired.
    aside: Option<MirrorView>,
}

impl Writer {
    fn write<'a>(&mut self, rows: impl IntoIterator<Item = &'a Arc<Notification>>) {
        let is_aside = self.aside.is_some();
        let mut view = self.aside.take().unwrap_or_else(|| self.content.borrow().view.clone());
        for row in rows {
            if row.is_deleted() {
                view.remove(&row.name);
            } else {
                view.insert(row.name.clone(), Arc::clone(row));
            }
        }
        if is_aside {
            self.aside = Some(view);
        } else {
            self.content.send_modify(|content| content.view = view);
        }
    }
}

impl Listener for Writer {
    async fn handle_event(&mut self, delivery: Delivery) -> Next {
        self.write([delivery.notification()]);
        Next::Continue
    }

    async fn handle_batch(&mut self, batch: DeliveryBatch) -> Next {
        self.write(batch.iter().map(|delivery| delivery.notification()));
        Next::Continue
    }

    async fn handle_interruption(&mut self, interruption: Interruption) -> Next {
        match interruption {
            Interruption::Expired { .. } => self.aside = Some(MirrorView::new()),
            Interruption::Synced { at } => {
                let aside = self.aside.take();
                self.content.send_modify(|content| {
                    content.view = aside.unwrap_or_else(|| std::mem::take(&mut content.view));
                    content.synced = Some(at);
                });
            }
            Interruption::Failed(error) => {
                self.context.stats.health.complain(self.context.env(), "subscription of a mirror", &error);
            }
            Interruption::Lagged { .. } => {}
        }
        Next::Continue
    }
}
