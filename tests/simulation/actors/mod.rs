//! The processes of a world: the roles of the bus, and the actors that use them.

mod audit;
mod called;
mod catalogue;
mod choice;
mod context;
mod documents;
mod follower;
mod greedy;
mod mirrored;
mod operator;
mod producer;
mod receiver;
mod subscriber;
mod web;
mod worker;

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use notibus::{Bus, BusOptions, Cursor, Error, Node, Result, node::Role, store::Store};
use tokio::task::JoinSet;

use self::{
    catalogue::Catalogue,
    context::{ActorContext, POLL_INTERVAL},
    receiver::Dispatchers,
};
use super::{
    draw::ProcessPlan,
    guarantee::Guarantee,
    kernel::Issuer,
    keyspace::BUS_PREFIX,
    shared::{Busy, Phase, Shared},
    witness::Witness,
};

/// How long a process waits after a failed start before it tries again.
const RESTART_PAUSE: Duration = Duration::from_millis(300);

/// Runs a process, from its start until it has shut down.
pub async fn main(shared: Arc<Shared>, issuer: Issuer, store: Store) {
    while let Err(error) = live(&shared, issuer, &store).await {
        let Issuer { process, generation } = issuer;
        shared.note(|| format!("process {process}.{generation} could not start: {error}"));
        shared.oracle().gone(issuer);
        store.env().sleep(RESTART_PAUSE).await;
    }
}

/// Starts the actors of the process, and shuts them down at the end. Fails if the process cannot start.
async fn live(shared: &Arc<Shared>, issuer: Issuer, store: &Store) -> Result<()> {
    let starting = shared.begin();
    let plan = shared.plan.processes[issuer.process];
    let (prefix, partitions) = (BUS_PREFIX.to_vec(), shared.plan.partitions);
    let options = BusOptions::default().prefix(prefix).partitions(partitions).shards(shared.plan.shards);
    let bus = Bus::open(store, options).await?;
    judge_opening(shared, &bus).await;
    let actor = ActorContext { shared: Arc::clone(shared), issuer, store: store.clone(), bus };
    let (mut busy, mut tasks) = (JoinSet::new(), JoinSet::new());
    for _ in 0..plan.producers {
        busy.spawn(at_work(shared.begin(), producer::run(actor.clone())));
    }
    if plan.operator {
        busy.spawn(at_work(shared.begin(), operator::run(actor.clone())));
    }
    if shared.plan.may_read_at_once() {
        busy.spawn(at_work(shared.begin(), greedy::run(actor.clone())));
    }
    // These tasks end by themselves, after their last check.
    let mut checked = JoinSet::new();
    if plan.follower {
        tasks.spawn(follower::run(actor.clone()));
        checked.spawn(Catalogue::new(&actor).run());
    }
    if plan.is_node() {
        let node = actor.bus.node(shared.plan.node_of(plan)).await?;
        shared.oracle().joined(issuer, node.id());
        actor.note(|| format!("is node {}", node.id()));
        tokio::select! {
            biased;
            served = serve(&actor, plan, node, &mut tasks, starting) => served?,
            () = actor.bus.raised() => {
                shared.witness(Witness::RaiseFound);
                return Err(Error::BusGone { reason: "its incarnation was raised".to_owned() });
            }
        }
    } else {
        drop(starting);
        actor.until_the_end().await;
    }
    // These tasks end by themselves, but an answer may take a long time.
    busy.join_all().await;
    checked.join_all().await;
    tasks.shutdown().await;
    Ok(())
}

/// Judges whether a store that is older than its own rows refuses every reader, even one that starts from nothing.
async fn judge_opening(shared: &Shared, bus: &Bus) {
    if !shared.oracle().is_older() {
        return;
    }
    let read = bus.feed().page(Cursor::BEGINNING, 1).await;
    if !shared.oracle().is_older() {
        return;
    }
    match read {
        Err(Error::OlderThanRows { .. }) => shared.witness(Witness::OlderStoreOpened),
        Err(_) => {}
        Ok(page) => {
            let reason = format!("a store that stands before its own rows was read: {page:?}");
            shared.fail(Guarantee::Truthful.broken(reason));
        }
    }
}

/// Does `work`, and counts as busy until it is done.
async fn at_work(busy: Busy, work: impl Future<Output = ()>) {
    work.await;
    drop(busy);
}

/// Judges the mirror and the feeds once everything is at rest.
async fn judge_at_rest(actor: &ActorContext, mirrored: Option<mirrored::Mirrored>) {
    if let Some(mirrored) = mirrored {
        mirrored.judge_at_rest().await;
    }
    if actor.issuer.process == 0 {
        audit::feed(actor).await;
        audit::documents(actor).await;
    }
}

/// Runs the roles of `node` until the end. The process counts as `starting` until all of them run.
async fn serve(
    actor: &ActorContext,
    plan: ProcessPlan,
    node: Node,
    tasks: &mut JoinSet<()>,
    starting: Busy,
) -> Result<()> {
    let options = &actor.shared.plan;
    let mut notifier = options.notifier.clone();
    notifier.balance.leases_max = plan.leases_max;
    let notifier = if plan.notifier { Some(node.notifier(notifier).await?) } else { None };
    let janitor = if plan.janitor { Some(node.janitor(options.janitor.clone()).await?) } else { None };
    let listed = if plan.dispatcher { Some(node.announce(Role::DISPATCHER).await?) } else { None };
    let dispatchers = match &listed {
        Some(_) => Some(Dispatchers::start(actor).await?),
        None => None,
    };
    let dispatcher = dispatchers.as_ref().map(|dispatchers| &dispatchers.main);
    let mut mirrored = None;
    if let (Some(dispatchers), Some(dispatcher)) = (&dispatchers, dispatcher) {
        mirrored = subscriber::start(actor, &dispatchers.sources(), tasks)?;
        if options.documents.is_some() {
            tasks.spawn(documents::read(actor.clone(), Arc::downgrade(dispatcher)));
        }
    }
    let unjudged = mirrored.is_some().then(|| Arc::clone(&actor.shared.unjudged));
    let web = match (dispatcher, options.web) {
        (Some(dispatcher), Some(plan)) => Some(web::Web::start(actor, dispatcher, plan)?),
        _ => None,
    };
    drop(starting);
    let plans = options.consumers.iter().filter(|_| plan.works);
    let workers = join_all(plans.map(|of| {
        let mut of = of.clone();
        of.options.balance.leases_max = plan.leases_max;
        worker::run(actor, &node, of)
    }));
    tokio::join!(workers, actor.until_the_end());
    if actor.shared.phase() == Phase::End {
        judge_at_rest(actor, mirrored).await;
        drop(unjudged);
        while Arc::strong_count(&actor.shared.unjudged) > 1 {
            actor.store.env().sleep(POLL_INTERVAL).await;
        }
    }
    let mut ends = Vec::new();
    if let Some(notifier) = notifier {
        ends.push(("notifier", notifier.shutdown().await));
    }
    if let Some(janitor) = janitor {
        ends.push(("janitor", janitor.shutdown().await));
    }
    if let Some(web) = web {
        web.end().await;
    }
    if let Some(dispatchers) = dispatchers {
        dispatchers.shutdown(actor.store.env()).await;
    }
    drop(listed);
    ends.push(("node", node.shutdown().await));
    judge_ends(actor, ends);
    Ok(())
}

/// Judges how the roles shut down: a shutdown may fail only while faults strike.
fn judge_ends(actor: &ActorContext, ends: Vec<(&str, Result<()>)>) {
    for (what, end) in ends {
        match end {
            Err(error) if actor.shared.phase() == Phase::End => {
                actor.shared.fail(format!(
                    "the {what} of process {} does not shut down: {error}",
                    actor.issuer.process
                ));
            }
            end => actor.note(|| format!("the {what} has ended: {end:?}")),
        }
    }
}
