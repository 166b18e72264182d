//! How fast a dead peer is replaced, and what an instance does that cannot prove itself alive. The rule: the grace is the one number
//! both sides count with, so it stands in one place: peers evict after it, and the instance fences itself before it is over.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{OptionsError, check};

/// What becomes of running handlers while this instance cannot prove that it is alive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnFence {
    /// They go on, and their results wait: a restart of the database throws no work away. What they write to the database is refused
    /// if somebody else has the row by then; what they do elsewhere may happen twice.
    #[default]
    Hold,
    /// They are cancelled at once: fewer effects happen twice, and every short outage costs the work in hand.
    Cancel,
}

/// What an instance does that was evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnEvicted {
    /// It drops what it has in hand and joins again under a fresh id.
    #[default]
    Reincarnate,
    /// It stops and is not ready any more: for hosts that restart the process by themselves.
    Stop,
}

/// Who is alive, who takes over, who must stop.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LivenessOptions {
    /// Wait for the alive-lock of a peer, to learn of its death within milliseconds. Default true; costs one direct connection and a
    /// statement every 20 s. False: the dead are found by their beats alone, after 65 s at the defaults, and this instance watches nobody.
    pub death_watch: bool,
    /// Seconds between the loss of a peer's alive-lock and its eviction, and so the time an instance has to reconnect; it fences itself
    /// up to a second before the end. Default 5. 1 to 60; all instances of a schema should agree. Lower takes over sooner and takes a
    /// shorter hiccup for a death.
    pub lock_loss_grace_seconds: u32,
    /// Seconds between sweeps for peers whose beat is stale, the backstop for whatever the death watch missed; spread by 20 % either way.
    /// Default 60. 1 to 3 600. Lower finds such deaths sooner and costs a statement each time.
    pub stale_sweep_interval_seconds: u32,
    /// Running handlers while this instance cannot prove that it is alive: from 4 s (the grace less a second, or less 0.3 of it) after the
    /// last answered ping or accepted beat. Default `Hold`. Rows that were not started wait under `Hold` and are handed back under `Cancel`.
    pub on_fence: OnFence,
    /// What happens after an eviction. Default `Reincarnate`: handlers are told to stop, waited for until `dispatch.drain_deadline_seconds`
    /// and then dropped; what they answer is discarded; then the actors start again under a fresh id, at once the first time, after 1 s
    /// doubling to 30 s when it happens again within a minute. `Stop`: nothing more happens until the process is started anew.
    pub on_evicted: OnEvicted,
}

impl Default for LivenessOptions {
    fn default() -> Self {
        Self {
            death_watch: true,
            lock_loss_grace_seconds: 5,
            stale_sweep_interval_seconds: 60,
            on_fence: OnFence::default(),
            on_evicted: OnEvicted::default(),
        }
    }
}

impl LivenessOptions {
    /// The grace.
    pub fn grace(&self) -> Duration {
        Duration::from_secs(self.lock_loss_grace_seconds.into())
    }

    /// The pause between sweeps, before its spread.
    pub fn stale_sweep_interval(&self) -> Duration {
        Duration::from_secs(self.stale_sweep_interval_seconds.into())
    }

    pub(super) fn validate(&self) -> Result<(), OptionsError> {
        check(
            (1..=60).contains(&self.lock_loss_grace_seconds),
            "liveness.lock_loss_grace_seconds",
            self.lock_loss_grace_seconds,
            "must be 1 to 60: at 0 every reconnect is a death",
        )?;
        check(
            (1..=3_600).contains(&self.stale_sweep_interval_seconds),
            "liveness.stale_sweep_interval_seconds",
            self.stale_sweep_interval_seconds,
            "must be 1 to 3600",
        )
    }
}
