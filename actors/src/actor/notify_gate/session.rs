//! What is done on an open session: listen, take the lock, ping, and notice its end.
//!
//! The rule: every answer is matched with the session it belongs to. The failure this prevents: the late answer of a session that has
//! ended, taken for a proof that the next one holds the lock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::prelude::*;
use futures_util::StreamExt;

use crate::actor::{Alarm, backoff, now};
use crate::instance::AliveLock;
use crate::message::{RequestImmediatePoll, TrustProven};
use crate::port::{DirectSession, NotificationStream, StoreError};

use super::{GOOD_LIFE, LOCK_PAUSE, NotifyGateActor, within_limit};

/// Notifications taken together: a flood of them is one wake.
const TOGETHER: usize = 1_000;

/// The session that is open.
pub(super) struct Open {
    pub(super) number: u64,
    pub(super) session: Arc<dyn DirectSession>,
    opened_at: Instant,
    /// The number of the lock, while it is held.
    pub(super) lock: Option<u64>,
}

/// Where the pings stand.
#[derive(Debug, Default)]
pub(super) struct Pings {
    pub(super) next: Alarm,
    /// When the last one was sent.
    pub(super) last: Option<Instant>,
    pub(super) under_way: bool,
    again: bool,
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
        let session: Arc<dyn DirectSession> = session.into();
        self.open = Some(Open { number, session: Arc::clone(&session), opened_at: now(), lock: None });
        self.lock_refusals = 0;
        let heard = stream.ready_chunks(TOGETHER).into_actor(self);
        let heard = heard.map(|rings, act, _| act.heard(rings.len()));
        ctx.spawn(heard.finish().map(move |(), act, ctx| act.ended(number, ctx)));
        self.listen(session, number, ctx);
    }

    fn is_open(&self, number: u64) -> bool {
        self.open.as_ref().is_some_and(|open| open.number == number)
    }

    /// Listens to the own channel, and then goes for the lock.
    fn listen(&mut self, session: Arc<dyn DirectSession>, number: u64, ctx: &mut Context<Self>) {
        let instance = self.parts.instance;
        let listening = async move {
            within_limit(async {
                let channel = session.work_channel(instance).await?;
                session.listen(vec![channel]).await
            })
            .await
        };
        ctx.spawn(listening.into_actor(self).map(move |listening, act, ctx| {
            if !act.is_open(number) {
                return;
            }
            match listening {
                // Whatever was rung for while nobody listened is found by a look.
                Ok(()) if number > 1 => act.wake(),
                Ok(()) => {}
                // An older schema has no such channel; the lock is worth the session.
                Err(error) => act.listen_again(&error, number, ctx),
            }
            act.claim_lock(ctx);
        }));
    }

    fn listen_again(&mut self, error: &StoreError, number: u64, ctx: &mut Context<Self>) {
        if self.health.wrong(error) {
            tracing::warn!(%error, "this instance cannot listen to its channel; it is tried again");
        }
        ctx.run_later(LOCK_PAUSE.1, move |act, ctx| {
            if let Some(open) = act.open.as_ref().filter(|open| open.number == number) {
                let session = Arc::clone(&open.session);
                act.listen(session, number, ctx);
            }
        });
    }

    fn heard(&mut self, rings: usize) {
        self.counters.rings += rings as u64;
        self.wake();
    }

    fn wake(&self) {
        if let Some(wake) = &self.parts.wake {
            wake.do_send(RequestImmediatePoll);
        }
    }

    /// Asks for the lock until it is held, for as long as the session lives.
    fn claim_lock(&mut self, ctx: &mut Context<Self>) {
        let Some(open) = self.open.as_ref().filter(|open| open.lock.is_none()) else { return };
        if !self.wants_lock() {
            return (self.parts.ready)();
        }
        self.lock_retry.clear(ctx);
        let (number, session, instance) = (open.number, Arc::clone(&open.session), self.parts.instance);
        let claimed = async move { within_limit(session.claim_alive_lock(instance)).await };
        ctx.spawn(claimed.into_actor(self).map(move |claimed, act, ctx| {
            if act.is_open(number) {
                act.lock_answered(claimed, ctx);
                (act.parts.ready)();
            }
        }));
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
        self.lock_refusals = self.lock_refusals.saturating_add(1);
        if self.lock_refusals == 1 {
            self.tell_lock(AliveLock::NotHeld);
        }
        let (first, longest) = LOCK_PAUSE;
        self.lock_retry.set(ctx, backoff(self.lock_refusals, first, longest), |act, ctx| {
            act.lock_retry.rang();
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

    /// The session has ended by itself.
    fn ended(&mut self, number: u64, ctx: &mut Context<Self>) {
        let Some(open) = self.open.as_ref().filter(|open| open.number == number) else { return };
        let good = now().saturating_duration_since(open.opened_at) >= GOOD_LIFE;
        self.counters.losses += 1;
        self.end_session();
        self.lock_retry.clear(ctx);
        self.pings.next.clear(ctx);
        self.pings.under_way = false;
        if self.health.wrong(&"the direct session has ended") {
            tracing::warn!("the direct session has ended; it is opened again");
        }
        if good {
            self.failures = 0;
        }
        let pause = if self.failures == 0 { Duration::ZERO } else { self.pause() };
        self.failures = self.failures.max(1);
        self.reconnect_in(pause, ctx);
    }

    /// Sends one ping, unless one is under way, and the next after a pause while there is work in hand.
    pub(super) fn ping(&mut self, ctx: &mut Context<Self>) {
        let Some(open) = self.open.as_ref() else { return };
        let Some(lock) = open.lock else { return };
        if std::mem::replace(&mut self.pings.under_way, true) {
            self.pings.again = true;
            return;
        }
        self.pings.again = false;
        self.counters.pings += 1;
        let (number, session, sent_at) = (open.number, Arc::clone(&open.session), now());
        self.pings.last = Some(sent_at);
        self.pings.next.set(ctx, self.parts.standing.trust_rule().ping_pause(), |act, ctx| {
            act.pings.next.rang();
            if !act.parts.in_flight.is_empty() || act.parts.standing.is_doubted() {
                act.ping(ctx);
            }
        });
        let pinged = async move { within_limit(session.ping()).await };
        ctx.spawn(pinged.into_actor(self).map(move |answer, act, ctx| {
            if act.is_open(number) {
                act.pings.under_way = false;
                act.ping_answered(answer, lock, sent_at);
                if act.pings.again {
                    act.ping(ctx);
                }
            }
        }));
    }

    fn ping_answered(&mut self, answer: Result<(), StoreError>, lock: u64, sent_at: Instant) {
        match answer {
            Ok(()) => {
                self.counters.answered += 1;
                self.health.well();
                self.parts.standing.pinged(lock, sent_at);
                for recipient in &self.parts.trust {
                    recipient.do_send(TrustProven { sent_at });
                }
            }
            // The end of the session, if it is one, is told by its stream.
            Err(error) => {
                if self.health.wrong(&error) {
                    tracing::warn!(%error, "a ping of the direct session was not answered");
                }
            }
        }
    }
}
