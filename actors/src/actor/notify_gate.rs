//! The direct session: holds the alive-lock, hears the instance's own channel and those of its users, and proves that both still work.
//!
//! The rule: one session at a time, and its end is the end of its notification stream; whatever it held or heard is set up again on the
//! next one, once. A lock is told of only while it is held in a session that lives. The failures this prevents: an instance that believes
//! in the lock of a session that is gone, and one that hears nothing any more and does not know.
//!
//! | file | concern |
//! |---|---|
//! | `session` | what is done on an open session, the lock, its end |
//! | `listening`, `channels` | which channels it listens to, and who hears them |
//! | `proof`, `verdict` | whether NOTIFY reaches it, and who is told |
//! | `pings` | trust in the lock |
//!
//! An idle instance pings nobody; one probe of the gate every 30 s is all its traffic. With work in hand it pings five times in a grace,
//! at least once a second.

mod channels;
mod hears;
mod listening;
mod pings;
mod proof;
mod session;
mod verdict;

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::delivery::InFlight;
use crate::instance::{AliveLock, Gate, InstanceId};
use crate::message::{AliveLockChanged, GateChanged, RequestImmediatePoll, TrustProven};
use crate::options::{GateOptions, HeartbeatOptions, LivenessSourceMode};
use crate::port::{DirectConnector, ProducersRoute, StoreError};
use crate::standing::{GateKeeper, Standing};

use super::{Alarm, Health, backoff};
pub use channels::Channels;
use pings::Pings;
use proof::Proofs;
use session::{LockClaim, Open};
pub use verdict::GateSubscribers;

/// First pause before another connect; the very first try after the loss of a session comes at once.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// How much of the grace the pause between two connects may take, before it is spread by 20 % either way: peers give the instance up after
/// the grace, and what is left of it is for the connect itself.
const PART_OF_GRACE: f64 = 0.75;

/// The pause when a pooler answers: only somebody who changes the URL can help.
const POOLER_PAUSE: Duration = Duration::from_mins(1);

/// How long a connect may take. Above the limit of any connector, which says more.
const CONNECT_DEADLINE: Duration = Duration::from_secs(15);

/// How long one call may take. Above the limit of any session.
const CALL_DEADLINE: Duration = Duration::from_secs(10);

/// How long the start waits for the first session: after that it goes on without.
const START_PATIENCE: Duration = Duration::from_secs(3);

/// First and longest pause between two tries for the lock.
const LOCK_PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// A session that has lived for so long is no part of a hot loop: the pauses begin anew.
const GOOD_LIFE: Duration = Duration::from_secs(1);

/// What the actor is made of.
pub struct NotifyGateParts {
    /// Whether NOTIFY is used, and how it is proven.
    pub gate: GateOptions,
    /// Whether, and how, this instance shows that it is alive.
    pub heartbeat: HeartbeatOptions,
    /// Whose lock and channel.
    pub instance: InstanceId,
    /// What is known about this instance.
    pub standing: Arc<Standing>,
    /// What is in hand: pings go out while there is anything.
    pub in_flight: Arc<InFlight>,
    /// Opens sessions. `None`: there is no direct connection.
    pub connector: Option<Arc<dyn DirectConnector>>,
    /// Rings as producers do.
    pub route: Arc<dyn ProducersRoute>,
    /// Learn of the alive-lock.
    pub alive_lock: Vec<Recipient<AliveLockChanged>>,
    /// Learn of answered pings.
    pub trust: Vec<Recipient<TrustProven>>,
    /// Learn of the gate, every change of it.
    pub gate_news: Vec<Recipient<GateChanged>>,
    /// Whoever else wants to know of it: the same for every incarnation.
    pub gate_subscribers: Arc<GateSubscribers>,
    /// Who hears which channel: the same for every incarnation.
    pub channels: Arc<Channels>,
    /// Learns that something was rung for.
    pub wake: Option<Recipient<RequestImmediatePoll>>,
    /// Not ready before the gate was proven.
    pub must_be_proven: bool,
    /// Called with `Ok` once it has asked for its lock and knows how the gate stands, or that neither is to be had for now; and before that
    /// with each reason why not.
    pub progress: Progress,
    /// Seed of the jitter.
    pub seed: u64,
}

/// Told of the way to readiness.
pub type Progress = Box<dyn Fn(Result<(), String>) + Send>;

impl std::fmt::Debug for NotifyGateParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NotifyGateParts").field("instance", &self.instance).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Counters {
    connects: u64,
    rings: u64,
    pings: u64,
    answered: u64,
    losses: u64,
    heard: u64,
    told: u64,
    refused: u64,
    listens: u64,
    unlistens: u64,
    probes: u64,
    proofs: u64,
    not_sent: u64,
    deaf: u64,
    gate_changes: u64,
}

/// Keeps the direct session.
pub struct NotifyGateActor {
    parts: NotifyGateParts,
    rng: SmallRng,
    health: Health,
    /// That of the subscribers' channels.
    channel_health: Health,
    counters: Counters,
    open: Option<Open>,
    /// Numbers the sessions, so that a late answer of an earlier one is known.
    number: u64,
    connecting: bool,
    /// Waits for the next connect.
    reconnect: Alarm,
    /// Connects in a row that brought no good session.
    failures: u32,
    pooler: bool,
    /// Evicted or drained: no session any more.
    over: bool,
    lock: LockClaim,
    listen_retry: Alarm,
    /// Ends the rest of channels that were refused.
    resting: Alarm,
    /// Looks for subscribers whose mailbox was full.
    behind: Alarm,
    pings: Pings,
    /// The right to say how the gate stands.
    keeper: GateKeeper,
    proofs: Proofs,
    /// Looks for those who want to know of the gate and had no room.
    gate_behind: Alarm,
}

/// However it ends, its session ends with it. The part of [`Actor::stopped`] that a panic does not skip.
impl Drop for NotifyGateActor {
    fn drop(&mut self) {
        let why = "the actor that keeps the direct session has ended";
        if self.parts.standing.gate() == Gate::Available && self.note_gate(Gate::Unavailable, Some(why)) {
            // Whoever has no room is told by the next life.
            self.parts.gate_subscribers.tell(Gate::Unavailable);
        }
    }
}

impl std::fmt::Debug for NotifyGateActor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NotifyGateActor").field("state", &self.state()).finish_non_exhaustive()
    }
}

impl Actor for NotifyGateActor {
    type Context = Context<Self>;

    /// The session of the one before it has ended with it, and so has its lock.
    fn started(&mut self, ctx: &mut Self::Context) {
        if self.parts.standing.alive_lock() == AliveLock::Held {
            self.tell_lock(AliveLock::NotHeld);
        }
        if self.over {
            return (self.parts.progress)(Ok(()));
        }
        if !self.uses_notify() || self.parts.standing.gate() != Gate::Unconfigured {
            self.set_gate(Gate::Unavailable, Some("the direct session is being opened"), ctx);
        }
        if self.parts.connector.is_none() {
            return self.lock_known();
        }
        ctx.run_later(START_PATIENCE, |act, ctx| {
            if act.parts.standing.gate() == Gate::Unconfigured && !act.over {
                act.set_gate(Gate::Unavailable, Some("nothing is proven yet"), ctx);
            }
            act.lock_known();
        });
        self.connect(ctx);
    }

    fn stopped(&mut self, _: &mut Self::Context) {
        self.end_session();
    }
}

impl NotifyGateActor {
    /// Connects as soon as it is started, unless the instance has left or was evicted.
    pub fn new(parts: NotifyGateParts) -> Self {
        let over = parts.standing.is_evicted() || parts.standing.is_deregistered();
        let keeper = parts.standing.keep_gate();
        Self {
            rng: SmallRng::seed_from_u64(parts.seed),
            parts,
            health: Health::default(),
            channel_health: Health::default(),
            counters: Counters::default(),
            open: None,
            number: 0,
            connecting: false,
            reconnect: Alarm::default(),
            failures: 0,
            pooler: false,
            over,
            lock: LockClaim::default(),
            listen_retry: Alarm::default(),
            resting: Alarm::default(),
            behind: Alarm::default(),
            pings: Pings::default(),
            keeper,
            proofs: Proofs::default(),
            gate_behind: Alarm::default(),
        }
    }

    /// Whether the lock is wanted at all.
    fn wants_lock(&self) -> bool {
        let beat = &self.parts.heartbeat;
        beat.enabled && beat.liveness_source_mode == LivenessSourceMode::AdvisoryLockWhenAvailable
    }

    fn connect(&mut self, ctx: &mut Context<Self>) {
        let Some(connector) = self.parts.connector.clone() else { return };
        if self.over || self.connecting || self.open.is_some() {
            return;
        }
        self.reconnect.clear(ctx);
        self.connecting = true;
        let connected = async move { tokio::time::timeout(CONNECT_DEADLINE, connector.connect()).await.ok() };
        ctx.spawn(connected.into_actor(self).map(|connected, act, ctx| {
            act.connecting = false;
            match connected {
                // Whatever came meanwhile: a session that is not wanted any more ends here.
                Some(Ok(_)) if act.over => {}
                Some(Ok((session, stream))) => act.opened(session, stream, ctx),
                Some(Err(error)) => act.not_connected(&error, ctx),
                None => act.not_connected(&no_answer(CONNECT_DEADLINE), ctx),
            }
        }));
    }

    fn not_connected(&mut self, error: &StoreError, ctx: &mut Context<Self>) {
        let pooler = matches!(error, StoreError::NotDirect(_));
        let say = self.health.wrong(error);
        if pooler && !std::mem::replace(&mut self.pooler, true) {
            tracing::warn!(%error, "there is no direct connection: this instance is known alive by its heartbeats alone");
        } else if say && !pooler {
            tracing::warn!(%error, in_a_row = self.health.in_a_row(), "the direct connection cannot be opened");
        }
        if self.wants_lock() {
            self.tell_lock(if pooler { AliveLock::NoSource } else { AliveLock::NotHeld });
        }
        self.set_gate(Gate::Unavailable, Some(&error.to_string()), ctx);
        self.lock_known();
        let pause = if pooler { POOLER_PAUSE } else { self.pause() };
        self.reconnect_in(pause, ctx);
    }

    /// The pause before the next connect.
    fn pause(&mut self) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let grace = self.parts.standing.trust_rule().grace();
        let longest = self.parts.gate.reconnect_max().min(grace.mul_f64(PART_OF_GRACE));
        backoff(self.failures, FIRST_PAUSE.min(longest), longest)
    }

    /// The same pause, spread by 20 % either way.
    fn spread(&mut self, pause: Duration) -> Duration {
        pause.mul_f64(0.8 + 0.4 * self.rng.random::<f64>())
    }

    fn reconnect_in(&mut self, pause: Duration, ctx: &mut Context<Self>) {
        if self.over {
            return;
        }
        let pause = self.spread(pause);
        self.reconnect.set(ctx, pause, |act, ctx| {
            act.reconnect.rang();
            act.connect(ctx);
        });
    }

    /// Tells of the lock, once for each change.
    fn tell_lock(&mut self, lock: AliveLock) {
        for recipient in &self.parts.alive_lock {
            recipient.do_send(AliveLockChanged(lock));
        }
    }

    /// Lets go of the session. Its lock is free when the server notices.
    fn end_session(&mut self) {
        if let Some(open) = self.open.take()
            && open.lock.is_some()
        {
            self.tell_lock(AliveLock::NotHeld);
        }
    }

    fn state(&self) -> &'static str {
        match &self.open {
            _ if self.over => "stopped",
            None if self.parts.connector.is_none() => "no direct connection",
            None if self.pooler => "no direct connection: a pooler answers",
            None => "connecting",
            Some(open) if open.lock.is_some() => "connected, alive-lock held",
            Some(_) if self.wants_lock() => "connected, alive-lock not held",
            Some(_) => "connected",
        }
    }
}

fn no_answer(limit: Duration) -> StoreError {
    StoreError::Unavailable(format!("no answer within {} s", limit.as_secs()))
}

/// The answer of a call, or an error when it takes too long.
async fn within_limit<T>(call: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    tokio::time::timeout(CALL_DEADLINE, call).await.unwrap_or_else(|_| Err(no_answer(CALL_DEADLINE)))
}
