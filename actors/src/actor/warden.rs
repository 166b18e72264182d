//! News about the whole instance: it notes them, and then tells everyone concerned.
//!
//! The rule: a fence, its end and an eviction stand in the [`Standing`] before anybody hears of them. The failure this prevents: an actor
//! that dies of the message and whose successor knows nothing of it.

use std::sync::Arc;

use actix::prelude::*;

use crate::instance::InstanceId;
use crate::message::{Evicted, Fence, HeartbeatSwitched, PingNow, SetHeartbeat, Unfence};
use crate::standing::Standing;

/// Where news about the whole instance goes: it tells everyone concerned.
pub struct WardenActor {
    instance: InstanceId,
    told: Told,
    standing: Arc<Standing>,
    after_eviction: AfterEviction,
}

/// What happens when everyone was told of an eviction. Called again by the next warden, should this one die of it.
pub type AfterEviction = Box<dyn Fn(InstanceId) + Send>;

impl std::fmt::Debug for WardenActor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WardenActor").field("instance", &self.instance).finish_non_exhaustive()
    }
}

/// Who is told of what, in this order.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// Whoever has to stop.
    pub fence: Vec<Recipient<Fence>>,
    /// Whoever may go on.
    pub unfence: Vec<Recipient<Unfence>>,
    /// Whoever has to give up.
    pub evicted: Vec<Recipient<Evicted>>,
    /// Whoever can prove that the instance is alive.
    pub probe: Vec<Recipient<PingNow>>,
    /// Whoever acts otherwise when the heartbeat is switched.
    pub switched: Vec<Recipient<HeartbeatSwitched>>,
}

impl WardenActor {
    /// Speaks for this instance.
    pub fn new(
        instance: InstanceId,
        standing: Arc<Standing>,
        told: Told,
        after_eviction: AfterEviction,
    ) -> Self {
        Self { instance, told, standing, after_eviction }
    }
}

impl Actor for WardenActor {
    type Context = Context<Self>;

    /// Says again what its predecessor may have died of saying.
    fn started(&mut self, _: &mut Self::Context) {
        if self.standing.is_fenced() {
            self.told.fence.iter().for_each(|recipient| recipient.do_send(Fence));
        } else {
            self.told.unfence.iter().for_each(|recipient| recipient.do_send(Unfence));
        }
        if self.standing.is_evicted() {
            self.told.evicted.iter().for_each(|recipient| recipient.do_send(Evicted(self.instance)));
            (self.after_eviction)(self.instance);
        }
        // Whoever started after the switch has seen it, and looks in vain.
        self.told.switched.iter().for_each(|recipient| recipient.do_send(HeartbeatSwitched));
    }
}

impl Handler<SetHeartbeat> for WardenActor {
    type Result = ();

    fn handle(&mut self, SetHeartbeat(enabled): SetHeartbeat, _: &mut Self::Context) {
        self.standing.set_heartbeat(enabled);
        if enabled {
            tracing::info!("the heartbeat is switched on");
        } else {
            tracing::warn!("the heartbeat is switched off: peers will take this instance for dead");
        }
        self.told.switched.iter().for_each(|recipient| recipient.do_send(HeartbeatSwitched));
    }
}

/// Answered when everything that was sent to the warden before has been seen to.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub(crate) struct CatchUp;

impl Handler<CatchUp> for WardenActor {
    type Result = ();

    fn handle(&mut self, _: CatchUp, _: &mut Self::Context) {}
}

impl Handler<Fence> for WardenActor {
    type Result = ();

    fn handle(&mut self, fence: Fence, _: &mut Self::Context) {
        self.standing.fence();
        self.told.fence.iter().for_each(|recipient| recipient.do_send(fence));
    }
}

impl Handler<Unfence> for WardenActor {
    type Result = ();

    /// News of an earlier life must not open this one, which is no member yet.
    fn handle(&mut self, unfence: Unfence, _: &mut Self::Context) {
        if !self.standing.is_registered() {
            return;
        }
        self.standing.unfence();
        self.told.unfence.iter().for_each(|recipient| recipient.do_send(unfence));
    }
}

impl Handler<Evicted> for WardenActor {
    type Result = ();

    fn handle(&mut self, evicted: Evicted, _: &mut Self::Context) {
        if evicted.0 != self.instance {
            return;
        }
        self.standing.evict();
        // Everyone is told once, also during a drain and after the end of an actor.
        if self.standing.must_tell_eviction() {
            self.told.evicted.iter().for_each(|recipient| recipient.do_send(evicted));
            tracing::error!(instance = %evicted.0, "this instance was evicted: nothing is claimed, run or written under its id any more");
            (self.after_eviction)(evicted.0);
        }
    }
}

impl Handler<PingNow> for WardenActor {
    type Result = ();

    fn handle(&mut self, probe: PingNow, _: &mut Self::Context) {
        self.told.probe.iter().for_each(|recipient| recipient.do_send(probe));
    }
}
