//! The children of a group, which outlive every run of its supervisor.

use std::sync::{Arc, Mutex};

use super::book::Core;
use super::group::Policy;
use super::order::Stage;
use super::slot::Slot;
use super::{ChildState, Name, lock};

/// A group between two runs of its supervisor.
pub(super) struct Members {
    pub(super) name: Name,
    pub(super) slots: Vec<Slot>,
    pub(super) policy: Policy,
}

/// Where the members wait while no supervisor runs.
pub(super) type Cell = Arc<Mutex<Option<Members>>>;

/// Lets the members of a group go for good. Returns how many messages were never delivered.
pub(super) fn close_members(cell: &Cell, core: &Core) -> u64 {
    let mut members = lock(cell);
    let Some(members) = members.as_mut() else { return 0 };
    let mut undelivered = 0;
    for slot in members.slots.iter_mut().rev().filter(|slot| slot.place.stage != Stage::Over) {
        // A child that was given up stays known as such.
        let failed = core.has_failed(slot.child);
        undelivered += slot.close(core, if failed { ChildState::Failed } else { ChildState::Stopped });
    }
    undelivered
}

/// Forgets the names of the members of a group that was removed.
pub(super) fn forget_members(cell: &Cell, core: &Core) {
    if let Some(members) = lock(cell).as_ref() {
        members.slots.iter().for_each(|slot| slot.forget(core));
    }
}
