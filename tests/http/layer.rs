//! A layer in memory: databases by name, and the last edit of each document.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use futures_util::future::BoxFuture;
use notibus::{
    Bus, Db, DbName, DispatcherOptions, Result, Sequence,
    changes::{Changes, ChangesOptions, DocId, DocSource, DocSummary, Leaf, Revision},
    http::{ApiOptions, Caller, ChangesRequest, Databases, DocView, Failure, ServerOptions},
    store::{Store, Transaction},
};

use crate::fixture::HttpFixture;

/// Starts a node on `store` that serves the changes of a layer.
pub async fn layered(store: Store, options: ApiOptions) -> (HttpFixture, Arc<Layer>) {
    let mut layer = None;
    let (dispatcher, limits) = (DispatcherOptions::default(), ServerOptions::default());
    let fixture = HttpFixture::over(store, dispatcher, options, limits, |api, _, bus| {
        let made = Layer::new(bus);
        let router = api.changes(&made.changes, Arc::clone(&made) as _).merge(api.db_updates());
        layer = Some(made);
        router
    })
    .await;
    (fixture, layer.unwrap())
}

/// A layer in memory.
pub struct Layer {
    bus: Bus,
    pub changes: Changes,
    databases: Mutex<HashMap<DbName, Db>>,
    /// The sequence of each document's last edit.
    edits: Mutex<HashMap<(Db, String), Sequence>>,
}

impl Layer {
    pub fn new(bus: &Bus) -> Arc<Self> {
        let (databases, edits) = (Mutex::default(), Mutex::default());
        Arc::new(Self { bus: bus.clone(), changes: bus.changes(), databases, edits })
    }

    /// Creates a database with `shards` shards.
    pub async fn create(&self, db: &Db, shards: u32) {
        let options = ChangesOptions::default().shards(shards);
        self.bus.store().run(async |tx| self.changes.create(&tx, db, &options).await).await.unwrap();
        self.databases.lock().unwrap().insert(db.name.clone(), db.clone());
    }

    /// Deletes a database.
    pub async fn delete(&self, bus: &Bus, db: &Db) {
        let producer = bus.producer();
        let delete = async |tx: Transaction| {
            self.changes.remove(&tx, db);
            producer.deleted(&tx, db);
            Ok(())
        };
        self.bus.store().run(delete).await.unwrap();
        self.databases.lock().unwrap().remove(&db.name);
    }

    /// Removes the changes of a database, but does not record its deletion.
    pub async fn remove_silently(&self, db: &Db) {
        let remove = async |tx: Transaction| {
            self.changes.remove(&tx, db);
            Ok(())
        };
        self.bus.store().run(remove).await.unwrap();
    }

    /// Writes a document. Returns the sequence of its row.
    pub async fn write(&self, db: &Db, id: &str, position: u64, branches: u32, is_deleted: bool) -> Sequence {
        let key = (db.clone(), id.to_owned());
        let previous = self.edits.lock().unwrap().get(&key).copied();
        let revision = Revision { position, hash: [7; 16] };
        let doc = DocSummary { id: DocId::new(id).unwrap(), revision, branches, is_deleted };
        let write = async |tx: Transaction| self.changes.writer(&tx, db).await?.record(&doc, previous);
        let written = self.bus.run_exactly_once(None, write).await.unwrap();
        let sequence = written.value.of(written.committed);
        self.edits.lock().unwrap().insert(key, sequence);
        sequence
    }
}

impl Databases for Layer {
    fn find<'a>(&'a self, _tx: &'a Transaction, name: &'a DbName) -> BoxFuture<'a, Result<Option<Db>>> {
        let found = self.databases.lock().unwrap().get(name).cloned();
        Box::pin(std::future::ready(Ok(found)))
    }

    fn may_read<'a>(&'a self, _: &'a Caller, db: &'a Db) -> BoxFuture<'a, Result<bool>> {
        Box::pin(std::future::ready(Ok(db.name.as_str() != "secret")))
    }

    fn lens<'a>(
        &'a self,
        _: &'a Db,
        asked: &'a ChangesRequest,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn DocView>>, Failure>> {
        let lens = match asked.filter.as_deref() {
            Some("_selector") => String::from_utf8(asked.body.to_vec()).ok(),
            Some("app/ids") => {
                asked.parameters.iter().find(|(key, _)| key == "end").map(|(_, end)| end.clone())
            }
            Some("app/broken") => return Box::pin(std::future::ready(Err(Failure::not_found("missing")))),
            None if asked.conflicts && !asked.attachments => Some(String::new()),
            _ => None,
        };
        let lens = lens.map(|text| Arc::new(Chosen { text, conflicts: asked.conflicts }) as Arc<dyn DocView>);
        Box::pin(std::future::ready(Ok(lens)))
    }
}

/// A filter that shows the documents whose ids occur in `text`, or end with it.
struct Chosen {
    text: String,
    /// Whether bodies include conflicts.
    conflicts: bool,
}

impl DocSource for Chosen {
    fn body<'a>(
        &'a self,
        _: &'a Transaction,
        _: &'a Db,
        doc: &'a DocSummary,
    ) -> BoxFuture<'a, Result<Option<bytes::Bytes>>> {
        let conflicts = if self.conflicts { ",\"_conflicts\":[]" } else { "" };
        let body = format!("{{\"_id\":\"{}\"{conflicts}}}", doc.id);
        Box::pin(std::future::ready(Ok(Some(body.into()))))
    }
}

impl DocView for Chosen {
    fn keeps<'a>(
        &'a self,
        doc: &'a DocSummary,
        body: Option<&'a bytes::Bytes>,
    ) -> BoxFuture<'a, Result<bool>> {
        assert!(body.is_some(), "filters go by bodies");
        let id = doc.id.as_str();
        Box::pin(std::future::ready(Ok(self.text.contains(id) || id.ends_with(&self.text))))
    }
}

impl DocSource for Layer {
    fn leaves<'a>(
        &'a self,
        _: &'a Transaction,
        _: &'a Db,
        doc: &'a DocSummary,
    ) -> BoxFuture<'a, Result<Vec<Leaf>>> {
        let leaf = |hash| Leaf {
            revision: Revision { position: doc.revision.position, hash: [hash; 16] },
            is_deleted: false,
        };
        let leaves = (0..doc.branches).map(|branch| leaf(7 - branch as u8)).collect();
        Box::pin(std::future::ready(Ok(leaves)))
    }

    fn body<'a>(
        &'a self,
        _: &'a Transaction,
        _: &'a Db,
        doc: &'a DocSummary,
    ) -> BoxFuture<'a, Result<Option<bytes::Bytes>>> {
        let body = format!("{{\"_id\":\"{}\",\n  \"_rev\":\"{}\"}}", doc.id, doc.revision);
        Box::pin(std::future::ready(Ok(Some(body.into()))))
    }
}
