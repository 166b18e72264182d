//! Running claimed rows: lanes, workers, and the desk where results wait.
//!
//! The rule: strictly one row at a time per order key, across keys as many as there are permits, and user code fenced in on its own
//! runtime. The failure this prevents: one slow, hung or panicking handler that stops rows it has nothing to do with.

mod attempt;
mod crew;
mod desk;
mod lane_rows;
mod unit;
mod worker;
mod yard;

pub(crate) use crew::{Crew, CrewParts, Mode};
