//! Errors of the client library in the terms of the store.

use ::foundationdb::FdbError;

use crate::base::error::StoreError;

/// The client's error as an error of the crate.
pub(super) fn store_error(error: FdbError) -> StoreError {
    StoreError::from_code(error.code())
}
