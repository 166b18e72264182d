//! The suites of the schema and of the pump once more, with every statement through PgBouncer in transaction mode.
//!
//! The rule: the modules are those of the direct binaries, unchanged; `common::database()` knows by the name of this binary that its
//! addresses lead through the pooler, which carries no named statement from one session to another. What rests on a session of its own
//! takes `connect_direct` where it stands. Not here at all: what counts the pages one session touches (`claim_work/cost.rs`), and the
//! suites about the direct session itself. The failure this prevents: a statement that works until somebody puts a pooler in between.
#![allow(clippy::print_stdout, reason = "figures are printed for the reader of a test run")]
#![allow(
    clippy::duplicate_mod,
    reason = "a suite brings its fixtures along; here they all lead to those of this binary"
)]

mod common;
mod fleet;
#[path = "common/work.rs"]
mod work;

#[path = "claim_work/fairness.rs"]
mod claim_work_fairness;
#[path = "claim_work/leases.rs"]
mod claim_work_leases;
#[path = "claim_work/limits.rs"]
mod claim_work_limits;
#[path = "claim_work/never_waits.rs"]
mod claim_work_never_waits;
#[path = "claim_work/order.rs"]
mod claim_work_order;
#[path = "claim_work/refusals.rs"]
mod claim_work_refusals;
#[path = "renew/claims.rs"]
mod renew_claims;
#[path = "renew/leases.rs"]
mod renew_leases;
#[path = "renew/unheld.rs"]
mod renew_unheld;
#[path = "settle/deadlock.rs"]
mod settle_deadlock;
#[path = "settle/epoch_alone.rs"]
mod settle_epoch_alone;
#[path = "settle/fencing.rs"]
mod settle_fencing;
#[path = "settle/verdicts.rs"]
mod settle_verdicts;

#[path = "death_watch_sql.rs"]
mod death_watch_sql;
#[path = "doorbell_sql.rs"]
mod doorbell_sql;
#[path = "eviction_sql.rs"]
mod eviction_sql;
#[path = "leases.rs"]
mod leases;
#[path = "pump.rs"]
mod pump;
#[path = "pump_failures.rs"]
mod pump_failures;
#[path = "record_heartbeat_sql.rs"]
mod record_heartbeat_sql;
#[path = "store_sql.rs"]
mod store_sql;

// What is true behind a pooler only.
#[path = "pooled/killed.rs"]
mod killed;
#[path = "pooled/traces.rs"]
mod traces;
#[path = "pooled/workers.rs"]
mod workers;
