//! A sweeping actor with everything around it played by probes and by peers in memory.

use std::sync::Arc;

use actix::prelude::*;

use super::crash::end;
use super::fake_peers::{FakeDeathWatch, FakeSweep};
use super::probe::TestProbe;
use crate::actor::stale_sweep::{StaleSweepActor, StaleSweepParts};
use crate::instance::{AliveLock, InstanceId};
use crate::message::{
    Account, Evicted, Fence, Observe, PeerEvicted, RequestImmediatePoll, SubscribeToEvictions, Unfence,
};
use crate::options::Options;
use crate::standing::Standing;

/// A sweeping actor.
#[derive(Debug)]
pub struct SweepRig {
    /// The actor.
    pub addr: Addr<StaleSweepActor>,
    /// What is known about the instance.
    pub standing: Arc<Standing>,
    /// The backstop it asks.
    pub sweep: Arc<FakeSweep>,
    /// The watch it keeps.
    pub watch: Arc<FakeDeathWatch>,
    /// Its wakes.
    pub wake: TestProbe<RequestImmediatePoll>,
    /// Its reports of its own eviction.
    pub evicted: TestProbe<Evicted>,
    /// What it tells of others.
    pub told: TestProbe<PeerEvicted>,
    /// Who it is.
    pub instance: InstanceId,
    parts: StaleSweepParts,
}

impl SweepRig {
    /// Starts one, still fenced and without its lock.
    pub fn start(options: &Options) -> Self {
        let (wake, evicted, told) = (TestProbe::start(), TestProbe::start(), TestProbe::start());
        let (sweep, watch) = (FakeSweep::new(), FakeDeathWatch::new());
        let instance = InstanceId::fresh();
        let standing: Arc<Standing> = Arc::default();
        let parts = StaleSweepParts {
            options: options.liveness.clone(),
            instance,
            standing: Arc::clone(&standing),
            sweep: Arc::clone(&sweep) as _,
            watch: Some(Arc::clone(&watch) as _),
            wake: wake.recipient(),
            evicted: evicted.recipient(),
            subscribers: Arc::default(),
            seed: 7,
        };
        let addr = StaleSweepActor::new(parts.clone()).start();
        addr.do_send(SubscribeToEvictions(told.recipient()));
        Self { addr, standing, sweep, watch, wake, evicted, told, instance, parts }
    }

    /// Starts one as of a member that holds its lock.
    pub fn start_open(options: &Options) -> Self {
        let rig = Self::start(options);
        rig.standing.set_alive_lock(AliveLock::Held);
        rig.unfence();
        rig
    }

    /// Fences it, as the tree does.
    pub fn fence(&self) {
        self.standing.fence();
        self.addr.do_send(Fence);
    }

    /// Opens it, as the tree does.
    pub fn unfence(&self) {
        self.standing.unfence();
        self.addr.do_send(Unfence);
    }

    /// What it says of itself.
    ///
    /// # Panics
    ///
    /// When it has ended.
    pub async fn account(&self) -> Account {
        self.addr.send(Observe).await.expect("alive")
    }

    /// Ends this incarnation where it stands and starts the next.
    pub async fn restart(&mut self) {
        end(&self.addr).await;
        self.addr = StaleSweepActor::new(self.parts.clone()).start();
    }
}
