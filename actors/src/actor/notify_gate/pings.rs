//! Pings of the session that holds the alive-lock: they prove that this instance may believe in its leases.
//!
//! The rule: trust counts from when a ping was sent, and only while the lock is held in the session that answered it. The failure this
//! prevents: an answer that took five seconds, taken for a proof of this moment.

use std::time::Instant;

use actix::prelude::*;

use super::NotifyGateActor;
use crate::actor::{Alarm, now};
use crate::message::TrustProven;
use crate::port::StoreError;

/// Where the pings stand.
#[derive(Debug, Default)]
pub(super) struct Pings {
    pub(super) next: Alarm,
    /// When the last one was sent.
    pub(super) last: Option<Instant>,
    under_way: bool,
    again: bool,
}

impl NotifyGateActor {
    /// Sends one ping, unless one is under way, and the next after a pause while there is work in hand.
    pub(super) fn ping(&mut self, ctx: &mut Context<Self>) {
        let Some(lock) = self.open.as_ref().and_then(|open| open.lock) else { return };
        if std::mem::replace(&mut self.pings.under_way, true) {
            self.pings.again = true;
            return;
        }
        self.pings.again = false;
        self.counters.pings += 1;
        let sent_at = now();
        self.pings.last = Some(sent_at);
        self.pings.next.set(ctx, self.parts.standing.trust_rule().ping_pause(), |act, ctx| {
            act.pings.next.rang();
            if !act.parts.in_flight.is_empty() || act.parts.standing.is_doubted() {
                act.ping(ctx);
            }
        });
        self.ask(
            async |session| session.ping().await,
            ctx,
            move |act, answer, ctx| {
                act.pings.under_way = false;
                act.ping_answered(answer, lock, sent_at);
                if act.pings.again {
                    act.ping(ctx);
                }
            },
        );
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

    /// The session has ended, and with it whatever was under way in it.
    pub(super) fn forget_pings(&mut self, ctx: &mut Context<Self>) {
        self.pings.next.clear(ctx);
        self.pings.under_way = false;
    }
}
