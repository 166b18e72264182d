//! The leases under which rows may still be running.
//!
//! The rule: a lease is entered before its first row can start, and stays until its rows are done or it has ended, whoever watches. The
//! failure this prevents: a handler that nobody tells to stop, because the actor that knew its deadline has died.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::delivery::Lease;
use crate::lock;

/// Leases to be watched.
#[derive(Debug, Default)]
pub(crate) struct LeaseBook(Mutex<Pages>);

#[derive(Debug, Default)]
struct Pages {
    /// By deadline.
    leases: VecDeque<Arc<Lease>>,
    /// Past their deadline, by end: their handlers were told to stop.
    ending: VecDeque<Arc<Lease>>,
}

impl LeaseBook {
    /// Watches this lease from now on.
    pub(crate) fn enter(&self, lease: Arc<Lease>) {
        let pages = &mut *lock(&self.0);
        if pages.leases.len() % 64 == 63 {
            pages.leases.retain(is_in_use);
        }
        let deadline = lease.window().deadline();
        let at = pages.leases.partition_point(|other| other.window().deadline() <= deadline);
        pages.leases.insert(at, lease);
    }

    /// When the next deadline or end is.
    pub(crate) fn next(&self) -> Option<Instant> {
        let pages = &mut *lock(&self.0);
        for leases in [&mut pages.leases, &mut pages.ending] {
            while leases.front().is_some_and(|lease| !is_in_use(lease)) {
                leases.pop_front();
            }
        }
        let deadline = pages.leases.front().map(|lease| lease.window().deadline());
        let end = pages.ending.front().map(|lease| lease.window().end());
        deadline.into_iter().chain(end).min()
    }

    /// Tells handlers to stop whose lease is about to end. Returns how many were running.
    pub(crate) fn enforce_deadlines(&self, now: Instant) -> u32 {
        self.cancel_while(|lease| lease.window().deadline() <= now)
    }

    /// Tells all handlers to stop. Returns how many were running.
    pub(crate) fn cancel_all(&self) -> u32 {
        self.cancel_while(|_| true)
    }

    /// Ends handlers that went on waiting until their lease had ended, so that they hold neither a permit nor their lane for ever.
    pub(crate) fn end_leases(&self, now: Instant) {
        while let Some(lease) = self.ended(now) {
            lease.end();
        }
    }

    fn ended(&self, now: Instant) -> Option<Arc<Lease>> {
        let pages = &mut *lock(&self.0);
        let ended = pages.ending.front().is_some_and(|lease| lease.window().has_ended(now));
        if ended { pages.ending.pop_front() } else { None }
    }

    fn cancel_while(&self, due: impl Fn(&Lease) -> bool) -> u32 {
        let mut running = 0;
        while let Some(lease) = self.turn_over(&due) {
            running += lease.cancel();
        }
        running
    }

    /// Moves a lease from the one page to the other. Before it is cancelled, which wakes foreign code: should that panic, the lease is
    /// still watched.
    fn turn_over(&self, due: impl Fn(&Lease) -> bool) -> Option<Arc<Lease>> {
        let pages = &mut *lock(&self.0);
        if !pages.leases.front().is_some_and(|lease| due(lease)) {
            return None;
        }
        let lease = pages.leases.pop_front()?;
        let end = lease.window().end();
        let at = pages.ending.partition_point(|other| other.window().end() <= end);
        pages.ending.insert(at, Arc::clone(&lease));
        Some(lease)
    }
}

/// Nobody else holds a lease whose rows are all done.
fn is_in_use(lease: &Arc<Lease>) -> bool {
    Arc::strong_count(lease) > 1
}
