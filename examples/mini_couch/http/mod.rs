//! The layer over HTTP, with CouchDB's protocol. The feeds come from the library.

mod documents;
mod failure;

use std::{collections::HashMap, sync::Arc};

use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, Path, State},
    http::StatusCode,
    middleware::map_response,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use notibus::{DbName, http::Api};
use serde_json::{Value, json};

use super::{
    couch::{Couch, Info},
    problem::Problem,
};

/// The maximum size of a request body, in bytes.
pub const BODY_LEN_MAX: usize = 16 << 20;

/// The state of the handlers.
type Shared = State<Arc<Couch>>;

/// The parameters in a path: `db`, and `id` or `design`.
type PathSegments = Path<HashMap<String, String>>;

/// The result of a handler.
type Answer = Result<Response, Problem>;

/// Makes the routes of the layer. The path of a database may end with a slash.
pub fn router(couch: Arc<Couch>) -> Router {
    let database = get(info).put(create).delete(remove).post(documents::add);
    let document = get(documents::read).put(documents::write).delete(documents::erase);
    Router::new()
        .route("/", get(welcome))
        .route("/_up", get(async || Json(json!({ "status": "ok" }))))
        .route("/_all_dbs", get(list))
        .route("/{db}", database.clone())
        .route("/{db}/", database)
        .route("/{db}/_all_docs", get(documents::list).post(documents::list))
        .route("/{db}/_bulk_docs", post(documents::bulk))
        .route("/{db}/_design/{design}", document.clone())
        .route("/{db}/{id}", document)
        .with_state(couch)
}

/// Adds what all routes share: answers for unknown paths, limits on bodies, compression, and answers for problems.
pub fn finished(api: &Api, router: Router) -> Router {
    let router = router.fallback(async || Problem::Missing("missing".into()).into_response());
    let router = api.inflated(router).layer(DefaultBodyLimit::max(BODY_LEN_MAX));
    // This wraps the whole router, because only the router knows which methods a path has.
    Router::new().fallback_service(router).layer(map_response(failure::as_problem))
}

async fn welcome() -> Json<Value> {
    // The version of CouchDB whose interface this is.
    Json(json!({ "couchdb": "Welcome", "version": "3.0.0", "vendor": { "name": "mini_couch" } }))
}

async fn list(State(couch): Shared) -> Answer {
    Ok(Json(couch.databases().await?).into_response())
}

async fn info(State(couch): Shared, path: PathSegments) -> Answer {
    let name = database(&path)?;
    let Info { living, deleted, bytes, last_change } = couch.info(&name).await?;
    let body = json!({
        "db_name": name,
        "doc_count": living,
        "doc_del_count": deleted,
        "update_seq": last_change,
        "purge_seq": "0",
        "sizes": { "active": bytes, "external": bytes, "file": bytes },
        "instance_start_time": "0",
        "compact_running": false,
    });
    Ok(Json(body).into_response())
}

async fn create(State(couch): Shared, path: PathSegments) -> Answer {
    couch.create_database(&database(&path)?).await?;
    Ok((StatusCode::CREATED, Json(json!({ "ok": true }))).into_response())
}

async fn remove(State(couch): Shared, path: PathSegments) -> Answer {
    couch.delete_database(&database(&path)?).await?;
    Ok(Json(json!({ "ok": true })).into_response())
}

/// Parses the name of the database in a path.
fn database(path: &PathSegments) -> Result<DbName, Problem> {
    Ok(DbName::new(&path["db"])?)
}
