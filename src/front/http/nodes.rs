//! `/_notibus/nodes`: which nodes have joined, and what they hold. Two requests show by the beats which of them live.

use std::sync::Arc;

use axum::{
    Router,
    extract::State,
    http::{StatusCode, request::Parts},
    routing::any,
};
use serde_json::json;

use super::{
    Api,
    answer::{Answered, Shared, at, json as answer},
    caller::Permission,
    manage::reads,
};

impl Api {
    /// `/_notibus/nodes`, for those who may see the status.
    pub fn nodes(&self) -> Router {
        let router = at(Router::new(), "/_notibus/nodes", any(list)).with_state(Arc::clone(&self.inner));
        self.guarded(router, Permission::Metrics)
    }
}

async fn list(State(inner): Shared, parts: Parts) -> Answered {
    reads(&parts, &[])?;
    Ok(answer(StatusCode::OK, &json!({ "nodes": inner.bus.nodes().await? })))
}
