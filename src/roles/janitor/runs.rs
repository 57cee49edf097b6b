//! Clears old results of runs that were committed exactly once.

use super::pass::Pass;
use crate::{
    base::error::Result,
    state::{
        exactly_once::{RETENTION, swept_version},
        keys::RunResult,
    },
    store::{Isolation, RangeRead},
};

const PAGE_ROWS: usize = 1_000;

impl Pass<'_> {
    /// Clears the results that are older than [`RETENTION`], in pages.
    pub async fn forget_runs(&self) -> Result<()> {
        let keys = &self.context.keys;
        let horizon = keys.runs_swept();
        let mut rest = Some(RangeRead::new(keys.run_results()).limit(PAGE_ROWS));
        while let Some(read) = rest {
            let page = self
                .write(async |tx| {
                    let (page, swept) = tokio::try_join!(
                        tx.get_range(&read, Isolation::Snapshot),
                        // Serializable: a late commit of an earlier attempt must not clear the next run of a key.
                        tx.get(&horizon, Isolation::Serializable)
                    )?;
                    let old = tx.read_version().await?.saturating_sub(RETENTION);
                    let mut cleared = 0;
                    for (key, value) in &page.rows {
                        let result = RunResult::from_bytes(value).map_err(|error| error.at(key))?;
                        if result.versionstamp.version() < old {
                            tx.clear(key);
                            cleared += 1;
                        }
                    }
                    if cleared > 0 {
                        let swept =
                            swept_version(swept.as_deref()).map_err(|error| error.at(&horizon))?.max(old);
                        tx.set(&horizon, &swept.to_be_bytes());
                    }
                    Ok(page)
                })
                .await?;
            rest = read.after(&page);
        }
        Ok(())
    }
}
