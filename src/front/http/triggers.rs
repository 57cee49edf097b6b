//! `/_notibus/triggers` lists the state of triggers and the databases that they have parked. It can also retry parked databases,
//! and reset a trigger.

use std::sync::Arc;

use axum::{
    Router,
    extract::{Request, State},
    http::{StatusCode, request::Parts},
    routing::any,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    Api, Failure, Inner,
    answer::{Answered, PathSegments, Shared, done, json as answer, routes},
    caller::Permission,
    manage::{check_changes, parameters, posted, reads},
};
use crate::{
    base::event::{Db, DbInstance, DbName},
    roles::jobs::StoredTrigger,
};

/// The most parked databases of one answer.
const PAGE_ROWS: usize = 1_000;

/// Up to how many parked databases of a trigger are counted.
const PARKED_MAX: usize = 10_000;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RetryRequest {
    /// The name of one database; `None` for all.
    db: Option<String>,
}

impl Api {
    /// Serves the triggers of the bus for admins. `/_notibus/triggers` lists them, and `/_notibus/triggers/{trigger}` lists the
    /// databases that one of them has parked. A POST to `retry` below that retries parked databases; a POST to `reset` makes the
    /// trigger begin again with all databases.
    pub fn triggers(&self) -> Router {
        let router = [
            ("", any(list)),
            ("/{trigger}", any(show)),
            ("/{trigger}/retry", any(retry)),
            ("/{trigger}/reset", any(reset)),
        ];
        let router = routes("/_notibus/triggers", router);
        self.guarded(router.with_state(Arc::clone(&self.inner)), Permission::Admin)
    }
}

/// Finds the trigger `name`. Fails with 404 if there is none.
async fn find(inner: &Inner, name: &str) -> Result<StoredTrigger, Failure> {
    let trigger = inner.bus.trigger(name)?;
    match trigger.position().await? {
        Some(_) => Ok(trigger),
        None => {
            Err(Failure::not_found("There is no such trigger; /_notibus/triggers tells which there are."))
        }
    }
}

/// Describes the state of a trigger.
async fn summary(inner: &Inner, trigger: &StoredTrigger) -> Result<Value, Failure> {
    let (position, parked) = tokio::try_join!(trigger.position(), trigger.parked(None, PARKED_MAX))?;
    Ok(json!({
        "trigger": trigger.name(),
        "position": position,
        "parked": parked.len(),
        "parked_is_exact": parked.len() < PARKED_MAX,
        // This is null unless the trigger was started in this process.
        "status": inner.feed.context.triggers.status(trigger.name()),
    }))
}

async fn list(State(inner): Shared, parts: Parts) -> Answered {
    reads(&parts, &[])?;
    let mut triggers = Vec::new();
    for name in inner.bus.triggers().await? {
        triggers.push(summary(&inner, &inner.bus.trigger(&name)?).await?);
    }
    Ok(answer(StatusCode::OK, &json!({ "triggers": triggers })))
}

/// Answers with one trigger, and a page of its parked databases.
async fn show(State(inner): Shared, PathSegments(name): PathSegments<String>, parts: Parts) -> Answered {
    let last = after(&parts)?;
    let trigger = find(&inner, &name).await?;
    let mut shown = summary(&inner, &trigger).await?;
    let page = trigger.parked(last.as_ref(), PAGE_ROWS).await?;
    let next = page.last().filter(|_| page.len() == PAGE_ROWS);
    shown["next"] = next.map_or(Value::Null, |db| json!({ "after": db.name, "instance": db.instance }));
    shown["databases"] = json!(page);
    Ok(answer(StatusCode::OK, &shown))
}

/// The database after which a page begins: the parameters `after` and `instance`.
fn after(parts: &Parts) -> Result<Option<Db>, Failure> {
    let mut given = reads(parts, &["after", "instance"])?;
    match (given.remove("after"), given.remove("instance")) {
        (None, None) => Ok(None),
        (Some(name), Some(instance)) => {
            Ok(Some(Db::new(DbName::new(&name)?, instance.parse::<DbInstance>()?)))
        }
        _ => Err(Failure::bad_request("`after` and `instance` go together, as `next` gives them.")),
    }
}

/// Retries parked databases.
async fn retry(State(inner): Shared, PathSegments(name): PathSegments<String>, request: Request) -> Answered {
    let request: RetryRequest = posted(&inner, request, "{\"db\":\"name\"}").await?;
    let db = request.db.map(|name| DbName::new(&name)).transpose()?;
    let asked = find(&inner, &name).await?.retry(db.as_ref()).await?;
    if db.is_some() && asked == 0 {
        return Err(Failure::not_found("This trigger has not parked such a database."));
    }
    Ok(answer(StatusCode::ACCEPTED, &json!({ "ok": true, "databases": asked })))
}

/// Forgets all that the bus has saved of a trigger.
async fn reset(State(inner): Shared, PathSegments(name): PathSegments<String>, parts: Parts) -> Answered {
    check_changes(&parts)?;
    parameters(&parts, &[])?;
    find(&inner, &name).await?.reset().await?;
    Ok(done())
}
