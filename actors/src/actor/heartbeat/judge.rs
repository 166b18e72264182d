//! Self-fencing: judges whether this instance may still believe in its leases.
//!
//! The rule: with work in hand and trust over, the instance is fenced; with the next proof it goes on. With nothing in hand nothing has
//! to be believed, so an idle instance neither pings nor fences. The failure this prevents: an instance that is cut off from the database
//! and works on beside whoever took over, and one that is never ready because it had nothing to do.

use std::time::Instant;

use actix::prelude::*;

use crate::actor::{Alarm, now};
use crate::message::{Fence, PingNow, TrustProven, Unfence};

use super::{HeartbeatActor, Phase};

/// What is judged by.
#[derive(Debug, Default)]
pub(super) struct Judge {
    alarm: Alarm,
    /// When a proof was first asked for since the last one.
    asked_at: Option<Instant>,
    /// It has fenced the instance.
    pub(super) fenced: bool,
    pub(super) fences: u64,
}

impl HeartbeatActor {
    pub(super) fn unfence(&mut self) {
        self.judge.fenced = false;
        // Whoever was held back hears this as well.
        self.parts.standing.take_doubt();
        for unfence in &self.parts.unfence {
            unfence.do_send(Unfence);
        }
    }

    /// There is a new proof.
    pub(super) fn proven(&mut self, ctx: &mut Context<Self>) {
        let standing = &self.parts.standing;
        if self.member && standing.is_trusted(now()) {
            self.judge.asked_at = None;
            if self.judge.fenced || standing.is_doubted() {
                if self.judge.fenced {
                    tracing::info!("this instance has proven itself alive and goes on");
                }
                self.unfence();
            }
        }
        self.watch_trust(ctx);
    }

    /// Looks again when trust ends, as long as there is something to lose by it.
    pub(super) fn watch_trust(&mut self, ctx: &mut Context<Self>) {
        self.judge.alarm.clear(ctx);
        let Some(end) = self.end_of_trust() else { return };
        self.judge.alarm.set(ctx, end.saturating_duration_since(now()), |act, ctx| {
            act.judge.alarm.rang();
            act.judge_trust(ctx);
        });
    }

    /// When the instance has to be fenced, as things stand. An idle one that was just given work gets as long as a proof is good for.
    fn end_of_trust(&self) -> Option<Instant> {
        let standing = &self.parts.standing;
        let judges = matches!(self.phase, Phase::Beating | Phase::Disabled);
        if !judges || self.judge.fenced || self.parts.in_flight.is_empty() {
            return None;
        }
        let until = standing.trust_until()?;
        let asked = self.judge.asked_at.map(|at| at + standing.trust_rule().span());
        Some(asked.map_or(until, |asked| asked.max(until)))
    }

    fn judge_trust(&mut self, ctx: &mut Context<Self>) {
        let Some(end) = self.end_of_trust() else { return };
        if now() < end {
            return self.watch_trust(ctx);
        }
        self.judge.fenced = true;
        self.judge.fences += 1;
        self.parts.standing.doubt();
        self.parts.fence.do_send(Fence);
        tracing::warn!(
            in_flight = self.parts.in_flight.len(),
            "this instance cannot prove that it is alive: it is fenced until it can"
        );
        self.beat_soon(ctx);
    }
}

impl Handler<TrustProven> for HeartbeatActor {
    type Result = ();

    fn handle(&mut self, _: TrustProven, ctx: &mut Self::Context) {
        self.proven(ctx);
    }
}

impl Handler<PingNow> for HeartbeatActor {
    type Result = ();

    /// Where no ping can prove anything, a beat has to.
    fn handle(&mut self, _: PingNow, ctx: &mut Self::Context) {
        let standing = &self.parts.standing;
        if !standing.is_trusted(now()) {
            let by_ping = self.cadence.declares_lock(standing.alive_lock());
            self.judge.asked_at.get_or_insert_with(now);
            if !by_ping && !self.busy {
                self.beat_soon(ctx);
            }
        }
        self.watch_trust(ctx);
    }
}
