//! One place of a group: the child, the life it is in, and the clocks that run on it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::book::Core;
use super::child::{Launch, Node, Report, Run};
use super::group::Policy;
use super::order::{Place, Stage};
use super::restart::{Record, Verdict};
use super::supervisor::News;
use super::{ChildState, EventKind, Exit, Name, StartFailed};

/// What a child that was ended may take beyond its time to stop until its thread counts as blocked.
const LAST_GRACE: Duration = Duration::from_millis(250);

/// A moment at which a life is given up.
#[derive(Clone, Copy, Debug)]
struct Limit {
    at: Instant,
    /// So long before it the thread is asked for a sign of life, to know then whether it is blocked.
    last_call: Duration,
    asked: bool,
}

impl Limit {
    fn new(at: Option<Instant>, last_call: Duration) -> Option<Self> {
        at.map(|at| Self { at, last_call, asked: false })
    }

    /// When it has to be looked at again.
    fn next(&self) -> Instant {
        if self.asked { self.at } else { self.at.checked_sub(self.last_call).unwrap_or(self.at) }
    }

    /// Whether the thread has to be asked now. One that was asked too late, or an answer that may have been held up because the whole
    /// process was, puts the limit off.
    fn must_ask(&mut self, now: Instant) -> bool {
        let overslept = now.saturating_duration_since(self.at) > self.last_call;
        let ask = self.next() <= now && (!self.asked || overslept);
        if ask {
            self.asked = true;
            self.at = self.at.max(now + self.last_call);
        }
        ask
    }
}

/// Probes per liveness limit. A single late one is no proof: the whole process may have been stopped.
const PROBES: u32 = 4;

/// A child in its group.
pub(super) struct Slot {
    /// The number of the child.
    pub(super) child: u64,
    pub(super) node: Box<dyn Node>,
    pub(super) place: Place,
    record: Record,
    generation: u64,
    run: Option<Run>,
    /// When it counts as not ready, or as stuck in its stop.
    limit: Option<Limit>,
    /// The signs of life of its thread when it was last asked for one outside the watch.
    pongs: u64,
    watch: Option<Watch>,
    /// It was added to a running group and was never ready. If it fails now, it was not added.
    pub(super) newborn: bool,
    /// Who asked for it to be started.
    pub(super) start_asked: Vec<oneshot::Sender<Result<(), StartFailed>>>,
    /// Who asked for it to be removed.
    pub(super) removal: Vec<oneshot::Sender<u64>>,
}

/// The watch over an incarnation.
#[derive(Debug)]
struct Watch {
    every: Duration,
    next: Instant,
    beats: u64,
    pongs: u64,
    misses: u32,
}

impl Slot {
    pub(super) fn new(child: u64, node: Box<dyn Node>) -> Self {
        Self {
            child,
            node,
            place: Place::new(),
            record: Record::default(),
            generation: 0,
            run: None,
            limit: None,
            pongs: 0,
            watch: None,
            newborn: false,
            start_asked: Vec::new(),
            removal: Vec::new(),
        }
    }

    pub(super) fn name(&self) -> &Name {
        self.node.name()
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    /// As before its first start, but for its generation.
    pub(super) fn reset(&mut self, core: &Core) {
        if self.place.stage != Stage::Over {
            self.place = Place::new();
            self.record = Record::default();
            core.note(self.child, |info| info.state = ChildState::Stopped);
        }
    }

    pub(super) fn tell(&self, core: &Core, kind: EventKind) {
        core.tell(self.name(), self.generation, kind);
    }

    /// Begins the next life.
    pub(super) fn launch(&mut self, core: &Arc<Core>, news: &mpsc::UnboundedSender<News>, policy: &Policy) {
        self.generation += 1;
        self.place.stage = Stage::Starting;
        self.place.due = None;
        self.limit = self
            .node
            .settings()
            .ready_within
            .and_then(|limit| Limit::new(Instant::now().checked_add(limit), limit / PROBES));
        let run = self.node.launch(Launch {
            host: &core.host,
            core,
            child: self.child,
            generation: self.generation,
            placement: policy.placement,
            report: Report::new(news.clone(), self.child, self.generation),
        });
        core.note_life(self.child, self.generation, run.progress.clone());
        self.run = Some(run);
        self.tell(core, EventKind::Started);
    }

    /// It says that it is ready.
    pub(super) fn ready(&mut self, core: &Core) {
        if self.place.stage != Stage::Starting {
            return;
        }
        let now = Instant::now();
        self.place.stage = Stage::Up;
        self.limit = None;
        self.record.ready(now.into_std());
        if let (Some(limit), Some((pulse, seat))) =
            (self.node.settings().liveness, self.run.as_ref().and_then(|run| run.vital.as_ref()))
        {
            let every = limit / PROBES;
            self.watch = Some(Watch {
                every,
                next: now + every,
                beats: pulse.beats(),
                pongs: seat.pongs(),
                misses: 0,
            });
            pulse.probe();
            seat.ping();
        }
        core.note(self.child, |info| info.state = ChildState::Ready);
        self.tell(core, EventKind::Ready);
        self.newborn = false;
        if !self.place.recycle {
            self.answer_start(&Ok(()));
        }
    }

    /// Tells whoever asked for it to be started what became of that.
    pub(super) fn answer_start(&mut self, answer: &Result<(), StartFailed>) {
        for asked in self.start_asked.drain(..) {
            // Whoever asked may be gone.
            let _ = asked.send(answer.clone());
        }
    }

    /// Asks it to stop.
    pub(super) fn stop(&mut self, core: &Core) {
        let within = self.node.settings().stop_within;
        self.place.stage = Stage::Stopping;
        self.watch = None;
        self.limit = None;
        core.note(self.child, |info| info.state = ChildState::Stopping);
        let Some(run) = &mut self.run else { return };
        if let Some(stop) = run.stop.take() {
            // It may have ended by itself; then its exit is on its way.
            let _ = stop.send(within);
        }
        if run.vital.is_some() {
            let at = Instant::now().checked_add(within).and_then(|at| at.checked_add(LAST_GRACE));
            self.limit = Limit::new(at, LAST_GRACE);
        }
    }

    /// Asks its thread for a sign of life.
    fn ping(&mut self) {
        if let Some(Run { vital: Some((_, seat)), .. }) = &self.run {
            self.pongs = seat.pongs();
            seat.ping();
        }
    }

    /// When the clock has to be looked at again.
    pub(super) fn next(&self) -> Option<Instant> {
        let due = self.place.due.filter(|_| self.place.stage == Stage::Down && self.place.wanted);
        let probe = self.watch.as_ref().map(|watch| watch.next);
        [due.map(Instant::from_std), self.limit.as_ref().map(Limit::next), probe].into_iter().flatten().min()
    }

    /// Looks at the clock. `Some`: it was not ready in time, or did not stop, or does not serve its mailbox.
    pub(super) fn alarm(&mut self, core: &Core, now: Instant) -> Option<Exit> {
        // A pause is over once. The child may still have to wait for others, and the clock is not to be looked at for ever meanwhile.
        self.place.due.take_if(|due| *due <= now.into_std());
        if self.limit.as_mut().is_some_and(|limit| limit.must_ask(now)) {
            self.ping();
        }
        if self.limit.is_some_and(|limit| limit.asked && limit.at <= now) {
            let exit = match (self.place.stage, &self.run) {
                (Stage::Starting, Some(run)) => Exit::NotReady(run.progress.last_problem()),
                _ => Exit::Stuck,
            };
            self.bypass(core);
            return Some(exit);
        }
        let (pulse, seat) = self.run.as_ref()?.vital.as_ref()?;
        let watch = self.watch.as_mut().filter(|watch| watch.next <= now)?;
        if pulse.beats() == watch.beats {
            watch.misses += 1;
        } else {
            (watch.beats, watch.pongs, watch.misses) = (pulse.beats(), seat.pongs(), 0);
        }
        if watch.misses < PROBES {
            watch.next = now + watch.every;
            pulse.probe();
            seat.ping();
            return None;
        }
        self.tell(core, EventKind::Unresponsive);
        self.bypass(core);
        Some(Exit::Stuck)
    }

    /// Lets no message through to this life any more, and its thread go if that is blocked.
    fn bypass(&mut self, core: &Core) {
        self.node.fence();
        let Some(Run { vital: Some((_, seat)), .. }) = &self.run else { return };
        let pongs_before = self.watch.as_ref().map_or(self.pongs, |watch| watch.pongs);
        if seat.pongs() == pongs_before {
            tracing::error!(child = &**self.name(), "the thread of this actor is blocked and is left behind");
            core.host.abandon(seat);
        }
    }

    /// Its life is over: dropping the run ends whatever is left of it.
    pub(super) fn gone(&mut self) {
        // It may be on a thread that is blocked, and wake up before the next life begins.
        self.node.fence();
        self.run = None;
        self.limit = None;
        self.watch = None;
        self.place.stage = Stage::Down;
        self.place.recycle = false;
    }

    /// What becomes of it after this death.
    pub(super) fn died(&mut self, policy: &Policy, lot: f64) -> Verdict {
        let settings = self.node.settings();
        let intensity = settings.intensity.unwrap_or(policy.intensity);
        let backoff = settings.backoff.unwrap_or(policy.backoff);
        self.record.died(Instant::now().into_std(), &intensity, &backoff, lot)
    }

    /// It will not come back.
    pub(super) fn close(&mut self, core: &Core, state: ChildState) -> u64 {
        self.place.stage = Stage::Over;
        let undelivered = self.node.close(core);
        core.host.release_own(self.child);
        core.note(self.child, |info| info.state = state);
        if undelivered > 0 {
            tracing::warn!(child = &**self.name(), undelivered, "messages were never delivered");
        }
        if !self.node.is_group() {
            self.tell(core, EventKind::Closed { undelivered });
        }
        undelivered
    }

    /// Gives back its name, and those of whoever is inside it.
    pub(super) fn forget(&self, core: &Core) {
        self.node.forget(core);
        core.leave(self.name());
    }

    /// Makes its life panic between two messages.
    #[cfg(feature = "testing")]
    pub(super) fn crash(&self) {
        if let Some(Run { vital: Some((pulse, _)), .. }) = &self.run {
            pulse.crash();
        }
    }
}
