//! [`Pages`]: a range, a page at a time.

use super::{Isolation, RangeRead, Row, Transaction};
use crate::base::error::Result;

/// The pages of a range, one after the other, within one transaction.
pub struct Pages<'a> {
    transaction: &'a Transaction,
    rest: Option<RangeRead>,
    isolation: Isolation,
}

impl Transaction {
    /// All pages of `read`, one at a time.
    pub fn pages(&self, read: RangeRead, isolation: Isolation) -> Pages<'_> {
        Pages { transaction: self, rest: Some(read), isolation }
    }
}

impl Pages<'_> {
    /// The rows of the next page; `None` at the end. Cancel safe: a page that was not returned is read again.
    pub async fn next(&mut self) -> Result<Option<Vec<Row>>> {
        let Some(read) = &self.rest else {
            return Ok(None);
        };
        let page = self.transaction.get_range(read, self.isolation).await?;
        self.rest = self.rest.take().and_then(|read| read.after(&page));
        Ok((!page.rows.is_empty()).then_some(page.rows))
    }
}
