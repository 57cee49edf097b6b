//! The check of a replay: the final feed against the history.

use std::{collections::HashMap, sync::Arc};

use notibus::{Bus, Cursor, Notification, event::Counters};

use super::{
    history::{History, Name},
    progress::Progress,
};
use crate::failure::Failure;

/// The feed after a replay: one row per database.
pub struct FinalFeed {
    /// All rows, in order.
    pub rows: Vec<Arc<Notification>>,
    /// The rows of names that the history has.
    pub of_history: Vec<Arc<Notification>>,
}

impl FinalFeed {
    /// Reads the feed.
    pub async fn read(bus: &Bus, history: &History, progress: &Progress) -> Result<Self, Failure> {
        let feed = bus.feed();
        let mut rows = Vec::new();
        let mut cursor = Cursor::NOTHING;
        loop {
            let page = feed.page(cursor, 1_000).await?;
            progress.moves.step();
            rows.extend(page.rows);
            if !page.more {
                break;
            }
            cursor = page.next;
        }
        let names: HashMap<_, _> = history.names.iter().map(|name| (&name.text, name)).collect();
        let of_history = rows.iter().filter(|row| names.contains_key(&row.name)).cloned().collect();
        Ok(Self { rows, of_history })
    }
}

/// The differences between the history and the feed; empty if there are none.
pub fn compare(history: &History, feed: &FinalFeed, folded: Counters) -> Vec<String> {
    let mut differences = Vec::new();
    if folded != history.recorded {
        differences.push(format!("recorded {:?}, but folded {folded:?}", history.recorded));
    }
    if !feed.rows.is_sorted_by(|a, b| a.sequence < b.sequence) {
        differences.push("the feed is not in order".to_owned());
    }
    let mut rows: HashMap<_, _> = HashMap::new();
    for row in &feed.of_history {
        if rows.insert(&row.name, row).is_some() {
            differences.push(format!("{:?} has more than one row", row.name));
        }
    }
    for name in &history.names {
        match rows.get(&name.text) {
            None => differences.push(format!("{:?} has no row", name.text)),
            Some(row) => differences.extend(compare_row(history, name, row)),
        }
    }
    differences
}

/// The difference between the history of a name and its row.
fn compare_row(history: &History, name: &Name, row: &Notification) -> Option<String> {
    if row.is_deleted() == name.lives {
        let (is, should) = if name.lives { ("deleted", "live") } else { ("live", "be deleted") };
        return Some(format!("{:?} is {is} in the feed, but should {should}", name.text));
    }
    // If all instances were created and deleted within one fold, their order is unknown.
    let last = name.instances.last().filter(|_| name.lives).map(|&last| &history.instances[last])?;
    if row.instance != last.db.instance {
        return Some(format!(
            "{:?} has the row of instance {}, not {}",
            name.text, row.instance, last.db.instance
        ));
    }
    (row.totals != last.totals)
        .then(|| format!("{:?} has totals {:?}, its history {:?}", name.text, row.totals, last.totals))
}
