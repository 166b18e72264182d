//! One run: the actors, the end, the verdict.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::claimer::Claimer;
use super::replay::Outcome;
use super::{World, audit, check, load, replay, sampler};
use crate::common::Database;
use crate::work::session;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) seed: u64,
    pub(crate) serialised: bool,
    pub(crate) claimers: u64,
    pub(crate) lasts: Duration,
    /// Ends at the first violation, which is expected.
    pub(crate) hunting: bool,
}

#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) violations: Vec<String>,
    pub(crate) account: String,
}

async fn verdict(world: &World) -> (Vec<String>, Outcome, usize) {
    let db = session(&world.url).await;
    // Operations first: those of later events are in flight, but registered.
    let events = audit::read(&db).await;
    let commits = audit::commits(&db).await;
    let ops = world.ops();
    let outcome = replay::streams(&events, &commits, world.serialised);
    let mut violations = world.violations();
    violations.extend(check::changes(&events, &in_flight_left_out(ops, &events)));
    violations.extend(outcome.violations.iter().cloned());
    (violations, outcome, events.len())
}

/// An operation whose events were read half may have been answered since: its answer is left out.
fn in_flight_left_out(
    mut ops: std::collections::HashMap<i64, super::Op>,
    events: &[audit::Event],
) -> std::collections::HashMap<i64, super::Op> {
    let seen: std::collections::HashSet<_> = events.iter().map(|event| event.op).collect();
    for (number, op) in &mut ops {
        if !seen.contains(number) {
            match op {
                super::Op::Claim { answer, .. } if answer.as_ref().is_some_and(|rows| !rows.is_empty()) => {
                    *answer = None;
                }
                super::Op::Settle { answer, .. } | super::Op::Renew { answer, .. } => *answer = None,
                _ => {}
            }
        }
    }
    ops
}

pub(crate) async fn run(db: &Database, settings: Settings) -> Report {
    let Settings { seed, serialised, claimers, lasts, hunting } = settings;
    let world = Arc::new(World::new(db.url(), seed, serialised, 30 * claimers as i64));
    let (mut actors, mut producers) = (JoinSet::new(), JoinSet::new());
    for number in 0..claimers {
        actors.spawn(Claimer::new(Arc::clone(&world), number).await.live());
    }
    for number in 0..4 {
        producers.spawn(load::produce(Arc::clone(&world), 10 + number));
    }
    for number in 0..2 {
        actors.spawn(load::lock_things(Arc::clone(&world), 20 + number));
    }
    for number in 0..if serialised { 0 } else { 3 } {
        producers.spawn(load::come_late(Arc::clone(&world), 40 + number));
    }
    actors.spawn(load::let_time_pass(Arc::clone(&world), 30));
    let looking = tokio::spawn(sampler::sample(Arc::clone(&world)));

    let start = Instant::now();
    let mut pause = Duration::from_millis(if hunting { 400 } else { 100 });
    while start.elapsed() < lasts && world.violations().is_empty() {
        tokio::time::sleep(pause).await;
        if hunting {
            let looked = Instant::now();
            if !verdict(&world).await.0.is_empty() {
                break;
            }
            // The history grows; reading it must not take the time of those who make it.
            pause = pause.max(3 * looked.elapsed());
        }
    }
    let ran = start.elapsed();
    world.settling.store(true, Ordering::Relaxed);
    // The last commits come before the end can be seen.
    let mut crashed = producers.join_all_caught().await;
    let done = hunting || load::drained(&world).await;
    world.over.store(true, Ordering::Relaxed);
    crashed.extend(actors.join_all_caught().await);
    let samples = looking.await.unwrap_or(0);
    let (mut violations, outcome, events) = verdict(&world).await;
    violations.extend(crashed);
    if !hunting && (!done || outcome.left > 0 || outcome.stored != outcome.finished) {
        violations.push(format!(
            "{} rows were lost: stored {}, finished {}",
            outcome.left, outcome.stored, outcome.finished
        ));
    }
    let account = format!(
        "seed {seed}, {}: {:.1} s, {} rows stored and finished once, {events} changes, {} claims (slowest {:.1} ms), \
         {samples} snapshots, {} finished late and out of order under a lease that had run out",
        if serialised { "producers serialised per stream" } else { "producers free" },
        ran.as_secs_f64(),
        outcome.finished,
        world.claims.load(Ordering::Relaxed),
        world.max_claim_micros.load(Ordering::Relaxed) as f64 / 1000.0,
        outcome.late
    );
    Report { violations, account }
}

trait Caught {
    async fn join_all_caught(self) -> Vec<String>;
}

impl Caught for JoinSet<()> {
    /// Waits for all; an actor that panicked is a finding.
    async fn join_all_caught(mut self) -> Vec<String> {
        let mut found = Vec::new();
        while let Some(ended) = self.join_next().await {
            if let Err(error) = ended {
                found.push(format!("an actor panicked: {error}"));
            }
        }
        found
    }
}
