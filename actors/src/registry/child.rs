//! What a supervisor sees of a child, whatever its type: an actor, or a group of them.

use std::any::{TypeId, type_name};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use actix::prelude::*;
use tokio::sync::{mpsc, oneshot};

use super::book::Core;
use super::incarnation::{self, Birth};
use super::mailbox::{Mailbox, Pulse};
use super::spec::{Cx, Entry, Make, Progress, READY_WITHIN, STOP_WITHIN};
use super::supervisor::News;
use super::threads::Seat;
use super::{Backoff, Exit, Host, Intensity, Name, Placement, Registry, Restart, Spec};

/// What becomes of a child in which case. What is none is taken from its group.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) restart: Restart,
    pub(super) intensity: Option<Intensity>,
    pub(super) backoff: Option<Backoff>,
    pub(super) ready_within: Option<Duration>,
    pub(super) stop_within: Duration,
    pub(super) liveness: Option<Duration>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            restart: Restart::default(),
            intensity: None,
            backoff: None,
            ready_within: Some(READY_WITHIN),
            stop_within: STOP_WITHIN,
            liveness: None,
        }
    }
}

/// Where a child lives, if it says so itself.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Placing(pub(super) Option<Placement>);

/// Tells a supervisor what becomes of one life of a child. If it is dropped before the end was told, the thread has ended.
#[derive(Debug)]
pub(super) struct Report {
    news: mpsc::UnboundedSender<News>,
    child: u64,
    generation: u64,
    ready: AtomicBool,
    told: AtomicBool,
}

impl Report {
    pub(super) fn new(news: mpsc::UnboundedSender<News>, child: u64, generation: u64) -> Arc<Self> {
        Arc::new(Self {
            news,
            child,
            generation,
            ready: AtomicBool::new(false),
            told: AtomicBool::new(false),
        })
    }

    /// It is ready. Said once; more often changes nothing.
    pub(super) fn ready(&self) {
        if !self.ready.swap(true, Ordering::AcqRel) {
            self.send(News::Ready { child: self.child, generation: self.generation });
        }
    }

    /// It has ended.
    pub(super) fn exit(&self, exit: Exit) {
        if !self.told.swap(true, Ordering::AcqRel) {
            self.send(News::Exited { child: self.child, generation: self.generation, exit });
        }
    }

    fn send(&self, news: News) {
        // Nobody listens once the supervisor has ended.
        let _ = self.news.send(news);
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        self.exit(Exit::ThreadGone);
    }
}

/// Where and for whom a life begins.
pub(super) struct Launch<'a> {
    pub(super) host: &'a Arc<Host>,
    pub(super) core: &'a Arc<Core>,
    pub(super) child: u64,
    pub(super) generation: u64,
    /// Where the group places its children.
    pub(super) placement: Placement,
    pub(super) report: Arc<Report>,
}

/// A life that has begun.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) stop: Option<oneshot::Sender<Duration>>,
    pub(super) progress: Progress,
    /// Signs of life of an actor. A group has none: its children have their own.
    pub(super) vital: Option<(Arc<Pulse>, Seat)>,
}

/// A child whose type was forgotten.
pub(super) trait Node: Send {
    fn name(&self) -> &Name;
    fn settings(&self) -> &Settings;
    /// Begins a life. Called on the host's main thread.
    fn launch(&mut self, launch: Launch<'_>) -> Run;
    /// Lets no message through to the life that was begun last.
    fn fence(&self);
    /// Lets the child go for good. Returns how many messages were never delivered.
    fn close(&mut self, core: &Core) -> u64;
    /// Forgets the names of those inside it.
    fn forget(&self, core: &Core);
    /// Whether it is a group.
    fn is_group(&self) -> bool;
}

/// An actor as a child.
pub(super) struct ActorNode<A: Actor> {
    name: Name,
    addr: Addr<A>,
    mailbox: Mailbox<A>,
    make: Make<A>,
    placing: Placing,
    settings: Settings,
}

/// An actor's own entry, and what it provides.
pub(super) struct Entries {
    pub(super) addr: Entry,
    pub(super) provides: Vec<Entry>,
}

impl<A: Actor<Context = Context<A>>> ActorNode<A> {
    pub(super) fn new(spec: Spec<A>) -> (Self, Entries) {
        let provides = spec.entries();
        let Spec { name, addr, mailbox, make, placing, settings, .. } = spec;
        let entry: Entry = (TypeId::of::<A>(), type_name::<A>(), Box::new(addr.clone()));
        (Self { name, addr, mailbox, make, placing, settings }, Entries { addr: entry, provides })
    }
}

impl<A: Actor<Context = Context<A>>> Node for ActorNode<A> {
    fn name(&self) -> &Name {
        &self.name
    }

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn launch(&mut self, launch: Launch<'_>) -> Run {
        let Launch { host, core, child, generation, placement, report } = launch;
        let (stop, stopping) = oneshot::channel();
        let (pulse, progress) = (Arc::new(Pulse::default()), Progress::default());
        let mut run = Run { stop: Some(stop), progress: progress.clone(), vital: None };
        let seat = match host.seat(self.placing.0.unwrap_or(placement), child, &report) {
            Ok(seat) => seat,
            Err(error) => {
                tracing::error!(child = &*self.name, %error, "no thread can be opened for this actor");
                return run;
            }
        };
        self.mailbox.hand_to(generation);
        let birth = Birth {
            mailbox: self.mailbox.clone(),
            generation,
            pulse: Arc::clone(&pulse),
            stop: stopping,
            report: Arc::clone(&report),
        };
        let make = Arc::clone(&self.make);
        let mut cx = Cx {
            addr: self.addr.clone(),
            name: self.name.clone(),
            generation,
            registry: Registry::for_actors(core),
            report,
            progress,
            tells: false,
        };
        // A thread that does not take it drops it, and with it the last report.
        seat.run(move || {
            incarnation::run(birth, move || {
                let actor = make(&mut cx);
                (actor, cx.tells)
            });
        });
        run.vital = Some((pulse, seat));
        run
    }

    fn fence(&self) {
        self.mailbox.fence();
    }

    fn close(&mut self, _: &Core) -> u64 {
        self.mailbox.close()
    }

    fn forget(&self, _: &Core) {}

    fn is_group(&self) -> bool {
        false
    }
}
