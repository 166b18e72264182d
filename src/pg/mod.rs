//! PostgreSQL: everything that knows SQL.

pub mod migrate;
pub(crate) mod schema_name;
pub(crate) mod statement;
