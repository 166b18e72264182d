//! One row in flight: its permit, its lease, and the one way it can end.
//!
//! The rule: a row is held by exactly one value from claim to settlement, and its permit returns when that value is dropped, whatever
//! the reason. The failures this prevents: leasing more than can be run, capacity that leaks away with every panic, and a row that is
//! settled twice.

mod batch;
mod in_flight;
mod lease;
mod renewals;

use std::fmt;
use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use crate::instance::{Gate, InstanceId};
use crate::policy::lease::LeaseWindow;
use crate::port::{SettleItem, Verdict};
use crate::runner::Job;
use crate::standing::Trust;
use crate::work::{Category, ClaimEpoch, ClaimedWork, OrderKey, WorkKey};

pub use in_flight::InFlight;
pub use lease::{Lease, LeaseHandle, Reservation};
pub(crate) use renewals::RenewalFlush;
pub use renewals::{ExtendError, Renewals};

/// The right to hold one row. Dropping it forgets the row and then returns the permit.
pub struct Slot {
    key: WorkKey,
    epoch: ClaimEpoch,
    lease: Arc<LeaseHandle>,
    in_flight: Arc<InFlight>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.lease.dispose();
        self.in_flight.remove(&self.key, &self.lease);
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("lease", &self.lease).finish_non_exhaustive()
    }
}

/// One claimed row with its permit and its lease. Not `Clone`: starting or settling consumes it.
#[must_use = "a delivery that is dropped is not settled: its row waits for the end of its lease"]
#[derive(Debug)]
pub struct Delivery {
    work: ClaimedWork,
    slot: Slot,
    overlaps: bool,
    behind: Behind,
}

impl Delivery {
    /// Takes a freshly claimed row in hand, on one permit.
    ///
    /// # Panics
    ///
    /// In debug builds, when `permit` is not exactly one permit.
    pub fn new(
        work: ClaimedWork,
        permit: OwnedSemaphorePermit,
        in_flight: &Arc<InFlight>,
        claim: &Arc<Lease>,
    ) -> Self {
        debug_assert_eq!(permit.num_permits(), 1, "one row, one permit");
        let lease = LeaseHandle::new(&work, claim);
        let overlaps = in_flight.insert(Arc::clone(&lease));
        let slot = Slot {
            key: work.key,
            epoch: work.epoch,
            lease,
            in_flight: Arc::clone(in_flight),
            _permit: permit,
        };
        Self { work, slot, overlaps, behind: Behind::Known }
    }

    /// The row.
    pub fn work(&self) -> &ClaimedWork {
        &self.work
    }

    /// What the row is ordered by.
    pub fn order_key(&self) -> Option<OrderKey> {
        self.work.order_key()
    }

    /// Its lease.
    pub fn lease(&self) -> &Arc<LeaseHandle> {
        &self.slot.lease
    }

    /// Whether an older claim of the same row was still held here when this one arrived.
    pub(crate) fn came_while_held(&self) -> bool {
        self.overlaps
    }

    /// Notes what its stream may hold behind it that only its run blocks.
    pub fn expect_behind(&mut self, behind: Behind) {
        self.behind = behind;
    }

    /// Ends it without running it.
    pub fn settle(self, verdict: Verdict) -> Settlement {
        // What goes back is not kept: it may be anybody's from now on.
        if verdict == Verdict::Release {
            self.slot.lease.give_back();
        } else {
            self.slot.lease.finish();
        }
        Settlement { verdict, behind: self.behind, slot: self.slot }
    }

    /// Starts it: the handler's part and the part that will settle it.
    pub(crate) fn start(self, instance: InstanceId, trust: Trust) -> (Job, Running) {
        let lease = Arc::clone(&self.slot.lease);
        let cancel = lease.start();
        let running = Running {
            category: self.work.key.category,
            attempts: self.work.attempts,
            behind: self.behind,
            slot: self.slot,
        };
        (Job { work: self.work, instance, cancel, lease, trust }, running)
    }
}

/// A row whose handler is running.
#[must_use = "a running row that is dropped is not settled"]
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) category: Category,
    pub(crate) attempts: u32,
    behind: Behind,
    slot: Slot,
}

impl Running {
    /// Its lease.
    pub(crate) fn lease(&self) -> &Arc<LeaseHandle> {
        &self.slot.lease
    }

    /// Ends it.
    pub(crate) fn settle(self, verdict: Verdict) -> Settlement {
        if verdict == Verdict::Release {
            self.slot.lease.give_back();
        } else {
            self.slot.lease.finish();
        }
        Settlement { verdict, behind: self.behind, slot: self.slot }
    }
}

/// What shall become of one row, with the permit that returns once it is written and dropped.
#[must_use = "a settlement that is dropped is not written"]
#[derive(Debug)]
pub struct Settlement {
    verdict: Verdict,
    behind: Behind,
    slot: Slot,
}

impl Settlement {
    /// Which row.
    pub fn key(&self) -> WorkKey {
        self.slot.key
    }

    /// The claim it settles.
    pub fn epoch(&self) -> ClaimEpoch {
        self.slot.epoch
    }

    /// What shall become of it.
    pub fn verdict(&self) -> &Verdict {
        &self.verdict
    }

    /// The lease it was worked under, as it stands now.
    pub fn window(&self) -> LeaseWindow {
        self.slot.lease.window()
    }

    /// As the store wants it.
    pub fn item(&self) -> SettleItem {
        SettleItem { key: self.key(), epoch: self.epoch(), verdict: self.verdict.clone() }
    }

    /// Whether writing it makes a row claimable that nobody is rung for: this one, at once or when its time has come, or the next of its
    /// stream. With this gate now, not at the time of the claim: a handler may run for long, and who fell asleep meanwhile polls no more.
    pub fn frees_work(&self, gate: Gate) -> bool {
        match (&self.verdict, self.behind) {
            (Verdict::Release | Verdict::Retry { .. }, _) | (_, Behind::More) => true,
            (_, Behind::Unknown) => gate == Gate::Available,
            (_, Behind::Known) => false,
        }
    }
}

/// What may stand behind a row that only its run blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behind {
    /// Nothing, or the next row of its run.
    Known,
    /// It is the last row of its run: what was stored behind it since the claim has rung in vain.
    Unknown,
    /// It is the last row of a run that was cut short: there may be more already.
    More,
}
