//! The lives of an instance: everything that belongs to one id and must not outlast it.
//!
//! The rule: an id is never used twice. After an eviction everything that was done under the old one stays with it, and the actors are
//! made again around a fresh life. The failure this prevents: a row, a result or a fence of the evicted id that turns up under the new
//! one.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crate::actor::settle::Backlog;
use crate::delivery::{InFlight, Renewals};
use crate::instance::{InstanceId, InstanceIdentity};
use crate::lane::Crew;
use crate::lock;
use crate::options::Options;
use crate::policy::lease::LeaseTerms;
use crate::policy::trust::TrustRule;
use crate::standing::Standing;

/// One life, from the id on.
pub(super) struct Life {
    pub(super) identity: InstanceIdentity,
    pub(super) standing: Arc<Standing>,
    pub(super) backlog: Arc<Backlog>,
    /// Made when dispatching starts: runners are asked for their limits, which may panic.
    pub(super) crew: OnceLock<Arc<Crew>>,
    pub(super) in_flight: Arc<InFlight>,
    pub(super) renewals: Arc<Renewals>,
    served: AtomicU8,
}

/// Who holds rows of a life, or passes them on.
#[derive(Clone, Copy)]
#[repr(u8)]
pub(super) enum Server {
    Settle = 1,
    Dispatch = 2,
}

impl Life {
    fn new(identity: InstanceIdentity, standing: Standing, renewals: Arc<Renewals>) -> Arc<Self> {
        Arc::new(Self {
            identity,
            standing: Arc::new(standing),
            backlog: Arc::default(),
            crew: OnceLock::new(),
            in_flight: Arc::default(),
            renewals,
            served: AtomicU8::new(0),
        })
    }

    pub(super) fn instance(&self) -> InstanceId {
        self.identity.id
    }

    /// Whether somebody served this life in this place before, and died. Asked by each, once.
    pub(super) fn succeeds(&self, server: Server) -> bool {
        self.served.fetch_or(server as u8, Ordering::AcqRel) & server as u8 != 0
    }
}

impl std::fmt::Debug for Lives {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lives").field("current", &self.current().identity).finish_non_exhaustive()
    }
}

/// The current life, which every factory asks for.
pub(super) struct Lives {
    current: Mutex<Arc<Life>>,
    /// The last id that is being followed by another.
    buried: Mutex<Option<InstanceId>>,
    terms: LeaseTerms,
    /// How many renewals may wait.
    capacity: usize,
}

impl Lives {
    pub(super) fn new(identity: InstanceIdentity, options: &Options) -> Arc<Self> {
        let (terms, capacity) = (LeaseTerms::new(options), options.lease_renewal.channel_capacity);
        let standing = Standing::new(TrustRule::new(options.liveness.grace()));
        standing.set_heartbeat(options.heartbeat.enabled);
        let first = Life::new(identity, standing, Renewals::new(terms, capacity));
        Arc::new(Self { current: Mutex::new(first), buried: Mutex::default(), terms, capacity })
    }

    pub(super) fn current(&self) -> Arc<Life> {
        Arc::clone(&lock(&self.current))
    }

    /// The life of this id, for whoever follows it up. Once for each id, and only while it is the current one.
    pub(super) fn bury(&self, instance: InstanceId) -> Option<Arc<Life>> {
        let current = self.current();
        let mut buried = lock(&self.buried);
        (current.instance() == instance && buried.replace(instance) != Some(instance)).then_some(current)
    }

    /// Begins the next life, under a fresh id.
    pub(super) fn begin_next(&self) -> Arc<Life> {
        let mut current = lock(&self.current);
        let identity = InstanceIdentity { id: InstanceId::fresh(), ..current.identity.clone() };
        let renewals = Renewals::new(self.terms, self.capacity);
        *current = Life::new(identity, current.standing.successor(), renewals);
        Arc::clone(&current)
    }
}
