//! Futures that run beside an actor.

use std::fmt;
use std::panic::AssertUnwindSafe;

use futures_util::FutureExt;

use super::exit::panic_text;
use super::{EventKind, Name, Registry};

/// Reports panics of futures that no actor polls: a `ResponseFuture`, a spawned task.
///
/// Such a panic is invisible otherwise: the runtime drops the task, and all anybody sees is an answer that never comes. The actor itself is
/// not restarted: its memory was not involved.
#[derive(Clone)]
pub struct Guard {
    child: Name,
    registry: Registry,
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard").field("child", &self.child).finish_non_exhaustive()
    }
}

/// A guarded future panicked, with this text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it panicked: {0}")]
pub struct Panicked(pub String);

impl Guard {
    pub(super) fn new(child: Name, registry: Registry) -> Self {
        Self { child, registry }
    }

    /// Runs a future to its end. A panic becomes an error, a warn line, an event and a count.
    ///
    /// # Errors
    ///
    /// When the future panicked.
    pub fn guarded<F: Future>(
        &self,
        future: F,
    ) -> impl Future<Output = Result<F::Output, Panicked>> + use<F> {
        let guard = self.clone();
        AssertUnwindSafe(future).catch_unwind().map(move |answer| {
            answer.map_err(|panic| {
                let text = panic_text(&*panic);
                tracing::warn!(child = &*guard.child, panic = text, "a future beside this actor panicked");
                guard.registry.tell_beside(&guard.child, EventKind::BesidePanicked { text: text.clone() });
                Panicked(text)
            })
        })
    }

    /// Runs a future as a task of this thread, guarded.
    ///
    /// # Panics
    ///
    /// Outside an actix system.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        let guarded = self.guarded(future);
        actix_rt::spawn(async move {
            // The panic was reported.
            let _ = guarded.await;
        });
    }
}
