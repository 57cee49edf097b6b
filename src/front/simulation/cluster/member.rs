//! A process of a world on a cluster.

use std::{
    io::{self, BufRead},
    num::NonZeroUsize,
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use super::{Member, signal::signal};
use crate::{
    base::{
        env::Env,
        error::{Error, Result},
    },
    front::simulation::{
        Options, actors,
        draw::WorldPlan,
        event::Event,
        findings::Findings,
        guarantee::Broken,
        issuer::Issuer,
        link::Link,
        notes::{self, Notes},
        process::Process,
        shared::{Phase, Shared},
        time::{Clock, Time},
        trace::Listener,
    },
    store::{Database, testing::Wrapper},
};

/// How often it checks whether it is done.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The plan of a world on a cluster.
pub(super) fn plan(member: &Member) -> WorldPlan {
    let chaos = Some(Duration::from_millis(member.chaos_ms));
    let options = Options { chaos, intensity: member.intensity, ..Options::default() };
    let threads = NonZeroUsize::new(member.threads).unwrap_or(NonZeroUsize::MIN);
    WorldPlan::draw(member.seed, &options).in_real_time(member.seed, threads).on_cluster()
}

/// Is a process of a world on the cluster `db`, until the standard input says that it is to end. Returns what it has found broken by
/// itself. It blocks the thread, and must not be called within a runtime. If it is to crash, it kills this process.
pub fn take_part(member: &Member, db: &Database) -> Result<Option<Broken>> {
    let plan = plan(member);
    let threads = plan.threads.unwrap_or(NonZeroUsize::MIN);
    let Member { seed, process, generation, folder, .. } = member;
    let issuer = Issuer { process: *process, generation: *generation };
    let wrong = |error: io::Error| Error::invalid("notes", error.to_string());
    let mut random = fastrand::Rng::with_seed(seed ^ (*process as u64) << 32 ^ *generation);
    let findings = Findings::new(Time::real(), &Arc::default(), false);
    let shared = Shared::new(plan, random.fork(), findings);
    let mut before = Vec::new();
    for generation in 0..*generation {
        let (noted, _) = notes::read(folder, Issuer { generation, ..issuer }, 0).map_err(wrong)?;
        before.extend(noted.into_iter().map(|(_, seen)| seen));
    }
    let notes = Notes::create(folder, issuer).map_err(wrong)?;
    let notes = shared.oracle().note_in(notes, issuer, before)?;
    let link = Link { notes: Some(notes), ..Link::new(Arc::clone(&shared), issuer) };
    let store = Wrapper::new(Arc::clone(db.backend()), Arc::new(link));
    let clock = Clock::new(&shared.time, issuer.process, 1_000_000, random);
    let db = Database::over(Arc::new(store), Env::new(Arc::new(clock)));
    obey(&shared);
    let listener = Listener::new({
        let shared = Arc::clone(&shared);
        move |level, message, fields| shared.hear(level, message, fields)
    });
    let is_done = Arc::new(AtomicBool::new(false));
    let main = {
        let (shared, is_done) = (Arc::clone(&shared), Arc::clone(&is_done));
        async move {
            actors::main(shared, issuer, db).await;
            is_done.store(true, Ordering::Relaxed);
        }
    };
    tracing::subscriber::with_default(listener, || {
        let running = Process::start_threads(threads, main);
        shared.time.after(POLL_INTERVAL, Event::Poll);
        while !shared.has_failed() && !is_done.load(Ordering::Relaxed) {
            match shared.time.leap() {
                // The process dies as if another process had killed it.
                Some(Event::Crash(_)) if shared.phase() == Phase::Chaos => signal("-KILL", process::id()),
                Some(Event::Poll) => shared.time.after(POLL_INTERVAL, Event::Poll),
                _ => {}
            }
        }
        running.crash();
    });
    Ok(shared.failure())
}

/// Enters the phases that the standard input names, and ends with it.
fn obey(shared: &Arc<Shared>) {
    let shared = Arc::clone(shared);
    thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(io::Result::ok) {
            match line.as_str() {
                "rest" => shared.enter(Phase::Rest),
                _ => shared.enter(Phase::End),
            }
        }
        // The conductor is gone, so no one would judge this process.
        process::exit(2);
    });
}
