//! [`ConsumerPlan`]: the draw of a consumer, and of what its handlers do.

use std::time::Duration;

use fastrand::Rng;
use notibus::{
    consumer::{ConsumerOptions, FailurePolicy},
    cursor::{Cursor, Start},
    event::{DbName, EventKind, Kinds},
    node::BalanceOptions,
};

use crate::oracle::{Interest, Which};

/// A consumer.
#[derive(Debug, Clone)]
pub(crate) struct ConsumerPlan {
    pub name: String,
    pub start: Start,
    /// What it wants.
    pub interest: Interest,
    /// Whether its handlers work on batches, or else on ids side by side.
    pub is_batch: bool,
    /// Whether the transaction that finishes work is the one of its effect. Else its transactions are only verified.
    pub is_exact: bool,
    /// The names of the databases on which its handlers fail forever.
    pub failing: Vec<DbName>,
    /// The most transactions of a run before the last one.
    pub steps_max: u64,
    /// The longest pause within a run, in milliseconds.
    pub work_max_ms: u64,
    /// How long a member stays at most, in milliseconds.
    pub stay_max_ms: u64,
    /// How an operator asks to work again, and how often.
    pub is_operated: bool,
    pub options: ConsumerOptions,
}

impl ConsumerPlan {
    /// The draw of consumer `number`, in a world with databases of these names.
    pub fn draw(random: &mut Rng, names: &[DbName], balance: BalanceOptions, number: usize) -> Self {
        let ms = |random: &mut Rng, from: u64, to: u64| Duration::from_millis(random.u64(from..=to));
        let which = match random.u32(0..6) {
            0 => Which::Prefix("shop/".into()),
            1 => Which::Names(names[..names.len().min(2)].to_vec()),
            _ => Which::All,
        };
        let kinds = match random.u32(0..4) {
            0 => Kinds::from(EventKind::Created) | EventKind::DdocUpdated.into(),
            1 => EventKind::Updated.into(),
            _ => Kinds::ALL,
        };
        let failure = if random.u32(0..4) == 0 { FailurePolicy::Hold } else { FailurePolicy::Defer };
        let failing = match failure {
            FailurePolicy::Defer if random.u32(0..3) == 0 => names[..1].to_vec(),
            _ => Vec::new(),
        };
        let options = ConsumerOptions::default()
            .max_concurrency([1, 2, 4, 16][random.usize(0..4)])
            .debounce(if random.bool() { Duration::ZERO } else { ms(random, 1, 300) })
            .attempts_max(random.u32(1..=3))
            .backoff_min(ms(random, 5, 50))
            .backoff_max(ms(random, 50, 2_000))
            .stall_limit(ms(random, 500, 3_000))
            .failure(failure)
            .batch_rows_max(random.usize(1..=10))
            .batch_bytes_max(if random.bool() { 300 } else { 1_000_000 })
            .checkpoint_interval(ms(random, 5, 500))
            .in_hand_max([1, 3, 1_000][random.usize(0..3)])
            .poll_interval(ms(random, 500, 5_000))
            .balance(balance);
        Self {
            name: format!("consumer-{number}"),
            start: if random.bool() { Start::Now } else { Cursor::NOTHING.into() },
            interest: Interest { kinds, ..Interest::of(which) },
            is_batch: random.u32(0..3) == 0,
            is_exact: random.bool(),
            failing,
            steps_max: random.u64(0..=2),
            work_max_ms: [5, 50, 800][random.usize(0..3)],
            stay_max_ms: [300, 3_000, 30_000][random.usize(0..3)],
            is_operated: random.u32(0..3) > 0,
            options,
        }
    }
}
