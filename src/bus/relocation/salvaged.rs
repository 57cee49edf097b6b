//! The configuration of a damaged bus, which may have lost it.

use crate::{
    base::{
        encoding::Incarnation,
        error::{Error, Result},
    },
    state::keys::{Config, Keys},
    store::{Database, Isolation, RangeRead},
};

/// The stored configuration. If it is lost, one with these `partitions` and the incarnation of the newest row.
pub(crate) async fn salvaged(db: &Database, keys: &Keys, partitions: Option<u32>) -> Result<Config> {
    let stored = db.run(async |tx| tx.get(&keys.config(), Isolation::Snapshot).await).await?;
    match (stored.map(|stored| Config::from_bytes(&stored)), partitions) {
        (Some(Ok(config)), Some(requested)) if requested != config.partitions => Err(Error::ConfigMismatch {
            what: "partitions",
            stored: config.partitions.into(),
            requested: requested.into(),
        }),
        (Some(Ok(config)), _) => Ok(config),
        (_, Some(partitions)) => Ok(Config { partitions, incarnation: newest_incarnation(db, keys).await? }),
        (lost, None) => {
            let lost = lost.and_then(Result::err).map(|error| format!(" ({error})")).unwrap_or_default();
            let reason = format!(
                "no configuration of a bus is left under \"{}\"{lost}: give the number of its partitions, which is 64 unless \
                 it was created with another one",
                keys.prefix().escape_ascii()
            );
            Err(Error::invalid("partitions", reason))
        }
    }
}

/// The last incarnation in which a row of a feed was written.
async fn newest_incarnation(db: &Database, keys: &Keys) -> Result<Incarnation> {
    let mut newest = Incarnation(0);
    let mut rest = Some(RangeRead::new(keys.all_entries()));
    while let Some(read) = rest {
        let page = db.run(async |tx| tx.get_range(&read, Isolation::Snapshot).await).await?;
        let incarnations = page.rows.iter().filter_map(|(key, _)| keys.entry_incarnation(key).ok());
        newest = incarnations.chain([newest]).max().expect("it has the present one");
        rest = read.after(&page);
    }
    Ok(newest)
}
