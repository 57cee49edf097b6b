//! [`DdocCache`]: design documents in memory, kept up to date by the bus.
//!
//! # Why no stale document is returned
//!
//! When an event is delivered, the cache forgets the documents that the event is about, so the next read goes to the store, after the
//! commit. One danger remains: a read of the store that began before the delivery and ends after it must not be cached. So each read notes
//! the number of forgets when it begins, and its result is cached only if that number is still the same.
//!
//! All of this needs the listener. Once the listener has ended, every read goes to the store.
//!
//! A mirror of the databases answers for databases that do not exist. The mirror and the cache are two subscribers that do not wait for
//! each other: [`DdocCache::wait_until`] waits for both.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use notibus::{
    DbName, Delivery, Dispatcher, Error, EventKind, Filter, Kinds, Result,
    dispatcher::{CallbackHandle, Item, Mirror, RestartPolicy},
    event::DdocId,
    store::{Isolation, Store},
};

/// The maximum number of cached documents. Beyond that, all are forgotten.
const DOCS_MAX: usize = 10_000;

/// Returns the layer's key of the design document `id` of `name`.
pub fn key(name: &DbName, id: &DdocId) -> Vec<u8> {
    format!("ddoc/{name}/{id}").into_bytes()
}

/// Design documents in memory.
pub struct DdocCache {
    store: Store,
    /// The databases that exist.
    databases: Mirror,
    docs: Arc<Docs>,
    /// Forgets changed documents.
    callback: CallbackHandle,
}

/// The cached documents.
#[derive(Default)]
struct Docs(Mutex<State>);

#[derive(Default)]
struct State {
    /// The documents, by database and id; `None` for a document that does not exist.
    docs: HashMap<DbName, HashMap<DdocId, Option<Vec<u8>>>>,
    /// The number of cached documents.
    count: usize,
    /// How many times documents were forgotten.
    forgotten: u64,
    /// The number of reads that were answered from memory, and of those that were not.
    hits: (u64, u64),
}

impl DdocCache {
    /// Starts an empty cache of the documents in `store`, which is kept up to date while `dispatcher` runs. The existing databases are
    /// known when this returns.
    pub async fn start(store: &Store, dispatcher: &Dispatcher) -> Result<Self> {
        let docs = Arc::new(Docs::default());
        let invalidated = Arc::clone(&docs);
        // Updates of other documents are irrelevant.
        let kinds: Kinds =
            [EventKind::Created, EventKind::Deleted, EventKind::DdocUpdated].into_iter().collect();
        let keep_right = move || {
            let docs = Arc::clone(&invalidated);
            // After a panic, the last delivery may have been handled only in part.
            docs.forget_all();
            move |item: Item| {
                match item {
                    Item::Delivery(delivery) => docs.forget(&delivery),
                    // Some changes may never be delivered, for example because databases are gone.
                    _ => docs.forget_all(),
                }
                std::future::ready(())
            }
        };
        let changes = dispatcher.subscribe(Filter::all().kinds(kinds)?).with_ddocs();
        let callback = changes.callback(RestartPolicy::default(), keep_right)?;
        let databases = dispatcher.mirror(Filter::all())?;
        databases.caught_up().await?;
        Ok(Self { store: store.clone(), databases, docs, callback })
    }

    /// Stops the updates: from now on every read goes to the store.
    pub async fn stop(&self) {
        self.callback.stop().await;
    }

    /// Returns the design document `id` of `name`, from memory if it is cached.
    pub async fn get(&self, name: &DbName, id: &DdocId) -> Result<Option<Vec<u8>>> {
        match self.databases.get(name) {
            Ok(None) => return Ok(None),
            Ok(Some(_)) if !self.callback.is_finished() => {}
            // The callback was stopped, or its dispatcher has ended, so nothing would be forgotten any longer.
            _ => return self.read(name, id).await,
        }
        let before = {
            let mut state = self.docs.state();
            let found = state.docs.get(name).and_then(|docs| docs.get(id)).cloned();
            if let Some(doc) = found {
                state.hits.0 += 1;
                return Ok(doc);
            }
            state.hits.1 += 1;
            state.forgotten
        };
        let doc = self.read(name, id).await?;
        let mut state = self.docs.state();
        if state.forgotten == before {
            if state.count >= DOCS_MAX {
                state.docs.clear();
                state.count = 0;
            }
            state.docs.entry(name.clone()).or_default().insert(id.clone(), doc.clone());
            state.count += 1;
        }
        Ok(doc)
    }

    /// Reads the design document `id` of `name` from the store.
    async fn read(&self, name: &DbName, id: &DdocId) -> Result<Option<Vec<u8>>> {
        let key = key(name, id);
        let doc = self.store.run(async |tx| tx.get(&key, Isolation::Snapshot).await).await?;
        Ok(doc.map(|bytes| bytes.to_vec()))
    }

    /// Waits until every read returns documents at least as new as the version `version`.
    pub async fn wait_until(&self, version: u64) -> Result<()> {
        let at = self.databases.wait_until(version).await?;
        if self.callback.wait_until(at).await {
            return Ok(());
        }
        Err(Error::NoSubscriber { subscriber: "ddoc cache".into() })
    }

    /// Returns the number of reads that were answered from memory, and of those that were not.
    pub fn hits(&self) -> (u64, u64) {
        self.docs.state().hits
    }
}

impl Docs {
    /// Ignores poisoning: no holder of the lock can panic with the state half changed.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets everything.
    fn forget_all(&self) {
        let mut state = self.state();
        state.docs.clear();
        (state.count, state.forgotten) = (0, state.forgotten + 1);
    }

    /// Forgets the documents that `delivery` is about.
    fn forget(&self, delivery: &Delivery) {
        let name = &delivery.notification().name;
        let news = delivery.news().kinds();
        let ids = delivery.ddocs().unwrap_or_default();
        let mut state = self.state();
        let State { docs, count, forgotten, .. } = &mut *state;
        *forgotten += 1;
        let is_other_instance = news.contains(EventKind::Created) || news.contains(EventKind::Deleted);
        if is_other_instance || delivery.may_be_any_ddoc() {
            *count -= docs.remove(name).map_or(0, |docs| docs.len());
        } else if let Some(docs) = docs.get_mut(name) {
            *count -= ids.iter().filter(|(id, _)| docs.remove(id).is_some()).count();
        }
    }
}
