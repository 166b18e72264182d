//! One running pump as its peers see it: an id that is never used twice, and the states that decide how it beats and polls.

use std::fmt;

use serde::Serialize;
use uuid::Uuid;

/// Names one incarnation of one pump. Never used twice: an evicted instance comes back under a fresh id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InstanceId(pub Uuid);

impl InstanceId {
    /// A fresh, time-ordered id.
    pub fn fresh() -> Self {
        Self(Uuid::now_v7())
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Who this instance says it is, in every heartbeat.
#[derive(Clone, Debug)]
pub struct InstanceIdentity {
    /// The id.
    pub id: InstanceId,
    /// The service the pump is embedded in.
    pub service_name: String,
    /// The host it runs on.
    pub host_name: String,
    /// The operating system's process id.
    pub process_id: i32,
}

/// Whether NOTIFY is known to reach this instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Gate {
    /// No gate exists: plain backoff.
    #[default]
    Unconfigured,
    /// Proven: the relaxed interval is enough.
    Available,
    /// Broken or unproven: poll at the tight base, without backoff.
    Unavailable,
}

impl Gate {
    /// Its name, as operators see it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unconfigured => "unconfigured",
            Self::Available => "available",
            Self::Unavailable => "unavailable",
        }
    }
}

impl fmt::Display for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Whether this instance holds its session-level alive-lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum AliveLock {
    /// There is no source for the lock (no direct connection).
    #[default]
    NoSource,
    /// Held: the lock proves liveness and the slow beat is enough.
    Held,
    /// Not held: beat fast.
    NotHeld,
}
