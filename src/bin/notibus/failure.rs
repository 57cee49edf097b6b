//! [`Failure`]: why a command failed, and its exit code.

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
            | Error::NoGroup { .. }
            | Error::BusInUse { .. }
            | Error::Expired { .. }
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

    /// The failure of a command whose store takes no more writes because of `error`.
    pub fn of_store(error: &notibus::Error, command: Option<&Self>) -> Self {
        let failed = Self::StoreFailed(format!(
            "the store takes no more writes: {error}. What was acknowledged is in its folder: mend the disk, or make room, and \
             start again"
        ));
        match command {
            Some(Self::BadInput(reason) | Self::Failed(reason) | Self::StoreFailed(reason)) => {
                failed.and(&format!("the command has ended with: {reason}"))
            }
            Some(Self::Closed) | None => failed,
        }
    }
}
