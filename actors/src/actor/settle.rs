//! Settling: writes results in batches, fenced row by row.
//!
//! The rule: one flush at a time, oldest first; what cannot be written for now is kept and tried again until its lease has ended; what is
//! given up is logged and counted. The failures this prevents: a trip per row, results lost in a restart of the database or of this
//! actor, and one poisonous row that keeps a whole batch from being written.

mod backlog;

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::oneshot;

use crate::instance::InstanceId;
use crate::message::{Account, Drain, Drained, Evicted, Fence, Observe, PingNow, Settle, Unfence, WorkFreed};
use crate::options::SettleOptions;
use crate::policy::coalesce::{CoalesceLimits, Coalescer, Decision};
use crate::port::{Settled, StoreError, WorkStore};
use crate::standing::Standing;

use super::{Alarm, Health, backoff, now};
pub use backlog::Backlog;
use backlog::{Flush, Written};

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
    /// What is known about this instance.
    pub standing: Arc<Standing>,
    /// What is not written yet: the same for every incarnation.
    pub backlog: Arc<Backlog>,
    /// How long a drain may take.
    pub drain_deadline: Duration,
    /// Learns that rows became claimable.
    pub wake: Option<Recipient<WorkFreed>>,
    /// Brings the proof without which nothing may be written.
    pub probe: Recipient<PingNow>,
    /// Learns that this instance was evicted.
    pub evicted: Recipient<Evicted>,
    /// Seed of the jitter.
    pub seed: u64,
}

/// Writes settlements.
pub struct SettleActor {
    parts: SettleParts,
    store: Arc<dyn WorkStore>,
    coalescer: Coalescer,
    rng: SmallRng,
    alarm: Alarm,
    health: Health,
    /// Waiting out an error.
    pausing: bool,
    draining: Vec<oneshot::Sender<()>>,
}

impl std::fmt::Debug for SettleActor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SettleActor")
            .field("unwritten", &self.parts.backlog.unwritten())
            .finish_non_exhaustive()
    }
}

impl Actor for SettleActor {
    type Context = Context<Self>;

    /// What the last incarnation has left is written first.
    fn started(&mut self, ctx: &mut Self::Context) {
        let found = self.parts.backlog.take_over();
        self.coalescer.add(found.waiting, now());
        for item in &found.deadly {
            tracing::error!(work = %item.key(), epoch = %item.epoch(), verdict = ?item.verdict(),
                "writer after writer died while this result was written; it is given up, and the row comes back when its lease ends");
        }
        if self.parts.standing.is_evicted() {
            return self.discard_all(None, &"this instance was evicted");
        }
        self.step(ctx);
    }
}

impl SettleActor {
    /// Ready to write at once.
    pub fn new(parts: SettleParts, store: Arc<dyn WorkStore>) -> Self {
        Self {
            coalescer: Coalescer::new(CoalesceLimits::settle(&parts.options)),
            rng: SmallRng::seed_from_u64(parts.seed),
            parts,
            store,
            alarm: Alarm::default(),
            health: Health::default(),
            pausing: false,
            draining: Vec::new(),
        }
    }

    /// Decides what is next, unless a flush is under way.
    fn step(&mut self, ctx: &mut Context<Self>) {
        let backlog = &self.parts.backlog;
        if self.pausing || self.parts.standing.is_fenced() || backlog.is_flushing() || backlog.is_closed() {
            return;
        }
        if backlog.unwritten() > 0 && !self.parts.standing.is_trusted(now()) {
            // Nothing is sent, and the next proof brings an `Unfence`.
            self.parts.standing.doubt();
            return self.parts.probe.do_send(PingNow);
        }
        if let Some(flush) = backlog.begin_again() {
            return self.flush(flush, ctx);
        }
        let decision =
            if backlog.is_draining() { self.coalescer.flush_now() } else { self.coalescer.decide(now()) };
        match decision {
            Decision::Rest => {
                for drained in self.draining.drain(..) {
                    // The drain may have run out of patience; then nobody waits for the answer.
                    let _ = drained.send(());
                }
            }
            Decision::Flush(items) => {
                self.coalescer.taken(items);
                let flush = backlog.begin(items);
                self.flush(flush, ctx);
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

    fn flush(&mut self, Flush { number, items }: Flush, ctx: &mut Context<Self>) {
        self.alarm.clear(ctx);
        let store = Arc::clone(&self.store);
        let instance = self.parts.instance;
        let flushed = async move {
            let answer = tokio::time::timeout(FLUSH_DEADLINE, store.settle(instance, items)).await;
            answer.unwrap_or_else(|_| {
                Err(StoreError::Unavailable(format!("no answer within {} s", FLUSH_DEADLINE.as_secs())))
            })
        };
        ctx.spawn(flushed.into_actor(self).map(move |answer, act, ctx| {
            match answer {
                Ok(settled) => act.written(number, &settled),
                Err(error) => act.failed(number, &error, ctx),
            }
            act.step(ctx);
        }));
    }

    fn written(&mut self, number: u64, settled: &Settled) {
        // Looked at after the answer: should it become available later, that wakes the claimer by itself.
        let gate = self.parts.standing.gate();
        let written = self.parts.backlog.written(number, settled, gate);
        let Some(Written { lost, unclear, frees_work, done }) = written else {
            return;
        };
        drop(done);
        self.health.well();
        if frees_work && let Some(wake) = &self.parts.wake {
            wake.do_send(WorkFreed);
        }
        match (lost, unclear) {
            (0, _) => {}
            (rows, true) => {
                tracing::info!(rows, "results tried again were fenced: already written, or lost");
            }
            (rows, false) => {
                tracing::warn!(rows, "results were fenced: these rows belong to a newer claim");
            }
        }
    }

    fn failed(&mut self, number: u64, error: &StoreError, ctx: &mut Context<Self>) {
        match error {
            StoreError::Evicted(instance) => {
                self.parts.standing.evict();
                self.parts.evicted.do_send(Evicted(*instance));
                self.discard_all(Some(number), error);
            }
            _ if self.parts.backlog.is_closed() => self.discard_all(Some(number), error),
            StoreError::Rejected { .. } => self.bisect(number, error),
            _ => self.keep(number, error, ctx),
        }
    }

    /// One item is at fault: halve the batch until it stands alone.
    fn bisect(&mut self, number: u64, error: &StoreError) {
        let poisonous = self.parts.backlog.bisect(number);
        self.health.wrong(error);
        if let Some(item) = poisonous {
            tracing::error!(work = %item.key(), epoch = %item.epoch(), verdict = ?item.verdict(), %error,
                "the database refuses this result; it is given up, and the row comes back when its lease ends");
        }
    }

    /// Not written for now: try again, oldest first, until the leases end.
    fn keep(&mut self, number: u64, error: &StoreError, ctx: &mut Context<Self>) {
        let (rows, ended) = self.parts.backlog.keep(number, error.outcome_is_unknown(), now());
        let first = self.health.wrong(error);
        let pause = backoff(self.health.in_a_row(), FIRST_PAUSE, MAX_PAUSE);
        let pause = pause.mul_f64(0.8 + 0.4 * self.rng.random::<f64>());
        self.pausing = true;
        self.set_alarm(pause, ctx);
        if first {
            tracing::warn!(%error, rows, in_a_row = self.health.in_a_row(), "settling failed");
        }
        if !ended.is_empty() {
            tracing::error!(rows = ended.len(), %error,
                "results could not be written before their leases ended; the rows will be run again");
        }
    }

    /// Gives everything up: the instance is gone, and nothing may be written under its id.
    fn discard_all(&mut self, failed: Option<u64>, reason: &impl std::fmt::Display) {
        let discarded = self.parts.backlog.close(failed);
        self.coalescer.taken(self.coalescer.waiting());
        self.draining.clear();
        if !discarded.is_empty() {
            tracing::error!(rows = discarded.len(), %reason, "results discarded; the rows will be run again elsewhere");
        }
    }

    fn state(&self) -> &'static str {
        match () {
            () if self.parts.backlog.is_closed() => "stopped",
            () if self.parts.standing.is_fenced() => "fenced",
            () if self.parts.standing.is_doubted() => "waiting for a proof",
            () if self.parts.backlog.is_flushing() => "writing",
            () if self.parts.backlog.unwritten() > 0 => "gathering",
            () => "idle",
        }
    }
}

impl Handler<Settle> for SettleActor {
    type Result = ();

    fn handle(&mut self, Settle { settlements }: Settle, ctx: &mut Self::Context) {
        let count = settlements.len();
        // Before anything else: from here on no crash loses them.
        self.parts.backlog.push(settlements);
        if self.parts.backlog.is_closed() {
            return self.discard_all(None, &"settling has stopped");
        }
        self.coalescer.add(count, now());
        self.step(ctx);
    }
}

impl Handler<Fence> for SettleActor {
    type Result = ();

    /// Results are held, not written.
    fn handle(&mut self, _: Fence, ctx: &mut Self::Context) {
        self.pausing = false;
        self.alarm.clear(ctx);
    }
}

impl Handler<Unfence> for SettleActor {
    type Result = ();

    fn handle(&mut self, _: Unfence, ctx: &mut Self::Context) {
        self.step(ctx);
    }
}

impl Handler<Evicted> for SettleActor {
    type Result = ();

    fn handle(&mut self, Evicted(instance): Evicted, ctx: &mut Self::Context) {
        if instance != self.parts.instance {
            return;
        }
        self.parts.standing.evict();
        self.alarm.clear(ctx);
        self.discard_all(None, &"this instance was evicted");
    }
}

impl Handler<Drain> for SettleActor {
    type Result = ResponseActFuture<Self, Drained>;

    /// Writes everything, or gives up what cannot be written before the drain deadline. Asked again after a crash, it goes on.
    fn handle(&mut self, _: Drain, ctx: &mut Self::Context) -> Self::Result {
        let end = self.parts.backlog.begin_drain(now(), self.parts.drain_deadline);
        let (drained, done) = oneshot::channel();
        self.draining.push(drained);
        if self.parts.backlog.is_closed() {
            self.draining.clear();
        } else {
            self.step(ctx);
        }
        let patience = end.saturating_duration_since(now());
        let finished = async move { tokio::time::timeout(patience, done).await };
        Box::pin(finished.into_actor(self).map(move |_, act, ctx| {
            let (settled, unsettled) = act.parts.backlog.end_drain();
            act.alarm.clear(ctx);
            act.discard_all(None, &"the drain deadline has passed");
            Drained { settled, unsettled, ..Drained::default() }
        }))
    }
}

impl Handler<Observe> for SettleActor {
    type Result = MessageResult<Observe>;

    fn handle(&mut self, _: Observe, _: &mut Self::Context) -> Self::Result {
        let counters = self.parts.backlog.counters();
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
                ("deadly", counters.deadly),
                ("waiting", self.parts.backlog.unwritten() as u64),
            ],
        );
        MessageResult(account)
    }
}
