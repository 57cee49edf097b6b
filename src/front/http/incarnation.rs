//! `/_notibus/incarnation`: which incarnation the bus has, and its raise after an older state of the store was restored.

use std::sync::Arc;

use axum::{
    Router,
    extract::{Request, State},
    http::{Method, StatusCode},
    routing::any,
};
use serde::Deserialize;
use serde_json::json;

use super::{
    Api, Failure,
    answer::{Answered, Shared, at, json as answer},
    caller::Permission,
    manage::{posted, reads},
};
use crate::{base::encoding::Incarnation, bus::Bus};

/// From which incarnation to raise it by one.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Raise {
    from: Option<u8>,
}

impl Api {
    /// `/_notibus/incarnation`: for those who may see the status, and to be raised by admins.
    pub fn incarnation(&self) -> Router {
        let router =
            at(Router::new(), "/_notibus/incarnation", any(respond)).with_state(Arc::clone(&self.inner));
        self.guarded(router, Permission::Metrics)
    }
}

/// Shows or raises it. After a raise the nodes of the bus find with their next heartbeat that they have to open it again.
async fn respond(State(inner): Shared, request: Request) -> Answered {
    let (db, prefix) = (inner.bus.store(), inner.feed.context.keys.prefix());
    let incarnation = if *request.method() == Method::POST {
        let raise: Raise = posted(&inner, request, "{\"from\":0}").await?;
        let from = raise.from.ok_or_else(|| Failure::bad_request("The body has no \"from\"."))?;
        Bus::raise_incarnation(db, prefix, Incarnation(from), false).await?
    } else {
        reads(&request.into_parts().0, &[])?;
        Bus::stored_incarnation(db, prefix).await?
    };
    Ok(answer(StatusCode::OK, &json!({ "incarnation": incarnation.0 })))
}
