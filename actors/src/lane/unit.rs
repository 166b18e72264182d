//! What a worker takes from the queue: a lane, or several lanes packed into batches.
//!
//! The rule: inside a lane one row after another; a failed row stops its lane and the later rows go back, written after the failure. The
//! failure this prevents: a later message of a stream that overtakes an earlier one.

use std::sync::Arc;

use crate::delivery::{Running, Settlement};
use crate::port::Verdict;
use crate::runner::Failure;
use crate::work::Category;

use super::Crew;
use super::attempt::{Answer, Attempt, Rows};
use super::crew::{Admission, Mode};
use super::lane_rows::{Lane, LaneRows};

#[expect(
    clippy::large_enum_variant,
    reason = "most units are single rows, and a box would cost an allocation for each"
)]
enum Body {
    /// Row by row.
    Single(Lane),
    /// Whole lanes, up to so many rows in one call.
    Packed(Vec<Lane>, usize),
}

/// What [`Unit::start`] found.
pub(crate) enum Start {
    /// A call to make.
    Attempt(Attempt),
    /// Nothing may start now; the unit must be kept.
    Hold,
    /// Nothing is left.
    Over,
}

/// The piece of work a worker takes. Dropping it gives up what is left in it and frees its order keys.
pub(crate) struct Unit {
    crew: Arc<Crew>,
    category: Category,
    body: Body,
    /// Rows that were started and not yet finished.
    out: usize,
}

impl Unit {
    pub(crate) fn single(crew: &Arc<Crew>, category: Category, lane: Lane) -> Self {
        Self { crew: Arc::clone(crew), category, body: Body::Single(lane), out: 0 }
    }

    /// For whole lanes, up to `limit` rows in one call. Starts without any.
    pub(crate) fn packed(crew: &Arc<Crew>, category: Category, limit: usize) -> Self {
        Self { crew: Arc::clone(crew), category, body: Body::Packed(Vec::new(), limit), out: 0 }
    }

    /// Takes one more lane into a pack.
    pub(crate) fn add(&mut self, lane: Lane) {
        match &mut self.body {
            Body::Packed(lanes, _) => lanes.push(lane),
            Body::Single(_) => unreachable!("a single unit has its lane"),
        }
    }

    pub(crate) fn crew(&self) -> &Arc<Crew> {
        &self.crew
    }

    /// Starts the next row, or the next batch of rows.
    pub(crate) fn start(&mut self) -> Start {
        match self.crew.mode() {
            Mode::Run if self.crew.is_trusted() => {}
            Mode::Run => {
                self.crew.hold_untrusted();
                return Start::Hold;
            }
            Mode::Held => return Start::Hold,
            Mode::Draining => {
                self.release_rest();
                return Start::Over;
            }
            Mode::Dead => return Start::Over,
        }
        let attempt = match &mut self.body {
            Body::Single(lane) => start_one(&self.crew, self.category, lane),
            Body::Packed(lanes, limit) => start_many(&self.crew, self.category, lanes, *limit),
        };
        match attempt {
            Some(attempt) => {
                self.out = attempt.rows.len();
                Start::Attempt(attempt)
            }
            None => Start::Over,
        }
    }

    /// Settles what an attempt answered.
    pub(crate) fn finish(&mut self, mut attempt: Attempt, answer: Answer) {
        let rows = std::mem::replace(&mut attempt.rows, Rows::Many(Vec::new()));
        let started = std::mem::take(&mut self.out);
        match (&mut self.body, rows) {
            (Body::Single(lane), Rows::One(running)) => {
                let result = match answer {
                    Answer::One(result) => result,
                    Answer::Many(mut results) => results.pop().unwrap_or_else(|| Err(no_answer())),
                    Answer::Panicked(text) => Err(panicked(text)),
                };
                finish_one(&self.crew, lane, running, result);
            }
            (Body::Packed(lanes, _), Rows::Many(rows)) => finish_many(&self.crew, lanes, rows, answer),
            (Body::Single(_), Rows::Many(_)) | (Body::Packed(..), Rows::One(_)) => {
                unreachable!("an attempt has the shape of the unit that started it")
            }
        }
        self.crew.done(started);
    }

    /// Ends an attempt whose lease has ended. Its rows are not settled: they belong to the database again. What stands behind them goes
    /// back, as nothing may overtake them.
    pub(crate) fn abort(&mut self, attempt: Attempt) {
        let started = std::mem::take(&mut self.out);
        match (&mut self.body, &attempt.rows) {
            (Body::Single(lane), _) => self.crew.give_back(lane.rows.take()),
            (Body::Packed(lanes, _), Rows::Many(rows)) => {
                for (index, _) in rows {
                    self.crew
                        .give_back(lanes.get_mut(*index).map(|lane| lane.rows.take()).unwrap_or_default());
                }
            }
            (Body::Packed(..), Rows::One(_)) => {}
        }
        drop(attempt);
        self.crew.counters.aborted.add(started as u64);
        self.crew.done(started);
        tracing::error!(
            rows = started,
            "a handler ignored its cancellation until its lease had ended and was aborted; its rows will be run again"
        );
    }

    /// Hands back every row that was not started.
    pub(crate) fn release_rest(&mut self) {
        let mut released = Vec::new();
        for lane in self.body.lanes_mut() {
            released.extend(lane.rows.take());
        }
        self.crew.release(released);
    }

    /// Hands back rows whose deadline has passed, and what stands behind them in their lanes.
    pub(crate) fn give_back_expired(&mut self) {
        let crew = Arc::clone(&self.crew);
        for lane in self.body.lanes_mut() {
            crew.give_back(lane.rows.take_expired());
        }
    }
}

impl Body {
    fn lanes_mut(&mut self) -> &mut [Lane] {
        match self {
            Self::Single(lane) => std::slice::from_mut(lane),
            Self::Packed(lanes, _) => lanes,
        }
    }
}

impl Drop for Unit {
    fn drop(&mut self) {
        let mut given_up = std::mem::take(&mut self.out);
        let mut keys = Vec::new();
        for lane in self.body.lanes_mut() {
            given_up += lane.rows.take().len();
            keys.extend(lane.key.take());
        }
        if given_up > 0 {
            self.crew.give_up(given_up);
        }
        for key in keys {
            self.crew.lane_done(key);
        }
    }
}

fn start_one(crew: &Arc<Crew>, category: Category, lane: &mut Lane) -> Option<Attempt> {
    loop {
        let delivery = lane.rows.pop_front()?;
        match crew.admit(delivery) {
            Admission::Run(delivery) => {
                let (job, running) = delivery.start(crew.instance(), crew.trust());
                return Some(match crew.runner(category) {
                    Some(runner) => Attempt::one(runner, job, running),
                    None => Attempt::refused(running, no_runner(category)),
                });
            }
            Admission::Settled => {}
            Admission::Expired => crew.give_back(lane.rows.take()),
        }
    }
}

fn start_many(crew: &Arc<Crew>, category: Category, lanes: &mut [Lane], limit: usize) -> Option<Attempt> {
    let runner = crew.runner(category)?;
    let mut jobs = Vec::new();
    let mut rows = Vec::new();
    for (index, lane) in lanes.iter_mut().enumerate() {
        while jobs.len() < limit {
            let Some(delivery) = lane.rows.pop_front() else { break };
            match crew.admit(delivery) {
                Admission::Run(delivery) => {
                    let (job, running) = delivery.start(crew.instance(), crew.trust());
                    jobs.push(job);
                    rows.push((index, running));
                }
                Admission::Settled => {}
                Admission::Expired => crew.give_back(lane.rows.take()),
            }
        }
    }
    if jobs.is_empty() { None } else { Some(Attempt::many(runner, jobs, rows)) }
}

fn finish_one(crew: &Crew, lane: &mut Lane, running: Running, result: Result<(), Failure>) {
    let verdict = crew.judge(&running, result);
    let stops = matches!(verdict, Verdict::Retry { .. });
    let settlement = running.settle(verdict);
    if stops {
        let mut settlements = vec![settlement];
        let later = release_into(crew, &mut settlements, &mut lane.rows);
        crew.desk().put_all(settlements);
        crew.done(later);
    } else {
        crew.desk().put(settlement);
    }
}

/// Settles a batch lane by lane, so that what stands behind a failure is written right after it.
fn finish_many(crew: &Crew, lanes: &mut [Lane], rows: Vec<(usize, Running)>, answer: Answer) {
    let mut results = match answer {
        Answer::Many(results) => results.into_iter(),
        Answer::One(result) => vec![result].into_iter(),
        Answer::Panicked(text) => {
            let panic = || Err(panicked(text.clone()));
            std::iter::repeat_with(panic).take(rows.len()).collect::<Vec<_>>().into_iter()
        }
    };
    let mut settlements = Vec::with_capacity(rows.len());
    let mut stopped = None;
    let mut later = 0;
    for (index, running) in rows {
        let result = results.next().unwrap_or_else(|| Err(no_answer()));
        if stopped == Some(index) {
            crew.counters.released.add(1);
            settlements.push(running.settle(Verdict::Release));
            continue;
        }
        later += close_lane(crew, &mut settlements, lanes, stopped);
        let failed = result.is_err();
        let verdict = crew.judge(&running, result);
        settlements.push(running.settle(verdict));
        stopped = failed.then_some(index);
    }
    later += close_lane(crew, &mut settlements, lanes, stopped);
    crew.desk().put_all(settlements);
    crew.done(later);
}

/// Hands back what is left of a stopped lane. Returns how many rows that were.
fn close_lane(
    crew: &Crew,
    settlements: &mut Vec<Settlement>,
    lanes: &mut [Lane],
    stopped: Option<usize>,
) -> usize {
    let Some(lane) = stopped.and_then(|index| lanes.get_mut(index)) else { return 0 };
    release_into(crew, settlements, &mut lane.rows)
}

fn release_into(crew: &Crew, settlements: &mut Vec<Settlement>, rows: &mut LaneRows) -> usize {
    let later = rows.take();
    let count = later.len();
    crew.counters.released.add(count as u64);
    settlements.extend(later.into_iter().map(|row| row.settle(Verdict::Release)));
    count
}

fn no_answer() -> Failure {
    Failure::retry("the handler gave no answer for this row")
}

fn no_runner(category: Category) -> Failure {
    Failure::Retry {
        after: None,
        reason: crate::work::FailureReason::Serialization,
        error: format!("nobody here handles {category}"),
    }
}

fn panicked(text: String) -> Failure {
    Failure::Retry { after: None, reason: crate::work::FailureReason::Panic, error: text }
}
