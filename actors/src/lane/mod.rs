//! Running claimed rows: lanes, workers, and the desk where results wait.
//!
//! The rule: strictly one row at a time per order key, across keys as many as there are permits, and user code fenced in on its own
//! runtime. All of it outlives the actor that feeds it. The failures this prevents: one slow, hung or panicking handler that stops rows it
//! has nothing to do with, and rows that run twice, or side by side, because an actor died.

mod attempt;
mod crew;
mod desk;
mod fresh;
mod lane_rows;
mod lease_book;
mod unit;
mod worker;
mod yard;

pub(crate) use crew::{Crew, CrewParts, DrainBegan, Mode};
pub(crate) use lease_book::Looked;
