//! Supervision for actix actors: ordered start and stop, restarts with limits, and addresses that outlive their actors.
//!
//! The rule: an actor that panicked is never used again; a fresh one takes over its address and its queue, under a policy that knows when
//! to stop trying. The failures this prevents: an actor that dies in silence, an address that is dead for ever, a crash loop that eats a
//! core, half a service that looks started, and a service whose actors die with the runtime of whoever embeds it.
//!
//! Knows nothing of the pump: any `Actor<Context = Context<Self>>` can live here.

mod ask;
mod book;
mod child;
mod command;
mod error;
mod event;
mod exit;
mod group;
mod guard;
mod handle;
mod host;
mod incarnation;
mod mailbox;
mod members;
mod name;
mod order;
mod restart;
mod slot;
mod spec;
mod supervisor;
mod threads;

pub use ask::{
    AskHealth, AskTotals, RegistryActor, RestartChild, StartChild, StopChild, Subscribe, WhichChildren,
};
pub use error::{GaveUp, StartFailed, Unknown};
pub use event::{ChildInfo, ChildState, EventKind, Health, SupervisorEvent, Totals};
pub use exit::Exit;
pub use group::Group;
pub use guard::{Guard, Panicked};
pub use handle::Registry;
pub use host::{Host, Placement};
pub use name::Name;
pub use restart::{Backoff, Intensity, InvalidPolicy, Restart, Strategy};
pub use spec::{Cx, Ready, Spec};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, whoever panicked before: every critical section in this crate leaves its data whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
