//! `claim_work` on a real server: what it leases, what it leaves, in which order, at which price, and that it never waits.
#![allow(clippy::print_stdout, reason = "figures are printed for the reader of a test run")]

mod common;
#[path = "common/work.rs"]
mod work;

#[path = "claim_work/cost.rs"]
mod cost;
#[path = "claim_work/fairness.rs"]
mod fairness;
#[path = "claim_work/leases.rs"]
mod leases;
#[path = "claim_work/limits.rs"]
mod limits;
#[path = "claim_work/never_waits.rs"]
mod never_waits;
#[path = "claim_work/order.rs"]
mod order;
#[path = "claim_work/refusals.rs"]
mod refusals;
