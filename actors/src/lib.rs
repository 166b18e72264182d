//! The engine of [workpump](https://docs.rs/workpump): it knows rows, leases and time, and never SQL.
//!
//! Read the rooms downwards; each may use those above it.
//!
//! | room | holds |
//! |---|---|
//! | [`work`], [`instance`], [`options`] | what a row, an instance and a knob are |
//! | [`port`], [`runner`] | what the engine needs from a database and from user code |
//! | [`policy`] | pure decisions: when to poll, when to beat, when to flush, what a failure means |
//! | `clock` | the clock that leases are timed by: it counts suspend |
//! | [`delivery`] | one row in flight with its permit and its lease, and the renewals that were asked for |
//! | [`message`] | the whole vocabulary of the actors |
//! | [`standing`] | what is known about the instance, for every incarnation of every actor |
//! | `lane` | runs rows on the handler runtime, one at a time per order key |
//! | [`actor`] | the actors, thin: they wait, ask a policy, act |
//! | [`registry`] | ordered start and stop of actors on threads of their own; knows nothing of the pump |
//! | [`tree`] | the pump's tree; it alone names every actor |
//!
//! What is absent on purpose: a database, a wall clock, a global random generator, and any way for a message to carry capacity
//! backwards. Capacity is a permit that returns by itself when a settlement was written and dropped.

pub mod instance;
pub mod options;
pub mod port;
pub mod runner;
pub mod work;

pub mod policy;

pub mod delivery;
pub mod message;
pub mod standing;

mod clock;
mod lane;

pub mod actor;
pub mod registry;
pub mod tree;

#[cfg(feature = "testing")]
pub mod testing;

pub use tree::{DrainReport, Engine, EngineParts, StartError};

pub(crate) use registry::lock;
