//! The whole vocabulary of the actors.
//!
//! The rule: a message says what happened or what is wanted, never to whom; only the tree knows who gets it. A wake carries no data and
//! coalesces. The failure this prevents: actors that know each other and can only be tested together.

mod gate;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use actix::prelude::*;
use serde::Serialize;

use crate::delivery::{Delivery, ExtendError, Settlement};
use crate::instance::{AliveLock, Gate, InstanceId};
use crate::work::{ClaimEpoch, WorkKey};

pub use gate::{GateReport, MAX_CHANNEL_BYTES, ProbeNow, SubscribeError};

/// Work may have become claimable: claim now, at any depth of backoff. Many of them are as good as one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Message)]
#[rtype(result = "()")]
pub struct RequestImmediatePoll;

/// This instance has written something by which a row may have become claimable that rings nobody: a retry, or the last row of a run. One
/// look is enough, where [`RequestImmediatePoll`] is looked into twice: what it is about is known to be there by now, or not at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Message)]
#[rtype(result = "()")]
pub struct WorkFreed;

/// NOTIFY became known to reach this instance, or is no longer known to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Message)]
#[rtype(result = "()")]
pub struct GateChanged(pub Gate);

/// Be told of the gate as it stands, and of every change from then on, exactly once each. Asking twice is asking once, but for being told
/// again how it stands, so an actor may ask in its factory, in every life; whoever has ended is forgotten. Whose mailbox is full is told
/// how the gate stands once there is room.
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
pub struct SubscribeToGate(pub Recipient<GateChanged>);

/// Hear a channel of NOTIFY over the instance's one direct session, for as long as the recipient lives. Asking twice is asking once, but
/// for being told again that the channel is listened to; so an actor may ask in its factory, in every life.
///
/// The first subscriber of a channel makes the session listen, the last one that leaves makes it stop; a channel is listened to again on
/// every new session. Without a direct session, and in the mode `Polling`, nothing is heard.
///
/// Nothing waits for a subscriber: a ring for which its mailbox has no room is dropped and counted, and [`Heard::Listening`] follows as soon
/// as there is room.
#[derive(Clone, Debug, Message)]
#[rtype(result = "Result<(), SubscribeError>")]
pub struct Subscribe {
    /// The channel, 1 to 63 bytes, without NUL.
    pub channel: Arc<str>,
    /// Who hears it.
    pub to: Recipient<Heard>,
}

/// Hear a channel no more. Asking twice changes nothing.
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
pub struct Unsubscribe {
    /// The channel.
    pub channel: Arc<str>,
    /// Who heard it.
    pub to: Recipient<Heard>,
}

/// What a subscriber of a channel hears, in the order of the commits.
#[derive(Clone, Debug, PartialEq, Eq, Message)]
#[rtype(result = "()")]
pub enum Heard {
    /// From now on the channel is listened to: after this subscription, on a new session, or after rings that found the mailbox full.
    /// Whatever was sent before may have been missed: look at the state that the notifications are about.
    Listening {
        /// The channel.
        channel: Arc<str>,
    },
    /// Somebody rang.
    Rung {
        /// The channel.
        channel: Arc<str>,
        /// What was sent along.
        payload: Arc<str>,
    },
}

/// This instance can no longer be sure that its leases are its own: claim nothing, start nothing, write nothing until [`Unfence`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Message)]
#[rtype(result = "()")]
pub struct Fence;

/// This instance is a member, and its leases are its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Message)]
#[rtype(result = "()")]
pub struct Unfence;

/// Claim nothing more until [`Resume`]; what is leased goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Message)]
#[rtype(result = "()")]
pub struct Pause;

/// Claim again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Message)]
#[rtype(result = "()")]
pub struct Resume;

/// Finish, take nothing new, and answer when done. There is no way back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Message)]
#[rtype(result = "Drained")]
pub struct Drain;

/// What a drain did. The accounts of several actors add up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Drained {
    /// Rows handed back that were never started.
    pub released: u64,
    /// Handlers that finished while the drain waited.
    pub finished: u64,
    /// Handlers that did not finish in time: cancelled and no longer waited for.
    pub abandoned: u64,
    /// Settlements written while the drain waited.
    pub settled: u64,
    /// Settlements that could not be written in time.
    pub unsettled: u64,
    /// Whether the instance left the membership.
    pub deregistered: bool,
}

impl std::ops::AddAssign for Drained {
    fn add_assign(&mut self, other: Self) {
        self.released += other.released;
        self.finished += other.finished;
        self.abandoned += other.abandoned;
        self.settled += other.settled;
        self.unsettled += other.unsettled;
        self.deregistered |= other.deregistered;
    }
}

/// Rows claimed together, to be run. In order inside each order key.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Dispatch {
    /// The rows, each on its own permit.
    pub deliveries: Vec<Delivery>,
}

/// Rows that were claimed and shall not be run after all: hand them back, with their attempt refunded.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct HandBack {
    /// The rows.
    pub deliveries: Vec<Delivery>,
}

/// Results to be written, oldest first.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Settle {
    /// The results, each with the permit that returns once it is written.
    pub settlements: Vec<Settlement>,
}

/// Renew the lease of this row, at the cost of one of its renewals; the rest of its run with it.
///
/// The answer is the new deadline by the runtime's clock: when a handler of this claim is told to stop. It comes when the database has
/// answered; while too many renewals wait, it takes longer. A claim that nobody here holds is renewed by its epoch, which the database
/// checks: no other claim is ever touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Message)]
#[rtype(result = "Result<tokio::time::Instant, ExtendError>")]
pub struct ExtendLease {
    /// Which row.
    pub key: WorkKey,
    /// Under which claim.
    pub epoch: ClaimEpoch,
}

/// Beat now, whatever the cadence says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Message)]
#[rtype(result = "()")]
pub struct BeatNow;

/// The session alive-lock was gained or lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Message)]
#[rtype(result = "()")]
pub struct AliveLockChanged(pub AliveLock);

/// A ping was answered on the session that holds the alive-lock: it was held when the ping was sent. Noted in the standing already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Message)]
#[rtype(result = "()")]
pub struct TrustProven {
    /// When the ping was sent.
    pub sent_at: Instant,
}

/// Work is in hand, or about to be: ping the direct session, to prove that this instance is alive, and go on proving it while there is any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Message)]
#[rtype(result = "()")]
pub struct PingNow;

/// Switch the heartbeat on or off, for all lives to come: `heartbeat.enabled` at run time.
///
/// Off: no beat is sent any more, the alive-lock is let go and nothing is claimed, so that peers take over once they see this instance as
/// dead; rows in hand go on for as long as this instance is trusted; and an eviction is not followed by a fresh id. On: it beats again, under its
/// old id or, when that was evicted, a fresh one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Message)]
#[rtype(result = "()")]
pub struct SetHeartbeat(pub bool);

/// The heartbeat was switched on or off; the standing says which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Message)]
#[rtype(result = "()")]
pub struct HeartbeatSwitched;

/// The instance was evicted: its id is burnt, and nothing may be claimed, run or written under it any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Message)]
#[rtype(result = "()")]
pub struct Evicted(pub InstanceId);

/// Look for peers whose beat is stale now, whatever the interval says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Message)]
#[rtype(result = "()")]
pub struct SweepNow;

/// This instance evicted a peer. Evictions by others are not told here; all of them stand in the table of tombstones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Message)]
#[rtype(result = "()")]
pub struct PeerEvicted {
    /// Who is a member no longer.
    pub instance: InstanceId,
    /// What it was taken for dead by.
    pub reason: EvictionReason,
}

/// What a peer was taken for dead by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum EvictionReason {
    /// Its alive-lock stayed free for the grace.
    AliveLockLost,
    /// Its beat was stale and its lock free, or it had not beaten for five minutes.
    StaleHeartbeat,
}

/// Be told of every [`PeerEvicted`] from now on. Asking twice is asking once, so an actor may ask in its factory, in every life; whoever
/// has ended is forgotten.
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
pub struct SubscribeToEvictions(pub Recipient<PeerEvicted>);

/// Give an account of yourself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Message)]
#[rtype(result = "Account")]
pub struct Observe;

/// What an actor says of itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Account {
    /// Who speaks.
    pub name: &'static str,
    /// What it is doing, in a word.
    pub state: &'static str,
    /// What it has counted since it started.
    pub counters: BTreeMap<&'static str, u64>,
    /// What it has to say in words, by name.
    pub notes: BTreeMap<&'static str, String>,
    /// The last error, if the last thing it tried failed or any did before.
    pub last_error: Option<String>,
    /// Seconds since something last went well.
    pub last_success_seconds_ago: Option<f64>,
}

impl Account {
    /// The value of one counter, 0 when it has none of that name.
    pub fn counter(&self, name: &str) -> u64 {
        self.counters.get(name).copied().unwrap_or_default()
    }
}
