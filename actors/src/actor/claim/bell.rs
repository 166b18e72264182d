//! Falling asleep behind the doorbell, and waking up.
//!
//! The rule: producers ring only who holds its arm lock. So before a sleep: look, linger, look, take the lock, and look once more. The
//! lock is granted when every producer that counted on this instance being awake has ended, so the last look sees all they stored, and
//! whoever comes later rings. The failure this prevents: a row whose producer was still at work when the instance fell asleep.
//!
//! A ring is answered with a claim under the lock, and with a second look a moment later. The lock stays where it is while rows come one
//! by one: whatever commits after a claim under the lock rings, so no look is needed to fall asleep again. It is given back when many rows
//! come, or many rings: producers need not ring one who is awake.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use tokio::time::Instant;

use super::{ClaimActor, Phase};
use crate::actor::backoff;
use crate::instance::Gate;
use crate::port::{ArmMode, Armed, Claimed, Doorbell, StoreError};

/// How long it stays awake after rows, and looks again after a ring in vain: what comes in a row comes within that, and a row that another
/// claim had locked for a moment is free again.
const LINGER: Duration = Duration::from_millis(2);

/// With fewer rows it sleeps on. A claim that brings more has found a backlog or a burst, and there the rings of all who come cost more
/// than falling asleep once.
const FEW: usize = 10;

/// How many rings within [`BURST`] end the sleep, rows or not many: from then on the lock is free, and producers pass by without a ring.
const RINGS: usize = 3;
const BURST: Duration = Duration::from_millis(50);

/// The first wait for the arm lock; the next ones double up to the tight base. Claims wait behind it, and the server keeps what is dead
/// for as long, so it is short while producers are.
const FIRST_SLICE: Duration = Duration::from_millis(5);

/// How long nothing is armed after a pooler answered: only somebody who changes the URL can help.
const POOLER_PAUSE: Duration = Duration::from_mins(1);

/// What a claim comes after.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    /// A timer.
    #[default]
    Polled,
    /// News.
    Rung,
    /// Something that was written here.
    Freed,
    /// The linger.
    Lingered,
    /// The arm lock, or a wait for it.
    Armed,
}

impl Stage {
    /// Whether it is the first look after a sleep.
    pub(super) fn is_first(self) -> bool {
        matches!(self, Self::Polled | Self::Rung | Self::Freed)
    }
}

/// How a claim ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Rows,
    Nothing,
    Error,
}

/// The doorbell, as far as the claimer knows.
pub(super) struct Bell {
    doorbell: Option<Arc<dyn Doorbell>>,
    pub(super) stage: Stage,
    armed: Option<ArmMode>,
    /// Somebody before this claimer may have armed.
    unknown: bool,
    /// Waits for the end of the session that holds the lock.
    watch: Option<SpawnHandle>,
    /// Numbers the grants: the framework polls a cancelled watch once more.
    grant: u64,
    /// The grant under which the last claim was sent, if it was: what commits after it rings.
    sent_under: Option<u64>,
    /// The look after the linger is still to come.
    second_look: bool,
    /// There may be rows behind those in hand: a ring found nothing, or a claim left something. None who is woken for them looks once
    /// only, since another claim may have locked them for a moment.
    behind: bool,
    /// When the last rings came.
    rings: [Option<Instant>; RINGS],
    /// Waits for the lock in vain, in a row.
    pub(super) slices: u32,
    not_before: Option<Instant>,
}

impl Bell {
    pub(super) fn new(doorbell: Option<Arc<dyn Doorbell>>, unknown: bool) -> Self {
        Self {
            doorbell,
            stage: Stage::default(),
            armed: None,
            unknown,
            watch: None,
            grant: 0,
            sent_under: None,
            second_look: false,
            behind: false,
            rings: [None; RINGS],
            slices: 0,
            not_before: None,
        }
    }

    pub(super) fn doorbell(&self) -> Option<Arc<dyn Doorbell>> {
        self.doorbell.clone()
    }

    pub(super) fn is_armed(&self) -> bool {
        self.armed.is_some()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.armed == Some(ArmMode::Idle)
    }

    pub(super) fn is_full(&self) -> bool {
        self.armed == Some(ArmMode::Full)
    }

    /// A claim is sent now.
    pub(super) fn note_look(&mut self) {
        self.sent_under = self.is_idle().then_some(self.grant);
        match self.stage {
            Stage::Rung => self.second_look = true,
            Stage::Lingered | Stage::Armed => self.second_look = false,
            Stage::Polled | Stage::Freed => {}
        }
    }

    /// News came.
    pub(super) fn note_ring(&mut self) {
        self.rings.rotate_left(1);
        self.rings[RINGS - 1] = Some(Instant::now());
    }

    /// Whether so many rings came of late that it had better be awake.
    fn rings_fast(&self) -> bool {
        self.rings[0].is_some_and(|first| first.elapsed() <= BURST)
    }
}

impl ClaimActor {
    /// Whether this instance is to be rung when work arrives.
    pub(super) fn wants_bell(&self) -> bool {
        self.gate() == Gate::Available
            && self.bell.doorbell.is_some()
            && self.parts.options.claim.enabled
            && !self.parts.categories.is_empty()
            && self.bell.not_before.is_none_or(|at| at <= Instant::now())
    }

    /// The gate, as far as sleeping goes: producers ring only who is armed.
    pub(super) fn heard_gate(&self) -> Gate {
        match self.gate() {
            Gate::Available if self.bell.doorbell.is_some() && !self.bell.is_idle() => Gate::Unconfigured,
            gate => gate,
        }
    }

    /// After a claim: whether there is something to do before a sleep. An error is waited out as the cadence says, armed or not.
    pub(super) fn settle_down(&mut self, outcome: Outcome, ctx: &mut Context<Self>) -> bool {
        if outcome == Outcome::Rows {
            self.bell.slices = 0;
        }
        if !self.wants_bell() {
            self.disarm(ctx);
            return false;
        }
        let (stage, asleep) = (self.bell.stage, self.bell.is_idle());
        self.bell.behind |= outcome == Outcome::Nothing && stage == Stage::Rung;
        let again = match (outcome, stage) {
            (Outcome::Error, _) => return false,
            (_, Stage::Freed) if asleep => self.bell.second_look || self.bell.behind,
            (Outcome::Rows, _) | (Outcome::Nothing, Stage::Rung) => true,
            (Outcome::Nothing, Stage::Polled | Stage::Freed) => !asleep,
            (Outcome::Nothing, Stage::Lingered | Stage::Armed) => false,
        };
        if stage == Stage::Lingered && self.parts.in_flight.is_empty() {
            self.bell.behind = false;
        }
        match () {
            () if again => self.linger(ctx),
            () if asleep => return false,
            () => self.arm(ctx),
        }
        true
    }

    /// Whether it keeps the lock although a claim brought rows.
    pub(super) fn sleeps_on(&mut self, claimed: &Claimed, asked: usize) -> bool {
        let rows = claimed.works.len();
        let all = rows < asked && !claimed.has_more;
        self.bell.behind |= !all || rows >= self.parts.options.dispatch.stream_run as usize;
        let held = self.bell.is_idle() && self.bell.sent_under == Some(self.bell.grant);
        held && all && rows < FEW && !self.bell.rings_fast()
    }

    fn linger(&mut self, ctx: &mut Context<Self>) {
        self.phase = Phase::Lingering;
        self.bell.second_look = true;
        self.alarm.set(ctx, LINGER, |act, ctx| {
            act.alarm.rang();
            if act.may_claim() {
                act.gather(Stage::Lingered, ctx);
            } else {
                act.park(ctx);
            }
        });
    }

    /// How long the next wait for the lock takes.
    pub(super) fn slice(&self) -> Duration {
        let most = self.cadence.tight().max(FIRST_SLICE);
        backoff(self.bell.slices.saturating_add(1), FIRST_SLICE, most)
    }

    /// Takes the lock, and looks once more whether it was to be had or not.
    fn arm(&mut self, ctx: &mut Context<Self>) {
        let (Some(doorbell), instance, wait) = (self.bell.doorbell(), self.parts.instance, self.slice())
        else {
            return;
        };
        self.phase = Phase::Arming;
        let armed = async move { doorbell.arm(instance, wait, ArmMode::Idle).await };
        ctx.spawn(armed.into_actor(self).map(|answer, act, ctx| {
            act.phase = Phase::Sleeping;
            if !act.note_arm(answer, ArmMode::Idle, ctx) {
                let wait = act.cadence.backoff(Gate::Unconfigured, act.empty_polls);
                return act.sleep(wait, ctx);
            }
            if !act.wants_bell() {
                act.disarm(ctx);
            }
            if act.may_claim() {
                act.gather(Stage::Armed, ctx);
            } else {
                act.park(ctx);
            }
        }));
    }

    /// Notes how a wait for the lock ended. False: by an error.
    pub(super) fn note_arm(
        &mut self,
        answer: Result<Option<Armed>, StoreError>,
        mode: ArmMode,
        ctx: &mut Context<Self>,
    ) -> bool {
        match answer {
            Ok(Some(armed)) => {
                self.counters.arms += 1;
                self.bell.slices = 0;
                self.bell.armed = Some(mode);
                self.notice_end(armed, ctx);
            }
            Ok(None) => {
                self.counters.arm_timeouts += 1;
                self.bell.slices = self.bell.slices.saturating_add(1);
            }
            Err(error) => {
                if self.health.wrong(&error) {
                    tracing::warn!(%error, "this instance cannot be rung for now, and polls");
                }
                if matches!(error, StoreError::NotDirect(_)) {
                    self.bell.not_before = Some(Instant::now() + POOLER_PAUSE);
                }
                return false;
            }
        }
        true
    }

    /// Without the session nobody rings: what was stored since is looked for at once.
    fn notice_end(&mut self, armed: Armed, ctx: &mut Context<Self>) {
        self.bell.grant += 1;
        let grant = self.bell.grant;
        if let Some(watch) = self.bell.watch.take() {
            ctx.cancel_future(watch);
        }
        self.bell.watch = Some(ctx.spawn(armed.ended().into_actor(self).map(move |(), act, ctx| {
            if act.bell.grant == grant && act.bell.armed.take().is_some() {
                act.counters.arm_losses += 1;
                act.look(ctx);
                act.ring_on(ctx);
            }
        })));
    }

    /// Gives the lock back, before any claim that is sent later. Should it fail, the end of the session frees it; until then producers
    /// ring in vain.
    pub(super) fn disarm(&mut self, ctx: &mut Context<Self>) {
        let armed = self.bell.armed.take().is_some() || std::mem::take(&mut self.bell.unknown);
        self.bell.grant += 1;
        if let Some(watch) = self.bell.watch.take() {
            ctx.cancel_future(watch);
        }
        if let Some(doorbell) = self.bell.doorbell().filter(|_| armed) {
            let instance = self.parts.instance;
            ctx.spawn(async move { doorbell.disarm(instance).await }.into_actor(self).map(|answer, _, _| {
                if let Err(error) = answer {
                    tracing::debug!(%error, "the arm lock could not be given back");
                }
            }));
        }
    }
}
