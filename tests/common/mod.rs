//! Fixtures of the tests that need a real PostgreSQL.
//!
//! The rule: one server per test binary, one database per test. A database is the unit that advisory locks, NOTIFY and catalogs
//! share, so tests that have one each cannot see one another and run in parallel; a server each would cost a second per test.
//!
//! ```ignore
//! mod common;
//!
//! #[tokio::test]
//! async fn a_row_is_claimed_once() {
//!     let db = common::database().await;
//!     let client = db.connect().await;
//!     let pump = WorkPump::builder(db.url());
//! }
//! ```
//!
//! A test that stops or kills the server takes one of its own: [`PrivateServer`]. Settings: `common::server_with(&[…])`.
//!
//! Suites run on two routes: as their own binary straight to the server, and as modules of `tests/pooled.rs` through a PgBouncer in
//! transaction mode. The binary decides, no test does. What needs a session of its own takes [`Database::connect_direct`] and says why.
#![allow(
    dead_code,
    unused_imports,
    unreachable_pub,
    reason = "each test binary uses its own part of the fixtures"
)]

pub mod bouncer;
pub mod proxy;
pub mod server;
pub mod typed;
pub mod wait;

// By way of the root: a suite that is loaded as a module of another binary shares that binary's server, pooler and types.
pub use crate::common::bouncer::Bouncer;
pub use crate::common::server::{
    Database, PrivateServer, connect, database, empty_database, server_with, shared,
};

/// How long the long tests run: 1 in CI, 10 for the figures that are published (`WORKPUMP_TEST_SCALE`).
pub fn scale() -> u32 {
    let value = std::env::var("WORKPUMP_TEST_SCALE").unwrap_or_else(|_| "1".to_owned());
    let scale = value.parse().ok().filter(|scale| *scale > 0);
    scale.unwrap_or_else(|| panic!("WORKPUMP_TEST_SCALE must be a whole number from 1, not {value:?}"))
}

/// Options for a pump that polls so often that no test has to wait for it.
pub fn quick() -> workpump::Options {
    let mut options = workpump::Options::default();
    options.claim.polling_interval_milliseconds = 20;
    options.claim.polling_max_interval_milliseconds = 100;
    // Also while NOTIFY is proven.
    options.claim.notify_healthy_polling_interval_milliseconds = None;
    options
}
