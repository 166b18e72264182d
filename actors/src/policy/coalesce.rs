//! When to write what has gathered.
//!
//! The rule: the first item opens a window; the batch goes at the end of the window, at the threshold (tested from the first item on),
//! or at the size. The failures this prevents: one round trip per row, and a lone row that waits for company that never comes.

use std::time::{Duration, Instant};

use crate::options::{LeaseRenewalOptions, SettleOptions};

/// The bounds of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoalesceLimits {
    /// Items per batch at most; 0 counts as 1.
    pub size: usize,
    /// How long the first item waits for company.
    pub window: Duration,
    /// Items that end the wait at once; 0 counts as 1.
    pub threshold: usize,
}

impl CoalesceLimits {
    /// The limits of renewal.
    pub fn renew(options: &LeaseRenewalOptions) -> Self {
        Self {
            size: options.max_batch_size.max(1),
            window: Duration::from_millis(options.coalesce_window_milliseconds),
            threshold: options.immediate_flush_threshold.max(1),
        }
    }

    /// The limits of settlement.
    pub fn settle(options: &SettleOptions) -> Self {
        Self {
            size: options.max_batch_size.max(1),
            window: Duration::from_millis(options.coalesce_window_milliseconds),
            threshold: options.immediate_flush_threshold.max(1),
        }
    }
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Nothing waits.
    Rest,
    /// Look again at this instant, unless more comes before.
    WaitUntil(Instant),
    /// Write this many of the oldest items now.
    Flush(usize),
}

/// Counts what waits and decides when it goes. Holds no items itself.
#[derive(Clone, Copy, Debug)]
pub struct Coalescer {
    limits: CoalesceLimits,
    waiting: usize,
    opened_at: Option<Instant>,
}

impl Coalescer {
    /// An empty one.
    pub fn new(limits: CoalesceLimits) -> Self {
        Self { limits, waiting: 0, opened_at: None }
    }

    /// How many items wait.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// `items` more have come.
    pub fn add(&mut self, items: usize, now: Instant) {
        if items > 0 {
            self.waiting = self.waiting.saturating_add(items);
            self.opened_at.get_or_insert(now);
        }
    }

    /// What to do at `now`.
    pub fn decide(&self, now: Instant) -> Decision {
        let Some(opened_at) = self.opened_at else { return Decision::Rest };
        let closes_at = opened_at + self.limits.window;
        if self.waiting >= self.limits.threshold || self.waiting >= self.limits.size || now >= closes_at {
            self.flush_now()
        } else {
            Decision::WaitUntil(closes_at)
        }
    }

    /// What to do when nothing more is worth waiting for.
    pub fn flush_now(&self) -> Decision {
        match self.waiting.min(self.limits.size) {
            0 => Decision::Rest,
            items => Decision::Flush(items),
        }
    }

    /// The `items` oldest were taken. What stays behind has waited as long as they did, so its window is not opened again.
    pub fn taken(&mut self, items: usize) {
        self.waiting = self.waiting.saturating_sub(items);
        if self.waiting == 0 {
            self.opened_at = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> CoalesceLimits {
        CoalesceLimits { size: 500, window: Duration::from_millis(10), threshold: 250 }
    }

    fn start() -> Instant {
        tokio::time::Instant::now().into_std()
    }

    #[test]
    fn one_item_goes_alone_at_the_end_of_the_window() {
        let now = start();
        let mut coalescer = Coalescer::new(limits());
        assert_eq!(coalescer.decide(now), Decision::Rest);
        coalescer.add(1, now);
        assert_eq!(coalescer.decide(now), Decision::WaitUntil(now + Duration::from_millis(10)));
        assert_eq!(coalescer.decide(now + Duration::from_millis(10)), Decision::Flush(1));
    }

    #[test]
    fn later_items_do_not_move_the_end_of_the_window() {
        let now = start();
        let mut coalescer = Coalescer::new(limits());
        coalescer.add(1, now);
        coalescer.add(1, now + Duration::from_millis(9));
        assert_eq!(coalescer.decide(now + Duration::from_millis(10)), Decision::Flush(2));
    }

    #[test]
    fn the_threshold_is_tested_from_the_first_item_on() {
        let now = start();
        let mut coalescer = Coalescer::new(CoalesceLimits { threshold: 1, ..limits() });
        coalescer.add(1, now);
        assert_eq!(coalescer.decide(now), Decision::Flush(1));
    }

    #[test]
    fn a_threshold_of_zero_counts_as_one() {
        let options = SettleOptions { immediate_flush_threshold: 0, ..SettleOptions::default() };
        assert_eq!(CoalesceLimits::settle(&options).threshold, 1);
    }

    #[test]
    fn no_batch_exceeds_the_size_and_the_rest_goes_at_once() {
        let now = start();
        let mut coalescer = Coalescer::new(CoalesceLimits { size: 3, threshold: 10, ..limits() });
        coalescer.add(8, now);
        for (batch, left) in [(3, 5), (3, 2)] {
            assert_eq!(coalescer.decide(now), Decision::Flush(batch));
            coalescer.taken(batch);
            assert_eq!(coalescer.waiting(), left);
        }
        assert_eq!(coalescer.decide(now + Duration::from_millis(10)), Decision::Flush(2));
        coalescer.taken(2);
        assert_eq!(coalescer.decide(now + Duration::from_secs(1)), Decision::Rest);
    }

    #[test]
    fn a_window_of_zero_waits_for_nobody() {
        let now = start();
        let mut coalescer = Coalescer::new(CoalesceLimits { window: Duration::ZERO, ..limits() });
        coalescer.add(1, now);
        assert_eq!(coalescer.decide(now), Decision::Flush(1));
    }

    #[test]
    fn what_waits_never_wraps() {
        let now = start();
        let mut coalescer = Coalescer::new(limits());
        coalescer.add(9_999, now);
        coalescer.add(usize::MAX, now);
        assert_eq!(coalescer.waiting(), usize::MAX);
        coalescer.taken(usize::MAX);
        assert_eq!(coalescer.waiting(), 0);
    }
}
