//! What is known of the gate: whether NOTIFY reaches this instance, why not, and when that was last proven.
//!
//! The rule: one keeper writes, the one that came last, and everybody reads. The failure this prevents: an incarnation that was given up,
//! wakes up late, and says of a session that is long gone that it hears.

use std::sync::Mutex;

use tokio::time::Instant;

use super::Standing;
use crate::instance::Gate;
use crate::lock;
use crate::message::GateReport;

/// The book. Starts without a gate.
#[derive(Debug, Default)]
pub(super) struct GateBook(Mutex<Entry>);

#[derive(Clone, Debug, Default)]
struct Entry {
    keeper: u64,
    gate: Gate,
    reason: Option<String>,
    verified: Option<Instant>,
    failed: Option<(Instant, String)>,
    changes: u64,
}

impl GateBook {
    /// What the next life knows.
    pub(super) fn successor(&self) -> Self {
        Self(Mutex::new(Entry { keeper: 0, ..lock(&self.0).clone() }))
    }
}

/// The right to write, until somebody else gets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateKeeper(u64);

/// The gate: written by whoever keeps the direct session.
impl Standing {
    /// From now on the caller writes, and nobody else.
    pub fn keep_gate(&self) -> GateKeeper {
        let mut entry = lock(&self.gate.0);
        entry.keeper += 1;
        GateKeeper(entry.keeper)
    }

    /// Notes the state and what there is to say about it. Returns whether it is another one than before.
    pub fn set_gate(&self, keeper: GateKeeper, gate: Gate, reason: Option<&str>) -> bool {
        let mut entry = lock(&self.gate.0);
        if entry.keeper != keeper.0 {
            return false;
        }
        entry.reason = reason.map(str::to_owned);
        if gate == Gate::Unavailable {
            entry.failed = Some((Instant::now(), reason.unwrap_or_default().to_owned()));
        }
        let changed = std::mem::replace(&mut entry.gate, gate) != gate;
        entry.changes += u64::from(changed);
        changed
    }

    /// A ring by the producers' route has just come back.
    pub fn gate_verified(&self, keeper: GateKeeper) {
        let mut entry = lock(&self.gate.0);
        if entry.keeper == keeper.0 {
            entry.verified = Some(Instant::now());
        }
    }

    /// Whether NOTIFY reaches it.
    pub fn gate(&self) -> Gate {
        lock(&self.gate.0).gate
    }

    /// All that is known of it.
    pub fn gate_report(&self) -> GateReport {
        let entry = lock(&self.gate.0).clone();
        let ago = |at: Instant| at.elapsed().as_secs_f64();
        GateReport {
            gate: entry.gate,
            reason: entry.reason,
            last_verified_seconds_ago: entry.verified.map(ago),
            last_failure_seconds_ago: entry.failed.as_ref().map(|(at, _)| ago(*at)),
            last_failure: entry.failed.map(|(_, why)| why),
            changes: entry.changes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gate_is_read_as_it_was_written_and_a_change_is_told_once() {
        let standing = Standing::default();
        let keeper = standing.keep_gate();
        assert_eq!(standing.gate(), Gate::Unconfigured);
        assert!(!standing.set_gate(keeper, Gate::Unconfigured, None));
        for gate in [Gate::Available, Gate::Unavailable, Gate::Unconfigured] {
            assert!(standing.set_gate(keeper, gate, Some("why")));
            assert!(!standing.set_gate(keeper, gate, Some("why else")));
            assert_eq!(standing.gate(), gate);
        }
        let report = standing.gate_report();
        assert_eq!((report.reason.as_deref(), report.changes), (Some("why else"), 3));
        assert_eq!(report.last_failure.as_deref(), Some("why else"));
    }

    #[test]
    fn whoever_kept_it_before_has_no_say_any_more() {
        let standing = Standing::default();
        let (old, new) = (standing.keep_gate(), standing.keep_gate());
        assert!(standing.set_gate(new, Gate::Available, None));
        standing.gate_verified(old);
        assert!(!standing.set_gate(old, Gate::Unavailable, Some("late")));
        let report = standing.gate_report();
        assert_eq!(
            (report.gate, report.reason, report.last_verified_seconds_ago),
            (Gate::Available, None, None)
        );
        let next = standing.successor();
        assert_eq!(next.gate(), Gate::Available);
        assert!(!next.set_gate(new, Gate::Unavailable, None), "each life has keepers of its own");
    }
}
