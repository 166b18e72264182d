//! Several children that start, stop and are restarted together.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use actix::prelude::*;
use futures_util::future::BoxFuture;
use tokio::sync::{mpsc, oneshot};

use super::book::Core;
use super::child::{ActorNode, Entries, Launch, Node, Report, Run, Settings};
use super::members::{Cell, Members, close_members, forget_members};
use super::restart::check;
use super::slot::Slot;
use super::spec::Progress;
use super::supervisor::{News, Supervisor};
use super::{
    Backoff, ChildState, Exit, GaveUp, Host, Intensity, Name, Placement, Registry, Restart, Spec,
    StartFailed, Strategy,
};

type LastWords = Arc<dyn Fn(GaveUp) -> BoxFuture<'static, ()> + Send + Sync>;

/// What holds for all children of a group.
#[derive(Clone)]
pub(super) struct Policy {
    pub(super) strategy: Strategy,
    pub(super) ordered: bool,
    pub(super) placement: Placement,
    pub(super) intensity: Intensity,
    pub(super) backoff: Backoff,
    pub(super) last_words: Option<LastWords>,
    /// Seed of the jitter.
    pub(super) seed: u64,
}

impl Policy {
    /// What a child takes from it.
    pub(super) fn inherited(&self) -> Inherited {
        Inherited { placement: self.placement, intensity: self.intensity, backoff: self.backoff }
    }
}

/// Children to be started in this order and stopped in the reverse one, and what to do when one of them dies.
///
/// A group inside a group is a child like any other: when it gives up, it has died, and its parent restarts it as a whole, or gives up
/// itself, or, with [`Restart::Temporary`], leaves it at that. Default: no restart of a group that gave up, so that its parent gives up
/// too, up to the root: a limit reached is a limit reached.
pub struct Group {
    name: Name,
    members: Vec<Member>,
    strategy: Strategy,
    ordered: bool,
    placement: Option<Placement>,
    child_intensity: Option<Intensity>,
    child_backoff: Option<Backoff>,
    last_words: Option<LastWords>,
    settings: Settings,
}

enum Member {
    Actor(Box<dyn Node>, Entries),
    Group(Box<Group>),
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("name", &self.name)
            .field("children", &self.members.len())
            .finish_non_exhaustive()
    }
}

impl Group {
    /// An empty group.
    pub fn new(name: impl Into<Name>) -> Self {
        let once = Intensity { max_restarts: 0, ..Intensity::default() };
        Self {
            name: name.into(),
            members: Vec::new(),
            strategy: Strategy::default(),
            ordered: true,
            placement: None,
            child_intensity: None,
            child_backoff: None,
            last_words: None,
            settings: Settings { ready_within: None, intensity: Some(once), ..Settings::default() },
        }
    }

    /// One more child, started after those before it.
    #[must_use]
    pub fn child<A: Actor<Context = Context<A>>>(mut self, spec: Spec<A>) -> Self {
        let (node, entries) = ActorNode::new(spec);
        self.members.push(Member::Actor(Box::new(node), entries));
        self
    }

    /// One more group, started as a whole after those before it.
    #[must_use]
    pub fn group(mut self, group: Self) -> Self {
        self.members.push(Member::Group(Box::new(group)));
        self
    }

    /// Who is restarted with a child that died. Default: [`Strategy::OneForOne`].
    #[must_use]
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.strategy = strategy;
        self
    }

    /// Starts the children all at once, and stops them so: where order does not matter, the slowest alone decides how long it takes.
    #[must_use]
    pub fn in_parallel(mut self) -> Self {
        self.ordered = false;
        self
    }

    /// Where children live whose spec does not say so. Default: where the parent places its own; the root: [`Placement::Work`].
    #[must_use]
    pub fn on(mut self, placement: Placement) -> Self {
        self.placement = Some(placement);
        self
    }

    /// How many restarts of one child are too many, unless its spec says otherwise. Default: that of the parent.
    #[must_use]
    pub fn intensity(mut self, intensity: Intensity) -> Self {
        self.child_intensity = Some(intensity);
        self
    }

    /// How long a dead child waits, unless its spec says otherwise. Default: that of the parent.
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.child_backoff = Some(backoff);
        self
    }

    /// Which ends of this group its parent answers with another life of it, how many are too many, and how long it waits.
    #[must_use]
    pub fn as_child(mut self, restart: Restart, intensity: Intensity, backoff: Backoff) -> Self {
        self.settings.restart = restart;
        self.settings.intensity = Some(intensity);
        self.settings.backoff = Some(backoff);
        self
    }

    /// When this group gives up, it stays down and its parent goes on without it. [`Registry::health`] names the child.
    #[must_use]
    pub fn contained(mut self) -> Self {
        self.settings.restart = Restart::Temporary;
        self
    }

    /// What to do when a child was given up, before the others are stopped. They are alive meanwhile, and nothing is restarted. It has to
    /// end by itself.
    #[must_use]
    pub fn last_words<F>(mut self, say: impl Fn(GaveUp) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.last_words = Some(Arc::new(move |gave_up| Box::pin(say(gave_up))));
        self
    }

    /// Starts all children, each when the one before it is ready. All or nothing, within `deadline`.
    ///
    /// Needs no particular runtime: the work is done on the host.
    ///
    /// # Errors
    ///
    /// When the tree cannot work, and when a child does not become ready: it is named, with the last thing known about why. What had been
    /// started is stopped again, and the host is closed.
    pub async fn start(self, host: Host, deadline: Duration) -> Result<Registry, StartFailed> {
        if cfg!(panic = "abort") {
            tracing::warn!(
                "built with panic = \"abort\": a panic of an actor ends the process, and nothing is restarted"
            );
        }
        let host = Arc::new(host);
        let core = Core::new(self.name.clone(), Arc::clone(&host));
        let inherited = Inherited::default();
        let entered = core
            .enter(&self.name, None, true)
            .and_then(|child| self.into_node(&core, inherited).map(|node| (child, node)));
        let started = match entered {
            Ok((child, node)) => start_root(child, node, &core, deadline).await,
            Err(invalid) => Err(invalid),
        };
        match started {
            Ok(()) => Ok(Registry::owning(core)),
            Err(failed) => {
                host.close().await;
                Err(failed)
            }
        }
    }

    /// Enters the group and everybody in it below a group that runs.
    pub(super) fn enter_below(
        self,
        core: &Arc<Core>,
        parent: &Name,
        from: Inherited,
    ) -> Result<(u64, GroupNode), StartFailed> {
        let name = self.name.clone();
        let child = core.enter(&name, Some(parent), true)?;
        let node = check_policy(&name, &self.settings, &from).and_then(|()| self.into_node(core, from));
        match node {
            Ok(node) => Ok((child, node)),
            Err(invalid) => {
                core.leave_all(&name);
                Err(invalid)
            }
        }
    }

    /// Enters everybody into the book and checks that it can work.
    pub(super) fn into_node(self, core: &Arc<Core>, from: Inherited) -> Result<GroupNode, StartFailed> {
        let mine = Inherited {
            placement: self.placement.unwrap_or(from.placement),
            intensity: self.child_intensity.unwrap_or(from.intensity),
            backoff: self.child_backoff.unwrap_or(from.backoff),
        };
        if self.strategy == Strategy::RestForOne && !self.ordered {
            return Err(StartFailed::NoOrder(self.name));
        }
        let mut slots = Vec::with_capacity(self.members.len());
        for member in self.members {
            let (child, node): (u64, Box<dyn Node>) = match member {
                Member::Actor(node, entries) => {
                    (enter_actor(core, &self.name, &*node, entries, &mine)?, node)
                }
                Member::Group(group) => {
                    let child = core.enter(&group.name, Some(&self.name), true)?;
                    check_policy(&group.name, &group.settings, &mine)?;
                    (child, Box::new(group.into_node(core, mine)?))
                }
            };
            slots.push(Slot::new(child, node));
        }
        let policy = Policy {
            strategy: self.strategy,
            ordered: self.ordered,
            placement: mine.placement,
            intensity: mine.intensity,
            backoff: mine.backoff,
            last_words: self.last_words,
            seed: seed(),
        };
        let members = Members { name: self.name.clone(), slots, policy };
        Ok(GroupNode { name: self.name, settings: self.settings, cell: Arc::new(Mutex::new(Some(members))) })
    }
}

/// What a group takes from its parent.
#[derive(Clone, Copy, Default)]
pub(super) struct Inherited {
    pub(super) placement: Placement,
    pub(super) intensity: Intensity,
    pub(super) backoff: Backoff,
}

/// A seed for jitter, taken at the edge so that everything inside can be repeated.
fn seed() -> u64 {
    uuid::Uuid::now_v7().as_u64_pair().1
}

/// Enters an actor into the book.
pub(super) fn enter_actor(
    core: &Core,
    group: &Name,
    node: &dyn Node,
    entries: Entries,
    from: &Inherited,
) -> Result<u64, StartFailed> {
    check_policy(node.name(), node.settings(), from)?;
    let child = core.enter(node.name(), Some(group), false)?;
    core.list(node.name(), entries).inspect_err(|_| core.leave(node.name()))?;
    Ok(child)
}

fn check_policy(child: &Name, settings: &Settings, from: &Inherited) -> Result<(), StartFailed> {
    let intensity = settings.intensity.unwrap_or(from.intensity);
    let backoff = settings.backoff.unwrap_or(from.backoff);
    let never_restarted = settings.restart == Restart::Temporary;
    match check(&intensity, &backoff) {
        Err(policy) if !never_restarted => Err(StartFailed::Policy { child: child.clone(), policy }),
        _ => Ok(()),
    }
}

/// Starts the root and leaves a task that waits for its end.
async fn start_root(
    child: u64,
    mut root: GroupNode,
    core: &Arc<Core>,
    deadline: Duration,
) -> Result<(), StartFailed> {
    let (sender, mut news) = mpsc::unbounded_channel();
    let (done, doing) = oneshot::channel();
    let of_task = Arc::clone(core);
    let lookout = Lookout(Some(Arc::clone(core)));
    core.host.spawn(async move {
        let (core, mut lookout) = (of_task, lookout);
        let run = root.begin(&core, Report::new(sender, child, 1), Some(deadline));
        core.note_life(child, 1, run.progress);
        core.put_root(run.stop);
        let mut done = Some(done);
        let exit = loop {
            let heard = tokio::select! {
                heard = news.recv() => heard,
                () = abandoned(&mut done) => {
                    core.stop_root();
                    continue;
                }
            };
            match heard {
                Some(News::Ready { .. }) => {
                    core.note(child, |info| info.state = ChildState::Ready);
                    if let Some(done) = done.take()
                        && done.send(Ok(())).is_err()
                    {
                        core.stop_root();
                    }
                }
                Some(News::Exited { exit, .. }) => break exit,
                Some(_) => {}
                None => break Exit::ThreadGone,
            }
        };
        root.close(&core);
        core.note(child, |info| {
            let failed = exit.is_failure();
            info.state = if failed { ChildState::Failed } else { ChildState::Stopped };
            info.last_exit = failed.then(|| exit.clone());
        });
        lookout.0 = None;
        let failed = match &exit {
            Exit::NotStarted(failed) => (**failed).clone(),
            _ => StartFailed::Ended(core.name.clone()),
        };
        core.end(exit);
        if let Some(done) = done {
            // Whoever asked may be gone.
            let _ = done.send(Err(failed));
        }
    });
    doing.await.unwrap_or_else(|_| Err(StartFailed::Ended(core.name.clone())))
}

/// Sees to it that nobody waits for ever for the end of a tree whose host ends under it.
struct Lookout(Option<Arc<Core>>);

impl Drop for Lookout {
    fn drop(&mut self) {
        if let Some(core) = &self.0 {
            tracing::error!(group = &*core.name, "the thread of the supervisors ended under a running tree");
            core.lost();
        }
    }
}

/// Resolves when whoever waits for a start is gone: nobody would ever stop what it started.
async fn abandoned(done: &mut Option<oneshot::Sender<Result<(), StartFailed>>>) {
    match done {
        Some(waiting) => waiting.closed().await,
        None => std::future::pending().await,
    }
    *done = None;
}

/// A group as a child.
pub(super) struct GroupNode {
    name: Name,
    settings: Settings,
    cell: Cell,
}

impl GroupNode {
    /// Begins a run of its supervisor. Called on the host's main thread.
    fn begin(&mut self, core: &Arc<Core>, report: Arc<Report>, deadline: Option<Duration>) -> Run {
        let (stop, stopping) = oneshot::channel();
        if let Some(supervisor) = Supervisor::new(&self.cell, core, stopping, report, deadline) {
            core.host.spawn(supervisor.run());
        }
        Run { stop: Some(stop), progress: Progress::default(), vital: None }
    }
}

impl Node for GroupNode {
    fn name(&self) -> &Name {
        &self.name
    }

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn launch(&mut self, launch: Launch<'_>) -> Run {
        self.begin(launch.core, launch.report, None)
    }

    fn fence(&self) {}

    fn close(&mut self, core: &Core) -> u64 {
        close_members(&self.cell, core)
    }

    fn forget(&self, core: &Core) {
        forget_members(&self.cell, core);
    }

    fn is_group(&self) -> bool {
        true
    }
}
