//! Renewing: extends the leases of whatever runs, in batches, fenced row by row.
//!
//! The rule: one flush at a time; only the database's word extends a lease, its refusal ends one, and no word says nothing: then it is
//! asked again until the deadline. The failures this prevents: a long handler whose row is given to somebody else, one that goes on
//! although it was, a trip for each row, and good work that is thrown away because of one error.
//!
//! It lives on the vital thread, where nothing delays it, and holds nothing itself: what was asked for stands in the queue, which the next
//! incarnation finds as it is.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::delivery::{InFlight, RenewalFlush, Renewals};
use crate::instance::InstanceId;
use crate::message::{Account, Drain, Drained, Evicted, ExtendLease, Observe};
use crate::options::LeaseRenewalOptions;
use crate::policy::coalesce::{CoalesceLimits, Coalescer, Decision};
use crate::port::{Renewal, RenewalStore, StoreError};
use crate::standing::Standing;

use super::{Alarm, Health, backoff, now};

/// First pause after an error.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// Longest pause after an error: short against the time between the renewal and the deadline.
const MAX_PAUSE: Duration = Duration::from_secs(2);

/// How long one flush may take before its outcome counts as unknown.
const FLUSH_DEADLINE: Duration = Duration::from_secs(10);

/// How long after a row was found locked it is tried again, at most.
const LOCKED_PAUSE: Duration = Duration::from_millis(250);

/// What the renewing actor is made of.
#[derive(Debug, Clone)]
pub struct LeaseRenewalParts {
    /// The knobs.
    pub options: LeaseRenewalOptions,
    /// Whose claims are renewed.
    pub instance: InstanceId,
    /// What is known about this instance.
    pub standing: Arc<Standing>,
    /// What was asked for: the same for every incarnation.
    pub renewals: Arc<Renewals>,
    /// What is held in this process.
    pub in_flight: Arc<InFlight>,
    /// Learns that this instance was evicted.
    pub evicted: Recipient<Evicted>,
    /// Seed of the jitter.
    pub seed: u64,
}

/// Something was asked for.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct Came;

/// Renews leases.
pub struct LeaseRenewalActor {
    parts: LeaseRenewalParts,
    store: Arc<dyn RenewalStore>,
    coalescer: Coalescer,
    rng: SmallRng,
    alarm: Alarm,
    health: Health,
    /// Waiting out an error.
    pausing: bool,
}

impl std::fmt::Debug for LeaseRenewalActor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LeaseRenewalActor").field("renewals", &self.parts.renewals).finish_non_exhaustive()
    }
}

impl Actor for LeaseRenewalActor {
    type Context = Context<Self>;

    /// What the last incarnation was about to renew comes first.
    fn started(&mut self, ctx: &mut Self::Context) {
        let address = ctx.address();
        self.parts.renewals.set_bell(move || address.do_send(Came));
        let deadly = self.parts.renewals.take_over();
        if deadly > 0 {
            tracing::error!(
                requests = deadly,
                "renewer after renewer died of these renewals; they are given up"
            );
        }
        if self.parts.standing.is_evicted() {
            self.parts.renewals.close();
        }
        self.step(ctx);
    }
}

impl LeaseRenewalActor {
    /// Ready to renew at once.
    pub fn new(parts: LeaseRenewalParts, store: Arc<dyn RenewalStore>) -> Self {
        Self {
            coalescer: Coalescer::new(CoalesceLimits::renew(&parts.options)),
            rng: SmallRng::seed_from_u64(parts.seed),
            parts,
            store,
            alarm: Alarm::default(),
            health: Health::default(),
            pausing: false,
        }
    }

    /// Decides what is next, unless a flush is under way. A fence is no reason to stop: it is when leases are needed most, and the
    /// database checks each of them.
    fn step(&mut self, ctx: &mut Context<Self>) {
        let renewals = Arc::clone(&self.parts.renewals);
        if self.pausing || renewals.is_flushing() || renewals.is_closed() {
            return;
        }
        let now = now();
        let waiting = renewals.waiting(now);
        self.coalescer.add(waiting.saturating_sub(self.coalescer.waiting()), now);
        match self.coalescer.decide(now) {
            Decision::Rest => self.wait_until(renewals.next_again(), ctx),
            Decision::WaitUntil(instant) => {
                let next = renewals.next_again().map_or(instant, |again| again.min(instant));
                self.wait_until(Some(next), ctx);
            }
            Decision::Flush(_) => {
                let flush = renewals.begin(&self.parts.in_flight, self.parts.options.max_batch_size, now);
                self.coalescer.taken(waiting.saturating_sub(renewals.waiting(now)));
                match flush {
                    Some(flush) => self.flush(flush, ctx),
                    // Nothing of it is needed any more.
                    None => self.step(ctx),
                }
            }
        }
    }

    fn wait_until(&mut self, instant: Option<std::time::Instant>, ctx: &mut Context<Self>) {
        if let Some(instant) = instant {
            self.set_alarm(instant.saturating_duration_since(now()), ctx);
        }
    }

    fn set_alarm(&mut self, after: Duration, ctx: &mut Context<Self>) {
        self.alarm.set(ctx, after, |act, ctx| {
            act.alarm.rang();
            act.pausing = false;
            act.step(ctx);
        });
    }

    fn flush(&mut self, RenewalFlush { number, items }: RenewalFlush, ctx: &mut Context<Self>) {
        self.alarm.clear(ctx);
        let (store, instance) = (Arc::clone(&self.store), self.parts.instance);
        let (lease, rows) = (self.parts.renewals.terms().lease, items.len());
        // Before it is sent: a slow answer never lengthens a lease.
        let sent_at = now();
        let flushed = async move {
            let answer = tokio::time::timeout(FLUSH_DEADLINE, store.renew(instance, items, lease)).await;
            answer.unwrap_or_else(|_| {
                Err(StoreError::Unavailable(format!("no answer within {} s", FLUSH_DEADLINE.as_secs())))
            })
        };
        ctx.spawn(flushed.into_actor(self).map(move |answer, act, ctx| {
            match answer {
                Ok(answers) => act.answered(number, sent_at, &answers),
                Err(error) => act.failed(number, rows, &error, ctx),
            }
            act.step(ctx);
        }));
    }

    fn answered(&mut self, number: u64, sent_at: std::time::Instant, answers: &[Renewal]) {
        self.health.well();
        let pause = LOCKED_PAUSE.min(self.parts.renewals.terms().lease / 40);
        let lost = self.parts.renewals.answered(number, sent_at, answers, now(), pause);
        if lost > 0 {
            tracing::warn!(
                rows = lost,
                "leases are lost: their handlers were told to stop, and others may have the rows"
            );
        }
    }

    /// Nothing is known: the same again after a pause, for whatever has not reached its deadline by then.
    fn failed(&mut self, number: u64, rows: usize, error: &StoreError, ctx: &mut Context<Self>) {
        self.parts.renewals.failed(number);
        if let StoreError::Evicted(instance) = error {
            self.parts.standing.evict();
            self.parts.evicted.do_send(Evicted(*instance));
            self.parts.renewals.close();
            return;
        }
        if self.health.wrong(error) {
            tracing::warn!(%error, rows, in_a_row = self.health.in_a_row(), "renewing leases failed");
        }
        let pause = backoff(self.health.in_a_row(), FIRST_PAUSE, MAX_PAUSE);
        self.pausing = true;
        let pause = pause.mul_f64(0.8 + 0.4 * self.rng.random::<f64>());
        self.set_alarm(pause, ctx);
    }

    fn state(&self) -> &'static str {
        match () {
            () if self.parts.renewals.is_closed() => "stopped",
            () if self.parts.renewals.is_flushing() => "renewing",
            () if self.pausing => "waiting out an error",
            () if self.coalescer.waiting() > 0 => "gathering",
            () => "idle",
        }
    }
}

impl Handler<Came> for LeaseRenewalActor {
    type Result = ();

    fn handle(&mut self, _: Came, ctx: &mut Self::Context) {
        self.step(ctx);
    }
}

impl Handler<ExtendLease> for LeaseRenewalActor {
    type Result = ResponseFuture<<ExtendLease as Message>::Result>;

    /// Outlives this incarnation: the queue answers.
    fn handle(&mut self, ExtendLease { key, epoch }: ExtendLease, _: &mut Self::Context) -> Self::Result {
        let renewals = Arc::clone(&self.parts.renewals);
        let held = self.parts.in_flight.find(&key, epoch);
        Box::pin(async move {
            match held {
                Some(lease) => lease.extend().await,
                None => renewals.extend_stranger(key, epoch).await,
            }
        })
    }
}

impl Handler<Evicted> for LeaseRenewalActor {
    type Result = ();

    fn handle(&mut self, Evicted(instance): Evicted, ctx: &mut Self::Context) {
        // Late news of an earlier id concern nobody.
        if instance != self.parts.instance {
            return;
        }
        self.parts.standing.evict();
        self.alarm.clear(ctx);
        self.parts.renewals.close();
    }
}

impl Handler<Drain> for LeaseRenewalActor {
    type Result = MessageResult<Drain>;

    /// Asked when no handler runs any more: whatever is left here is needed by nobody.
    fn handle(&mut self, _: Drain, ctx: &mut Self::Context) -> Self::Result {
        self.parts.standing.drain();
        self.alarm.clear(ctx);
        self.parts.renewals.close();
        MessageResult(Drained::default())
    }
}

impl Handler<Observe> for LeaseRenewalActor {
    type Result = MessageResult<Observe>;

    fn handle(&mut self, _: Observe, _: &mut Self::Context) -> Self::Result {
        let counters = self.parts.renewals.counters();
        let account: Account = self.health.account(
            "lease_renewal",
            self.state(),
            [
                ("requests", counters.requests),
                ("flushes", counters.flushes),
                ("failed_flushes", counters.failed_flushes),
                ("renewed", counters.renewed),
                ("locked", counters.locked),
                ("lost", counters.lost),
                ("refused_at_cap", counters.refused_at_cap),
                ("skipped", counters.skipped),
                ("too_late", counters.too_late),
                ("unknown_handles", counters.strangers),
                ("deadly", counters.deadly),
                ("waiting", self.coalescer.waiting() as u64),
            ],
        );
        MessageResult(account)
    }
}
