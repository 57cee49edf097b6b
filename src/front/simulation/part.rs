//! [`Part`]: the parts that a world can do without, so that a failing one can be made small.

use super::witness::{Fault, named};

named! {
    /// An actor of a world that can be left out.
    Actor {
        /// The documents of databases, and all their readers.
        Documents,
        /// Triggers and their jobs.
        Jobs,
        /// Clients over HTTP.
        Web,
        /// The other bus in the store.
        OtherBus,
        /// Groups, and their consumers.
        Groups,
        /// Subscribers.
        Subscribers,
        /// Followers, which read the feed shard by shard.
        Followers,
        /// Janitors.
        Janitor,
        /// Operators, which change topologies and groups.
        Operator,
        /// Undecodable rows.
        BrokenRows,
        /// Folds with little room.
        SmallFolds,
        /// The disk below the store.
        Disk,
        /// The move of the bus to another store.
        Relocation,
        /// Sizes that hurt: long names, thousands of databases or shards, endless durations.
        Sizes,
    }
}

/// A part of a world that is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// An actor.
    Actor(Actor),
    /// A fault.
    Fault(Fault),
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Actor(actor) => actor.fmt(f),
            Self::Fault(fault) => fault.fmt(f),
        }
    }
}

impl std::str::FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::all().find(|part| part.to_string().eq_ignore_ascii_case(text));
        let all = || Self::all().map(|part| part.to_string()).collect::<Vec<_>>().join(", ");
        found.ok_or_else(|| format!("{text:?} is no part of a world; the parts are {}", all()))
    }
}

impl Part {
    /// All parts.
    pub fn all() -> impl Iterator<Item = Self> {
        let actors = Actor::ALL.iter().copied().map(Self::Actor);
        actors.chain(Fault::ALL.iter().copied().map(Self::Fault))
    }
}
