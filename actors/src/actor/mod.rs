//! The actors, and the rhythm they share.
//!
//! ```text
//!            message                       answer of the one operation under way
//!               │                                        │
//!               ▼                                        ▼
//!        note it (a flag, a state) ──► step: may I? what does the policy say? ──► start one operation,
//!               ▲                                                                  or arm the one alarm
//!               └──────────────────────────── alarm ◄──────────────────────────────────────┘
//! ```
//!
//! The rule: every actor has one duty, at most one operation under way for it, and one alarm that is re-armed from now, never a periodic
//! timer. An error is counted, told, and waited out with a growing pause; it never ends a loop. The failures this prevents: ticks that
//! burst after a stall, two overlapping claims, and a loop that died of one bad answer.
//!
//! An actor may die and be made again from the same parts. So nothing that must not be lost is in it: what is known about the instance
//! stands in its `Standing`, rows and results stand in structures that every incarnation is given. Every `Drain` may be asked for again.
//!
//! No actor here names another one. Whom they tell is handed in as a `Recipient` by the tree.

pub mod claim;
pub mod dispatch;
pub mod heartbeat;
pub mod lease_renewal;
pub mod notify_gate;
pub mod settle;
pub mod stale_sweep;
pub mod warden;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::rc::Rc;
use std::time::Duration;

use actix::prelude::*;
use tokio::time::Instant;

use crate::message::Account;
use crate::port::StoreError;

/// Now, as the policies count it: the runtime's clock, which tests can drive, and the time the machine was suspended.
pub(crate) fn now() -> std::time::Instant {
    crate::clock::now()
}

/// One alarm of an actor.
///
/// The framework polls a cancelled timer once more before it forgets it, so each setting has a number, and only the last one rings.
#[derive(Debug, Default)]
pub(crate) struct Alarm {
    handle: Option<SpawnHandle>,
    setting: Rc<Cell<u64>>,
}

impl Alarm {
    /// Sets it anew, from now; an older setting is forgotten.
    pub(crate) fn set<A, F>(&mut self, ctx: &mut Context<A>, after: Duration, ring: F)
    where
        A: Actor<Context = Context<A>>,
        F: FnOnce(&mut A, &mut Context<A>) + 'static,
    {
        self.clear(ctx);
        let (current, mine) = (Rc::clone(&self.setting), self.setting.get());
        self.handle = Some(ctx.run_later(after, move |actor, ctx| {
            if current.get() == mine {
                ring(actor, ctx);
            }
        }));
    }

    /// Forgets it.
    pub(crate) fn clear<A: Actor<Context = Context<A>>>(&mut self, ctx: &mut Context<A>) {
        self.setting.set(self.setting.get() + 1);
        if let Some(handle) = self.handle.take() {
            ctx.cancel_future(handle);
        }
    }

    /// It rang.
    pub(crate) fn rang(&mut self) {
        self.handle = None;
    }

    /// Whether it is set.
    pub(crate) fn is_set(&self) -> bool {
        self.handle.is_some()
    }
}

/// How an actor's duty is going.
#[derive(Debug, Default)]
pub(crate) struct Health {
    last_error: Option<String>,
    last_success: Option<Instant>,
    errors: u64,
    in_a_row: u32,
}

impl Health {
    /// Something went well.
    pub(crate) fn well(&mut self) {
        self.last_success = Some(Instant::now());
        self.in_a_row = 0;
    }

    /// Something went wrong. Returns whether to say so in the log: at the first error in a row, then ever more rarely.
    pub(crate) fn wrong(&mut self, error: &impl Display) -> bool {
        self.last_error = Some(error.to_string());
        self.errors += 1;
        self.in_a_row = self.in_a_row.saturating_add(1);
        self.in_a_row.is_power_of_two()
    }

    /// Errors in a row.
    pub(crate) fn in_a_row(&self) -> u32 {
        self.in_a_row
    }

    /// The account of an actor in this health.
    pub(crate) fn account(
        &self,
        name: &'static str,
        state: &'static str,
        counters: impl IntoIterator<Item = (&'static str, u64)>,
    ) -> Account {
        let mut counters: BTreeMap<_, _> = counters.into_iter().collect();
        counters.insert("errors", self.errors);
        Account {
            name,
            state,
            counters,
            notes: BTreeMap::new(),
            last_error: self.last_error.clone(),
            last_success_seconds_ago: self.last_success.map(|at| at.elapsed().as_secs_f64()),
        }
    }
}

/// The answer of a call, or an error when it takes longer than `limit`.
pub(crate) async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    tokio::time::timeout(limit, call).await.unwrap_or_else(|_| {
        Err(StoreError::Unavailable(format!("no answer within {} ms", limit.as_millis())))
    })
}

/// The pause before retry number `retry` (from 1): `first` doubling up to `cap`.
pub(crate) fn backoff(retry: u32, first: Duration, cap: Duration) -> Duration {
    first.saturating_mul(1 << retry.saturating_sub(1).min(16)).min(cap)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_doubles_up_to_its_cap_for_any_number_of_retries() {
        let pause = |retry| backoff(retry, Duration::from_millis(250), Duration::from_secs(30)).as_millis();
        assert_eq!([pause(0), pause(1), pause(2), pause(3)], [250, 250, 500, 1_000]);
        assert_eq!([pause(8), pause(9), pause(u32::MAX)], [30_000, 30_000, 30_000]);
    }

    #[test]
    fn errors_in_a_row_are_told_ever_more_rarely() {
        let mut health = Health::default();
        let told: Vec<bool> = (0..9).map(|_| health.wrong(&"x")).collect();
        assert_eq!(told, [true, true, false, true, false, false, false, true, false]);
        health.well();
        assert!(health.wrong(&"x"));
    }

    #[cfg(feature = "testing")]
    #[test]
    fn an_alarm_that_was_set_anew_at_the_very_moment_it_was_due_does_not_ring() {
        use crate::testing::in_virtual_time;

        const PAUSE: Duration = Duration::from_millis(10);

        #[derive(Message)]
        #[rtype(result = "Vec<u128>")]
        struct SetAnew;

        struct Sleeper(Alarm, Instant, Vec<u128>);

        impl Sleeper {
            fn set(&mut self, ctx: &mut Context<Self>) {
                self.0.set(ctx, PAUSE, |act, _| {
                    act.0.rang();
                    act.2.push(act.1.elapsed().as_millis());
                });
            }
        }

        impl Actor for Sleeper {
            type Context = Context<Self>;

            fn started(&mut self, ctx: &mut Self::Context) {
                self.set(ctx);
            }
        }

        impl Handler<SetAnew> for Sleeper {
            type Result = Vec<u128>;

            fn handle(&mut self, _: SetAnew, ctx: &mut Self::Context) -> Self::Result {
                self.set(ctx);
                self.2.clone()
            }
        }

        in_virtual_time(async {
            let due = tokio::time::sleep(PAUSE);
            tokio::pin!(due);
            // Registered before the alarm, so that the message is there when the alarm is due.
            assert!(futures_util::poll!(&mut due).is_pending());
            let sleeper = Sleeper(Alarm::default(), Instant::now(), Vec::new()).start();
            due.await;
            assert!(sleeper.send(SetAnew).await.expect("alive").is_empty());
            tokio::time::sleep(PAUSE / 2).await;
            assert!(sleeper.send(SetAnew).await.expect("alive").is_empty());
            tokio::time::sleep(PAUSE * 2).await;
            assert_eq!(sleeper.send(SetAnew).await.expect("alive"), [25]);
        });
    }
}
