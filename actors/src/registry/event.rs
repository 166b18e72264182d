//! What a registry tells about itself.

use std::fmt;
use std::time::{Duration, Instant};

use actix::prelude::*;
use serde::{Serialize, Serializer};

use super::{Exit, Name};

/// Something happened to a child. Sent to whoever listens to [`Registry::events`](super::Registry::events) or has subscribed.
#[derive(Clone, Debug, PartialEq, Message, Serialize)]
#[rtype(result = "()")]
pub struct SupervisorEvent {
    /// To which child: an actor or a group.
    pub child: Name,
    /// Which life of it, from 1.
    pub generation: u64,
    /// When, on the clock of the host.
    #[serde(skip)]
    pub at: Instant,
    /// What.
    pub kind: EventKind,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum EventKind {
    /// A life began.
    Started,
    /// It is ready.
    Ready,
    /// The life ended without being asked to.
    Exited {
        /// Why.
        #[serde(serialize_with = "as_text")]
        exit: Exit,
    },
    /// It comes back.
    RestartIn {
        /// After this pause.
        #[serde(rename = "seconds", serialize_with = "as_seconds")]
        delay: Duration,
    },
    /// It has not served its mailbox within its limit and is bypassed.
    Unresponsive,
    /// It was asked to stop and is gone.
    Stopped,
    /// It will not come back.
    Closed {
        /// Messages in its queue that nobody will handle.
        undelivered: u64,
    },
    /// It died too often.
    GaveUp {
        /// How many restarts were tried inside the window.
        restarts: u32,
    },
    /// A future that runs beside the actor panicked; see [`Guard`](super::Guard). The actor goes on.
    BesidePanicked {
        /// What the panic said.
        text: String,
    },
}

impl fmt::Display for SupervisorEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { child, generation, kind, .. } = self;
        write!(f, "{child} (life {generation}): ")?;
        match kind {
            EventKind::Started => f.write_str("started"),
            EventKind::Ready => f.write_str("ready"),
            EventKind::Exited { exit } => write!(f, "{exit}"),
            EventKind::RestartIn { delay } => write!(f, "comes back in {} ms", delay.as_millis()),
            EventKind::Unresponsive => f.write_str("does not serve its mailbox and is bypassed"),
            EventKind::Stopped => f.write_str("stopped"),
            EventKind::Closed { undelivered } => write!(f, "closed with {undelivered} messages undelivered"),
            EventKind::GaveUp { restarts } => write!(f, "given up after {restarts} restarts"),
            EventKind::BesidePanicked { text } => write!(f, "a future beside it panicked: {text}"),
        }
    }
}

/// Where a child stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChildState {
    /// Not running: not started yet, or stopped.
    #[default]
    Stopped,
    /// Running, and not ready yet.
    Starting,
    /// Running and ready.
    Ready,
    /// Dead, and waiting for its next life.
    Waiting,
    /// Asked to stop.
    Stopping,
    /// It ended well and will not come back.
    Finished,
    /// It ended badly and will not come back.
    Failed,
}

/// What is known of a child.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChildInfo {
    /// Its name.
    pub name: Name,
    /// The group it belongs to; none for the root.
    pub group: Option<Name>,
    /// Whether it is a group itself.
    pub is_group: bool,
    /// Where it stands.
    pub state: ChildState,
    /// Which life it is in, from 1; 0 before the first.
    pub generation: u64,
    /// Restarts after a death, since the tree was started. Never reset.
    pub restarts: u64,
    /// How its last life ended that nobody asked to.
    #[serde(serialize_with = "as_optional_text")]
    pub last_exit: Option<Exit>,
}

/// Whether a tree does its work, and if not, why.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Health {
    /// The actors that are not ready and have not finished, in start order. Empty: all is well.
    pub troubles: Vec<ChildInfo>,
}

impl Health {
    /// Whether every child is ready or has finished.
    pub fn is_ready(&self) -> bool {
        self.troubles.is_empty()
    }
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_ready() {
            return f.write_str("ready");
        }
        for (at, child) in self.troubles.iter().enumerate() {
            let separator = if at == 0 { "" } else { "; " };
            write!(f, "{separator}{} is {:?}", child.name, child.state)?;
            if let Some(exit) = &child.last_exit {
                write!(f, ", because {exit}")?;
            }
        }
        Ok(())
    }
}

/// What a registry has counted since its start. Never reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// Restarts after a death.
    pub restarts: u64,
    /// Lives that ended with a panic.
    pub panics: u64,
    /// Panics of futures beside an actor.
    pub panics_beside: u64,
    /// Lives that were bypassed because they were stuck.
    pub bypassed: u64,
    /// Messages in queues when these were closed.
    pub undelivered: u64,
    /// Children that died too often.
    pub gave_up: u64,
}

fn as_text<S: Serializer>(exit: &Exit, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(exit)
}

#[expect(clippy::ref_option, reason = "serde hands over a reference to the field")]
fn as_optional_text<S: Serializer>(exit: &Option<Exit>, serializer: S) -> Result<S::Ok, S::Error> {
    exit.as_ref().map(ToString::to_string).serialize(serializer)
}

fn as_seconds<S: Serializer>(delay: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(delay.as_secs_f64())
}
