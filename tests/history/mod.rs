//! A recorded history of claims and settlements, and the checker that reads it.
//!
//! The rule: the database writes the record. A trigger logs every change of a work row with the row before and after, under one
//! sequence; an operation that depends on another's commit always has the larger number, so the log can be replayed. Clients only add
//! what they asked for and what they were told. The checker is a pure function over both.

pub(crate) mod audit;
pub(crate) mod check;
pub(crate) mod claimer;
pub(crate) mod load;
pub(crate) mod mutation;
pub(crate) mod replay;
pub(crate) mod run;
pub(crate) mod sampler;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use uuid::Uuid;

/// What a client asked the database to do, and the answer.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    /// Rows answered: (id, epoch). No answer: in flight, or rolled back.
    Claim { me: Uuid, answer: Option<Vec<(Uuid, i64)>> },
    /// Asked: id to (epoch, verdict). Answered: the fenced ones.
    Settle { me: Uuid, asked: HashMap<Uuid, (i64, &'static str)>, answer: Option<Vec<Uuid>> },
    /// Asked: id to epoch. Answered: the ids with a new expiry.
    Renew { me: Uuid, asked: HashMap<Uuid, i64>, answer: Option<Vec<Uuid>> },
    /// Time passes: a lease ends early.
    Warp,
}

/// Length of the leases in seconds.
pub(crate) const LEASE: i32 = 1;

/// What all actors of a run share.
pub(crate) struct World {
    pub(crate) url: String,
    pub(crate) seed: u64,
    /// Producers take a lock per stream, so that arrival order is commit order.
    pub(crate) serialised: bool,
    /// More unfinished rows than this are no better load.
    pub(crate) enough: i64,
    pub(crate) settling: AtomicBool,
    pub(crate) over: AtomicBool,
    pub(crate) max_claim_micros: AtomicI64,
    pub(crate) claims: AtomicI64,
    next_op: AtomicI64,
    ops: Mutex<HashMap<i64, Op>>,
    violations: Mutex<Vec<String>>,
}

impl World {
    pub(crate) fn new(url: &str, seed: u64, serialised: bool, enough: i64) -> Self {
        Self {
            url: url.to_owned(),
            seed,
            serialised,
            enough,
            settling: AtomicBool::new(false),
            over: AtomicBool::new(false),
            max_claim_micros: AtomicI64::new(0),
            claims: AtomicI64::new(0),
            next_op: AtomicI64::new(1),
            ops: Mutex::default(),
            violations: Mutex::default(),
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// No new work and no mischief any more: what is there shall be finished.
    pub(crate) fn is_settling(&self) -> bool {
        self.settling.load(Ordering::Relaxed)
    }

    /// Registers an operation before it is sent.
    pub(crate) fn begin(&self, op: Op) -> i64 {
        let number = self.next_op.fetch_add(1, Ordering::Relaxed);
        lock(&self.ops).insert(number, op);
        number
    }

    pub(crate) fn answer(&self, number: i64, give: impl FnOnce(&mut Op)) {
        if let Some(op) = lock(&self.ops).get_mut(&number) {
            give(op);
        }
    }

    pub(crate) fn ops(&self) -> HashMap<i64, Op> {
        lock(&self.ops).clone()
    }

    pub(crate) fn violated(&self, what: String) {
        lock(&self.violations).push(what);
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        lock(&self.violations).clone()
    }

    /// The choices of one actor: the same for the same seed.
    pub(crate) fn choices(&self, actor: u64) -> StdRng {
        StdRng::seed_from_u64(self.seed.wrapping_mul(1_000_003).wrapping_add(actor))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How long an actor does something: part of the load, not a wait for an event.
pub(crate) async fn spend(choices: &mut StdRng, up_to_millis: u64) {
    let micros = choices.random_range(0..=up_to_millis * 1000);
    tokio::time::sleep(Duration::from_micros(micros)).await;
}
