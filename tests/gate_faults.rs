//! The notify gate under faults: sessions that are killed, doors that refuse, networks that swallow, servers that restart.
//!
//! The rule: whatever happened, the gate comes back by itself, says each change once, and until it has it is as if there were none. In
//! most of these tests nobody polls for an hour, so what is claimed in time was claimed because somebody was woken.
#![allow(clippy::print_stdout, reason = "figures are printed for the reader of a test run")]

mod common;
mod fleet;

#[path = "gate/network.rs"]
mod network;
#[path = "gate/processes.rs"]
mod processes;
#[path = "gate/rig.rs"]
mod rig;
#[path = "gate/server.rs"]
mod server;
#[path = "gate/sessions.rs"]
mod sessions;
#[path = "gate/wrong_address.rs"]
mod wrong_address;
