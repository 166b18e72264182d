//! What a registry must know of an actor before it starts it.

use std::any::{Any, TypeId};
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use actix::dev::ToEnvelope;
use actix::prelude::*;

use super::child::{Placing, Report, Settings};
use super::mailbox::Mailbox;
use super::{Backoff, Guard, Intensity, Name, Placement, Registry, Restart, lock};

/// Messages that may wait in a mailbox before senders who care have to wait too.
const MAILBOX: usize = 64;

/// How long a child may take to become ready, and to stop, unless its spec says otherwise.
pub(super) const READY_WITHIN: Duration = Duration::from_secs(30);
pub(super) const STOP_WITHIN: Duration = Duration::from_secs(5);

/// What a factory is given.
pub struct Cx<A: Actor> {
    pub(super) addr: Addr<A>,
    pub(super) name: Name,
    pub(super) generation: u64,
    pub(super) registry: Registry,
    pub(super) report: Arc<Report>,
    pub(super) progress: Progress,
    pub(super) tells: bool,
}

impl<A: Actor> fmt::Debug for Cx<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cx")
            .field("name", &self.name)
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}

impl<A: Actor> Cx<A> {
    /// The stable address of the actor that is being made: give this one away. `ctx.address()` inside an actor is the address of this
    /// incarnation only, and dies with it.
    pub fn addr(&self) -> Addr<A> {
        self.addr.clone()
    }

    /// The name of the child.
    pub fn name(&self) -> &Name {
        &self.name
    }

    /// Which life of the child this is, from 1.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The registry the child lives in, to look up others. It does not keep the tree alive.
    pub fn registry(&self) -> Registry {
        self.registry.clone()
    }

    /// Reports panics of futures that run beside the actor.
    pub fn guard(&self) -> Guard {
        Guard::new(self.name.clone(), self.registry.clone())
    }

    /// By default an actor is ready when the waits of its `started()` are over. One that takes this says so itself.
    pub fn ready(&mut self) -> Ready {
        self.tells = true;
        Ready { report: Arc::clone(&self.report), progress: self.progress.clone() }
    }
}

/// Tells the supervisor that an actor is ready, and until then why it is not.
#[derive(Clone, Debug)]
pub struct Ready {
    report: Arc<Report>,
    progress: Progress,
}

impl Ready {
    /// The actor is ready. Said once; more often changes nothing.
    pub fn ready(&self) {
        self.report.ready();
    }

    /// Why it is not ready yet. The last word is reported if the start is given up.
    pub fn problem(&self, problem: impl Into<String>) {
        *lock(&self.progress.0) = Some(problem.into());
    }
}

/// The last thing known about why a child is not ready.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress(Arc<Mutex<Option<String>>>);

impl Progress {
    pub(super) fn last_problem(&self) -> Option<String> {
        lock(&self.0).clone()
    }
}

pub(super) type Make<A> = Arc<dyn Fn(&mut Cx<A>) -> A + Send + Sync>;

/// Somebody who can be found by type: the type, its name, and the address or recipient.
pub(super) type Entry = (TypeId, &'static str, Box<dyn Any + Send + Sync>);

type Provide<A> = Box<dyn Fn(&Addr<A>) -> Entry + Send>;

/// How to make one actor, where it shall live, and what to do when it dies.
///
/// Its address exists before the actor does and stays good over all restarts. Messages in the queue survive a restart; the one that was
/// being handled does not, and whoever waits for its answer gets `MailboxError::Closed`.
pub struct Spec<A: Actor<Context = Context<A>>> {
    pub(super) name: Name,
    pub(super) addr: Addr<A>,
    pub(super) mailbox: Mailbox<A>,
    pub(super) make: Make<A>,
    pub(super) placing: Placing,
    pub(super) settings: Settings,
    provides: Vec<Provide<A>>,
}

impl<A: Actor<Context = Context<A>>> fmt::Debug for Spec<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spec")
            .field("name", &self.name)
            .field("placing", &self.placing)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

impl<A: Actor<Context = Context<A>>> Spec<A> {
    /// An actor of this name, made by `make` on the thread it will live on, again for every life.
    pub fn new(name: impl Into<Name>, make: impl Fn(&mut Cx<A>) -> A + Send + Sync + 'static) -> Self {
        Self::with_mailbox(name, MAILBOX, make)
    }

    /// The same with a mailbox of this capacity. `do_send` ignores it; 0 means no limit for anybody. An actor's own
    /// `set_mailbox_capacity` has no effect here.
    pub fn with_mailbox(
        name: impl Into<Name>,
        capacity: usize,
        make: impl Fn(&mut Cx<A>) -> A + Send + Sync + 'static,
    ) -> Self {
        let (addr, mailbox) = Mailbox::new(capacity);
        Self {
            name: name.into(),
            addr,
            mailbox,
            make: Arc::new(make),
            placing: Placing::default(),
            settings: Settings::default(),
            provides: Vec::new(),
        }
    }

    /// Where it shall live. Default: where its group places its children.
    #[must_use]
    pub fn on(mut self, placement: Placement) -> Self {
        self.placing = Placing(Some(placement));
        self
    }

    /// Whoever asks the registry for a recipient of `M` gets this actor. At most one child of a tree may provide a message.
    #[must_use]
    pub fn provides<M>(mut self) -> Self
    where
        A: Handler<M>,
        A::Context: ToEnvelope<A, M>,
        M: Message + Send + 'static,
        M::Result: Send,
    {
        self.provides.push(Box::new(|addr| {
            (TypeId::of::<M>(), std::any::type_name::<M>(), Box::new(addr.clone().recipient::<M>()))
        }));
        self
    }

    /// Which ends call for another life. Default: [`Restart::Permanent`].
    #[must_use]
    pub fn restart(mut self, restart: Restart) -> Self {
        self.settings.restart = restart;
        self
    }

    /// How many restarts are too many. Default: that of its group.
    #[must_use]
    pub fn intensity(mut self, intensity: Intensity) -> Self {
        self.settings.intensity = Some(intensity);
        self
    }

    /// How long a dead actor waits for its next life. Default: that of its group.
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.settings.backoff = Some(backoff);
        self
    }

    /// How long it may take to become ready. Default: 30 s. None: as long as the start of the whole tree may take, and for ever after
    /// that. An actor that is late counts as dead.
    #[must_use]
    pub fn ready_within(mut self, limit: impl Into<Option<Duration>>) -> Self {
        self.settings.ready_within = limit.into();
        self
    }

    /// How long it may take to stop, counted from `stopping()`, which may answer `Running::Continue` to finish something and call
    /// `ctx.stop()` again. Default: 5 s. After that it is dropped without being asked, and its `stopped()` does not run; zero: at once,
    /// unless it agrees to stop.
    #[must_use]
    pub fn stop_within(mut self, limit: Duration) -> Self {
        self.settings.stop_within = limit;
        self
    }

    /// How long it may leave its mailbox unserved: because it blocks its thread, or because it waits in `ctx.wait` or an `AtomicResponse`.
    /// After that it is bypassed: a new life starts, on another thread if this one is blocked. Default: none, so nobody looks.
    ///
    /// A blocked thread cannot be killed. What was going on there may still happen, so its effects need a fence of their own.
    ///
    /// # Panics
    ///
    /// When the limit is zero.
    #[must_use]
    pub fn liveness(mut self, limit: Duration) -> Self {
        assert!(!limit.is_zero(), "a liveness limit of zero would bypass every actor at once");
        self.settings.liveness = Some(limit);
        self
    }

    /// Its address: good before the actor runs, over all its restarts, and until the registry lets it go for good.
    pub fn addr(&self) -> Addr<A> {
        self.addr.clone()
    }

    pub(super) fn entries(&self) -> Vec<Entry> {
        self.provides.iter().map(|provide| provide(&self.addr)).collect()
    }
}
