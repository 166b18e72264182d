//! Finding the dead and handing their rows back: the backstop sweep, the death watch, and the release that follows an eviction.
//!
//! The rule: the database gives the verdicts, this actor only asks at the right time. It asks as a member that is not fenced, about others
//! and never about itself. An eviction is finished before the first row of the dead comes back, and the rows come back in passes of a
//! thousand, with a breath between them, until none is left. The failures this prevents: a takeover that waits for leases to end, an
//! instance in doubt about itself that judges others, and one large death that holds up every claim.
//!
//! Three duties, side by side: none waits for another. Each has at most one call under way and one alarm of its own. What is unfinished
//! stands in the database, and the next sweep, by anyone, goes on with it. Only the news of an eviction stands nowhere, so it is told by
//! the call that brought it (`telling`), which outlives the actor.

mod release;
mod subscribers;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tokio::time::Instant;

use crate::instance::InstanceId;
use crate::message::{
    Account, Drain, Drained, Evicted, EvictionReason, Fence, Observe, PeerEvicted, RequestImmediatePoll,
    SubscribeToEvictions, SweepNow, Unfence,
};
use crate::options::LivenessOptions;
use crate::port::{DeathWatch, StoreError, SweepStore, Swept};
use crate::standing::Standing;

use super::{Alarm, Health, backoff, within};
use release::Release;
pub use subscribers::Subscribers;
use watch::Watch;

/// First pause after an error.
const FIRST_PAUSE: Duration = Duration::from_millis(250);

/// Longest pause after an error.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// How long a sweep or a pass may take before its outcome counts as unknown.
const CALL_DEADLINE: Duration = Duration::from_secs(30);

/// What the sweeping actor is made of.
#[derive(Clone)]
pub struct StaleSweepParts {
    /// The knobs.
    pub options: LivenessOptions,
    /// Who sweeps, and so is never swept here.
    pub instance: InstanceId,
    /// What is known about this instance.
    pub standing: Arc<Standing>,
    /// The backstop, and the release.
    pub sweep: Arc<dyn SweepStore>,
    /// The death watch; none where there is no direct connection to wait on.
    pub watch: Option<Arc<dyn DeathWatch>>,
    /// Learns that rows became claimable.
    pub wake: Recipient<RequestImmediatePoll>,
    /// Learns that this instance was evicted.
    pub evicted: Recipient<Evicted>,
    /// Whoever wants to know of evictions: the same for every incarnation.
    pub subscribers: Arc<Subscribers>,
    /// Seed of the jitter.
    pub seed: u64,
}

impl std::fmt::Debug for StaleSweepParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StaleSweepParts").field("instance", &self.instance).finish_non_exhaustive()
    }
}

/// Finds the dead and hands back what they held.
pub struct StaleSweepActor {
    parts: StaleSweepParts,
    rng: SmallRng,
    alarm: Alarm,
    health: Health,
    /// When the next sweep is due.
    due: Instant,
    sweeping: bool,
    release: Release,
    watch: Watch,
    over: bool,
    sweeps: u64,
    evicted: u64,
}

impl std::fmt::Debug for StaleSweepActor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StaleSweepActor").field("state", &self.state()).finish_non_exhaustive()
    }
}

impl Actor for StaleSweepActor {
    type Context = Context<Self>;

    /// The first sweep comes early: who starts often does so after a death, and what a dead evictor left waits for somebody to go on.
    fn started(&mut self, ctx: &mut Self::Context) {
        self.due = Instant::now() + self.interval() / 10;
        self.step(ctx);
    }
}

impl StaleSweepActor {
    /// Looks about as soon as the instance is a member.
    pub fn new(parts: StaleSweepParts) -> Self {
        Self {
            rng: SmallRng::seed_from_u64(parts.seed),
            alarm: Alarm::default(),
            health: Health::default(),
            due: Instant::now(),
            sweeping: false,
            release: Release::default(),
            watch: Watch::default(),
            over: false,
            sweeps: 0,
            evicted: 0,
            parts,
        }
    }

    /// Whether this instance may judge others: it is a member, and sure of it.
    fn may_judge(&self) -> bool {
        !self.over && !self.parts.standing.is_fenced() && !self.parts.standing.is_over()
    }

    /// Decides what is next for each duty that has nothing under way.
    fn step(&mut self, ctx: &mut Context<Self>) {
        self.step_sweep(ctx);
        self.step_release(ctx);
        self.step_watch(ctx);
    }

    fn step_sweep(&mut self, ctx: &mut Context<Self>) {
        if self.sweeping {
            return;
        }
        self.alarm.clear(ctx);
        if !self.may_judge() {
            return;
        }
        let wait = self.due.saturating_duration_since(Instant::now());
        if !wait.is_zero() {
            return self.alarm.set(ctx, wait, |act, ctx| {
                act.alarm.rang();
                act.step_sweep(ctx);
            });
        }
        self.sweeping = true;
        self.sweeps += 1;
        let (store, me) = (Arc::clone(&self.parts.sweep), self.parts.instance);
        // The next one is due an interval after this one, whatever becomes of it; a call for a sweep meanwhile makes it due at once.
        self.due = Instant::now() + self.interval();
        let swept = async move { within(CALL_DEADLINE, store.sweep(me)).await };
        let swept = self.telling(swept, EvictionReason::StaleHeartbeat, |swept| {
            swept.iter().flat_map(|swept| swept.evicted.iter().copied()).collect()
        });
        ctx.spawn(swept.into_actor(self).map(|answer, act, ctx| {
            act.sweeping = false;
            act.swept(answer, ctx);
        }));
    }

    fn swept(&mut self, answer: Result<Option<Swept>, StoreError>, ctx: &mut Context<Self>) {
        match answer {
            // Another instance is at it, and does the same.
            Ok(None) => self.health.well(),
            Ok(Some(swept)) => {
                self.health.well();
                self.evicted += swept.evicted.len() as u64;
                self.released(swept.released);
                if swept.unfinished {
                    self.release.want();
                }
            }
            Err(error) => {
                self.wrong(&error, "a sweep for stale peers failed");
                let pause = backoff(self.health.in_a_row(), FIRST_PAUSE, MAX_PAUSE);
                self.due = self.due.min(Instant::now() + pause);
            }
        }
        self.step(ctx);
    }

    /// Runs a call beside the actor, and tells of those whom it evicted as soon as it is answered. The server evicts whoever asked it to,
    /// and says so once: an actor that dies meanwhile must not take the news with it.
    fn telling<T: 'static>(
        &self,
        call: impl Future<Output = Result<T, StoreError>> + 'static,
        reason: EvictionReason,
        evicted: impl Fn(&T) -> Vec<InstanceId> + 'static,
    ) -> impl Future<Output = Result<T, StoreError>> + 'static {
        let subscribers = Arc::clone(&self.parts.subscribers);
        let beside = actix_rt::spawn(async move {
            let answer = call.await;
            for instance in answer.iter().flat_map(evicted) {
                tracing::warn!(%instance, ?reason, "evicted a dead peer; its rows are handed back");
                subscribers.tell(PeerEvicted { instance, reason });
            }
            answer
        });
        async move {
            beside.await.unwrap_or_else(|error| match error.try_into_panic() {
                // As if the actor had made the call itself: it dies of it, and is replaced.
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => Err(StoreError::Unavailable("the thread of this actor ends".to_owned())),
            })
        }
    }

    /// Rows came back: they can be claimed.
    fn released(&mut self, rows: u64) {
        if rows > 0 {
            self.release.released += rows;
            self.parts.wake.do_send(RequestImmediatePoll);
        }
    }

    fn wrong(&mut self, error: &StoreError, what: &'static str) {
        if self.health.wrong(error) {
            tracing::warn!(%error, in_a_row = self.health.in_a_row(), "{what}");
        }
        self.look_for_own_end(error);
    }

    /// A database that says so has the last word on this instance, too.
    fn look_for_own_end(&self, error: &StoreError) {
        if matches!(error, StoreError::Evicted(id) if *id == self.parts.instance) {
            self.parts.evicted.do_send(Evicted(self.parts.instance));
        }
    }

    /// The pause until the next sweep, spread so that instances that started together do not sweep together.
    fn interval(&mut self) -> Duration {
        self.parts.options.stale_sweep_interval().mul_f64(0.8 + 0.4 * self.rng.random::<f64>())
    }

    /// Nothing new is begun any more, and no call is waited for: whatever is unfinished, anybody may go on with.
    fn end(&mut self, ctx: &mut Context<Self>) {
        self.over = true;
        self.alarm.clear(ctx);
        self.release.clear(ctx);
        self.watch.clear(ctx);
    }

    fn state(&self) -> &'static str {
        match () {
            () if self.over || self.parts.standing.is_over() => "stopped",
            () if self.parts.standing.is_fenced() => "fenced",
            () if self.release.is_at_it() => "handing back",
            () if self.watch.suspects_somebody() => "suspecting",
            () if self.watch.is_watching() => "watching",
            () => "sweeping only",
        }
    }
}

impl Handler<SweepNow> for StaleSweepActor {
    type Result = ();

    /// Remembered while the instance is fenced.
    fn handle(&mut self, _: SweepNow, ctx: &mut Self::Context) {
        self.due = Instant::now();
        self.step_sweep(ctx);
    }
}

impl Handler<SubscribeToEvictions> for StaleSweepActor {
    type Result = ();

    fn handle(&mut self, SubscribeToEvictions(who): SubscribeToEvictions, _: &mut Self::Context) {
        self.parts.subscribers.add(who);
    }
}

impl Handler<Fence> for StaleSweepActor {
    type Result = ();

    /// A suspicion from before is worth nothing: what ended the trust in this instance may have ended the lock of the other one.
    fn handle(&mut self, _: Fence, ctx: &mut Self::Context) {
        if !self.may_judge() {
            self.watch.forget(ctx);
        }
    }
}

impl Handler<Unfence> for StaleSweepActor {
    type Result = ();

    fn handle(&mut self, _: Unfence, ctx: &mut Self::Context) {
        self.step(ctx);
    }
}

impl Handler<Evicted> for StaleSweepActor {
    type Result = ();

    /// News of an earlier life ends only that one.
    fn handle(&mut self, Evicted(instance): Evicted, ctx: &mut Self::Context) {
        if instance == self.parts.instance {
            self.end(ctx);
        }
    }
}

impl Handler<Drain> for StaleSweepActor {
    type Result = MessageResult<Drain>;

    fn handle(&mut self, _: Drain, ctx: &mut Self::Context) -> Self::Result {
        self.end(ctx);
        MessageResult(Drained::default())
    }
}

impl Handler<Observe> for StaleSweepActor {
    type Result = MessageResult<Observe>;

    fn handle(&mut self, _: Observe, _: &mut Self::Context) -> Self::Result {
        let counters = [
            ("sweeps", self.sweeps),
            ("evicted", self.evicted),
            ("released", self.release.released),
            ("release_passes", self.release.passes),
            ("watches", self.watch.watches),
            ("suspects", self.watch.suspects),
            ("false_alarms", self.watch.false_alarms),
            ("watch_errors", self.watch.errors()),
        ];
        let account: Account = self.health.account("stale_sweep", self.state(), counters);
        MessageResult(account)
    }
}
