//! Random changes, faults, crashes and reshards: each row has its effect at most once, and each newest row exactly once.

#![allow(
    clippy::too_many_lines,
    clippy::manual_assert,
    clippy::semicolon_if_nothing_returned,
    reason = "it is one long story"
)]

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use notibus::{
    Cursor, JanitorOptions, Notification,
    consumer::{Batch, Consumer, ConsumerOptions, FailurePolicy, Work},
    store::{
        AtomicOp, KeyRange, StoreError, Transaction,
        testing::{Attempt, CommitFault},
    },
};

use crate::{
    common::{db, joined, record, stored, until},
    fixture::{ConsumerFixture, Log, pass},
};

fn effect(row: &Notification) -> Vec<u8> {
    format!("effect/{}/{}", row.name, row.sequence).into_bytes()
}

#[derive(Clone)]
struct Dice(Arc<Mutex<fastrand::Rng>>);

impl Dice {
    fn below(&self, most: u64) -> u64 {
        self.0.lock().unwrap().u64(..most)
    }
}

async fn hammer(seed: u64, is_ordered: bool, asks: bool) {
    let dice = Dice(Arc::new(Mutex::new(fastrand::Rng::with_seed(seed))));
    let fixture = ConsumerFixture::new(2).await;
    let handler_store = fixture.faults.database();
    let fails = Arc::new(AtomicU32::new(25));
    let (of_ids, fails_ids, dice_ids) = (handler_store.clone(), Arc::clone(&fails), dice.clone());
    let ids = Log::doing(move |work: Work<Notification>| {
        let (store, fails, dice) = (of_ids.clone(), Arc::clone(&fails_ids), dice_ids.clone());
        async move {
            let fails = u64::from(fails.load(Ordering::Relaxed));
            tokio::time::sleep(Duration::from_millis(dice.below(if dice.below(20) == 0 {
                3_000
            } else {
                50
            })))
            .await;
            if dice.below(100) < fails {
                return Err("before".into());
            }
            let commit = async |tx: Transaction| {
                if !work.commit_in(&tx).await?.is_already_committed() {
                    let name = String::from_utf8(work.id().to_vec()).unwrap();
                    let made = format!("made/{name}/");
                    if work.gone().is_some() {
                        tx.clear_range(&KeyRange::prefix(made.clone().into_bytes()));
                    }
                    if let Some(row) = work.row() {
                        tx.atomic(AtomicOp::Add, &effect(row), &1_u64.to_le_bytes());
                        if !row.is_deleted() {
                            tx.set(format!("{made}{}", row.instance.0[0]).as_bytes(), b"");
                        }
                    }
                }
                Ok(())
            };
            if fails > 0 && dice.below(12) == 0 {
                // A task that outlives its run commits late, after other work perhaps.
                let (work, store, late) = (work.clone(), store.clone(), dice.below(4_000));
                let early = dice.below(2) == 0;
                tokio::spawn(async move {
                    let tx = store.begin();
                    if !early {
                        tokio::time::sleep(Duration::from_millis(late)).await;
                    }
                    if let Ok(state) = work.commit_in(&tx).await
                        && !state.is_already_committed()
                        && work.gone().is_none()
                        && let Some(row) = work.row()
                    {
                        tx.atomic(AtomicOp::Add, &effect(row), &1_u64.to_le_bytes());
                        if !row.is_deleted() {
                            tx.set(format!("made/{}/{}", row.name, row.instance.0[0]).as_bytes(), b"");
                        }
                        tokio::time::sleep(Duration::from_millis(late / 4)).await;
                        drop(tx.commit().await);
                    }
                });
                return Err("somebody else commits".into());
            }
            if fails > 0 && dice.below(40) == 0 {
                panic!("as planned");
            }
            store.run(commit).await?;
            tokio::time::sleep(Duration::from_millis(dice.below(30))).await;
            if dice.below(100) < fails {
                return Err("after".into());
            }
            Ok(())
        }
    });
    let (of_rows, fails_rows, dice_rows) = (handler_store.clone(), Arc::clone(&fails), dice.clone());
    let rows = Log::doing(move |batch: Batch<Notification>| {
        let (store, fails, dice) = (of_rows.clone(), Arc::clone(&fails_rows), dice_rows.clone());
        async move {
            let fails = u64::from(fails.load(Ordering::Relaxed));
            tokio::time::sleep(Duration::from_millis(dice.below(50))).await;
            if dice.below(100) < fails {
                return Err("before".into());
            }
            let commit = async |tx: Transaction| {
                if !batch.commit_in(&tx).await?.is_already_committed() {
                    for row in &batch.rows {
                        tx.atomic(AtomicOp::Add, &effect(row), &1_u64.to_le_bytes());
                    }
                }
                Ok(())
            };
            if fails > 0 && dice.below(12) == 0 {
                let (batch, store, late) = (batch.clone(), store.clone(), dice.below(4_000));
                tokio::spawn(async move {
                    let tx = store.begin();
                    if let Ok(state) = batch.commit_in(&tx).await
                        && !state.is_already_committed()
                    {
                        for row in &batch.rows {
                            tx.atomic(AtomicOp::Add, &effect(row), &1_u64.to_le_bytes());
                        }
                        tokio::time::sleep(Duration::from_millis(late)).await;
                        drop(tx.commit().await);
                    }
                });
                return Err("somebody else commits".into());
            }
            if fails > 0 && dice.below(40) == 0 {
                panic!("as planned");
            }
            store.run(commit).await?;
            if dice.below(100) < fails {
                return Err("after".into());
            }
            Ok(())
        }
    });
    let faulty = dice.clone();
    let plan = move |_: &Attempt| match faulty.below(60) {
        0 => Some(CommitFault::Before(StoreError::COMMIT_UNKNOWN_RESULT)),
        1 => Some(CommitFault::After(StoreError::COMMIT_UNKNOWN_RESULT)),
        2 => Some(CommitFault::Before(StoreError::NOT_COMMITTED)),
        3 => Some(CommitFault::Before(StoreError::IO_ERROR)),
        _ => None,
    };
    fixture.faults.plan_commits(plan);
    fixture.faults.delay_reads(Duration::from_millis(dice.below(4)));
    let janitor = JanitorOptions::default().interval(Duration::from_millis(500));
    let janitor =
        joined(&fixture.other).await.janitor(janitor.tombstone_retention(Duration::ZERO)).await.unwrap();
    let mut members: Vec<Option<Consumer>> = (0..2).map(|_| None).collect();
    // The last instance, whether it lives.
    let mut lives: BTreeMap<u64, (u8, bool)> = BTreeMap::new();
    for _ in 0..150 {
        match dice.below(24) {
            0..=11 => {
                let n = dice.below(12);
                let name = format!("db{n}");
                let (instance, is_living) = lives.get(&n).copied().unwrap_or((0, false));
                if !is_living {
                    lives.insert(n, (instance + 1, true));
                    record(&fixture.store, &fixture.other, &db(&name, instance + 1), [1, 0, 0, 0]).await;
                } else if dice.below(8) == 0 {
                    lives.insert(n, (instance, false));
                    record(&fixture.store, &fixture.other, &db(&name, instance), [0, 1, 0, 0]).await;
                } else {
                    record(&fixture.store, &fixture.other, &db(&name, instance), [0, 0, 1, 0]).await;
                }
            }
            12..=14 => {
                let at = dice.below(2) as usize;
                match members[at].take() {
                    Some(member) if dice.below(2) == 0 => drop(member.shutdown().await),
                    Some(member) => drop(member),
                    None => {
                        let options = ConsumerOptions::default()
                            .poll_interval(Duration::from_secs(1))
                            .attempts_max(2)
                            .backoff_min(Duration::from_millis(100))
                            .backoff_max(Duration::from_secs(2))
                            .stall_limit(Duration::from_secs(2))
                            .batch_rows_max(3)
                            .checkpoint_interval(Duration::from_millis(1 + dice.below(2_000)))
                            .debounce(Duration::from_millis(dice.below(2) * dice.below(800)))
                            .max_concurrency(1 + dice.below(4) as usize)
                            .in_hand_max(1 + dice.below(4) as usize);
                        let options =
                            if dice.below(5) == 0 { options.failure(FailurePolicy::Hold) } else { options };
                        let bus = if at == 0 { &fixture.bus } else { &fixture.other };
                        let Ok(node) = bus.node(notibus::NodeOptions::default()).await else { continue };
                        let member = node.consumer("c").unwrap().start_from(Cursor::NOTHING).options(options);
                        let ran = if is_ordered {
                            member.run_batches(rows.handler()).await
                        } else {
                            member.run(ids.handler()).await
                        };
                        members[at] = ran.ok();
                    }
                }
            }
            15 => drop(fixture.other.feed().reshard(1 + dice.below(4) as u32, None).await),
            16 => {
                let _ = fixture.handle().pause().await;
                pass(Duration::from_millis(dice.below(3_000))).await;
                let _ = fixture.handle().resume().await;
            }
            17 if asks => {
                drop(fixture.handle().again(&format!("db{}", dice.below(12)), dice.below(2) == 0).await)
            }
            _ => pass(Duration::from_millis(dice.below(2_000))).await,
        }
    }
    fixture.faults.heal();
    fails.store(0, Ordering::Relaxed);
    if members.iter().all(Option::is_none) || dice.below(2) == 0 {
        members = (0..2).map(|_| None).collect();
        let options = ConsumerOptions::default()
            .poll_interval(Duration::from_secs(1))
            .backoff_max(Duration::from_secs(2));
        let member = fixture.other_member().await.start_from(Cursor::NOTHING).options(options);
        members[1] = Some(if is_ordered {
            member.run_batches(rows.handler()).await.unwrap()
        } else {
            member.run(ids.handler()).await.unwrap()
        });
    }
    pass(Duration::from_secs(20)).await;
    until(&format!("all is done, seed {seed}"), async || {
        let lag = fixture.handle().lag().await.unwrap();
        let deferred = fixture.handle().deferred(None, 1).await.unwrap();
        lag.iter().all(|shard| shard.rows == 0) && deferred.is_empty()
    })
    .await;
    janitor.shutdown().await.unwrap();
    let effects: BTreeMap<String, u64> = stored(&fixture.store, b"effect/")
        .await
        .into_iter()
        .map(|(key, value)| {
            (String::from_utf8(key.to_vec()).unwrap(), u64::from_le_bytes(value[..].try_into().unwrap()))
        })
        .collect();
    if !asks {
        let twice: Vec<_> = effects.iter().filter(|(_, count)| **count != 1).collect();
        assert!(twice.is_empty(), "seed {seed}, ordered {is_ordered}: {twice:?}");
    }
    let made: Vec<_> = stored(&fixture.store, b"made/")
        .await
        .into_iter()
        .map(|(key, _)| String::from_utf8(key.to_vec()).unwrap())
        .collect();
    for key in &made {
        let mut parts = key.split('/').skip(1);
        let (name, instance) = (parts.next().unwrap(), parts.next().unwrap().parse::<u8>().unwrap());
        let n: u64 = name[2..].parse().unwrap();
        assert!(lives[&n] == (instance, true), "seed {seed}, asks {asks}: {key} was left, {:?}", lives[&n]);
    }
    for (n, (_, is_living)) in lives {
        let name = format!("db{n}");
        if let Some(row) = fixture.other.feed().newest(&name.parse().unwrap()).await.unwrap() {
            let key = String::from_utf8(effect(&row)).unwrap();
            assert!(
                effects.contains_key(&key),
                "seed {seed}, ordered {is_ordered}: {key} of {is_living} was lost"
            );
        }
    }
    drop(members);
}

#[tokio::test(start_paused = true)]
#[ignore = "takes long"]
async fn a_hammer() {
    let first: u64 = std::env::var("HAMMER_SEED").map_or(0, |seed| seed.parse().unwrap());
    let rounds: u64 = std::env::var("HAMMER_ROUNDS").map_or(5, |rounds| rounds.parse().unwrap());
    for seed in first..first + rounds {
        for (is_ordered, asks) in [(false, false), (true, false), (false, true), (true, true)] {
            println!("seed {seed} {is_ordered} {asks}");
            hammer(seed, is_ordered, asks).await;
        }
    }
}
