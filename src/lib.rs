//! A reliable work pump for actix services on PostgreSQL.

#[cfg(feature = "embedded")]
pub mod embedded;

pub mod pg;
