//! The orderly end: one actor after the other is asked to finish, and says what it did.
//!
//! The rule: a drain happens once, whoever asks for it first (the user, or an actor that died too often), and is asked again of the
//! successor when an actor dies of it. The failure this prevents: results that a crash in the last second leaves to the end of a lease.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use actix::prelude::*;
use tokio::sync::watch;
use tokio::time::timeout;

use super::DrainReport;
use crate::message::Drain;
use crate::registry::Name;

/// How often a drain is asked for again when the one that was asked died.
const ATTEMPTS: u32 = 5;

/// What an answer may take beyond what the actor itself allows.
const LAST_PATIENCE: Duration = Duration::from_secs(15);

/// Drains the actors in this order, once.
#[derive(Debug)]
pub(super) struct Drainer {
    actors: Vec<(Name, Recipient<Drain>)>,
    patience: Duration,
    begun: AtomicBool,
    report: watch::Sender<Option<DrainReport>>,
}

impl Drainer {
    /// Nothing is asked yet. `deadline`: what an actor allows its own drain.
    pub(super) fn new(actors: Vec<(Name, Recipient<Drain>)>, deadline: Duration) -> Arc<Self> {
        Arc::new(Self {
            actors,
            patience: deadline + LAST_PATIENCE,
            begun: AtomicBool::new(false),
            report: watch::Sender::new(None),
        })
    }

    /// The drain, for whoever asks first. Reports when it ends, and when it is dropped.
    pub(super) fn begin(self: &Arc<Self>) -> Option<Draining> {
        let first = !self.begun.swap(true, Ordering::AcqRel);
        first.then(|| Draining { so_far: DrainReport::default(), of: Arc::clone(self) })
    }

    /// What the drain did, once it has ended.
    pub(super) async fn report(&self) -> DrainReport {
        let mut report = self.report.subscribe();
        report.wait_for(Option::is_some).await.map_or(None, |report| *report).unwrap_or_default()
    }

    /// Drains everybody but the one that was given up: it would never answer.
    pub(super) async fn drain_without(self: Arc<Self>, given_up: Name) {
        match self.begin() {
            Some(draining) => draining.run(Some(given_up)).await,
            None => drop(self.report().await),
        }
    }
}

/// A drain under way.
pub(super) struct Draining {
    so_far: DrainReport,
    of: Arc<Drainer>,
}

impl Draining {
    /// Asks one after the other.
    pub(super) async fn run(mut self, given_up: Option<Name>) {
        let of = Arc::clone(&self.of);
        for (_, actor) in of.actors.iter().filter(|(name, _)| Some(name) != given_up.as_ref()) {
            for _ in 0..ATTEMPTS {
                match timeout(of.patience, actor.send(Drain)).await {
                    Ok(Ok(drained)) => {
                        self.so_far += drained;
                        break;
                    }
                    // It died of it, and its successor is asked; or it is gone for good.
                    Ok(Err(_)) if actor.connected() => {}
                    Ok(Err(_)) | Err(_) => break,
                }
            }
        }
    }
}

impl Drop for Draining {
    fn drop(&mut self) {
        self.of.report.send_replace(Some(self.so_far));
    }
}
