//! PostgreSQL, the only room that speaks SQL. It implements the engine's ports and knows no actor.
//!
//! | file | concern |
//! |---|---|
//! | `schema_name.rs` | the schema's name, checked and quoted |
//! | `limits.rs` | what a session asks of the server when it starts |
//! | `session.rs` | sessions, who drives them, what they may wait for |
//! | `direct.rs` | sessions that are proved to lead past every pooler |
//! | `kept_session.rs` | a session that one duty keeps to itself |
//! | `claim_session.rs` | the session that claims and holds the arm lock |
//! | `pool.rs` | the small pool for settlements |
//! | `statement/` | every SQL text |
//! | `row.rs`, `fault.rs` | columns and errors to values |
//! | `work_store.rs`, `renewal_store.rs` | the engine's ports: work and its leases |
//! | `instance_store.rs`, `direct_session.rs`, `death_watch.rs`, `sweep_store.rs` | the engine's ports: members, alive and dead |
//! | `producers_route.rs` | the engine's port by which it proves that NOTIFY reaches it |
//! | `place.rs` | which database of which server a session leads to |
//! | `migrate.rs` | the schema itself |
//!
//! Tests of this room on a real server stand in `tests/pg/`: it is not public, and they see it from inside.

pub(crate) mod claim_session;
pub(crate) mod death_watch;
pub(crate) mod direct;
pub(crate) mod direct_session;
pub(crate) mod fault;
pub(crate) mod instance_store;
pub(crate) mod kept_session;
pub(crate) mod limits;
pub(crate) mod migrate;
pub(crate) mod place;
pub(crate) mod pool;
pub(crate) mod producers_route;
pub(crate) mod renewal_store;
pub(crate) mod row;
pub(crate) mod schema_name;
pub(crate) mod session;
pub(crate) mod statement;
pub(crate) mod sweep_store;
pub(crate) mod work_store;

#[cfg(test)]
#[path = "../../tests/pg/mod.rs"]
mod tests;
