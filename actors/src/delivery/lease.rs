//! The lease of one claimed row.
//!
//! The rule: the rows of a claim begin with one lease, and each has its own window from its first renewal on; a renewal is reserved, and
//! moves the window only when the database has confirmed it. A lease that is lost counts as ended from that moment. The failures this
//! prevents: a handler that is told to stop because another row of its claim was not renewed, one that goes on because a renewal was
//! merely sent, and an outage that burns the renewals of whatever runs.

use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::renewals::{ExtendError, Renewals};
use crate::lock;
use crate::policy::lease::{LeaseBudget, LeaseStep, LeaseTerms, LeaseWindow};
use crate::work::{ClaimEpoch, ClaimedWork, OrderKey, WorkKey};

/// What the leases of one claim have in common.
#[derive(Debug)]
pub struct Lease {
    sent_at: Instant,
    terms: LeaseTerms,
    renewals: Arc<Renewals>,
}

impl Lease {
    /// Of a claim sent at `sent_at`, by the engine's clock.
    pub fn new(sent_at: Instant, renewals: &Arc<Renewals>) -> Arc<Self> {
        Arc::new(Self { sent_at, terms: renewals.terms(), renewals: Arc::clone(renewals) })
    }

    /// When something is to be done about its rows first.
    pub(crate) fn first_step(&self) -> Instant {
        let terms = self.terms;
        match terms.step(terms.window(self.sent_at), terms.max_renewals > 0, self.sent_at) {
            LeaseStep::Wait { until } => until,
            LeaseStep::Renew { .. } | LeaseStep::Stop { .. } | LeaseStep::End => self.sent_at,
        }
    }
}

const STARTED: u8 = 1;
const FINISHED: u8 = 2;
const RETURNED: u8 = 4;
const DISPOSED: u8 = 8;
const CANCELLED: u8 = 16;
const ENDED: u8 = 32;
const QUEUED: u8 = 64;

/// What stands in `renewed` when the lease is lost.
const LOST: u64 = u64::MAX;

/// The lease of one row: shared by the row, by whoever watches deadlines, and by whoever renews.
///
/// Laid out so that what is touched for every row stands together: it goes from thread to thread with the row.
#[repr(C)]
pub struct LeaseHandle {
    state: AtomicU8,
    /// When the last confirmed renewal was sent, in nanoseconds since the claim was.
    renewed: AtomicU64,
    claim: Arc<Lease>,
    cancel: OnceLock<CancellationToken>,
    key: WorkKey,
    epoch: ClaimEpoch,
    seq: i64,
    order: Option<OrderKey>,
    budget: Mutex<LeaseBudget>,
    ended: Notify,
}

impl fmt::Debug for LeaseHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseHandle")
            .field("key", &self.key)
            .field("epoch", &self.epoch)
            .finish_non_exhaustive()
    }
}

/// What everybody may ask.
impl LeaseHandle {
    pub(super) fn new(work: &ClaimedWork, claim: &Arc<Lease>) -> Arc<Self> {
        Arc::new(Self {
            key: work.key,
            epoch: work.epoch,
            seq: work.seq,
            order: work.order_key(),
            claim: Arc::clone(claim),
            renewed: AtomicU64::new(0),
            state: AtomicU8::new(0),
            budget: Mutex::default(),
            cancel: OnceLock::new(),
            ended: Notify::new(),
        })
    }

    /// Which row.
    pub fn key(&self) -> WorkKey {
        self.key
    }

    /// Under which claim.
    pub fn epoch(&self) -> ClaimEpoch {
        self.epoch
    }

    /// The window it may be worked in, as the database has last confirmed it. Of a lost one nothing is left.
    pub fn window(&self) -> LeaseWindow {
        let sent_at = self.claim.sent_at;
        match self.renewed.load(Ordering::Acquire) {
            LOST => LeaseWindow::new(sent_at, Duration::ZERO, Duration::ZERO),
            renewed => self.claim.terms.window(sent_at + Duration::from_nanos(renewed)),
        }
    }

    /// Renewals confirmed so far.
    pub fn renewals_used(&self) -> u32 {
        lock(&self.budget).used()
    }

    /// Has it renewed now, at the cost of one of its renewals; its run with it. Returns its new deadline, by the runtime's clock.
    pub async fn extend(self: &Arc<Self>) -> Result<tokio::time::Instant, ExtendError> {
        self.renewals().extend(Arc::clone(self)).await
    }

    /// When its handler is told to stop unless it is renewed, by the runtime's clock.
    pub fn deadline(&self) -> tokio::time::Instant {
        crate::clock::as_timer(self.window().deadline())
    }
}

/// What becomes of the row.
impl LeaseHandle {
    fn is(&self, bits: u8) -> bool {
        self.state.load(Ordering::Acquire) & bits != 0
    }

    /// Marks it, and says what was marked before.
    fn mark(&self, bits: u8) -> u8 {
        self.state.fetch_or(bits, Ordering::AcqRel)
    }

    /// Its handler starts. Returns what will tell it to stop.
    pub(super) fn start(&self) -> CancellationToken {
        let cancel = self.cancel.get_or_init(CancellationToken::new).clone();
        // Whoever cancels marks first and looks for the token then: one of the two sees the other.
        if self.mark(STARTED) & CANCELLED != 0 {
            cancel.cancel();
        }
        cancel
    }

    /// Its handler has answered; the result is not written yet.
    pub(super) fn finish(&self) {
        self.mark(FINISHED);
    }

    /// It goes back without having been run.
    pub(super) fn give_back(&self) {
        self.mark(RETURNED);
    }

    /// Nobody has it in hand any more.
    pub(super) fn dispose(&self) {
        self.mark(DISPOSED);
    }

    /// Tells its handler to stop. Returns whether one was running that had not been told.
    pub(crate) fn cancel(&self) -> bool {
        let before = self.mark(CANCELLED);
        if let Some(cancel) = self.cancel.get() {
            cancel.cancel();
        }
        before & (STARTED | FINISHED | CANCELLED) == STARTED
    }

    /// Ends a handler that still waits: its result would be fenced.
    pub(crate) fn end(&self) {
        self.mark(ENDED);
        self.ended.notify_waiters();
    }

    /// Whether [`LeaseHandle::end`] was called.
    pub(crate) fn has_ended(&self) -> bool {
        self.is(ENDED)
    }

    /// Resolves when [`LeaseHandle::end`] was called.
    pub(crate) async fn ended(&self) {
        let ended = self.ended.notified();
        if !self.is(ENDED) {
            ended.await;
        }
    }

    /// It is somebody else's: tells its handler to stop, and counts as ended from now on.
    pub(super) fn lose(&self) {
        self.renewed.store(LOST, Ordering::Release);
        self.cancel();
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.renewed.load(Ordering::Acquire) == LOST
    }

    pub(crate) fn was_cancelled(&self) -> bool {
        self.is(CANCELLED)
    }

    /// Whether its handler runs, or its result is not written yet.
    pub(super) fn is_started(&self) -> bool {
        self.is(STARTED | FINISHED)
    }

    /// Whether its result is known.
    pub(super) fn is_settled(&self) -> bool {
        self.is(FINISHED | RETURNED | DISPOSED)
    }

    /// Whether its handler runs.
    pub(crate) fn is_running(&self) -> bool {
        self.state.load(Ordering::Acquire) & (STARTED | FINISHED | DISPOSED) == STARTED
    }

    /// Whether nothing is to be done about it any more.
    pub(crate) fn is_over(&self) -> bool {
        self.is(DISPOSED | RETURNED)
    }
}

/// Renewing it.
impl LeaseHandle {
    pub(crate) fn renewals(&self) -> &Arc<Renewals> {
        &self.claim.renewals
    }

    /// The claim that gave it.
    pub(crate) fn claim(&self) -> &Arc<Lease> {
        &self.claim
    }

    pub(crate) fn is_of(&self, claim: &Arc<Lease>) -> bool {
        Arc::ptr_eq(&self.claim, claim)
    }

    /// Names the run of the row: consecutive rows of an order key, leased together; or the row alone.
    pub(super) fn run_key(&self) -> (usize, Option<OrderKey>) {
        match &self.order {
            Some(order) => (Arc::as_ptr(&self.claim) as usize, Some(order.clone())),
            None => (std::ptr::from_ref(self) as usize, None),
        }
    }

    pub(super) fn is_ordered(&self) -> bool {
        self.order.is_some()
    }

    pub(super) fn seq(&self) -> i64 {
        self.seq
    }

    /// What is to be done about it now.
    pub(crate) fn step(&self, now: Instant) -> LeaseStep {
        let terms = self.claim.terms;
        let renewable = !self.was_cancelled() && !self.is_spent();
        terms.step(self.window(), renewable, now)
    }

    /// Whether it is to be renewed by now.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.claim.terms.is_due(self.window(), now)
    }

    /// Whether it was renewed as often as it may be.
    pub(super) fn is_spent(&self) -> bool {
        lock(&self.budget).used() >= self.claim.terms.max_renewals
    }

    /// Whether it wants to be renewed: its handler runs and was not told to stop, or its result is still to be written.
    pub(crate) fn wants_renewal(&self) -> bool {
        let state = self.state.load(Ordering::Acquire);
        state & STARTED != 0 && state & (RETURNED | DISPOSED | CANCELLED) == 0
    }

    /// Reserves a renewal. Refused at the cap, and when nobody has the row in hand any more.
    pub fn try_extend_deadline(self: &Arc<Self>) -> Result<Reservation, ExtendError> {
        if self.is_over() || self.is_lost() {
            return Err(ExtendError::Lost);
        }
        let cap = self.claim.terms.max_renewals;
        if lock(&self.budget).reserve(cap) {
            Ok(Reservation(Arc::clone(self)))
        } else {
            Err(ExtendError::AtCap { renewals: cap })
        }
    }

    /// The database has extended it by a renewal sent at `sent_at`.
    pub(super) fn extended(&self, sent_at: Instant) {
        let nanos = sent_at.saturating_duration_since(self.claim.sent_at).as_nanos();
        let nanos = u64::try_from(nanos).unwrap_or(LOST - 1).min(LOST - 1);
        // The greatest: a lost one stays lost.
        self.renewed.fetch_max(nanos, Ordering::AcqRel);
    }

    /// It stands in the queue. False: it did already.
    pub(super) fn enqueue(&self) -> bool {
        self.mark(QUEUED) & QUEUED == 0
    }

    /// It stands in the queue no more.
    pub(super) fn dequeue(&self) {
        self.state.fetch_and(!QUEUED, Ordering::AcqRel);
    }
}

/// A renewal that is reserved: confirmed, or given back when it is dropped.
#[must_use = "a reservation that is dropped is given back"]
#[derive(Debug)]
pub struct Reservation(Arc<LeaseHandle>);

impl Reservation {
    /// The database has confirmed the renewal, which was sent at `sent_at`.
    pub fn confirm(self, sent_at: Instant) {
        lock(&self.0.budget).confirm();
        self.0.extended(sent_at);
    }
}

impl Drop for Reservation {
    /// A confirmed one has become a renewal; what is given back here is its reservation only.
    fn drop(&mut self) {
        lock(&self.0.budget).give_back();
    }
}
