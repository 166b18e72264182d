//! The renewing actor by itself, with rows that hold their leases as handlers would.

use std::sync::Arc;

use actix::prelude::*;
use tokio::sync::Semaphore;

use super::crash::end;
use super::fake::FakeStore;
use super::probe::TestProbe;
use super::rig::deliver_under;
use super::table::Row;
use crate::actor::lease_renewal::{LeaseRenewalActor, LeaseRenewalParts};
use crate::delivery::{Delivery, InFlight, Renewals};
use crate::instance::InstanceId;
use crate::message::Evicted;
use crate::options::Options;
use crate::policy::lease::LeaseTerms;
use crate::port::{ClaimRequest, WorkStore};
use crate::standing::Standing;
use crate::work::Category;

/// A renewing actor.
#[derive(Debug)]
pub struct RenewalRig {
    /// The actor.
    pub addr: Addr<LeaseRenewalActor>,
    /// What is known about the instance.
    pub standing: Arc<Standing>,
    /// Its reports of eviction.
    pub evicted: TestProbe<Evicted>,
    /// Who it is.
    pub instance: InstanceId,
    /// What was asked for.
    pub renewals: Arc<Renewals>,
    /// What is held.
    pub in_flight: Arc<InFlight>,
    permits: Arc<Semaphore>,
    parts: LeaseRenewalParts,
    store: Arc<FakeStore>,
}

impl RenewalRig {
    /// Starts one.
    pub fn start(options: &Options, store: &Arc<FakeStore>) -> Self {
        let (evicted, instance) = (TestProbe::start(), InstanceId::fresh());
        let (standing, in_flight): (Arc<Standing>, Arc<InFlight>) = Default::default();
        let renewals = Renewals::new(LeaseTerms::new(options), options.lease_renewal.channel_capacity);
        let parts = LeaseRenewalParts {
            options: options.lease_renewal.clone(),
            instance,
            standing: Arc::clone(&standing),
            renewals: Arc::clone(&renewals),
            in_flight: Arc::clone(&in_flight),
            evicted: evicted.recipient(),
            seed: 7,
        };
        let (store, permits) = (Arc::clone(store), Arc::new(Semaphore::new(10_000)));
        let addr = LeaseRenewalActor::new(parts.clone(), Arc::clone(&store) as _).start();
        Self { addr, standing, evicted, instance, renewals, in_flight, permits, parts, store }
    }

    /// Stores rows and claims them.
    ///
    /// # Panics
    ///
    /// When the store refuses.
    pub async fn claim(&self, count: usize, row: &Row) -> Vec<Delivery> {
        self.store.insert_many(count, row);
        let request = ClaimRequest {
            instance: self.instance,
            max_rows: count as u32,
            max_bytes: u64::MAX,
            lease: self.renewals.terms().lease,
            partition_count: 1,
            stream_run: 10_000,
            categories: Category::ALL.into(),
        };
        let works = self.store.claim(request).await.expect("claimed").works;
        deliver_under(works, &self.permits, &self.in_flight, &self.renewals)
    }

    /// Ends this incarnation where it stands and starts the next.
    pub async fn restart(&mut self) {
        end(&self.addr).await;
        self.addr = LeaseRenewalActor::new(self.parts.clone(), Arc::clone(&self.store) as _).start();
    }
}
