//! The leases under which rows may still be running.
//!
//! The rule: a claim is entered before its first row can start, and whatever of it is still in hand when it first matters is watched row by
//! row until it is done or its lease has ended, whoever watches. The failures this prevents: a handler that nobody tells to stop, because
//! the actor that knew its deadline has died, and a timer for each of the many rows that are done long before their lease matters.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::delivery::{InFlight, Lease, LeaseHandle};
use crate::lock;
use crate::policy::lease::LeaseStep;

/// Leases to be watched.
#[derive(Debug)]
pub(crate) struct LeaseBook {
    in_flight: Arc<InFlight>,
    pages: Mutex<Pages>,
}

#[derive(Debug, Default)]
struct Pages {
    /// Claims of which nothing had to be done yet, by when that will be.
    claims: VecDeque<Arc<Lease>>,
    /// Rows that take long, by when to look at them. Numbered, as several may be due at once.
    rows: BTreeMap<(Instant, u64), Arc<LeaseHandle>>,
    entries: u64,
}

/// What a look at the leases has found.
#[derive(Debug, Default)]
pub(crate) struct Looked {
    /// Rows that want to be renewed.
    pub(crate) due: Vec<Arc<LeaseHandle>>,
    /// Rows at their deadline, running or not.
    pub(crate) late: u32,
    /// Handlers that were told to stop.
    pub(crate) stopped: u32,
}

impl LeaseBook {
    /// Of the rows held here.
    pub(crate) fn new(in_flight: Arc<InFlight>) -> Self {
        Self { in_flight, pages: Mutex::default() }
    }

    /// Watches the leases of this claim from now on.
    pub(crate) fn enter(&self, claim: Arc<Lease>) {
        let pages = &mut *lock(&self.pages);
        if pages.claims.len() % 64 == 63 {
            pages.claims.retain(is_in_use);
        }
        let first = claim.first_step();
        let at = pages.claims.partition_point(|other| other.first_step() <= first);
        pages.claims.insert(at, claim);
    }

    /// When to look next.
    pub(crate) fn next(&self) -> Option<Instant> {
        let pages = &mut *lock(&self.pages);
        while pages.claims.front().is_some_and(|claim| !is_in_use(claim)) {
            pages.claims.pop_front();
        }
        while pages.rows.first_entry().is_some_and(|entry| entry.get().is_over()) {
            pages.rows.pop_first();
        }
        let claim = pages.claims.front().map(|claim| claim.first_step());
        let row = pages.rows.keys().next().map(|(at, _)| *at);
        claim.into_iter().chain(row).min()
    }

    /// Tells handlers to stop whose lease is about to end, ends those that went on waiting until it had, and finds what is to be renewed.
    ///
    /// Stopping and ending wake foreign code, so they come last, and what is to be stopped or ended stays on the page until it was: should
    /// that code panic, the next look goes on.
    pub(crate) fn look(&self, now: Instant) -> Looked {
        let mut looked = Looked::default();
        let (mut stop, mut end) = (Vec::new(), Vec::new());
        for lease in self.due(now) {
            let again = match lease.step(now) {
                _ if lease.is_over() => continue,
                LeaseStep::Wait { until } => until,
                LeaseStep::Renew { again } => {
                    if lease.wants_renewal() {
                        looked.due.push(Arc::clone(&lease));
                    }
                    again
                }
                LeaseStep::Stop { until } if lease.was_cancelled() => until,
                LeaseStep::Stop { .. } => {
                    stop.push(Arc::clone(&lease));
                    now
                }
                LeaseStep::End if lease.has_ended() => continue,
                LeaseStep::End => {
                    end.push(Arc::clone(&lease));
                    now
                }
            };
            self.look_again(&lease, again);
        }
        looked.late = (stop.len() + end.len()) as u32;
        for lease in stop {
            looked.stopped += u32::from(lease.cancel());
        }
        for lease in end {
            looked.stopped += u32::from(lease.cancel());
            lease.end();
        }
        looked
    }

    /// Looks at this row again then.
    fn look_again(&self, lease: &Arc<LeaseHandle>, at: Instant) {
        let pages = &mut *lock(&self.pages);
        pages.entries += 1;
        pages.rows.insert((at, pages.entries), Arc::clone(lease));
    }

    /// The rows to be looked at now.
    fn due(&self, now: Instant) -> Vec<Arc<LeaseHandle>> {
        let (claims, rows) = {
            let pages = &mut *lock(&self.pages);
            let due = pages.claims.partition_point(|claim| claim.first_step() <= now);
            let claims: Vec<_> = pages.claims.drain(..due).filter(is_in_use).collect();
            let later = pages.rows.split_off(&(now, u64::MAX));
            (claims, std::mem::replace(&mut pages.rows, later))
        };
        let mut due = self.in_flight.of_claims(&claims);
        due.extend(rows.into_values());
        due
    }

    /// Some leases were lost: looks at them next, whatever was planned.
    pub(crate) fn expect_lost(&self, now: Instant) {
        for lease in self.in_flight.select(|lease| lease.is_lost() && !lease.is_over()) {
            self.look_again(&lease, now);
        }
    }

    /// Tells all handlers to stop. Returns how many were running.
    pub(crate) fn cancel_all(&self) -> u32 {
        // Those that are about to start as well.
        let held = self.in_flight.select(|lease| !lease.is_over());
        held.iter().map(|lease| u32::from(lease.cancel())).sum()
    }
}

/// Nobody else holds a claim whose rows are all done.
fn is_in_use(claim: &Arc<Lease>) -> bool {
    Arc::strong_count(claim) > 1
}
