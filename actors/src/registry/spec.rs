//! What a registry must know of an actor before it starts it.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use actix::dev::ToEnvelope;
use actix::dev::channel::{AddressReceiver, channel};
use actix::prelude::*;
use tokio::sync::{oneshot, watch};

use super::incarnation::{self, Exit};
use super::lock;
use super::{Host, Placement};

/// Messages that may wait in a mailbox before senders who care have to wait too.
const MAILBOX: usize = 64;

/// What a factory is given.
pub struct Cx<A: Actor> {
    addr: Addr<A>,
    ready: Ready,
    held: bool,
}

impl<A: Actor> fmt::Debug for Cx<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cx").finish_non_exhaustive()
    }
}

impl<A: Actor> Cx<A> {
    /// The stable address of the actor that is being made.
    pub fn addr(&self) -> Addr<A> {
        self.addr.clone()
    }

    /// By default an actor is ready when it has started. One that takes this says so itself.
    pub fn ready(&mut self) -> Ready {
        self.held = true;
        self.ready.clone()
    }
}

/// Tells the registry that an actor is ready, and until then why it is not.
#[derive(Clone, Debug)]
pub struct Ready(Arc<ReadyState>);

#[derive(Debug)]
struct ReadyState {
    signal: Mutex<Option<oneshot::Sender<()>>>,
    problem: Mutex<Option<String>>,
}

impl Ready {
    fn new() -> (Self, oneshot::Receiver<()>) {
        let (signal, ready) = oneshot::channel();
        (Self(Arc::new(ReadyState { signal: Mutex::new(Some(signal)), problem: Mutex::default() })), ready)
    }

    /// The actor is ready. Said once; more often changes nothing.
    pub fn ready(&self) {
        if let Some(signal) = lock(&self.0.signal).take() {
            // Nobody waits any more when the start was given up.
            let _ = signal.send(());
        }
    }

    /// Why it is not ready yet. The last word is reported if the start is given up.
    pub fn problem(&self, problem: impl Into<String>) {
        *lock(&self.0.problem) = Some(problem.into());
    }

    pub(super) fn last_problem(&self) -> Option<String> {
        lock(&self.0.problem).clone()
    }
}

type Make<A> = Box<dyn Fn(&mut Cx<A>) -> A + Send>;

type Provide<A> = Box<dyn Fn(&Addr<A>) -> (TypeId, Box<dyn Any + Send + Sync>) + Send>;

/// How to make one actor, and where it shall live.
pub struct Spec<A: Actor<Context = Context<A>>> {
    name: &'static str,
    placement: Placement,
    addr: Addr<A>,
    mailbox: AddressReceiver<A>,
    make: Make<A>,
    provides: Vec<Provide<A>>,
}

impl<A: Actor<Context = Context<A>>> fmt::Debug for Spec<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spec")
            .field("name", &self.name)
            .field("placement", &self.placement)
            .finish_non_exhaustive()
    }
}

impl<A: Actor<Context = Context<A>>> Spec<A> {
    /// An actor of this name, made by `make` on the thread it will live on.
    pub fn new(name: &'static str, make: impl Fn(&mut Cx<A>) -> A + Send + 'static) -> Self {
        Self::with_mailbox(name, MAILBOX, make)
    }

    /// The same with a mailbox of this capacity.
    pub fn with_mailbox(
        name: &'static str,
        capacity: usize,
        make: impl Fn(&mut Cx<A>) -> A + Send + 'static,
    ) -> Self {
        let (sender, mailbox) = channel(capacity);
        Self {
            name,
            placement: Placement::default(),
            addr: Addr::new(sender),
            mailbox,
            make: Box::new(make),
            provides: Vec::new(),
        }
    }

    /// Where it shall live. Default: [`Placement::Work`].
    #[must_use]
    pub fn on(mut self, placement: Placement) -> Self {
        self.placement = placement;
        self
    }

    /// Whoever asks the registry for a recipient of `M` gets this actor.
    #[must_use]
    pub fn provides<M>(mut self) -> Self
    where
        A: Handler<M>,
        A::Context: ToEnvelope<A, M>,
        M: Message + Send + 'static,
        M::Result: Send,
    {
        self.provides.push(Box::new(|addr| {
            (TypeId::of::<M>(), Box::new(addr.clone().recipient::<M>()) as Box<dyn Any + Send + Sync>)
        }));
        self
    }

    /// Its address: good before the actor runs, and as long as the registry lives.
    pub fn addr(&self) -> Addr<A> {
        self.addr.clone()
    }
}

/// Who can be found, by type.
#[derive(Default)]
pub(super) struct Book {
    pub(super) addrs: HashMap<TypeId, Box<dyn Any + Send + Sync>>,
    pub(super) recipients: HashMap<TypeId, Box<dyn Any + Send + Sync>>,
}

/// A started actor, as the registry sees it.
#[derive(Debug)]
pub(super) struct Child {
    pub(super) name: &'static str,
    pub(super) stop: Mutex<Option<oneshot::Sender<()>>>,
    pub(super) kill: Mutex<Option<oneshot::Sender<()>>>,
    pub(super) exit: watch::Receiver<Option<Exit>>,
}

/// A child that is coming up.
pub(super) struct Launched {
    pub(super) child: Child,
    pub(super) ready: oneshot::Receiver<()>,
    pub(super) progress: Ready,
}

/// A spec whose type was forgotten.
pub(super) trait AnySpec: Send {
    fn write_into(&self, book: &mut Book);
    fn launch(self: Box<Self>, host: &Host) -> Launched;
}

impl<A: Actor<Context = Context<A>>> AnySpec for Spec<A> {
    fn write_into(&self, book: &mut Book) {
        book.addrs.insert(TypeId::of::<A>(), Box::new(self.addr.clone()));
        book.recipients.extend(self.provides.iter().map(|provide| provide(&self.addr)));
    }

    fn launch(self: Box<Self>, host: &Host) -> Launched {
        let (stop, stopping) = oneshot::channel();
        let (kill, killing) = oneshot::channel();
        let (exited, exit) = watch::channel(None);
        let (progress, ready) = Ready::new();
        let Self { name, placement, addr, mailbox, make, .. } = *self;
        let mut cx = Cx { addr, ready: progress.clone(), held: false };
        host.arbiter(placement).spawn_fn(move || {
            let make = move || {
                let actor = make(&mut cx);
                (actor, (!cx.held).then_some(cx.ready))
            };
            incarnation::run(make, mailbox, stopping, killing, exited);
        });
        let child = Child { name, stop: Mutex::new(Some(stop)), kill: Mutex::new(Some(kill)), exit };
        Launched { child, ready, progress }
    }
}
