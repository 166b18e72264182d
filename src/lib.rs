//! The face of the pump. What follows is the README; the map of the house is in `ARCHITECTURE.md`.
#![doc = include_str!("../README.md")]

#[cfg(feature = "embedded")]
pub mod embedded;

mod age;
mod commit;
pub mod config;
mod connect;
pub mod doctor;
mod enqueue;
mod error;
mod handler;
mod json;
mod pg;
mod pump;
mod runtime;
mod signal;
mod status;

pub mod supervision {
    #![doc = include_str!("../docs/supervision.md")]

    pub use workpump_actors::message::{EvictionReason, PeerEvicted, SubscribeToEvictions, SweepNow};
    pub use workpump_actors::registry::{
        AskHealth, AskTotals, Backoff, ChildInfo, ChildState, Cx, EventKind, Exit, GaveUp, Group, Guard,
        Health, Host, Intensity, InvalidPolicy, Name, Panicked, Placement, Ready, Registry, RegistryActor,
        Restart, RestartChild, Spec, StartChild, StartFailed, StopChild, Strategy, Subscribe,
        SupervisorEvent, Totals, Unknown, WhichChildren,
    };
}

pub mod signals {
    #![doc = include_str!("../docs/signals.md")]

    pub use crate::signal::{BadTopic, Heard, Signal, SignalError, Signals, Subscribe, Topic, Unsubscribe};
}

pub use commit::{CommitError, Enqueued, Stored};
pub use connect::{check_schema, connect, drop_schema};
pub use doctor::{Diagnosis, doctor};
pub use enqueue::{EnqueueError, InvalidMessage, NewInbox, NewOutbox, Producer};
pub use error::Error;
pub use handler::{Context, Handler, OutboxMessage, Outcome, Publisher};
pub use json::JsonError;
pub use pg::migrate::{
    LIBRARY_VERSION, MigrateError, Migrated, SchemaState, migrate, migrate_on, schema_state,
};
pub use pg::schema_name::BadSchemaName;
pub use pump::{Builder, WorkPump};
pub use status::{CategoryStatus, Eviction, InstanceStatus, Status, evictions, status};
pub use workpump_actors as engine;
pub use workpump_actors::delivery::ExtendError;
pub use workpump_actors::instance::Gate;
pub use workpump_actors::message::{
    Account, ExtendLease, GateChanged, GateReport, ProbeNow, RequestImmediatePoll, SubscribeToGate,
};
pub use workpump_actors::options::{OnFailure, Options};
pub use workpump_actors::runner::{Failure, Job, Runner};
pub use workpump_actors::standing::Untrusted;
pub use workpump_actors::tree::{DrainReport, Engine};
pub use workpump_actors::work::{Category, FailureReason};

// Tests of private rooms use the fixtures of `tests/`, which know this crate by its name.
#[cfg(test)]
extern crate self as workpump;
#[cfg(test)]
#[path = "../tests/common/mod.rs"]
mod common;
