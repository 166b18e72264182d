//! The proof that NOTIFY reaches this instance.
//!
//! ```text
//! prove ──► ring "probe <nonce>" by the producers' route ──► answered ──► wait ──► nothing heard: the session is deaf
//!              │                                                │
//!              └─ cannot be sent: the route is to blame         └─ the nonce is heard, before or after the answer: proven
//! ```
//!
//! The rule: the gate is available only while the last proof has succeeded, and a failure is blamed on whom it belongs to. Who cannot ring
//! says nothing about who listens, so a route that fails costs no session; a session that was rung and heard nothing is ended. The failures
//! this prevents: a listener behind a dead socket, a pooler, or in the wrong database, that polls once in ten seconds for ever; and an
//! alive-lock that is lost because the pool was busy.
//!
//! The own work channel is rung: the very one that producers ring. The probe is the only traffic of an idle gate.

use std::time::Duration;

use actix::prelude::*;
use rand::RngExt;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::NotifyGateActor;
use crate::actor::{Alarm, backoff};
use crate::instance::Gate;
use crate::message::GateReport;
use crate::port::StoreError;

/// What a probe says on the work channel, before its nonce. No doorbell.
const PROBE: &str = "probe ";

/// First and longest pause after a probe that could not be sent.
const ROUTE_PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));

/// First pause between proofs on a session that is deaf and is kept all the same.
const DEAF_PAUSE: Duration = Duration::from_secs(1);

/// Sessions in a row that were deaf from the beginning: from then on the session is not to blame.
const DEAF_SESSIONS: u32 = 2;

const SUSPECT: &str = "pooler suspected: LISTEN accepted, nothing delivered; check that the direct URL leads past any pooler to the \
                       very database that the database URL leads to";

const DEAF: &str = "the session is deaf: what is rung is not delivered to it any more";

/// Where the proofs stand.
#[derive(Debug, Default)]
pub(super) struct Proofs {
    under_way: Option<Trial>,
    trials: u64,
    /// Sets off the next proof.
    next: Alarm,
    /// Ends the wait for the ring.
    limit: Alarm,
    askers: Vec<oneshot::Sender<GateReport>>,
    /// Probes in a row that could not be sent.
    not_sent: u32,
    /// Proofs in a row in which nothing was heard, on sessions that never heard anything.
    deaf: u32,
}

#[derive(Debug)]
struct Trial {
    number: u64,
    payload: String,
    /// How long the ring may take once it was sent.
    limit: Duration,
}

/// Whether this was rung by a proof: no doorbell.
pub(super) fn is_probe(payload: &str) -> bool {
    payload.starts_with(PROBE)
}

impl NotifyGateActor {
    /// Begins a proof, unless one is under way or nothing is listened to yet.
    pub(super) fn prove(&mut self, ctx: &mut Context<Self>) {
        let Some(open) = self.open.as_ref().filter(|open| open.listening.complete) else { return };
        let Some(channel) = open.listening.work.as_ref().filter(|_| self.proofs.under_way.is_none()) else {
            return;
        };
        let gate = &self.parts.gate;
        let limit = if open.proven { gate.probe_timeout() } else { gate.self_test_timeout() };
        let payload = format!("{PROBE}{:016x}{:016x}", self.rng.random::<u64>(), self.rng.random::<u64>());
        self.proofs.next.clear(ctx);
        self.proofs.trials += 1;
        self.counters.probes += 1;
        let number = self.proofs.trials;
        let (route, patience) = (self.parts.route.clone(), gate.probe_timeout());
        let (channel, ring) = (channel.to_string(), payload.clone());
        self.proofs.under_way = Some(Trial { number, payload, limit });
        let sent = async move { timeout(patience, route.ring(channel, ring)).await };
        ctx.spawn(sent.into_actor(self).map(move |sent, act, ctx| {
            let trial = act.proofs.under_way.as_ref().filter(|trial| trial.number == number);
            // It may have been heard, or the session may have ended, before the answer came.
            let Some(limit) = trial.map(|trial| trial.limit) else { return };
            match sent {
                Ok(Ok(())) => act.proofs.limit.set(ctx, limit, Self::deaf),
                Ok(Err(error)) => act.not_sent(&error, ctx),
                Err(_) => act.not_sent(&super::no_answer(patience), ctx),
            }
        }));
    }

    /// Whether this was rung by a proof, of whomever; and if it was the one under way, that is proven.
    pub(super) fn heard_probe(&mut self, payload: &str, ctx: &mut Context<Self>) -> bool {
        if self.proofs.under_way.as_ref().is_some_and(|trial| trial.payload == payload) {
            self.proven(ctx);
        }
        is_probe(payload)
    }

    fn proven(&mut self, ctx: &mut Context<Self>) {
        self.forget_proof(ctx);
        (self.proofs.not_sent, self.proofs.deaf) = (0, 0);
        self.counters.proofs += 1;
        self.health.well();
        if let Some(open) = &mut self.open {
            open.proven = true;
        }
        self.parts.standing.gate_verified(self.keeper);
        self.set_gate(Gate::Available, None, ctx);
        self.prove_in(self.parts.gate.probe_interval(), ctx);
        // Whoever has ended meanwhile is forgotten, and its channel with it.
        self.sync(ctx);
    }

    /// The route is to blame, and the session is kept if it answers.
    fn not_sent(&mut self, error: &StoreError, ctx: &mut Context<Self>) {
        self.forget_proof(ctx);
        self.counters.not_sent += 1;
        self.health.wrong(error);
        self.proofs.not_sent = self.proofs.not_sent.saturating_add(1);
        let (first, longest) = ROUTE_PAUSE;
        let pause = self.spread(backoff(self.proofs.not_sent, first, longest));
        self.set_gate(Gate::Unavailable, Some(&format!("a probe could not be sent: {error}")), ctx);
        self.prove_in(pause, ctx);
        self.check_session(ctx);
    }

    /// It was rung, and nothing was heard.
    fn deaf(&mut self, ctx: &mut Context<Self>) {
        self.forget_proof(ctx);
        self.counters.deaf += 1;
        if self.open.as_ref().is_some_and(|open| open.proven) {
            return self.lost(DEAF, ctx);
        }
        self.proofs.deaf = self.proofs.deaf.saturating_add(1);
        if self.proofs.deaf < DEAF_SESSIONS {
            return self.lost(SUSPECT, ctx);
        }
        self.health.wrong(&SUSPECT);
        // Another session would be as deaf, and each new one would cost the alive-lock.
        self.set_gate(Gate::Unavailable, Some(SUSPECT), ctx);
        let longest = self.parts.gate.probe_interval();
        let pause = backoff(self.proofs.deaf - DEAF_SESSIONS + 1, DEAF_PAUSE.min(longest), longest);
        let pause = self.spread(pause);
        self.prove_in(pause, ctx);
        self.check_session(ctx);
    }

    /// A session that does not answer is ended.
    fn check_session(&mut self, ctx: &mut Context<Self>) {
        self.ask(
            async |session| session.ping().await,
            ctx,
            |act, answer, ctx| {
                if let Err(error) = answer {
                    act.lost(&format!("the direct session does not answer: {error}"), ctx);
                }
            },
        );
    }

    fn prove_in(&mut self, pause: Duration, ctx: &mut Context<Self>) {
        self.proofs.next.set(ctx, pause, |act, ctx| {
            act.proofs.next.rang();
            act.prove(ctx);
        });
    }

    /// Whatever is under way is worth nothing any more, and no other proof follows by itself.
    pub(super) fn forget_proof(&mut self, ctx: &mut Context<Self>) {
        self.proofs.under_way = None;
        self.proofs.next.clear(ctx);
        self.proofs.limit.clear(ctx);
    }

    /// Keeps whoever asked until something is known.
    pub(super) fn ask_for_proof(&mut self, ctx: &mut Context<Self>) -> oneshot::Receiver<GateReport> {
        let (asker, answer) = oneshot::channel();
        self.proofs.askers.push(asker);
        if self.open.is_none() {
            self.connect(ctx);
        } else if self.listen_retry.is_set() {
            self.listen_retry.clear(ctx);
            self.listen(ctx);
        } else {
            self.prove(ctx);
        }
        answer
    }

    /// Something is known.
    pub(super) fn answer_askers(&mut self) {
        for asker in self.proofs.askers.drain(..) {
            // Whoever asked may have gone.
            let _ = asker.send(self.parts.standing.gate_report());
        }
    }
}
