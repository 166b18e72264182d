//! Claiming and settling.

use crate::pg::schema_name::SchemaName;

/// Leases rows and returns them with their bodies.
///
/// `$1` instance, `$2` rows at most, `$3` lease in seconds, `$4` partition count, `$5` categories, `$6` run length, `$7` bytes at most.
pub(crate) fn claim(schema: &SchemaName) -> String {
    format!(
        "SELECT category, work_id, stream_id, partition_number, claim_epoch, attempts, crash_count, lease_expiry, seq, name, \
         message_type, event_id, payload, metadata FROM {}.claim_work($1, $2, $3, $4, $5, $6, $7)",
        schema.identifier()
    )
}

/// Settles a flush; returns the fenced rows.
///
/// `$1` instance, then arrays: `$2` categories, `$3` ids, `$4` epochs, `$5` verdicts, `$6` pauses in milliseconds, `$7` reasons,
/// `$8` errors; `$9` keep completed rows.
pub(crate) fn settle(schema: &SchemaName) -> String {
    format!(
        "SELECT category, work_id FROM {}.settle_work($1, $2, $3, $4, $5, $6, $7, $8, $9)",
        schema.identifier()
    )
}

/// Hands back up to 1 000 rows that are leased to `$1` and not among `$2` (ids) with `$3` (epochs).
pub(crate) fn release_unheld(schema: &SchemaName) -> String {
    format!("SELECT {}.release_unheld($1, $2, $3)", schema.identifier())
}

/// Milliseconds until the next row becomes claimable by time alone, or no row. `$1` instance.
pub(crate) fn next_claimable(schema: &SchemaName) -> String {
    format!(
        "SELECT ceil(extract(epoch FROM t - clock_timestamp()) * 1000)::bigint FROM {}.next_claimable_at($1) AS t WHERE isfinite(t)",
        schema.identifier()
    )
}

/// Takes the arm lock of `$1` for this session, waiting `$2` milliseconds at most, as a full one or not (`$3`); true when it was taken.
/// And the backend that holds it.
pub(crate) fn arm(schema: &SchemaName) -> String {
    format!("SELECT {}.wh_arm($1, $2, $3), pg_catalog.pg_backend_pid()", schema.identifier())
}

/// The holder of the arm lock of `$1` is full, or is so no more (`$2`); false when it has to be asked again.
pub(crate) fn set_full(schema: &SchemaName) -> String {
    format!("SELECT {}.wh_set_full($1, $2)", schema.identifier())
}

/// Gives the arm lock of `$1` back, which was taken as a full one or not (`$2`).
pub(crate) fn disarm(schema: &SchemaName) -> String {
    format!("SELECT {}.wh_disarm($1, $2)::text", schema.identifier())
}

/// Rings, for each category that `$1` runs, a peer that runs it too and sleeps idle; whether there was any.
pub(crate) fn pass_ring(schema: &SchemaName) -> String {
    format!("SELECT cardinality({}.wh_pass_ring($1)) > 0", schema.identifier())
}
