//! When a lease ends, as seen from here.
//!
//! The rule: the lease is timed from the instant *before* the claim was sent, so the local end is never later than the database's. The
//! failure this prevents: a slow claim whose answer took seconds, after which a handler believes it owns a row that somebody else
//! already runs.

use std::time::{Duration, Instant};

/// The span in which rows of one claim may be worked on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseWindow {
    deadline: Instant,
    end: Instant,
}

impl LeaseWindow {
    /// The window of a claim sent at `sent_at`. A grace longer than the lease leaves no time at all.
    pub fn new(sent_at: Instant, lease: Duration, grace: Duration) -> Self {
        Self { deadline: sent_at + lease.saturating_sub(grace), end: sent_at + lease }
    }

    /// When handlers are told to stop, and after which no row is started.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The earliest instant at which the database may hand the row to somebody else.
    pub fn end(&self) -> Instant {
        self.end
    }

    /// Whether a row may still be started.
    pub fn may_start(&self, now: Instant) -> bool {
        now < self.deadline
    }

    /// Whether the lease has run out.
    pub fn has_ended(&self, now: Instant) -> bool {
        now >= self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Some instant: taken from tokio's clock, because the other one is banned.
    fn some_instant() -> Instant {
        tokio::time::Instant::now().into_std()
    }

    #[test]
    fn a_slow_claim_does_not_lengthen_the_lease() {
        let sent_at = some_instant();
        let window = LeaseWindow::new(sent_at, Duration::from_mins(5), Duration::from_secs(30));
        assert_eq!(window.deadline(), sent_at + Duration::from_secs(270));
        assert_eq!(window.end(), sent_at + Duration::from_mins(5));
        let answer_came_late = sent_at + Duration::from_secs(271);
        assert!(!window.may_start(answer_came_late));
        assert!(!window.has_ended(answer_came_late));
    }

    #[test]
    fn a_row_may_be_started_until_just_before_the_deadline() {
        let sent_at = some_instant();
        let window = LeaseWindow::new(sent_at, Duration::from_secs(10), Duration::from_secs(4));
        assert!(window.may_start(window.deadline().checked_sub(Duration::from_nanos(1)).expect("in range")));
        assert!(!window.may_start(window.deadline()));
        assert!(window.has_ended(window.end()));
    }

    #[test]
    fn a_grace_longer_than_the_lease_leaves_no_time() {
        let sent_at = some_instant();
        let window = LeaseWindow::new(sent_at, Duration::from_secs(1), Duration::from_secs(4));
        assert_eq!(window.deadline(), sent_at);
        assert!(!window.may_start(sent_at));
    }
}
