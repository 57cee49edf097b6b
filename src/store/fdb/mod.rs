//! The FoundationDB backend: implements `Backend` with the official client library.
//!
//! FoundationDB's semantics are the contract of every backend, so this backend only translates: error codes keep their numbers, the
//! client's own back-off paces retries, and watches are the client's. Calls that would make the C API abort the process, such as one with
//! an inverted range, are refused here, with the error code that the embedded engine uses.

mod network;
mod transaction;
mod wakeful;

use std::{fs, path::Path, sync::Arc, time::Duration};

use ::foundationdb::{Database as Client, FdbError, options::TransactionOption};

pub use self::network::stop as stop_network;
use self::{transaction::FdbTransaction, wakeful::Wakeful};
use super::backend::{Backend, TransactionBackend};
use crate::base::error::{Error, OpenCause, Result};

/// Options of the connection to a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FoundationDbOptions {
    /// The API version of the client library, 630 to 710. A process can choose it only once. Default: 710, which every client since 7.1
    /// offers.
    pub api_version: i32,
    /// How long opening waits for the cluster to answer. Default: 10 s.
    pub connect_timeout: Duration,
}

crate::base::macros::setters!(FoundationDbOptions { api_version: i32, connect_timeout: Duration });

impl Default for FoundationDbOptions {
    fn default() -> Self {
        Self { api_version: network::API_VERSION, connect_timeout: Duration::from_secs(10) }
    }
}

pub(super) struct Fdb(Arc<Client>);

impl Fdb {
    /// Boots the client's network, unless this process has already done so, and connects to the cluster of `cluster_file`.
    pub async fn open(cluster_file: &Path, options: &FoundationDbOptions) -> Result<Self> {
        let fail_for = |cause, reason| Error::Open { path: cluster_file.to_owned(), cause, reason };
        let fail = |reason: String| fail_for(OpenCause::Unusable, reason);
        let text = fs::read_to_string(cluster_file)
            .map_err(|error| fail_for(OpenCause::from(&error), format!("no cluster file: {error}")))?;
        if !text.contains('@') {
            return Err(fail(
                "it is not a cluster file: it has no line \"description:id@host:port\"".to_owned(),
            ));
        }
        network::boot(options.api_version)?;
        let path = cluster_file.to_str().ok_or_else(|| fail("its path is not UTF-8".to_owned()))?;
        let client = Client::from_path(path).map_err(|error| fail(explain(error)))?;
        let this = Self(Arc::new(client));
        this.check_reachable(options.connect_timeout).await.map_err(|error| {
            match error.code() {
                1031 => fail_for(
                    OpenCause::Unreachable,
                    format!(
                        "the cluster did not answer within {:?}: check that its processes run, that the file names their \
                         addresses and that a database was configured (\"fdbcli --exec status\")",
                        options.connect_timeout
                    ),
                ),
                _ if error.is_retryable() => fail_for(OpenCause::Unreachable, explain(error)),
                _ => fail(explain(error)),
            }
        })?;
        Ok(this)
    }

    /// Uses a cluster to which the caller is already connected.
    pub fn from_client(client: Arc<Client>) -> Self {
        Self(client)
    }

    /// Fails with 1031 unless the cluster hands out a read version in time.
    async fn check_reachable(&self, timeout: Duration) -> Result<(), FdbError> {
        let tx = self.0.create_trx()?;
        let millis = i32::try_from(timeout.as_millis().max(1)).unwrap_or(i32::MAX);
        tx.set_option(TransactionOption::Timeout(millis))?;
        Wakeful(tx.get_read_version()).await.map(drop)
    }
}

impl Backend for Fdb {
    fn begin(&self) -> Box<dyn TransactionBackend> {
        Box::new(FdbTransaction::new(Arc::clone(&self.0)))
    }
}

/// Explains a client error to the user who is opening a cluster.
fn explain(error: FdbError) -> String {
    format!("{} ({})", error.message(), error.code())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::error::StoreError;

    #[test]
    fn what_can_be_tried_again_is_what_the_client_says() {
        for code in 1..5_000 {
            let (ours, theirs) = (StoreError::from_code(code), FdbError::from_code(code));
            assert_eq!(ours.is_retryable(), theirs.is_retryable(), "{theirs}");
            // The client does not count 1031 as maybe committed, although the commit may still happen later.
            let is_maybe_committed = theirs.is_maybe_committed() || code == 1031;
            assert_eq!(ours.is_maybe_committed(), is_maybe_committed, "{theirs}");
        }
    }

    #[tokio::test]
    async fn a_bad_cluster_file_is_refused_before_the_network_is_booted() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("missing");
        let options = FoundationDbOptions::default();
        let error = Fdb::open(&missing, &options).await.err().unwrap();
        assert!(error.to_string().contains("no cluster file"), "{error}");
        fs::write(&missing, "hello").unwrap();
        let error = Fdb::open(&missing, &options).await.err().unwrap();
        assert!(error.to_string().contains("it is not a cluster file"), "{error}");
    }
}
