//! `settle_work` on a real server: only the holder of a claim changes anything, and a whole flush is one call.

mod common;
#[path = "common/work.rs"]
mod work;

#[path = "settle/deadlock.rs"]
mod deadlock;
#[path = "settle/fencing.rs"]
mod fencing;
#[path = "settle/verdicts.rs"]
mod verdicts;
