//! `/_notibus/nodes`: which nodes have joined, and what they hold. Two requests show by the beats which of them live.

use std::sync::Arc;

use axum::{
    Router,
    extract::{Request, State},
    http::StatusCode,
    response::Response,
    routing::any,
};
use serde_json::json;

use super::{
    Api, Failure, Inner,
    answer::{at, json as answer},
    caller::Right,
    manage::reads,
};

impl Api {
    /// `/_notibus/nodes`, for those who may see the status.
    pub fn nodes(&self) -> Router {
        let router = at(Router::new(), "/_notibus/nodes", any(list)).with_state(Arc::clone(&self.inner));
        self.guarded(router, Right::Metrics)
    }
}

/// All nodes.
async fn list(State(inner): State<Arc<Inner>>, request: Request) -> Result<Response, Failure> {
    let (parts, _) = request.into_parts();
    reads(&parts, &[])?;
    Ok(answer(StatusCode::OK, &json!({ "nodes": inner.bus.nodes().await? })))
}
