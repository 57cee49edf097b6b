//! `/_up`, `/_all_dbs` and `/{db}`, which CouchDB's clients request before they follow a server. The answers have what this server
//! knows.

use std::sync::Arc;

use axum::{
    Extension, Router,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::get,
};
use serde_json::json;

use super::{
    Api, Caller, Databases, Failure, Inner,
    answer::{at, json as answer},
    caller::Right,
};
use crate::base::event::DbName;

/// The state that the routes share.
struct Known {
    inner: Arc<Inner>,
    databases: Arc<dyn Databases>,
}

impl Api {
    /// Serves `/_up` for everyone, `/_all_dbs` for callers that may read `_db_updates`, and `/{db}` of `databases` for callers that
    /// may read the database. It is for servers without a layer; a layer has these routes itself.
    pub fn catalogue(&self, databases: Arc<dyn Databases>) -> Router {
        let known = Arc::new(Known { inner: Arc::clone(&self.inner), databases });
        let open = at(
            Router::new(),
            "/_up",
            get(async || answer(StatusCode::OK, &json!({ "status": "ok", "seeds": {} }))),
        );
        let [list, info] = [("/_all_dbs", get(list)), ("/{db}", get(info))]
            .map(|(path, methods)| at(Router::new(), path, methods));
        let [open, list, info] = [open, list, info].map(|router| {
            let allowed = async || Failure::method_not_allowed("GET,HEAD");
            router.method_not_allowed_fallback(allowed).with_state(Arc::clone(&known))
        });
        self.counted(open).merge(self.guarded(list, Right::Updates)).merge(self.guarded(info, Right::Known))
    }
}

async fn list(State(known): State<Arc<Known>>) -> Response {
    let names = async {
        let _turn = known.inner.reads.acquire().await.expect("the semaphore is never closed");
        known.databases.names().await
    };
    match names.await {
        Ok(Some(names)) => answer(StatusCode::OK, &names.iter().map(DbName::as_str).collect::<Vec<_>>()),
        Ok(None) => Failure::not_found("missing").into_response(),
        Err(error) => Failure::from(error).into_response(),
    }
}

/// Answers with the properties of a database that the bus knows.
async fn info(
    State(known): State<Arc<Known>>,
    Path(name): Path<String>,
    caller: Option<Extension<Caller>>,
) -> Response {
    let find = async {
        let name = DbName::new(&name).map_err(|_| Failure::no_database())?;
        let databases = &known.databases;
        let find = async |tx| databases.find(&tx, &name).await;
        let db = known.inner.feed.context.db.run(find).await?.ok_or_else(Failure::no_database)?;
        if !databases.may_read(caller.as_deref(), &db).await? {
            return Err(Failure::not_readable());
        }
        let row = known.inner.feed.newest(&db.name).await?;
        let update_seq = row.map_or_else(|| "0".to_owned(), |row| row.sequence.to_string());
        // CouchDB's clients take a database for another one if this value changes, so it identifies the creation.
        let known =
            json!({ "db_name": db.name, "update_seq": update_seq, "instance_start_time": db.instance });
        Ok::<_, Failure>(answer(StatusCode::OK, &known))
    };
    find.await.unwrap_or_else(IntoResponse::into_response)
}
