//! The death watch: to learn of a peer's death within milliseconds, and to judge it a grace later.
//!
//! The rule: a suspicion counts only as long as this instance has held its own alive-lock without a break since before it arose, and a
//! census is asked for only after 30 s of that. The failure this prevents: a server that restarts frees every lock at once, and whoever is
//! back first would take the others for dead.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use tokio::time::Instant;

use super::{FIRST_PAUSE, StaleSweepActor, within};
use crate::actor::{Alarm, Health, backoff};
use crate::message::EvictionReason;
use crate::port::{DeathWatch, StoreError, Suspect, SuspectVerdict};

/// How long one wait for a death lasts.
const WATCH_FOR: Duration = Duration::from_secs(20);

/// How long the own alive-lock must have been held before a census.
const OWN_LOCK_FIRST: Duration = Duration::from_secs(30);

/// What a call may take beyond the wait.
const MARGIN: Duration = Duration::from_secs(10);

/// When a verdict that was not due is asked for again: the grace was counted by two clocks, or the peer's row was busy.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// Longest pause after an error.
const MAX_PAUSE: Duration = Duration::from_mins(1);

/// The watch under way.
#[derive(Debug, Default)]
pub(super) struct Watch {
    alarm: Alarm,
    health: Health,
    call: Option<SpawnHandle>,
    suspicion: Option<Suspicion>,
    pub(super) watches: u64,
    pub(super) suspects: u64,
    pub(super) false_alarms: u64,
    errors: u64,
}

#[derive(Clone, Copy, Debug)]
struct Suspicion {
    suspect: Suspect,
    arose: Instant,
    /// When to ask for the verdict.
    judge_at: Instant,
}

impl Watch {
    pub(super) fn is_watching(&self) -> bool {
        self.call.is_some()
    }

    pub(super) fn suspects_somebody(&self) -> bool {
        self.suspicion.is_some()
    }

    pub(super) fn errors(&self) -> u64 {
        self.errors
    }

    /// Drops a suspicion: somebody who is dead will be found by a census.
    pub(super) fn forget(&mut self, ctx: &mut Context<StaleSweepActor>) {
        if self.suspicion.take().is_some() {
            self.alarm.clear(ctx);
        }
    }

    /// Ends everything, the call under way included.
    pub(super) fn clear(&mut self, ctx: &mut Context<StaleSweepActor>) {
        self.suspicion = None;
        self.alarm.clear(ctx);
        if let Some(call) = self.call.take() {
            ctx.cancel_future(call);
        }
    }
}

impl StaleSweepActor {
    /// Watches, waits for the end of a grace, or judges, unless a call is under way or a pause is not over.
    pub(super) fn step_watch(&mut self, ctx: &mut Context<Self>) {
        if self.watch.call.is_some() || self.watch.alarm.is_set() || !self.may_judge() {
            return;
        }
        let Some(watch) = self.parts.watch.clone().filter(|_| self.parts.options.death_watch) else { return };
        match self.watch.suspicion {
            None => self.watch_for_a_death(watch, ctx),
            Some(suspicion) => {
                let left = suspicion.judge_at.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    self.judge(watch, suspicion, ctx);
                } else {
                    self.watch_again_in(left, ctx);
                }
            }
        }
    }

    fn watch_for_a_death(&mut self, watch: Arc<dyn DeathWatch>, ctx: &mut Context<Self>) {
        self.watch.watches += 1;
        let held = self.parts.standing.alive_lock_held_for();
        let census = held.is_some_and(|held| held >= OWN_LOCK_FIRST);
        // A wait that ends when the first census is due, so that a lonely instance finds what it left behind in its former life.
        let until_census =
            held.and_then(|held| OWN_LOCK_FIRST.checked_sub(held)).filter(|left| !left.is_zero());
        let wait = until_census.unwrap_or(WATCH_FOR).clamp(Duration::from_millis(100), WATCH_FOR);
        let me = self.parts.instance;
        let seen = async move { within(wait + MARGIN, watch.watch(me, wait, census)).await };
        self.watch.call = Some(ctx.spawn(seen.into_actor(self).map(|answer, act, ctx| {
            act.watch.call = None;
            match answer {
                Ok(seen) => act.seen(seen, ctx),
                Err(error) => act.watch_failed(&error, "the watch for dead peers failed", ctx),
            }
        })));
    }

    fn seen(&mut self, seen: Option<Suspect>, ctx: &mut Context<Self>) {
        self.watch.health.well();
        if let Some(suspect) = seen {
            let arose = Instant::now();
            self.watch.suspects += 1;
            tracing::debug!(peer = %suspect.peer, "the alive-lock of a peer is free");
            let judge_at = arose + self.parts.options.grace();
            self.watch.suspicion = Some(Suspicion { suspect, arose, judge_at }).filter(|_| self.may_judge());
        }
        self.step_watch(ctx);
    }

    /// Whether the own lock was held when the suspicion arose, and ever since.
    fn held_since(&self, arose: Instant) -> bool {
        self.parts.standing.alive_lock_held_for().is_some_and(|held| held >= arose.elapsed())
    }

    fn judge(&mut self, watch: Arc<dyn DeathWatch>, suspicion: Suspicion, ctx: &mut Context<Self>) {
        if !self.held_since(suspicion.arose) {
            self.watch.suspicion = None;
            tracing::debug!(peer = %suspicion.suspect.peer, "suspicion dropped: the own alive-lock was lost meanwhile");
            // Without the own lock a watch may name the same peer again at once.
            return self.watch_again_in(FIRST_PAUSE, ctx);
        }
        let (me, grace) = (self.parts.instance, self.parts.options.grace());
        let verdict = async move { within(MARGIN, watch.evict_suspect(me, suspicion.suspect, grace)).await };
        let verdict = self.telling(verdict, EvictionReason::AliveLockLost, move |verdict| {
            (*verdict == SuspectVerdict::Evicted).then_some(suspicion.suspect.peer).into_iter().collect()
        });
        self.watch.call = Some(ctx.spawn(verdict.into_actor(self).map(move |answer, act, ctx| {
            act.watch.call = None;
            match answer {
                Ok(verdict) => act.judged(verdict, suspicion, ctx),
                Err(error) => act.watch_failed(&error, "no verdict on a suspect", ctx),
            }
        })));
    }

    fn judged(&mut self, verdict: SuspectVerdict, mut suspicion: Suspicion, ctx: &mut Context<Self>) {
        self.watch.health.well();
        self.watch.suspicion = None;
        match verdict {
            SuspectVerdict::Early => {
                suspicion.judge_at = Instant::now() + ASK_AGAIN;
                self.watch.suspicion = Some(suspicion).filter(|_| self.may_judge());
            }
            SuspectVerdict::Alive | SuspectVerdict::Beaten => self.watch.false_alarms += 1,
            SuspectVerdict::Evicted => {
                self.evicted += 1;
                self.release.want();
            }
        }
        self.step(ctx);
    }

    /// The suspicion goes with the error: the server that does not answer may have freed the lock itself.
    fn watch_failed(&mut self, error: &StoreError, what: &'static str, ctx: &mut Context<Self>) {
        self.watch.suspicion = None;
        self.watch.errors += 1;
        if self.watch.health.wrong(error) {
            tracing::warn!(%error, in_a_row = self.watch.health.in_a_row(), "{what}");
        }
        self.look_for_own_end(error);
        let pause = match error {
            // Helps only after somebody changed the URL.
            StoreError::NotDirect(_) => MAX_PAUSE,
            _ => backoff(self.watch.health.in_a_row(), FIRST_PAUSE, MAX_PAUSE / 2),
        };
        self.watch_again_in(pause, ctx);
    }

    fn watch_again_in(&mut self, pause: Duration, ctx: &mut Context<Self>) {
        if !self.may_judge() {
            return;
        }
        self.watch.alarm.set(ctx, pause, |act, ctx| {
            act.watch.alarm.rang();
            act.step_watch(ctx);
        });
    }
}
