//! Streams over time: one owner, a prefix under lease, an end in order, and nothing lost.

use std::collections::{BTreeMap, HashMap, HashSet};

use uuid::Uuid;

use super::audit::{Event, Key};

#[derive(Clone, Debug)]
struct Row {
    id: Uuid,
    /// Owner, and the operation that leased it.
    lease: Option<(Uuid, i64)>,
}

#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) violations: Vec<String>,
    /// Finished out of order under a lease that had run out: what a client that sleeps through its lease may do, printed only.
    pub(crate) late: usize,
    pub(crate) stored: usize,
    pub(crate) finished: usize,
    /// Rows that are still there.
    pub(crate) left: usize,
}

struct Replay<'a> {
    serialised: bool,
    commits: &'a HashMap<Uuid, i64>,
    streams: HashMap<&'a Key, BTreeMap<i64, Row>>,
    /// The number of the last lease an operation gives in a stream: its run is whole then.
    last_lease: HashMap<(i64, &'a Key), i64>,
    finished_by: HashMap<i64, HashSet<Uuid>>,
    outcome: Outcome,
}

fn leases(event: &Event) -> bool {
    event.old.as_ref().is_some_and(|old| old.instance.is_none())
        && event.new.as_ref().is_some_and(|new| new.instance.is_some())
}

fn finishes(event: &Event) -> bool {
    event.old.as_ref().is_some_and(|old| !old.done) && event.new.as_ref().is_none_or(|new| new.done)
}

pub(crate) fn streams(events: &[Event], commits: &HashMap<Uuid, i64>, serialised: bool) -> Outcome {
    let mut last_lease = HashMap::new();
    let mut finished_by: HashMap<i64, HashSet<Uuid>> = HashMap::new();
    for event in events {
        if leases(event) {
            last_lease.insert((event.op, &event.key), event.n);
        }
        if finishes(event) {
            finished_by.entry(event.op).or_default().insert(event.id);
        }
    }
    let outcome = Outcome::default();
    let mut replay =
        Replay { serialised, commits, streams: HashMap::new(), last_lease, finished_by, outcome };
    for event in events {
        replay.step(event);
    }
    replay.outcome.left = replay.streams.values().map(BTreeMap::len).sum();
    replay.outcome
}

impl<'a> Replay<'a> {
    fn step(&mut self, event: &'a Event) {
        if event.old.is_none() {
            self.outcome.stored += 1;
            let row = Row { id: event.id, lease: None };
            self.streams.entry(&event.key).or_default().insert(event.seq, row);
            return;
        }
        if finishes(event) {
            self.outcome.finished += 1;
            self.check_order(event);
            self.streams.entry(&event.key).or_default().remove(&event.seq);
            return;
        }
        let owner = event.new.as_ref().and_then(|new| new.instance);
        if leases(event) && event.key.stream.is_some() {
            self.check_owner(event);
        }
        if let Some(row) = self.streams.entry(&event.key).or_default().get_mut(&event.seq) {
            row.lease = match (owner, row.lease) {
                (Some(owner), Some((_, op))) if !leases(event) => Some((owner, op)),
                (Some(owner), _) => Some((owner, event.op)),
                (None, _) => None,
            };
        }
        if leases(event) && event.key.stream.is_some() && self.last_lease[&(event.op, &event.key)] == event.n
        {
            self.check_prefix(event);
        }
    }

    /// A stream with a lease on it gets no other.
    fn check_owner(&mut self, event: &Event) {
        let rows = self.streams.get(&event.key).into_iter().flatten();
        for (seq, row) in rows {
            if let Some((owner, op)) = row.lease
                && op != event.op
                && *seq != event.seq
            {
                let what =
                    format!("{owner} still had row {seq} of the stream when this was leased: {event:?}");
                self.outcome.violations.push(what);
                return;
            }
        }
    }

    /// Nothing that the claim could see was passed over.
    fn check_prefix(&mut self, event: &Event) {
        let Some(rows) = self.streams.get(&event.key) else { return };
        let Some((top, _)) = rows.iter().rfind(|(_, row)| row.lease.is_some_and(|(_, op)| op == event.op))
        else {
            return;
        };
        for (seq, row) in rows.range(..top) {
            let seen = self.serialised || self.commits.get(&row.id).is_some_and(|n| *n < event.started);
            if row.lease.is_none() && seen {
                let what =
                    format!("row {seq} of the stream was passed over by the claim that ended with {event:?}");
                self.outcome.violations.push(what);
                return;
            }
        }
    }

    fn check_order(&mut self, event: &Event) {
        let live = event.old.as_ref().and_then(|old| old.expiry).is_some_and(|end| end > event.at);
        let Some(rows) = self.streams.get(&event.key) else { return };
        if event.key.stream.is_none() || !self.serialised {
            return;
        }
        let together = &self.finished_by[&event.op];
        if let Some((seq, _)) = rows.range(..event.seq).find(|(_, row)| !together.contains(&row.id)) {
            if live {
                let what =
                    format!("row {seq} of the stream was unfinished when a later one ended: {event:?}");
                self.outcome.violations.push(what);
            } else {
                self.outcome.late += 1;
            }
        }
    }
}
