//! `notibus tail`: prints the rows of a feed.

use std::io::Write;

use notibus::{Bus, Dispatcher, DispatcherOptions, Filter, cursor::Start, dispatcher::Interruption};
use tokio_stream::StreamExt;

use crate::{Failure, deadline::Deadline, signals::stopped, store::Store};

/// How to print a feed.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The store: "memory", "dir:PATH" or "fdb:FILE".
    #[arg(long)]
    store: Store,
    /// Print rows after this: a sequence of 26 hexadecimal digits, "0" for all, or "now".
    #[arg(long, default_value = "0")]
    since: String,
    /// The prefix of the bus's keys.
    #[arg(long, default_value = "notibus")]
    prefix: String,
    /// Go on with future rows, until interrupted. It only reads: events appear once a notifier has folded them.
    #[arg(long)]
    follow: bool,
}

/// Prints the rows.
pub async fn run(args: Args, deadline: Deadline) -> Result<(), Failure> {
    let since: Start = args.since.parse()?;
    let reading = args.store.open_to_read().await?;
    // A copy of a folder would never show a new row.
    let db = if args.follow { reading.at_rest()? } else { reading.now() };
    let read = "reading the feed";
    let bus = deadline.of(read, Bus::open_existing(&db, args.prefix.as_bytes())).await?;
    if args.follow {
        let mut stopped = stopped()?;
        let dispatcher = deadline.of(read, bus.dispatcher(DispatcherOptions::default())).await?;
        tokio::select! {
            printed = follow(&dispatcher, since) => printed?,
            () = stopped.wait() => {}
        }
        let ended = async {
            dispatcher.shutdown().await;
            Ok::<_, Failure>(())
        };
        return deadline.of("ending the dispatcher", ended).await;
    }
    let feed = bus.feed();
    let mut cursor = match since {
        Start::At(cursor) => cursor,
        Start::Now => deadline.of(read, feed.now()).await?.into(),
    };
    loop {
        let page = deadline.of(read, feed.page(cursor, 1_000)).await?;
        for row in &page.rows {
            print(row)?;
        }
        if !page.more {
            return Ok(());
        }
        cursor = page.next;
    }
}

/// Prints future rows.
async fn follow(dispatcher: &Dispatcher, since: Start) -> Result<(), Failure> {
    let mut rows = dispatcher.subscribe(Filter::all()).since(since).stream();
    while let Some(item) = rows.next().await {
        match item {
            Ok(delivery) => print(delivery.notification())?,
            Err(Interruption::Synced { .. }) => {}
            Err(interruption) => return Err(Failure::Failed(interruption.to_string())),
        }
    }
    Ok(())
}

/// Prints a row as a line of JSON.
fn print(row: &notibus::Notification) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, row)
        .map_err(std::io::Error::from)
        .and_then(|()| out.write_all(b"\n"))
        .map_err(crate::out::failed)
}
