//! What is done on an open session: listen, take the lock, hear, and notice its end.
//!
//! The rule: every answer is matched with the session it belongs to, and whatever is under way in a session ends with it. The failures
//! this prevents: the late answer of a session that has ended, taken for a proof that the next one holds the lock, and a call without an
//! answer that keeps a dead session open, with the lock in it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::prelude::*;
use futures_util::StreamExt;
use tokio_util::sync::CancellationToken;

use super::listening::Listening;
use super::proof::is_probe;
use super::{GOOD_LIFE, LOCK_PAUSE, NotifyGateActor, within_limit};
use crate::actor::{Alarm, backoff, now};
use crate::instance::{AliveLock, Gate};
use crate::message::RequestImmediatePoll;
use crate::port::{DirectSession, Notification, NotificationStream, StoreError};

/// Notifications taken together: a flood of them is one wake.
const TOGETHER: usize = 1_000;

/// Where the claim of the alive-lock stands.
#[derive(Debug, Default)]
pub(super) struct LockClaim {
    pub(super) retry: Alarm,
    refusals: u32,
    /// It was asked for once, or is not to be had for now.
    pub(super) asked: bool,
}

/// The session that is open.
pub(super) struct Open {
    pub(super) number: u64,
    pub(super) session: Arc<dyn DirectSession>,
    opened_at: Instant,
    /// The number of the lock, while it is held.
    pub(super) lock: Option<u64>,
    /// A ring by the producers' route came back on it.
    pub(super) proven: bool,
    pub(super) listening: Listening,
    /// Ends what is under way in it.
    over: CancellationToken,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.over.cancel();
    }
}

impl NotifyGateActor {
    pub(super) fn opened(
        &mut self,
        session: Box<dyn DirectSession>,
        stream: NotificationStream,
        ctx: &mut Context<Self>,
    ) {
        self.number += 1;
        self.counters.connects += 1;
        self.health.well();
        self.pooler = false;
        let number = self.number;
        self.open = Some(Open {
            number,
            session: session.into(),
            opened_at: now(),
            lock: None,
            proven: false,
            listening: Listening::default(),
            over: CancellationToken::new(),
        });
        self.parts.channels.begin_anew();
        self.lock.refusals = 0;
        let heard = stream.ready_chunks(TOGETHER).into_actor(self);
        let heard = heard.map(move |rings, act, ctx| {
            if act.is_open(number) {
                act.heard(&rings, ctx);
            }
        });
        ctx.spawn(heard.finish().map(move |(), act, ctx| {
            if act.is_open(number) {
                act.lost("the direct session has ended", ctx);
            }
        }));
        if self.uses_notify() { self.listen(ctx) } else { self.claim_lock(ctx) }
    }

    fn is_open(&self, number: u64) -> bool {
        self.open.as_ref().is_some_and(|open| open.number == number)
    }

    /// One call on the open session. `then` is not called when the session ends before the answer.
    pub(super) fn ask<T: 'static>(
        &self,
        call: impl AsyncFnOnce(&dyn DirectSession) -> Result<T, StoreError> + 'static,
        ctx: &mut Context<Self>,
        then: impl FnOnce(&mut Self, Result<T, StoreError>, &mut Context<Self>) + 'static,
    ) {
        let Some(open) = &self.open else { return };
        let (number, session, over) = (open.number, Arc::clone(&open.session), open.over.clone());
        let answered = async move { over.run_until_cancelled(within_limit(call(&*session))).await };
        ctx.spawn(answered.into_actor(self).map(move |answer, act, ctx| {
            if let Some(answer) = answer.filter(|_| act.is_open(number)) {
                then(act, answer, ctx);
            }
        }));
    }

    /// Listens to the own channel, and then goes for the lock.
    pub(super) fn listen(&mut self, ctx: &mut Context<Self>) {
        let instance = self.parts.instance;
        let listening = async move |session: &dyn DirectSession| {
            let channel = session.work_channel(instance).await?;
            session.listen(vec![channel.clone()]).await.map(|()| channel)
        };
        self.ask(listening, ctx, |act, listening, ctx| {
            match listening {
                Ok(channel) => act.listening_to_work(&channel, ctx),
                // An older schema has no such channel; the lock is worth the session.
                Err(error) => act.listen_again(&error, ctx),
            }
            act.claim_lock(ctx);
        });
    }

    fn listen_again(&mut self, error: &StoreError, ctx: &mut Context<Self>) {
        self.health.wrong(error);
        let why = format!("the work channel cannot be listened to: {error}");
        self.set_gate(Gate::Unavailable, Some(&why), ctx);
        self.listen_retry.set(ctx, LOCK_PAUSE.1, |act, ctx| {
            act.listen_retry.rang();
            act.listen(ctx);
        });
    }

    /// The doorbells first: nothing that subscribers hear may keep a row waiting.
    fn heard(&mut self, rings: &[Notification], ctx: &mut Context<Self>) {
        let Some(open) = &self.open else { return };
        let work = open.listening.work.clone();
        let is_work = |ring: &Notification| work.as_deref() == Some(ring.channel.as_str());
        let mut doorbells = 0;
        for ring in rings.iter().filter(|ring| is_work(ring)) {
            doorbells += u64::from(!self.heard_probe(&ring.payload, ctx));
        }
        if doorbells > 0 {
            self.counters.rings += doorbells;
            self.wake();
        }
        for ring in rings.iter().filter(|ring| !(is_work(ring) && is_probe(&ring.payload))) {
            let told = self.parts.channels.ring(&ring.channel, &ring.payload);
            self.counters.heard += u64::from(told.sent + told.refused > 0);
            self.told(told, ctx);
        }
    }

    pub(super) fn wake(&self) {
        if let Some(wake) = &self.parts.wake {
            wake.do_send(RequestImmediatePoll);
        }
    }

    /// Asks for the lock until it is held, for as long as the session lives.
    fn claim_lock(&mut self, ctx: &mut Context<Self>) {
        if self.open.as_ref().is_none_or(|open| open.lock.is_some()) {
            return;
        }
        if !self.wants_lock() {
            return self.lock_known();
        }
        self.lock.retry.clear(ctx);
        let instance = self.parts.instance;
        let claim = async move |session: &dyn DirectSession| session.claim_alive_lock(instance).await;
        self.ask(claim, ctx, |act, claimed, ctx| {
            act.lock_answered(claimed, ctx);
            act.lock_known();
        });
    }

    /// The lock was asked for, or is not to be had for now.
    pub(super) fn lock_known(&mut self) {
        self.lock.asked = true;
        self.tell_progress();
    }

    fn lock_answered(&mut self, claimed: Result<bool, StoreError>, ctx: &mut Context<Self>) {
        match claimed {
            Ok(true) => return self.hold_lock(ctx),
            Ok(false) => {}
            Err(error) => {
                if self.health.wrong(&error) {
                    tracing::warn!(%error, in_a_row = self.health.in_a_row(), "the alive-lock cannot be claimed; it is tried again");
                }
            }
        }
        self.lock.refusals = self.lock.refusals.saturating_add(1);
        if self.lock.refusals == 1 {
            self.tell_lock(AliveLock::NotHeld);
        }
        let (first, longest) = LOCK_PAUSE;
        self.lock.retry.set(ctx, backoff(self.lock.refusals, first, longest), |act, ctx| {
            act.lock.retry.rang();
            act.claim_lock(ctx);
        });
    }

    fn hold_lock(&mut self, ctx: &mut Context<Self>) {
        self.health.well();
        let lock = self.parts.standing.new_lock_session();
        if let Some(open) = &mut self.open {
            open.lock = Some(lock);
        }
        self.tell_lock(AliveLock::Held);
        if !self.parts.in_flight.is_empty() || self.parts.standing.is_doubted() {
            self.ping(ctx);
        }
    }

    /// The session has ended, or is given up: the next one is opened.
    pub(super) fn lost(&mut self, why: &str, ctx: &mut Context<Self>) {
        let Some(open) = &self.open else { return };
        let good = now().saturating_duration_since(open.opened_at) >= GOOD_LIFE;
        self.counters.losses += 1;
        self.end_session();
        self.quiet_session(ctx);
        // Where the gate was available its end is told below, with the reason: one loss is one line.
        let told_below = self.parts.standing.gate() == Gate::Available;
        if self.health.wrong(&why) && !told_below {
            tracing::warn!(why, "the direct session is opened again");
        }
        self.set_gate(Gate::Unavailable, Some(why), ctx);
        if good {
            self.failures = 0;
        }
        let pause = if self.failures == 0 { Duration::ZERO } else { self.pause() };
        self.failures = self.failures.max(1);
        self.reconnect_in(pause, ctx);
    }

    /// Forgets every alarm that belongs to a session.
    pub(super) fn quiet_session(&mut self, ctx: &mut Context<Self>) {
        for alarm in [&mut self.lock.retry, &mut self.listen_retry, &mut self.resting, &mut self.behind] {
            alarm.clear(ctx);
        }
        self.forget_pings(ctx);
        self.forget_proof(ctx);
    }
}
