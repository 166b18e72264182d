//! How often to beat.
//!
//! The rule: slowly only while the session alive-lock is held and may count; fast in every other case. The failure this prevents: an
//! instance that beats slowly although nothing else proves it alive, and is evicted.

use std::time::Duration;

use crate::instance::AliveLock;
use crate::options::{HeartbeatOptions, LivenessSourceMode};

/// The adaptive cadence of the heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BeatCadence {
    fast: Duration,
    slow: Duration,
    mode: LivenessSourceMode,
}

impl BeatCadence {
    /// The cadence these options describe.
    pub fn new(options: &HeartbeatOptions) -> Self {
        Self {
            fast: Duration::from_secs(options.interval_seconds.max(1).into()),
            slow: Duration::from_secs(options.slow_interval_seconds.max(1).into()),
            mode: options.liveness_source_mode,
        }
    }

    /// The time between two beats in this state of the lock.
    pub fn interval(&self, lock: AliveLock) -> Duration {
        if self.declares_lock(lock) { self.slow } else { self.fast }
    }

    /// Whether peers shall count the lock as a sign of life.
    pub fn declares_lock(&self, lock: AliveLock) -> bool {
        self.mode == LivenessSourceMode::AdvisoryLockWhenAvailable && lock == AliveLock::Held
    }

    /// Whether a change between these two states must be declared at once.
    pub fn must_declare(&self, before: AliveLock, after: AliveLock) -> bool {
        self.declares_lock(before) != self.declares_lock(after)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cadence(mode: LivenessSourceMode) -> BeatCadence {
        BeatCadence::new(&HeartbeatOptions { liveness_source_mode: mode, ..HeartbeatOptions::default() })
    }

    #[test]
    fn the_beat_is_slow_only_while_the_lock_is_held_and_may_count() {
        let when_available = cadence(LivenessSourceMode::AdvisoryLockWhenAvailable);
        let table_only = cadence(LivenessSourceMode::HeartbeatTableOnly);
        let seconds = |cadence: BeatCadence, lock| cadence.interval(lock).as_secs();
        assert_eq!(seconds(when_available, AliveLock::Held), 60);
        assert_eq!(seconds(when_available, AliveLock::NotHeld), 30);
        assert_eq!(seconds(when_available, AliveLock::NoSource), 30);
        for lock in [AliveLock::Held, AliveLock::NotHeld, AliveLock::NoSource] {
            assert_eq!(seconds(table_only, lock), 30);
            assert!(!table_only.declares_lock(lock));
        }
    }

    #[test]
    fn only_a_change_that_peers_must_know_is_declared_at_once() {
        let when_available = cadence(LivenessSourceMode::AdvisoryLockWhenAvailable);
        assert!(when_available.must_declare(AliveLock::Held, AliveLock::NotHeld));
        assert!(when_available.must_declare(AliveLock::NoSource, AliveLock::Held));
        assert!(!when_available.must_declare(AliveLock::NoSource, AliveLock::NotHeld));
        let table_only = cadence(LivenessSourceMode::HeartbeatTableOnly);
        assert!(!table_only.must_declare(AliveLock::Held, AliveLock::NotHeld));
    }
}
