//! The clock by which leases and trust are timed: it goes on while the machine sleeps.
//!
//! The rule: an instant taken here is the monotonic clock plus all the time the machine was suspended since this process first asked, and
//! it never goes back. The failure this prevents: a laptop or a virtual machine that wakes up after an hour and goes on with rows whose
//! leases ended long ago, because the monotonic clock of the operating system stood still meanwhile.
//!
//! Instants from here may only be compared with each other. Timers know nothing of them: to wait until one, wait for the difference, and
//! look again after a while, since a timer stands still too.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Differences below this are the time between two readings, not a suspend.
const JITTER: Duration = Duration::from_millis(1);

/// How old a reading of the suspended time may be, on the clock that stands still while the machine sleeps: a suspend is noticed this long
/// after the resume. Reading it for each row would cost more than all the rest that is done for its lease.
const FRESH: Duration = Duration::from_micros(100);

/// Now, suspended time included.
pub(crate) fn now() -> Instant {
    let now = tokio::time::Instant::now().into_std();
    now + suspended(now)
}

/// An instant of this clock as one of the runtime's timers. Right until the machine is suspended.
pub(crate) fn as_timer(instant: Instant) -> tokio::time::Instant {
    let (here, there) = (now(), tokio::time::Instant::now());
    match instant.checked_duration_since(here) {
        Some(ahead) => there + ahead,
        None => there.checked_sub(here - instant).unwrap_or(there),
    }
}

/// How long the machine was suspended since this process first asked.
fn suspended(now: Instant) -> Duration {
    static CLOCK: OnceLock<SuspendClock> = OnceLock::new();
    let clock = CLOCK.get_or_init(|| SuspendClock::new(now, asleep_since_boot()));
    let real = clock.at(now, asleep_since_boot);
    #[cfg(feature = "testing")]
    let real = real + fake::asleep();
    real
}

/// What the machine has slept, from readings that may be a little too small.
#[derive(Debug)]
struct SuspendClock {
    began: Instant,
    origin: Duration,
    /// When it was read last, in nanoseconds since it began.
    read_at: AtomicU64,
    /// The greatest so far, in nanoseconds: the clock must not go back.
    asleep: AtomicU64,
}

impl SuspendClock {
    fn new(now: Instant, asleep_since_boot: Duration) -> Self {
        Self { began: now, origin: asleep_since_boot, read_at: AtomicU64::new(0), asleep: AtomicU64::new(0) }
    }

    /// Reads it anew, unless it was read a moment ago.
    fn at(&self, now: Instant, asleep_since_boot: impl FnOnce() -> Duration) -> Duration {
        let age = now.saturating_duration_since(self.began).as_nanos() as u64;
        let last = self.read_at.load(Ordering::Relaxed);
        if age.saturating_sub(last) < FRESH.as_nanos() as u64 {
            return Duration::from_nanos(self.asleep.load(Ordering::Relaxed));
        }
        self.read_at.store(age, Ordering::Relaxed);
        self.read(asleep_since_boot())
    }

    fn read(&self, asleep_since_boot: Duration) -> Duration {
        let asleep = asleep_since_boot.saturating_sub(self.origin);
        let known = Duration::from_nanos(self.asleep.load(Ordering::Relaxed));
        if asleep <= known + JITTER {
            return known;
        }
        let nanos = u64::try_from(asleep.as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(self.asleep.fetch_max(nanos, Ordering::Relaxed).max(nanos))
    }
}

/// The clock that counts suspend minus the one that does not. Read in this order, so that a pause between the two makes it smaller.
#[cfg(target_os = "linux")]
fn asleep_since_boot() -> Duration {
    use rustix::time::{ClockId, clock_gettime};

    let read = |clock| Duration::try_from(clock_gettime(clock)).unwrap_or_default();
    let with = read(ClockId::Boottime);
    with.saturating_sub(read(ClockId::Monotonic))
}

/// Not known here: the monotonic clock alone decides.
#[cfg(not(target_os = "linux"))]
fn asleep_since_boot() -> Duration {
    Duration::ZERO
}

/// Suspends that only one thread believes in, for tests.
#[cfg(feature = "testing")]
pub(crate) mod fake {
    use std::cell::Cell;
    use std::time::Duration;

    thread_local! {
        static ASLEEP: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    }

    pub(super) fn asleep() -> Duration {
        ASLEEP.get()
    }

    /// The machine sleeps for this long, as far as this thread can see: no timer moves.
    pub(crate) fn suspend(time: Duration) {
        ASLEEP.set(ASLEEP.get() + time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn only_what_was_slept_since_the_start_counts() {
        let clock = SuspendClock::new(now(), SECOND * 500);
        assert_eq!(clock.read(SECOND * 500), Duration::ZERO);
        assert_eq!(clock.read(SECOND * 507), SECOND * 7);
    }

    #[test]
    fn a_reading_that_was_interrupted_neither_moves_the_clock_nor_turns_it_back() {
        let clock = SuspendClock::new(now(), SECOND);
        assert_eq!(clock.read(SECOND + JITTER), Duration::ZERO);
        assert_eq!(clock.read(SECOND * 3), SECOND * 2);
        assert_eq!(clock.read(SECOND * 2), SECOND * 2);
        assert_eq!(clock.read(Duration::ZERO), SECOND * 2);
    }

    #[test]
    fn it_is_not_read_again_for_a_moment() {
        let began = now();
        let clock = SuspendClock::new(began, SECOND);
        assert_eq!(clock.at(began + FRESH / 2, || unreachable!("read a moment ago")), Duration::ZERO);
        assert_eq!(clock.at(began + FRESH, || SECOND * 9), SECOND * 8);
        assert_eq!(clock.at(began + FRESH, || unreachable!("read just now")), SECOND * 8);
    }

    #[test]
    fn it_follows_the_runtimes_clock() {
        let (before, timer) = (now(), tokio::time::Instant::now());
        let after = now();
        assert!(before <= after && after - before < SECOND * 60);
        let there = as_timer(after + SECOND);
        assert!(there >= timer + SECOND && there <= tokio::time::Instant::now() + SECOND);
    }

    #[cfg(feature = "testing")]
    #[test]
    fn a_suspend_moves_it_and_no_timer() {
        crate::testing::in_virtual_time(async {
            let (before, timer) = (now(), tokio::time::Instant::now());
            fake::suspend(SECOND * 90);
            assert_eq!(now() - before, SECOND * 90);
            assert_eq!(tokio::time::Instant::now(), timer);
            assert_eq!(as_timer(before + SECOND * 100), timer + SECOND * 10);
            assert_eq!(as_timer(before), timer - SECOND * 90);
        });
    }
}
