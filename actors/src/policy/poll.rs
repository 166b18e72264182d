//! How long to wait before the next claim.
//!
//! The rule: exactly one wait per cycle, computed from the gate and the number of empty polls in a row. The failures this prevents: a
//! broken listener that silently stretches latency, and an idle instance that polls the database at full speed.

use std::time::Duration;

use crate::instance::Gate;
use crate::options::ClaimOptions;

/// Doublings after which the wait grows no further, cap or not.
const MAX_DOUBLINGS: u32 = 10;

/// What to do until the next claim. A signal ends either wait at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Wait this long, or until a signal.
    For(Duration),
    /// Wait for a signal, or for the next known due time; no timer of its own.
    UntilSignal,
}

/// The adaptive poll interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollCadence {
    /// Tight base in milliseconds.
    pub base_milliseconds: u64,
    /// Cap of the backoff in milliseconds; at or below the effective base it switches the backoff off.
    pub max_milliseconds: u64,
    /// Base while the gate is available, used only when greater than the tight base.
    pub healthy_milliseconds: Option<u64>,
    /// Whether to poll at all while the gate is available.
    pub safety_net: bool,
}

impl PollCadence {
    /// The cadence these options describe.
    pub fn new(options: &ClaimOptions) -> Self {
        Self {
            base_milliseconds: options.polling_interval_milliseconds,
            max_milliseconds: options.polling_max_interval_milliseconds,
            healthy_milliseconds: options.notify_healthy_polling_interval_milliseconds,
            safety_net: options.enable_safety_net_poll,
        }
    }

    /// The wait after `empty_polls` polls in a row that brought no work. An error counts as an empty poll.
    pub fn wait(&self, gate: Gate, empty_polls: u32) -> Wait {
        match gate {
            Gate::Unavailable => Wait::For(self.tight()),
            Gate::Available if !self.safety_net => Wait::UntilSignal,
            Gate::Available | Gate::Unconfigured => Wait::For(self.backoff(gate, empty_polls)),
        }
    }

    /// The tight base.
    pub fn tight(&self) -> Duration {
        Duration::from_millis(self.base_milliseconds)
    }

    /// The base while the gate is available.
    pub fn healthy(&self) -> Duration {
        Duration::from_millis(self.effective_base(Gate::Available))
    }

    /// The backoff as if the safety net were on: for when the next due time could not be learnt.
    pub fn backoff(&self, gate: Gate, empty_polls: u32) -> Duration {
        let base = self.effective_base(gate);
        if self.max_milliseconds <= base {
            return Duration::from_millis(base);
        }
        let doublings = empty_polls.saturating_sub(1).min(MAX_DOUBLINGS);
        Duration::from_millis(base.saturating_mul(1 << doublings).min(self.max_milliseconds))
    }

    fn effective_base(&self, gate: Gate) -> u64 {
        match (gate, self.healthy_milliseconds) {
            (Gate::Available, Some(healthy)) => healthy.max(self.base_milliseconds),
            _ => self.base_milliseconds,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn defaults() -> PollCadence {
        PollCadence::new(&ClaimOptions::default())
    }

    fn wait_ms(cadence: PollCadence, gate: Gate, empty_polls: u32) -> u64 {
        match cadence.wait(gate, empty_polls) {
            Wait::For(wait) => wait.as_millis() as u64,
            Wait::UntilSignal => panic!("expected a bounded wait"),
        }
    }

    #[test]
    fn the_table_of_the_seed_holds() {
        let table = [
            (0, 250),
            (1, 250),
            (2, 500),
            (3, 1_000),
            (4, 2_000),
            (5, 4_000),
            (6, 8_000),
            (7, 10_000),
            (8, 10_000),
            (1_000, 10_000),
        ];
        for (empty_polls, expected) in table {
            assert_eq!(
                wait_ms(defaults(), Gate::Unconfigured, empty_polls),
                expected,
                "streak {empty_polls}"
            );
        }
    }

    #[test]
    fn an_unavailable_gate_pins_to_the_tight_base_at_any_streak() {
        for empty_polls in [0, 1, 7, 1_000, u32::MAX] {
            assert_eq!(wait_ms(defaults(), Gate::Unavailable, empty_polls), 250);
        }
        let only_signals = PollCadence { safety_net: false, ..defaults() };
        assert_eq!(wait_ms(only_signals, Gate::Unavailable, 9), 250);
    }

    #[test]
    fn a_healthy_gate_starts_the_backoff_at_the_relaxed_base() {
        for (empty_polls, expected) in [(0, 5_000), (1, 5_000), (2, 10_000), (3, 10_000), (u32::MAX, 10_000)]
        {
            assert_eq!(wait_ms(defaults(), Gate::Available, empty_polls), expected);
        }
    }

    #[test]
    fn the_healthy_base_counts_only_when_greater_than_the_tight_one() {
        let cadence = PollCadence { healthy_milliseconds: Some(100), ..defaults() };
        assert_eq!(wait_ms(cadence, Gate::Available, 1), 250);
    }

    #[test]
    fn without_a_healthy_base_polling_stays_tight() {
        let cadence = PollCadence { healthy_milliseconds: None, ..defaults() };
        assert_eq!(wait_ms(cadence, Gate::Available, 1), 250);
        assert_eq!(wait_ms(cadence, Gate::Available, 2), 500);
    }

    #[test]
    fn a_cap_at_or_below_the_base_switches_the_backoff_off() {
        for max_milliseconds in [0, 1, 250] {
            let cadence = PollCadence { max_milliseconds, ..defaults() };
            assert_eq!(wait_ms(cadence, Gate::Unconfigured, 9), 250);
        }
        let healthy_above_the_cap = PollCadence { healthy_milliseconds: Some(20_000), ..defaults() };
        assert_eq!(wait_ms(healthy_above_the_cap, Gate::Available, 9), 20_000);
    }

    #[test]
    fn without_the_safety_net_a_healthy_gate_waits_for_a_signal() {
        let cadence = PollCadence { safety_net: false, ..defaults() };
        assert_eq!(cadence.wait(Gate::Available, 0), Wait::UntilSignal);
        assert_eq!(cadence.wait(Gate::Available, u32::MAX), Wait::UntilSignal);
        assert_eq!(wait_ms(cadence, Gate::Unconfigured, 2), 500);
    }

    #[test]
    fn no_streak_and_no_base_overflows() {
        for base_milliseconds in [1, 250, u64::MAX / 2, u64::MAX] {
            for max_milliseconds in [0, 10_000, u64::MAX] {
                let cadence = PollCadence { base_milliseconds, max_milliseconds, ..defaults() };
                for empty_polls in [0, 1, 2, 11, 12, 64, u32::MAX - 1, u32::MAX] {
                    for gate in [Gate::Unconfigured, Gate::Available, Gate::Unavailable] {
                        let wait = wait_ms(cadence, gate, empty_polls);
                        let bound = max_milliseconds.max(base_milliseconds).max(5_000);
                        assert!((base_milliseconds..=bound).contains(&wait));
                    }
                }
            }
        }
    }

    #[test]
    fn the_wait_doubles_ten_times_at_most() {
        let cadence = PollCadence { base_milliseconds: 1, max_milliseconds: u64::MAX, ..defaults() };
        assert_eq!(wait_ms(cadence, Gate::Unconfigured, 11), 1_024);
        assert_eq!(wait_ms(cadence, Gate::Unconfigured, u32::MAX), 1_024);
    }
}
