//! Who of a group may start now, and who has to stop: pure decisions over where each child stands.
//!
//! The rule: starts go up the list, stops go down it, and in a wave nobody starts before everybody who has to has stopped. The failures
//! this prevents: a child that runs without the one it needs, and two lives of one child at once.

use std::time::Instant;

/// Where the life of a child stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not running.
    Down,
    /// Running, and not ready yet.
    Starting,
    /// Running and ready.
    Up,
    /// Asked to stop.
    Stopping,
    /// Not running, and not to be started again.
    Over,
}

/// What the order of a group needs to know of one child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) stage: Stage,
    /// Whether it shall run.
    pub(super) wanted: bool,
    /// It has to stop and to start again.
    pub(super) recycle: bool,
    /// Not to be started before this.
    pub(super) due: Option<Instant>,
}

impl Place {
    pub(super) fn new() -> Self {
        Self { stage: Stage::Down, wanted: true, recycle: false, due: None }
    }

    pub(super) fn is_running(&self) -> bool {
        matches!(self.stage, Stage::Starting | Stage::Up | Stage::Stopping)
    }

    /// It runs, shall not, and was not told so yet.
    pub(super) fn must_stop(&self) -> bool {
        matches!(self.stage, Stage::Starting | Stage::Up) && (!self.wanted || self.recycle)
    }

    fn may_start(&self, now: Instant) -> bool {
        self.stage == Stage::Down && self.wanted && self.due.is_none_or(|due| due <= now)
    }

    /// Whether those behind it need not wait for it.
    fn is_settled(&self) -> bool {
        !self.wanted || matches!(self.stage, Stage::Up | Stage::Over)
    }
}

/// Who has to be asked to stop now. `ordered`: the last one first, and the next when it is gone; else all at once.
pub(super) fn to_stop(places: &[Place], ordered: bool) -> Vec<usize> {
    let leaving = |at: &usize| places[*at].must_stop();
    if !ordered {
        return (0..places.len()).rev().filter(leaving).collect();
    }
    let last = (0..places.len()).rev().find(|at| leaving(at) || places[*at].stage == Stage::Stopping);
    last.filter(leaving).into_iter().collect()
}

/// Who may start now. In a `wave` nobody starts before everybody who has to has stopped; `ordered`: and before all in front are ready.
pub(super) fn to_start(places: &[Place], now: Instant, ordered: bool, wave: bool) -> Vec<usize> {
    if wave && places.iter().any(|place| place.must_stop() || place.stage == Stage::Stopping) {
        return Vec::new();
    }
    let mut starts = Vec::new();
    for (at, place) in places.iter().enumerate() {
        if place.may_start(now) {
            starts.push(at);
        }
        if wave && ordered && !place.is_settled() {
            break;
        }
    }
    starts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(stages: &[Stage]) -> Vec<Place> {
        stages.iter().map(|stage| Place { stage: *stage, ..Place::new() }).collect()
    }

    #[test]
    fn a_start_in_order_waits_for_the_one_in_front() {
        use Stage::{Down, Over, Starting, Up};
        let now = tokio::time::Instant::now().into_std();
        assert_eq!(to_start(&places(&[Down, Down, Down]), now, true, true), [0]);
        assert_eq!(to_start(&places(&[Starting, Down, Down]), now, true, true), [0; 0]);
        assert_eq!(to_start(&places(&[Up, Over, Down]), now, true, true), [2]);
        assert_eq!(to_start(&places(&[Down, Down, Down]), now, false, true), [0, 1, 2]);
        assert_eq!(to_start(&places(&[Down, Up, Down]), now, true, false), [0, 2], "no wave: each by itself");
    }

    #[test]
    fn nobody_starts_in_a_wave_before_the_last_has_stopped() {
        use Stage::{Down, Stopping, Up};
        let now = tokio::time::Instant::now().into_std();
        let mut wave = places(&[Down, Up, Stopping]);
        assert_eq!(to_start(&wave, now, true, true), [0; 0]);
        wave[2].stage = Down;
        assert_eq!(to_start(&wave, now, true, true), [0]);
        wave[1].recycle = true;
        assert_eq!(to_start(&wave, now, true, true), [0; 0]);
    }

    #[test]
    fn stops_go_backwards_one_by_one_or_all_at_once() {
        use Stage::{Down, Starting, Stopping, Up};
        let mut group = places(&[Up, Up, Starting]);
        for place in &mut group {
            place.wanted = false;
        }
        assert_eq!(to_stop(&group, true), [2]);
        assert_eq!(to_stop(&group, false), [2, 1, 0]);
        group[2].stage = Stopping;
        assert_eq!(to_stop(&group, true), [0; 0]);
        group[2].stage = Down;
        assert_eq!(to_stop(&group, true), [1]);
    }

    #[test]
    fn a_child_that_is_not_due_waits() {
        let now = tokio::time::Instant::now().into_std();
        let mut group = places(&[Stage::Down, Stage::Down]);
        group[0].due = Some(now + std::time::Duration::from_secs(1));
        assert_eq!(to_start(&group, now, true, false), [1]);
        assert_eq!(to_start(&group, now, true, true), [0; 0], "in a wave those behind wait with it");
    }
}
