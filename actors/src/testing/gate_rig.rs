//! A keeper of the direct session with everything around it played by probes, and a server in memory.

use std::sync::Arc;

use actix::prelude::*;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::crash::end;
use super::fake_direct::FakeDirect;
use super::probe::TestProbe;
use crate::actor::notify_gate::{GateSubscribers, NotifyGateActor, NotifyGateParts};
use crate::delivery::InFlight;
use crate::instance::{Gate, InstanceId};
use crate::message::{
    Account, AliveLockChanged, GateChanged, GateReport, Observe, ProbeNow, RequestImmediatePoll,
    SubscribeToGate, TrustProven,
};
use crate::options::{GateMode, Options};
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
    /// What it says of the gate to its neighbours.
    pub news: TestProbe<GateChanged>,
    /// The way to readiness, as it tells it.
    pub progress: UnboundedReceiver<Result<(), String>>,
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
        Self::seeded(options, server, 7)
    }

    /// The same with another seed of its jitter.
    pub fn seeded(options: &Options, server: &FakeDirect, seed: u64) -> Self {
        Self::with(options, server, Some(Arc::new(server.clone())), seed)
    }

    /// Starts one that has no direct connection.
    pub fn unconnected(options: &Options) -> Self {
        Self::with(options, &FakeDirect::new(), None, 7)
    }

    fn with(
        options: &Options,
        server: &FakeDirect,
        connector: Option<Arc<dyn DirectConnector>>,
        seed: u64,
    ) -> Self {
        let standing = Arc::new(Standing::new(TrustRule::new(options.liveness.grace())));
        let (in_flight, instance): (Arc<InFlight>, _) = (Arc::default(), InstanceId::fresh());
        let (lock, trust, wake) = (TestProbe::start(), TestProbe::start(), TestProbe::start());
        let news = TestProbe::start();
        let (told, progress) = unbounded_channel();
        let must_be_proven = options.gate.mode == GateMode::ListenNotify;
        let parts = NotifyGateParts {
            gate: options.gate.clone(),
            heartbeat: options.heartbeat.clone(),
            instance,
            standing: Arc::clone(&standing),
            in_flight: Arc::clone(&in_flight),
            connector,
            route: Arc::new(server.clone()),
            alive_lock: vec![lock.recipient()],
            trust: vec![trust.recipient()],
            gate_news: vec![news.recipient()],
            gate_subscribers: Arc::<GateSubscribers>::default(),
            channels: Arc::default(),
            wake: Some(wake.recipient()),
            must_be_proven,
            progress: Box::new(|_| {}),
            seed,
        };
        let make = move || NotifyGateParts {
            gate: parts.gate.clone(),
            route: Arc::clone(&parts.route),
            gate_news: parts.gate_news.clone(),
            gate_subscribers: Arc::clone(&parts.gate_subscribers),
            heartbeat: parts.heartbeat.clone(),
            standing: Arc::clone(&parts.standing),
            in_flight: Arc::clone(&parts.in_flight),
            connector: parts.connector.clone(),
            alive_lock: parts.alive_lock.clone(),
            trust: parts.trust.clone(),
            channels: Arc::clone(&parts.channels),
            wake: parts.wake.clone(),
            progress: {
                let told = told.clone();
                // The test may have dropped its end.
                Box::new(move |progress| drop(told.send(progress)))
            },
            ..parts
        };
        let addr = NotifyGateActor::new(make()).start();
        let (server, make) = (server.clone(), Box::new(make));
        Self { addr, server, instance, standing, in_flight, lock, trust, wake, news, progress, make }
    }

    /// Waits until it is ready, or for as long as that takes.
    pub async fn ready(&mut self) {
        while !matches!(self.progress.recv().await, Some(Ok(())) | None) {}
    }

    /// The changes of the gate that were told since the last look.
    pub fn gates(&mut self) -> Vec<Gate> {
        self.news.take().into_iter().map(|GateChanged(gate)| gate).collect()
    }

    /// Proves now.
    ///
    /// # Panics
    ///
    /// When it has ended.
    pub async fn probe(&self) -> GateReport {
        self.addr.send(ProbeNow).await.expect("alive")
    }

    /// Somebody who wants to know of the gate.
    pub fn subscriber(&self) -> TestProbe<GateChanged> {
        let probe = TestProbe::start();
        self.addr.do_send(SubscribeToGate(probe.recipient()));
        probe
    }

    /// What it says of itself.
    ///
    /// # Panics
    ///
    /// When it has ended.
    pub async fn account(&self) -> Account {
        self.addr.send(Observe).await.expect("alive")
    }

    /// Ends this incarnation where it stands.
    pub async fn end(&self) {
        end(&self.addr).await;
    }

    /// Ends this incarnation where it stands and starts the next.
    pub async fn restart(&mut self) {
        self.end().await;
        self.addr = NotifyGateActor::new((self.make)()).start();
    }
}
