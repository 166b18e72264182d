//! PostgreSQL, the only room that speaks SQL. It implements the engine's ports and knows no actor.
//!
//! | file | concern |
//! |---|---|
//! | `schema_name.rs` | the schema's name, checked and quoted |
//! | `session.rs` | sessions, who drives them, what they may wait for |
//! | `pool.rs` | the small pool for settlements |
//! | `statement/` | every SQL text |
//! | `row.rs`, `fault.rs` | columns and errors to values |
//! | `work_store.rs`, `instance_store.rs` | the engine's ports |
//! | `migrate.rs` | the schema itself |

pub(crate) mod fault;
pub(crate) mod instance_store;
pub(crate) mod migrate;
pub(crate) mod pool;
pub(crate) mod row;
pub(crate) mod schema_name;
pub(crate) mod session;
pub(crate) mod statement;
pub(crate) mod work_store;
