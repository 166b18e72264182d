//! Dispatching: hands claimed rows to the crew on the handler runtime and passes the results on.
//!
//! The rule: this actor never runs user code and never waits for it; it watches the deadlines. The failure this prevents: a handler that
//! blocks the thread on which claiming, settling and draining live.
//!
//! Nothing that runs is held here: rows, results and leases are the crew's, which goes on when this actor dies and is found by the next
//! one as it is.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;

use crate::delivery::{Renewals, Settlement};
use crate::lane::{Crew, DrainBegan, Looked, Mode};
use crate::message::{
    Account, Dispatch, Drain, Drained, Evicted, Fence, HandBack, Observe, PingNow, Settle, Unfence,
};
use crate::options::OnFence;
use crate::standing::Standing;

use super::{Alarm, Health, now};

/// How often results are fetched, and parked rows looked at, while workers are busy and ring no bell.
const ROUND: Duration = Duration::from_millis(5);

/// How often parked rows are looked at.
const PARKED_ROUND: Duration = Duration::from_millis(250);

/// How often leases are looked at, at least, while there are any: the time a resume after a suspend may go unnoticed, and the notice that
/// the handler of a lost lease gets before it is dropped.
const GLANCE: Duration = Duration::from_secs(1);

/// How long before the end of a drain handlers are told to stop, at most.
const LAST_CALL: Duration = Duration::from_secs(2);

/// What the dispatching actor is made of.
#[derive(Clone)]
pub struct DispatchParts {
    /// Who runs the rows: the same for every incarnation.
    pub(crate) crew: Arc<Crew>,
    /// What is known about this instance.
    pub standing: Arc<Standing>,
    /// Where renewals are asked for.
    pub renewals: Arc<Renewals>,
    /// Writes results.
    pub settle: Recipient<Settle>,
    /// Brings the proof without which nothing may start.
    pub probe: Recipient<PingNow>,
    /// What becomes of running handlers while the instance is fenced.
    pub on_fence: OnFence,
    /// How long a drain waits for handlers.
    pub drain_deadline: Duration,
}

impl std::fmt::Debug for DispatchParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DispatchParts").field("standing", &self.standing).finish_non_exhaustive()
    }
}

/// There is something on the desk.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct Fetch;

/// Runs claimed rows.
pub struct DispatchActor {
    crew: Arc<Crew>,
    standing: Arc<Standing>,
    renewals: Arc<Renewals>,
    settle: Recipient<Settle>,
    probe: Recipient<PingNow>,
    on_fence: OnFence,
    drain_deadline: Duration,
    deadline: Alarm,
    deadline_at: Option<std::time::Instant>,
    /// Leases lost so far, as far as this actor knows.
    lost: u64,
    round: Alarm,
    health: Health,
}

impl std::fmt::Debug for DispatchActor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DispatchActor").field("in_hand", &self.crew.in_hand()).finish_non_exhaustive()
    }
}

impl Actor for DispatchActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let address = ctx.address();
        self.crew.desk().set_bell(move || address.do_send(Fetch));
        self.agree(ctx);
        self.look_round(ctx);
    }
}

impl DispatchActor {
    /// In front of this crew, ready at once.
    pub fn new(parts: DispatchParts) -> Self {
        Self {
            crew: parts.crew,
            standing: parts.standing,
            renewals: parts.renewals,
            settle: parts.settle,
            probe: parts.probe,
            on_fence: parts.on_fence,
            drain_deadline: parts.drain_deadline,
            deadline: Alarm::default(),
            deadline_at: None,
            lost: 0,
            round: Alarm::default(),
            health: Health::default(),
        }
    }

    /// Has the crew do what the instance's standing allows.
    fn agree(&mut self, ctx: &mut Context<Self>) {
        if self.standing.is_evicted() {
            self.crew.set_mode(Mode::Dead);
            self.cancel_all();
            self.crew.forget_unstarted();
            drop(self.crew.desk().close());
        } else if self.standing.is_over() {
            if self.standing.is_draining() {
                self.crew.begin_drain();
            }
            self.crew.set_mode(Mode::Draining);
            self.crew.release_unstarted();
            self.fetch();
        } else if self.standing.is_fenced() {
            self.crew.set_mode(Mode::Held);
            if self.on_fence == OnFence::Cancel {
                self.cancel_all();
                // Their leases were told to stop: they would start only to be told the same.
                self.crew.release_unstarted();
            }
        } else {
            self.run_if_trusted();
        }
        self.watch_next(ctx);
    }

    /// Starts rows, or asks for the proof that is missing.
    fn run_if_trusted(&self) {
        if self.crew.is_trusted() {
            self.crew.set_mode(Mode::Run);
        } else if self.crew.in_hand() > 0 {
            self.crew.set_mode(Mode::Held);
            self.standing.doubt();
            self.probe.do_send(PingNow);
        }
    }

    /// Passes on what has finished. Nothing may come between: what was fetched is nowhere else.
    fn fetch(&mut self) {
        let settlements = self.crew.desk().fetch();
        self.pass_on(settlements);
    }

    fn pass_on(&mut self, settlements: Vec<Settlement>) {
        let results = settlements.len() as u64;
        if results > 0 {
            self.settle.do_send(Settle { settlements });
            self.crew.counters.fetched.add(results);
            self.health.well();
        }
    }

    /// Fetches, looks at parked rows, and goes on looking as long as there is need.
    fn look_round(&mut self, ctx: &mut Context<Self>) {
        self.fetch();
        let may_run = !self.standing.is_fenced() && !self.standing.is_over();
        if may_run && self.crew.mode() == Mode::Held {
            self.run_if_trusted();
        }
        let parked = self.crew.retry_parked();
        self.keep_round(parked, ctx);
    }

    /// Keeps looking while rows run where they stand (a blocked thread rings no bell) or are parked.
    fn keep_round(&mut self, parked: bool, ctx: &mut Context<Self>) {
        if self.round.is_set() {
            return;
        }
        let pause = match (self.crew.workers() > 0, parked) {
            (true, _) => ROUND,
            (false, true) => PARKED_ROUND,
            (false, false) => return,
        };
        self.round.set(ctx, pause, |act, ctx| {
            act.round.rang();
            act.look_round(ctx);
        });
    }

    /// Sets the alarm for whatever is next to be done about a lease. It also rings now and then while there are leases at all: a timer
    /// stands still while the machine is suspended.
    fn watch_next(&mut self, ctx: &mut Context<Self>) {
        let Some(next) = self.crew.leases().next() else {
            self.deadline_at = None;
            return self.deadline.clear(ctx);
        };
        let now = now();
        let next = next.min(now + GLANCE);
        if self.deadline_at.is_some_and(|set| set <= next) {
            return;
        }
        self.deadline_at = Some(next);
        self.deadline.set(ctx, next.saturating_duration_since(now), |act, ctx| {
            act.deadline.rang();
            act.deadline_at = None;
            act.look_at_leases();
            act.watch_next(ctx);
        });
    }

    /// Asks for renewals that are due, tells handlers whose lease is about to end to stop, hands back rows that were not started in time,
    /// and ends what went on waiting until its lease had ended or was lost.
    fn look_at_leases(&mut self) {
        let now = now();
        let lost = self.renewals.counters().lost;
        let newly_lost = std::mem::replace(&mut self.lost, lost) != lost;
        if newly_lost {
            self.crew.leases().expect_lost(now);
        }
        let Looked { due, late, stopped } = self.crew.leases().look(now);
        self.renewals.offer(due);
        self.crew.counters.cancelled.add(stopped.into());
        if late > 0 || newly_lost {
            self.crew.sweep_expired();
        }
        if stopped > 0 {
            tracing::warn!(
                handlers = stopped,
                "handlers reached the end of their lease and were told to stop"
            );
        }
    }

    fn cancel_all(&mut self) {
        let running = self.crew.leases().cancel_all();
        self.crew.counters.cancelled.add(running.into());
    }

    fn state(&self) -> &'static str {
        match self.crew.mode() {
            Mode::Run if self.crew.in_hand() == 0 => "idle",
            Mode::Run => "running",
            Mode::Held => "fenced",
            Mode::Draining => "draining",
            Mode::Dead => "stopped",
        }
    }
}

impl Handler<Dispatch> for DispatchActor {
    type Result = ();

    fn handle(&mut self, Dispatch { deliveries }: Dispatch, ctx: &mut Self::Context) {
        self.crew.accept(deliveries);
        if self.crew.mode() == Mode::Run && !self.crew.is_trusted() {
            self.crew.hold_untrusted();
        }
        self.watch_next(ctx);
        self.keep_round(true, ctx);
    }
}

impl Handler<HandBack> for DispatchActor {
    type Result = ();

    fn handle(&mut self, HandBack { deliveries }: HandBack, _: &mut Self::Context) {
        self.crew.hand_back(deliveries);
        self.fetch();
    }
}

impl Handler<Fetch> for DispatchActor {
    type Result = ();

    fn handle(&mut self, _: Fetch, ctx: &mut Self::Context) {
        self.look_round(ctx);
    }
}

impl Handler<Fence> for DispatchActor {
    type Result = ();

    /// What runs goes on: its lease may still be good, and its result is fenced anyway.
    fn handle(&mut self, _: Fence, ctx: &mut Self::Context) {
        self.agree(ctx);
    }
}

impl Handler<Unfence> for DispatchActor {
    type Result = ();

    fn handle(&mut self, _: Unfence, ctx: &mut Self::Context) {
        self.agree(ctx);
        self.keep_round(true, ctx);
    }
}

impl Handler<Evicted> for DispatchActor {
    type Result = ();

    fn handle(&mut self, Evicted(instance): Evicted, ctx: &mut Self::Context) {
        if instance != self.crew.instance() {
            return;
        }
        self.standing.evict();
        self.agree(ctx);
    }
}

impl Handler<Drain> for DispatchActor {
    type Result = ResponseActFuture<Self, Drained>;

    /// Asked again after a crash, it goes on: with the same deadline, and counting from the same beginning.
    fn handle(&mut self, _: Drain, ctx: &mut Self::Context) -> Self::Result {
        let began = self.crew.begin_drain();
        self.standing.drain();
        self.agree(ctx);
        let end = self.crew.drain_end(self.drain_deadline);
        let last_call = end - LAST_CALL.min(self.drain_deadline / 10);
        let crew = Arc::clone(&self.crew);
        let until_last_call = async move { tokio::time::timeout_at(last_call, crew.idle()).await.is_ok() };
        Box::pin(
            until_last_call
                .into_actor(self)
                .then(move |idle, act, ctx: &mut Self::Context| {
                    if !idle {
                        act.cancel_all();
                        act.watch_next(ctx);
                    }
                    let crew = Arc::clone(&act.crew);
                    let until_end = async move { tokio::time::timeout_at(end, crew.idle()).await };
                    until_end.into_actor(act)
                })
                .map(move |_, act, _| act.drained(began)),
        )
    }
}

impl DispatchActor {
    /// The end of a drain: whoever still runs is abandoned.
    fn drained(&mut self, began: DrainBegan) -> Drained {
        self.fetch();
        self.crew.set_mode(Mode::Dead);
        let last = self.crew.desk().close();
        self.pass_on(last);
        let abandoned = self.crew.in_hand() as u64;
        if abandoned > 0 {
            self.crew.abort_tasks();
            tracing::error!(
                abandoned,
                "handlers did not finish before the drain deadline and were abandoned"
            );
        }
        Drained {
            released: self.crew.counters.released.get() - began.released,
            finished: self.crew.counters.finished() - began.finished,
            abandoned,
            ..Drained::default()
        }
    }
}

impl Handler<Observe> for DispatchActor {
    type Result = MessageResult<Observe>;

    fn handle(&mut self, _: Observe, _: &mut Self::Context) -> Self::Result {
        let counters = &self.crew.counters;
        let account: Account = self.health.account(
            "dispatch",
            self.state(),
            [
                ("rows", counters.accepted.get()),
                ("in_hand", self.crew.in_hand() as u64),
                ("results", counters.fetched.get()),
                ("completed", counters.completed.get()),
                ("retried", counters.retried.get()),
                ("dead_lettered", counters.dead_lettered.get()),
                ("panicked", counters.panicked.get()),
                ("released", counters.released.get()),
                ("cancelled_at_deadline", counters.cancelled.get()),
                ("late_results", counters.late.get()),
                ("late_unstarted", counters.unstarted.get()),
                ("expired_unstarted", counters.expired.get()),
                ("abandoned", counters.abandoned.get()),
                ("aborted_at_lease_end", counters.aborted.get()),
                ("lost_while_running", counters.lost.get()),
                ("overlapping", counters.overlapping.get()),
                ("discarded_results", self.crew.desk().discarded()),
            ],
        );
        MessageResult(account)
    }
}
