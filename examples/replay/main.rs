//! The main job: a history of database events passes through the whole bus (producers, notifiers, feed, dispatcher, three subscribers).
//! Then the outcome is compared with the history: no event may be lost, counted twice or delivered out of order.
//!
//! Run it with `cargo run --release --example replay -- examples/replay/sample.tsv.gz`; `-- --help` lists its options.

mod check;
mod history;
mod load;

use std::{
    error::Error,
    fs,
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use clap::{Parser, value_parser};
use indicatif::{ProgressBar, ProgressStyle};
use notibus::{
    Bus, BusOptions, DispatcherOptions, NodeOptions, Notification, Notifier, NotifierOptions,
    node::BalanceOptions,
    producer::ProducerOptions,
    store::{Isolation, Store, Transaction},
};
use serde_json::{Value, json};

use self::{
    check::Subscriber,
    history::History,
    load::{Load, Writer},
};

/// With millions of databases in memory, this is faster than the allocators of most systems.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Replay a history of database events through the whole bus, and check the outcome.
#[derive(Parser)]
#[command(name = "replay")]
pub struct Options {
    /// The history: tab-separated rows of unix seconds, transaction, op (create, delete, update or ddoc), database and document; plain or
    /// gzip; "-" for standard input. Consecutive rows with one transaction number form one transaction.
    file: PathBuf,
    /// The store: "memory", "dir:FOLDER", or "fdb:FILE" if built with `--features foundationdb`.
    #[arg(long, default_value = "memory")]
    store: String,
    /// The prefix of the bus's keys.
    #[arg(long, default_value = "notibus")]
    prefix: String,
    /// The number of shards of the feed, if the bus is new.
    #[arg(long, default_value_t = 4)]
    shards: u32,
    /// The number of partitions of the counters.
    #[arg(long, default_value_t = 64)]
    partitions: u32,
    /// The number of slots over which the counters of a database are spread.
    #[arg(long, default_value_t = 1)]
    slots: u16,
    /// The number of notifiers that share the partitions, each on its own node.
    #[arg(long, default_value_t = 1, value_parser = value_parser!(u32).range(1..=64))]
    notifiers: u32,
    /// The maximum number of concurrent transactions. Transactions that share a database keep their order.
    #[arg(long, default_value_t = 4, value_parser = value_parser!(u16).range(1..=1024))]
    writers: u16,
    /// The longest pause between two folds of a partition.
    #[arg(long, default_value = "25ms", value_parser = humantime::parse_duration)]
    fold_interval_max: Duration,
    /// Events to record per second. Default: as many as the store can take.
    #[arg(long, value_parser = value_parser!(u32).range(1..))]
    rate: Option<u32>,
    /// Reshard the feed each time this many events were recorded, to twice as many shards (at most 64) and back.
    #[arg(long, value_parser = value_parser!(u64).range(1..))]
    reshard_every: Option<u64>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
    /// Write the final feed to this file, one JSON object per line.
    #[arg(long)]
    dump_feed: Option<PathBuf>,
}

#[tokio::main]
async fn main() -> ExitCode {
    let options = Options::parse();
    let outcome = run(&options).await;
    #[cfg(feature = "foundationdb")]
    notibus::store::stop_network();
    match outcome {
        Ok(report) => {
            print!("{}", if options.json { format!("{report}\n") } else { readable(&report) });
            if report["differences"] == json!([]) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("replay: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Replays the history. The report lists how the outcome differs from the history, if it does.
pub async fn run(options: &Options) -> Result<Value> {
    let history = Arc::new(History::read(&options.file)?);
    let dump = options.dump_feed.as_ref().map(fs::File::create).transpose()?;
    let db = open_store(&options.store).await?;
    delete_earlier(options, &db, &history).await?;
    let bus = open_bus(options, &db).await?;
    let notifiers = start_notifiers(options, &bus).await?;
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await?;
    let subscribers = Subscriber::start_all(&dispatcher, &history)?;
    let total = history.recorded.total();
    let bar = if options.json { ProgressBar::hidden() } else { ProgressBar::new(total) };
    bar.set_style(ProgressStyle::with_template("{bar:40} {human_pos} of {human_len} events, {per_sec}")?);
    let producer = bus.producer_with(ProducerOptions::default().slots(options.slots))?;
    let documents = format!("replay/documents/{}/", fastrand::u64(..)).into_bytes();
    let writer = Writer { store: db, producer, history: Arc::clone(&history), documents };
    let (mut load, began) = (Load::new(writer, bus.feed(), bar), Instant::now());
    load.run(options.writers.into(), options.rate, options.reshard_every).await?;

    wait_until(&bus, async || bus.stats().folded.total() >= total).await;
    let feed = check::feed(&bus).await?;
    let rows: Vec<_> = feed.iter().filter(|row| history.index.contains_key(&row.name)).cloned().collect();
    wait_until(&bus, async || subscribers.iter().all(|subscriber| subscriber.fault(&rows).is_none())).await;
    let stats = bus.stats();
    let mut differences = check::compare(&history, &rows, stats.folded);
    differences.extend(subscribers.iter().filter_map(|subscriber| subscriber.fault(&rows)));
    dispatcher.shutdown().await;
    for notifier in notifiers {
        notifier.shutdown().await?;
    }
    dump.map_or(Ok(()), |file| dump_rows(file, &feed))?;
    let latencies = subscribers[2].latencies(&history, &load.commits);
    let quantile = |permille: usize| latencies.get(latencies.len() * permille / 1_000);
    let received = subscribers.each_ref().map(|subscriber| subscriber.received.lock());
    let [indexer, replicator, db_updates] = received.each_ref().map(|received| received.deliveries.len());
    let last = received.iter().filter_map(|received| received.deliveries.last()).map(|&(at, ..)| at).max();
    let seconds = last.map_or(0.0, |last| last.duration_since(began).as_secs_f64());
    let tombstones = feed.iter().filter(|row| row.is_deleted()).count();
    #[expect(clippy::cast_precision_loss, reason = "a history has far fewer than 2^53 events")]
    let report = json!({
        "differences": differences,
        "transactions": history.transactions.len(),
        "recorded": history.recorded,
        "folded": stats.folded,
        "notifications": stats.notifications,
        "feed": { "live": feed.len() - tombstones, "tombstones": tombstones },
        "reshards": load.reshards,
        "delivered": { "indexer": indexer, "replicator": replicator, "db_updates": db_updates },
        "producer_retries": load.retries,
        "leases_lost": stats.leases_lost,
        "nodes_dropped_out": stats.nodes_dropped_out,
        "seconds": (seconds * 1e3).round() / 1e3,
        "events_per_second": (total as f64 / seconds.max(1e-6)).round(),
        "latency_us": { "p50": quantile(500), "p99": quantile(990), "max": latencies.last() },
    });
    Ok(report)
}

fn dump_rows(file: fs::File, feed: &[Arc<Notification>]) -> io::Result<()> {
    let mut out = io::BufWriter::new(file);
    for row in feed {
        let mut line =
            json!({ "seq": row.sequence, "db": row.name, "deleted": row.is_deleted(), "kinds": row.kinds });
        (line["instance"], line["totals"]) = (json!(row.instance), json!(row.totals));
        writeln!(out, "{line}")?;
    }
    out.flush()
}

#[cfg_attr(not(feature = "foundationdb"), expect(clippy::unused_async, reason = "a cluster is waited for"))]
async fn open_store(store: &str) -> Result<Store> {
    Ok(match store.split_once(':') {
        None if store == "memory" => Store::memory(),
        Some(("dir", folder)) if !folder.is_empty() => Store::open_dir(folder)?,
        #[cfg(feature = "foundationdb")]
        Some(("fdb", file)) if !file.is_empty() => Store::foundationdb(file).await?,
        _ => return Err("--store is memory, dir:FOLDER, or fdb:FILE with the feature foundationdb".into()),
    })
}

fn readable(report: &Value) -> String {
    let line = |(name, value): (&String, &Value)| {
        let value = value.to_string().replace(['{', '}', '"'], "").replace(':', " ").replace(',', ", ");
        format!("{:18} {value}\n", name.replace('_', " "))
    };
    let lines = report.as_object().into_iter().flatten().filter(|(_, value)| **value != json!([])).map(line);
    let verdict = if report["differences"] == json!([]) { "agree" } else { "do NOT agree" };
    format!("{}the feed and all subscribers {verdict} with the history\n", lines.collect::<String>())
}

/// Opens the bus, or creates it.
///
/// A replay deletes the databases of an earlier replay and creates them again, which would be a disaster for a bus that a layer uses. So it
/// leaves a mark next to the bus that it creates, and refuses a bus without such a mark. The mark has the sequence at which the feed
/// begins, so that it does not count for another bus that is created there later.
async fn open_bus(options: &Options, store: &Store) -> Result<Bus> {
    let prefix = options.prefix.as_bytes();
    let is_new = matches!(
        Bus::open_existing(store, prefix).await,
        Err(notibus::Error::Invalid { what: "prefix", .. })
    );
    let wanted = BusOptions::default().partitions(options.partitions).shards(options.shards);
    let bus = Bus::open(store, wanted.prefix(prefix.to_vec())).await?;
    let (mark, began) = ([b"replay/made/", prefix].concat(), bus.feed().topology().await?[0].first);
    let is_marked = async |tx: Transaction| {
        if is_new {
            tx.set(&mark, began.as_bytes());
        }
        Ok(tx.get(&mark, Isolation::Snapshot).await?.as_deref() == Some(began.as_bytes()))
    };
    if store.run(is_marked).await? {
        return Ok(bus);
    }
    Err(format!(
        "no replay has made the bus under the prefix {:?}, and a replay deletes databases: choose another --prefix",
        options.prefix
    )
    .into())
}

/// Starts the notifiers, and waits until they own all partitions. Those of a killed process become free once its node has expired.
async fn start_notifiers(options: &Options, bus: &Bus) -> Result<Vec<Notifier>> {
    let mut notifiers: Vec<Notifier> = Vec::new();
    for _ in 0..options.notifiers {
        // With this limit, no notifier takes partitions that another one would then have to request.
        let share =
            BalanceOptions::default().leases_max(Some(options.partitions.div_ceil(options.notifiers)));
        let eager = NotifierOptions::default().balance(share).fold_interval_max(options.fold_interval_max);
        notifiers.push(bus.node(NodeOptions::default()).await?.notifier(eager).await?);
    }
    let held = || notifiers.iter().map(|notifier| notifier.partitions().len()).sum::<usize>();
    wait_until(bus, async || held() == options.partitions as usize).await;
    Ok(notifiers)
}

/// Deletes the databases of an earlier replay, as a layer does before it creates them again. This uses its own bus, so that the folds that
/// the replay counts start at zero.
async fn delete_earlier(options: &Options, store: &Store, history: &History) -> Result<()> {
    let bus = open_bus(options, store).await?;
    let (notifiers, producer) = (start_notifiers(options, &bus).await?, bus.producer());
    let is_drained = async || bus.is_drained().await.unwrap_or(false);
    wait_until(&bus, is_drained).await;
    let feed = check::feed(&bus).await?;
    let exists = |row: &&Arc<Notification>| !row.is_deleted() && history.index.contains_key(&row.name);
    for rows in feed.iter().filter(exists).collect::<Vec<_>>().chunks(1_000) {
        let delete = async |tx| {
            for row in rows {
                producer.deleted(&tx, &row.db());
            }
            Ok(())
        };
        store.run(delete).await?;
    }
    wait_until(&bus, is_drained).await;
    for notifier in notifiers {
        notifier.shutdown().await?;
    }
    Ok(())
}

/// Waits until `is_done`, or until the bus has made no progress for 30 s; then the outcome is judged as it is.
async fn wait_until(bus: &Bus, is_done: impl AsyncFn() -> bool) {
    let (mut stats, mut moved) = (bus.stats(), Instant::now());
    while !is_done().await && moved.elapsed() < Duration::from_secs(30) {
        tokio::time::sleep(Duration::from_millis(1)).await;
        if bus.stats() != stats {
            (stats, moved) = (bus.stats(), Instant::now());
        }
    }
}
