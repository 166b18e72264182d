//! What the registry tests share: an actor that fails where it is told to, a log of what actors did, and the history of a tree.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, Once};
use std::time::Duration;

use actix::prelude::*;
use futures_util::stream;
use tokio::sync::broadcast;
use tokio::time::sleep;
use workpump_actors::registry::{
    ChildInfo, Cx, Group, Host, Intensity, Name, Registry, Spec, SupervisorEvent,
};

/// What actors did, in order.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    pub(crate) fn note(&self, line: impl fmt::Display) {
        self.0.lock().expect("not poisoned").push(line.to_string());
    }

    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().expect("not poisoned"))
    }
}

/// Where an actor panics.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Where {
    Handler,
    Notify,
    Interval,
    Later,
    Spawned,
    Stream,
    Stopping,
    Stopped,
    Drop,
    /// In a handler, and again while it is dropped for it.
    HandlerAndDrop,
}

/// How an actor behaves.
#[derive(Clone, Default)]
pub(crate) struct Plan {
    /// How long each start takes.
    pub(crate) slow_start: Duration,
    /// How long it drains when asked to stop.
    pub(crate) drain: Duration,
    pub(crate) never_stops: bool,
    /// Which lives panic in the factory, and in `started()`.
    pub(crate) bad_factory: Option<fn(u64) -> bool>,
    pub(crate) bad_start: Option<fn(u64) -> bool>,
    /// How long each life goes well.
    pub(crate) dies_after: Option<Duration>,
}

/// An actor that fails where it is told to.
pub(crate) struct Subject {
    name: Name,
    life: u64,
    log: Log,
    plan: Plan,
    fragile: Option<Where>,
    drained: bool,
    halves: (u32, u32),
}

#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "u64")]
pub(crate) struct Note(pub(crate) u32);

#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct Boom(pub(crate) Where);

/// To panic there as soon as it gets there.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct Arm(pub(crate) Where);

#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct BoomInFuture;

#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct BoomInAtomic;

/// Changes one of two fields that belong together, panics, and would change the other.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct HalfAChange;

#[derive(Message)]
#[rtype(result = "(u32, u32)")]
pub(crate) struct Halves;

#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct Quit;

impl Subject {
    pub(crate) fn spec(name: &str, log: &Log, plan: Plan) -> Spec<Self> {
        let log = log.clone();
        Spec::new(name, move |cx| Self::make(cx, &log, &plan))
    }

    pub(crate) fn make(cx: &Cx<Self>, log: &Log, plan: &Plan) -> Self {
        let (life, name) = (cx.generation(), cx.name().clone());
        assert!(!plan.bad_factory.is_some_and(|bad| bad(life)), "a bad factory");
        let (log, plan) = (log.clone(), plan.clone());
        Self { name, life, log, plan, fragile: None, drained: false, halves: (0, 0) }
    }

    fn note(&self, what: impl fmt::Display) {
        self.log.note(format_args!("{what} {}", self.name));
    }

    fn panic_if(&self, place: Where) {
        assert!(self.fragile != Some(place), "panic in {place:?}");
    }
}

impl Actor for Subject {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        self.note("start");
        assert!(!self.plan.bad_start.is_some_and(|bad| bad(self.life)), "a bad start");
        if !self.plan.slow_start.is_zero() {
            ctx.wait(sleep(self.plan.slow_start).into_actor(self));
        }
        if let Some(life) = self.plan.dies_after {
            ctx.run_later(life, |_, _| panic!("its time had come"));
        }
    }

    fn stopping(&mut self, ctx: &mut Self::Context) -> Running {
        self.panic_if(Where::Stopping);
        if self.plan.never_stops {
            return Running::Continue;
        }
        if self.plan.drain.is_zero() || self.drained {
            return Running::Stop;
        }
        self.note("drain");
        ctx.run_later(self.plan.drain, |this, ctx| {
            this.drained = true;
            ctx.stop();
        });
        Running::Continue
    }

    fn stopped(&mut self, _: &mut Self::Context) {
        self.note("stop");
        self.panic_if(Where::Stopped);
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        self.panic_if(Where::Drop);
        self.panic_if(Where::HandlerAndDrop);
    }
}

impl Handler<Note> for Subject {
    type Result = u64;

    fn handle(&mut self, Note(number): Note, _: &mut Self::Context) -> u64 {
        self.note(format_args!("note {number} life {}", self.life));
        self.life
    }
}

impl Handler<Quit> for Subject {
    type Result = ();

    fn handle(&mut self, _: Quit, ctx: &mut Self::Context) {
        ctx.stop();
    }
}

impl Handler<Arm> for Subject {
    type Result = ();

    fn handle(&mut self, Arm(place): Arm, _: &mut Self::Context) {
        self.fragile = Some(place);
    }
}

impl Handler<HalfAChange> for Subject {
    type Result = ();

    fn handle(&mut self, _: HalfAChange, _: &mut Self::Context) {
        self.halves.0 += 1;
        self.fragile = Some(Where::Handler);
        self.panic_if(Where::Handler);
        self.halves.1 += 1;
    }
}

impl Handler<Halves> for Subject {
    type Result = MessageResult<Halves>;

    fn handle(&mut self, _: Halves, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.halves)
    }
}

impl Handler<Boom> for Subject {
    type Result = ();

    fn handle(&mut self, Boom(place): Boom, ctx: &mut Self::Context) {
        self.fragile = Some(place);
        match place {
            Where::Handler | Where::HandlerAndDrop => self.panic_if(place),
            Where::Notify => ctx.notify(Boom(Where::Handler)),
            Where::Interval => {
                ctx.run_interval(Duration::from_millis(10), |this, _| this.panic_if(Where::Interval));
            }
            Where::Later => {
                ctx.run_later(Duration::from_millis(10), |this, _| this.panic_if(Where::Later));
            }
            Where::Spawned => {
                let nap = sleep(Duration::from_millis(10)).into_actor(self);
                ctx.spawn(nap.map(|(), this, _| this.panic_if(Where::Spawned)));
            }
            Where::Stream => {
                ctx.add_stream(stream::iter([7_u8]));
            }
            Where::Stopping | Where::Stopped | Where::Drop => ctx.stop(),
        }
    }
}

impl StreamHandler<u8> for Subject {
    fn handle(&mut self, _: u8, _: &mut Self::Context) {
        self.panic_if(Where::Stream);
    }
}

impl Handler<BoomInFuture> for Subject {
    type Result = ResponseActFuture<Self, ()>;

    fn handle(&mut self, _: BoomInFuture, _: &mut Self::Context) -> Self::Result {
        Box::pin(async { panic!("panic in the future") }.into_actor(self))
    }
}

impl Handler<BoomInAtomic> for Subject {
    type Result = AtomicResponse<Self, ()>;

    fn handle(&mut self, _: BoomInAtomic, _: &mut Self::Context) -> Self::Result {
        let nap = sleep(Duration::from_millis(10)).into_actor(self);
        AtomicResponse::new(Box::pin(nap.map(|(), _, _| panic!("panic in the atomic response"))))
    }
}

/// Starts a tree on this thread.
pub(crate) async fn start(group: Group) -> Registry {
    group.start(Host::current(), Duration::from_mins(5)).await.expect("the tree starts")
}

/// Up to this many restarts in a minute.
pub(crate) fn at_most(max_restarts: u32) -> Intensity {
    Intensity { max_restarts, ..Intensity::default() }
}

pub(crate) fn millis(count: u64) -> Duration {
    Duration::from_millis(count)
}

pub(crate) fn addr(registry: &Registry, name: &str) -> Addr<Subject> {
    registry.named(name).expect("a known child")
}

pub(crate) fn info(registry: &Registry, name: &str) -> ChildInfo {
    registry.children().into_iter().find(|child| child.name == name).expect("a known child")
}

/// Who is not well, in order.
pub(crate) fn troubles(registry: &Registry) -> Vec<String> {
    registry.health().troubles.iter().map(|child| child.name.to_string()).collect()
}

/// What a tree told since the last look.
pub(crate) struct History(broadcast::Receiver<SupervisorEvent>);

impl History {
    pub(crate) fn of(registry: &Registry) -> Self {
        Self(registry.events())
    }

    pub(crate) fn events(&mut self) -> Vec<SupervisorEvent> {
        std::iter::from_fn(|| self.0.try_recv().ok()).collect()
    }

    pub(crate) fn take(&mut self) -> Vec<String> {
        self.events().iter().map(ToString::to_string).collect()
    }
}

thread_local! {
    /// What was logged on this thread since somebody wanted to know.
    static LOGGED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The log lines of this thread: a test in virtual time has no other.
pub(crate) struct Lines;

impl Lines {
    /// Catches them from now on.
    ///
    /// One subscriber for the whole process: what one of a thread hears depends on what other threads log for the first time meanwhile.
    pub(crate) fn catch() -> Self {
        static FOR_ALL: Once = Once::new();
        FOR_ALL.call_once(|| {
            tracing_subscriber::fmt().with_ansi(false).without_time().with_writer(|| Self).init();
        });
        LOGGED.take();
        Self
    }

    /// Those of this level.
    #[expect(clippy::unused_self, reason = "who reads lines has caught them before")]
    pub(crate) fn of(&self, level: &str) -> Vec<String> {
        let text = String::from_utf8(LOGGED.with_borrow(Clone::clone)).expect("log lines are text");
        text.lines().map(str::trim).filter(|line| line.starts_with(level)).map(ToOwned::to_owned).collect()
    }
}

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LOGGED.with_borrow_mut(|logged| logged.extend_from_slice(bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
