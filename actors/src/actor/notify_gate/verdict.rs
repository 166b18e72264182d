//! What is told of the gate, and to whom.
//!
//! The rule: it stands in the instance's standing first, and then everybody is told, once for each change; this actor is the only one that
//! writes it. The failures this prevents: two actors that believe different things of one gate, and a claimer that is woken twice, or
//! not at all, after a reconnect.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use actix::dev::SendError;
use actix::prelude::*;

use super::NotifyGateActor;
use crate::instance::Gate;
use crate::lock;
use crate::message::{GateChanged, GateReport, ProbeNow, SubscribeToGate};
use crate::options::GateMode;

/// How long a subscriber is left alone whose mailbox was full.
const FULL: Duration = Duration::from_millis(100);

/// Whoever wants to know of the gate, and what each was told last. The list belongs to the pump, not to a life of the actor.
#[derive(Debug, Default)]
pub struct GateSubscribers(Mutex<Vec<(Recipient<GateChanged>, Option<Gate>)>>);

impl GateSubscribers {
    /// Adds somebody, once. What was told is told again: it may be another life.
    fn add(&self, who: Recipient<GateChanged>) {
        let mut all = lock(&self.0);
        all.retain(|(one, _)| *one != who);
        all.push((who, None));
    }

    /// Tells everybody who does not know. Returns whether somebody had no room for it.
    pub(super) fn tell(&self, gate: Gate) -> bool {
        let mut full = false;
        lock(&self.0).retain_mut(|(who, told)| {
            if *told == Some(gate) {
                return who.connected();
            }
            match who.try_send(GateChanged(gate)) {
                Ok(()) => *told = Some(gate),
                Err(SendError::Full(_)) => full = true,
                Err(SendError::Closed(_)) => return false,
            }
            true
        });
        full
    }
}

impl NotifyGateActor {
    /// Notes what is known of the gate now, and tells it if it is news.
    pub(super) fn set_gate(&mut self, gate: Gate, reason: Option<&str>, ctx: &mut Context<Self>) {
        if self.note_gate(gate, reason) {
            self.tell_subscribers(ctx);
        }
        self.answer_askers();
        self.tell_progress();
    }

    /// Why NOTIFY is not used at all.
    fn unused(&self) -> Option<&'static str> {
        match &self.parts.connector {
            None => Some("there is no direct connection"),
            Some(_) if self.parts.gate.mode == GateMode::Polling => Some("`gate.mode` is Polling"),
            Some(_) => None,
        }
    }

    /// Whether NOTIFY is to be used.
    pub(super) fn uses_notify(&self) -> bool {
        self.unused().is_none()
    }

    /// The part of it that needs no context. Returns whether it was news.
    pub(super) fn note_gate(&mut self, gate: Gate, reason: Option<&str>) -> bool {
        let unused = self.unused();
        let (gate, reason) = unused.map_or((gate, reason), |why| (Gate::Unconfigured, Some(why)));
        let changed = self.parts.standing.set_gate(self.keeper, gate, reason);
        if changed {
            self.counters.gate_changes += 1;
            match gate {
                Gate::Available => tracing::info!("NOTIFY reaches this instance"),
                Gate::Unavailable => tracing::warn!(reason, "NOTIFY does not reach this instance: it polls"),
                Gate::Unconfigured => {}
            }
            for recipient in &self.parts.gate_news {
                recipient.do_send(GateChanged(gate));
            }
        }
        changed
    }

    fn tell_subscribers(&mut self, ctx: &mut Context<Self>) {
        if self.parts.gate_subscribers.tell(self.parts.standing.gate()) {
            self.gate_behind.set(ctx, FULL, |act, ctx| {
                act.gate_behind.rang();
                act.tell_subscribers(ctx);
            });
        }
    }

    /// Ready: the lock was asked for, and of the gate something is known; where it has to be proven for the start, that it is.
    pub(super) fn tell_progress(&self) {
        let report = self.parts.standing.gate_report();
        let known = if self.parts.must_be_proven {
            report.gate == Gate::Available
        } else {
            report.gate != Gate::Unconfigured || !self.uses_notify()
        };
        if known && self.lock.asked {
            (self.parts.progress)(Ok(()));
        } else if let Some(reason) = report.reason {
            (self.parts.progress)(Err(reason));
        }
    }
}

impl Handler<SubscribeToGate> for NotifyGateActor {
    type Result = ();

    fn handle(&mut self, SubscribeToGate(who): SubscribeToGate, ctx: &mut Self::Context) {
        self.parts.gate_subscribers.add(who);
        self.tell_subscribers(ctx);
    }
}

impl Handler<ProbeNow> for NotifyGateActor {
    type Result = ResponseActFuture<Self, GateReport>;

    fn handle(&mut self, _: ProbeNow, ctx: &mut Self::Context) -> Self::Result {
        let asked = (!self.over && self.uses_notify()).then(|| self.ask_for_proof(ctx));
        let standing = Arc::clone(&self.parts.standing);
        let answered = async move {
            if let Some(asked) = asked
                && let Ok(report) = asked.await
            {
                return report;
            }
            standing.gate_report()
        };
        Box::pin(answered.into_actor(self))
    }
}
