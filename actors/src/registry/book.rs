//! What everybody may know of a tree: who is in it, where each child stands, and what has happened.

use std::any::{Any, TypeId, type_name};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use actix::prelude::*;
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::time::Instant;

use super::child::Entries;
use super::group::Inherited;
use super::spec::Progress;
use super::supervisor::News;
use super::{
    ChildInfo, ChildState, EventKind, Exit, GaveUp, Health, Host, Name, StartFailed, SupervisorEvent, Totals,
    Unknown, lock,
};

/// Events kept for a listener that is slow.
const EVENTS: usize = 1024;

/// The shared part of a tree. Supervisors write it, everybody reads it.
pub(super) struct Core {
    pub(super) name: Name,
    pub(super) host: Arc<Host>,
    book: Mutex<Book>,
    records: Mutex<BTreeMap<u64, Known>>,
    next: AtomicU64,
    events: broadcast::Sender<SupervisorEvent>,
    listeners: Mutex<HashSet<Recipient<SupervisorEvent>>>,
    totals: Mutex<Totals>,
    /// How the tree ended.
    pub(super) ended: watch::Sender<Option<Result<(), GaveUp>>>,
    /// Stops the root.
    root: Mutex<Option<oneshot::Sender<Duration>>>,
    /// Nobody owns the tree any more, although an actor may still hold it.
    orphaned: AtomicBool,
}

/// Who can be found.
#[derive(Default)]
struct Book {
    addrs: HashMap<TypeId, Vec<(Name, Found)>>,
    recipients: HashMap<TypeId, (Name, Found)>,
    children: HashMap<Name, u64>,
    /// The supervisors that run, by the name of their group.
    groups: HashMap<Name, (mpsc::UnboundedSender<News>, Inherited)>,
}

type Found = Box<dyn Any + Send + Sync>;

struct Known {
    info: ChildInfo,
    progress: Progress,
}

impl Core {
    pub(super) fn new(name: Name, host: Arc<Host>) -> Arc<Self> {
        Arc::new(Self {
            name,
            host,
            book: Mutex::default(),
            records: Mutex::default(),
            next: AtomicU64::new(1),
            events: broadcast::channel(EVENTS).0,
            listeners: Mutex::default(),
            totals: Mutex::default(),
            ended: watch::Sender::new(None),
            root: Mutex::default(),
            orphaned: AtomicBool::default(),
        })
    }

    /// Takes a name for a child. The number tells the child apart for ever.
    pub(super) fn enter(
        &self,
        name: &Name,
        group: Option<&Name>,
        is_group: bool,
    ) -> Result<u64, StartFailed> {
        let mut book = lock(&self.book);
        if book.children.contains_key(name) {
            return Err(StartFailed::DuplicateName(name.clone()));
        }
        let child = self.next.fetch_add(1, Ordering::Relaxed);
        book.children.insert(name.clone(), child);
        let info = ChildInfo {
            name: name.clone(),
            group: group.cloned(),
            is_group,
            state: ChildState::default(),
            generation: 0,
            restarts: 0,
            last_exit: None,
        };
        lock(&self.records).insert(child, Known { info, progress: Progress::default() });
        Ok(child)
    }

    /// Makes a child findable.
    pub(super) fn list(&self, name: &Name, entries: Entries) -> Result<(), StartFailed> {
        let mut book = lock(&self.book);
        for (message, of, _) in &entries.provides {
            if let Some((first, _)) = book.recipients.get(message) {
                let (first, second) = (first.clone(), name.clone());
                return Err(StartFailed::DuplicateProvider { message: of, first, second });
            }
        }
        let (actor, _, addr) = entries.addr;
        book.addrs.entry(actor).or_default().push((name.clone(), addr));
        for (message, _, recipient) in entries.provides {
            book.recipients.insert(message, (name.clone(), recipient));
        }
        Ok(())
    }

    /// Forgets a child.
    pub(super) fn leave(&self, name: &Name) {
        let mut book = lock(&self.book);
        for addrs in book.addrs.values_mut() {
            addrs.retain(|(owner, _)| owner != name);
        }
        book.recipients.retain(|_, (owner, _)| owner != name);
        if let Some(child) = book.children.remove(name) {
            lock(&self.records).remove(&child);
        }
    }

    /// Forgets a group and everybody in it.
    pub(super) fn leave_all(&self, group: &Name) {
        let inside = |info: &ChildInfo| info.group.as_ref() == Some(group);
        for child in self.children().into_iter().filter(inside) {
            self.leave_all(&child.name);
        }
        self.leave(group);
    }

    pub(super) fn put_root(&self, stop: Option<oneshot::Sender<Duration>>) {
        *lock(&self.root) = stop;
    }

    /// Tells the tree to stop.
    pub(super) fn stop_root(&self) {
        if let Some(stop) = lock(&self.root).take() {
            // It may have ended by itself. Its children have their own limits.
            let _ = stop.send(Duration::MAX);
        }
    }

    /// The tree has ended.
    pub(super) fn end(&self, exit: Exit) {
        let end = match exit {
            Exit::GaveUp(gave_up) => Err(*gave_up),
            Exit::NotStarted(_) => Ok(()),
            exit if exit.is_failure() => Err(GaveUp { child: self.name.clone(), restarts: 0, exit }),
            _ => Ok(()),
        };
        self.ended.send_replace(Some(end));
        if self.orphaned.load(Ordering::SeqCst) {
            self.host.stop();
        }
    }

    /// The host has ended under the tree.
    pub(super) fn lost(&self) {
        for Known { info, .. } in lock(&self.records).values_mut() {
            if !matches!(info.state, ChildState::Finished | ChildState::Failed) {
                (info.state, info.last_exit) = (ChildState::Failed, Some(Exit::ThreadGone));
            }
        }
        self.end(Exit::ThreadGone);
    }

    /// The last owner is gone: the tree stops, and its host with it.
    pub(super) fn orphan(&self) {
        self.orphaned.store(true, Ordering::SeqCst);
        self.stop_root();
        if self.ended.borrow().is_some() {
            self.host.stop();
        }
    }

    pub(super) fn open_group(&self, name: &Name, news: mpsc::UnboundedSender<News>, children: Inherited) {
        lock(&self.book).groups.insert(name.clone(), (news, children));
    }

    pub(super) fn close_group(&self, name: &Name) {
        lock(&self.book).groups.remove(name);
    }

    /// The supervisor of a running group, and what its children take from it.
    pub(super) fn group(&self, name: &str) -> Option<(mpsc::UnboundedSender<News>, Inherited)> {
        lock(&self.book).groups.get(name).cloned()
    }

    /// The supervisor of the group a child belongs to.
    pub(super) fn group_of(&self, name: &str) -> Option<mpsc::UnboundedSender<News>> {
        let child = *lock(&self.book).children.get(name)?;
        let group = lock(&self.records).get(&child)?.info.group.clone()?;
        self.group(&group).map(|(news, _)| news)
    }

    pub(super) fn addr<A: Actor>(&self) -> Result<Addr<A>, Unknown> {
        let book = lock(&self.book);
        let addrs = book.addrs.get(&TypeId::of::<A>()).map(Vec::as_slice).unwrap_or_default();
        match addrs {
            [(_, addr)] => addr.downcast_ref::<Addr<A>>().cloned().ok_or_else(|| nobody::<A>()),
            [] => Err(nobody::<A>()),
            several => {
                let names: Vec<&str> = several.iter().map(|(name, _)| &**name).collect();
                Err(Unknown::Several { actor: type_name::<A>(), names: names.join(", ") })
            }
        }
    }

    pub(super) fn named<A: Actor>(&self, name: &str) -> Result<Addr<A>, Unknown> {
        let book = lock(&self.book);
        let addrs = book.addrs.get(&TypeId::of::<A>()).into_iter().flatten();
        let mut named = addrs.filter(|(owner, _)| &**owner == name);
        let found = named.next().and_then(|(_, addr)| addr.downcast_ref::<Addr<A>>().cloned());
        found.ok_or_else(|| Unknown::Nobody(format!("a {} called {name}", type_name::<A>())))
    }

    pub(super) fn recipient<M>(&self) -> Result<Recipient<M>, Unknown>
    where
        M: Message + Send + 'static,
        M::Result: Send,
    {
        let book = lock(&self.book);
        let found = book.recipients.get(&TypeId::of::<M>());
        let recipient = found.and_then(|(_, recipient)| recipient.downcast_ref::<Recipient<M>>().cloned());
        recipient.ok_or_else(|| Unknown::Nobody(format!("a provider of {}", type_name::<M>())))
    }

    pub(super) fn children(&self) -> Vec<ChildInfo> {
        lock(&self.records).values().map(|known| known.info.clone()).collect()
    }

    pub(super) fn health(&self) -> Health {
        let well = |info: &ChildInfo| {
            info.is_group || matches!(info.state, ChildState::Ready | ChildState::Finished)
        };
        Health { troubles: self.children().into_iter().filter(|child| !well(child)).collect() }
    }

    /// The actor everybody waits for, with why it is not ready.
    pub(super) fn starting(&self) -> Option<(Name, Option<String>)> {
        let records = lock(&self.records);
        let starting = |known: &&Known| known.info.state == ChildState::Starting && !known.info.is_group;
        let known = records.values().find(starting)?;
        Some((known.info.name.clone(), known.progress.last_problem()))
    }

    /// Whether a child will not come back because it failed.
    pub(super) fn has_failed(&self, child: u64) -> bool {
        lock(&self.records).get(&child).is_some_and(|known| known.info.state == ChildState::Failed)
    }

    /// Changes what is known of a child.
    pub(super) fn note(&self, child: u64, change: impl FnOnce(&mut ChildInfo)) {
        if let Some(known) = lock(&self.records).get_mut(&child) {
            change(&mut known.info);
        }
    }

    /// A life of a child begins.
    pub(super) fn note_life(&self, child: u64, generation: u64, progress: Progress) {
        if let Some(known) = lock(&self.records).get_mut(&child) {
            known.info.state = ChildState::Starting;
            known.info.generation = generation;
            known.progress = progress;
        }
    }

    /// Tells everybody what happened.
    pub(super) fn tell(&self, child: &Name, generation: u64, kind: EventKind) {
        {
            let mut totals = lock(&self.totals);
            match &kind {
                EventKind::Exited { exit: Exit::Panicked(_) | Exit::FactoryPanicked(_) } => {
                    totals.panics += 1;
                }
                EventKind::RestartIn { .. } => totals.restarts += 1,
                EventKind::Unresponsive => totals.bypassed += 1,
                EventKind::Closed { undelivered } => totals.undelivered += undelivered,
                EventKind::GaveUp { .. } => totals.gave_up += 1,
                EventKind::BesidePanicked { .. } => totals.panics_beside += 1,
                EventKind::Exited { .. } | EventKind::Started | EventKind::Ready | EventKind::Stopped => {}
            }
        }
        let event = SupervisorEvent { child: child.clone(), generation, at: Instant::now().into_std(), kind };
        // Nobody has to listen.
        let _ = self.events.send(event);
    }

    /// Something happened beside a child.
    pub(super) fn tell_beside(&self, child: &Name, kind: EventKind) {
        let number = lock(&self.book).children.get(child).copied();
        let generation =
            number.and_then(|number| lock(&self.records).get(&number).map(|known| known.info.generation));
        self.tell(child, generation.unwrap_or_default(), kind);
    }

    pub(super) fn events(&self) -> broadcast::Receiver<SupervisorEvent> {
        self.events.subscribe()
    }

    /// Notes a listener. Returns whether it is a new one.
    pub(super) fn listen(&self, listener: &Recipient<SupervisorEvent>) -> bool {
        lock(&self.listeners).insert(listener.clone())
    }

    pub(super) fn unlisten(&self, listener: &Recipient<SupervisorEvent>) {
        lock(&self.listeners).remove(listener);
    }

    pub(super) fn totals(&self) -> Totals {
        *lock(&self.totals)
    }
}

fn nobody<A>() -> Unknown {
    Unknown::Nobody(format!("a {}", type_name::<A>()))
}
