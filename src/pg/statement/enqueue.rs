//! Storing work inside the caller's transaction.
//!
//! Arrays are unnested in the order given, so `seq` follows the order of the batch. A message that exists already is left alone.

use crate::pg::schema_name::SchemaName;

/// Stores outbox messages; returns the ids that are new.
///
/// Arrays: `$1` ids, `$2` streams, `$3` types, `$4` destinations, `$5` payloads, `$6` metadata, `$7` due times.
pub(crate) fn outbox(schema: &SchemaName) -> String {
    format!(
        "INSERT INTO {}.wh_outbox (message_id, stream_id, message_type, destination, payload, metadata, scheduled_for) \
         SELECT id, stream, type, destination, payload, metadata, due \
         FROM unnest($1, $2, $3, $4, $5, $6, $7) WITH ORDINALITY AS m (id, stream, type, destination, payload, metadata, due, n) \
         ORDER BY n ON CONFLICT (message_id) DO NOTHING RETURNING message_id",
        schema.identifier()
    )
}

/// Stores inbox messages that were never seen before; returns their ids. Arrays as for the outbox, with handlers for destinations.
pub(crate) fn inbox(schema: &SchemaName) -> String {
    let schema = schema.identifier();
    format!(
        "WITH message AS ( \
             SELECT * FROM unnest($1, $2, $3, $4, $5, $6, $7) WITH ORDINALITY AS m (id, stream, type, handler, payload, metadata, due, n) \
         ), fresh AS ( \
             INSERT INTO {schema}.wh_message_deduplication (message_id) \
             SELECT id FROM message ORDER BY id ON CONFLICT (message_id) DO NOTHING RETURNING message_id \
         ) \
         INSERT INTO {schema}.wh_inbox (message_id, stream_id, message_type, handler_name, payload, metadata, scheduled_for) \
         SELECT id, stream, type, handler, payload, metadata, due FROM message JOIN fresh ON fresh.message_id = message.id \
         ORDER BY n ON CONFLICT (message_id) DO NOTHING RETURNING message_id"
    )
}

/// Fails in a transaction in which a statement has failed, and does nothing in any other.
pub(crate) const STILL_IN_ORDER: &str = "SELECT 1";
