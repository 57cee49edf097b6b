//! [`Mirror`]: the newest row of every database, by name, in memory and kept up to date.

use std::{fmt, sync::Arc};

use imbl::OrdMap;
use tokio::sync::watch;

use super::dispatcher::{BatchItem, CallbackHandle, Dispatcher, Filter, Item, RestartPolicy};
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

/// The existing databases by name, as they were at one moment.
///
/// Clones are cheap, and a view never changes.
pub type MirrorView = OrdMap<DbName, Arc<Notification>>;

/// The newest row of every existing database that a filter matches, by name, kept up to date by one writer. Reading a mirror costs no I/O
/// and never waits. Dropping a mirror stops its updates.
///
/// A mirror fills until its first scan is complete ([`Mirror::caught_up`]). If it was cut off for so long that it may have missed
/// deletions, it is filled again in the background; the old view stays until then. Once the mirror has ended with its dispatcher, every
/// call fails and says so.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::{Bus, BusOptions, Db, DbInstance, Filter, StartOptions, store::Store};
///
/// let store = Store::memory();
/// let bus = Bus::open(&store, BusOptions::default()).await?;
/// let running = bus.start(StartOptions::default()).await?;
/// let mirror = running.dispatcher().mirror(Filter::all())?;
///
/// let db = Db::new("orders".parse()?, DbInstance::new());
/// let producer = bus.producer();
/// let created = bus.run_exactly_once(None, async |tx| Ok(producer.created(&tx, &db))).await?;
/// mirror.wait_until(created.committed.versionstamp.version()).await?;
/// assert!(mirror.get(&db.name)?.is_some(), "it reads what was written before");
/// running.shutdown().await
/// # }
/// ```
#[must_use = "dropping it ends it"]
pub struct Mirror {
    content: watch::Sender<Content>,
    dispatcher: Dispatcher,
    callback: CallbackHandle,
}

/// What a mirror shows.
#[derive(Default)]
struct Content {
    view: MirrorView,
    caught_up: Option<Sequence>,
}

impl Dispatcher {
    /// Starts a mirror of the existing databases that `filter` matches. Fails with [`Error::Invalid`] if the filter does not want all
    /// events of these databases, or has a predicate.
    pub fn mirror(&self, filter: Filter) -> Result<Mirror> {
        if !filter.wants_all_kinds() || filter.ddocs.is_some() {
            let reason = "a mirror needs all events of its databases: narrow the names only";
            return Err(Error::invalid("filter", reason));
        }
        if filter.has_predicate() {
            let reason = "a mirror cannot know when a row no longer passes a predicate: mirror by names, and filter the view";
            return Err(Error::invalid("filter", reason));
        }
        let shown = watch::Sender::<Content>::default();
        let written = shown.clone();
        let dispatcher = self.subscriptions();
        let context = Arc::clone(dispatcher.context());
        let write = move || {
            let mut writer = Writer { context: Arc::clone(&context), content: written.clone(), aside: None };
            move |item| {
                writer.take(item);
                std::future::ready(())
            }
        };
        let from_nothing = dispatcher.subscribe(filter).since(Cursor::BEGINNING);
        let callback = from_nothing.batch_callback(RestartPolicy::default(), write)?;
        Ok(Mirror { content: shown, dispatcher, callback })
    }
}

impl Mirror {
    /// Returns the newest row of the database `name`; `None` if there is no such database, or the first scan has not reached it.
    ///
    /// Fails with [`Error::NoSubscriber`] if the mirror has ended, and with [`Error::BusGone`] once the bus is gone.
    pub fn get(&self, name: &DbName) -> Result<Option<Arc<Notification>>> {
        self.living()?;
        Ok(self.content.borrow().view.get(name).cloned())
    }

    /// Returns all existing databases, as they are now. Fails as [`Mirror::get`] does.
    pub fn view(&self) -> Result<MirrorView> {
        self.living()?;
        Ok(self.content.borrow().view.clone())
    }

    /// Waits until the first scan is complete. Fails as [`Mirror::get`] does.
    pub async fn caught_up(&self) -> Result<Sequence> {
        let mut content = self.content.subscribe();
        tokio::select! {
            biased;
            _ = self.callback.finished() => Err(self.ended()),
            content = content.wait_for(|content| content.caught_up.is_some()) => {
                Ok(content.expect("the sender is here").caught_up.expect("it was just there"))
            }
        }
    }

    /// Waits until the mirror shows everything that was committed at or before `version`. Fails as [`Dispatcher::wait_until`] does.
    pub async fn wait_until(&self, version: u64) -> Result<Sequence> {
        let at = self.dispatcher.wait_until(version).await?;
        if self.callback.wait_until(at).await { Ok(at) } else { Err(self.ended()) }
    }

    fn living(&self) -> Result<()> {
        if self.callback.is_finished() { Err(self.ended()) } else { Ok(()) }
    }

    fn ended(&self) -> Error {
        let gone = self.dispatcher.context().stats.health.ended().cloned();
        gone.unwrap_or_else(|| Error::NoSubscriber {
            subscriber: format!("{} of a mirror", self.callback.id()),
        })
    }
}

impl fmt::Debug for Mirror {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mirror").field("databases", &self.content.borrow().view.len()).finish_non_exhaustive()
    }
}

/// Keeps a mirror up to date.
struct Writer {
    context: Arc<Context>,
    content: watch::Sender<Content>,
    /// The view that is being filled again after the subscription expired.
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

    fn take(&mut self, item: BatchItem) {
        match item {
            Item::Delivery(batch) => self.write(batch.iter().map(|delivery| delivery.notification())),
            Item::Expired { .. } => self.aside = Some(MirrorView::new()),
            Item::CaughtUp { at } => {
                let aside = self.aside.take();
                self.content.send_modify(|content| {
                    content.view = aside.unwrap_or_else(|| std::mem::take(&mut content.view));
                    content.caught_up = Some(at);
                });
            }
            Item::Failed(error) => {
                self.context.stats.health.complain(self.context.env(), "subscription of a mirror", &error);
            }
            Item::Lagged { .. } => {}
        }
    }
}
