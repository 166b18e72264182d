//! The direct session: holds the alive-lock, hears the instance's own channel, and proves by pings that both are still there.
//!
//! The rule: one session at a time, and its end is the end of its notification stream; whatever it held or heard is set up again on the
//! next one, once. A lock is told of only while it is held in a session that lives. The failures this prevents: an instance that believes
//! in the lock of a session that is gone, and one that hears nothing any more and does not know.
//!
//! An idle instance pings nobody. With work in hand it pings five times in a grace, at least once a second.

mod channels;
mod hears;
mod listening;
mod pings;
mod session;

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::delivery::InFlight;
use crate::instance::{AliveLock, InstanceId};
use crate::message::{AliveLockChanged, RequestImmediatePoll, TrustProven};
use crate::options::{HeartbeatOptions, LivenessSourceMode};
use crate::port::{DirectConnector, StoreError};
use crate::standing::Standing;

use super::{Alarm, Health, backoff};
pub use channels::Channels;
use pings::Pings;
use session::Open;

/// First pause before another connect; the very first try after the loss of a session comes at once.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// Longest pause between two connects.
const MAX_PAUSE: Duration = Duration::from_secs(5);

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

/// A session that has lived for so long was a good one, and no part of a hot loop: the pauses begin anew.
const GOOD_LIFE: Duration = Duration::from_secs(1);

/// What the actor is made of.
pub struct NotifyGateParts {
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
    /// Learn of the alive-lock.
    pub alive_lock: Vec<Recipient<AliveLockChanged>>,
    /// Learn of answered pings.
    pub trust: Vec<Recipient<TrustProven>>,
    /// Who hears which channel: the same for every incarnation.
    pub channels: Arc<Channels>,
    /// Learns that something was rung for.
    pub wake: Option<Recipient<RequestImmediatePoll>>,
    /// Called once it is connected and has asked for its lock, or knows that it is not to be had for now.
    pub ready: Box<dyn Fn() + Send>,
    /// Seed of the jitter.
    pub seed: u64,
}

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
    lock_retry: Alarm,
    lock_refusals: u32,
    listen_retry: Alarm,
    /// Ends the rest of channels that were refused.
    resting: Alarm,
    /// Looks for subscribers whose mailbox was full.
    behind: Alarm,
    pings: Pings,
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
        if self.over || self.parts.connector.is_none() {
            return (self.parts.ready)();
        }
        ctx.run_later(START_PATIENCE, |act, _| (act.parts.ready)());
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
            lock_retry: Alarm::default(),
            lock_refusals: 0,
            listen_retry: Alarm::default(),
            resting: Alarm::default(),
            behind: Alarm::default(),
            pings: Pings::default(),
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
        (self.parts.ready)();
        let pause = if pooler { POOLER_PAUSE } else { self.pause() };
        self.reconnect_in(pause, ctx);
    }

    /// The pause before the next connect.
    fn pause(&mut self) -> Duration {
        self.failures = self.failures.saturating_add(1);
        backoff(self.failures, FIRST_PAUSE, MAX_PAUSE)
    }

    fn reconnect_in(&mut self, pause: Duration, ctx: &mut Context<Self>) {
        if self.over {
            return;
        }
        let pause = pause.mul_f64(0.8 + 0.4 * self.rng.random::<f64>());
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
