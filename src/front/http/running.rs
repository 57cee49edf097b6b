//! Serves a [`Running`] bus over HTTP, and stops serving before the roles end.

use std::net::SocketAddr;

use axum::Router;
use futures_util::FutureExt;
use tokio::net::TcpListener;

use super::{Api, ApiOptions, Server, ServerOptions};
use crate::{base::error::Result, bus::running::Running, state::keys::Role};

impl Running {
    /// Makes the routers' shared state for the bus. When the roles shut down, the feeds end first.
    ///
    /// Fails with [`Error::Invalid`](crate::Error::Invalid) if an option is out of its limits.
    pub fn api(&self, options: ApiOptions) -> Result<Api> {
        let api = Api::start(self.bus(), self.dispatcher(), options)?;
        let ending = api.clone();
        self.end_first(Box::new(move || {
            ending.shutdown();
            std::future::ready(()).boxed()
        }));
        Ok(api)
    }

    /// Serves `router` to everyone who connects to `listener`, until the roles end. Returns the address. The node lists HTTP among
    /// its roles.
    ///
    /// Fails as [`Server::start`] does.
    pub async fn serve(
        &self,
        listener: TcpListener,
        router: Router,
        options: ServerOptions,
    ) -> Result<SocketAddr> {
        let server = Server::start(listener, router, options, self.bus().store().env())?;
        let address = server.local_addr();
        // The node lists the role once, however many servers it has.
        let announced = self.node().announce(Role::HTTP).await.ok();
        self.end_first(Box::new(move || {
            async move {
                server.shutdown().await;
                drop(announced);
            }
            .boxed()
        }));
        Ok(address)
    }
}

impl Api {
    /// Returns all routes of the bus, for a server without a layer: `_db_updates`, `_changes` of the recorded databases, sessions,
    /// events, administration, and `/`.
    pub fn routes(&self) -> Router {
        let bus = &self.inner.bus;
        self.db_updates()
            .merge(self.changes(&bus.changes(), self.recorded_databases()))
            .merge(self.catalogue(self.recorded_databases()))
            .merge(self.sessions())
            .merge(self.administration())
            .merge(self.welcome())
    }

    /// The routes of the administration: the state of the bus, its nodes, feeds and consumers, and the recording of events.
    pub fn administration(&self) -> Router {
        let routers = [self.nodes(), self.feeds(), self.consumers(), self.events(), self.incarnation()];
        routers.into_iter().fold(self.status(), Router::merge)
    }
}
