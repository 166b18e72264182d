//! What a tree answers while it runs.

use std::fmt;
use std::sync::Arc;

use actix::prelude::*;
use tokio::sync::{broadcast, oneshot};

use super::book::Core;
use super::child::{ActorNode, Node};
use super::command::{Command, slot_of};
use super::group::enter_actor;
use super::supervisor::News;
use super::{
    ChildInfo, EventKind, GaveUp, Group, Health, Name, Spec, StartFailed, SupervisorEvent, Totals, Unknown,
};

/// A running tree. Cheap to clone, usable from any thread and runtime.
///
/// When the last clone is dropped, the tree is told to stop and nobody waits for it. Handles that actors get from their
/// [`Cx`](super::Cx) do not count.
#[derive(Clone)]
pub struct Registry {
    core: Arc<Core>,
    /// None in the handles of actors.
    _life: Option<Arc<Life>>,
}

/// Stops the tree when the last owner is gone.
struct Life(Arc<Core>);

impl Drop for Life {
    fn drop(&mut self) {
        self.0.orphan();
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").field("name", &self.core.name).finish_non_exhaustive()
    }
}

impl Registry {
    pub(super) fn owning(core: Arc<Core>) -> Self {
        let life = Some(Arc::new(Life(Arc::clone(&core))));
        Self { core, _life: life }
    }

    pub(super) fn for_actors(core: &Arc<Core>) -> Self {
        Self { core: Arc::clone(core), _life: None }
    }

    /// The address of the only child of this type.
    ///
    /// # Errors
    ///
    /// When there is none, or more than one: then ask for it by name.
    pub fn addr<A: Actor>(&self) -> Result<Addr<A>, Unknown> {
        self.core.addr()
    }

    /// The address of the child of this type and name.
    ///
    /// # Errors
    ///
    /// When there is none.
    pub fn named<A: Actor>(&self, name: &str) -> Result<Addr<A>, Unknown> {
        self.core.named(name)
    }

    /// The child that declared to provide this message.
    ///
    /// # Errors
    ///
    /// When there is none.
    pub fn recipient<M>(&self) -> Result<Recipient<M>, Unknown>
    where
        M: Message + Send + 'static,
        M::Result: Send,
    {
        self.core.recipient()
    }

    /// Everybody in the tree, groups too, in start order; children added later come last.
    pub fn children(&self) -> Vec<ChildInfo> {
        self.core.children()
    }

    /// Whether every actor is ready, and if not, who is not and why. For a readiness endpoint.
    pub fn health(&self) -> Health {
        self.core.health()
    }

    /// What was counted since the start. For metrics.
    pub fn totals(&self) -> Totals {
        self.core.totals()
    }

    /// What happens from now on. A listener more than 1 024 events behind loses the oldest and is told how many.
    pub fn events(&self) -> broadcast::Receiver<SupervisorEvent> {
        self.core.events()
    }

    /// Sends every event from now on to this recipient, until it is closed. Asking again changes nothing, so an actor may do it at every
    /// start: with its stable address it hears each event once.
    pub fn subscribe(&self, listener: Recipient<SupervisorEvent>) {
        if !self.core.listen(&listener) {
            return;
        }
        let (mut events, core) = (self.core.events(), Arc::downgrade(&self.core));
        self.core.host.spawn(async move {
            loop {
                match events.recv().await {
                    Ok(event) if listener.connected() => listener.do_send(event),
                    Err(broadcast::error::RecvError::Lagged(lost)) => {
                        tracing::warn!(lost, "a listener for supervisor events was too slow");
                    }
                    Ok(_) | Err(broadcast::error::RecvError::Closed) => break,
                }
            }
            if let Some(core) = core.upgrade() {
                core.unlisten(&listener);
            }
        });
    }

    /// Adds a child to a running group and waits until it is ready.
    ///
    /// # Errors
    ///
    /// When it cannot work there or does not become ready: then it was not added.
    pub async fn add<A: Actor<Context = Context<A>>>(
        &self,
        group: &str,
        spec: Spec<A>,
    ) -> Result<(), StartFailed> {
        let (node, entries) = ActorNode::new(spec);
        let Some((news, from)) = self.core.group(group) else {
            return Err(StartFailed::NoSuchGroup(group.into()));
        };
        let group = group.into();
        let child = enter_actor(&self.core, &group, &node, entries, &from)?;
        self.put(&news, group, child, Box::new(node)).await
    }

    /// Adds a whole group to a running group and waits until it is ready.
    ///
    /// # Errors
    ///
    /// When it cannot work there or one of its children does not become ready: then nothing was added.
    pub async fn add_group(&self, parent: &str, group: Group) -> Result<(), StartFailed> {
        let Some((news, from)) = self.core.group(parent) else {
            return Err(StartFailed::NoSuchGroup(parent.into()));
        };
        let parent = parent.into();
        let (child, node) = group.enter_below(&self.core, &parent, from)?;
        self.put(&news, parent, child, Box::new(node)).await
    }

    async fn put(
        &self,
        news: &tokio::sync::mpsc::UnboundedSender<News>,
        group: Name,
        child: u64,
        node: Box<dyn Node>,
    ) -> Result<(), StartFailed> {
        let (asked, answer) = oneshot::channel();
        if let Err(refused) = news.send(News::Command(Command::Add { slot: slot_of(child, node, asked) }))
            && let News::Command(Command::Add { slot }) = refused.0
        {
            slot.forget(&self.core);
        }
        answer.await.unwrap_or(Err(StartFailed::NoSuchGroup(group)))
    }

    /// Stops a child, or a group with all its children, and forgets it. Its addresses are closed; those who wait for an answer get an
    /// error. Returns how many messages were never delivered.
    ///
    /// # Errors
    ///
    /// When there is no such child in a running group.
    pub async fn remove(&self, name: &str) -> Result<u64, StartFailed> {
        self.ask(name, |name, answer| Command::Remove { name, answer }).await
    }

    /// Stops a child in good order and starts it again, with those that depend on it. Its queue is kept. This is not counted as a death.
    /// Waits until it is ready.
    ///
    /// # Errors
    ///
    /// When there is no such child in a running group, or it does not become ready; then its restart policy goes on with it.
    pub async fn restart(&self, name: &str) -> Result<(), StartFailed> {
        self.ask(name, |name, answer| Command::Restart { name, answer }).await?
    }

    async fn ask<T>(
        &self,
        name: &str,
        command: impl FnOnce(Name, oneshot::Sender<T>) -> Command,
    ) -> Result<T, StartFailed> {
        let none = || StartFailed::NoSuchChild(name.into());
        let news = self.core.group_of(name).ok_or_else(none)?;
        let (asked, answer) = oneshot::channel();
        news.send(News::Command(command(name.into(), asked))).map_err(|_| none())?;
        answer.await.map_err(|_| none())
    }

    /// Makes a child panic between two messages. For tests.
    ///
    /// # Errors
    ///
    /// When there is no such child in a running group.
    #[cfg(feature = "testing")]
    pub fn crash(&self, name: &str) -> Result<(), StartFailed> {
        let none = || StartFailed::NoSuchChild(name.into());
        let news = self.core.group_of(name).ok_or_else(none)?;
        news.send(News::Command(Command::Crash { name: name.into() })).map_err(|_| none())
    }

    /// Runs a future on the host's main thread, where the supervisors live: it must not block. Returns whether it still can.
    pub fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) -> bool {
        self.core.host.spawn(future)
    }

    /// Tells the tree to stop and does not wait for it.
    pub fn stop(&self) {
        self.core.stop_root();
    }

    /// Stops all children in reverse order, then the host, and waits until its threads are gone; from an actor of the tree it can only
    /// tell it to stop. A second call finds little to do. Needs no particular runtime.
    pub async fn shutdown(&self) {
        self.core.stop_root();
        // How it ended is not asked here.
        let _ = self.terminated().await;
        self.core.host.close().await;
    }

    /// Resolves when the tree has ended: well after a stop, with an error when a child of the root, or of a group that is not contained,
    /// was given up. The process is never ended for it; that is for the caller to decide.
    ///
    /// # Errors
    ///
    /// When a child was given up.
    pub async fn terminated(&self) -> Result<(), GaveUp> {
        let mut ended = self.core.ended.subscribe();
        // The sender lives as long as the core.
        ended.wait_for(Option::is_some).await.ok().and_then(|ended| ended.clone()).unwrap_or(Ok(()))
    }

    pub(super) fn tell_beside(&self, child: &Name, kind: EventKind) {
        self.core.tell_beside(child, kind);
    }
}
