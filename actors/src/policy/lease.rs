//! When a lease ends, as seen from here, when to renew it, and how often.
//!
//! The rule: a lease is timed from the instant *before* the claim or the renewal was sent, so the local end is never later than the
//! database's; and it is renewed a limited number of times. The failures this prevents: a slow answer, after which a handler believes it
//! owns a row that somebody else already runs, and a hung handler that keeps its row for ever.

use std::time::{Duration, Instant};

use crate::options::Options;

/// What every lease of an instance is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTerms {
    /// How long a claim or a renewal leases a row.
    pub lease: Duration,
    /// How long before its end handlers are told to stop.
    pub grace: Duration,
    /// Renewals per claimed row at most; 0: none.
    pub max_renewals: u32,
}

impl LeaseTerms {
    /// As the options say.
    pub fn new(options: &Options) -> Self {
        Self {
            lease: options.claim.lease(),
            grace: Duration::from_secs(options.lease_renewal.lease_grace_seconds.into()),
            max_renewals: options.lease_renewal.max_renewals_per_work,
        }
    }

    /// The window of a claim or renewal sent at `sent_at`.
    pub fn window(&self, sent_at: Instant) -> LeaseWindow {
        LeaseWindow::new(sent_at, self.lease, self.grace)
    }

    /// How long after it was sent a lease is to be renewed: at 0.8 of its length. Where the grace leaves less than a ninth of the time until
    /// the deadline after that, there would be no time to try twice, and it is half of the time until the deadline.
    pub fn renew_after(&self) -> Duration {
        let usable = self.lease.saturating_sub(self.grace);
        let usual = self.lease * 4 / 5;
        if usual <= usable * 9 / 10 { usual } else { usable / 2 }
    }

    /// How long a handler may run at most: every renewal is asked for in time and answered at once.
    pub fn longest_run(&self) -> Duration {
        self.renew_after() * self.max_renewals + self.lease.saturating_sub(self.grace)
    }

    /// What is to be done about a row under this window at `now`.
    pub fn step(&self, window: LeaseWindow, renewable: bool, now: Instant) -> LeaseStep {
        if window.has_ended(now) {
            return LeaseStep::End;
        }
        if !window.may_start(now) {
            return LeaseStep::Stop { until: window.end() };
        }
        let renew_at = window.sent_at + self.renew_after();
        if !renewable {
            return LeaseStep::Wait { until: window.deadline() };
        }
        if now < renew_at {
            return LeaseStep::Wait { until: renew_at };
        }
        // Asked for again several times before the deadline, should the first request be lost.
        let pause = window.deadline().saturating_duration_since(renew_at) / 8;
        LeaseStep::Renew { again: (now + pause).min(window.deadline()) }
    }

    /// Whether a row under this window is due for renewal.
    pub fn is_due(&self, window: LeaseWindow, now: Instant) -> bool {
        now >= window.sent_at + self.renew_after()
    }
}

/// What is to be done about a leased row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseStep {
    /// Nothing until then.
    Wait {
        /// When to look again.
        until: Instant,
    },
    /// Ask for a renewal.
    Renew {
        /// When to ask again, if nothing has come of it.
        again: Instant,
    },
    /// The deadline has passed: tell the handler to stop.
    Stop {
        /// When the lease ends.
        until: Instant,
    },
    /// The lease has ended: drop the handler.
    End,
}

/// The renewals of one claimed row.
///
/// A renewal is reserved before it is sent and counts when the database has confirmed it; one that failed is given back. So an outage
/// burns none, and none is sent beyond the cap, however many are on their way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseBudget {
    used: u32,
    reserved: u32,
}

impl LeaseBudget {
    /// Reserves a renewal. False: there is none left.
    pub fn reserve(&mut self, cap: u32) -> bool {
        let free = !self.is_spent(cap);
        self.reserved += u32::from(free);
        free
    }

    /// The database has confirmed a renewal. Its reservation is still to be given back.
    pub fn confirm(&mut self) {
        self.used += 1;
    }

    /// A reservation is over, whatever came of it.
    pub fn give_back(&mut self) {
        self.reserved = self.reserved.saturating_sub(1);
    }

    /// Whether none is left.
    pub fn is_spent(&self, cap: u32) -> bool {
        self.used.saturating_add(self.reserved) >= cap
    }

    /// Renewals confirmed so far.
    pub fn used(&self) -> u32 {
        self.used
    }
}

/// The span in which a row may be worked on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseWindow {
    sent_at: Instant,
    deadline: Instant,
    end: Instant,
}

impl LeaseWindow {
    /// The window of a claim or renewal sent at `sent_at`. A grace longer than the lease leaves no time at all.
    pub fn new(sent_at: Instant, lease: Duration, grace: Duration) -> Self {
        Self { sent_at, deadline: sent_at + lease.saturating_sub(grace), end: sent_at + lease }
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

    fn terms() -> LeaseTerms {
        LeaseTerms::new(&Options::default())
    }

    #[test]
    fn the_defaults_let_a_handler_run_for_28_and_a_half_minutes() {
        assert_eq!(terms().renew_after(), Duration::from_mins(4));
        assert_eq!(terms().longest_run(), Duration::from_secs(28 * 60 + 30));
        let never = LeaseTerms { max_renewals: 0, ..terms() };
        assert_eq!(never.longest_run(), Duration::from_secs(270));
    }

    #[test]
    fn there_is_always_time_to_ask_twice_before_the_deadline() {
        for (lease, grace, millis) in
            [(300, 30, 240_000), (2, 0, 1_600), (2, 1, 500), (30, 5, 12_500), (10, 1, 8_000), (4, 4, 0)]
        {
            let terms = LeaseTerms {
                lease: Duration::from_secs(lease),
                grace: Duration::from_secs(grace),
                max_renewals: 6,
            };
            assert_eq!(terms.renew_after().as_millis(), millis, "{lease} s with {grace} s of grace");
        }
    }

    #[test]
    fn a_lease_is_left_alone_then_renewed_then_stopped_then_ended() {
        let (terms, sent_at) = (terms(), some_instant());
        let window = terms.window(sent_at);
        let at = |seconds: u64| sent_at + Duration::from_secs(seconds);
        assert_eq!(terms.step(window, true, at(0)), LeaseStep::Wait { until: at(240) });
        assert_eq!(terms.step(window, false, at(240)), LeaseStep::Wait { until: at(270) });
        let again = at(240) + Duration::from_millis(3_750);
        assert_eq!(terms.step(window, true, at(240)), LeaseStep::Renew { again });
        assert_eq!(terms.step(window, true, at(269)), LeaseStep::Renew { again: at(270) });
        assert_eq!(terms.step(window, true, at(270)), LeaseStep::Stop { until: at(300) });
        assert_eq!(terms.step(window, true, at(300)), LeaseStep::End);
        assert!(!terms.is_due(window, at(239)) && terms.is_due(window, at(240)));
    }

    #[test]
    fn renewals_count_when_they_are_confirmed_and_none_is_sent_beyond_the_cap() {
        let mut budget = LeaseBudget::default();
        assert!(budget.reserve(2) && budget.reserve(2) && !budget.reserve(2));
        budget.give_back();
        assert_eq!(budget.used(), 0);
        assert!(budget.reserve(2));
        for _ in 0..2 {
            budget.confirm();
            budget.give_back();
        }
        assert_eq!((budget.used(), budget.is_spent(2), budget.is_spent(3)), (2, true, false));
        assert!(!budget.reserve(2) && !LeaseBudget::default().reserve(0));
    }
}
