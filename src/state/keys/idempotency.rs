//! Family 24: the results of runs that are committed exactly once, by the key of each run.

use super::{Keys, family};
use crate::{
    base::{
        encoding::{Reader, STAMP_LEN, Versionstamp, versionstamped},
        error::Result,
    },
    store::KeyRange,
};

/// The stored result of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RunResult {
    /// The commit of the run.
    pub versionstamp: Versionstamp,
    /// Identifies the run among all runs with its key.
    pub run: [u8; 16],
    /// What the body returned, as JSON.
    pub value: Vec<u8>,
}

impl RunResult {
    /// The operand of `SET_VERSIONSTAMPED_VALUE` that stores the result of `run`.
    pub fn operand(run: &[u8; 16], value: &[u8]) -> Vec<u8> {
        versionstamped(&[], &[run, value].concat())
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("idempotency key", bytes);
        let stamp = reader.take(STAMP_LEN)?.try_into().expect("as many bytes were taken");
        let run = reader.bytes16()?;
        let value = reader.take(bytes.len() - STAMP_LEN - run.len())?.to_vec();
        Ok(Self { versionstamp: Versionstamp(stamp), run, value })
    }
}

impl Keys {
    /// The key that stores the result of the run with the idempotency key `key`.
    pub fn run_result(&self, key: &[u8]) -> Vec<u8> {
        self.pack(&(family::IDEMPOTENCY, 0_u16, key))
    }

    pub fn run_results(&self) -> KeyRange {
        self.range(&(family::IDEMPOTENCY, 0_u16))
    }

    /// The key that stores the version before which results were cleared.
    pub fn runs_swept(&self) -> Vec<u8> {
        self.pack(&(family::IDEMPOTENCY, 1_u16))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes() {
        let keys = Keys::new(b"p").unwrap();
        let key = keys.run_result(&[9; 16]);
        assert_eq!(key, [&[b'p', 0x15, 24, 0x14, 1][..], &[9; 16], &[0]].concat());
        assert_eq!(keys.runs_swept(), [b'p', 0x15, 24, 0x15, 1]);
        assert!(keys.run_results().contains(&key) && !keys.run_results().contains(&keys.runs_swept()));

        let operand = RunResult::operand(&[8; 16], b"null");
        assert_eq!(operand, [&[0; 10][..], &[8; 16], b"null", &[0; 4]].concat());
        let stamp = Versionstamp::new(5, 6);
        let stored = [&stamp.0[..], &[8; 16], b"null"].concat();
        let result = RunResult { versionstamp: stamp, run: [8; 16], value: b"null".to_vec() };
        assert_eq!(RunResult::from_bytes(&stored).unwrap(), result);
        assert!(RunResult::from_bytes(&stored[..25]).is_err());
    }
}
