//! What the tests of the registry with real threads and real time share: an actor that does as it is told, and ways to wait for events.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part of it")]

use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, Once};
use std::thread::ThreadId;
use std::time::Duration;

use actix::prelude::*;
use tokio::runtime::Builder;
use tokio::sync::broadcast::Receiver;
use workpump_actors::registry::{
    Backoff, EventKind, Group, Host, Intensity, Registry, Spec, SupervisorEvent,
};

/// Longer than anything here takes on any machine: only a hang reaches it.
pub const HANG: Duration = Duration::from_secs(240);

/// Runs a test on a runtime of its own, with a guard against hangs.
pub fn in_real_time<T>(test: impl Future<Output = T>) -> T {
    quiet();
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async { tokio::time::timeout(HANG, test).await.expect("it hangs") })
}

/// Actors panic here on purpose: their threads do so silently.
pub fn quiet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let loud = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !std::thread::current().name().is_some_and(|name| name.starts_with("actix-rt")) {
                loud(panic);
            }
        }));
    });
}

/// A moment in the life of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    Factory,
    Started,
    Stopping,
    Stopped,
    Dropped,
}

/// Called at every point with the life it belongs to.
pub type Hook = Arc<dyn Fn(Point, u64) + Send + Sync>;

/// What was handled: by which life, and what.
pub type Log = Arc<Mutex<Vec<(u64, u32)>>>;

pub fn taken(log: &Log) -> Vec<(u64, u32)> {
    std::mem::take(&mut log.lock().expect("not poisoned"))
}

/// Does as it is told.
pub struct Worker {
    pub life: u64,
    pub log: Log,
    hook: Hook,
}

impl Worker {
    pub fn spec(name: &str) -> Spec<Self> {
        Self::logged(name, &Log::default())
    }

    pub fn logged(name: &str, log: &Log) -> Spec<Self> {
        Self::with(name, log, |_, _| ())
    }

    pub fn hooked(name: &str, hook: impl Fn(Point, u64) + Send + Sync + 'static) -> Spec<Self> {
        Self::with(name, &Log::default(), hook)
    }

    pub fn with(name: &str, log: &Log, hook: impl Fn(Point, u64) + Send + Sync + 'static) -> Spec<Self> {
        let (log, hook): (_, Hook) = (Arc::clone(log), Arc::new(hook));
        Spec::new(name, move |cx| {
            hook(Point::Factory, cx.generation());
            Self { life: cx.generation(), log: Arc::clone(&log), hook: Arc::clone(&hook) }
        })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        (self.hook)(Point::Dropped, self.life);
    }
}

impl Actor for Worker {
    type Context = Context<Self>;

    fn started(&mut self, _: &mut Self::Context) {
        (self.hook)(Point::Started, self.life);
    }

    fn stopping(&mut self, _: &mut Self::Context) -> Running {
        (self.hook)(Point::Stopping, self.life);
        Running::Stop
    }

    fn stopped(&mut self, _: &mut Self::Context) {
        (self.hook)(Point::Stopped, self.life);
    }
}

/// Which life are you, and where?
#[derive(Message)]
#[rtype(result = "(u64, ThreadId)")]
pub struct Who;

impl Handler<Who> for Worker {
    type Result = MessageResult<Who>;

    fn handle(&mut self, _: Who, _: &mut Self::Context) -> Self::Result {
        MessageResult((self.life, std::thread::current().id()))
    }
}

/// Write this down.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Note(pub u32);

impl Handler<Note> for Worker {
    type Result = ();

    fn handle(&mut self, Note(value): Note, _: &mut Self::Context) {
        self.log.lock().expect("not poisoned").push((self.life, value));
    }
}

type Deed = Box<dyn FnOnce(&mut Worker, &mut Context<Worker>) + Send>;

/// Do this.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Do(pub Deed);

impl Do {
    pub fn this(deed: impl FnOnce(&mut Worker, &mut Context<Worker>) + Send + 'static) -> Self {
        Self(Box::new(deed))
    }

    pub fn panic() -> Self {
        Self::this(|_, _| panic!("told to"))
    }
}

impl Handler<Do> for Worker {
    type Result = ();

    fn handle(&mut self, Do(deed): Do, ctx: &mut Self::Context) {
        deed(self, ctx);
    }
}

/// Keep everybody waiting for ever.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Forever;

impl Handler<Forever> for Worker {
    type Result = AtomicResponse<Self, ()>;

    fn handle(&mut self, _: Forever, _: &mut Self::Context) -> Self::Result {
        AtomicResponse::new(Box::pin(std::future::pending::<()>().into_actor(self)))
    }
}

/// Blocks a thread until the sender is dropped or sends.
pub fn gate() -> (std::sync::mpsc::Sender<()>, impl Fn() + Send + Sync + Clone + 'static) {
    let (open, opened) = std::sync::mpsc::channel::<()>();
    let opened = Arc::new(Mutex::new(opened));
    let block = move || {
        let _ = opened.lock().unwrap_or_else(std::sync::PoisonError::into_inner).recv();
    };
    (open, block)
}

/// Restarts without limit and without a pause.
pub fn tireless() -> (Intensity, Backoff) {
    let intensity = Intensity { max_restarts: 100_000, ..Intensity::default() };
    (intensity, Backoff { first: Duration::ZERO, ..Backoff::default() })
}

/// A group whose children are always restarted at once.
pub fn tireless_group() -> Group {
    let (intensity, backoff) = tireless();
    Group::new("test").intensity(intensity).backoff(backoff)
}

pub async fn started(group: Group) -> Registry {
    let host = Host::own("test-system").await.expect("a host");
    group.start(host, HANG).await.expect("starts")
}

/// The next event of this child for which `is` holds.
pub async fn until(
    events: &mut Receiver<SupervisorEvent>,
    child: &str,
    is: impl Fn(&EventKind) -> bool,
) -> SupervisorEvent {
    loop {
        let event = events.recv().await.expect("the tree lives and we keep up");
        if event.child == child && is(&event.kind) {
            return event;
        }
    }
}

pub async fn until_ready(events: &mut Receiver<SupervisorEvent>, child: &str) -> SupervisorEvent {
    until(events, child, |kind| *kind == EventKind::Ready).await
}

/// What the next exit of this child says.
pub async fn exit_of(events: &mut Receiver<SupervisorEvent>, child: &str) -> String {
    let event = until(events, child, |kind| matches!(kind, EventKind::Exited { .. })).await;
    let EventKind::Exited { exit } = event.kind else { unreachable!("asked for") };
    exit.to_string()
}

pub fn worker(registry: &Registry, name: &str) -> Addr<Worker> {
    registry.named::<Worker>(name).expect("known")
}

/// The threads of this process that run actors, or the system of a host.
pub fn actor_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux").flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.starts_with("actix-rt") || name.starts_with("test-system")).count()
}

/// Waits until a state is reached of which no event tells.
pub async fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let patient = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    assert!(tokio::time::timeout(HANG / 2, patient).await.is_ok(), "never happens: {what}");
}

const ALONE: &str = "REGISTRY_TEST_ALONE";

/// Runs a test in a process of its own, where nothing else counts or disturbs: this process only looks at how that one ends.
pub fn alone(test: &str, body: impl FnOnce()) {
    if std::env::var_os(ALONE).is_some() {
        return body();
    }
    let output = spawn_alone(test).wait_with_output().expect("waits");
    let text = String::from_utf8_lossy(&output.stdout);
    print!(
        "{}",
        text.lines()
            .filter(|line| line.starts_with("measured"))
            .fold(String::new(), |all, line| all + line + "\n")
    );
    assert!(
        output.status.success(),
        "{:?}: {text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(text.contains("1 passed"), "there is no test called {test}");
}

/// Starts a test in a process of its own.
pub fn spawn_alone(test: &str) -> Child {
    let this = std::env::current_exe().expect("runs");
    let mut command = Command::new(this);
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(ALONE, "1");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("spawns")
}

pub fn is_alone() -> bool {
    std::env::var_os(ALONE).is_some()
}
