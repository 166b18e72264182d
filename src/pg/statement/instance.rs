//! Membership.

use crate::pg::schema_name::SchemaName;

/// One heartbeat; false = evicted.
///
/// `$1` instance, `$2` service, `$3` host, `$4` process, `$5` metadata, `$6` declared interval, `$7` lock declared, `$8` accepts work,
/// `$9` the categories it runs.
pub(crate) fn beat(schema: &SchemaName) -> String {
    format!("SELECT {}.record_heartbeat($1, $2, $3, $4, $5, $6, $7, $8, $9)", schema.identifier())
}

/// A graceful leave. `$1` instance.
pub(crate) fn deregister(schema: &SchemaName) -> String {
    format!("SELECT {}.deregister_instance($1)::text", schema.identifier())
}
