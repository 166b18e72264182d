//! What the engine needs from a database, in the engine's own words.
//!
//! The rule: the engine decides when and what, a store decides how. Two implementations exist (PostgreSQL in the facade, a fake in
//! `testing`), and one conformance suite runs on both.

mod doorbell;
mod gate;
mod liveness;

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

pub use doorbell::{ArmMode, Armed, Doorbell};
pub use gate::ProducersRoute;
pub use liveness::{
    DatabaseTime, DeathWatch, DirectConnector, DirectSession, Notification, NotificationSender,
    NotificationStream, Renewal, RenewalStore, Suspect, SuspectVerdict, SweepStore, Swept,
};

use crate::instance::{Gate, InstanceId, InstanceIdentity};
use crate::work::{Category, ClaimEpoch, ClaimedWork, FailureReason, WorkKey};

/// The answer of a store, some time later.
pub type PortFuture<'a, T> = BoxFuture<'a, Result<T, StoreError>>;

/// Why a store did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The database cannot be reached, went away, or did not answer in time. The outcome of the call is unknown.
    #[error("database unavailable: {0}")]
    Unavailable(String),
    /// Deadlock, serialization failure, lock or statement timeout: nothing was written, try again.
    #[error("database contended: {0}")]
    Contended(String),
    /// This instance was evicted (`WH001`); its id must never write again.
    #[error("instance {0} was evicted")]
    Evicted(InstanceId),
    /// This instance is not registered (`WH003`): a heartbeat must be accepted first.
    #[error("instance {0} is not registered")]
    NotRegistered(InstanceId),
    /// The schema is missing, or needs a newer library (`WH004`).
    #[error("schema not usable: {0}")]
    Schema(String),
    /// A pooler answered where the server itself is needed: the session can hold no lock and hear no notification.
    #[error("not a direct connection: {0}; set a direct URL that leads past the pooler")]
    NotDirect(String),
    /// A value in the batch was refused (SQLSTATE class 22 or 23, `WH002`): one item is at fault, the batch can be bisected.
    #[error("value refused ({code}): {message}")]
    Rejected {
        /// The SQLSTATE.
        code: String,
        /// What the server said.
        message: String,
    },
    /// Anything else; retrying will not help by itself. With the code `client` the outcome of the call is unknown.
    #[error("database error ({code}): {message}")]
    Other {
        /// The SQLSTATE, or `client` for errors on this side of the connection.
        code: String,
        /// What went wrong.
        message: String,
    },
}

impl StoreError {
    /// Whether the same call may succeed later without anyone changing anything.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::Contended(_))
    }

    /// Whether the call may have been carried out, or may still be, although it failed here.
    pub fn outcome_is_unknown(&self) -> bool {
        match self {
            Self::Unavailable(_) => true,
            Self::Other { code, .. } => code == "client",
            _ => false,
        }
    }
}

/// One claim: at most `max_rows` rows, leased to `instance` from now on.
#[derive(Clone, Debug)]
pub struct ClaimRequest {
    /// Who claims.
    pub instance: InstanceId,
    /// Rows at most; at least 1.
    pub max_rows: u32,
    /// Bytes of payload at most; the first row is always returned.
    pub max_bytes: u64,
    /// How long the rows are leased.
    pub lease: Duration,
    /// Modulus of `compute_partition`.
    pub partition_count: u32,
    /// Rows of one stream at most.
    pub stream_run: u32,
    /// The categories somebody here can handle.
    pub categories: Arc<[Category]>,
}

/// What a claim brought.
#[derive(Debug, Default)]
pub struct Claimed {
    /// The rows, in order inside each order key.
    pub works: Vec<ClaimedWork>,
    /// More was claimable than fitted: claim again at once.
    pub has_more: bool,
}

/// What shall become of one claimed row.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Done.
    Complete,
    /// Failed: due again after a pause. The rest of the stream's run is handed back with it.
    Retry {
        /// Not before this much time has passed, by the database clock.
        after: Duration,
        /// Why.
        reason: FailureReason,
        /// What went wrong, for people.
        error: String,
    },
    /// Never started: handed back at once, the attempt refunded.
    Release,
    /// Failed for good.
    DeadLetter {
        /// Why.
        reason: FailureReason,
        /// What went wrong, for people.
        error: String,
    },
}

/// One fenced write.
#[derive(Clone, Debug)]
pub struct SettleItem {
    /// Which row.
    pub key: WorkKey,
    /// The token of the claim being settled.
    pub epoch: ClaimEpoch,
    /// What shall become of it.
    pub verdict: Verdict,
}

/// What a settlement changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Settled {
    /// Rows changed as asked.
    pub applied: usize,
    /// Rows that no longer belong to this claim: nothing was changed.
    pub fenced: Vec<WorkKey>,
}

/// The work tables.
pub trait WorkStore: Send + Sync + 'static {
    /// Leases rows to the caller. Never waits for a lock.
    fn claim(&self, request: ClaimRequest) -> PortFuture<'_, Claimed>;

    /// Applies a whole flush in one transaction, fenced row by row.
    fn settle(&self, instance: InstanceId, items: Vec<SettleItem>) -> PortFuture<'_, Settled>;

    /// Hands back whatever `instance` leases in the tables but nobody here holds. Returns the number of rows.
    ///
    /// Needed after a restart of the claiming actor and after a claim whose answer was lost.
    fn release_unheld(&self, instance: InstanceId, held: Vec<(WorkKey, ClaimEpoch)>) -> PortFuture<'_, u64>;

    /// How long until the next row becomes claimable by time alone (a due schedule, an expiring lease), by the database clock.
    /// `None` when nothing is waiting for a time.
    fn next_claimable_in(&self, instance: InstanceId) -> PortFuture<'_, Option<Duration>>;
}

/// One heartbeat.
#[derive(Clone, Debug)]
pub struct Beat {
    /// Who beats.
    pub identity: InstanceIdentity,
    /// The current cadence, declared so that peers judge by it.
    pub interval: Duration,
    /// Whether the alive-lock is held.
    pub lock_declared: bool,
    /// Whether peers may route work here.
    pub accepts_work: bool,
    /// The categories somebody here can handle, in order: it is rung for no other.
    pub categories: Arc<[Category]>,
    /// Whether NOTIFY reaches it, for operators.
    pub gate: Gate,
    /// Why not.
    pub gate_reason: Option<String>,
}

/// The answer to a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BeatAnswer {
    /// The instance is a member.
    Accepted,
    /// The instance was evicted; its id is burnt.
    Evicted,
}

/// The membership table, as its own instance sees it.
pub trait InstanceStore: Send + Sync + 'static {
    /// Whether the schema is there and this library may use it. `Ok(false)`: not yet, ask again.
    fn schema_ready(&self) -> PortFuture<'_, bool>;

    /// Writes one heartbeat, past the pooler where that is possible and through it where it is not.
    fn beat(&self, beat: Beat) -> PortFuture<'_, BeatAnswer>;

    /// Leaves: hands back what is still leased, deletes the member, and tells the peers.
    fn deregister(&self, instance: InstanceId) -> PortFuture<'_, ()>;
}
