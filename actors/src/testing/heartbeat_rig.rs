//! A heartbeat actor, with everything around it played by probes and the store in memory.

use std::sync::Arc;

use actix::prelude::*;

use super::crash::end;
use super::fake::FakeStore;
use super::probe::TestProbe;
use super::rig::identity;
use crate::actor::heartbeat::{HeartbeatActor, HeartbeatParts};
use crate::delivery::InFlight;
use crate::instance::InstanceIdentity;
use crate::message::{Evicted, Fence, Unfence};
use crate::options::Options;
use crate::policy::trust::TrustRule;
use crate::standing::Standing;
use crate::work::Category;

/// A heartbeat actor.
#[derive(Debug)]
pub struct HeartbeatRig {
    /// The actor.
    pub addr: Addr<HeartbeatActor>,
    /// What is known about the instance.
    pub standing: Arc<Standing>,
    /// Its news of membership.
    pub unfence: TestProbe<Unfence>,
    /// Its verdicts that trust has ended.
    pub fence: TestProbe<Fence>,
    /// What is in hand: without anything nothing is fenced.
    pub in_flight: Arc<InFlight>,
    /// Its reports of eviction.
    pub evicted: TestProbe<Evicted>,
    /// Who it is.
    pub identity: InstanceIdentity,
    parts: HeartbeatRigParts,
}

impl HeartbeatRig {
    /// Starts one.
    pub fn start(options: &Options, store: &Arc<FakeStore>) -> Self {
        let (unfence, fence, evicted) = (TestProbe::start(), TestProbe::start(), TestProbe::start());
        let identity = identity();
        let standing = Arc::new(Standing::new(TrustRule::new(options.liveness.grace())));
        standing.set_heartbeat(options.heartbeat.enabled);
        let parts = HeartbeatRigParts {
            options: options.clone(),
            identity: identity.clone(),
            standing: Arc::clone(&standing),
            in_flight: Arc::default(),
            fence: fence.recipient(),
            unfence: unfence.recipient(),
            evicted: evicted.recipient(),
            store: Arc::clone(store),
        };
        let (addr, in_flight) = (parts.begin(), Arc::clone(&parts.in_flight));
        Self { addr, standing, unfence, fence, in_flight, evicted, identity, parts }
    }

    /// Ends this incarnation where it stands and starts the next.
    pub async fn restart(&mut self) {
        end(&self.addr).await;
        self.addr = self.parts.begin();
    }
}

struct HeartbeatRigParts {
    options: Options,
    identity: InstanceIdentity,
    standing: Arc<Standing>,
    in_flight: Arc<InFlight>,
    fence: Recipient<Fence>,
    unfence: Recipient<Unfence>,
    evicted: Recipient<Evicted>,
    store: Arc<FakeStore>,
}

impl std::fmt::Debug for HeartbeatRigParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeartbeatRigParts").finish_non_exhaustive()
    }
}

impl HeartbeatRigParts {
    fn begin(&self) -> Addr<HeartbeatActor> {
        let parts = HeartbeatParts {
            options: self.options.heartbeat.clone(),
            identity: self.identity.clone(),
            accepts_work: true,
            categories: [Category::Outbox, Category::Inbox].into(),
            standing: Arc::clone(&self.standing),
            in_flight: Arc::clone(&self.in_flight),
            fence: self.fence.clone(),
            unfence: vec![self.unfence.clone()],
            evicted: self.evicted.clone(),
            progress: Box::new(|_| {}),
        };
        HeartbeatActor::new(parts, Arc::clone(&self.store) as _).start()
    }
}
