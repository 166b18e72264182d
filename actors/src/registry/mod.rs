//! Actors on threads of their own, started in order and stopped in reverse.
//!
//! The rule: a group starts whole or not at all, and the error names the child that failed and why; addresses exist before their actors
//! do, so that neighbours can be wired before anything runs. The failures this prevents: half a service that looks started, and a service
//! whose actors die with the runtime of whoever embeds it.
//!
//! Knows nothing of the pump: any `Actor<Context = Context<Self>>` can live here.

mod group;
mod host;
mod incarnation;
mod spec;

pub use group::{Group, Registry, StartFailed};
pub use host::Host;
pub use incarnation::Exit;
pub use spec::{Cx, Ready, Spec};

/// Where an actor lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// On the thread that nothing else may delay.
    Vital,
    /// On the thread of the daily work.
    #[default]
    Work,
    /// On the thread that made the [`Host`].
    Current,
}

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, whoever panicked before: every critical section in this crate leaves its data whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
