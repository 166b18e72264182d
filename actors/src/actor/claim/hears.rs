//! What the claiming actor hears.
//!
//! The rule: a message only notes what it says, in a flag or in the instance's standing, and lets the cycle decide. The failures this
//! prevents: a hundred wakes that become a hundred claims, and news that is lost with the actor that heard them.

use std::time::Duration;

use actix::prelude::*;

use super::{ClaimActor, News, Phase};
use crate::instance::Gate;
use crate::message::{
    Account, Drain, Drained, Evicted, Fence, GateChanged, HeartbeatSwitched, Observe, Pause,
    RequestImmediatePoll, Resume, Unfence, WorkFreed,
};

/// How long a drain waits for a claim under way at most.
const CLAIM_PATIENCE: Duration = Duration::from_secs(10);

impl Handler<RequestImmediatePoll> for ClaimActor {
    type Result = ();

    fn handle(&mut self, _: RequestImmediatePoll, ctx: &mut Self::Context) {
        self.bell.note_ring();
        self.wake(ctx);
    }
}

impl Handler<WorkFreed> for ClaimActor {
    type Result = ();

    fn handle(&mut self, _: WorkFreed, ctx: &mut Self::Context) {
        self.news = self.news.max(News::Freed);
        self.look(ctx);
        self.ring_on(ctx);
    }
}

impl Handler<GateChanged> for ClaimActor {
    type Result = ();

    /// How it stands is read from the standing; this counts the outages, and looks once after each change.
    fn handle(&mut self, GateChanged(gate): GateChanged, ctx: &mut Self::Context) {
        if std::mem::replace(&mut self.gate_told, gate) == gate {
            return;
        }
        match gate {
            Gate::Unavailable => self.was_down = true,
            Gate::Available if self.was_down => {
                self.was_down = false;
                self.counters.reconnect_catch_up += 1;
            }
            Gate::Available | Gate::Unconfigured => {}
        }
        if gate != Gate::Available {
            self.disarm(ctx);
        }
        self.wake(ctx);
    }
}

impl Handler<Fence> for ClaimActor {
    type Result = ();

    fn handle(&mut self, _: Fence, ctx: &mut Self::Context) {
        self.step(ctx);
    }
}

impl Handler<Unfence> for ClaimActor {
    type Result = ();

    /// Whoever was not held back has missed nothing: proofs come with every row.
    fn handle(&mut self, _: Unfence, ctx: &mut Self::Context) {
        if self.phase == Phase::Parked {
            self.wake(ctx);
        }
    }
}

impl Handler<Pause> for ClaimActor {
    type Result = ();

    fn handle(&mut self, _: Pause, ctx: &mut Self::Context) {
        self.parts.standing.pause();
        self.step(ctx);
    }
}

impl Handler<Resume> for ClaimActor {
    type Result = ();

    fn handle(&mut self, _: Resume, ctx: &mut Self::Context) {
        self.parts.standing.resume();
        self.wake(ctx);
    }
}

impl Handler<HeartbeatSwitched> for ClaimActor {
    type Result = ();

    fn handle(&mut self, _: HeartbeatSwitched, ctx: &mut Self::Context) {
        self.wake(ctx);
    }
}

impl Handler<Evicted> for ClaimActor {
    type Result = ();

    fn handle(&mut self, Evicted(instance): Evicted, ctx: &mut Self::Context) {
        if instance != self.parts.instance {
            return;
        }
        self.parts.standing.evict();
        self.step(ctx);
    }
}

impl Handler<Drain> for ClaimActor {
    type Result = ResponseActFuture<Self, Drained>;

    /// Answers when no claim is under way: rows that still come are handed back, not run. Ends with the actor, so that whoever asked
    /// learns of its death and asks the next one.
    fn handle(&mut self, _: Drain, ctx: &mut Self::Context) -> Self::Result {
        self.parts.standing.drain();
        // It may have been rung and not looked yet. What is stored from now on rings everybody when it has left.
        self.pass_once(ctx);
        let (drained, parked) = tokio::sync::oneshot::channel();
        self.drain = Some(drained);
        self.step(ctx);
        let patience = Duration::from_secs(self.parts.options.dispatch.drain_deadline_seconds.into());
        let patience = patience.min(CLAIM_PATIENCE);
        // Too late or superseded: what a lost claim has leased is handed back when the instance deregisters.
        let parked = async move { tokio::time::timeout(patience, parked).await };
        Box::pin(parked.into_actor(self).map(|_, _, _| Drained::default()))
    }
}

impl Handler<Observe> for ClaimActor {
    type Result = MessageResult<Observe>;

    fn handle(&mut self, _: Observe, _: &mut Self::Context) -> Self::Result {
        let counters = &self.counters;
        let account: Account = self.health.account(
            "claim",
            self.state(),
            [
                ("claims", counters.claims),
                ("rows", counters.rows),
                ("empty", counters.empty),
                ("empty_polls_in_a_row", self.empty_polls.into()),
                ("startup_catch_up", counters.startup_catch_up),
                ("reconnect_catch_up", counters.reconnect_catch_up),
                ("recovered", counters.recovered),
                ("handed_back", counters.handed_back),
                ("armed", self.bell.is_armed().into()),
                ("arms", counters.arms),
                ("arm_timeouts", counters.arm_timeouts),
                ("arm_losses", counters.arm_losses),
                ("passed_rings", counters.passed),
                ("free_permits", self.parts.permits.available_permits() as u64),
                ("in_flight", self.parts.in_flight.len() as u64),
            ],
        );
        MessageResult(account)
    }
}
