//! How the life of a child ends.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{GaveUp, StartFailed};

/// How the life of a child ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Exit {
    /// It stopped by itself.
    Stopped,
    /// It was asked to stop.
    Shutdown,
    /// It panicked, with this text: in a handler, a timer, a stream, a spawned future, `started()`, `stopping()`, or while it was dropped.
    Panicked(String),
    /// Its factory panicked, with this text.
    FactoryPanicked(String),
    /// It was not ready in time; with the last thing it said about why.
    NotReady(Option<String>),
    /// It did not serve its mailbox within its limit, or did not end within its time to stop. It was bypassed: no message reaches it.
    Stuck,
    /// Its thread ended under it.
    ThreadGone,
    /// A group: one of its children did not start.
    NotStarted(Box<StartFailed>),
    /// A group: one of its children died too often.
    GaveUp(Box<GaveUp>),
}

impl Exit {
    /// Whether something went wrong.
    pub fn is_failure(&self) -> bool {
        !matches!(self, Self::Stopped | Self::Shutdown)
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stopped => f.write_str("it stopped by itself"),
            Self::Shutdown => f.write_str("it was asked to stop"),
            Self::Panicked(text) => write!(f, "it panicked: {text}"),
            Self::FactoryPanicked(text) => write!(f, "its factory panicked: {text}"),
            Self::NotReady(None) => f.write_str("it was not ready in time"),
            Self::NotReady(Some(problem)) => write!(f, "it was not ready in time: {problem}"),
            Self::Stuck => f.write_str("it was stuck"),
            Self::ThreadGone => f.write_str("its thread ended"),
            Self::NotStarted(failed) => write!(f, "{failed}"),
            Self::GaveUp(gave_up) => write!(f, "{gave_up}"),
        }
    }
}

/// Runs what may panic. If it does: what the panic said.
pub(super) fn caught<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        let text = panic_text(&*panic);
        // What was thrown may panic itself when it is dropped; what that throws is not looked at any more.
        if let Err(worse) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
            std::mem::forget(worse);
        }
        text
    })
}

/// What a panic said.
pub(super) fn panic_text(panic: &(dyn Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text.clone()
    } else {
        "something that is not text".to_owned()
    }
}
