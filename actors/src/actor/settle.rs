//! Settling: writes results in batches, fenced row by row.
//!
//! The rule: one flush at a time, oldest first; what cannot be written for now is kept and tried again until its lease has ended; what is
//! given up is logged and counted. The failures this prevents: a trip per row, results lost in a restart of the database, and one
//! poisonous row that keeps a whole batch from being written.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::oneshot;

use crate::delivery::Settlement;
use crate::instance::InstanceId;
use crate::message::{
    Account, Drain, Drained, Evicted, Fence, Observe, RequestImmediatePoll, Settle, Unfence,
};
use crate::options::SettleOptions;
use crate::policy::coalesce::{CoalesceLimits, Coalescer, Decision};
use crate::port::{Settled, StoreError, Verdict, WorkStore};

use super::{Alarm, Health, backoff, now};

/// First pause after an error.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// Longest pause after an error.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// How long one flush may take before its outcome counts as unknown.
const FLUSH_DEADLINE: Duration = Duration::from_secs(30);

/// What the settling actor is made of.
#[derive(Debug, Clone)]
pub struct SettleParts {
    /// The knobs.
    pub options: SettleOptions,
    /// Whose claims are settled.
    pub instance: InstanceId,
    /// How long a drain may take.
    pub drain_deadline: Duration,
    /// Learns that rows became claimable.
    pub wake: Option<Recipient<RequestImmediatePoll>>,
    /// Learns that this instance was evicted.
    pub evicted: Recipient<Evicted>,
    /// Seed of the jitter.
    pub seed: u64,
}

#[derive(Debug, Default)]
struct Counters {
    received: u64,
    flushes: u64,
    applied: u64,
    fenced: u64,
    unclear: u64,
    poisoned: u64,
    lease_ended: u64,
    discarded: u64,
}

/// Results that are written together.
struct Batch {
    items: Vec<Settlement>,
    /// An earlier try ended without a known outcome: it may have been written already.
    unclear: bool,
}

/// Writes settlements.
pub struct SettleActor {
    parts: SettleParts,
    store: Arc<dyn WorkStore>,
    coalescer: Coalescer,
    waiting: VecDeque<Settlement>,
    /// Batches that must be tried again, before anything newer.
    again: VecDeque<Batch>,
    rng: SmallRng,
    alarm: Alarm,
    health: Health,
    counters: Counters,
    flushing: usize,
    fenced: bool,
    /// Waiting out an error.
    pausing: bool,
    over: bool,
    draining: Vec<oneshot::Sender<()>>,
}

impl std::fmt::Debug for SettleActor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SettleActor").field("waiting", &self.waiting.len()).finish_non_exhaustive()
    }
}

impl Actor for SettleActor {
    type Context = Context<Self>;
}

impl SettleActor {
    /// Ready to write at once.
    pub fn new(parts: SettleParts, store: Arc<dyn WorkStore>) -> Self {
        Self {
            coalescer: Coalescer::new(CoalesceLimits::settle(&parts.options)),
            rng: SmallRng::seed_from_u64(parts.seed),
            parts,
            store,
            waiting: VecDeque::new(),
            again: VecDeque::new(),
            alarm: Alarm::default(),
            health: Health::default(),
            counters: Counters::default(),
            flushing: 0,
            fenced: false,
            pausing: false,
            over: false,
            draining: Vec::new(),
        }
    }

    /// Decides what is next, unless a flush is under way.
    fn step(&mut self, ctx: &mut Context<Self>) {
        if self.flushing > 0 || self.fenced || self.pausing || self.over {
            return;
        }
        if let Some(batch) = self.again.pop_front() {
            return self.flush(batch, ctx);
        }
        let decision =
            if self.draining.is_empty() { self.coalescer.decide(now()) } else { self.coalescer.flush_now() };
        match decision {
            Decision::Rest => {
                for drained in self.draining.drain(..) {
                    // The drain may have run out of patience; then nobody waits for the answer.
                    let _ = drained.send(());
                }
            }
            Decision::Flush(items) => {
                self.coalescer.taken(items);
                let items = self.waiting.drain(..items).collect();
                self.flush(Batch { items, unclear: false }, ctx);
            }
            Decision::WaitUntil(instant) if !self.alarm.is_set() => {
                self.set_alarm(instant.saturating_duration_since(now()), ctx);
            }
            Decision::WaitUntil(_) => {}
        }
    }

    fn set_alarm(&mut self, after: Duration, ctx: &mut Context<Self>) {
        self.alarm.set(ctx, after, |act, ctx| {
            act.alarm.rang();
            act.pausing = false;
            act.step(ctx);
        });
    }

    fn flush(&mut self, batch: Batch, ctx: &mut Context<Self>) {
        self.alarm.clear(ctx);
        self.flushing = batch.items.len();
        self.counters.flushes += 1;
        let store = Arc::clone(&self.store);
        let instance = self.parts.instance;
        let flushed = async move {
            let items = batch.items.iter().map(Settlement::item).collect();
            let answer = tokio::time::timeout(FLUSH_DEADLINE, store.settle(instance, items)).await;
            let answer = answer.unwrap_or_else(|_| {
                Err(StoreError::Unavailable(format!("no answer within {} s", FLUSH_DEADLINE.as_secs())))
            });
            (batch, answer)
        };
        ctx.spawn(flushed.into_actor(self).map(|(batch, answer), act, ctx| {
            act.flushing = 0;
            match answer {
                Ok(settled) => act.written(batch, &settled),
                Err(error) => act.failed(batch, &error, ctx),
            }
            act.step(ctx);
        }));
    }

    fn written(&mut self, batch: Batch, settled: &Settled) {
        self.health.well();
        self.counters.applied += settled.applied as u64;
        if !settled.fenced.is_empty() {
            self.note_fenced(&batch, settled);
        }
        let frees_work = batch.items.iter().any(Settlement::frees_work);
        drop(batch);
        if frees_work && let Some(wake) = &self.parts.wake {
            wake.do_send(RequestImmediatePoll);
        }
    }

    /// A fenced release is expected: the failure written just before it has handed the row back already.
    fn note_fenced(&mut self, batch: &Batch, settled: &Settled) {
        let lost = settled
            .fenced
            .iter()
            .filter(|key| {
                batch.items.iter().any(|item| item.key() == **key && *item.verdict() != Verdict::Release)
            })
            .count();
        if lost == 0 {
            return;
        }
        if batch.unclear {
            self.counters.unclear += lost as u64;
            tracing::info!(rows = lost, "results tried again were fenced: already written, or lost");
        } else {
            self.counters.fenced += lost as u64;
            tracing::warn!(rows = lost, "results were fenced: these rows belong to a newer claim");
        }
    }

    fn failed(&mut self, mut batch: Batch, error: &StoreError, ctx: &mut Context<Self>) {
        batch.unclear |= error.outcome_is_unknown();
        match error {
            StoreError::Evicted(instance) => {
                self.parts.evicted.do_send(Evicted(*instance));
                self.again.push_front(batch);
                self.discard_all(error);
            }
            _ if self.over => {
                self.again.push_front(batch);
                self.discard_all(error);
            }
            StoreError::Rejected { .. } => self.bisect(batch, error),
            _ => self.keep(batch, error, ctx),
        }
    }

    /// One item is at fault: halve the batch until it stands alone.
    fn bisect(&mut self, mut batch: Batch, error: &StoreError) {
        self.health.wrong(error);
        if batch.items.len() > 1 {
            let newer = batch.items.split_off(batch.items.len() / 2);
            self.again.push_front(Batch { items: newer, unclear: batch.unclear });
            self.again.push_front(batch);
            return;
        }
        for item in batch.items {
            self.counters.poisoned += 1;
            tracing::error!(work = %item.key(), epoch = %item.epoch(), verdict = ?item.verdict(), %error,
                "the database refuses this result; it is given up, and the row comes back when its lease ends");
        }
    }

    /// Not written for now: try again, oldest first, until the leases end.
    fn keep(&mut self, mut batch: Batch, error: &StoreError, ctx: &mut Context<Self>) {
        if self.health.wrong(error) {
            tracing::warn!(%error, rows = batch.items.len(), in_a_row = self.health.in_a_row(), "settling failed");
        }
        let now = now();
        let before = batch.items.len();
        batch.items.retain(|item| !item.window().has_ended(now));
        let ended = before - batch.items.len();
        if ended > 0 {
            self.counters.lease_ended += ended as u64;
            tracing::error!(rows = ended, %error,
                "results could not be written before their leases ended; the rows will be run again");
        }
        if !batch.items.is_empty() {
            self.again.push_front(batch);
        }
        let pause = backoff(self.health.in_a_row(), FIRST_PAUSE, MAX_PAUSE);
        let pause = pause.mul_f64(0.8 + 0.4 * self.rng.random::<f64>());
        self.pausing = true;
        self.set_alarm(pause, ctx);
    }

    /// Gives everything up: the instance is gone, and nothing may be written under its id.
    fn discard_all(&mut self, reason: &impl std::fmt::Display) {
        self.over = true;
        let rows: usize =
            self.again.iter().map(|batch| batch.items.len()).sum::<usize>() + self.waiting.len();
        self.counters.discarded += rows as u64;
        if rows > 0 {
            tracing::error!(rows, %reason, "results discarded; the rows will be run again elsewhere");
        }
        self.again.clear();
        self.waiting.clear();
        self.coalescer.taken(self.coalescer.waiting());
        self.draining.clear();
    }

    fn unwritten(&self) -> usize {
        self.flushing + self.waiting.len() + self.again.iter().map(|batch| batch.items.len()).sum::<usize>()
    }

    fn state(&self) -> &'static str {
        match () {
            () if self.over => "stopped",
            () if self.fenced => "fenced",
            () if self.flushing > 0 => "writing",
            () if self.unwritten() > 0 => "gathering",
            () => "idle",
        }
    }
}

impl Handler<Settle> for SettleActor {
    type Result = ();

    fn handle(&mut self, Settle { settlements }: Settle, ctx: &mut Self::Context) {
        self.counters.received += settlements.len() as u64;
        self.coalescer.add(settlements.len(), now());
        self.waiting.extend(settlements);
        if self.over {
            return self.discard_all(&"settling has stopped");
        }
        self.step(ctx);
    }
}

impl Handler<Fence> for SettleActor {
    type Result = ();

    /// Results are held, not written.
    fn handle(&mut self, _: Fence, ctx: &mut Self::Context) {
        self.fenced = true;
        self.pausing = false;
        self.alarm.clear(ctx);
    }
}

impl Handler<Unfence> for SettleActor {
    type Result = ();

    fn handle(&mut self, _: Unfence, ctx: &mut Self::Context) {
        self.fenced = false;
        self.step(ctx);
    }
}

impl Handler<Evicted> for SettleActor {
    type Result = ();

    fn handle(&mut self, _: Evicted, ctx: &mut Self::Context) {
        self.alarm.clear(ctx);
        self.discard_all(&"this instance was evicted");
    }
}

impl Handler<Drain> for SettleActor {
    type Result = ResponseActFuture<Self, Drained>;

    /// Writes everything, or gives up what cannot be written before the drain deadline.
    fn handle(&mut self, _: Drain, ctx: &mut Self::Context) -> Self::Result {
        let applied_before = self.counters.applied;
        let (drained, done) = oneshot::channel();
        self.draining.push(drained);
        let patience = self.parts.drain_deadline;
        if self.over {
            self.draining.clear();
        } else {
            self.step(ctx);
        }
        let finished = async move { tokio::time::timeout(patience, done).await };
        Box::pin(finished.into_actor(self).map(move |_, act, ctx| {
            let unsettled = act.unwritten() as u64;
            act.alarm.clear(ctx);
            act.discard_all(&"the drain deadline has passed");
            Drained { settled: act.counters.applied - applied_before, unsettled, ..Drained::default() }
        }))
    }
}

impl Handler<Observe> for SettleActor {
    type Result = MessageResult<Observe>;

    fn handle(&mut self, _: Observe, _: &mut Self::Context) -> Self::Result {
        let counters = &self.counters;
        let account: Account = self.health.account(
            "settle",
            self.state(),
            [
                ("received", counters.received),
                ("flushes", counters.flushes),
                ("applied", counters.applied),
                ("fenced", counters.fenced),
                ("unclear", counters.unclear),
                ("poisoned", counters.poisoned),
                ("lease_ended", counters.lease_ended),
                ("discarded", counters.discarded),
                ("waiting", self.unwritten() as u64),
            ],
        );
        MessageResult(account)
    }
}
