//! A keeper of the direct session with everything around it played by probes, and a server in memory.

use std::sync::Arc;

use actix::prelude::*;

use super::crash::end;
use super::fake_direct::FakeDirect;
use super::probe::TestProbe;
use crate::actor::notify_gate::{NotifyGateActor, NotifyGateParts};
use crate::delivery::InFlight;
use crate::instance::InstanceId;
use crate::message::{Account, AliveLockChanged, Observe, RequestImmediatePoll, TrustProven};
use crate::options::Options;
use crate::policy::trust::TrustRule;
use crate::port::DirectConnector;
use crate::standing::Standing;

/// A keeper of the direct session.
pub struct GateRig {
    /// The actor.
    pub addr: Addr<NotifyGateActor>,
    /// The server it connects to, and through which producers ring.
    pub server: FakeDirect,
    /// Who it is.
    pub instance: InstanceId,
    /// What is known about the instance.
    pub standing: Arc<Standing>,
    /// What is in hand.
    pub in_flight: Arc<InFlight>,
    /// What it says of the alive-lock.
    pub lock: TestProbe<AliveLockChanged>,
    /// Its answered pings.
    pub trust: TestProbe<TrustProven>,
    /// Its wakes.
    pub wake: TestProbe<RequestImmediatePoll>,
    make: Box<dyn Fn() -> NotifyGateParts>,
}

impl std::fmt::Debug for GateRig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GateRig").field("instance", &self.instance).finish_non_exhaustive()
    }
}

impl GateRig {
    /// Starts one on this server.
    pub fn start(options: &Options, server: &FakeDirect) -> Self {
        Self::with(options, server, Some(Arc::new(server.clone())))
    }

    /// Starts one that has no direct connection.
    pub fn unconnected(options: &Options) -> Self {
        Self::with(options, &FakeDirect::new(), None)
    }

    fn with(options: &Options, server: &FakeDirect, connector: Option<Arc<dyn DirectConnector>>) -> Self {
        let standing = Arc::new(Standing::new(TrustRule::new(options.liveness.grace())));
        let (in_flight, instance): (Arc<InFlight>, _) = (Arc::default(), InstanceId::fresh());
        let (lock, trust, wake) = (TestProbe::start(), TestProbe::start(), TestProbe::start());
        let parts = NotifyGateParts {
            heartbeat: options.heartbeat.clone(),
            instance,
            standing: Arc::clone(&standing),
            in_flight: Arc::clone(&in_flight),
            connector,
            alive_lock: vec![lock.recipient()],
            trust: vec![trust.recipient()],
            channels: Arc::default(),
            wake: Some(wake.recipient()),
            ready: Box::new(|| {}),
            seed: 7,
        };
        let make = move || NotifyGateParts {
            heartbeat: parts.heartbeat.clone(),
            standing: Arc::clone(&parts.standing),
            in_flight: Arc::clone(&parts.in_flight),
            connector: parts.connector.clone(),
            alive_lock: parts.alive_lock.clone(),
            trust: parts.trust.clone(),
            channels: Arc::clone(&parts.channels),
            wake: parts.wake.clone(),
            ready: Box::new(|| {}),
            ..parts
        };
        let addr = NotifyGateActor::new(make()).start();
        let (server, make) = (server.clone(), Box::new(make));
        Self { addr, server, instance, standing, in_flight, lock, trust, wake, make }
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
        self.addr = NotifyGateActor::new((self.make)()).start();
    }
}
