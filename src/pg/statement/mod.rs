//! Every SQL text of the library, named and described, one file a concern. Nowhere else in Rust is there SQL.
//!
//! Texts are built once per pump, with the schema's quoted name in front of every function and table, so they need no `search_path`
//! and work the same on a session of one's own and behind a transaction-mode pooler.

pub(crate) mod direct;
pub(crate) mod doctor;
pub(crate) mod enqueue;
pub(crate) mod instance;
pub(crate) mod liveness;
pub(crate) mod migrate;
pub(crate) mod status;
pub(crate) mod work;
