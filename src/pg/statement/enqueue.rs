//! Storing work inside the caller's transaction.
//!
//! Rows go in by ascending id, each with the `seq` of its place in the caller's batch. In the caller's order two producers that store
//! the same messages the other way round would deadlock on the keys; in id order alone a stream would lose the order of its batch. A
//! message that exists already is left alone.

use crate::pg::schema_name::SchemaName;

/// The `seq` of each row: as many numbers as there are rows, taken once, and the one at the row's place.
fn seq(schema: &SchemaName, table: &str) -> String {
    let schema = schema.identifier();
    let name = format!("{schema}.{table}_seq_seq").replace('\'', "''");
    format!("(ARRAY(SELECT nextval('{name}') FROM generate_series(1, cardinality($8))))[place]")
}

/// Stores outbox messages; returns the ids that are new.
///
/// Arrays: `$1` ids in ascending order, `$2` streams, `$3` types, `$4` destinations, `$5` payloads, `$6` metadata, `$7` due times, `$8`
/// places in the caller's batch, from 1.
pub(crate) fn outbox(schema: &SchemaName) -> String {
    format!(
        "INSERT INTO {}.wh_outbox (message_id, seq, stream_id, message_type, destination, payload, metadata, scheduled_for) \
         SELECT id, {}, stream, type, destination, payload, metadata, due \
         FROM unnest($1, $2, $3, $4, $5, $6, $7, $8) AS m (id, stream, type, destination, payload, metadata, due, place) \
         ON CONFLICT (message_id) DO NOTHING RETURNING message_id",
        schema.identifier(),
        seq(schema, "wh_outbox")
    )
}

/// Stores inbox messages that were never seen before; returns their ids. Arrays as for the outbox, with handlers for destinations.
pub(crate) fn inbox(schema: &SchemaName) -> String {
    let seq = seq(schema, "wh_inbox");
    let schema = schema.identifier();
    format!(
        "WITH message AS ( \
             SELECT * FROM unnest($1, $2, $3, $4, $5, $6, $7, $8) AS m (id, stream, type, handler, payload, metadata, due, place) \
         ), fresh AS ( \
             INSERT INTO {schema}.wh_message_deduplication (message_id) \
             SELECT id FROM message ORDER BY id ON CONFLICT (message_id) DO NOTHING RETURNING message_id \
         ) \
         INSERT INTO {schema}.wh_inbox (message_id, seq, stream_id, message_type, handler_name, payload, metadata, scheduled_for) \
         SELECT id, {seq}, stream, type, handler, payload, metadata, due FROM message JOIN fresh ON fresh.message_id = message.id \
         ORDER BY id ON CONFLICT (message_id) DO NOTHING RETURNING message_id"
    )
}

/// Fails in a transaction in which a statement has failed, and does nothing in any other.
pub(crate) const STILL_IN_ORDER: &str = "SELECT 1";
