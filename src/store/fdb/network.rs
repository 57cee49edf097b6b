//! The client's network thread: booted at most once per process, and stopped before the process exits.

use std::panic::{AssertUnwindSafe, catch_unwind};

use parking_lot::Mutex;

use ::foundationdb::{
    FdbError,
    api::{FdbApiBuilder, NetworkAutoStop, NetworkBuilder, get_max_api_version},
};

use crate::base::error::{Error, Result};

/// The default API version, and the newest that this crate can use: an old one, so that one build runs with every client library since 7.1.
pub(super) const API_VERSION: i32 = 710;

/// The oldest API version that the backend can use: since 610 a retry keeps the limits on time and retries, and since 630 conflicting
/// ranges are reported.
const API_VERSION_MIN: i32 = 630;

enum Network {
    /// The network has not been booted yet.
    Down,
    /// The network runs with this API version, until the guard is dropped.
    Up {
        api_version: i32,
        /// Stops the network thread when it is dropped.
        _guard: NetworkAutoStop,
    },
    /// The network was stopped, or could not be booted; the client library allows no second attempt.
    Over,
}

static NETWORK: Mutex<Network> = Mutex::new(Network::Down);

/// Boots the network with `api_version`, unless it is already running.
///
/// Fails with [`Error::Invalid`] if the client library does not offer the version, if another one was chosen before, or if
/// something else has booted the network.
pub(super) fn boot(api_version: i32) -> Result<()> {
    let mut network = NETWORK.lock();
    match *network {
        Network::Up { api_version: chosen, .. } if chosen == api_version => return Ok(()),
        Network::Up { api_version: chosen, .. } => {
            return Err(Error::invalid(
                "API version",
                format!("{api_version} was requested, but this process already uses {chosen}"),
            ));
        }
        Network::Over => {
            return Err(Error::invalid("network", "it was stopped earlier, or could not be booted"));
        }
        Network::Down => {}
    }
    let offered = get_max_api_version();
    // The client must not see an invalid version, because after that it would accept no other.
    if !(API_VERSION_MIN..=API_VERSION.min(offered)).contains(&api_version) {
        return Err(Error::invalid(
            "API version",
            format!(
                "{api_version} is not available: this program is built for {API_VERSION_MIN} to {API_VERSION}, the \
                 client library offers up to {offered}"
            ),
        ));
    }
    // The client panics if the API version was chosen before; only another user of the client in this process can have done that.
    let builder = FdbApiBuilder::default().set_runtime_version(api_version);
    let builder = catch_unwind(AssertUnwindSafe(|| builder.build())).map_err(|_| {
        Error::invalid(
            "network",
            "something else in this process has booted it: hand its connection to Store::from_foundationdb",
        )
    })?;
    let failed = |error| Error::invalid("network", format!("it cannot be booted: {error}"));
    *network = Network::Over;
    let guard = start(builder.map_err(failed)?).map_err(failed)?;
    *network = Network::Up { api_version, _guard: guard };
    Ok(())
}

#[expect(unsafe_code, reason = "the client has no safe form of this call")]
fn start(builder: NetworkBuilder) -> Result<NetworkAutoStop, FdbError> {
    // SAFETY: the guard must be dropped before the process ends, which is what `stop` is for; its documentation passes this duty on to the
    // code that ends the process.
    unsafe { builder.boot() }
}

/// Stops the network thread and waits for it to end. Current and later operations on a cluster wait forever, and the network cannot be
/// booted again.
///
/// Call this last in `main`. A process that exits without this call may crash, because the client library tears itself down while its
/// thread is still running. An exit handler is too late: by then the library has already torn down parts of itself, and stopping crashes.
pub fn stop() {
    *NETWORK.lock() = Network::Over;
}
