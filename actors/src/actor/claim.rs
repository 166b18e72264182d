//! Claiming: the only caller of `claim`.
//!
//! The rule: permits first, then at most as many rows as permits; one claim at a time; one deadline per cycle, ended early by any wake.
//! Where there is a doorbell nobody sleeps without its lock (`bell`), and whoever can take nothing passes its rings on (`full`).
//! The failures this prevents: leasing more than can start soon, waking a hundred times for one piece of news, and sleeping twice over.

mod answer;
mod bell;
mod full;
mod hears;

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::delivery::{InFlight, Renewals};
use crate::instance::{Gate, InstanceId};
use crate::message::{BeatNow, Dispatch, Evicted, HandBack, PingNow};
use crate::options::Options;
use crate::policy::poll::{PollCadence, Wait};
use crate::port::{ClaimRequest, Doorbell, WorkStore};
use crate::standing::Standing;
use crate::work::Category;

use super::{Alarm, Health, now};
use answer::Answer;
use bell::{Bell, Outcome, Stage};
use full::Passing;

/// How long it sleeps at most while something is open: whoever counts on signals may poll once an hour, and the signal that was answered
/// with an error does not come again.
const OPEN_WAIT: Duration = Duration::from_secs(10);

/// What the claiming actor is made of.
#[derive(Clone)]
pub struct ClaimParts {
    /// The knobs.
    pub options: Options,
    /// Who claims.
    pub instance: InstanceId,
    /// What somebody here can run; empty: nothing is ever claimed.
    pub categories: Arc<[Category]>,
    /// One permit per row in hand.
    pub permits: Arc<Semaphore>,
    /// What is held in this process.
    pub in_flight: Arc<InFlight>,
    /// What its leases are made of.
    pub renewals: Arc<Renewals>,
    /// What is known about this instance.
    pub standing: Arc<Standing>,
    /// Wakes it when work arrives, while the gate is available. `None`: nobody rings, and it polls.
    pub doorbell: Option<Arc<dyn Doorbell>>,
    /// Runs rows.
    pub dispatch: Recipient<Dispatch>,
    /// Takes rows back that shall not be run.
    pub hand_back: Recipient<HandBack>,
    /// Registers the instance again when the store does not know it.
    pub beat_now: Recipient<BeatNow>,
    /// Proves that this instance is alive while there is work in hand.
    pub probe: Recipient<PingNow>,
    /// Learns that this instance was evicted.
    pub evicted: Recipient<Evicted>,
    /// Seed of the jitter.
    pub seed: u64,
}

impl std::fmt::Debug for ClaimParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClaimParts").field("instance", &self.instance).finish_non_exhaustive()
    }
}

/// Where the cycle stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Not allowed to claim.
    Parked,
    /// Waiting for the alarm or a wake.
    Sleeping,
    /// Waiting for a moment, awake, for what comes right behind.
    Lingering,
    /// Waiting for the arm lock.
    Arming,
    /// Waiting for permits.
    Gathering,
    /// A claim is under way.
    Claiming,
    /// Asking when the next row is due.
    Asking,
}

/// What woke it. The last is worth the most looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum News {
    #[default]
    None,
    /// Something was written here that may have freed work.
    Freed,
    /// Rows are likely.
    Rung,
}

#[derive(Debug, Default)]
struct Counters {
    claims: u64,
    rows: u64,
    empty: u64,
    startup_catch_up: u64,
    reconnect_catch_up: u64,
    recovered: u64,
    handed_back: u64,
    arms: u64,
    arm_timeouts: u64,
    arm_losses: u64,
    passed: u64,
}

/// Claims rows and hands them on.
pub struct ClaimActor {
    parts: ClaimParts,
    store: Arc<dyn WorkStore>,
    cadence: PollCadence,
    rng: SmallRng,
    alarm: Alarm,
    gathering: Option<SpawnHandle>,
    /// Numbers the waits for permits: the framework polls a cancelled one once more.
    gatherings: u64,
    health: Health,
    counters: Counters,
    phase: Phase,
    /// What was last heard of the gate.
    gate_told: Gate,
    was_down: bool,
    drain: Option<tokio::sync::oneshot::Sender<()>>,
    wake: bool,
    /// What the last wake was, if it was none of the alarm's.
    news: News,
    empty_polls: u32,
    contended: u32,
    due_misses: u32,
    bell: Bell,
    passing: Passing,
    /// When the last claim was sent, at the latest, whose outcome is unknown.
    lost_claim: Option<std::time::Instant>,
}

impl std::fmt::Debug for ClaimActor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClaimActor").field("phase", &self.phase).finish_non_exhaustive()
    }
}

impl Actor for ClaimActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        // The one before it may have died asleep.
        self.disarm(ctx);
        self.step(ctx);
    }
}

impl ClaimActor {
    /// Starts as the instance stands: fenced, until its first heartbeat is accepted. One that comes after another takes it that the other
    /// died of a claim, which the server may still carry out.
    pub fn new(parts: ClaimParts, store: Arc<dyn WorkStore>) -> Self {
        let lost_claim = parts.standing.succeeds_claimer().then(now);
        Self {
            cadence: PollCadence::new(&parts.options.claim),
            rng: SmallRng::seed_from_u64(parts.seed),
            store,
            alarm: Alarm::default(),
            gathering: None,
            gatherings: 0,
            health: Health::default(),
            counters: Counters::default(),
            phase: Phase::Parked,
            gate_told: parts.standing.gate(),
            was_down: parts.standing.gate() == Gate::Unavailable,
            drain: None,
            wake: true,
            news: News::None,
            empty_polls: 0,
            contended: 0,
            due_misses: 0,
            bell: Bell::new(parts.doorbell.clone(), lost_claim.is_some()),
            passing: Passing::default(),
            lost_claim,
            parts,
        }
    }

    fn may_claim(&self) -> bool {
        self.parts.options.claim.enabled
            && !self.parts.categories.is_empty()
            && self.parts.standing.may_claim()
            // The news that it has ended may still be on its way.
            && self.parts.dispatch.connected()
    }

    fn gate(&self) -> Gate {
        self.parts.standing.gate()
    }

    fn wake(&mut self, ctx: &mut Context<Self>) {
        self.news = News::Rung;
        self.look(ctx);
        self.ring_on(ctx);
    }

    fn look(&mut self, ctx: &mut Context<Self>) {
        self.wake = true;
        self.step(ctx);
    }

    /// Whether a claim may be sent at this moment. An idle instance has stopped proving itself: then the proof is asked for beside the
    /// claim, which the database refuses to whoever was evicted, and no row starts before it. With work in hand trust must not have ended.
    fn may_send(&mut self) -> bool {
        let rung = std::mem::take(&mut self.news) == News::Rung;
        if rung {
            self.bell.stage = Stage::Rung;
        }
        if self.parts.standing.is_trusted(now()) {
            return true;
        }
        let idle = self.parts.in_flight.is_empty();
        if !idle {
            self.parts.standing.doubt();
        }
        if !idle || rung {
            self.parts.probe.do_send(PingNow);
        }
        idle
    }

    /// Decides what is next, unless an operation is under way: its answer comes back here.
    fn step(&mut self, ctx: &mut Context<Self>) {
        match self.phase {
            Phase::Claiming | Phase::Asking | Phase::Arming => {}
            _ if !self.may_claim() => self.park(ctx),
            Phase::Gathering => {}
            Phase::Sleeping | Phase::Lingering if !self.wake => {}
            Phase::Parked | Phase::Sleeping | Phase::Lingering => {
                let stage = match self.news {
                    News::None => Stage::Polled,
                    News::Freed => Stage::Freed,
                    News::Rung => Stage::Rung,
                };
                self.gather(stage, ctx);
            }
        }
    }

    fn park(&mut self, ctx: &mut Context<Self>) {
        self.alarm.clear(ctx);
        self.gatherings += 1;
        if let Some(gathering) = self.gathering.take() {
            ctx.cancel_future(gathering);
        }
        self.phase = Phase::Parked;
        self.rest_full(ctx);
        if let Some(drained) = self.drain.take() {
            // The tree may have given up on this drain; then nobody waits for the answer.
            let _ = drained.send(());
        }
    }

    /// Waits for permits. Wakes that come meanwhile are served by the claim that follows.
    fn gather(&mut self, stage: Stage, ctx: &mut Context<Self>) {
        self.alarm.clear(ctx);
        self.phase = Phase::Gathering;
        self.bell.stage = stage;
        self.may_fill_up(ctx);
        let permits = Arc::clone(&self.parts.permits);
        let most = self.parts.options.claim.max_streams_per_batch.max(1);
        let gathered = async move {
            let mut gathered = Arc::clone(&permits).acquire_owned().await.ok()?;
            let more = (permits.available_permits() as u32).min(most - 1);
            if more > 0
                && let Ok(more) = permits.try_acquire_many_owned(more)
            {
                gathered.merge(more);
            }
            Some(gathered)
        };
        let number = self.gatherings;
        self.gathering = Some(ctx.spawn(gathered.into_actor(self).map(move |permits, act, ctx| {
            if number != act.gatherings {
                return;
            }
            act.gathering = None;
            act.has_room(ctx);
            match permits {
                Some(permits) if act.may_claim() && act.may_send() => act.claim(permits, ctx),
                // Not allowed now, or any more, or the semaphore was closed for good. An `Unfence` follows the next proof.
                Some(_) | None => act.park(ctx),
            }
        })));
    }

    /// Sends one claim for as many rows as there are permits.
    fn claim(&mut self, permits: OwnedSemaphorePermit, ctx: &mut Context<Self>) {
        self.phase = Phase::Claiming;
        self.wake = false;
        self.bell.note_look();
        self.counters.claims += 1;
        let claim = &self.parts.options.claim;
        let request = ClaimRequest {
            instance: self.parts.instance,
            max_rows: permits.num_permits() as u32,
            max_bytes: u64::from(claim.max_batch_megabytes) << 20,
            lease: claim.lease(),
            partition_count: claim.partition_count,
            stream_run: self.parts.options.dispatch.stream_run,
            categories: Arc::clone(&self.parts.categories),
        };
        // Taken before one looks at what is held: rows that are lost later ask for another recovery.
        let asked = self.parts.standing.take_recovery();
        let recover = (asked || self.lost_claim.is_some()).then(|| self.parts.in_flight.held());
        let store = Arc::clone(&self.store);
        let claimed = async move {
            let mut recovered = None;
            if let Some(held) = recover {
                let recovery_sent_at = now();
                match store.release_unheld(request.instance, held).await {
                    Ok(rows) => recovered = Some((recovery_sent_at, rows)),
                    Err(error) => {
                        return (permits, Answer { recovered, asked, sent_at: None, result: Err(error) });
                    }
                }
            }
            let sent_at = Some(now());
            let result = store.claim(request).await;
            (permits, Answer { recovered, asked, sent_at, result })
        };
        ctx.spawn(claimed.into_actor(self).map(|(permits, answer), act, ctx| {
            act.answered(permits, answer, ctx);
        }));
    }

    /// Waits for the next cycle, behind the doorbell where there is one, as the cadence says.
    fn rest(&mut self, again: bool, outcome: Outcome, ctx: &mut Context<Self>) {
        self.phase = Phase::Sleeping;
        self.wake |= again;
        if self.wake || !self.may_claim() {
            return self.step(ctx);
        }
        if self.settle_down(outcome, ctx) {
            return;
        }
        // No signal tells that a lost claim was carried out after all, or that a refused one or a recovery would succeed now.
        let open =
            outcome == Outcome::Error || self.lost_claim.is_some() || self.parts.standing.must_recover();
        match self.cadence.wait(self.heard_gate(), self.empty_polls) {
            Wait::For(wait) if open => self.sleep(wait.min(OPEN_WAIT), ctx),
            Wait::For(wait) => self.sleep(wait, ctx),
            Wait::UntilSignal if open => {
                self.sleep(self.cadence.backoff(self.gate(), self.empty_polls).min(OPEN_WAIT), ctx);
            }
            Wait::UntilSignal => self.ask_for_next_due(ctx),
        }
    }

    fn sleep(&mut self, wait: Duration, ctx: &mut Context<Self>) {
        self.phase = Phase::Sleeping;
        if self.wake || !self.may_claim() {
            return self.step(ctx);
        }
        self.alarm.set(ctx, wait, |act, ctx| {
            act.alarm.rang();
            act.look(ctx);
        });
    }

    /// Before a sleep without polls: nothing else would notice a schedule that comes due. Behind a doorbell it is asked for when armed, so
    /// that whatever is stored later rings, and looked for again before a lease could end that a peer has taken since.
    fn ask_for_next_due(&mut self, ctx: &mut Context<Self>) {
        self.phase = Phase::Asking;
        let store = Arc::clone(&self.store);
        let instance = self.parts.instance;
        let asked = async move { store.next_claimable_in(instance).await };
        ctx.spawn(asked.into_actor(self).map(|answer, act, ctx| {
            act.phase = Phase::Sleeping;
            let wait = match answer {
                Ok(due) => match act.until_due(due) {
                    Some(wait) => wait,
                    None => return act.step(ctx),
                },
                Err(error) => {
                    if act.health.wrong(&error) {
                        tracing::warn!(%error, "asking for the next due time failed");
                    }
                    act.empty_polls = act.empty_polls.saturating_add(1);
                    act.cadence.backoff(act.gate(), act.empty_polls)
                }
            };
            act.sleep(wait, ctx);
        }));
    }

    /// A row that is due but cannot be claimed (somebody holds its lock) must not make a hot loop.
    fn until_due(&mut self, due: Option<Duration>) -> Option<Duration> {
        // A lease that was taken after this answer lasts for longer than that.
        let again = self.bell.is_idle().then(|| self.parts.options.claim.lease() / 2);
        let Some(due) = due else {
            self.due_misses = 0;
            return again;
        };
        let floor = match self.due_misses {
            0 => Duration::from_millis(1),
            misses => self.cadence.backoff(Gate::Unconfigured, misses),
        };
        self.due_misses = if due > floor { 0 } else { self.due_misses.saturating_add(1) };
        let due = due.max(floor);
        Some(again.map_or(due, |again| due.min(again)))
    }

    fn state(&self) -> &'static str {
        match self.phase {
            _ if self.parts.standing.is_over() => "stopped",
            Phase::Claiming if !self.may_claim() => "claiming for the last time",
            _ if !self.parts.options.claim.enabled => "disabled",
            _ if !self.parts.standing.wants_heartbeat() => "disabled with the heartbeat",
            _ if self.parts.standing.is_fenced() => "fenced",
            _ if self.parts.standing.is_paused() => "paused",
            Phase::Parked => "parked",
            Phase::Sleeping => "waiting",
            Phase::Lingering => "waiting for what comes right behind",
            Phase::Arming => "waiting for producers at work, to fall asleep",
            Phase::Gathering => "waiting for permits",
            Phase::Claiming => "claiming",
            Phase::Asking => "asking for the next due time",
        }
    }
}
