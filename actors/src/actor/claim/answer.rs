//! What the answer of a claim means.
//!
//! The rule: rows that came are taken in hand, each on its permit; a claim whose outcome is unknown is recovered until it can no longer be
//! carried out. The failure this prevents: rows leased to this instance that nobody here knows of.

use std::collections::HashMap;
use std::time::Duration;

use actix::prelude::*;
use rand::RngExt;
use tokio::sync::OwnedSemaphorePermit;

use super::ClaimActor;
use super::bell::Outcome;
use crate::actor::now;
use crate::delivery::{Behind, Delivery, Lease};
use crate::message::{BeatNow, Dispatch, Evicted, HandBack, PingNow};
use crate::port::{Claimed, StoreError};
use crate::work::OrderKey;

/// Contended claims retried at once, in a row, before the cadence takes over.
const QUICK_RETRIES: u32 = 3;

/// How long after it was sent a claim whose answer was lost may still be carried out by the server. Longer than the call deadline of any
/// store: only a recovery after this time is known to have found everything.
const LOST_CLAIM_HORIZON: Duration = Duration::from_secs(30);

/// The answer of one claim.
pub(super) struct Answer {
    /// When a recovery before it was sent, and how many rows it brought.
    pub(super) recovered: Option<(std::time::Instant, u64)>,
    /// Whether the instance's standing asked for that recovery.
    pub(super) asked: bool,
    /// When it was sent; `None`: the recovery before it failed.
    pub(super) sent_at: Option<std::time::Instant>,
    pub(super) result: Result<Claimed, StoreError>,
}

impl ClaimActor {
    pub(super) fn answered(
        &mut self,
        permits: OwnedSemaphorePermit,
        answer: Answer,
        ctx: &mut Context<Self>,
    ) {
        let Answer { recovered, asked, sent_at, result } = answer;
        if let Some((recovery_sent_at, rows)) = recovered {
            self.counters.recovered += rows;
            self.lost_claim.take_if(|lost| recovery_sent_at >= *lost + LOST_CLAIM_HORIZON);
        } else if asked {
            self.parts.standing.recover();
        }
        let asked = permits.num_permits();
        let (again, outcome) = match result {
            Ok(claimed) if claimed.works.is_empty() => {
                self.nothing();
                drop(permits);
                (false, Outcome::Nothing)
            }
            Ok(claimed) => {
                if !self.sleeps_on(&claimed, asked) {
                    // Awake: from now on producers need not ring.
                    self.disarm(ctx);
                }
                (self.take(permits, sent_at.unwrap_or_else(now), claimed, asked), Outcome::Rows)
            }
            Err(error) => {
                drop(permits);
                if sent_at.is_some() && error.outcome_is_unknown() {
                    self.lost_claim = sent_at;
                }
                if self.fail(&error) {
                    let pause = Duration::from_micros(self.rng.random_range(5_000..25_000));
                    self.sleep(pause, ctx);
                    return;
                }
                (false, Outcome::Error)
            }
        };
        self.rest(again, outcome, ctx);
    }

    /// A claim went well and brought nothing.
    fn nothing(&mut self) {
        self.answered_well();
        // Only the first look of a sleep is a poll of the cadence.
        if self.bell.stage.is_first() {
            self.empty_polls = self.empty_polls.saturating_add(1);
        }
        self.counters.empty += 1;
    }

    fn answered_well(&mut self) {
        self.health.well();
        self.contended = 0;
        self.counters.startup_catch_up = 1;
    }

    /// Takes claimed rows in hand. Returns whether to claim again at once.
    fn take(
        &mut self,
        mut permits: OwnedSemaphorePermit,
        sent_at: std::time::Instant,
        claimed: Claimed,
        asked: usize,
    ) -> bool {
        self.answered_well();
        let Claimed { works, has_more } = claimed;
        let rows = works.len();
        self.empty_polls = 0;
        self.due_misses = 0;
        self.counters.rows += rows as u64;
        let lease = Lease::new(sent_at, &self.parts.renewals);
        let mut deliveries = Vec::with_capacity(rows);
        for work in works {
            let Some(permit) = permits.split(1) else {
                tracing::error!(asked, rows, "the store leased more rows than it was asked for");
                self.lost_claim = Some(sent_at);
                break;
            };
            deliveries.push(Delivery::new(work, permit, &self.parts.in_flight, &lease));
        }
        drop(permits);
        let again = rows >= asked || has_more;
        mark_runs(&mut deliveries, again, self.parts.options.dispatch.stream_run);
        if self.parts.standing.is_evicted() {
            // They are leased to a burnt id: whoever evicted it hands them back.
            drop(deliveries);
            return again;
        }
        // From now on there is something to lose.
        self.parts.probe.do_send(PingNow);
        if self.parts.standing.is_fenced() || self.parts.standing.is_over() {
            self.counters.handed_back += deliveries.len() as u64;
            self.parts.hand_back.do_send(HandBack { deliveries });
        } else {
            self.parts.dispatch.do_send(Dispatch { deliveries });
        }
        again
    }

    /// Notes an error. Returns whether to try again almost at once.
    fn fail(&mut self, error: &StoreError) -> bool {
        if self.health.wrong(error) {
            tracing::warn!(%error, in_a_row = self.health.in_a_row(), "claim failed");
        }
        if matches!(error, StoreError::Contended(_)) && self.contended < QUICK_RETRIES {
            self.contended += 1;
            return self.may_claim();
        }
        self.contended = 0;
        self.empty_polls = self.empty_polls.saturating_add(1);
        match error {
            StoreError::NotRegistered(_) => self.parts.beat_now.do_send(BeatNow),
            StoreError::Evicted(instance) => {
                self.parts.standing.evict();
                self.parts.evicted.do_send(Evicted(*instance));
            }
            _ => {}
        }
        false
    }
}

/// Marks the last row of every run: the store stops at `stream_run` rows of an order key, and a claim that was cut short may have stopped
/// anywhere. The failure this prevents: a deep stream that goes on only once per polling interval, or per lease where nobody polls.
fn mark_runs(deliveries: &mut [Delivery], cut: bool, stream_run: u32) {
    let mut runs: HashMap<OrderKey, (u32, usize)> = HashMap::new();
    for (at, delivery) in deliveries.iter().enumerate() {
        if let Some(key) = delivery.order_key() {
            let run = runs.entry(key).or_default();
            *run = (run.0 + 1, at);
        }
    }
    for (rows, last) in runs.into_values() {
        deliveries[last].expect_behind(if cut || rows >= stream_run {
            Behind::More
        } else {
            Behind::Unknown
        });
    }
}
