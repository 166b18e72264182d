//! An instance that can take nothing: it has no permits, or was told to pause.
//!
//! The rule: it is armed like one that sleeps, and passes each ring on to a peer that can. Producers cannot know that it is full: they
//! count it among the takers, and whoever is not armed counts as awake. The failure this prevents: a row that waits for the one busy
//! instance while the others sleep.
//!
//! Two full instances do not ring each other for ever: a ring is only passed to who sleeps idle, and who wakes takes rows or sleeps again.

use std::time::Duration;

use actix::prelude::*;

use super::{ClaimActor, Phase};
use crate::actor::Alarm;
use crate::port::ArmMode;

/// How long permits are waited for before it counts as full: between two batches of a busy instance there are always such moments.
const FILL_UP: Duration = Duration::from_millis(20);

/// The pause between two rings that are passed on. Rings that come meanwhile are passed on as one.
const PASS_PAUSE: Duration = Duration::from_millis(20);

/// What a full instance is at.
#[derive(Default)]
pub(super) struct Passing {
    alarm: Alarm,
    /// It has waited for permits for long enough to count as full.
    counts: bool,
    /// Waiting for the arm lock.
    arming: bool,
    ring: Ring,
}

/// A ring on its way to somebody else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Ring {
    #[default]
    None,
    /// It is being passed on, or was a moment ago.
    UnderWay,
    /// Another one came meanwhile.
    Another,
}

impl ClaimActor {
    /// Whether it can take nothing although rows may be sent to it.
    fn is_full(&self) -> bool {
        let standing = &self.parts.standing;
        let paused = standing.is_paused() && !standing.is_fenced() && !standing.is_over();
        let waits = self.phase == Phase::Gathering && self.passing.counts;
        self.wants_bell() && (waits || self.phase == Phase::Parked && paused)
    }

    /// It waits for permits.
    pub(super) fn may_fill_up(&mut self, ctx: &mut Context<Self>) {
        if self.wants_bell() && self.parts.permits.available_permits() == 0 {
            self.passing.alarm.set(ctx, FILL_UP, |act, ctx| {
                act.passing.alarm.rang();
                act.passing.counts = true;
                act.full(ctx);
            });
        }
    }

    /// It has permits again.
    pub(super) fn has_room(&mut self, ctx: &mut Context<Self>) {
        self.passing.alarm.clear(ctx);
        self.passing.counts = false;
    }

    /// It may not claim. A member that was paused is sent rows all the same.
    pub(super) fn rest_full(&mut self, ctx: &mut Context<Self>) {
        self.has_room(ctx);
        if self.is_full() {
            self.full(ctx);
        } else {
            self.disarm(ctx);
        }
    }

    fn full_in(&mut self, after: Duration, ctx: &mut Context<Self>) {
        self.passing.alarm.set(ctx, after, |act, ctx| {
            act.passing.alarm.rang();
            act.full(ctx);
        });
    }

    /// Arms, and passes a ring on once it is armed: there may be rows that rang nobody.
    fn full(&mut self, ctx: &mut Context<Self>) {
        if !self.is_full() || self.passing.arming {
            return;
        }
        if self.bell.is_full() {
            return self.pass(ctx);
        }
        let Some(doorbell) = self.bell.doorbell() else { return };
        let (instance, wait) = (self.parts.instance, self.slice());
        self.passing.arming = true;
        let armed = async move { doorbell.arm(instance, wait, ArmMode::Full).await };
        ctx.spawn(armed.into_actor(self).map(|answer, act, ctx| {
            act.passing.arming = false;
            let well = act.note_arm(answer, ArmMode::Full, ctx);
            match () {
                () if act.is_full() && well => act.pass(ctx),
                () if act.is_full() => act.full_in(act.cadence.tight(), ctx),
                // A claim that is under way decides about the lock when it is answered.
                () if act.phase == Phase::Parked => act.disarm(ctx),
                () => {}
            }
        }));
    }

    /// A ring came while it waits for permits, or the gate did, or the lock was lost. Before it counts as full nothing is passed on: what
    /// waits for a moment is claimed here.
    pub(super) fn ring_on(&mut self, ctx: &mut Context<Self>) {
        if self.phase != Phase::Gathering || self.passing.arming {
            return;
        }
        if self.is_full() && self.bell.is_full() {
            self.pass(ctx);
        } else if !self.passing.alarm.is_set() {
            self.may_fill_up(ctx);
        }
    }

    fn pass(&mut self, ctx: &mut Context<Self>) {
        if self.passing.ring != Ring::None {
            self.passing.ring = Ring::Another;
            return;
        }
        let Some(doorbell) = self.bell.doorbell() else { return };
        let instance = self.parts.instance;
        self.passing.ring = Ring::UnderWay;
        self.counters.passed += 1;
        let passed = async move {
            let answer = doorbell.pass_ring(instance).await;
            tokio::time::sleep(PASS_PAUSE).await;
            answer
        };
        ctx.spawn(passed.into_actor(self).map(|answer, act, ctx| {
            let again = std::mem::take(&mut act.passing.ring) == Ring::Another;
            if let Err(error) = &answer
                && act.health.wrong(error)
            {
                tracing::warn!(%error, "a ring could not be passed on");
            }
            match () {
                () if !act.is_full() => {}
                () if again && act.bell.is_full() => act.pass(ctx),
                // The lock was not to be had: producers are at work that ring nobody.
                () if !act.bell.is_full() => act.full_in(act.slice(), ctx),
                () if answer.is_err() => act.full_in(act.cadence.tight(), ctx),
                () if !act.parts.options.claim.enable_safety_net_poll => act.pass_when_due(ctx),
                () => {}
            }
        }));
    }

    /// Peers that do not poll do not know of the retries that this instance has written since they fell asleep.
    fn pass_when_due(&mut self, ctx: &mut Context<Self>) {
        let (store, instance) = (std::sync::Arc::clone(&self.store), self.parts.instance);
        let asked = async move { store.next_claimable_in(instance).await };
        ctx.spawn(asked.into_actor(self).map(|due, act, ctx| {
            if act.is_full() && !act.passing.alarm.is_set() {
                let most = act.cadence.healthy();
                let wait =
                    due.ok().flatten().map_or(most, |due| due.clamp(act.cadence.tight().min(most), most));
                act.full_in(wait, ctx);
            }
        }));
    }

    /// Passes one ring on, whatever becomes of this instance.
    pub(super) fn pass_once(&mut self, ctx: &mut Context<Self>) {
        if let Some(doorbell) = self.bell.doorbell().filter(|_| self.wants_bell()) {
            let instance = self.parts.instance;
            self.counters.passed += 1;
            ctx.spawn(async move { doorbell.pass_ring(instance).await }.into_actor(self).map(
                |answer, _, _| {
                    if let Err(error) = answer {
                        tracing::debug!(%error, "the last ring could not be passed on");
                    }
                },
            ));
        }
    }
}
