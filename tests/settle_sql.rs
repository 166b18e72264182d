//! `settle_work` on a real server: only the holder of a claim changes anything, and a whole flush is one call.
#![allow(clippy::print_stdout, reason = "figures are printed for the reader of a test run")]

mod common;
#[path = "common/work.rs"]
mod work;

#[path = "settle/deadlock.rs"]
mod deadlock;
#[path = "settle/epoch_alone.rs"]
mod epoch_alone;
#[path = "settle/fencing.rs"]
mod fencing;
#[path = "settle/verdicts.rs"]
mod verdicts;
