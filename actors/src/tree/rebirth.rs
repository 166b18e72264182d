//! What follows an eviction: the old life ends, and the actors start again under a fresh id.
//!
//! The rule: first everything of the old life is over (no claim under way, handlers ended or given up, mailboxes worked off), then the
//! id changes, then the actors are made again; addresses stay. The failure this prevents: a row claimed under the old id that runs under
//! the new one.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use tokio::time::{Instant, sleep, timeout};

use super::life::{Life, Lives};
use crate::actor::backoff;
use crate::lock;
use crate::message::Observe;
use crate::options::OnEvicted;
use crate::registry::Registry;

/// How long an actor may take to work off its mailbox.
const PATIENCE: Duration = Duration::from_secs(5);

/// An instance that is evicted again within this time waits before it comes back.
const SOON: Duration = Duration::from_mins(1);

/// The first and the longest such wait.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// Starts lives.
pub(super) struct Rebirth {
    pub(super) lives: Arc<Lives>,
    pub(super) on_evicted: OnEvicted,
    /// Whoever passes rows on, in the order in which rows go: each is asked once it can get no more from the one before.
    pub(super) passers: Vec<Recipient<Observe>>,
    /// How long handlers are waited for, which were told to stop.
    pub(super) patience: Duration,
    /// When the last life began, and how many came soon after each other.
    pub(super) last: std::sync::Mutex<Option<(Instant, u32)>>,
}

impl Rebirth {
    /// Follows up the eviction of this life. Everyone was told of it.
    pub(super) async fn run(self: Arc<Self>, old: Arc<Life>, registry: Registry) {
        if self.on_evicted == OnEvicted::Stop {
            return tracing::error!(
                "this instance was evicted and stays stopped, as `liveness.on_evicted` wants it"
            );
        }
        if !old.standing.wants_heartbeat() {
            tracing::warn!(
                "this instance was evicted and stays stopped until its heartbeat is switched on again"
            );
        }
        sleep(self.pause()).await;
        for passer in &self.passers {
            // One that is dead passes nothing on.
            let _ = timeout(PATIENCE, passer.send(Observe)).await;
        }
        if let Some(crew) = old.crew.get() {
            if timeout(self.patience, crew.idle()).await.is_err() {
                tracing::error!(
                    handlers = crew.in_hand(),
                    "handlers of the evicted instance did not stop in time and are given up"
                );
            }
            crew.abort_tasks();
        }
        old.standing.heartbeat_wanted().await;
        if old.standing.is_draining() {
            return;
        }
        let next = self.lives.begin_next();
        tracing::warn!(evicted = %old.instance(), instance = %next.instance(), "this instance starts again under a fresh id");
        for group in ["vital", "work"] {
            if let Err(error) = registry.restart(group).await {
                // It goes on by its restart policy, or the tree ends.
                tracing::warn!(%error, group, "actors did not start again at once");
            }
        }
    }

    /// None for the first eviction, ever longer for those that follow soon.
    fn pause(&self) -> Duration {
        let mut last = lock(&self.last);
        let soon = last.filter(|(at, _)| at.elapsed() < SOON).map_or(0, |(_, soon)| soon + 1);
        let pause = if soon == 0 { Duration::ZERO } else { backoff(soon, PAUSE.0, PAUSE.1) };
        *last = Some((Instant::now() + pause, soon));
        pause
    }
}
