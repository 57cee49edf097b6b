//! A node that serves on loopback.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use notibus::{
    Bus, Db, Dispatcher, DispatcherOptions, EventKind, Notification, Notifier, NotifierOptions,
    http::{Api, ApiOptions, Authorize, Credentials, Server, ServerOptions, axum::Router},
    store::Store,
};

use crate::common::{self, joined, narrow_bus, record, until};

/// A node that serves on loopback.
pub struct HttpFixture {
    pub store: Store,
    pub bus: Bus,
    /// The notifier, which folds at once.
    _notifier: Notifier,
    pub dispatcher: Arc<Dispatcher>,
    pub api: Api,
    pub server: Server,
}

/// Returns options for a notifier that folds almost at once.
pub fn quick() -> NotifierOptions {
    NotifierOptions::default().fold_interval_max(Duration::from_millis(1))
}

impl HttpFixture {
    /// Starts a node with the default options.
    pub async fn new() -> Self {
        Self::with(ApiOptions::default(), ServerOptions::default(), |api, _, _| api.db_updates()).await
    }

    /// Starts a node with these options that serves `router`.
    pub async fn with(
        options: ApiOptions,
        limits: ServerOptions,
        router: impl FnOnce(&Api, &Store, &Bus) -> Router,
    ) -> Self {
        Self::dispatched(DispatcherOptions::default(), options, limits, router).await
    }

    /// Does the same as [`HttpFixture::with`], with options for the dispatcher, too.
    pub async fn dispatched(
        dispatcher: DispatcherOptions,
        options: ApiOptions,
        limits: ServerOptions,
        router: impl FnOnce(&Api, &Store, &Bus) -> Router,
    ) -> Self {
        Self::over(Store::memory(), dispatcher, options, limits, router).await
    }

    /// Does the same as [`HttpFixture::dispatched`], on `store`.
    pub async fn over(
        store: Store,
        dispatcher: DispatcherOptions,
        options: ApiOptions,
        limits: ServerOptions,
        router: impl FnOnce(&Api, &Store, &Bus) -> Router,
    ) -> Self {
        let bus = narrow_bus(&store).await;
        let notifier = joined(&bus).await.notifier(quick()).await.unwrap();
        let dispatcher = Arc::new(bus.dispatcher(dispatcher).await.unwrap());
        let api = Api::start(&bus, &dispatcher, options).unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = Server::start(listener, router(&api, &store, &bus), limits, store.env()).unwrap();
        Self { store, bus, _notifier: notifier, dispatcher, api, server }
    }

    /// Returns the address that the server listens on.
    pub fn at(&self) -> SocketAddr {
        self.server.local_addr()
    }

    /// Commits an event, and waits until it is folded. Returns the row.
    pub async fn event(&self, database: &Db, kind: EventKind) -> Notification {
        let before = self.bus.stats().folded.total();
        record(&self.store, &self.bus, database, kind.once().lanes()).await;
        until("a fold", async || self.bus.stats().folded.total() > before).await;
        let row = common::row(&self.bus, database).await.unwrap();
        until("the tail", async || self.dispatcher.position() >= row.sequence).await;
        row
    }
}

/// Returns the row of a database as it is sent to a client. Its position is a plain sequence.
pub fn row(row: &Notification, kind: &str) -> String {
    format!("{{\"db_name\":\"{}\",\"type\":\"{kind}\",\"seq\":\"{}\"}}", row.name, row.sequence)
}

/// Returns the secret of `name` in these tests.
pub fn secret(name: &str) -> String {
    format!("{name}-0123456789abcdef0123456789abcdef")
}

/// Returns the credentials line of `name`.
pub fn line(name: &str) -> String {
    Credentials::line(name, &secret(name)).unwrap()
}

/// Returns an authorizer that knows the names in these lines.
pub fn credentials(lines: &[String]) -> Arc<dyn Authorize> {
    Arc::new(lines.join("\n").parse::<Credentials>().unwrap())
}

/// Returns the header with which `name` sends its secret as a token.
pub fn bearer(name: &str) -> String {
    format!("Authorization: Bearer {}\r\n", secret(name))
}

/// Returns the header with which `name` sends `secret` as a password.
pub fn basic(name: &str, secret: &str) -> String {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let encode = |part: &[u8]| {
        let bits =
            part.iter().fold(0_u32, |bits, &byte| bits << 8 | u32::from(byte)) << (8 * (3 - part.len()));
        (0..4)
            .map(|place| {
                let digit = DIGITS[(bits >> (18 - 6 * place)) as usize & 63] as char;
                if place <= part.len() { digit } else { '=' }
            })
            .collect::<String>()
    };
    let encoded: String = format!("{name}:{secret}").as_bytes().chunks(3).map(encode).collect();
    format!("Authorization: Basic {encoded}\r\n")
}
