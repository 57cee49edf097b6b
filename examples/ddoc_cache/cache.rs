//! [`DdocCache`]: design documents in memory, kept right by the bus.
//!
//! # Why no stale document is returned
//!
//! Once an event is delivered, what it tells of is forgotten, and whoever reads then reads the store after the commit. The one
//! thing to beware of is a read of the store that began before and ends after: it must not be remembered. So each read takes
//! the number of things that were forgotten with it, and is remembered only if none was forgotten meanwhile.
//!
//! All of that needs the listener. Once it has ended, every read goes to the store.
//!
//! A mirror of the databases answers for those that are not there. It and the cache are two subscribers, and neither waits for
//! the other: [`DdocCache::reached`] waits for both.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use notibus::{
    Cursor, DbName, Delivery, Dispatcher, Error, EventKind, Filter, Kinds, Result,
    dispatcher::{Listener, ListenerHandle, Message, Mirror, Next},
    event::DdocId,
    store::{Database, Isolation},
};

/// The most documents that are remembered. When there are more, all are forgotten.
const DOCS_MAX: usize = 10_000;

/// Where the layer keeps the design document `id` of `name`.
pub fn key(name: &DbName, id: &DdocId) -> Vec<u8> {
    format!("ddoc/{name}/{id}").into_bytes()
}

/// Design documents in memory.
pub struct DdocCache {
    /// Where they are kept.
    store: Database,
    /// Which databases there are.
    databases: Mirror,
    /// What is remembered.
    docs: Arc<Docs>,
    /// Keeps it right.
    listener: ListenerHandle<()>,
}

/// What is remembered.
#[derive(Default)]
struct Docs(Mutex<State>);

/// What is remembered, behind its lock.
#[derive(Default)]
struct State {
    /// The documents, by database and id; `None` for one that does not exist.
    docs: HashMap<DbName, HashMap<DdocId, Option<Vec<u8>>>>,
    /// How many there are.
    count: usize,
    /// How often something was forgotten.
    forgotten: u64,
    /// How often something was found, and how often it was not.
    hits: (u64, u64),
}

impl DdocCache {
    /// A cache of the documents of `store`, kept right by `dispatcher` as long as it runs. It is empty; the databases are known
    /// when this returns.
    pub async fn start(store: &Database, dispatcher: &Dispatcher) -> Result<Self> {
        let docs = Arc::new(Docs::default());
        let invalidated = Arc::clone(&docs);
        // Updates of other documents are none of its business.
        let kinds: Kinds =
            [EventKind::Created, EventKind::Deleted, EventKind::DdocUpdated].into_iter().collect();
        let listener = dispatcher
            .subscribe(Filter::all().kinds(kinds)?)
            .with_ddocs()
            .listener(move || Invalidator(Arc::clone(&invalidated)))
            .named("ddoc cache")?
            .start()?;
        let databases = dispatcher.mirror(Filter::all())?;
        databases.synced().await?;
        Ok(Self { store: store.clone(), databases, docs, listener })
    }

    /// The design document `id` of `name`, from memory if it is there, and somebody keeps that right.
    pub async fn get(&self, name: &DbName, id: &DdocId) -> Result<Option<Vec<u8>>> {
        if self.listener.is_finished() {
            // It was stopped, or its dispatcher has ended: nothing will ever be forgotten, nor will the mirror learn of databases.
            return self.read(name, id).await;
        }
        if self.databases.get(name).is_none() {
            return Ok(None);
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

    /// The design document `id` of `name`, from the store.
    async fn read(&self, name: &DbName, id: &DdocId) -> Result<Option<Vec<u8>>> {
        let key = key(name, id);
        let doc = self.store.run(async |tx| tx.get(&key, Isolation::Snapshot).await).await?;
        Ok(doc.map(|bytes| bytes.to_vec()))
    }

    /// Waits until no read returns anything older than what was committed at the version `version`.
    pub async fn reached(&self, version: u64) -> Result<()> {
        let at = self.databases.reached(version).await?;
        if self.listener.reached(at).await {
            return Ok(());
        }
        Err(Error::NoSubscriber { subscriber: "ddoc cache".into() })
    }

    /// How often something was found in memory, and how often it was not.
    pub fn hits(&self) -> (u64, u64) {
        self.docs.state().hits
    }
}

impl Docs {
    /// What is remembered. Nothing is done under the lock that could be left half done.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets everything.
    fn forget_all(&self) {
        let mut state = self.state();
        state.docs.clear();
        (state.count, state.forgotten) = (0, state.forgotten + 1);
    }

    /// Forgets the documents that `delivery` tells of.
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

/// Keeps a cache right.
struct Invalidator(Arc<Docs>);

impl Listener for Invalidator {
    type Message = ();

    async fn init(&mut self, _: Cursor) -> Next {
        // After a panic: whatever was under way may not have been done.
        self.0.forget_all();
        Next::Continue
    }

    async fn handle_event(&mut self, delivery: Delivery) -> Next {
        self.0.forget(&delivery);
        Next::Continue
    }

    async fn handle_message(&mut self, message: Message<()>) -> Next {
        if let Message::Interrupted(_) = message {
            // Something may have happened that will not be told: databases may be gone.
            self.0.forget_all();
        }
        Next::Continue
    }
}
