//! The engine of [workpump](https://docs.rs/workpump): it knows rows, leases and time, and never SQL.

pub mod instance;
pub mod options;
pub mod port;
pub mod runner;
pub mod work;
