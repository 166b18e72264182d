//! Heartbeats: the only writer of this instance's membership.
//!
//! The rule: no beat before the schema is there; after that beats go on whatever happens, and an evicted id never beats again. The
//! failures this prevents: a live instance evicted because one bad answer ended its loop, and a dead id that rises again beside its
//! successor.

mod judge;

use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::prelude::*;
use tokio::sync::oneshot;

use crate::delivery::InFlight;
use crate::instance::{AliveLock, Gate, InstanceIdentity};
use crate::message::{
    Account, AliveLockChanged, BeatNow, Drain, Drained, Evicted, Fence, GateChanged, HeartbeatSwitched,
    Observe, Unfence,
};
use crate::options::HeartbeatOptions;
use crate::policy::beat::BeatCadence;
use crate::policy::trust::SentBeat;
use crate::port::{Beat, BeatAnswer, InstanceStore, StoreError};
use crate::standing::Standing;
use crate::work::Category;

use super::{Alarm, Health, backoff, now, within};
use judge::Judge;

/// First pause after an error.
const FIRST_PAUSE: Duration = Duration::from_millis(250);

/// Longest pause between two looks at the schema.
const SCHEMA_PAUSE: Duration = Duration::from_secs(5);

/// The pause between two beats after the loss of the lock and while the instance is fenced: peers have to learn of the one, and the
/// other ends with a beat.
const URGENT_PAUSE: Duration = Duration::from_secs(1);

/// How long one beat, and any other call of this actor, may take at most.
const CALL_DEADLINE: Duration = Duration::from_secs(10);

/// Tells whoever started the actor how far it has come.
pub type Progress = Box<dyn Fn(Result<(), String>) + Send>;

/// What the heartbeat actor is made of.
pub struct HeartbeatParts {
    /// The knobs.
    pub options: HeartbeatOptions,
    /// Who beats.
    pub identity: InstanceIdentity,
    /// Whether peers may route work here.
    pub accepts_work: bool,
    /// The categories somebody here can handle, in order.
    pub categories: Arc<[Category]>,
    /// What is known about this instance.
    pub standing: Arc<Standing>,
    /// What is in hand: with nothing in it, nothing has to be trusted.
    pub in_flight: Arc<InFlight>,
    /// Learns that trust has ended.
    pub fence: Recipient<Fence>,
    /// Learn that the instance is a member, and that it is trusted again.
    pub unfence: Vec<Recipient<Unfence>>,
    /// Learns that this instance was evicted.
    pub evicted: Recipient<Evicted>,
    /// Called with `Ok` once the first beat was accepted (or none is wanted), and before that with each error.
    pub progress: Progress,
}

impl std::fmt::Debug for HeartbeatParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeartbeatParts").field("identity", &self.identity).finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Does not beat while the heartbeat is switched off.
    Disabled,
    /// Waits for the schema.
    Schema,
    /// Beats.
    Beating,
    /// Evicted or drained: never beats again.
    Over,
}

/// Beats.
pub struct HeartbeatActor {
    parts: HeartbeatParts,
    store: Arc<dyn InstanceStore>,
    cadence: BeatCadence,
    alarm: Alarm,
    health: Health,
    judge: Judge,
    phase: Phase,
    /// When a lock that was declared was lost, until it is held again.
    lock_lost: Option<Instant>,
    /// What the last beat said of the gate.
    gate_declared: Gate,
    busy: bool,
    beat_again: bool,
    /// A beat of this incarnation was accepted.
    member: bool,
    draining: Option<oneshot::Sender<bool>>,
    beats: u64,
    accepted: u64,
}

impl std::fmt::Debug for HeartbeatActor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeartbeatActor").field("phase", &self.phase).finish_non_exhaustive()
    }
}

impl Actor for HeartbeatActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        if self.phase == Phase::Disabled {
            (self.parts.progress)(Ok(()));
        }
        self.step(ctx);
    }
}

impl HeartbeatActor {
    /// Looks for the schema as soon as it is started. One that comes after another beats at once, as that one may have died of its beat,
    /// and never when the instance has left or was evicted.
    pub fn new(parts: HeartbeatParts, store: Arc<dyn InstanceStore>) -> Self {
        Self {
            cadence: BeatCadence::new(&parts.options),
            phase: first_phase(&parts.standing),
            parts,
            store,
            alarm: Alarm::default(),
            health: Health::default(),
            judge: Judge::default(),
            lock_lost: None,
            gate_declared: Gate::default(),
            busy: false,
            beat_again: false,
            member: false,
            draining: None,
            beats: 0,
            accepted: 0,
        }
    }

    /// Decides what is next, unless a call is under way.
    fn step(&mut self, ctx: &mut Context<Self>) {
        if self.busy {
            return;
        }
        self.alarm.clear(ctx);
        match self.phase {
            Phase::Schema => self.look_for_schema(ctx),
            Phase::Beating => self.beat(ctx),
            Phase::Disabled | Phase::Over => self.leave(ctx),
        }
    }

    fn look_for_schema(&mut self, ctx: &mut Context<Self>) {
        self.busy = true;
        let store = Arc::clone(&self.store);
        let looked = async move { within(CALL_DEADLINE, store.schema_ready()).await };
        ctx.spawn(looked.into_actor(self).map(|answer, act, ctx| {
            act.busy = false;
            let problem = match answer {
                Ok(true) => {
                    act.health.well();
                    if act.phase == Phase::Schema {
                        act.phase = Phase::Beating;
                    }
                    return act.step(ctx);
                }
                Ok(false) => StoreError::Schema("it is not there yet".to_owned()),
                Err(error) => error,
            };
            act.wrong(&problem, "the schema cannot be used yet");
            act.again_in(backoff(act.health.in_a_row(), FIRST_PAUSE, SCHEMA_PAUSE), ctx);
        }));
    }

    fn beat(&mut self, ctx: &mut Context<Self>) {
        self.busy = true;
        self.beat_again = false;
        self.beats += 1;
        let standing = &self.parts.standing;
        let lock = standing.alive_lock();
        let interval = self.cadence.interval(lock);
        let lock_declared = self.cadence.declares_lock(lock);
        let gate = standing.gate_report();
        self.gate_declared = gate.gate;
        let beat = Beat {
            identity: self.parts.identity.clone(),
            interval,
            lock_declared,
            accepts_work: self.parts.accepts_work,
            categories: Arc::clone(&self.parts.categories),
            gate: gate.gate,
            gate_reason: gate.reason,
        };
        let store = Arc::clone(&self.store);
        let lock = lock_declared.then(|| standing.lock_session());
        let sent = SentBeat { sent_at: now(), lock, interval };
        standing.beat_sent(sent);
        let beaten = async move { within(interval.min(CALL_DEADLINE), store.beat(beat)).await };
        ctx.spawn(beaten.into_actor(self).map(move |answer, act, ctx| {
            act.busy = false;
            act.beaten(answer, sent, ctx);
        }));
    }

    fn beaten(&mut self, answer: Result<BeatAnswer, StoreError>, sent: SentBeat, ctx: &mut Context<Self>) {
        match answer {
            Ok(BeatAnswer::Accepted) => {
                self.accept(sent, ctx);
                // Resolved anew at every tick: the lock may have changed meanwhile.
                let next = self.pause().saturating_sub(now().saturating_duration_since(sent.sent_at));
                self.again_in(next, ctx);
            }
            Ok(BeatAnswer::Evicted) | Err(StoreError::Evicted(_)) => {
                self.evict();
                self.step(ctx);
            }
            Err(error) => {
                self.wrong(&error, "heartbeat failed");
                let cap = self.pause();
                self.again_in(backoff(self.health.in_a_row(), FIRST_PAUSE, cap), ctx);
            }
        }
    }

    fn interval(&self) -> Duration {
        self.cadence.interval(self.parts.standing.alive_lock())
    }

    /// The time to the next beat: the interval that peers are told, or less while they have to be told something.
    fn pause(&self) -> Duration {
        let patience = 2 * self.parts.standing.trust_rule().grace();
        let lost = self.lock_lost.is_some_and(|at| now().saturating_duration_since(at) < patience);
        if lost || self.judge.fenced { URGENT_PAUSE.min(self.interval()) } else { self.interval() }
    }

    fn accept(&mut self, sent: SentBeat, ctx: &mut Context<Self>) {
        self.parts.standing.register();
        self.parts.standing.beat_accepted(sent);
        self.health.well();
        self.accepted += 1;
        if !self.member {
            self.member = true;
            // In this order: whoever waits for the progress can rely on the news being on its way.
            self.unfence();
            (self.parts.progress)(Ok(()));
        }
        self.proven(ctx);
    }

    fn evict(&mut self) {
        self.phase = Phase::Over;
        self.parts.standing.evict();
        // Before anything else: a successor has nothing to say of it any more.
        self.parts.evicted.do_send(Evicted(self.parts.identity.id));
        let evicted = StoreError::Evicted(self.parts.identity.id);
        self.health.wrong(&evicted);
        (self.parts.progress)(Err(evicted.to_string()));
    }

    fn wrong(&mut self, error: &StoreError, what: &'static str) {
        if self.health.wrong(error) {
            tracing::warn!(%error, in_a_row = self.health.in_a_row(), "{what}");
        }
        if !self.member {
            (self.parts.progress)(Err(error.to_string()));
        }
    }

    fn again_in(&mut self, pause: Duration, ctx: &mut Context<Self>) {
        if self.beat_again || self.draining.is_some() {
            return self.step(ctx);
        }
        self.alarm.set(ctx, pause, |act, ctx| {
            act.alarm.rang();
            act.step(ctx);
        });
    }

    fn beat_soon(&mut self, ctx: &mut Context<Self>) {
        if self.phase == Phase::Beating {
            self.beat_again = true;
            self.step(ctx);
        }
    }

    /// Leaves the membership, once, when a drain asks for it and there is something to leave. Asked again, it tries again what has failed.
    fn leave(&mut self, ctx: &mut Context<Self>) {
        let Some(drained) = self.draining.take() else { return };
        let standing = &self.parts.standing;
        if !standing.is_registered() || standing.is_evicted() || standing.is_deregistered() {
            // The drain may have run out of patience; then nobody waits for the answer.
            let _ = drained.send(standing.is_deregistered());
            return;
        }
        self.busy = true;
        let store = Arc::clone(&self.store);
        let instance = self.parts.identity.id;
        let left = async move { within(CALL_DEADLINE, store.deregister(instance)).await };
        ctx.spawn(left.into_actor(self).map(move |answer, act, ctx| {
            act.busy = false;
            match &answer {
                Ok(()) => act.parts.standing.deregister(),
                Err(error) => {
                    act.health.wrong(error);
                    tracing::warn!(%error, "deregistering failed; peers will find this instance gone");
                }
            }
            let _ = drained.send(answer.is_ok());
            act.step(ctx);
        }));
    }

    fn state(&self) -> &'static str {
        match self.phase {
            Phase::Disabled => "disabled",
            Phase::Schema => "waiting for the schema",
            Phase::Beating if self.member => "member",
            Phase::Beating => "registering",
            Phase::Over if self.parts.standing.is_evicted() => "evicted",
            Phase::Over => "stopped",
        }
    }
}

fn first_phase(standing: &Standing) -> Phase {
    match standing {
        _ if standing.is_evicted() || standing.has_left() => Phase::Over,
        _ if !standing.wants_heartbeat() => Phase::Disabled,
        _ if standing.is_registered() => Phase::Beating,
        _ => Phase::Schema,
    }
}

impl Handler<HeartbeatSwitched> for HeartbeatActor {
    type Result = ();

    /// A beat under way is not taken back: what it says of the lock is no worse than what the one before said.
    fn handle(&mut self, _: HeartbeatSwitched, ctx: &mut Self::Context) {
        let on = self.parts.standing.wants_heartbeat();
        if self.phase == Phase::Over || on != (self.phase == Phase::Disabled) {
            return;
        }
        self.phase = first_phase(&self.parts.standing);
        self.lock_lost = None;
        self.step(ctx);
        // Without beats trust ends soon, and with it what is in hand.
        self.watch_trust(ctx);
    }
}

impl Handler<BeatNow> for HeartbeatActor {
    type Result = ();

    fn handle(&mut self, _: BeatNow, ctx: &mut Self::Context) {
        self.beat_soon(ctx);
    }
}

impl Handler<AliveLockChanged> for HeartbeatActor {
    type Result = ();

    /// Peers judge by what the last beat declared, so a change that matters is declared at once.
    fn handle(&mut self, AliveLockChanged(lock): AliveLockChanged, ctx: &mut Self::Context) {
        let before = self.parts.standing.set_alive_lock(lock);
        if self.cadence.declares_lock(lock) {
            self.lock_lost = None;
            // Also when it was held before: it is another session's now.
            self.beat_soon(ctx);
        } else if self.cadence.must_declare(before, lock) {
            self.lock_lost = Some(now());
            self.beat_soon(ctx);
        }
    }
}

impl Handler<GateChanged> for HeartbeatActor {
    type Result = ();

    /// Operators read of the gate in the table of members: what stands there must not be a minute old when it has changed.
    fn handle(&mut self, _: GateChanged, ctx: &mut Self::Context) {
        if self.parts.standing.gate() != self.gate_declared {
            self.beat_soon(ctx);
        }
    }
}

impl Handler<Evicted> for HeartbeatActor {
    type Result = ();

    /// Somebody else was told first.
    fn handle(&mut self, Evicted(instance): Evicted, ctx: &mut Self::Context) {
        if instance != self.parts.identity.id {
            return;
        }
        self.parts.standing.evict();
        self.phase = Phase::Over;
        self.step(ctx);
    }
}

impl Handler<Drain> for HeartbeatActor {
    type Result = ResponseActFuture<Self, Drained>;

    /// A beat under way is waited for: it must not register the instance again after it has left. The answer ends with the actor, so that
    /// whoever asked learns of its death and asks the next one.
    fn handle(&mut self, _: Drain, ctx: &mut Self::Context) -> Self::Result {
        self.parts.standing.leave();
        let (drained, left) = oneshot::channel();
        self.draining = Some(drained);
        if self.phase != Phase::Disabled {
            self.phase = Phase::Over;
        }
        self.step(ctx);
        Box::pin(
            left.into_actor(self)
                .map(|left, _, _| Drained { deregistered: left.unwrap_or(false), ..Drained::default() }),
        )
    }
}

impl Handler<Observe> for HeartbeatActor {
    type Result = MessageResult<Observe>;

    fn handle(&mut self, _: Observe, _: &mut Self::Context) -> Self::Result {
        let account: Account = self.health.account(
            "heartbeat",
            self.state(),
            [
                ("beats", self.beats),
                ("accepted", self.accepted),
                ("interval_seconds", self.interval().as_secs()),
                ("fences", self.judge.fences),
                ("lock_held", u64::from(self.parts.standing.alive_lock() == AliveLock::Held)),
            ],
        );
        MessageResult(account)
    }
}
