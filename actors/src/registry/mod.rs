//! Supervision for actix actors: ordered start and stop, restarts with limits, and addresses that outlive their actors.
//!
//! The rule: an actor that panicked is never used again; a fresh one takes over its address and its queue, under a policy that knows when
//! to stop trying. The failures this prevents: an actor that dies in silence, an address that is dead for ever, a crash loop that eats a
//! core, half a service that looks started, and a service whose actors die with the runtime of whoever embeds it.
//!
//! Knows nothing of the pump: any `Actor<Context = Context<Self>>` can live here.
//!
//! ```text
//!   Group::start ─► supervisor (one task a group, on the host's main thread) ◄─ Ready, Exited ─┐
//!                        │ launches, stops, bypasses                                           │
//!                        ▼                                                                     │
//!   Addr<A> ─► queue ─► pump ─► incarnation (fresh actor, fresh Context, panics caught outside) ┘
//!   stable     stable   one a life, named by its generation
//! ```
//!
//! ```
//! use std::time::Duration;
//! use actix::prelude::*;
//! use workpump_actors::registry::{Group, Host, Spec};
//!
//! struct Counter(u64);
//!
//! impl Actor for Counter {
//!     type Context = Context<Self>;
//! }
//!
//! #[derive(Message)]
//! #[rtype(result = "u64")]
//! struct Add(u64);
//!
//! impl Handler<Add> for Counter {
//!     type Result = u64;
//!
//!     fn handle(&mut self, Add(n): Add, _: &mut Self::Context) -> u64 {
//!         assert!(n < 100, "too much");
//!         self.0 += n;
//!         self.0
//!     }
//! }
//!
//! # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
//! let tree = Group::new("app").child(Spec::new("counter", |_| Counter(0)));
//! let registry = tree.start(Host::own("app").await?, Duration::from_secs(10)).await?;
//!
//! let counter = registry.addr::<Counter>()?;
//! assert_eq!(counter.send(Add(2)).await?, 2);
//! assert!(counter.send(Add(100)).await.is_err(), "this message took the actor with it");
//! assert_eq!(counter.send(Add(3)).await?, 3, "a fresh one answers at the same address");
//! assert_eq!(registry.totals().restarts, 1);
//! registry.shutdown().await;
//! # Ok::<(), Box<dyn std::error::Error>>(()) }).unwrap();
//! ```
//!
//! # What it cannot do
//!
//! * The message that was being handled, and the futures of the actor, die with the incarnation: who waits gets `MailboxError::Closed`.
//!   Messages in the queue do not. While a child waits for its next life, `send` waits too: give it a `.timeout()`.
//! * Memory is lost on purpose. What has to live on sits in an `Arc` that the factory holds, or is read again.
//! * `ctx.address()` inside an actor is the address of that incarnation. Give [`Cx::addr`] away instead.
//! * A blocked thread cannot be killed, only bypassed ([`Spec::liveness`]); what it was doing may still happen.
//! * A `ResponseFuture` runs beside its actor and outlives it; a panic there is seen through a [`Guard`] only.
//! * With `panic = "abort"` there is nothing to catch: the process ends. A warning says so at the start.
//! * An outage is a state, not a crash: an actor should wait and try again by itself. Restarts are for bugs.

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
