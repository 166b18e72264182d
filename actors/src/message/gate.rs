//! What can be asked of the notify gate, and what it says of itself.
//!
//! The rule: it says what was proven and when, never what it hopes. The failure this prevents: a health page that shows a gate as open
//! through which nothing comes.

use std::sync::Arc;

use actix::prelude::*;
use serde::Serialize;

use crate::instance::Gate;

/// The longest name of a channel in bytes. PostgreSQL would cut off the rest of a longer one, and nobody would hear anything.
pub const MAX_CHANNEL_BYTES: usize = 63;

/// Why a channel cannot be heard.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubscribeError {
    /// A channel has to have a name.
    #[error("the name of the channel is empty: name the channel that is rung")]
    Empty,
    /// The name is too long.
    #[error("channel {channel:?} has {} bytes: use a name of at most {MAX_CHANNEL_BYTES} bytes", channel.len())]
    TooLong {
        /// The name.
        channel: Arc<str>,
    },
    /// The name has a character that PostgreSQL does not allow.
    #[error("channel {channel:?} holds a NUL character: use a name without it")]
    Nul {
        /// The name.
        channel: Arc<str>,
    },
}

impl SubscribeError {
    /// Whether a channel of this name can be heard.
    pub(crate) fn check(channel: &Arc<str>) -> Result<(), Self> {
        match channel {
            name if name.is_empty() => Err(Self::Empty),
            name if name.len() > MAX_CHANNEL_BYTES => Err(Self::TooLong { channel: Arc::clone(name) }),
            name if name.contains('\0') => Err(Self::Nul { channel: Arc::clone(name) }),
            _ => Ok(()),
        }
    }
}

/// Prove now that NOTIFY reaches this instance, and say how it went: a ring by the producers' route that comes back on the direct session.
/// Without a session one is opened first. Whoever asks while a proof is under way shares it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Message)]
#[rtype(result = "GateReport")]
pub struct ProbeNow;

/// What is known of the notify gate.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GateReport {
    /// Whether NOTIFY is known to reach this instance.
    pub gate: Gate,
    /// Why it is not available, or why there is none.
    pub reason: Option<String>,
    /// Seconds since a ring by the producers' route last came back.
    pub last_verified_seconds_ago: Option<f64>,
    /// Seconds since it was last found not to be available.
    pub last_failure_seconds_ago: Option<f64>,
    /// Why it was not available then.
    pub last_failure: Option<String>,
    /// How often its state has changed.
    pub changes: u64,
}
