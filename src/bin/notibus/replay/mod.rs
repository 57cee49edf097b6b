//! `notibus replay`: sends a history of database events through the whole bus (producers, notifiers, feed, dispatcher and three
//! subscribers), then checks that nothing was lost, doubled or torn.

mod args;
mod check;
mod history;
mod load;
mod made;
mod observer;
mod observers;
mod progress;
mod report;
mod reshard;

use std::{io::IsTerminal, sync::Arc, time::Duration};

use indicatif::{ProgressBar, ProgressStyle};
use notibus::{
    Bus, BusOptions, Dispatcher, DispatcherOptions, NodeOptions, Notifier, NotifierOptions, Producer,
    event::Counters, node::BalanceOptions, producer::ProducerOptions, store::Database,
};

pub use self::args::Args;
use self::{
    check::FinalFeed,
    history::History,
    load::Load,
    observer::Latencies,
    observers::Observers,
    progress::Progress,
    report::{Dump, Replayed, Report},
    reshard::Resharder,
};
use tokio::sync::watch;

use crate::{
    deadline::{Deadline, Moves},
    failure::Failure,
};

/// How long to wait without progress before the result is judged as it is.
const STALL_MAX: Duration = Duration::from_secs(30);

/// Opens the bus, and starts the notifiers.
async fn open(
    args: &Args,
    db: &Database,
    progress: &Progress,
) -> Result<(Bus, Producer, Vec<Notifier>), Failure> {
    let prefix = args.prefix.clone().into_bytes();
    let options = BusOptions::default().prefix(prefix).partitions(args.partitions).shards(args.shards);
    let bus = Bus::open(db, options).await?;
    let producer = bus.producer_with(ProducerOptions::default().slots(args.slots))?;
    let mut notifiers: Vec<Notifier> = Vec::new();
    for _ in 0..args.notifiers {
        // With this limit no notifier takes partitions that another one would have to ask for.
        let share = args.partitions.div_ceil(args.notifiers);
        let balance = BalanceOptions::default().leases_max(Some(share));
        let options = NotifierOptions::default().balance(balance).fold_interval_max(args.fold_interval_max);
        notifiers.push(bus.node(NodeOptions::default()).await?.notifier(options).await?);
    }
    let all = args.partitions as usize;
    let held = || notifiers.iter().map(|notifier| notifier.partitions().len()).sum::<usize>();
    // Leases of a killed run become free once its nodes have expired.
    wait_until(&bus, progress, async || held() == all).await;
    if held() < all {
        return Err(Failure::Failed(
            "other notifiers work on this bus: stop them, or choose another --prefix".to_owned(),
        ));
    }
    Ok((bus, producer, notifiers))
}

/// Replays the history and prints the result.
pub async fn run(args: Args, deadline: Deadline) -> Result<(), Failure> {
    // Read before the store is opened, so that a bad history changes nothing, and makes no folder.
    let history = Arc::new(History::read(&args.file)?);
    let dump = args.dump_feed.as_deref().map(Dump::create).transpose()?;
    let db = args.store.open(deadline).await?;
    Box::pin(bounded(&args, &db, &history, dump, deadline)).await
}

/// Replays the history, until the store has not answered for longer than the deadline.
async fn bounded(
    args: &Args,
    db: &Database,
    history: &Arc<History>,
    dump: Option<Dump>,
    deadline: Deadline,
) -> Result<(), Failure> {
    let progress = Progress { deadline, moves: Moves::default(), recorded: watch::Sender::new(0) };
    let replay = Box::pin(replay(args, db, history, dump, &progress));
    let replayed = deadline.of_moving("replaying", &progress.moves, replay).await;
    let (recorded, total) = (*progress.recorded.borrow(), history.recorded.total());
    replayed.map_err(|failure| {
        if recorded < total {
            failure.and(&format!("{recorded} of {total} events were recorded"))
        } else {
            failure
        }
    })
}

/// Replays the history, which counts what it does as `progress`, and prints the result.
async fn replay(
    args: &Args,
    db: &Database,
    history: &Arc<History>,
    dump: Option<Dump>,
    progress: &Progress,
) -> Result<(), Failure> {
    made::check(args, db).await?;
    end_earlier(args, db, history, progress).await?;
    let (bus, producer, notifiers) = open(args, db, progress).await?;
    let before = bus.stats();
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await?;
    let latencies = Arc::new(Latencies::new(history));
    let observers = Observers::start(&dispatcher, &latencies)?;

    let bar = bar(args, history.events.len() as u64);
    let (counted, measured) = (progress.clone(), Arc::clone(&latencies));
    let load = Load::new(db.clone(), producer, Arc::clone(history), measured, args.rate, counted);
    let mut resharder = match args.reshard_every {
        Some(every) => {
            let events = history.events.len() as u64;
            let moves = progress.moves.clone();
            Some(Resharder::start(bus.feed(), every, events, load.recorded(), moves).await?)
        }
        None => None,
    };
    let loaded = load.run(args.writers, &bar).await?;
    bar.finish_and_clear();
    let reshards = match &mut resharder {
        Some(resharder) => resharder.finish().await?,
        None => 0,
    };

    let folded = || -> Counters {
        let lanes = bus.stats().folded.lanes();
        let before = before.folded.lanes();
        Counters::from_lanes(std::array::from_fn(|lane| lanes[lane] - before[lane]))
    };
    wait_until(&bus, progress, async || folded().total() >= history.recorded.total()).await;
    let feed = FinalFeed::read(&bus, history, progress).await?;
    wait_until(&bus, progress, async || observers.all().iter().all(|observer| observer.has_all(&feed))).await;

    let mut differences = check::compare(history, &feed, folded());
    for observer in observers.all() {
        differences.extend(observer.missing(&feed));
    }
    if let Some(resharder) = &resharder {
        differences.extend(resharder.check(reshards).await?);
    }
    let report = Report::new(&Replayed {
        history,
        loaded: &loaded,
        feed: &feed,
        observers: &observers,
        latencies: &latencies,
        folded: folded(),
        reshards,
        before,
        after: bus.stats(),
    });
    report.print(args.json)?;
    if let Some(dump) = dump {
        dump.write(&feed)?;
    }
    shut_down(dispatcher, notifiers).await?;
    if differences.is_empty() {
        return Ok(());
    }
    Err(Failure::Failed(format!("the outcome differs from the history:\n  {}", differences.join("\n  "))))
}

/// Cleans up after an earlier run: folds waiting events, and deletes databases of this history that still live, as
/// a layer would before it creates them again. It uses a bus of its own, because a fold is counted only after others can see
/// that it was committed: the last ones would count as folds of the replay.
async fn end_earlier(
    args: &Args,
    db: &Database,
    history: &History,
    progress: &Progress,
) -> Result<(), Failure> {
    let (bus, producer, notifiers) = open(args, db, progress).await?;
    drain(&bus, progress).await?;
    let earlier = FinalFeed::read(&bus, history, progress).await?;
    let lives: Vec<_> = earlier.of_history.iter().filter(|row| !row.is_deleted()).collect();
    for rows in lives.chunks(1_000) {
        db.run(async |tx| {
            for row in rows {
                producer.deleted(&tx, &row.db());
            }
            Ok(())
        })
        .await?;
        progress.moves.step();
    }
    drain(&bus, progress).await?;
    for notifier in notifiers {
        notifier.shutdown().await?;
    }
    Ok(())
}

/// Waits until no event waits to be folded.
async fn drain(bus: &Bus, progress: &Progress) -> Result<(), Failure> {
    wait_until(bus, progress, async || bus.is_drained().await.unwrap_or(false)).await;
    if bus.is_drained().await? {
        return Ok(());
    }
    Err(Failure::Failed(
        "the events of an earlier run could not be folded; check the log and try again".to_owned(),
    ))
}

/// Ends the roles in an order in which nothing is missed.
async fn shut_down(dispatcher: Dispatcher, notifiers: Vec<Notifier>) -> Result<(), Failure> {
    dispatcher.shutdown().await;
    for notifier in notifiers {
        notifier.shutdown().await?;
    }
    Ok(())
}

/// Waits until `is_done`, or until the bus has made no progress for a while. While the store answers, that counts as progress.
async fn wait_until(bus: &Bus, progress: &Progress, is_done: impl AsyncFn() -> bool) {
    let mut stats = bus.stats();
    let mut progressed = tokio::time::Instant::now();
    while !is_done().await && progressed.elapsed() < STALL_MAX {
        progress.moves.step();
        tokio::time::sleep(Duration::from_millis(1)).await;
        let now = bus.stats();
        if now != stats {
            stats = now;
            progressed = tokio::time::Instant::now();
        }
    }
}

/// A progress bar on a terminal; hidden elsewhere.
fn bar(args: &Args, events: u64) -> ProgressBar {
    if args.json || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = "{bar:40} {human_pos} of {human_len} events, {per_sec}";
    ProgressBar::new(events).with_style(ProgressStyle::with_template(style).expect("the template is valid"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use notibus::store::testing::{Attempt, CommitFault, Faults, Gate, Operation};

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    /// Regression: a replay had no deadline, and waited for an absent cluster forever.
    #[tokio::test(start_paused = true)]
    async fn a_replay_whose_store_does_not_answer_any_more_is_given_up() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let history: Vec<_> = (0..20).map(|n| format!("1\t{n}\tcreate\tdb-{n}\t\n")).collect();
        std::fs::write(file.path(), history.concat()).unwrap();
        let line = ["replay", file.path().to_str().unwrap(), "--writers", "1", "--rate", "0.1"];
        let args = Line::parse_from(line).args;
        let history = Arc::new(History::read(&args.file).unwrap());
        let faults = Faults::new(&Database::memory());
        // The documents of the writers.
        let is_document = |operation: &Operation| matches!(operation, Operation::Set { key, .. } if key.starts_with(b"replay/") && !key.starts_with(b"replay/made/"));
        let mut left = 7;
        faults.plan_commits(move |attempt: &Attempt| {
            if left > 0 && attempt.writes() && attempt.mutations().any(is_document) {
                left -= 1;
            }
            (left == 0).then(|| CommitFault::Hold(Gate::default()))
        });
        // Events that are due later than the deadline are no stall.
        let deadline = Deadline(Duration::from_secs(3));
        match Box::pin(bounded(&args, &faults.database(), &history, None, deadline)).await {
            Err(Failure::Failed(reason)) => {
                assert!(reason.contains("; 6 of 20 events were recorded"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
    }
}
