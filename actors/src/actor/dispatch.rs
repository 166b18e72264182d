//! Dispatching: hands claimed rows to the crew on the handler runtime and passes the results on.
//!
//! The rule: this actor never runs user code and never waits for it; it watches the deadlines. The failure this prevents: a handler that
//! blocks the thread on which claiming, settling and draining live.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use tokio::runtime::Handle;
use tokio::time::Instant;

use crate::delivery::{InFlight, Lease};
use crate::instance::InstanceId;
use crate::lane::{Crew, CrewParts, Mode};
use crate::message::{
    Account, Dispatch, Drain, Drained, Evicted, Fence, Halt, HandBack, Observe, Settle, Unfence,
};
use crate::options::DispatchOptions;
use crate::policy::retry::RetryPolicy;
use crate::runner::Runner;
use crate::work::Category;

use super::{Alarm, Health, now};

/// How often results are fetched, and parked rows looked at, while workers are busy and ring no bell.
const ROUND: Duration = Duration::from_millis(5);

/// How often parked rows are looked at.
const PARKED_ROUND: Duration = Duration::from_millis(250);

/// How long before the end of a drain handlers are told to stop, at most.
const LAST_CALL: Duration = Duration::from_secs(2);

/// What the dispatching actor is made of.
pub struct DispatchParts {
    /// The knobs.
    pub options: DispatchOptions,
    /// Who runs the rows.
    pub instance: InstanceId,
    /// One runner per category.
    pub runners: Vec<(Category, Arc<dyn Runner>)>,
    /// Where handlers run.
    pub handlers: Handle,
    /// What is held in this process.
    pub in_flight: Arc<InFlight>,
    /// Writes results.
    pub settle: Recipient<Settle>,
    /// Seed of the jitter.
    pub seed: u64,
}

impl std::fmt::Debug for DispatchParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DispatchParts").field("options", &self.options).finish_non_exhaustive()
    }
}

/// There is something on the desk.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct Fetch;

/// Runs claimed rows.
pub struct DispatchActor {
    crew: Arc<Crew>,
    settle: Recipient<Settle>,
    patience: Duration,
    /// Leases under which rows may still be running, by deadline.
    leases: VecDeque<Arc<Lease>>,
    /// Leases past their deadline under which rows may still be running, by end.
    ending: VecDeque<Arc<Lease>>,
    deadline: Alarm,
    deadline_at: Option<std::time::Instant>,
    round: Alarm,
    health: Health,
    rows: u64,
    cancelled: u64,
    results: u64,
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
    }
}

impl DispatchActor {
    /// Ready to run rows at once.
    pub fn new(parts: DispatchParts) -> Self {
        let threads = parts.handlers.metrics().num_workers();
        let crew = Crew::new(CrewParts {
            instance: parts.instance,
            runners: parts.runners,
            handlers: parts.handlers,
            threads,
            retry: RetryPolicy::new(&parts.options),
            in_flight: parts.in_flight,
            seed: parts.seed,
        });
        Self {
            crew,
            settle: parts.settle,
            patience: Duration::from_secs(parts.options.drain_deadline_seconds.into()),
            leases: VecDeque::new(),
            ending: VecDeque::new(),
            deadline: Alarm::default(),
            deadline_at: None,
            round: Alarm::default(),
            health: Health::default(),
            rows: 0,
            cancelled: 0,
            results: 0,
        }
    }

    /// Passes on what has finished.
    fn fetch(&mut self) {
        let settlements = self.crew.desk().fetch();
        if !settlements.is_empty() {
            self.health.well();
            self.results += settlements.len() as u64;
            self.settle.do_send(Settle { settlements });
        }
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
            act.fetch();
            let parked = act.crew.retry_parked();
            act.keep_round(parked, ctx);
        });
    }

    fn watch(&mut self, lease: Arc<Lease>, ctx: &mut Context<Self>) {
        // Nobody else holds a lease whose rows are all done.
        if self.leases.len() % 64 == 63 {
            self.leases.retain(|lease| Arc::strong_count(lease) > 1);
        }
        let at = self.leases.partition_point(|other| other.window().deadline() <= lease.window().deadline());
        self.leases.insert(at, lease);
        self.watch_next(ctx);
    }

    fn watch_next(&mut self, ctx: &mut Context<Self>) {
        for leases in [&mut self.leases, &mut self.ending] {
            while leases.front().is_some_and(|lease| Arc::strong_count(lease) == 1) {
                leases.pop_front();
            }
        }
        let deadline = self.leases.front().map(|lease| lease.window().deadline());
        let end = self.ending.front().map(|lease| lease.window().end());
        let next = deadline.into_iter().chain(end).min();
        if next == self.deadline_at {
            return;
        }
        self.deadline_at = next;
        let Some(next) = next else { return self.deadline.clear(ctx) };
        self.deadline.set(ctx, next.saturating_duration_since(now()), |act, ctx| {
            act.deadline.rang();
            act.deadline_at = None;
            act.enforce_deadlines();
            act.end_leases();
            act.watch_next(ctx);
        });
    }

    /// Ends handlers that went on waiting until their lease had ended, so that they hold neither a permit nor their lane for ever.
    fn end_leases(&mut self) {
        let now = now();
        while self.ending.front().is_some_and(|lease| lease.window().has_ended(now)) {
            let Some(lease) = self.ending.pop_front() else { break };
            lease.end();
        }
    }

    /// Its handlers were told to stop: now they are watched until the lease ends.
    fn watch_end(&mut self, lease: Arc<Lease>) {
        let at = self.ending.partition_point(|other| other.window().end() <= lease.window().end());
        self.ending.insert(at, lease);
    }

    /// Tells handlers whose lease is about to end to stop, and hands back rows that were not started in time.
    fn enforce_deadlines(&mut self) {
        let now = now();
        while self.leases.front().is_some_and(|lease| lease.window().deadline() <= now) {
            let Some(lease) = self.leases.pop_front() else { break };
            let running = lease.cancel();
            if running > 0 {
                tracing::warn!(running, "handlers reached the end of their lease and were told to stop");
            }
            self.cancelled += u64::from(running);
            self.watch_end(lease);
        }
        self.crew.sweep_expired();
    }

    fn cancel_all(&mut self) {
        for lease in std::mem::take(&mut self.leases) {
            self.cancelled += u64::from(lease.cancel());
            self.watch_end(lease);
        }
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
        let Some(first) = deliveries.first() else { return };
        self.rows += deliveries.len() as u64;
        let lease = Arc::clone(first.lease());
        self.crew.accept(deliveries);
        self.watch(lease, ctx);
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
        self.fetch();
        let parked = self.crew.retry_parked();
        self.keep_round(parked, ctx);
    }
}

impl Handler<Fence> for DispatchActor {
    type Result = ();

    /// What runs goes on: its lease may still be good, and its result is fenced anyway.
    fn handle(&mut self, _: Fence, _: &mut Self::Context) {
        self.crew.set_mode(Mode::Held);
    }
}

impl Handler<Unfence> for DispatchActor {
    type Result = ();

    fn handle(&mut self, _: Unfence, ctx: &mut Self::Context) {
        self.crew.set_mode(Mode::Run);
        self.keep_round(true, ctx);
    }
}

impl Handler<Halt> for DispatchActor {
    type Result = ();

    fn handle(&mut self, _: Halt, _: &mut Self::Context) {
        self.crew.set_mode(Mode::Draining);
        self.crew.release_unstarted();
        self.fetch();
    }
}

impl Handler<Evicted> for DispatchActor {
    type Result = ();

    fn handle(&mut self, _: Evicted, ctx: &mut Self::Context) {
        self.crew.set_mode(Mode::Dead);
        self.cancel_all();
        self.watch_next(ctx);
        self.crew.forget_unstarted();
        drop(self.crew.desk().close());
    }
}

impl Handler<Drain> for DispatchActor {
    type Result = ResponseActFuture<Self, Drained>;

    fn handle(&mut self, _: Drain, _: &mut Self::Context) -> Self::Result {
        let released_before = self.crew.counters.released.get();
        let finished_before = self.crew.counters.finished();
        self.crew.set_mode(Mode::Draining);
        self.crew.release_unstarted();
        self.fetch();
        let end = Instant::now() + self.patience;
        let last_call = end - LAST_CALL.min(self.patience / 10);
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
                .map(move |_, act, _| act.drained(released_before, finished_before)),
        )
    }
}

impl DispatchActor {
    /// The end of a drain: whoever still runs is abandoned.
    fn drained(&mut self, released_before: u64, finished_before: u64) -> Drained {
        self.fetch();
        self.crew.set_mode(Mode::Dead);
        let last = self.crew.desk().close();
        let abandoned = self.crew.in_hand() as u64;
        if !last.is_empty() {
            self.results += last.len() as u64;
            self.settle.do_send(Settle { settlements: last });
        }
        if abandoned > 0 {
            tracing::error!(
                abandoned,
                "handlers did not finish before the drain deadline and were abandoned"
            );
            self.crew.abort_tasks();
        }
        Drained {
            released: self.crew.counters.released.get() - released_before,
            finished: self.crew.counters.finished() - finished_before,
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
                ("rows", self.rows),
                ("in_hand", self.crew.in_hand() as u64),
                ("results", self.results),
                ("completed", counters.completed.get()),
                ("retried", counters.retried.get()),
                ("dead_lettered", counters.dead_lettered.get()),
                ("panicked", counters.panicked.get()),
                ("released", counters.released.get()),
                ("cancelled_at_deadline", self.cancelled),
                ("late_results", counters.late.get()),
                ("late_unstarted", counters.unstarted.get()),
                ("expired_unstarted", counters.expired.get()),
                ("abandoned", counters.abandoned.get()),
                ("aborted_at_lease_end", counters.aborted.get()),
                ("overlapping", counters.overlapping.get()),
                ("discarded_results", self.crew.desk().discarded()),
            ],
        );
        MessageResult(account)
    }
}
