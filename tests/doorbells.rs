//! Doorbells on a real server: pumps that never poll, and are woken by whatever comes.
//!
//! A wake that is lost shows: without polls a sleeper looks again after 150 s, and every test here waits for less.
#![allow(clippy::print_stdout, reason = "figures are printed for the reader of a test run")]

mod common;
mod fleet;
mod sql;

#[path = "doorbells/categories.rs"]
mod categories;
#[path = "doorbells/due.rs"]
mod due;
#[path = "doorbells/freed.rs"]
mod freed;
#[path = "doorbells/peers.rs"]
mod peers;
#[path = "doorbells/races.rs"]
mod races;
#[path = "doorbells/rig.rs"]
mod rig;
#[path = "doorbells/wakes.rs"]
mod wakes;
