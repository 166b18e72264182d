//! One row in flight: its permit, its lease, and the one way it can end.
//!
//! The rule: a row is held by exactly one value from claim to settlement, and its permit returns when that value is dropped, whatever
//! the reason. The failures this prevents: leasing more than can be run, capacity that leaks away with every panic, and a row that is
//! settled twice.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;

use crate::instance::InstanceId;
use crate::lock;
use crate::policy::lease::LeaseWindow;
use crate::port::{SettleItem, Verdict};
use crate::runner::Job;
use crate::standing::Trust;
use crate::work::{Category, ClaimEpoch, ClaimedWork, OrderKey, WorkKey};

/// Every claim that somebody in this process still holds.
///
/// One row can be held under two epochs: its lease ran out while its handler went on, and it was claimed here again.
#[derive(Debug, Default)]
pub struct InFlight {
    rows: Mutex<HashMap<WorkKey, Epochs>>,
}

#[derive(Debug)]
struct Epochs {
    first: ClaimEpoch,
    more: Vec<ClaimEpoch>,
}

impl InFlight {
    /// Everything held now.
    pub fn held(&self) -> Vec<(WorkKey, ClaimEpoch)> {
        let rows = lock(&self.rows);
        let mut held = Vec::with_capacity(rows.len());
        for (key, epochs) in rows.iter() {
            held.push((*key, epochs.first));
            held.extend(epochs.more.iter().map(|epoch| (*key, *epoch)));
        }
        held
    }

    /// How many rows are held.
    pub fn len(&self) -> usize {
        lock(&self.rows).len()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether this row is held under more than one epoch.
    pub(crate) fn overlaps(&self, key: &WorkKey) -> bool {
        lock(&self.rows).get(key).is_some_and(|epochs| !epochs.more.is_empty())
    }

    fn insert(&self, key: WorkKey, epoch: ClaimEpoch) -> bool {
        use std::collections::hash_map::Entry;
        match lock(&self.rows).entry(key) {
            Entry::Vacant(entry) => {
                entry.insert(Epochs { first: epoch, more: Vec::new() });
                false
            }
            Entry::Occupied(mut entry) => {
                entry.get_mut().more.push(epoch);
                true
            }
        }
    }

    fn remove(&self, key: WorkKey, epoch: ClaimEpoch) {
        let mut rows = lock(&self.rows);
        let Some(epochs) = rows.get_mut(&key) else { return };
        if let Some(at) = epochs.more.iter().position(|other| *other == epoch) {
            epochs.more.swap_remove(at);
        } else if let Some(other) = epochs.more.pop() {
            epochs.first = other;
        } else {
            rows.remove(&key);
        }
    }
}

/// The right to hold one row. Dropping it forgets the row and then returns the permit.
pub struct Slot {
    key: WorkKey,
    epoch: ClaimEpoch,
    in_flight: Arc<InFlight>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.in_flight.remove(self.key, self.epoch);
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("key", &self.key).field("epoch", &self.epoch).finish_non_exhaustive()
    }
}

/// The lease that the rows of one claim share.
#[derive(Debug)]
pub struct Lease {
    window: LeaseWindow,
    cancel: CancellationToken,
    ended: CancellationToken,
    running: AtomicU32,
}

impl Lease {
    /// A lease of this length.
    pub fn new(window: LeaseWindow) -> Arc<Self> {
        Arc::new(Self {
            window,
            cancel: CancellationToken::new(),
            ended: CancellationToken::new(),
            running: AtomicU32::new(0),
        })
    }

    /// When it ends.
    pub fn window(&self) -> LeaseWindow {
        self.window
    }

    /// Tells every handler under this lease to stop. Returns how many are running.
    pub(crate) fn cancel(&self) -> u32 {
        self.cancel.cancel();
        self.running.load(Ordering::Relaxed)
    }
}

impl Lease {
    /// Ends every waiting handler under this lease: its result would be fenced.
    pub(crate) fn end(&self) {
        self.ended.cancel();
    }
}

/// One claimed row with its permit and its lease. Not `Clone`: starting or settling consumes it.
#[must_use = "a delivery that is dropped is not settled: its row waits for the end of its lease"]
#[derive(Debug)]
pub struct Delivery {
    work: ClaimedWork,
    slot: Slot,
    lease: Arc<Lease>,
    overlaps: bool,
    more_behind: bool,
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
        lease: &Arc<Lease>,
    ) -> Self {
        debug_assert_eq!(permit.num_permits(), 1, "one row, one permit");
        let overlaps = in_flight.insert(work.key, work.epoch);
        let slot =
            Slot { key: work.key, epoch: work.epoch, in_flight: Arc::clone(in_flight), _permit: permit };
        Self { work, slot, lease: Arc::clone(lease), overlaps, more_behind: false }
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
    pub fn lease(&self) -> &Arc<Lease> {
        &self.lease
    }

    /// Whether an older claim of the same row was still held here when this one arrived.
    pub(crate) fn came_while_held(&self) -> bool {
        self.overlaps
    }

    /// Notes that it is the last of its run, and that its stream may hold more that only this run blocks.
    pub fn expect_more_behind(&mut self) {
        self.more_behind = true;
    }

    /// Ends it without running it.
    pub fn settle(self, verdict: Verdict) -> Settlement {
        Settlement {
            key: self.work.key,
            epoch: self.work.epoch,
            verdict,
            window: self.lease.window,
            more_behind: self.more_behind,
            slot: self.slot,
        }
    }

    /// Starts it: the handler's part and the part that will settle it.
    pub(crate) fn start(self, instance: InstanceId, trust: Trust) -> (Job, Running) {
        self.lease.running.fetch_add(1, Ordering::Relaxed);
        let running = Running {
            category: self.work.key.category,
            attempts: self.work.attempts,
            more_behind: self.more_behind,
            slot: self.slot,
            lease: RunningLease(self.lease),
        };
        let cancel = running.lease.0.cancel.child_token();
        (Job { work: self.work, instance, cancel, trust }, running)
    }
}

/// Counts one running handler under its lease, however it ends.
#[derive(Debug)]
struct RunningLease(Arc<Lease>);

impl Drop for RunningLease {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A row whose handler is running.
#[must_use = "a running row that is dropped is not settled"]
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) category: Category,
    pub(crate) attempts: u32,
    more_behind: bool,
    slot: Slot,
    lease: RunningLease,
}

impl Running {
    /// The window it must finish in.
    pub(crate) fn window(&self) -> LeaseWindow {
        self.lease.0.window
    }

    /// Fires when its lease has ended.
    pub(crate) fn lease_ended(&self) -> &CancellationToken {
        &self.lease.0.ended
    }

    /// Whether its handler was told to stop.
    pub(crate) fn was_cancelled(&self) -> bool {
        self.lease.0.cancel.is_cancelled()
    }

    /// Ends it.
    pub(crate) fn settle(self, verdict: Verdict) -> Settlement {
        Settlement {
            key: self.slot.key,
            epoch: self.slot.epoch,
            verdict,
            window: self.lease.0.window,
            more_behind: self.more_behind,
            slot: self.slot,
        }
    }
}

/// What shall become of one row, with the permit that returns once it is written and dropped.
#[must_use = "a settlement that is dropped is not written"]
#[derive(Debug)]
pub struct Settlement {
    key: WorkKey,
    epoch: ClaimEpoch,
    verdict: Verdict,
    window: LeaseWindow,
    more_behind: bool,
    #[expect(dead_code, reason = "held only to be dropped with the settlement")]
    slot: Slot,
}

impl Settlement {
    /// Which row.
    pub fn key(&self) -> WorkKey {
        self.key
    }

    /// The claim it settles.
    pub fn epoch(&self) -> ClaimEpoch {
        self.epoch
    }

    /// What shall become of it.
    pub fn verdict(&self) -> &Verdict {
        &self.verdict
    }

    /// The lease it was worked under.
    pub fn window(&self) -> LeaseWindow {
        self.window
    }

    /// As the store wants it.
    pub fn item(&self) -> SettleItem {
        SettleItem { key: self.key, epoch: self.epoch, verdict: self.verdict.clone() }
    }

    /// Whether writing it makes a row claimable at once: this one, or the next of its stream.
    pub fn frees_work(&self) -> bool {
        match &self.verdict {
            Verdict::Release => true,
            Verdict::Retry { after, .. } => after.is_zero(),
            Verdict::Complete | Verdict::DeadLetter { .. } => self.more_behind,
        }
    }
}
