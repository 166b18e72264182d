//! How this instance learns that work has arrived. The rule: NOTIFY is believed in only while a ring sent by the producers' route has come
//! back within the last interval; until then, and whenever it has not, work is found by polling at the tight base.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{OptionsError, check};

/// Whether NOTIFY is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum GateMode {
    /// Used while it is proven to work; otherwise work is found by polling, and the proof is tried again for ever.
    #[default]
    Auto,
    /// Required: the start fails, with the reason, when it cannot be proven within 10 s. Later losses are as with `Auto`.
    ListenNotify,
    /// Never used: nothing is listened to and nobody rings. The direct session still holds the alive-lock.
    Polling,
}

/// The notify gate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GateOptions {
    /// Whether NOTIFY is used. Default `Auto`.
    pub mode: GateMode,
    /// Seconds between two proofs while all is well; each is one statement through the database URL, and the ring that comes back is the
    /// ping of the direct session. Default 30. 1 to 3 600. Lower finds a listener that hears nothing sooner, and costs a statement each time.
    pub probe_interval_seconds: u32,
    /// Seconds a ring may take to be sent, and then to be heard, before the route counts as cut, or the listener as deaf and its session is
    /// opened again. Default 5. 1 to 60.
    pub probe_timeout_seconds: u32,
    /// Seconds the first ring of a new session may take to be heard. Default 2. 1 to 60.
    pub self_test_timeout_seconds: u32,
    /// Longest pause in seconds between two tries to open the session; the first comes at once, the next after 0.1 s, doubling, each spread by
    /// 20 % either way, for ever. Default 4. 1 to 300. No pause is longer than 0.75 of `liveness.lock_loss_grace_seconds` before its spread, so
    /// 3.75 s at the defaults: the alive-lock comes back with the session. Higher only matters with a longer grace.
    pub reconnect_max_seconds: u32,
}

impl Default for GateOptions {
    fn default() -> Self {
        Self {
            mode: GateMode::default(),
            probe_interval_seconds: 30,
            probe_timeout_seconds: 5,
            self_test_timeout_seconds: 2,
            reconnect_max_seconds: 4,
        }
    }
}

impl GateOptions {
    /// The pause between two proofs.
    pub fn probe_interval(&self) -> Duration {
        Duration::from_secs(self.probe_interval_seconds.into())
    }

    /// How long a proof may take.
    pub fn probe_timeout(&self) -> Duration {
        Duration::from_secs(self.probe_timeout_seconds.into())
    }

    /// How long the first proof of a session may take.
    pub fn self_test_timeout(&self) -> Duration {
        Duration::from_secs(self.self_test_timeout_seconds.into())
    }

    /// The longest pause between two connects.
    pub fn reconnect_max(&self) -> Duration {
        Duration::from_secs(self.reconnect_max_seconds.into())
    }

    pub(super) fn validate(&self) -> Result<(), OptionsError> {
        for (option, seconds, most, reason) in [
            ("gate.probe_interval_seconds", self.probe_interval_seconds, 3_600, "must be 1 to 3600"),
            ("gate.probe_timeout_seconds", self.probe_timeout_seconds, 60, "must be 1 to 60"),
            ("gate.self_test_timeout_seconds", self.self_test_timeout_seconds, 60, "must be 1 to 60"),
            ("gate.reconnect_max_seconds", self.reconnect_max_seconds, 300, "must be 1 to 300"),
        ] {
            check((1..=most).contains(&seconds), option, seconds, reason)?;
        }
        Ok(())
    }
}
