//! The death watch, the backstop sweep, and renewals.

use crate::pg::schema_name::SchemaName;

/// Waits for the death of the peer that `$1` watches, `$2` seconds at most; `$3` with a census first. Returns peer and instant, or nulls.
///
/// A procedure, to be called outside a transaction block: it commits every 100 ms.
pub(crate) fn watch(schema: &SchemaName) -> String {
    format!("CALL {}.wh_watch($1, pg_catalog.make_interval(secs => $2), NULL, NULL, $3)", schema.identifier())
}

/// The verdict of `$1` on the suspect `$2`, seen at `$3`, after a grace of `$4` seconds, as a word.
pub(crate) fn evict_suspect(schema: &SchemaName) -> String {
    format!("SELECT {}.wh_evict_suspect($1, $2, $3, $4)", schema.identifier())
}

/// Evicts stale peers, never `$1`; who that was, null when another instance is at it, and whether rows wait to be handed back.
pub(crate) fn sweep(schema: &SchemaName) -> String {
    format!("SELECT evicted, unfinished FROM {}.wh_sweep_stale($1)", schema.identifier())
}

/// Hands back up to `$1` rows of evicted instances; how many, and whether something is left.
pub(crate) fn release_pass(schema: &SchemaName) -> String {
    format!("SELECT released, unfinished FROM {}.wh_release_pass($1)", schema.identifier())
}

/// Renews leases: `$1` instance, then arrays: `$2` categories, `$3` ids, `$4` epochs; `$5` lease in seconds. What is lost does not come back.
pub(crate) fn renew(schema: &SchemaName) -> String {
    format!("SELECT category, work_id, renewed FROM {}.renew_work($1, $2, $3, $4, $5)", schema.identifier())
}
