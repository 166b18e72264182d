//! Decisions without effects: values in, a decision out.
//!
//! The rule: nothing here reads a clock, waits, or rolls dice of its own; instants and random numbers are handed in. The failure this
//! prevents: a cadence that can only be tested by sleeping, and so is not tested.

pub mod beat;
pub mod coalesce;
pub mod lease;
pub mod poll;
pub mod retry;
pub mod trust;
