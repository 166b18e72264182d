//! What the keeper of the direct session hears.
//!
//! The rule: an instance that leaves keeps its lock until everything else is done. The failure this prevents: peers that take an instance
//! for dead while its last results are being written.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;

use crate::actor::now;
use crate::instance::{AliveLock, Gate};
use crate::message::{Account, Drain, Drained, Evicted, Observe, PingNow};

use super::NotifyGateActor;

/// How long giving the lock back may take; the end of the session frees it as well.
const RELEASE_PATIENCE: Duration = Duration::from_secs(2);

impl Handler<PingNow> for NotifyGateActor {
    type Result = ();

    /// One ping serves everybody who asks within a pause, as long as trust stands.
    fn handle(&mut self, _: PingNow, ctx: &mut Self::Context) {
        let standing = &self.parts.standing;
        let pause = standing.trust_rule().ping_pause();
        let fresh = self.pings.last.is_some_and(|at| now().saturating_duration_since(at) < pause);
        if !(fresh && self.pings.next.is_set() && standing.is_trusted(now())) {
            self.ping(ctx);
        }
    }
}

impl Handler<Evicted> for NotifyGateActor {
    type Result = ();

    fn handle(&mut self, Evicted(instance): Evicted, ctx: &mut Self::Context) {
        if instance == self.parts.instance {
            self.over = true;
            self.quiet(ctx);
            self.end_session();
            self.set_gate(Gate::Unavailable, Some("this instance was evicted"), ctx);
        }
    }
}

impl Handler<Drain> for NotifyGateActor {
    type Result = ResponseActFuture<Self, Drained>;

    /// The last one to be asked: the instance has left the membership, and the lock may go.
    fn handle(&mut self, _: Drain, ctx: &mut Self::Context) -> Self::Result {
        self.over = true;
        self.quiet(ctx);
        self.set_gate(Gate::Unavailable, Some("this instance is leaving"), ctx);
        let held = self.open.as_ref().filter(|open| open.lock.is_some());
        let session = held.map(|open| Arc::clone(&open.session));
        let instance = self.parts.instance;
        let released = async move {
            if let Some(session) = session {
                // Should it fail, the end of the session frees it.
                let _ = tokio::time::timeout(RELEASE_PATIENCE, session.release_alive_lock(instance)).await;
            }
        };
        Box::pin(released.into_actor(self).map(|(), act, _| {
            act.end_session();
            Drained::default()
        }))
    }
}

impl NotifyGateActor {
    fn quiet(&mut self, ctx: &mut Context<Self>) {
        self.reconnect.clear(ctx);
        self.quiet_session(ctx);
        (self.parts.progress)(Ok(()));
    }
}

impl Handler<Observe> for NotifyGateActor {
    type Result = MessageResult<Observe>;

    fn handle(&mut self, _: Observe, _: &mut Self::Context) -> Self::Result {
        let counters = &self.counters;
        let held = self.parts.standing.alive_lock() == AliveLock::Held;
        let mut account: Account = self.health.account(
            "notify_gate",
            self.state(),
            [
                ("connects", counters.connects),
                ("losses", counters.losses),
                ("rings", counters.rings),
                ("pings", counters.pings),
                ("pings_answered", counters.answered),
                ("lock_held", u64::from(held)),
                ("subscriptions", self.parts.channels.subscriptions()),
                ("probes", counters.probes),
                ("proofs", counters.proofs),
                ("probes_not_sent", counters.not_sent),
                ("probes_not_heard", counters.deaf),
                ("gate_changes", counters.gate_changes),
                ("listens", counters.listens),
                ("unlistens", counters.unlistens),
                ("heard", counters.heard),
                ("told", counters.told),
                ("refused_full_mailbox", counters.refused),
            ],
        );
        let report = self.parts.standing.gate_report();
        account.notes.insert("gate", report.gate.to_string());
        account.notes.extend(report.reason.map(|reason| ("gate_reason", reason)));
        MessageResult(account)
    }
}
