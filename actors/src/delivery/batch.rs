//! What goes into one statement of renewals, and what its answers mean.
//!
//! The rule: the rows of a run go together, in one statement: what stands before a row must not end before it. Rows that are due, and those
//! somebody asked for, use up a renewal; rows that wait behind them, and results that are not written yet, come along. When a row may not
//! be renewed any more, its run is not either. The failures this prevents: a later row of a stream that outlives an earlier one, a hung
//! handler that is kept alive by the rows behind it, and rows that wait whose renewals are used up before they start.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use super::in_flight::InFlight;
use super::lease::{LeaseHandle, Reservation};
use super::renewals::{Answer, ExtendError, Lead, Refused, Request};
use crate::policy::lease::LeaseTerms;
use crate::port::Renewal;
use crate::work::{ClaimEpoch, WorkKey};

/// Rows in one statement at most, as the port has it. What stands behind them in an even longer run is left to expire.
const MAX_ROWS: usize = 1_000;

/// One row of the statement.
#[derive(Debug)]
struct Item {
    lease: Arc<LeaseHandle>,
    gain: Gain,
}

/// What a renewal does for a row.
#[derive(Debug)]
enum Gain {
    /// Uses up one of its renewals.
    Counted(Reservation),
    /// Costs nothing: it has not started.
    Free,
    /// Nothing: it was renewed a short while ago, and only must not be missing.
    Company,
}

#[derive(Debug)]
struct Run {
    requests: Vec<Request>,
    rows: Rows,
}

#[derive(Debug)]
enum Rows {
    Held(Vec<Item>),
    Stranger(WorkKey, ClaimEpoch, Instant),
}

/// A batch of renewals, run by run.
#[derive(Debug, Default)]
pub(super) struct Batch(Vec<Run>);

/// What became of requests.
#[derive(Debug, Default)]
pub(super) struct Sorted {
    pub(super) batch: Batch,
    /// For the next batch.
    pub(super) left: Vec<Request>,
    pub(super) refused: Vec<(Request, Refused)>,
}

/// What the answers of a batch mean.
#[derive(Debug, Default)]
pub(super) struct Judged {
    pub(super) again: Vec<Request>,
    pub(super) answered: Vec<(Request, Answer)>,
    pub(super) renewed: u64,
    pub(super) locked: u64,
    pub(super) lost: u64,
}

impl Batch {
    /// Makes a batch of about `rows` rows.
    pub(super) fn sort(requests: Vec<Request>, in_flight: &InFlight, rows: usize, now: Instant) -> Sorted {
        let mut sorted = Sorted::default();
        let mut room = rows.clamp(1, MAX_ROWS);
        for group in by_run(requests, in_flight, now, &mut sorted.refused) {
            match group {
                Group::Held(requests, members) => {
                    if members.len() > room && !sorted.batch.0.is_empty() {
                        sorted.left.extend(requests);
                        continue;
                    }
                    match plan(&requests, members, now) {
                        Ok(items) => {
                            room = room.saturating_sub(items.len());
                            sorted.batch.0.push(Run { requests, rows: Rows::Held(items) });
                        }
                        Err(why) => sorted.refused.extend(requests.into_iter().map(|request| (request, why))),
                    }
                }
                Group::Stranger(request, ..) if room == 0 => sorted.left.push(request),
                Group::Stranger(request, key, epoch, until) => {
                    room -= 1;
                    let rows = Rows::Stranger(key, epoch, until);
                    sorted.batch.0.push(Run { requests: vec![request], rows });
                }
            }
        }
        sorted
    }

    /// As the store wants it.
    pub(super) fn items(&self) -> Vec<(WorkKey, ClaimEpoch)> {
        let mut items = Vec::new();
        for run in &self.0 {
            match &run.rows {
                Rows::Held(rows) => {
                    items.extend(rows.iter().map(|item| (item.lease.key(), item.lease.epoch())));
                }
                Rows::Stranger(key, epoch, _) => items.push((*key, *epoch)),
            }
        }
        items
    }

    /// How many rows are renewed by their epoch alone.
    pub(super) fn strangers(&self) -> u64 {
        self.0.iter().filter(|run| matches!(run.rows, Rows::Stranger(..))).count() as u64
    }

    /// The requests alone. What was reserved for them is given back.
    pub(super) fn into_requests(self) -> Vec<Request> {
        self.0.into_iter().flat_map(|run| run.requests).collect()
    }

    /// Does what the answers say, which are in the order of [`Batch::items`]. One that is missing counts as locked.
    pub(super) fn judge(
        self,
        answers: &[Renewal],
        sent_at: Instant,
        now: Instant,
        terms: LeaseTerms,
    ) -> Judged {
        let mut judged = Judged::default();
        let mut answers = answers.iter().copied().chain(std::iter::repeat(Renewal::Locked));
        for Run { requests, rows } in self.0 {
            match rows {
                Rows::Held(items) => judged.held(requests, items, &mut answers, sent_at, now),
                Rows::Stranger(_, _, until) => {
                    let deadline = terms.window(sent_at).deadline();
                    let answer = answers.next().unwrap_or(Renewal::Locked);
                    judged.count(answer);
                    for request in requests {
                        judged.answer(request, answer, deadline, now < until);
                    }
                }
            }
        }
        judged
    }
}

impl Judged {
    fn count(&mut self, answer: Renewal) {
        match answer {
            Renewal::Renewed => self.renewed += 1,
            Renewal::Locked => self.locked += 1,
            Renewal::Lost => self.lost += 1,
        }
    }

    fn answer(&mut self, request: Request, answer: Renewal, deadline: Instant, in_time: bool) {
        match answer {
            Renewal::Renewed => self.answered.push((request, Ok(deadline))),
            Renewal::Lost => self.answered.push((request, Err(ExtendError::Lost))),
            Renewal::Locked if in_time => self.again.push(request),
            Renewal::Locked => {
                let why = "somebody kept the row locked until the deadline".to_owned();
                self.answered.push((request, Err(ExtendError::Unknown(why))));
            }
        }
    }

    fn held(
        &mut self,
        requests: Vec<Request>,
        items: Vec<Item>,
        answers: &mut impl Iterator<Item = Renewal>,
        sent_at: Instant,
        now: Instant,
    ) {
        let mut said = Vec::with_capacity(items.len());
        for Item { lease, gain } in items {
            let answer = answers.next().unwrap_or(Renewal::Locked);
            match (answer, gain) {
                (Renewal::Renewed, Gain::Counted(reservation)) => reservation.confirm(sent_at),
                (Renewal::Renewed, Gain::Free) => lease.extended(sent_at),
                (Renewal::Lost, _) if lease.is_settled() => continue,
                (Renewal::Lost, _) => lease.lose(),
                (Renewal::Renewed | Renewal::Locked, _) => {}
            }
            self.count(answer);
            said.push((lease, answer));
        }
        let asked_again = self.again.len();
        for request in requests {
            let about = match &request.lead {
                Lead::Held(lead) => said.iter().find(|(lease, _)| Arc::ptr_eq(lease, lead)),
                Lead::Stranger { .. } => None,
            };
            match about {
                Some((lease, answer)) => {
                    let window = lease.window();
                    let answer = *answer;
                    self.answer(request, answer, window.deadline(), window.may_start(now));
                }
                // Settled meanwhile.
                None => self.answered.push((request, Err(ExtendError::Lost))),
            }
        }
        // Somebody has a row behind the first locked. The others are renewed; this one goes on asking.
        let locked =
            said.iter().find(|(lease, answer)| *answer == Renewal::Locked && lease.window().may_start(now));
        if let Some((lease, _)) = locked
            && self.again.len() == asked_again
            && lease.enqueue()
        {
            self.again.push(Request { lead: Lead::Held(Arc::clone(lease)), asker: None, deaths: 0 });
        }
    }
}

enum Group {
    Held(Vec<Request>, Vec<Arc<LeaseHandle>>),
    Stranger(Request, WorkKey, ClaimEpoch, Instant),
}

/// Requests by run, in the order of their first request, with the rows of the run in their order. Refuses what nobody needs any more.
fn by_run(
    requests: Vec<Request>,
    in_flight: &InFlight,
    now: Instant,
    refused: &mut Vec<(Request, Refused)>,
) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    let mut runs: HashMap<_, usize> = HashMap::new();
    for request in requests {
        match &request.lead {
            Lead::Stranger { until, .. } if now >= *until => refused.push((request, Refused::TooLate)),
            Lead::Stranger { key, epoch, until } => {
                let (key, epoch, until) = (*key, *epoch, *until);
                groups.push(Group::Stranger(request, key, epoch, until));
            }
            Lead::Held(lease) => {
                if let Some(why) = not_needed(lease, now) {
                    refused.push((request, why));
                    continue;
                }
                let lease = Arc::clone(lease);
                let at = *runs.entry(lease.run_key()).or_insert_with(|| {
                    let alone = if lease.is_ordered() { Vec::new() } else { vec![lease] };
                    groups.push(Group::Held(Vec::new(), alone));
                    groups.len() - 1
                });
                if let Group::Held(requests, _) = &mut groups[at] {
                    requests.push(request);
                }
            }
        }
    }
    if runs.keys().any(|(_, order)| order.is_some()) {
        let member = |lease: &LeaseHandle| {
            lease.is_ordered() && !lease.is_over() && runs.contains_key(&lease.run_key())
        };
        for lease in in_flight.select(member) {
            let at = runs[&lease.run_key()];
            if let Group::Held(_, members) = &mut groups[at] {
                members.push(lease);
            }
        }
    }
    for group in &mut groups {
        if let Group::Held(_, members) = group {
            members.sort_unstable_by_key(|lease| lease.seq());
        }
    }
    groups
}

fn not_needed(lease: &LeaseHandle, now: Instant) -> Option<Refused> {
    if lease.is_over() || lease.is_lost() || lease.was_cancelled() {
        Some(Refused::Over)
    } else if lease.window().may_start(now) {
        None
    } else {
        Some(Refused::TooLate)
    }
}

/// The rows of a run, with what each gains.
fn plan(
    requests: &[Request],
    mut members: Vec<Arc<LeaseHandle>>,
    now: Instant,
) -> Result<Vec<Item>, Refused> {
    members.retain(|lease| !lease.is_lost());
    members.truncate(MAX_ROWS);
    let is_asked_for = |lease: &Arc<LeaseHandle>| {
        requests.iter().any(|request| {
            request.asker.is_some() && matches!(&request.lead, Lead::Held(lead) if Arc::ptr_eq(lead, lease))
        })
    };
    let mut items = Vec::with_capacity(members.len());
    for lease in members {
        let asked = is_asked_for(&lease);
        if lease.is_running() && lease.was_cancelled() {
            return Err(Refused::Over);
        }
        let counts = asked || (lease.is_started() && lease.is_due(now));
        let gain = match () {
            () if counts => match lease.try_extend_deadline() {
                Ok(reservation) => Gain::Counted(reservation),
                // A result that is not written yet holds nobody up: it comes along as long as others need it.
                Err(ExtendError::AtCap { .. }) if lease.is_settled() => Gain::Company,
                Err(ExtendError::AtCap { .. }) => return Err(Refused::AtCap),
                // Nobody's any more since it was looked for.
                Err(_) => continue,
            },
            () if lease.is_started() => Gain::Company,
            () => Gain::Free,
        };
        items.push(Item { lease, gain });
    }
    // Rows that wait are kept by one that has started, or by whoever asks for them.
    if items.iter().any(|item| item.lease.is_started() || is_asked_for(&item.lease)) {
        Ok(items)
    } else {
        Err(Refused::Over)
    }
}
