//! A history, judged again by an oracle that sees nothing else.

use std::{collections::BTreeMap, fmt::Display};

#[cfg(feature = "http")]
use super::history::kind;
use super::{
    Oracle,
    commit::{Change, ObservedCommit},
    history::{Head, Hex, HistoryEvent, Row, VERSION, wrong},
    moves::moved,
};
use crate::{
    base::{
        encoding::Versionstamp,
        error::{Error, Result},
    },
    front::simulation::{
        findings::Findings,
        guarantee::{Broken, Guarantee},
        issuer::Issuer,
        keyspace::Rows,
    },
    state::keys::ShardId,
    store::KeyRange,
};

impl HistoryEvent {
    /// Informs `oracle` of it.
    pub fn apply(self, oracle: &mut Oracle, findings: &Findings, values: &mut Rows) -> Result<()> {
        match self {
            Self::Joined { by, node } => oracle.joined(by.into(), node.0),
            Self::Crashed { by } => oracle.crashed(by.into()),
            Self::Gone { by } => oracle.gone(by.into()),
            Self::OpenedAgain { nodes } => {
                oracle.opened_again(nodes.into_iter().map(|node| node.0).collect());
            }
            Self::WatchLost { by, key } => oracle.watch_lost(by.into(), &key.0),
            Self::Committed { by, at, is_late, touched } => {
                commit(oracle, findings, values, (by.into(), is_late), &at, touched)?;
            }
            Self::Refused { by, is_late, code, keys, conflicts } => {
                let keys: Vec<_> = keys.into_iter().map(|key| key.0).collect();
                let range = |(begin, end): (Hex, Hex)| KeyRange { begin: begin.0, end: end.0 };
                let conflicts: Vec<_> = conflicts.into_iter().map(range).collect();
                oracle.refused(findings, (by.into(), is_late), code, &keys, &conflicts);
            }
            Self::Observed { group, generation, rows } => oracle.observed(&group.0, generation, &rows),
            Self::Operates { by, group, is_forced } => oracle.operates(by.into(), &group.0, is_forced),
            Self::Moved { way } => {
                oracle.moved(way);
                *values = moved(values, way);
            }
            Self::Pages { rows } => fails(findings, oracle.judge_pages(&Row::all(&rows)?)),
            Self::DocPages { instance, rows } => {
                fails(findings, oracle.judge_doc_pages(instance.0, &Row::all(&rows)?));
            }
            Self::Rested => {
                if let Some(unrest) = oracle.unrest() {
                    findings
                        .fail(oracle.unrest_breaks().broken(format!("after all has come to rest: {unrest}")));
                }
            }
            Self::Ended => fails(findings, oracle.judge_history().and_then(|()| oracle.judge_store(values))),
            of_readers => return of_readers.apply_to_readers(oracle, findings),
        }
        Ok(())
    }

    /// Informs `oracle` of it, which is about those who read.
    fn apply_to_readers(self, oracle: &mut Oracle, findings: &Findings) -> Result<()> {
        match self {
            Self::Subscribed { id, by, interest, manner, start } => {
                known_as(id, oracle.subscribed(by.into(), interest.read()?, manner, start))?;
            }
            Self::SubscribedDurably { id, by, cursor, interest, manner } => {
                let durable = (cursor, interest.read()?, manner);
                known_as(id, oracle.subscribed_durably(findings, by.into(), durable))?;
            }
            Self::Resumed { id, by, manner, start } => {
                oracle.resumed(findings, (by.into(), id), manner, start);
            }
            Self::Replaced { id, interest, start } => oracle.replaced(findings, id, &interest.read()?, start),
            Self::Stands { id, at } => oracle.stands(findings, id, at),
            Self::Given { id, given } => oracle.received(findings, id, &given.read()?),
            Self::Followed { id, by } => known_as(id, oracle.followed(by.into()))?,
            Self::Unfollowed { id } => oracle.unfollowed(id),
            Self::FollowedRows { id, rows } => oracle.followed_rows(findings, id, &Row::all(&rows)?),
            Self::FollowedOver { id, shard } => oracle.followed_over(findings, id, ShardId(shard)),
            Self::DocTailed { id, by, instance, start } => {
                known_as(id, oracle.doc_tailed(by.into(), instance.0, start))?;
            }
            Self::DocTailRead { id, rows } => oracle.doc_tail_read(findings, id, &Row::all(&rows)?),
            Self::DocTailEnded { id, reason } => oracle.doc_tail_ended(findings, id, &reason),
            #[cfg(feature = "http")]
            of_web => return of_web.apply_to_web(oracle, findings),
            #[cfg(not(feature = "http"))]
            _ => {}
        }
        Ok(())
    }

    /// Informs `oracle` of it, which is about clients over HTTP.
    #[cfg(feature = "http")]
    fn apply_to_web(self, oracle: &mut Oracle, findings: &Findings) -> Result<()> {
        match self {
            Self::DocTailGoesOn { id } => oracle.doc_tail_goes_on(id),
            Self::WebClient { id, process, number, kinds, start } => {
                let kinds = kinds.iter().map(|name| kind(name)).collect::<Result<_>>()?;
                known_as(id, oracle.web_client((process, number), kinds, start))?;
            }
            Self::WebHopped { one, other } => oracle.web_swap(one, other),
            Self::WebAsks { id } => drop(oracle.web_asks_as(id)),
            Self::WebRow { id, name, kind, seq } => {
                fails(findings, oracle.web_row(findings, id, (&name, &kind, &seq)));
            }
            Self::WebStands { id, seq } => fails(findings, oracle.web_stands(id, &seq)),
            Self::WebExpired { id, horizon } => fails(findings, oracle.web_expired(id, horizon)),
            Self::WebChange { id, seq, doc, rev, is_deleted } => {
                fails(findings, oracle.web_change(id, &seq, (&doc, &rev, is_deleted)));
            }
            other => return Err(wrong(format!("{other:?} is about nobody"))),
        }
        Ok(())
    }
}

/// Informs `oracle` of a commit.
fn commit(
    oracle: &mut Oracle,
    findings: &Findings,
    values: &mut Rows,
    (issuer, is_late): (Issuer, bool),
    at: &Hex,
    touched: Vec<(Hex, Option<Hex>, Option<Hex>)>,
) -> Result<()> {
    let stamp = at.0[..].try_into().map_err(|_| wrong("a versionstamp has 10 bytes".to_owned()))?;
    let value = |value: Option<Hex>| value.map(|value| value.0);
    let touched: BTreeMap<_, _> = touched
        .into_iter()
        .map(|(key, before, after)| (key.0, Change { before: value(before), after: value(after) }))
        .collect();
    if let Some(key) =
        touched.iter().find_map(|(key, change)| (values.get(key) != change.before.as_ref()).then_some(key))
    {
        let key = key.escape_ascii();
        return Err(wrong(format!(
            "\"{key}\" had another value before: lines are missing, twice there, or were changed"
        )));
    }
    let changes: Vec<_> = touched.iter().map(|(key, change)| (key.clone(), change.after.clone())).collect();
    let before = |key: &[u8]| values.get(key).cloned();
    let seen = ObservedCommit { issuer, stamp: Versionstamp(stamp), is_late, touched, before: &before };
    oracle.committed(findings, &seen);
    for (key, after) in changes {
        match after {
            Some(after) => drop(values.insert(key, after)),
            None => drop(values.remove(&key)),
        }
    }
    Ok(())
}

/// Has `world` fail if `verdict` says so.
fn fails(findings: &Findings, verdict: Result<(), Broken>) {
    if let Err(broken) = verdict {
        findings.fail(broken);
    }
}

/// Fails unless the oracle knows a reader by the number that the history has for it.
fn known_as(written: u64, now: u64) -> Result<()> {
    if written == now {
        return Ok(());
    }
    Err(wrong(format!(
        "its reader {written} would be {now} now: lines are missing, or it is of another version"
    )))
}

/// What is wrong with line `number` of a history, counted from 0.
fn wrong_line(number: usize, error: impl Display) -> Error {
    wrong(format!("line {}: {error}", number + 1))
}

/// The first thing in `history` that is not as it should be, as far as an oracle can say that sees nothing else.
pub(in crate::front::simulation) fn judge(history: &str) -> Result<Option<Broken>> {
    let mut lines = history.lines().enumerate();
    let (_, head) = lines.next().ok_or_else(|| wrong("it is empty".to_owned()))?;
    let head: Head = serde_json::from_str(head).map_err(|error| wrong_line(0, error))?;
    if head.partitions == 0 {
        return Err(wrong("line 1: it has no partitions".to_owned()));
    }
    if head.notibus_history != VERSION {
        let version = head.notibus_history;
        return Err(wrong(format!("its version is {version}; this program knows version {VERSION}")));
    }
    let names = head.names.into_iter().map(|name| name.0).collect();
    let failing = head.failing.map(|names| names.into_iter().map(|name| name.0).collect());
    let mut oracle = Oracle::new(head.partitions, names, head.documents, failing);
    if head.steady_clocks {
        oracle.trust_clocks();
    }
    if let Some(unworkable) = head.unworkable {
        oracle.expect_parked(unworkable.into_iter().map(|name| name.0).collect());
    }
    if let Some(given_up) = head.given_up {
        oracle.expect_janitor(given_up.into_iter().map(|name| name.0).collect());
    }
    let findings = Findings::default();
    let (mut values, mut has_rested, mut has_ended) = (Rows::new(), false, false);
    for (number, line) in lines {
        let mut seen: HistoryEvent = serde_json::from_str(line).map_err(|error| wrong_line(number, error))?;
        if has_ended {
            return Err(wrong_line(number, "the history has ended before"));
        }
        if let Some(id) = seen.reader_mut().copied().filter(|id| *id >= oracle.next_reader()) {
            let reason = format!("its reader {id} has not begun: lines are missing, or were changed");
            return Err(wrong_line(number, reason));
        }
        has_rested |= matches!(seen, HistoryEvent::Rested);
        has_ended = matches!(seen, HistoryEvent::Ended);
        if has_ended && !has_rested {
            return Err(wrong_line(number, "it ends without having come to rest: lines are missing"));
        }
        seen.apply(&mut oracle, &findings, &mut values).map_err(|error| match error {
            Error::Invalid { what: "history", reason } => wrong_line(number, reason),
            error => wrong_line(number, error),
        })?;
        if let Some(broken) = findings.failure() {
            return Ok(Some(Broken { reason: format!("line {}: {}", number + 1, broken.reason), ..broken }));
        }
    }
    if has_ended {
        Ok(None)
    } else {
        Ok(Some(
            Guarantee::Live
                .broken("the history has no end: its world did not come to rest, or lines are missing"),
        ))
    }
}
