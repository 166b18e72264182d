//! A row of work as the engine sees it: what it is, who may settle it, and which other rows it must wait for.
//!
//! The rule: a row is named by its [`WorkKey`] and may only be changed by whoever presents the [`ClaimEpoch`] of the claim that
//! handed it out. The failure this prevents: a frozen or partitioned instance that wakes up and overwrites the result of the one
//! that took over.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The key of a row inside its category (`message_id`, `event_work_id` or `id`, by table).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkId(pub Uuid);

impl fmt::Display for WorkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The four kinds of work. All share one life cycle; keys and handlers differ.
///
/// The order of the variants is the lock order of every statement that touches several tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Messages to publish, ordered per stream.
    Outbox,
    /// Messages to handle, deduplicated by message id, ordered per stream.
    Inbox,
    /// Projection events, ordered per stream and perspective.
    PerspectiveEvent,
    /// Event handlers, ordered per stream and receptor.
    Receptor,
}

impl Category {
    /// Every category, in lock order.
    pub const ALL: [Self; 4] = [Self::Outbox, Self::Inbox, Self::PerspectiveEvent, Self::Receptor];

    /// The name used in SQL, in options and in messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Outbox => "outbox",
            Self::Inbox => "inbox",
            Self::PerspectiveEvent => "perspective_event",
            Self::Receptor => "receptor",
        }
    }

    /// The category of that name, or `None`.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|category| category.as_str() == name)
    }
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Names one row across all categories. The same id in two categories is two rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkKey {
    /// Which table.
    pub category: Category,
    /// Which row.
    pub id: WorkId,
}

impl fmt::Display for WorkKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.category, self.id)
    }
}

/// The fencing token of one claim: it grows by one at every claim of the row and is never reset, whatever clears the lease.
///
/// Together with the work id it is also the token to hand to systems outside the database that can check one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClaimEpoch(pub i64);

impl fmt::Display for ClaimEpoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Rows with equal order keys run strictly one after another; rows without one run in any order.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OrderKey {
    /// One category never blocks another.
    pub category: Category,
    /// The stream.
    pub stream_id: Uuid,
    /// The perspective or receptor, where that is part of the key.
    pub lane: Option<Arc<str>>,
}

/// One row, freshly leased to this instance, with its body.
#[derive(Clone, Debug)]
pub struct ClaimedWork {
    /// Which row.
    pub key: WorkKey,
    /// The token every write about this claim must carry.
    pub epoch: ClaimEpoch,
    /// Arrival order inside the table.
    pub seq: i64,
    /// The stream, or `None` for unordered work.
    pub stream_id: Option<Uuid>,
    /// `compute_partition(stream_id)`, or `None` without a stream.
    pub partition: Option<i32>,
    /// Claims charged so far, this one included: 1 on the first delivery.
    pub attempts: u32,
    /// How often this row was at the head of its stream when its owner died or its lease ran out.
    pub crash_count: u32,
    /// When the lease ends, by the database clock. For display: the engine times itself from before the claim was sent.
    pub lease_expiry: SystemTime,
    /// Where the row goes: destination (outbox), handler (inbox), perspective or receptor name.
    pub name: Option<Arc<str>>,
    /// The message type (outbox and inbox).
    pub message_type: Option<Arc<str>>,
    /// The event (perspective events and receptors).
    pub event_id: Option<Uuid>,
    /// JSON text of the body; empty where the category has none.
    pub payload: Bytes,
    /// JSON text of the metadata, if any.
    pub metadata: Option<Bytes>,
}

impl ClaimedWork {
    /// What this row is ordered by, or `None` when it is unordered.
    pub fn order_key(&self) -> Option<OrderKey> {
        let lane = match self.key.category {
            Category::Outbox | Category::Inbox => None,
            Category::PerspectiveEvent | Category::Receptor => self.name.clone(),
        };
        self.stream_id.map(|stream_id| OrderKey { category: self.key.category, stream_id, lane })
    }
}

/// Why an attempt failed, as stored in `failure_reason`. The numbers are the original system's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureReason {
    /// The transport could not take the message yet.
    TransportNotReady,
    /// The transport refused or broke.
    TransportException,
    /// The payload could not be decoded, or no handler knows the message type.
    Serialization,
    /// The message was understood and refused for good.
    Validation,
    /// The row used up its attempts.
    MaxAttempts,
    /// The lease ran out while the handler was running.
    LeaseExpired,
    /// The handler panicked.
    Panic,
    /// The row took its process down too often.
    CrashLoop,
    /// Anything else.
    Unknown,
}

impl FailureReason {
    /// The stored code.
    pub fn code(self) -> i32 {
        match self {
            Self::TransportNotReady => 1,
            Self::TransportException => 2,
            Self::Serialization => 3,
            Self::Validation => 4,
            Self::MaxAttempts => 5,
            Self::LeaseExpired => 6,
            Self::Panic => 20,
            Self::CrashLoop => 21,
            Self::Unknown => 99,
        }
    }
}
