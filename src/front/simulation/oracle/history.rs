//! The history of a world: everything that the oracle was informed of, so that a later oracle can judge it again.
//!
//! It is text: a line that says what the world was, and one for each thing that the oracle was informed of, in their order, as JSON.
//! Nothing of the verdicts is in it. Bytes are hexadecimal digits; keys and rows are in their stored form.

use std::{fmt::Display, str::FromStr, sync::Arc};

use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use super::{
    commit::ObservedCommit,
    given::{Given, GivenDdocs, GivenRow, Start},
    interest::{GLOBS, Interest, PREDICATES, Which},
    models::subscriber::Manner,
};
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
        event::{DbInstance, DbName, DdocId, EventKind, Kinds},
        notification::Notification,
    },
    front::simulation::{draw::Way, issuer::Issuer},
    roles::changes::Change as DocChange,
    state::{
        feed::FeedRow,
        keys::{GroupName, NodeId},
    },
    store::KeyRange,
};

/// The version of histories that is written, and read.
pub(super) const VERSION: u32 = 1;

/// The first line of a history: its world.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Head {
    /// The version.
    pub notibus_history: u32,
    /// The seed of the world.
    pub seed: u64,
    /// Partitions of the bus.
    pub partitions: u32,
    /// The names that databases have.
    pub names: Vec<Text<DbName>>,
    /// Whether databases have documents.
    pub documents: bool,
    /// The names of the databases whose jobs fail forever; `None` if there are no triggers.
    #[serde(default)]
    pub failing: Option<Vec<Text<DbName>>>,
    /// Whether no clock jumps.
    #[serde(default)]
    pub steady_clocks: bool,
    /// The names of the databases that groups can only park; `None` if groups do not park.
    #[serde(default)]
    pub unworkable: Option<Vec<Text<DbName>>>,
    /// The names of the groups that expire after the faults; `None` if there is no janitor.
    #[serde(default)]
    pub given_up: Option<Vec<Text<GroupName>>>,
}

impl Head {
    /// That of the world of `seed`, in which databases have these names, and the jobs of the `failing` ones fail.
    pub fn new(
        seed: u64,
        partitions: u32,
        names: &[DbName],
        documents: bool,
        failing: Option<&[DbName]>,
    ) -> Self {
        let text = |names: &[DbName]| names.iter().cloned().map(Text).collect();
        let (names, failing) = (text(names), failing.map(text));
        Self {
            notibus_history: VERSION,
            seed,
            partitions,
            names,
            documents,
            failing,
            steady_clocks: false,
            unworkable: None,
            given_up: None,
        }
    }
}

/// Bytes, as hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::front::simulation) struct Hex(pub Bytes);

impl Hex {
    /// A copy of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Bytes::copy_from_slice(bytes))
    }
}

impl Serialize for Hex {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use std::fmt::Write;
        let mut text = String::with_capacity(2 * self.0.len());
        for byte in &self.0 {
            write!(text, "{byte:02x}").expect("writing to a string cannot fail");
        }
        serializer.serialize_str(&text)
    }
}

impl<'de> Deserialize<'de> for Hex {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let byte = |place| u8::from_str_radix(text.get(place..place + 2)?, 16).ok();
        let bytes: Option<Vec<u8>> = (0..text.len()).step_by(2).map(byte).collect();
        bytes
            .map(|bytes| Self(bytes.into()))
            .ok_or_else(|| D::Error::custom("they are no hexadecimal digits"))
    }
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::front::simulation) struct Text<T>(pub T);

impl<T: Display> Serialize for Text<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de, T: FromStr<Err: Display>> Deserialize<'de> for Text<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map(Self).map_err(D::Error::custom)
    }
}

/// A process in one of its lives.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(in crate::front::simulation) struct By(usize, u64);

impl From<Issuer> for By {
    fn from(Issuer { process, generation }: Issuer) -> Self {
        Self(process, generation)
    }
}

impl From<By> for Issuer {
    fn from(By(process, generation): By) -> Self {
        Self { process, generation }
    }
}

/// A stored row, and where it stood.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::front::simulation) struct Row {
    seq: Sequence,
    row: Hex,
}

impl Row {
    /// The row of a notification.
    pub fn of(row: &Notification) -> Self {
        Self { seq: row.sequence, row: Hex(row.to_bytes().into()) }
    }

    /// Those of documents.
    pub fn of_docs(changes: &[Arc<DocChange>]) -> Vec<Self> {
        let rows = changes.iter();
        rows.map(|change| Self { seq: change.sequence, row: Hex(change.doc.to_bytes().into()) }).collect()
    }

    fn read<R: FeedRow>(&self) -> Result<Arc<R>> {
        R::from_stored(self.seq, &self.row.0).map(Arc::new)
    }

    /// What all of them say.
    pub fn all<R: FeedRow>(rows: &[Self]) -> Result<Vec<Arc<R>>> {
        rows.iter().map(Self::read).collect()
    }
}

/// Kinds of events, by their names.
type KindNames = Vec<String>;

pub(super) fn kind_names(kinds: Kinds) -> KindNames {
    kinds.iter().map(|kind| kind.as_str().to_owned()).collect()
}

pub(super) fn kind(name: &str) -> Result<EventKind> {
    let found = EventKind::ALL.into_iter().find(|kind| kind.as_str() == name);
    found.ok_or_else(|| wrong(format!("{name:?} is no kind of event")))
}

#[derive(Debug, Serialize, Deserialize)]
pub(in crate::front::simulation) struct Wanted {
    of: WantedOf,
    kinds: KindNames,
    ddocs: Option<Vec<String>>,
    asks: bool,
}

/// Which databases a subscriber wants.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum WantedOf {
    All,
    Names(Vec<Text<DbName>>),
    Prefix(String),
    Suffix(String),
    Glob(String),
    Predicate(String),
    Any(Vec<Wanted>),
}

impl From<&Interest> for Wanted {
    fn from(Interest { which, kinds, ddocs, asks }: &Interest) -> Self {
        let of = match which {
            Which::All => WantedOf::All,
            Which::Names(names) => WantedOf::Names(names.iter().cloned().map(Text).collect()),
            Which::Prefix(prefix) => WantedOf::Prefix(prefix.clone().into()),
            Which::Suffix(suffix) => WantedOf::Suffix(suffix.clone().into()),
            Which::Glob(glob) => WantedOf::Glob(glob.pattern().to_owned()),
            Which::Predicate(predicate) => WantedOf::Predicate(predicate.title().to_owned()),
            Which::Any(interests) => WantedOf::Any(interests.iter().map(Self::from).collect()),
        };
        let ddocs = ddocs.as_ref().map(|ids| ids.iter().map(|id| id.as_str().to_owned()).collect());
        Self { of, kinds: kind_names(*kinds), ddocs, asks: *asks }
    }
}

impl Wanted {
    /// Converts it back.
    pub fn read(self) -> Result<Interest> {
        let which = match self.of {
            WantedOf::All => Which::All,
            WantedOf::Names(names) => Which::Names(names.into_iter().map(|name| name.0).collect()),
            WantedOf::Prefix(prefix) => Which::Prefix(prefix.into()),
            WantedOf::Suffix(suffix) => Which::Suffix(suffix.into()),
            WantedOf::Glob(pattern) => {
                let glob = GLOBS.into_iter().find(|glob| glob.pattern() == pattern);
                Which::Glob(glob.ok_or_else(|| wrong(format!("the glob {pattern:?} is unknown")))?)
            }
            WantedOf::Predicate(title) => {
                let predicate = PREDICATES.into_iter().find(|predicate| predicate.title() == title);
                Which::Predicate(
                    predicate.ok_or_else(|| wrong(format!("the predicate {title:?} is unknown")))?,
                )
            }
            WantedOf::Any(interests) => {
                Which::Any(interests.into_iter().map(Self::read).collect::<Result<_>>()?)
            }
        };
        let kinds = self.kinds.iter().map(|name| kind(name)).collect::<Result<_>>()?;
        let ids = self.ddocs.map(|ids| ids.iter().map(|id| DdocId::new(id)).collect::<Result<_>>());
        Ok(Interest { which, kinds, ddocs: ids.transpose()?, asks: self.asks })
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::front::simulation) enum Received {
    Row { row: Row, news: Vec<(Text<DbInstance>, String)>, wanted_by: Vec<usize>, ddocs: Option<Ddocs> },
    Lagged { from: Sequence, to: Sequence },
    Expired { horizon: Sequence },
    Synced { at: Sequence },
    Failed,
}

/// Which design documents have changed.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::front::simulation) struct Ddocs {
    since: Start,
    ids: Vec<(String, Sequence)>,
    may_be_any: bool,
}

impl From<&Given> for Received {
    fn from(given: &Given) -> Self {
        match given {
            Given::Row(GivenRow { row, news, wanted_by, ddocs }) => Self::Row {
                row: Row::of(row),
                news: news.iter().map(|(db, kind)| (Text(*db), kind.as_str().to_owned())).collect(),
                wanted_by: wanted_by.clone(),
                ddocs: ddocs.as_ref().map(|GivenDdocs { since, ids, may_be_any }| Ddocs {
                    since: *since,
                    ids: ids.iter().map(|(id, at)| (id.as_str().to_owned(), *at)).collect(),
                    may_be_any: *may_be_any,
                }),
            },
            Given::Lagged { from, to } => Self::Lagged { from: *from, to: *to },
            Given::Expired { horizon } => Self::Expired { horizon: *horizon },
            Given::Synced { at } => Self::Synced { at: *at },
            Given::Failed => Self::Failed,
        }
    }
}

impl Received {
    /// Converts it back.
    pub fn read(self) -> Result<Given> {
        Ok(match self {
            Self::Row { row, news, wanted_by, ddocs } => {
                let read = |Ddocs { since, ids, may_be_any }| {
                    let ids = ids.into_iter().map(|(id, at)| Ok((DdocId::new(&id)?, at)));
                    Ok::<_, Error>(GivenDdocs { since, ids: ids.collect::<Result<_>>()?, may_be_any })
                };
                let ddocs = ddocs.map(read).transpose()?;
                let news = news.into_iter().map(|(db, name)| Ok((db.0, kind(&name)?)));
                Given::Row(GivenRow {
                    row: row.read()?,
                    news: news.collect::<Result<_>>()?,
                    wanted_by,
                    ddocs,
                })
            }
            Self::Lagged { from, to } => Given::Lagged { from, to },
            Self::Expired { horizon } => Given::Expired { horizon },
            Self::Synced { at } => Given::Synced { at },
            Self::Failed => Given::Failed,
        })
    }
}

/// What the oracle was informed of.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "saw", rename_all = "snake_case")]
pub(in crate::front::simulation) enum HistoryEvent {
    Joined {
        by: By,
        node: Text<NodeId>,
    },
    Crashed {
        by: By,
    },
    Gone {
        by: By,
    },
    /// The store was opened again, with these nodes in it.
    OpenedAgain {
        nodes: Vec<Text<NodeId>>,
    },
    WatchLost {
        by: By,
        key: Hex,
    },
    /// Each key with its value before and after.
    Committed {
        by: By,
        at: Hex,
        is_late: bool,
        touched: Vec<(Hex, Option<Hex>, Option<Hex>)>,
    },
    Refused {
        by: By,
        is_late: bool,
        code: Option<i32>,
        keys: Vec<Hex>,
        conflicts: Vec<(Hex, Hex)>,
    },
    Observed {
        group: Text<GroupName>,
        generation: u64,
        rows: Vec<Sequence>,
    },
    /// An operator resets or deletes a group.
    Operates {
        by: By,
        group: Text<GroupName>,
        is_forced: bool,
    },
    Subscribed {
        id: u64,
        by: By,
        interest: Wanted,
        manner: Manner,
        start: Start,
    },
    SubscribedDurably {
        id: u64,
        by: By,
        cursor: String,
        interest: Wanted,
        manner: Manner,
    },
    Resumed {
        id: u64,
        by: By,
        manner: Manner,
        start: Start,
    },
    Replaced {
        id: u64,
        interest: Wanted,
        start: Option<Start>,
    },
    Stands {
        id: u64,
        at: Start,
    },
    Given {
        id: u64,
        given: Received,
    },
    Followed {
        id: u64,
        by: By,
    },
    Unfollowed {
        id: u64,
    },
    FollowedRows {
        id: u64,
        rows: Vec<Row>,
    },
    FollowedOver {
        id: u64,
        shard: u64,
    },
    DocTailed {
        id: u64,
        by: By,
        instance: Text<DbInstance>,
        start: Sequence,
    },
    DocTailRead {
        id: u64,
        rows: Vec<Row>,
    },
    DocTailEnded {
        id: u64,
        reason: String,
    },
    #[cfg(feature = "http")]
    DocTailGoesOn {
        id: u64,
    },
    #[cfg(feature = "http")]
    WebClient {
        id: u64,
        process: usize,
        number: u32,
        kinds: KindNames,
        start: Option<Sequence>,
    },
    #[cfg(feature = "http")]
    WebHopped {
        one: u64,
        other: u64,
    },
    #[cfg(feature = "http")]
    WebAsks {
        id: u64,
    },
    #[cfg(feature = "http")]
    WebRow {
        id: u64,
        name: String,
        kind: String,
        seq: String,
    },
    #[cfg(feature = "http")]
    WebStands {
        id: u64,
        seq: String,
    },
    #[cfg(feature = "http")]
    WebExpired {
        id: u64,
        horizon: Sequence,
    },
    #[cfg(feature = "http")]
    WebChange {
        id: u64,
        seq: String,
        doc: String,
        rev: String,
        is_deleted: bool,
    },
    /// The whole feed was read.
    Pages {
        rows: Vec<Row>,
    },
    /// All documents of a database were read.
    DocPages {
        instance: Text<DbInstance>,
        rows: Vec<Row>,
    },
    /// The bus has moved to another store.
    Moved {
        way: Way,
    },
    /// Everything has come to rest.
    Rested,
    /// All processes have shut down.
    Ended,
}

impl HistoryEvent {
    /// The reader that it is about, if that has begun before.
    pub fn reader_mut(&mut self) -> Option<&mut u64> {
        match self {
            Self::Resumed { id, .. }
            | Self::Replaced { id, .. }
            | Self::Stands { id, .. }
            | Self::Given { id, .. }
            | Self::Unfollowed { id }
            | Self::FollowedRows { id, .. }
            | Self::FollowedOver { id, .. }
            | Self::DocTailRead { id, .. }
            | Self::DocTailEnded { id, .. } => Some(id),
            #[cfg(feature = "http")]
            Self::DocTailGoesOn { id }
            | Self::WebAsks { id }
            | Self::WebRow { id, .. }
            | Self::WebStands { id, .. }
            | Self::WebExpired { id, .. }
            | Self::WebChange { id, .. } => Some(id),
            _ => None,
        }
    }

    /// A commit.
    pub fn of_commit(seen: &ObservedCommit<'_>) -> Self {
        let value = |value: &Option<Bytes>| value.clone().map(Hex);
        let touched = seen.touched.iter();
        Self::Committed {
            by: seen.issuer.into(),
            at: Hex::of(&seen.stamp.0),
            is_late: seen.is_late,
            touched: touched
                .map(|(key, change)| (Hex(key.clone()), value(&change.before), value(&change.after)))
                .collect(),
        }
    }

    /// A commit that the store has refused.
    pub fn of_refusal(
        (issuer, is_late): (Issuer, bool),
        code: Option<i32>,
        keys: &[Bytes],
        conflicts: &[KeyRange],
    ) -> Self {
        let range = |range: &KeyRange| (Hex(range.begin.clone()), Hex(range.end.clone()));
        Self::Refused {
            by: issuer.into(),
            is_late,
            code,
            keys: keys.iter().cloned().map(Hex).collect(),
            conflicts: conflicts.iter().map(range).collect(),
        }
    }
}

pub(super) fn wrong(reason: String) -> Error {
    Error::invalid("history", reason)
}
