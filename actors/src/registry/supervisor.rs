//! The task that watches over one group.
//!
//! The rule: one loop hears everything that happens to its children and decides with pure policies; it never waits for one child while
//! another may need it. A group inside a group is a child like any other. The failures this prevents: a supervisor that hangs with the
//! child it is starting, siblings that pay for one that loops, and a group that is left half stopped.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};

use super::book::Core;
use super::child::Report;
use super::command::Command;
use super::exit::{caught, panic_text};
use super::members::{Cell, Members};
use super::order::{Place, Stage, to_start, to_stop};
use super::restart::Verdict;
use super::slot::Slot;
use super::{ChildState, EventKind, Exit, GaveUp, Name, StartFailed, Strategy, lock};

/// What a supervisor hears.
pub(super) enum News {
    /// A life says that it is ready.
    Ready { child: u64, generation: u64 },
    /// A life has ended.
    Exited { child: u64, generation: u64, exit: Exit },
    /// Somebody wants something.
    Command(Command),
    /// What had to be done before the group stops is done.
    LastWordsSaid,
}

#[derive(Debug, PartialEq)]
enum Phase {
    /// The first start: all or nothing.
    Starting,
    Running,
    /// A child died too often; something has to be done before the others stop.
    LastWords(Exit),
    /// Everybody stops, for this reason.
    Ending(Exit),
}

/// A running supervisor.
pub(super) struct Supervisor {
    cell: Cell,
    pub(super) members: Members,
    pub(super) core: Arc<Core>,
    sender: mpsc::UnboundedSender<News>,
    news: mpsc::UnboundedReceiver<News>,
    stop: Option<oneshot::Receiver<Duration>>,
    report: Arc<Report>,
    /// When the first start has failed.
    deadline: Option<(Instant, Duration)>,
    phase: Phase,
    rng: SmallRng,
}

enum Next {
    News(Option<News>),
    Stop,
    Time,
}

impl Supervisor {
    /// Takes the members out of their cell; `None` if a supervisor has them already.
    pub(super) fn new(
        cell: &Cell,
        core: &Arc<Core>,
        stop: oneshot::Receiver<Duration>,
        report: Arc<Report>,
        deadline: Option<Duration>,
    ) -> Option<Self> {
        let mut members = lock(cell).take()?;
        members.slots.iter_mut().for_each(|slot| slot.reset(core));
        let (sender, news) = mpsc::unbounded_channel();
        core.open_group(&members.name, sender.clone(), members.policy.inherited());
        Some(Self {
            cell: Arc::clone(cell),
            rng: SmallRng::seed_from_u64(members.policy.seed),
            members,
            core: Arc::clone(core),
            sender,
            news,
            stop: Some(stop),
            report,
            deadline: deadline.and_then(|limit| Some((Instant::now().checked_add(limit)?, limit))),
            phase: Phase::Starting,
        })
    }

    /// Runs until the group has stopped or given up.
    pub(super) async fn run(mut self) {
        let exit = loop {
            self.act();
            if let Some(exit) = self.end_reached() {
                break exit;
            }
            match self.next().await {
                Next::News(Some(news)) => self.hear(news),
                Next::News(None) | Next::Stop => self.end(Exit::Shutdown),
                Next::Time => self.look_at_the_clock(),
            }
        };
        self.leave_no_question_open();
        let Self { cell, members, core, news, report, .. } = self;
        core.close_group(&members.name);
        *lock(&cell) = Some(members);
        refuse_rest(news, &core);
        report.exit(exit);
    }

    async fn next(&mut self) -> Next {
        let deadline = self.deadline.filter(|_| self.phase == Phase::Starting).map(|(at, _)| at);
        let next = self.members.slots.iter().filter_map(Slot::next).chain(deadline).min();
        let (stop, news) = (&mut self.stop, &mut self.news);
        tokio::select! {
            biased;
            news = news.recv() => Next::News(news),
            _ = async { match stop { Some(stop) => stop.await.ok(), None => std::future::pending().await } } => {
                self.stop = None;
                Next::Stop
            }
            () = async { match next { Some(at) => sleep_until(at).await, None => std::future::pending().await } } => Next::Time,
        }
    }

    /// Starts and stops whoever has to.
    fn act(&mut self) {
        let running = self.is_running();
        let Members { slots, policy, .. } = &mut self.members;
        let wave = self.phase == Phase::Starting || policy.strategy != Strategy::OneForOne;
        // Children that are restarted or removed one by one do not wait for each other.
        let ordered = policy.ordered && (wave || !running);
        let places: Vec<Place> = slots.iter().map(|slot| slot.place).collect();
        for at in to_stop(&places, ordered) {
            slots[at].stop(&self.core);
        }
        if running {
            let places: Vec<Place> = slots.iter().map(|slot| slot.place).collect();
            for at in to_start(&places, Instant::now().into_std(), ordered, wave) {
                slots[at].launch(&self.core, &self.sender, policy);
            }
        }
        let settled = |slot: &Slot| matches!(slot.place.stage, Stage::Up | Stage::Over);
        if self.phase == Phase::Starting && self.members.slots.iter().all(settled) {
            self.phase = Phase::Running;
            self.report.ready();
        }
    }

    fn end_reached(&self) -> Option<Exit> {
        match &self.phase {
            Phase::Ending(exit) if !self.members.slots.iter().any(|slot| slot.place.is_running()) => {
                Some(exit.clone())
            }
            _ => None,
        }
    }

    /// Everybody stops. The first reason counts.
    fn end(&mut self, exit: Exit) {
        let exit = match &self.phase {
            Phase::Ending(first) | Phase::LastWords(first) => first.clone(),
            Phase::Starting | Phase::Running => exit,
        };
        self.phase = Phase::Ending(exit);
        self.members.slots.iter_mut().for_each(|slot| slot.place.wanted = false);
    }

    fn hear(&mut self, news: News) {
        match news {
            News::Ready { child, generation } => {
                if let Some(at) = self.life(child, generation) {
                    self.members.slots[at].ready(&self.core);
                }
            }
            News::Exited { child, generation, exit } => {
                if let Some(at) = self.life(child, generation) {
                    self.ended(at, exit);
                }
            }
            News::Command(command) => self.obey(command),
            News::LastWordsSaid => self.end(Exit::Shutdown),
        }
    }

    /// Where the child of this life stands. A life that was bypassed has nothing to say any more.
    fn life(&self, child: u64, generation: u64) -> Option<usize> {
        self.members.slots.iter().position(|slot| {
            slot.child == child && slot.generation() == generation && slot.place.is_running()
        })
    }

    /// Whether children are started at all.
    pub(super) fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Starting | Phase::Running)
    }

    pub(super) fn at(&self, name: &Name) -> Option<usize> {
        self.members.slots.iter().position(|slot| slot.name() == name)
    }

    fn look_at_the_clock(&mut self) {
        let now = Instant::now();
        if let (Phase::Starting, Some((at, limit))) = (&self.phase, self.deadline)
            && at <= now
        {
            return self.too_late(limit);
        }
        let core = &self.core;
        let alarm = |slot: &mut Slot| slot.alarm(core, now).map(|exit| (slot.child, exit));
        let lost: Vec<(u64, Exit)> = self.members.slots.iter_mut().filter_map(alarm).collect();
        for (child, exit) in lost {
            // One that was lost before it may have been removed, and everybody moved up.
            if let Some(at) = self.members.slots.iter().position(|slot| slot.child == child) {
                self.ended(at, exit);
            }
        }
    }

    /// The whole start took too long.
    fn too_late(&mut self, limit: Duration) {
        let (child, problem) = self.core.starting().unwrap_or_else(|| (self.members.name.clone(), None));
        let waited = format!("not ready within {} ms", limit.as_millis());
        let cause = problem.map_or(waited.clone(), |problem| format!("{waited}: {problem}"));
        self.end(Exit::NotStarted(Box::new(StartFailed::Child { child, cause })));
    }

    /// A life has ended, or is given up.
    fn ended(&mut self, at: usize, exit: Exit) {
        let slot = &mut self.members.slots[at];
        let asked = slot.place.stage == Stage::Stopping || slot.place.must_stop();
        slot.gone();
        if asked || matches!(self.phase, Phase::Ending(_) | Phase::LastWords(_)) {
            return self.stopped(at, exit);
        }
        // Noted before it is told: whoever hears of it may look at once.
        self.core.note(slot.child, |info| {
            info.state = ChildState::Stopped;
            info.last_exit = Some(exit.clone());
        });
        slot.tell(&self.core, EventKind::Exited { exit: exit.clone() });
        let comes_back = slot.node.settings().restart.applies(&exit);
        if exit.is_failure() || comes_back {
            let failed = start_failed(slot.name(), &exit);
            if self.phase == Phase::Starting && !slot.newborn {
                self.core.note(slot.child, |info| info.state = ChildState::Failed);
                return self.end(Exit::NotStarted(Box::new(failed)));
            }
            slot.answer_start(&Err(failed));
            if slot.newborn {
                self.remove(at);
                return;
            }
        }
        if !comes_back {
            return self.finished(at, &exit);
        }
        let lot = self.rng.random_range(-1.0..=1.0);
        match slot.died(&self.members.policy, lot) {
            Verdict::Again(pause) => self.again(at, &exit, pause),
            Verdict::GiveUp(restarts) => self.give_up(at, exit, restarts),
        }
    }

    /// It was asked to stop, and has.
    pub(super) fn stopped(&mut self, at: usize, exit: Exit) {
        let slot = &mut self.members.slots[at];
        self.core.note(slot.child, |info| {
            info.state = ChildState::Stopped;
            if exit.is_failure() {
                info.last_exit = Some(exit.clone());
            }
        });
        if exit.is_failure() {
            tracing::warn!(child = &**slot.name(), cause = %exit, "this child did not stop in good order");
            slot.tell(&self.core, EventKind::Exited { exit });
        }
        slot.tell(&self.core, EventKind::Stopped);
        if !slot.removal.is_empty() {
            self.remove(at);
        }
    }

    /// Lets a child go for good, and its name with it.
    pub(super) fn remove(&mut self, at: usize) {
        let mut slot = self.members.slots.remove(at);
        let over = slot.place.stage == Stage::Over;
        let undelivered = if over { 0 } else { slot.close(&self.core, ChildState::Stopped) };
        slot.forget(&self.core);
        slot.answer_start(&Err(StartFailed::NoSuchChild(slot.name().clone())));
        for removal in slot.removal.drain(..) {
            // Whoever asked may be gone.
            let _ = removal.send(undelivered);
        }
        // With it goes what its factory holds.
        if let Err(panic) = caught(|| drop(slot)) {
            tracing::error!(panic, "a factory panicked while it was dropped");
        }
    }

    /// The group has stopped: who was not ready yet was not added, and nobody waits for a start any more.
    fn leave_no_question_open(&mut self) {
        while let Some(at) = self.members.slots.iter().position(|slot| slot.newborn) {
            self.members.slots[at].answer_start(&Err(StartFailed::NoSuchGroup(self.members.name.clone())));
            self.remove(at);
        }
        self.members.slots.iter_mut().for_each(|slot| slot.start_asked.clear());
    }

    /// It has ended and is not to come back; the others go on.
    fn finished(&mut self, at: usize, exit: &Exit) {
        let slot = &mut self.members.slots[at];
        let state = if exit.is_failure() { ChildState::Failed } else { ChildState::Finished };
        if exit.is_failure() {
            tracing::error!(child = &**slot.name(), cause = %exit, "this child has failed and is not to be restarted");
        }
        slot.newborn = false;
        slot.answer_start(&Ok(()));
        slot.close(&self.core, state);
    }

    /// It comes back after this pause, and whoever depends on it with it.
    fn again(&mut self, at: usize, exit: &Exit, pause: Duration) {
        let due = Instant::now().into_std().checked_add(pause);
        let slot = &mut self.members.slots[at];
        let mut count = 0;
        self.core.note(slot.child, |info| {
            info.state = ChildState::Waiting;
            info.restarts += 1;
            count = info.restarts;
        });
        slot.tell(&self.core, EventKind::RestartIn { delay: pause });
        tracing::warn!(child = &**slot.name(), cause = %exit, restarts = count, pause_ms = pause.as_millis() as u64,
            "this child has died and is restarted");
        slot.place.due = due;
        self.recycle_dependents(at, due);
    }

    /// Whoever depends on this child has to start again after it, by the strategy of the group.
    pub(super) fn recycle_dependents(&mut self, at: usize, due: Option<std::time::Instant>) {
        let Members { slots, policy, .. } = &mut self.members;
        let dependents = match policy.strategy {
            Strategy::OneForOne => 0..0,
            Strategy::RestForOne => at + 1..slots.len(),
            Strategy::OneForAll => 0..slots.len(),
        };
        for other in dependents.filter(|other| *other != at) {
            let place = &mut slots[other].place;
            place.recycle = place.is_running();
            place.due = place.due.max(due);
        }
    }

    /// It died too often: the whole group stops.
    fn give_up(&mut self, at: usize, exit: Exit, restarts: u32) {
        let slot = &mut self.members.slots[at];
        slot.place.wanted = false;
        self.core.note(slot.child, |info| info.state = ChildState::Failed);
        slot.tell(&self.core, EventKind::GaveUp { restarts });
        tracing::error!(child = &**slot.name(), group = &*self.members.name, restarts, cause = %exit,
            "this child died too often: its group stops");
        let gave_up = GaveUp { child: slot.name().clone(), restarts, exit };
        let exit = Exit::GaveUp(Box::new(gave_up.clone()));
        let Some(last_words) = self.members.policy.last_words.clone() else { return self.end(exit) };
        let (said, group) = (self.sender.clone(), self.members.name.clone());
        self.phase = Phase::LastWords(exit);
        self.core.host.spawn(async move {
            let words = AssertUnwindSafe(async move { last_words(gave_up).await });
            if let Err(panic) = words.catch_unwind().await {
                tracing::error!(group = &*group, panic = panic_text(&*panic), "the last words panicked");
            }
            // The group may have been stopped meanwhile.
            let _ = said.send(News::LastWordsSaid);
        });
    }
}

/// Refuses what was asked too late: dropping a question answers it.
fn refuse_rest(mut news: mpsc::UnboundedReceiver<News>, core: &Core) {
    news.close();
    while let Ok(late) = news.try_recv() {
        if let News::Command(Command::Add { slot }) = late {
            slot.forget(core);
        }
    }
}

/// Why a child did not come up. What a group says of its own child is said as it is.
fn start_failed(child: &Name, exit: &Exit) -> StartFailed {
    match exit {
        Exit::NotStarted(failed) => (**failed).clone(),
        Exit::Stopped => {
            StartFailed::Child { child: child.clone(), cause: "it ended before it was ready".to_owned() }
        }
        exit => StartFailed::Child { child: child.clone(), cause: exit.to_string() },
    }
}
