//! Where results wait to be fetched.
//!
//! The rule: whoever finishes a row puts its settlement here and rings; the dispatching actor fetches everything at once. The failures
//! this prevents: one message per row, and a result that waits behind a handler that blocks its thread.

use std::sync::{Arc, Mutex};

use crate::delivery::Settlement;
use crate::lock;

/// Settlements after which it is time to ring, even though more rows are about to finish.
const FULL_TRAY: usize = 64;

/// Settlements waiting to be fetched.
#[derive(Default)]
pub(crate) struct Desk {
    tray: Mutex<Tray>,
}

type Bell = Arc<dyn Fn() + Send + Sync>;

#[derive(Default)]
struct Tray {
    settlements: Vec<Settlement>,
    bell: Option<Bell>,
    rung: bool,
    closed: bool,
    discarded: u64,
}

impl Desk {
    /// What to do from now on when there is something to fetch. Whoever sets it must fetch once: what was rung for before may have been
    /// heard by nobody.
    pub(crate) fn set_bell(&self, bell: impl Fn() + Send + Sync + 'static) {
        let bell: Bell = Arc::new(bell);
        let silent = lock(&self.tray).bell.replace(bell);
        drop(silent);
    }

    /// Puts one settlement down. Rings when the tray is full.
    pub(crate) fn put(&self, settlement: Settlement) {
        let mut refused = None;
        let full = {
            let mut tray = lock(&self.tray);
            if tray.closed {
                tray.discarded += 1;
                refused = Some(settlement);
                false
            } else {
                tray.settlements.push(settlement);
                tray.settlements.len() >= FULL_TRAY
            }
        };
        drop(refused);
        if full {
            self.ring();
        }
    }

    /// Puts several down, so that they are fetched together and in this order.
    pub(crate) fn put_all(&self, settlements: Vec<Settlement>) {
        let mut refused = Vec::new();
        {
            let mut tray = lock(&self.tray);
            if tray.closed {
                tray.discarded += settlements.len() as u64;
                refused = settlements;
            } else {
                tray.settlements.extend(settlements);
            }
        }
        drop(refused);
    }

    /// Asks for a fetch, once until it happens.
    pub(crate) fn ring(&self) {
        let bell = {
            let mut tray = lock(&self.tray);
            if tray.rung || tray.settlements.is_empty() {
                return;
            }
            tray.rung = true;
            tray.bell.clone()
        };
        if let Some(bell) = bell {
            bell();
        }
    }

    /// Asks for a look, even with nothing to fetch.
    pub(crate) fn call(&self) {
        let bell = {
            let mut tray = lock(&self.tray);
            if std::mem::replace(&mut tray.rung, true) {
                return;
            }
            tray.bell.clone()
        };
        if let Some(bell) = bell {
            bell();
        }
    }

    /// Takes everything.
    pub(crate) fn fetch(&self) -> Vec<Settlement> {
        let mut tray = lock(&self.tray);
        tray.rung = false;
        std::mem::take(&mut tray.settlements)
    }

    /// Refuses everything from now on, and returns what was still there.
    pub(crate) fn close(&self) -> Vec<Settlement> {
        let mut tray = lock(&self.tray);
        tray.closed = true;
        std::mem::take(&mut tray.settlements)
    }

    /// How many settlements came after it was closed.
    pub(crate) fn discarded(&self) -> u64 {
        lock(&self.tray).discarded
    }
}
