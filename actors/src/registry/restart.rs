//! When a dead child comes back: pure decisions, values in, verdict out.
//!
//! The rule: deaths are counted in a sliding window that no good start resets; the pause grows with deaths in a row and shrinks only after
//! a healthy while; a limit that cannot be reached is refused. The failures this prevents: a crash loop that eats a core, one that is
//! never noticed because every restart looks like a success, and a ceiling on the pause that keeps the window from ever filling.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::Exit;

/// Which ends of a child call for another one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Restart {
    /// Any end that nobody asked for. The default.
    #[default]
    Permanent,
    /// Only a bad end: a panic, a start that failed or took too long, a stuck or ended thread. A child that stops by itself has finished.
    Transient,
    /// None: the child runs once.
    Temporary,
}

impl Restart {
    pub(super) fn applies(self, exit: &Exit) -> bool {
        match self {
            Self::Permanent => true,
            Self::Transient => exit.is_failure(),
            Self::Temporary => false,
        }
    }
}

/// Who else is restarted with a child that died.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Strategy {
    /// Nobody. The default.
    #[default]
    OneForOne,
    /// The children that started after it: they may keep something it told them.
    RestForOne,
    /// Every child of the group.
    OneForAll,
}

/// How many restarts of one child are too many.
///
/// Default: more than 10 in 60 s. Each child has its own count, so one that loops does not use up the patience with its siblings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Intensity {
    /// Restarts allowed inside the window. 0: the first death is the last.
    pub max_restarts: u32,
    /// Length of the sliding window. A longer one finds slower loops.
    pub within: Duration,
}

impl Default for Intensity {
    fn default() -> Self {
        Self { max_restarts: 10, within: Duration::from_mins(1) }
    }
}

/// How long a dead child waits for its next life.
///
/// Default: the first restart at once, then 100 ms doubling to 5 s, each ±20 %, and all over again after 60 s of health.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backoff {
    /// Pause before the second restart in a row. Zero: no pause ever.
    pub first: Duration,
    /// Longest pause. A longer one spares the machine and lets fewer loops be noticed; see [`InvalidPolicy`].
    pub max: Duration,
    /// Largest part by which a pause is made longer or shorter, from 0 to 1, so that children that died together do not return together.
    pub jitter: f64,
    /// How long a child has to be ready before its next restart is at once again.
    pub healthy_after: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self {
            first: Duration::from_millis(100),
            max: Duration::from_secs(5),
            jitter: 0.2,
            healthy_after: Duration::from_mins(1),
        }
    }
}

impl Backoff {
    /// The pause before restart number `in_a_row` (from 0), without jitter.
    fn pause(&self, in_a_row: u32) -> Duration {
        match in_a_row {
            0 => Duration::ZERO,
            n => self.first.saturating_mul(1_u32 << (n - 1).min(20)).min(self.max),
        }
    }
}

/// A policy that cannot work.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum InvalidPolicy {
    /// The window ends before the allowed restarts can happen, so a crash loop would go on for ever.
    #[error(
        "{max_restarts} restarts take up to {needed_ms} ms with these pauses, so they never happen within {window_ms} ms: \
         allow fewer restarts, shorten the pauses, or widen the window"
    )]
    Unreachable {
        /// Restarts allowed.
        max_restarts: u32,
        /// How long they take at least, in milliseconds, when every pause is at its longest.
        needed_ms: u128,
        /// The window, in milliseconds.
        window_ms: u128,
    },
    /// The jitter is not a part of a pause.
    #[error("the jitter must lie between 0 and 1, not at {0}")]
    Jitter(f64),
}

/// Whether a child that dies at once can exceed the limit.
pub(super) fn check(intensity: &Intensity, backoff: &Backoff) -> Result<(), InvalidPolicy> {
    if !(0.0..=1.0).contains(&backoff.jitter) {
        return Err(InvalidPolicy::Jitter(backoff.jitter));
    }
    let pauses = (0..intensity.max_restarts).try_fold(Duration::ZERO, |sum, n| {
        sum.checked_add(backoff.pause(n)).filter(|sum| *sum < intensity.within)
    });
    let needed = pauses.map(|sum| sum.mul_f64(1.0 + backoff.jitter));
    match needed {
        Some(needed) if needed < intensity.within || intensity.max_restarts == 0 => Ok(()),
        needed => Err(InvalidPolicy::Unreachable {
            max_restarts: intensity.max_restarts,
            needed_ms: needed.map_or(intensity.within.as_millis(), |needed| needed.as_millis()),
            window_ms: intensity.within.as_millis(),
        }),
    }
}

/// What becomes of a child that died.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Verdict {
    /// It comes back after this pause.
    Again(Duration),
    /// It died too often: this many restarts were tried inside the window.
    GiveUp(u32),
}

/// The deaths of one child.
#[derive(Debug, Default)]
pub(super) struct Record {
    restarts: VecDeque<Instant>,
    in_a_row: u32,
    ready_since: Option<Instant>,
}

impl Record {
    /// It became ready.
    pub(super) fn ready(&mut self, now: Instant) {
        self.ready_since = Some(now);
    }

    /// It died. `lot` between -1 and 1 decides the jitter.
    pub(super) fn died(
        &mut self,
        now: Instant,
        intensity: &Intensity,
        backoff: &Backoff,
        lot: f64,
    ) -> Verdict {
        let out_of_window = |at: &Instant| now.saturating_duration_since(*at) >= intensity.within;
        while self.restarts.front().is_some_and(out_of_window) {
            self.restarts.pop_front();
        }
        let ready_since = self.ready_since.take();
        if self.restarts.len() >= intensity.max_restarts as usize {
            return Verdict::GiveUp(self.restarts.len() as u32);
        }
        if ready_since.is_some_and(|since| now.saturating_duration_since(since) >= backoff.healthy_after) {
            self.in_a_row = 0;
        }
        let pause = backoff.pause(self.in_a_row).mul_f64(1.0 + backoff.jitter * lot.clamp(-1.0, 1.0));
        self.in_a_row = self.in_a_row.saturating_add(1);
        self.restarts.push_back(now);
        Verdict::Again(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How an actor that lives `life` after each start ends: after how many restarts and how long, or never.
    fn simulate(
        life: Duration,
        intensity: &Intensity,
        backoff: &Backoff,
        lot: f64,
    ) -> Option<(u32, Duration)> {
        let birth = tokio::time::Instant::now().into_std();
        let (mut now, mut record) = (birth, Record::default());
        for _ in 0..1_000 {
            record.ready(now);
            now += life;
            match record.died(now, intensity, backoff, lot) {
                Verdict::Again(pause) => now += pause,
                Verdict::GiveUp(restarts) => return Some((restarts, now - birth)),
            }
        }
        None
    }

    #[test]
    fn the_first_restart_is_at_once_and_the_pauses_double_to_their_ceiling() {
        let (intensity, backoff) =
            (Intensity { max_restarts: 100, ..Intensity::default() }, Backoff::default());
        let (now, mut record) = (tokio::time::Instant::now().into_std(), Record::default());
        let pauses: Vec<u128> = (0..9)
            .map(|_| match record.died(now, &intensity, &backoff, 0.0) {
                Verdict::Again(pause) => pause.as_millis(),
                Verdict::GiveUp(_) => panic!("within the limit"),
            })
            .collect();
        assert_eq!(pauses, [0, 100, 200, 400, 800, 1_600, 3_200, 5_000, 5_000]);
    }

    #[test]
    fn a_loop_of_any_life_up_to_three_seconds_ends_at_the_limit_whatever_the_lot() {
        for life in [0, 1, 50, 1_000, 2_000, 3_000].map(Duration::from_millis) {
            for lot in [-1.0, 0.0, 1.0] {
                let end = simulate(life, &Intensity::default(), &Backoff::default(), lot);
                assert_eq!(end.map(|(restarts, _)| restarts), Some(10), "a life of {life:?}");
            }
        }
    }

    #[test]
    fn good_starts_do_not_reset_the_window_and_rare_deaths_do_not_fill_it() {
        let tight = Intensity { max_restarts: 3, within: Duration::from_secs(30) };
        let end = simulate(Duration::from_secs(1), &tight, &Backoff::default(), 0.0);
        assert!(end.is_some_and(|(restarts, after)| restarts == 3 && after < Duration::from_secs(10)));
        let rare = simulate(Duration::from_mins(2), &Intensity::default(), &Backoff::default(), 0.0);
        assert_eq!(rare, None);
    }

    #[test]
    fn a_healthy_while_makes_the_next_restart_immediate_again() {
        let (intensity, backoff) = (Intensity::default(), Backoff::default());
        let (mut now, mut record) = (tokio::time::Instant::now().into_std(), Record::default());
        for _ in 0..3 {
            record.died(now, &intensity, &backoff, 0.0);
        }
        record.ready(now);
        now += Duration::from_secs(59);
        assert_eq!(record.died(now, &intensity, &backoff, 0.0), Verdict::Again(Duration::from_millis(400)));
        record.ready(now);
        now += Duration::from_mins(1);
        assert_eq!(record.died(now, &intensity, &backoff, 0.0), Verdict::Again(Duration::ZERO));
    }

    #[test]
    fn a_limit_that_cannot_be_reached_is_refused_and_says_what_to_change() {
        let slow = Backoff { max: Duration::from_secs(30), ..Backoff::default() };
        let refused = check(&Intensity::default(), &slow).expect_err("the ceiling of 30 s never fills 60 s");
        assert_eq!(
            refused.to_string(),
            "10 restarts take up to 61320 ms with these pauses, so they never happen within 60000 ms: \
             allow fewer restarts, shorten the pauses, or widen the window"
        );
        assert_eq!(check(&Intensity::default(), &Backoff::default()), Ok(()));
        assert_eq!(check(&Intensity { max_restarts: 0, within: Duration::ZERO }, &slow), Ok(()));
        let wild = Backoff { jitter: 1.5, ..Backoff::default() };
        assert_eq!(check(&Intensity::default(), &wild), Err(InvalidPolicy::Jitter(1.5)));
    }

    #[test]
    fn no_restart_is_allowed_when_none_is() {
        let none = Intensity { max_restarts: 0, ..Intensity::default() };
        let mut record = Record::default();
        assert_eq!(
            record.died(tokio::time::Instant::now().into_std(), &none, &Backoff::default(), 0.0),
            Verdict::GiveUp(0)
        );
    }
}
