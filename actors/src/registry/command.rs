//! What can be asked of a running group.

use tokio::sync::oneshot;

use super::child::Node;
use super::order::Stage;
use super::slot::Slot;
use super::supervisor::Supervisor;
use super::{Exit, Name, StartFailed};

/// What can be asked of a supervisor.
pub(super) enum Command {
    Add {
        slot: Box<Slot>,
    },
    Remove {
        name: Name,
        answer: oneshot::Sender<u64>,
    },
    Restart {
        name: Name,
        answer: oneshot::Sender<Result<(), StartFailed>>,
    },
    #[cfg(feature = "testing")]
    Crash {
        name: Name,
    },
}

impl Supervisor {
    pub(super) fn obey(&mut self, command: Command) {
        let running = self.is_running();
        match command {
            Command::Add { slot } if running => self.members.slots.push(*slot),
            // Dropped, which answers it.
            Command::Add { slot } => slot.forget(&self.core),
            Command::Remove { name, answer } => {
                let Some(at) = self.at(&name) else { return };
                let slot = &mut self.members.slots[at];
                slot.place.wanted = false;
                slot.removal.push(answer);
                match slot.place.stage {
                    Stage::Over => self.remove(at),
                    Stage::Down => self.stopped(at, Exit::Shutdown),
                    Stage::Starting | Stage::Up | Stage::Stopping => {}
                }
            }
            Command::Restart { name, answer } => {
                let Some(at) = self.at(&name).filter(|_| running) else { return };
                let slot = &mut self.members.slots[at];
                if slot.place.stage == Stage::Over {
                    // Whoever asked may be gone.
                    let _ = answer.send(Err(StartFailed::Over(name)));
                    return;
                }
                slot.place.recycle = slot.place.is_running();
                slot.place.due = None;
                slot.start_asked.push(answer);
                self.recycle_dependents(at, None);
            }
            #[cfg(feature = "testing")]
            Command::Crash { name } => {
                if let Some(at) = self.at(&name) {
                    self.members.slots[at].crash();
                }
            }
        }
    }
}

/// A child as it is handed to a running group.
pub(super) fn slot_of(
    child: u64,
    node: Box<dyn Node>,
    asked: oneshot::Sender<Result<(), StartFailed>>,
) -> Box<Slot> {
    let mut slot = Slot::new(child, node);
    slot.newborn = true;
    slot.start_asked.push(asked);
    Box::new(slot)
}
