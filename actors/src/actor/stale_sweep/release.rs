//! Handing back what the evicted held, pass after pass.
//!
//! The rule: a pass looks at 250 rows at most, and after it comes a pause three times as long as it took, so that claims get their turn; when
//! nothing came back although something is left, somebody is at those rows, and the pause grows. The failure this prevents: a million
//! rows that come back in one breath, with everybody's claims behind them.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use tokio::time::Instant;

use super::{CALL_DEADLINE, FIRST_PAUSE, MAX_PAUSE, StaleSweepActor, within};
use crate::actor::{Alarm, backoff};
use crate::port::StoreError;

/// Rows a pass at most: what a claim may have to share the server with, in one go. A pass has little to do besides, so four small ones cost
/// no more than a large one.
const ROWS: u32 = 250;

/// The pause after a pass that brought rows back, as a multiple of what the pass took.
const BREATHS: u32 = 3;

/// The longest such pause.
const LONGEST_BREATH: Duration = Duration::from_millis(300);

/// The release under way.
#[derive(Debug, Default)]
pub(super) struct Release {
    alarm: Alarm,
    wanted: bool,
    busy: bool,
    /// Passes without a row, or with an error, in a row.
    vain: u32,
    pub(super) released: u64,
    pub(super) passes: u64,
}

impl Release {
    /// There is something to hand back.
    pub(super) fn want(&mut self) {
        self.wanted = true;
    }

    /// Whether something is being handed back.
    pub(super) fn is_at_it(&self) -> bool {
        self.wanted || self.busy
    }

    pub(super) fn clear(&mut self, ctx: &mut Context<StaleSweepActor>) {
        self.wanted = false;
        self.alarm.clear(ctx);
    }
}

impl StaleSweepActor {
    /// Begins a pass, unless one is under way or its pause is not over.
    pub(super) fn step_release(&mut self, ctx: &mut Context<Self>) {
        let release = &mut self.release;
        if release.busy || release.alarm.is_set() || !release.wanted || !self.may_judge() {
            return;
        }
        self.release.busy = true;
        self.release.passes += 1;
        let store = Arc::clone(&self.parts.sweep);
        let began = Instant::now();
        let pass = async move { within(CALL_DEADLINE, store.release_pass(ROWS)).await };
        ctx.spawn(pass.into_actor(self).map(move |answer, act, ctx| {
            act.release.busy = false;
            act.passed(answer, began.elapsed(), ctx);
        }));
    }

    fn passed(&mut self, answer: Result<(u64, bool), StoreError>, took: Duration, ctx: &mut Context<Self>) {
        let pause = match answer {
            Ok((rows, left)) => {
                self.health.well();
                self.released(rows);
                self.release.wanted = left;
                self.release.vain = if rows > 0 { 0 } else { self.release.vain + 1 };
                if rows > 0 { (took * BREATHS).min(LONGEST_BREATH) } else { self.pause() }
            }
            Err(error) => {
                self.release.vain += 1;
                self.wrong(&error, "handing back the rows of a dead peer failed and goes on later");
                self.pause()
            }
        };
        if !self.release.wanted || !self.may_judge() {
            return;
        }
        self.release.alarm.set(ctx, pause, |act, ctx| {
            act.release.alarm.rang();
            act.step_release(ctx);
        });
    }

    fn pause(&self) -> Duration {
        backoff(self.release.vain, FIRST_PAUSE, MAX_PAUSE)
    }
}
