//! [`SizePlan`]: extreme sizes, each in a few worlds.
//!
//! A crowded world has a fast network: its roles have so much to do that they would take too long with a slow one.

use std::time::Duration;

use fastrand::Rng;
use notibus::{event::DbName, node::BalanceOptions};

use super::WorldPlan;

/// Which sizes in a world are unusual.
#[derive(Debug, Clone, Copy, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is drawn by itself")]
pub(crate) struct SizePlan {
    /// Whether names have the maximum length.
    pub has_long_names: bool,
    /// Whether one partition has thousands of databases, and transactions record events of hundreds of them.
    pub is_crowded: bool,
    /// Whether the feed begins with hundreds of shards.
    pub has_many_shards: bool,
    /// Whether each dispatcher has hundreds of subscribers.
    pub has_many_subscribers: bool,
    /// Whether the durations that a bus can do without have the maximum value.
    pub has_endless_durations: bool,
}

impl SizePlan {
    fn draw(random: &mut Rng) -> Self {
        Self {
            has_long_names: random.u32(0..16) == 0,
            is_crowded: random.u32(0..160) == 0,
            has_many_shards: random.u32(0..160) == 0,
            has_many_subscribers: random.u32(0..80) == 0,
            has_endless_durations: random.u32(0..12) == 0,
        }
    }
}

impl WorldPlan {
    /// Makes sizes extreme, in some worlds.
    pub(super) fn with_sizes(mut self, random: &mut Rng) -> Self {
        self.sizes = SizePlan::draw(random);
        if self.sizes.is_crowded {
            self.crowd(random);
        }
        if self.sizes.has_many_shards {
            self.shards = random.u32(300..=1_000);
            self.grow_roomy();
        }
        if self.sizes.has_long_names {
            self.names.iter_mut().for_each(|name| *name = lengthened(name));
            // Otherwise not even one database with such a name would fit into a fold.
            self.fold_size_max = self.fold_size_max.map(|size| size * 10);
        }
        if self.sizes.has_many_subscribers {
            // Otherwise hundreds of subscribers wait for one another, one row at a time, for longer than the judge waits for them.
            self.dispatcher.catch_ups_max = self.dispatcher.catch_ups_max.max(2);
            self.dispatcher.catch_up_rows_max = self.dispatcher.catch_up_rows_max.max(10);
        }
        if self.sizes.has_endless_durations {
            self.lengthen_durations();
        }
        self
    }

    /// Puts thousands of databases into one partition, without documents.
    fn crowd(&mut self, random: &mut Rng) {
        let names = (0..random.u32(1_000..=2_500)).map(|number| DbName::new(&format!("n/{number}")));
        self.names.extend(names.map(|name| name.expect("it is short")));
        self.partitions = 1;
        self.documents = None;
        self.churns_names = false;
        self.fold_size_max = None;
        self.think_max_ms = 200;
        self.grow_roomy();
    }

    /// Makes the limits of the roles large enough for this much work.
    fn grow_roomy(&mut self) {
        self.latency_us = self.latency_us.min(500);
        self.slow_ms = self.slow_ms.min(500);
        self.notifier.fold_rows_max = 1_000;
        self.dispatcher.page_rows_max = 1_000;
        self.dispatcher.catch_up_rows_max = 256;
    }

    /// Sets the durations that only limit failures, or how long things are kept, to the maximum.
    fn lengthen_durations(&mut self) {
        let lengthen = |balance: &mut BalanceOptions| balance.handover = Duration::MAX;
        lengthen(&mut self.notifier.balance);
        lengthen(&mut self.janitor.balance);
        self.notifier.fold_interval_max = Duration::MAX;
        self.notifier.fold_percent = self.notifier.fold_percent.max(25);
    }
}

/// Returns `name`, padded to the maximum length, with the same prefix and the same suffix.
fn lengthened(name: &DbName) -> DbName {
    let name = name.as_str();
    // The prefix and the suffix of "shop/_replicator" share the "/".
    let (begin, end) =
        name.rsplit_once('/').map_or((name, ""), |(begin, _)| (&name[..=begin.len()], &name[begin.len()..]));
    let padding = "-".repeat(DbName::LEN_MAX - begin.len() - end.len());
    DbName::new(&format!("{begin}{padding}{end}")).expect("it is as long as a name may be")
}
