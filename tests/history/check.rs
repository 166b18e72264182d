//! What one change of one row may do, by the operation it belongs to; and whether the answers told the truth.

use std::collections::{HashMap, HashSet};

use uuid::Uuid;

use super::audit::{Event, Lease};
use super::{LEASE, Op};

const LEASE_MICROS: i64 = LEASE as i64 * 1_000_000;

/// All violations of a history, each as a sentence.
pub(crate) fn changes(events: &[Event], ops: &HashMap<i64, Op>) -> Vec<String> {
    let mut found = Vec::new();
    let mut last: HashMap<Uuid, Option<Lease>> = HashMap::new();
    for event in events {
        let before = last.insert(event.id, event.new.clone());
        if before.unwrap_or_default() != event.old {
            found.push(format!("the log misses a change before {event:?}"));
        }
        if let Err(what) = one_change(event, ops.get(&event.op)) {
            found.push(format!("{what}: {event:?} of {:?}", ops.get(&event.op).map(short)));
        }
    }
    found.extend(answers(events, ops));
    found.extend(one_expiry(events, ops));
    found
}

fn short(op: &Op) -> String {
    let text = format!("{op:?}");
    text.chars().take(160).collect()
}

fn ensure(holds: bool, what: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what.to_owned()) }
}

fn one_change(event: &Event, op: Option<&Op>) -> Result<(), String> {
    let Some(old) = &event.old else {
        return ensure(event.op == 0, "a row was inserted by an operation");
    };
    ensure(!old.done, "a finished row was changed")?;
    if let Some(new) = &event.new {
        let claimed = old.instance.is_none() && new.instance.is_some();
        ensure(
            new.epoch == old.epoch + i64::from(claimed),
            "the epoch must grow by one at a claim and never else",
        )?;
    }
    match op {
        // A producer parks what it has just stored.
        None => ensure(
            old.epoch == 0 && old.scheduled.is_none() && old.instance.is_none(),
            "nobody asked for this change",
        ),
        Some(Op::Claim { me, .. }) => claimed(event, old, *me),
        Some(Op::Settle { me, asked, .. }) => settled(event, old, *me, asked),
        Some(Op::Renew { me, asked, .. }) => renewed(event, old, *me, asked),
        Some(Op::Warp) => Ok(()),
    }
}

fn claimed(event: &Event, old: &Lease, me: Uuid) -> Result<(), String> {
    let new = event.new.as_ref().ok_or("a claim deleted a row")?;
    ensure(!new.done, "a claim finished a row")?;
    match (old.instance, new.instance) {
        (None, Some(owner)) => {
            ensure(owner == me, "a claim leased for somebody else")?;
            ensure(new.attempts == old.attempts + 1, "a claim must charge one attempt")?;
            ensure(old.scheduled.is_none_or(|due| due <= event.at), "a row was claimed before its time")?;
            fits(event, new)
        }
        (Some(_), None) => {
            ensure(old.expiry.is_some_and(|end| end <= event.at), "a live lease was cleared")?;
            ensure(new.attempts == old.attempts, "an expired lease keeps its attempt")?;
            ensure((0..=1).contains(&(new.crashes - old.crashes)), "an expired lease is one crash at most")
        }
        (None, None) => {
            ensure(old.scheduled.is_some_and(|due| due <= event.at), "a parked row was freed before its time")
        }
        (Some(_), Some(_)) => Err("a leased row was claimed".to_owned()),
    }
}

/// A lease is as long as asked for, counted from a moment inside the statement.
fn fits(event: &Event, new: &Lease) -> Result<(), String> {
    let end = new.expiry.ok_or("a lease without an end")?;
    ensure(end >= event.began + LEASE_MICROS, "the lease is too short")?;
    ensure(end <= event.at + LEASE_MICROS, "the lease is too long")
}

fn settled(
    event: &Event,
    old: &Lease,
    me: Uuid,
    asked: &HashMap<Uuid, (i64, &'static str)>,
) -> Result<(), String> {
    ensure(old.instance == Some(me), "a settlement changed a row that its instance does not hold")?;
    let handed_back =
        |new: &Lease| new.instance.is_none() && new.attempts == (old.attempts - 1).max(0) && !new.done;
    let Some((epoch, verdict)) = asked.get(&event.id) else {
        let new = event.new.as_ref().ok_or("a settlement deleted a row nobody named")?;
        ensure(asked.values().any(|(_, verdict)| *verdict == "retry"), "only a retry hands other rows back")?;
        return ensure(
            handed_back(new) && new.scheduled == old.scheduled,
            "a row of the run must go back with its attempt",
        );
    };
    ensure(old.epoch == *epoch, "a settlement changed a row under another epoch")?;
    match (*verdict, &event.new) {
        ("complete" | "dead_letter", None) => Ok(()),
        ("complete", Some(new)) => {
            ensure(new.done && new.instance.is_none(), "a kept row must be done and free")
        }
        ("retry", Some(new)) => ensure(
            new.instance.is_none() && new.scheduled.is_some() && new.attempts == old.attempts && !new.done,
            "a retried row must be free, parked and keep its attempts",
        ),
        ("release", Some(new)) => ensure(handed_back(new), "a released row must go back with its attempt"),
        _ => Err(format!("not what {verdict} does")),
    }
}

fn renewed(event: &Event, old: &Lease, me: Uuid, asked: &HashMap<Uuid, i64>) -> Result<(), String> {
    let new = event.new.as_ref().ok_or("a renewal deleted a row")?;
    ensure(
        old.instance == Some(me) && asked.get(&event.id) == Some(&old.epoch),
        "a renewal touched another claim",
    )?;
    ensure(old.expiry.is_some_and(|end| end > event.began), "an expired lease was revived")?;
    ensure(Lease { expiry: new.expiry, ..old.clone() } == *new, "a renewal changed more than the expiry")?;
    fits(event, new)
}

/// Who was told that a row is his has it, and who was told that it is not changed nothing.
fn answers(events: &[Event], ops: &HashMap<i64, Op>) -> Vec<String> {
    let mut touched: HashMap<i64, HashSet<Uuid>> = HashMap::new();
    let mut leased: HashMap<i64, HashSet<(Uuid, i64)>> = HashMap::new();
    for event in events {
        touched.entry(event.op).or_default().insert(event.id);
        if let (Some(old), Some(new)) = (&event.old, &event.new)
            && old.instance.is_none()
            && new.instance.is_some()
        {
            leased.entry(event.op).or_default().insert((event.id, new.epoch));
        }
    }
    let mut found = Vec::new();
    for (number, op) in ops {
        let touched = touched.remove(number).unwrap_or_default();
        match op {
            Op::Claim { answer: Some(rows), .. } => {
                let told: HashSet<_> = rows.iter().copied().collect();
                if told.len() != rows.len() || told != leased.remove(number).unwrap_or_default() {
                    found.push(format!("claim {number} returned other rows than it leased"));
                }
            }
            Op::Settle { asked, answer: Some(fenced), .. } => {
                for id in asked.keys() {
                    if touched.contains(id) == fenced.contains(id) {
                        found.push(format!("settlement {number} does not tell the truth about {id}"));
                    }
                }
            }
            Op::Renew { answer: Some(renewed), .. } if touched != renewed.iter().copied().collect() => {
                found.push(format!("renewal {number} returned other rows than it renewed"));
            }
            _ => {}
        }
    }
    found
}

/// All leases that one operation gives in one stream end together.
fn one_expiry(events: &[Event], ops: &HashMap<i64, Op>) -> Vec<String> {
    let mut ends = HashMap::new();
    let mut found = Vec::new();
    for event in events {
        let lengthens = matches!(ops.get(&event.op), Some(Op::Claim { .. } | Op::Renew { .. }));
        if !lengthens || event.key.stream.is_none() {
            continue;
        }
        if let Some(end) = event.new.as_ref().and_then(|new| new.expiry)
            && *ends.entry((event.op, &event.key)).or_insert(end) != end
        {
            found.push(format!("operation {} gave one stream two lease ends: {event:?}", event.op));
        }
    }
    found
}
