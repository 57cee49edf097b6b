//! [`Failure`]: why a command failed, and its exit code.

use std::time::Duration;

use notibus::store::OpenCause;

/// Why a command failed; determines the exit code.
#[derive(Debug)]
pub enum Failure {
    /// The input or an argument is bad: exit code 2.
    BadInput(String),
    /// The work failed, or its result is wrong: exit code 1.
    Failed(String),
    /// The store takes no more writes, or its disk does not let it be opened: exit code 3.
    StoreFailed(String),
    /// The reader of the output is gone: exit code 0, as that is the reader's choice.
    Closed,
}

impl From<notibus::Error> for Failure {
    fn from(error: notibus::Error) -> Self {
        use notibus::Error;
        match error {
            Error::Open { cause: OpenCause::SystemFailed, .. } => Self::StoreFailed(error.to_string()),
            Error::Open { cause: OpenCause::InUse, .. } => Self::Failed(error.to_string())
                .and("stop that process, or reach its node by --url if the command takes that"),
            Error::Open { cause: OpenCause::Unreachable, .. } => Self::Failed(error.to_string()),
            Error::Invalid { .. }
            | Error::Open { .. }
            | Error::ConfigMismatch { .. }
            | Error::OtherFormat { .. }
            | Error::UnknownScheme { .. }
            | Error::NoFeed { .. }
            | Error::NoShard { .. }
            | Error::NoConsumer { .. }
            | Error::BusInUse { .. }
            | Error::Expired { .. }
            | Error::OlderThanRows { .. }
            | Error::Corrupt { .. } => Self::BadInput(error.to_string()),
            error => Self::Failed(error.to_string()),
        }
    }
}

impl Failure {
    /// The same failure, with more to say.
    pub fn and(self, more: &str) -> Self {
        let and = |reason: String| format!("{reason}; {more}");
        match self {
            Self::BadInput(reason) => Self::BadInput(and(reason)),
            Self::Failed(reason) => Self::Failed(and(reason)),
            Self::StoreFailed(reason) => Self::StoreFailed(and(reason)),
            Self::Closed => Self::Closed,
        }
    }

    /// The failure of `what`, which has taken longer than `timeout`.
    pub fn gave_up(what: &str, timeout: Duration) -> Self {
        Self::Failed(format!(
            "gave up {what}, after {}. Check that the store answers (a cluster: `fdbcli --exec status`); --timeout allows more",
            humantime::format_duration(timeout)
        ))
    }
}

/// The result of `work`. If it takes longer than `timeout` it is dropped, and the failure names `what`.
pub async fn within<T, E: Into<Failure>>(
    timeout: Duration,
    what: &str,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, Failure> {
    let done = tokio::time::timeout(timeout, work).await;
    done.map_err(|_| Failure::gave_up(what, timeout))?.map_err(Into::into)
}
