//! A durable subscriber in one process: a consumer that keeps its position in the folder of the store. The process is killed in the middle
//! of its work, without any warning, and continues where it was when it is started again.
//!
//! Run it with `cargo run --example durable_subscriber`. It starts itself twice, with a folder as the argument: that part is what a real
//! program would do; everything else only kills it.

use std::{
    collections::BTreeSet,
    error::Error,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use notibus::{
    Bus, BusOptions, Cursor, Db, DbInstance, Notification, StartOptions,
    consumer::{ConsumerOptions, Work},
    store::{Store, Transaction},
};

/// The number of databases that are created.
const DBS: usize = 20;

/// The number of databases after which the process is killed.
const KILLED_AFTER: usize = 8;

/// Creates the databases, in one transaction.
async fn create(store: &Store, bus: &Bus) -> notibus::Result<()> {
    let producer = bus.producer();
    let dbs = (0..DBS).map(|n| Ok(Db::new(format!("db{n:02}").parse()?, DbInstance::new())));
    let dbs = dbs.collect::<notibus::Result<Vec<_>>>()?;
    let create = async |tx: Transaction| {
        for db in &dbs {
            producer.created(&tx, db);
        }
        Ok(())
    };
    store.run(create).await
}

/// Works on everything that the subscriber has not finished, and prints each name.
#[tokio::main]
async fn subscribe(folder: &Path) -> Result<(), Box<dyn Error>> {
    let store = Store::open_dir(folder)?;
    let bus = Bus::open(&store, BusOptions::default()).await?;
    let running = bus.start(StartOptions::default()).await?;
    let subscriber = running.consumer("subscriber")?.start_from(Cursor::BEGINNING);
    // After a crash, at most the work of one interval, and the work in progress, is repeated.
    let options =
        ConsumerOptions::default().max_concurrency(1).checkpoint_interval(Duration::from_millis(50));
    let work = async |work: Work<Notification>| {
        tokio::time::sleep(Duration::from_millis(50)).await;
        println!("{}", String::from_utf8_lossy(work.id()));
        Ok(())
    };
    let subscriber = subscriber.options(options).run(work).await?;
    if bus.feed().last_sequence().await?.is_none() {
        create(&store, &bus).await?;
    }
    while !bus.is_drained().await? {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    subscriber.caught_up().await?;
    subscriber.shutdown().await?;
    Ok(running.shutdown().await?)
}

/// Starts the program on `folder`, and returns the lines that it prints.
fn start(folder: &Path) -> std::io::Result<(Child, impl Iterator<Item = std::io::Result<String>>)> {
    let mut program = Command::new(std::env::current_exe()?).arg(folder).stdout(Stdio::piped()).spawn()?;
    let output = program.stdout.take().expect("it is piped");
    Ok((program, BufReader::new(output).lines()))
}

fn main() -> Result<(), Box<dyn Error>> {
    if let Some(folder) = std::env::args_os().nth(1) {
        return subscribe(folder.as_ref());
    }
    let folder = tempfile::tempdir()?;
    let (mut program, lines) = start(folder.path())?;
    let before: Vec<_> = lines.take(KILLED_AFTER).collect::<Result<_, _>>()?;
    // On Unix this is `kill -9`: nothing is saved, closed or released.
    program.kill()?;
    program.wait()?;
    println!("killed after {}", before.join(" "));

    let (mut program, lines) = start(folder.path())?;
    let after: Vec<_> = lines.collect::<Result<_, _>>()?;
    if !program.wait()?.success() {
        return Err("the second process has failed".into());
    }
    println!("continued with {}", after.join(" "));
    let done: BTreeSet<_> = before.iter().chain(&after).collect();
    let repeated = before.len() + after.len() - done.len();
    println!("worked on {} of {DBS} databases, {repeated} of them twice", done.len());
    if done.len() == DBS { Ok(()) } else { Err("a database was lost".into()) }
}
